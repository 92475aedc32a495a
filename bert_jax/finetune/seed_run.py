"""The fine-tuning run of one seed: packed batches, config, initial parameters, training, predictions."""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    FinetuneConfig,
    LogConfig,
    ObjectiveConfig,
    RecoveryConfig,
    StartConfig,
    TaskHead,
)
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.translate import NativeModel
from bert_jax.data.batch import SpecialIds
from bert_jax.distributed.agreement import barrier, compute_and_broadcast, is_first
from bert_jax.finetune.class_weights import class_weights
from bert_jax.finetune.cls_statistics import fit_cls_norm_to_task
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.example_rows import ExampleRows
from bert_jax.finetune.finetuning_task import ALL_BUT_ADAPTERS, ENCODER, FineTuning
from bert_jax.finetune.initial_params import fit_params
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.task_data import (
    SELECTION,
    Metrics,
    TaskData,
    baseline_score,
    correct_examples,
    labelled_tests,
    metric_prefix,
    score,
)
from bert_jax.model import bert
from bert_jax.storage.files import make_directory_if_local, write_atomic
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.divergence import DivergedError
from bert_jax.training.implementation import choose_implementation
from bert_jax.training.job import RunData, has_checkpoint, intact_checkpoint, params_and_phase, run_job
from bert_jax.training.micro_batch import choose_accumulations
from bert_jax.training.pretraining_task import heads_of
from bert_jax.training.run_directory.checkpoint import Checkpoints, checkpoint_directory
from bert_jax.training.run_directory.lost_checkpoints import check_no_lost_checkpoints
from bert_jax.training.run_directory.metrics import read_metrics
from bert_jax.training.run_directory.workdir import matching_config
from bert_jax.training.sharding import device_kind, round_up_to_shards
from bert_jax.training.shared_programs import MakePrograms
from bert_jax.training.state import InitialParams

PREDICTIONS, BEST_EPOCH = "predictions", "best_epoch.json"
LONG_RUN = 300
"""Steps from which a run is worth compiling a step for each of several numbers of rows."""
TOKENS_PER_EVALUATION = 4096
SAVES = 10
"""Least number of checkpoints of a run, so that a killed one loses a tenth of its steps at most."""


class SeedResult(NamedTuple):
    """The result of the run of one seed."""

    seed: int
    score: float
    """Mean of the task's main metrics; NaN if the run diverged."""
    failed: bool
    """Whether the score is not above that of the best constant prediction, or the run diverged."""
    metrics: Metrics
    correct: np.ndarray = np.zeros(0, bool)
    """`correct_examples` of all dev splits; empty if the run diverged."""
    test_score: float | None = None
    """As `score`, of test splits with labels, computed once after training; None: there are none."""
    test_metrics: Metrics = {}  # noqa: RUF012 (not changed)
    best_epoch: dict[str, float] = {}  # noqa: RUF012 (not changed)
    """With `selection_share`: the step and the epoch of the weights that were kept, and their score on the held-out
    examples of train; empty: the last step counts."""
    class_f1: dict[str, Metrics] = {}  # noqa: RUF012 (not changed)
    """By split with labels: F1 of each class; empty if examples have no classes."""

    @property
    def diverged(self) -> bool:
        """Whether the run diverged, so that it has no score."""
        return bool(np.isnan(self.score))

    def to_dict(self) -> dict[str, Any]:
        """Plain values without `correct`, and without what there is not of test, the best epoch and F1 of classes.

        The score of a run that diverged is None.
        """
        values = self._asdict() | {"score": None if self.diverged else self.score, "diverged": self.diverged}
        optional = ("test_score", "test_metrics", "best_epoch", "class_f1")
        unused = {"correct", *(name for name in optional if values[name] in (None, {}))}
        return {name: value for name, value in values.items() if name not in unused}


class SourceEncoder(NamedTuple):
    """The model to fine-tune, in memory."""

    model: NativeModel
    tokenizer: Tokenizer
    path: str
    sha256: str
    """Of its config and parameters."""


class FinetuneRun:
    """The run of one seed."""

    def __init__(
        self,
        encoder: SourceEncoder,
        task: str,
        data: TaskData,
        data_path: str,
        options: FinetuneOptions,
        seed: int,
        mesh: Mesh,
        make_programs: MakePrograms,
        nested: TaskData | None = None,
    ):
        """Packs the batches; compiles nothing yet.

        Args:
          encoder: the source; with `keep_head` its head has the labels of the task.
          task: name of the task.
          data: of the task.
          data_path: its directory.
          options: with the recipe's defaults filled in.
          seed: of the run.
          mesh: of the run.
          make_programs: as in `finetune`.
          nested: with `selection_share`, the data whose train lacks the examples of its split `SELECTION`, which is
            scored after every epoch instead of dev.
        """
        assert options.steps is not None and options.batch_size is not None
        self.encoder, self.data, self.options, self.seed = encoder, data, options, seed
        self.nested = nested
        self._task_name, tokenizer = task, encoder.tokenizer
        shares = {data.train.sha256: 1.0}
        self._run_data = RunData(shares, [data_path], tokenizer.to_json(), tokenizer.fingerprint)
        self._special_ids = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
        self._seq_len = self._row_length(data.train)
        train = self._rows((nested or data).train)
        row_counts = _row_counts(train.row_counts(options.steps, options.batch_size), mesh)
        config = self.make_config(row_counts[-1], train.batches_per_epoch(options.batch_size))
        self.config = choose_implementation(config, device_kind(mesh))
        scored = [name for name, split in data.splits.items() if split.is_scored] if nested is None else [SELECTION]
        source = nested or data
        evaluated = {
            metric_prefix(name): (self._rows(source.splits[name].examples), functools.partial(source.metrics, name))
            for name in scored
        }
        process = jax.process_index(), jax.process_count()
        self.task = self.make_task(
            self.config, heads_of(self.config), options.batch_size, train, row_counts, evaluated, process
        )
        self.programs = make_programs(self.task, mesh)

    def check_directories(self, directories: Mapping[int, StoredPath]) -> None:
        """Check that the directories of all seeds can be used; nothing is written.

        Raises:
          UserError: one holds another run or other files.
        """
        for seed, directory in directories.items():
            config = dataclasses.replace(self.config, seed=seed)
            if matching_config(directory, config, self._run_data.shares, self._run_data.paths) is not None:
                check_no_lost_checkpoints(directory)

    def train(self, directory: StoredPath) -> SeedResult | None:
        """Train in a directory, or continue its run, and write predictions.

        Returns:
          the result; None: SIGTERM stopped the run, which was saved.

        Raises:
          UserError: the directory holds another run or other files.
        """
        if self.nested is None or not (directory / BEST_EPOCH).exists():
            accumulations = choose_accumulations(self.programs, jax.process_count())
            initial = None if has_checkpoint(directory) else self.initial_params()
            try:
                progress = run_job(self.programs, accumulations, directory, self._run_data, initial=initial)
            except DivergedError as error:
                print(f"warning: seed {self.seed}: {error}", file=sys.stderr)
                return SeedResult(self.seed, float("nan"), True, {})
            if not progress.ended:
                return None
            if self.nested is not None:
                self._keep_best_epoch(directory)
        result, logits = self._score(directory)
        if is_first():
            predictions = directory / PREDICTIONS
            make_directory_if_local(predictions)
            self.data.write_predictions(predictions, logits)
        return result

    def make_config(self, rows: int, steps_per_epoch: int) -> Config:
        """The config of the run, for batches of this many rows."""
        options, model = self.options, self.encoder.model
        frozen = ENCODER if options.freeze_encoder else ALL_BUT_ADAPTERS if options.adapter_size else ()
        assert options.batch_size is not None and options.max_length is not None and options.steps is not None
        most = max(1, options.steps // SAVES) if options.keep == 1 else steps_per_epoch
        save_every, keep = options.save_every or min(steps_per_epoch, most), options.keep
        if options.selection_share is not None:  # every epoch is kept until the best is known
            save_every, keep = steps_per_epoch, -(-options.steps // steps_per_epoch)
        return Config(
            name=f"finetune_{self._task_name}",
            model=options.model_config(model.config),
            objective=ObjectiveConfig(pair="none"),
            data=DataConfig(format="full_sentences"),
            optimizer=options.optimizer_config(),
            phases=(options.phase(rows, self._seq_len, frozen),),
            checkpoint=CheckpointConfig(every=save_every, keep=keep),
            log=LogConfig(every=max(1, steps_per_epoch // 20)),
            evaluation=EvaluationConfig(
                every=steps_per_epoch, batch_size=max(1, TOKENS_PER_EVALUATION // self._seq_len)
            ),
            # A run that does not learn is reported as failed; it is not rolled back.
            recovery=RecoveryConfig(spike=None, max_rollbacks=0),
            start=StartConfig(source=self.encoder.path),
            finetune=FinetuneConfig(
                task=self._task_name,
                head=self._head(),
                family=model.family,
                batch_examples=options.batch_size,
                max_length=options.max_length,
                new_head=not options.keep_head,
                new_layers=options.new_layers,
                class_weights=class_weights(self._task_name, options, self.data),
                label_smoothing=options.label_smoothing,
                flags=options.flags(),
                data_sha256=self.data.train.sha256,
                source_sha256=self.encoder.sha256,
            ),
            seed=self.seed,
        )

    def _head(self) -> TaskHead:
        options, model = self.options, self.encoder.model
        if options.keep_head:
            assert model.heads.task is not None
            return model.heads.task
        head = FAMILIES[model.family].new_task_head(self.data.kind, self.data.labels)
        reads = options.pooling or head.reads
        return dataclasses.replace(head, reads=reads, mix=options.mix, cls_norm=options.cls_norm)

    def make_task(self, *fields: Any) -> FineTuning:
        """The task, from its fields."""
        return FineTuning(*fields)

    def initial_params(self) -> InitialParams:
        """Parameters of the source and new ones of the head, on the host.

        New ones depend on the source, too: an encoder that was fine-tuned with this seed does not get the head again
        that it was trained with.
        """
        key = jax.random.fold_in(jax.random.key(self.seed), int(self.encoder.sha256[:8], 16))
        fresh = bert.init(self.config.model, key, heads_of(self.config))
        source, options = self.encoder.model.params, self.options
        params, names = fit_params(source, fresh, new_layers=options.new_layers, new_head=not options.keep_head)
        if is_first():
            new = f"; initialised at random: {', '.join(names)}" if names else ""
            print(f"starting from {self.encoder.path}{new}", file=sys.stderr)
        if self.task.head.cls_norm in ("centre", "standardise"):
            params = fit_cls_norm_to_task(self.task, self.programs.mesh, params)
        return InitialParams(params, None)

    def _keep_best_epoch(self, directory: StoredPath) -> None:
        """Delete all checkpoints but that of the epoch with the best score on the held-out examples, of equal ones the
        first, and write what it is. A killed process that had deleted some of them trains these epochs again.
        """
        assert self.nested is not None and self.options.steps is not None
        names = [f"{metric_prefix(SELECTION)}{name}" for name in self.nested.main_metrics]
        lines = [line for line in read_metrics(directory / "metrics.jsonl") if line["split"] == "validation"]
        scores = {line["step"]: float(np.mean([line[name] for name in names])) for line in lines}
        with Checkpoints(checkpoint_directory(directory), keep=1) as checkpoints:
            saved = set(checkpoints.steps())
            best = max(sorted(saved & scores.keys()), key=scores.__getitem__)
            compute_and_broadcast("the best epoch", lambda: checkpoints.delete(saved - {best}))
        epoch = round(best / self.config.evaluation.every, 2)
        chosen = {
            "step": best,
            "epoch": epoch,
            "score": scores[best],
            "examples": self.nested.splits[SELECTION].examples.count,
        }
        if is_first():
            write_atomic(directory / BEST_EPOCH, (json.dumps(chosen) + "\n").encode())
        barrier("the best epoch is written")

    def _score(self, directory: StoredPath) -> tuple[SeedResult, dict[str, np.ndarray]]:
        """The result of the newest checkpoint, and the logits of all held-out splits."""
        params, phase = params_and_phase(self.programs, intact_checkpoint(directory))
        score_batch, rows = self.programs.scorer(params, phase)
        splits = self.data.splits
        logits = {
            name: self.task.predict(self._rows(split.examples), score_batch, rows) for name, split in splits.items()
        }
        metrics = {name: self.data.metrics(name, logits[name]) for name in splits if splits[name].is_scored}
        total = score(self.data, metrics.__getitem__)
        correct = np.concatenate([correct_examples(self.data, name, logits[name]) for name in metrics])
        tests = [] if self.options.test_score == "none" else labelled_tests(self.data)
        test_metrics = {name: self.data.metrics(name, logits[name], logits.get("dev")) for name in tests}
        result = SeedResult(
            self.seed,
            total,
            not total > baseline_score(self.data),
            _flat(metrics),
            correct,
            score(self.data, test_metrics.__getitem__, tests) if tests else None,
            _flat(test_metrics),
            read_json_object(directory / BEST_EPOCH, "remove it") if self.nested is not None else {},
            {name: one for name in (*metrics, *tests) if (one := self.data.class_f1(name, logits[name]))},
        )
        return result, logits

    def _rows(self, examples: EncodedExamples) -> ExampleRows:
        seq_len = max(self._seq_len, self._row_length(examples))
        slots = max(1, seq_len // (64 if self.data.kind == "span" else 8 * examples.choices))
        return ExampleRows(examples, seq_len, slots, self._special_ids, self.seed)

    def _row_length(self, examples: EncodedExamples) -> int:
        """Tokens of the longest example, rounded up to a multiple of 8; of a multiple choice of all its texts."""
        longest = int(examples.lengths.reshape(-1, examples.choices).sum(1).max())
        return min(-(-longest // 8) * 8, self.encoder.model.config.max_positions * examples.choices)


def _flat(metrics: Mapping[str, Metrics]) -> Metrics:
    return {f"{metric_prefix(split)}{name}": value for split, one in metrics.items() for name, value in one.items()}


def _row_counts(needed: np.ndarray, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The numbers of rows that batches have, ascending: the most that one needs; in a long run also enough for a half
    and for nine tenths of the batches.

    Args:
      needed: rows that each batch of the run needs.
      mesh: whose shards split the rows.
    """
    most = int(needed.max())
    shares = (0.5, 0.9) if len(needed) >= LONG_RUN else ()
    fewer = {round_up_to_shards(int(np.quantile(needed, share, method="higher")), mesh) for share in shares}
    # The most rows are even, so that micro-batches can split them.
    full = round_up_to_shards(most + most % 2 if most > 1 else 1, mesh)
    return (*sorted(count for count in fewer if count < full), full)
