"""Fine-tuning beside transformers and PyTorch: the same weights, examples, learning rates and optimizer.

    python scripts/benchmarks/bench_finetune.py speed --model MODEL --task sst2 --data SST-2 --json speed.json
    python scripts/benchmarks/bench_finetune.py losses --model MODEL --task sst2 --data SST-2 --steps 50

- speed: seconds per step, interleaved in rounds of --steps steps; packing and padding on the host are included.
- losses: of a run of --steps steps without dropout, and their largest difference.

MODEL is anything that `bert-jax finetune` takes, of a family that transformers has; the task must be one of classes.
Needs the extra `parity`.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from etils import epath
from transformers_finetune import TransformersRun

from bert_jax.bench import harness
from bert_jax.config import MeshConfig
from bert_jax.convert.conversion import convert
from bert_jax.data.cursor import Cursor
from bert_jax.distributed import jax_setup
from bert_jax.finetune import finetune
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import FinetuneRun
from bert_jax.finetune.tasks import open_task
from bert_jax.training.micro_batch import TrainSteps, choose_accumulations
from bert_jax.training.programs import put_seed, put_step_inputs
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.sharding import make_mesh, put_rows
from bert_jax.training.shared_programs import share_programs
from bert_jax.training.state import InitialParams
from bert_jax.training.time_budget import timed_learning_rate_at


class BertJaxRun:
    """The steps of a run, without logs and checkpoints."""

    def __init__(self, run: FinetuneRun, initial: InitialParams, directory: Path):
        """Compiles the steps for all numbers of rows.

        Args:
          run: of the task.
          initial: its initial parameters.
          directory: empty.
        """
        self.run, programs = run, run.programs
        self.train_steps = TrainSteps(
            programs, Ledger(epath.Path(directory) / "ledger"), choose_accumulations(programs, 1)
        )
        for count in run.task.row_counts:
            self.train_steps.of_batch(0, count)
        self.state = programs.state_from_initial(initial)
        self.seed, self.batches = put_seed(run.seed, programs.mesh), run.task.batches(Cursor())

    def step(self) -> jax.Array:
        """Take the next step; returns its loss."""
        rows, size, following = next(self.batches)
        mesh = self.run.programs.mesh
        train_step, row_count, micro_batches = self.train_steps.of_batch(0, size)
        rate = timed_learning_rate_at(self.run.config, [], following.step - 1)
        inputs = put_step_inputs(rate, micro_batches, self.seed, mesh)
        self.state, metrics = train_step(self.state, put_rows(rows, mesh, row_count), inputs)
        return metrics["loss"]


def open_run(options: argparse.Namespace) -> FinetuneRun:
    """The run of the options."""
    encoder = finetune.read_source(epath.Path(options.model))
    given = {name: getattr(options, name) for name in ("batch_size", "learning_rate", "epochs", "max_length", "seed")}
    if options.mode == "losses":
        given |= {"dropout": 0.0, "steps": options.steps, "epochs": None}
    given = {name: value for name, value in given.items() if value is not None}
    settings = FinetuneOptions(**given)
    path = epath.Path(options.data)
    data, settings = open_task(options.task, path, settings, encoder)
    settings = settings.with_recipe(data.train.count)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return FinetuneRun(encoder, options.task, data, str(path), settings, settings.seed, mesh, share_programs())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What the mode measures."""
    jax_setup.prepare_training(None)
    run = open_run(options)
    initial = run.initial_params()
    with tempfile.TemporaryDirectory() as directory:
        exported = Path(directory) / "huggingface"
        convert(epath.Path(options.model), epath.Path(exported), "huggingface")
        peer_run = TransformersRun(run, initial, exported, len(harness.usable_cores()))
        bert_jax_run = BertJaxRun(run, initial, Path(directory))
        return MODES[options.mode](options, bert_jax_run, peer_run)


def speed(options: argparse.Namespace, bert_jax_run: BertJaxRun, peer_run: TransformersRun) -> dict[str, Any]:
    """Seconds per step of both, and their ratio by round."""

    def steps_of(side: Any) -> Callable[[], None]:
        def take() -> None:
            for _ in range(options.steps):
                loss = side.step()
            float(loss)

        return take

    sides = {"transformers": steps_of(peer_run), "bert_jax": steps_of(bert_jax_run)}
    timers = {name: harness.timer(take, options.steps) for name, take in sides.items()}
    harness.interleave(timers, rounds=1)  # a warm-up
    samples = harness.interleave(timers, options.rounds)
    rows = harness.summary(samples, "bert_jax", steps=1)
    task, lengths = bert_jax_run.run.task, bert_jax_run.run.data.train.lengths
    shapes = {
        "examples per step": task.batch_examples,
        "tokens per example": round(float(lengths.mean()), 1),
        "rows of a step": " or ".join(map(str, task.row_counts)),
        "tokens of a row": task.train.seq_len,
    }
    return shapes | {"seconds per step": rows, "samples": samples}


def losses(options: argparse.Namespace, bert_jax_run: BertJaxRun, peer_run: TransformersRun) -> dict[str, Any]:
    """Losses of the same steps."""
    pairs = [(float(bert_jax_run.step()), float(peer_run.step())) for _ in range(options.steps)]
    differences = [abs(one - other) for one, other in pairs]
    return {
        "largest difference": max(differences),
        "first loss": pairs[0][0],
        "last loss": pairs[-1][0],
        "losses": [
            {"step": step, "bert_jax": one, "transformers": other} for step, (one, other) in enumerate(pairs, start=1)
        ],
    }


MODES: dict[str, Callable[[argparse.Namespace, BertJaxRun, Any], dict[str, Any]]] = {
    "speed": speed,
    "losses": losses,
}


def add_flags(add: Callable[..., Any]) -> None:
    """The flags of all modes."""
    add("mode", choices=sorted(MODES), help="what to measure")
    add("--model", required=True, help="the model to fine-tune")
    add("--task", default="sst2", help="as in `bert-jax finetune`")
    add("--data", required=True, help="directory with the files of the task")
    add("--steps", type=harness.positive, default=20, help="steps of a round, or of `losses`")
    add("--rounds", type=harness.positive, default=5, help="rounds of `speed`")
    add("--epochs", type=float, default=1.0, help="length of the run")
    add("--learning-rate", type=float, default=5e-5, help="peak learning rate")
    add("--batch-size", type=harness.positive, help="examples per step")
    add("--max-length", type=harness.positive, help="tokens of the longest example")
    add("--seed", type=int, default=0, help="of order, head and dropout")


def main(arguments: list[str] | None = None) -> int:
    """Measure with the command line's options."""
    return harness.run(__doc__, add_flags, measure, harness.report_lines, arguments)


if __name__ == "__main__":
    sys.exit(main())
