"""Runs a build on an Apache Beam runner: Dataflow, Flink, Spark, Dask, or the direct runner.

No text is sent between workers. Each worker reads its share of the input from storage that all workers can read, and
writes prepared blocks to storage that all can write. A large input has several readers: each splits all of it into
blocks, which is cheap, and prepares every n-th block. So tasks can be repeated, and memory is a few blocks on any
runner.
"""

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from etils import epath

from bert_jax import storage
from bert_jax.errors import UserError
from data_prep.build.engines import Engine, IndexedInput
from data_prep.build.prepare import BlockPreparer, PrepareJob, block_tasks
from data_prep.build.write_shards import Assembler

_BYTES_PER_READER = 256 << 20
_MAX_READERS = 16
_FAILURE = "failure-"
# Beam accepts short names for its other runners.
_LONG_NAMES = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}


@dataclasses.dataclass(frozen=True)
class BeamEngine(Engine):
    """Runs the tasks as two pipelines; phase 2 runs between them in the launching process."""

    runner: str | None
    """Beam's name of the runner; None: its default, the direct runner"""
    flags: Sequence[str] = ()
    """pipeline options of Beam, as on its command line"""

    def prepare(self, job: PrepareJob, inputs: Sequence[IndexedInput]) -> None:
        """Phase 1."""
        shares = [
            (place, reader, readers)
            for place in inputs
            for readers in [min(_MAX_READERS, -(-place[2].size // _BYTES_PER_READER)) or 1]
            for reader in range(readers)
        ]
        self._run(job.scratch, shares, _Prepare(job))

    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3."""
        self._run(assembler.scratch, plans, _Assemble(assembler))

    def _run(self, scratch: str, tasks: Sequence, function: beam.DoFn) -> None:
        if not tasks:
            return
        runner = [f"--runner={_LONG_NAMES.get(self.runner, self.runner)}"] if self.runner else []
        for failure in epath.Path(scratch).glob(f"{_FAILURE}*"):
            failure.unlink()  # from an earlier run
        try:
            pipeline = beam.Pipeline(options=PipelineOptions([*self.flags, *runner]))
        except (ValueError, ImportError, AttributeError) as error:
            raise UserError(f"--runner {self.runner}: Beam cannot use it ({error})") from error
        _ = pipeline | beam.Create(list(tasks)) | beam.Reshuffle() | beam.ParDo(function)
        result = pipeline.run()
        try:
            state = result.wait_until_finish()
        finally:
            if client := getattr(result, "client", None):
                client.close()  # Dask's client would keep trying to reach its cluster
        failures = list(epath.Path(scratch).glob(f"{_FAILURE}*"))
        if failures:
            raise UserError(min(failure.read_text() for failure in failures))
        if state not in (None, "DONE"):
            raise UserError(f"the Beam pipeline ended as {state}: see its runner's log; the same command continues")


@contextlib.contextmanager
def _failures_in(scratch: str) -> Iterator[None]:
    """Passes user errors to the launching process; raised in a worker, they would be retried and lost in its log."""
    try:
        yield
    except (UserError, OSError) as error:
        message = error if isinstance(error, UserError) else storage.describe_error(error)
        if message is None:
            raise
        (epath.Path(scratch) / f"{_FAILURE}{uuid.uuid4().hex}").write_text(str(message))


class _Prepare(beam.DoFn):
    def __init__(self, job: PrepareJob):
        self._job = job

    def setup(self):
        self._preparer = BlockPreparer(self._job)

    def process(self, share):
        (source, index, part), reader, readers = share
        with _failures_in(self._job.scratch):
            for task in block_tasks(self._job, source, index, part, reader, readers):
                if not task.done:
                    self._preparer(task)


class _Assemble(beam.DoFn):
    def __init__(self, assembler: Assembler):
        self._assembler = assembler

    def process(self, plan):
        with _failures_in(self._assembler.scratch):
            self._assembler(plan)
