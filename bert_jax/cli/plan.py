"""The commands ``bert-jax plan`` and ``bert-jax schedule``, which need no corpus."""

import json
from dataclasses import dataclass
from pathlib import Path

from bert_jax.cli.arguments import ConfigArg, MicroBatch
from bert_jax.errors import UserError
from bert_jax.field_validation import NonNegative
from bert_jax.report.text import render


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimate memory, communication, time and cost of CONFIG on absent devices. Needs no corpus.

    It compiles the train step of every phase for the topology, which takes about a minute each for large models. It
    takes every flag of the config that `pretrain` takes; --mesh.data, --mesh.fsdp and --mesh.tensor set the mesh.
    """

    topology: str
    """Target devices: v5e:16x16, 2xv5e:16x16 for two slices; GPUs as nodes x GPUs per node, as in h100:8x8."""
    micro_batch: MicroBatch = None
    """Rows of a micro-batch on each device. Default: phases.N.accumulation sets the micro-batches of a step; without
    that, the largest micro-batch is used that fits by the memory estimate."""
    price_per_chip_hour: NonNegative | None = None
    """Price of a chip per hour in any currency, for the cost of the run. Default: unknown."""
    search: bool = False
    """First search mesh, micro-batches and model.remat: the simplest that fit and are at most 30 % slower than the
    fastest, with about 150 CPU seconds of compilation."""
    json: bool = False
    """Print JSON instead of a table."""
    config: ConfigArg

    def run(self) -> None:
        """Print the estimate."""
        if self.micro_batch == "auto":
            raise UserError("--micro-batch auto needs a device: give a number of rows, or --search")
        if self.micro_batch is not None and self.search:
            raise UserError("--search chooses the micro-batch: leave out --micro-batch or --search")
        from bert_jax.planning import run_plan, topologies

        topology = topologies.parse_topology(self.topology)
        values = run_plan.plan(self.config, topology, self.micro_batch, self.price_per_chip_hour, self.search)
        print(json.dumps(values) if self.json else render(run_plan.to_sections(values)))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Show batch size, sequence length and learning rate over the steps of CONFIG. Needs no corpus.

    It takes every flag of the config that `pretrain` takes.
    """

    json: bool = False
    """Print JSON instead of a table."""
    plot: Path | None = None
    """Also plot it to this PNG file (needs the extra `plot`). Default: no plot."""
    config: ConfigArg

    def run(self) -> None:
        """Print the schedule."""
        from bert_jax.planning import schedule

        values = schedule.to_dict(self.config)
        print(json.dumps(values) if self.json else render(schedule.to_sections(values)))
        if self.plot is not None:
            schedule.plot(self.config, self.plot)
