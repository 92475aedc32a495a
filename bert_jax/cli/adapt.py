"""The command ``bert-jax adapt``: continued pretraining of a model on text of a domain."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from bert_jax.cli.arguments import ConfigArg, Corpora, given_fields
from bert_jax.cli.pretrain import Pretrain
from bert_jax.command.flags import DirectoryArg
from bert_jax.config import Config, DataConfig, EvaluationConfig, ModelConfig, ObjectiveConfig, Phase, StartConfig
from bert_jax.data import mixture as mixture_lib
from bert_jax.errors import require
from bert_jax.field_validation import Positive, Rate

if TYPE_CHECKING:
    from bert_jax.training import loop
    from bert_jax.training.monitoring.event_hook import OnEvent


def adaptation_config() -> Config:
    """The defaults of the command: rows of full sentences, no pair objective (both as in RoBERTa), linear decay to 0.

    The model, the number of steps and the warmup depend on MODEL and the corpora.
    """
    return Config(
        name="adapted",
        model=ModelConfig(max_positions=10**6),  # the model's own are known when it is read
        objective=ObjectiveConfig(pair="none"),
        data=DataConfig(format="full_sentences", example_end="row"),
        phases=(Phase(steps=1, warmup_steps=0),),
        evaluation=EvaluationConfig(batch_size=8),
        start=StartConfig(source="MODEL"),
    )


@dataclass(frozen=True, kw_only=True)
class Adapt(Pretrain):
    """Continue the pretraining of MODEL on text of a domain, and report whether it helped.

    This is continued, or domain-adaptive, pretraining. MODEL's held-out metrics before and after, on the domain and on
    general text, are printed and written to WORKDIR/results.json. The corpora must have been built with MODEL's
    tokenizer. The same command continues a stopped run. Every field of a config can be set; those of the model are by
    default MODEL's, and the schedule follows from --epochs.
    """

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, or a model with an MLM head (docs/conversion.md has the formats)."""
    general: Corpora
    """Corpus of text like that of MODEL's first pretraining, on which forgetting is measured; may be repeated, like
    --corpus."""
    replay: Rate = 0.1
    """Share of the training rows that come from general text. 0: none."""
    epochs: Positive | None = None
    """Passes over the tokens of the domain. Default: 1; --phases.0.steps instead sets the number of steps."""
    json: bool = False
    """Print the results as JSON instead of a table."""
    config: ConfigArg = field(default_factory=adaptation_config)
    command = "adapt"
    rare_flags = ("--profile", "--on-event", "--restart", "--start.source", "--model.num-layers", "--model.hidden-size")
    rare_flags += ("--model.num-heads", "--model.vocab-size", "--phases.0.steps")

    def train(
        self, mixture: list[mixture_lib.CorpusWeight], window: tuple[int, int] | None, on_event: "OnEvent"
    ) -> "loop.Progress":
        """Score, train or continue the run, and score again.

        Args:
          mixture: the corpora of the domain.
          window, on_event: as of `Pretrain`.
        """
        from bert_jax.convert import adaptation
        from bert_jax.doctor import machine_checks
        from bert_jax.training import pretraining
        from bert_jax.training.param_paths import params_sha256

        given = given_fields(self.words)
        require(
            given.isdisjoint(("start.source", "init_from")), "--start.source: the run starts from MODEL: leave it out"
        )
        require(
            self.epochs is None or "phases.0.steps" not in given,
            "--epochs and --phases.0.steps contradict each other: give one",
        )
        general = [mixture_lib.parse_corpus_weight(text, "--general") for text in self.general]
        texts = adaptation.AdaptationCorpora(mixture, general)
        adaptation.check_corpora(texts)
        config = adaptation.run_config(self.config, self.model, given, texts, self.replay, self.epochs or 1.0)
        parts = adaptation.training_mixture(texts, self.replay, config.data.mixture_exponent)
        machine_checks.check_memory(config, self.micro_batch, self.workdir)
        pretraining.check_run(config, parts, self.workdir)  # before minutes of scoring
        scorer = adaptation.Scorer(config, texts)
        initial = scorer.read_initial()
        sha256 = params_sha256(initial.params)
        adaptation.check_initial(self.workdir, self.model, sha256)
        before = scorer.score_initial(initial)

        def announce() -> None:
            adaptation.write_initial(self.workdir, sha256)
            self.print_summary(config, parts)

        progress = pretraining.pretrain(
            config,
            parts,
            self.workdir,
            profile=window,
            micro_batch=self.micro_batch,
            restart=self.restart,
            on_event=on_event,
            announce=announce,
            load_initial_params=lambda config, tokenizer: initial,
        )
        if progress.ended:
            after = scorer.score_run(self.workdir)
            values = adaptation.results(config, texts, self.replay, progress, before, after)
            adaptation.write_results(self.workdir, values, sha256)
        return progress

    def print_end(self, progress: "loop.Progress") -> None:
        """Print the results."""
        from bert_jax.convert import adaptation

        values = adaptation.read_results(self.workdir)
        print(json.dumps(values) if self.json else adaptation.summary(values))
