"""Runs a build on an Apache Beam runner: Dataflow, Flink, Spark, Dask, or the direct runner.

No text is sent between workers. Each worker reads its inputs, files and ranges of large ones, from storage that all
workers can read, and writes prepared blocks to storage that all can write. So tasks can be repeated, and memory is a
few blocks on any runner.

Grouped steps are steps of one pipeline, with Beam's GroupByKey between them. What the last step finds is in files of
the scratch directory until the launching process has read it.
"""

import contextlib
import dataclasses
import io
import pathlib
import pickle
import uuid
from collections.abc import Iterator, Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage.failures import describe_error
from bert_jax.storage.files import write_atomic
from bert_jax.storage.listing import matching_entries
from data_prep.builder.engines import Engine, IndexedInput
from data_prep.builder.engines.beam_flags import check_flags
from data_prep.builder.prepare import BlockPreparer, PrepareJob, prepare_input
from data_prep.builder.write_shards import Assembler
from data_prep.duplicates.grouped_steps import Chunk, GroupedSteps, Step

_FAILURE = "failure-"
_FOUND = "found-"
# Beam accepts short names for its other runners.
_LONG_NAMES = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}


@dataclasses.dataclass(frozen=True)
class BeamEngine(Engine):
    """Runs tasks and grouped steps as pipelines; what remains of phase 2 runs in the launching process."""

    runner: str | None
    """Beam's name of the runner; None: its default, the direct runner"""
    flags: Sequence[str] = ()
    """pipeline options of Beam, as on its command line"""
    memory_bytes: int = 256 << 20
    """see `Engine`; it determines how many groups there are"""
    workers: int = 1
    """see `Engine`"""

    def prepare(self, job: PrepareJob, inputs: Sequence[IndexedInput]) -> None:
        """Phase 1."""
        self._run(job.scratch, inputs, beam.ParDo(_Prepare(job)))

    def run_steps(self, steps: GroupedSteps, scratch: str, local: pathlib.Path) -> Iterator[Chunk]:
        """Phase 2: no worker has more than one group of chunks at a time."""
        for path in matching_entries(epath.Path(scratch), f"{_FOUND}*"):
            path.unlink()  # of a pipeline that failed
        first, *others = steps.steps
        transforms: list[beam.PTransform] = [beam.ParDo(_FirstStep(scratch, first))]
        for step in others:
            kind = _LastStep if step is others[-1] else _NextStep
            transforms += [beam.GroupByKey(), beam.ParDo(kind(scratch, step))]
        self._run(scratch, [key for keys in steps.passes for key in keys], *transforms)
        for path in matching_entries(epath.Path(scratch), f"{_FOUND}*"):
            chunks = io.BytesIO(path.read_bytes())
            while chunks.tell() < chunks.getbuffer().nbytes:
                yield pickle.load(chunks)
            path.unlink()

    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3."""
        self._run(assembler.scratch, plans, beam.ParDo(_Assemble(assembler)))

    def _options(self) -> PipelineOptions:
        check_flags(self.runner, self.flags)
        runner = [f"--runner={_LONG_NAMES.get(self.runner, self.runner)}"] if self.runner else []
        return PipelineOptions([*self.flags, *runner])

    def _run(self, scratch: str, tasks: Sequence, *transforms: beam.PTransform) -> None:
        """Runs a pipeline of the transforms, applied to the tasks."""
        if not tasks:
            return
        for failure in matching_entries(epath.Path(scratch), f"{_FAILURE}*"):
            failure.unlink()  # from an earlier run
        try:
            pipeline = beam.Pipeline(options=self._options())
        except (ValueError, ImportError, AttributeError) as error:
            raise UserError(f"--runner {self.runner}: Beam cannot use it ({error})") from error
        collection = pipeline | beam.Create(list(tasks)) | beam.Reshuffle()
        for number, transform in enumerate(transforms):
            collection |= f"{number}" >> transform
        result = pipeline.run()
        try:
            state = result.wait_until_finish()
        finally:
            if client := getattr(result, "client", None):
                client.close()  # Dask's client would keep trying to reach its cluster
        failures = matching_entries(epath.Path(scratch), f"{_FAILURE}*")
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
        message = error if isinstance(error, UserError) else describe_error(error)
        if message is None:
            raise
        (epath.Path(scratch) / f"{_FAILURE}{uuid.uuid4().hex}").write_text(str(message))


class _Prepare(beam.DoFn):
    def __init__(self, job: PrepareJob):
        self._job = job

    def setup(self):
        self._preparer = BlockPreparer(self._job)

    def process(self, place):
        with _failures_in(self._job.scratch):
            for _ in prepare_input(self._preparer, *place):
                pass


class _Assemble(beam.DoFn):
    def __init__(self, assembler: Assembler):
        self._assembler = assembler

    def process(self, plan):
        with _failures_in(self._assembler.scratch):
            self._assembler(plan)


class _FirstStep(beam.DoFn):
    """Yields (group, ((key of the call, number), chunk)); the pair determines the order of chunks."""

    def __init__(self, scratch: str, step: Step):
        self._scratch = scratch
        self._step = step

    def process(self, key):
        yield from self._call(key, iter(()))

    def _call(self, key: int, chunks: Iterator[Chunk]):
        with _failures_in(self._scratch):
            for number, (group, chunk) in enumerate(self._step(key, chunks)):
                yield group, ((key, number), pickle.dumps(chunk, 5))


class _NextStep(_FirstStep):
    def process(self, group_and_chunks):
        key, chunks = group_and_chunks
        yield from self._call(key, (pickle.loads(data) for _, data in sorted(chunks)))


class _LastStep(_NextStep):
    """Writes the chunks of a call to a file; in order of their names, the files are in order of the calls."""

    def process(self, group_and_chunks):
        key, _ = group_and_chunks
        chunks = [data for _, (_, data) in super().process(group_and_chunks)]
        with _failures_in(self._scratch):
            if chunks:
                write_atomic(epath.Path(self._scratch) / f"{_FOUND}{key:010d}.pickle", b"".join(chunks))
