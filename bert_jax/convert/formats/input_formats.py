"""The formats that can be read: detects the format of a source, and reads it."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from bert_jax.convert.formats import (
    fairseq,
    flax_msgpack_reader,
    huggingface,
    native,
    nvidia,
    run,
    tensorflow1,
    torch_checkpoint,
)
from bert_jax.convert.formats.format import InputFormat, ReadOptions
from bert_jax.convert.source_model import SourceModel
from bert_jax.errors import UserError
from bert_jax.storage.files import download_if_needed
from bert_jax.storage.paths import StoredPath, check_reachable, is_remote, to_path

DIRECTORY_FILES = (
    *(native.DESCRIPTION, native.PARAMS, huggingface.CONFIG, flax_msgpack_reader.WEIGHTS),
    *huggingface.FILES,
)
"""Names of files that are incomplete alone: a path to one of them means its directory."""
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
TRAINERS = (fairseq, nvidia)
"""Readers of training checkpoints in files of torch.save, in the order of detection. Each has a function
`matches_content`, and `read` of a file's content, the file, and the last two arguments of `InputFormat.read`."""


@contextlib.contextmanager
def open_model(
    source: str | StoredPath,
    options: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
) -> Iterator[SourceModel]:
    """Read the model of a source. Tensors are read on access, so use the model inside the `with` block.

    A source in a bucket is copied to this host for the duration of the block.

    Raises:
      UserError: the source has no known format or is damaged, or its object store does not answer.
    """
    source = to_path(source)
    check_reachable(source)
    configs = [source.parent / name for name in (native.DESCRIPTION, huggingface.CONFIG)]
    if source.name in DIRECTORY_FILES and source.is_file() and any(file.exists() for file in configs):
        source = source.parent
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as scratch:
        if run.matches(source):  # its checkpoints are read where they are
            yield run.read(source, options, Path(scratch))
            return
        if options.part == "generator":
            raise UserError(f"--part generator: {source} is not a run: leave --part out")
        with _local_copy(source) as local:
            yield _detect(local).read(local, options, Path(scratch))


@contextlib.contextmanager
def _local_copy(source: StoredPath) -> Iterator[epath.Path]:
    """The source on this host; for a file in a bucket, its whole directory is copied."""
    if source.is_dir() or not is_remote(source):
        with download_if_needed(source) as local:
            yield local
    else:
        with download_if_needed(source.parent) as local:
            yield local / source.name


def _detect(source: epath.Path) -> InputFormat:
    for input_format in FORMATS:
        if input_format.matches(source):
            return input_format
    if not source.exists():
        raise UserError(f"{source} does not exist: give the work directory of a run, or a model")
    known = "; ".join(input_format.description for input_format in FORMATS)
    raise UserError(f"{source} is not a run or a model in a supported format. Supported are: {known}")


def _is_torch_file(source: StoredPath) -> bool:
    return source.suffix in TORCH_FILES and source.is_file()


def _read_torch_file(source: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read a training checkpoint.

    Raises:
      UserError: no known program wrote it.
    """
    content = torch_checkpoint.load(Path(source), placeholders=True)
    for trainer in TRAINERS:
        if trainer.matches_content(content):
            return trainer.read(content, source, options, scratch)
    raise UserError(
        f"{source}: not a checkpoint of fairseq or NVIDIA. If it is a state dict, name it pytorch_model.bin, put its "
        "config.json in the same directory, and give the directory"
    )


FORMATS = (
    run.INPUT,
    native.INPUT,
    huggingface.INPUT,
    flax_msgpack_reader.INPUT,
    tensorflow1.INPUT,
    InputFormat("a .pt of fairseq's RoBERTa or of NVIDIA's BERT", _is_torch_file, _read_torch_file),
)
"""In the order of detection: a directory may match several."""
