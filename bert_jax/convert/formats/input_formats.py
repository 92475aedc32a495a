"""Detects the format of a source and reads it."""

import contextlib
import dataclasses
import difflib
import fnmatch
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from etils import epath

from bert_jax.convert.families.family import Settings
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
from bert_jax.convert.formats.hf_config import normalize_hf_config
from bert_jax.convert.formats.tensor_files import PICKLE, SAFETENSORS
from bert_jax.convert.formats.vocabulary import trim_vocabulary
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import BUFFERS, LazyTensors, to_lazy
from bert_jax.convert.translate import from_huggingface, moments_from_huggingface
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, check_reachable, download_if_needed, is_remote, to_path
from bert_jax.tokenizers.files import find_tokenizer_file
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.state import Moments

DIRECTORY_FILES = (
    *(native.DESCRIPTION, native.PARAMS, huggingface.CONFIG, flax_msgpack_reader.WEIGHTS),
    *(f"{name}{end}" for name in (SAFETENSORS, PICKLE) for end in ("", ".index.json")),
)
"""Names of files that are incomplete alone: a path to one of them means its directory."""
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """What to read of a source."""

    optimizer_state: bool = False
    """Also read the optimizer's moments."""
    drop: tuple[str, ...] = ()
    """Patterns of the names of tensors to leave out."""
    trim_vocabulary: bool = False
    """Remove rows after the tokenizer's last token from the vocabulary's tables."""


class InputFormat(NamedTuple):
    """One format that can be read."""

    name: str
    description: str
    """For error messages."""
    matches: Callable[[epath.Path], bool]
    """Whether a source is in this format."""
    read: Callable[[epath.Path, ReadOptions, Path], SourceModel]
    """(source, options, an empty directory that exists as long as the model is read)."""


@contextlib.contextmanager
def open_model(source: str | StoredPath, options: ReadOptions = ReadOptions()) -> Iterator[SourceModel]:
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
    if source.is_dir() and _is_run(source):
        _refuse_edits(source, options)
        yield run.read(source, optimizer_state=options.optimizer_state)
        return
    with _local_copy(source) as local, tempfile.TemporaryDirectory(prefix="bert_jax-") as scratch:
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
    raise UserError(f"{source} is not a run or a model in a supported format. Supported are: a work directory; {known}")


def _is_run(source: StoredPath) -> bool:
    if (source / run.workdir.LEDGER).exists():
        return True
    try:
        return "stream_version" in json.loads((source / run.workdir.CONFIG).read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _read_native(source: epath.Path, options: ReadOptions, scratch: Path) -> SourceModel:
    _refuse_edits(source, options)
    model, optimizer_state, buffers, hf_config = native.read(source)
    kept = optimizer_state if options.optimizer_state else None
    return SourceModel(
        "bert-jax",
        str(source),
        model,
        find_tokenizer_file(source),
        optimizer_state=kept,
        buffers=buffers,
        hf_config=hf_config,
    )


def _refuse_edits(source: StoredPath, options: ReadOptions) -> None:
    if options.drop or options.trim_vocabulary:
        raise UserError(
            f"{source} is a run or model of bert_jax: --drop and --trim-vocabulary apply to other formats only"
        )


def _read_huggingface(source: epath.Path, options: ReadOptions, scratch: Path) -> SourceModel:
    return _source_model("huggingface", huggingface.read(source), find_tokenizer_file(source), options)


def _read_flax(source: epath.Path, options: ReadOptions, scratch: Path) -> SourceModel:
    return _source_model("flax", flax_msgpack_reader.read(source), find_tokenizer_file(source), options)


def _read_tensorflow(source: epath.Path, options: ReadOptions, scratch: Path) -> SourceModel:
    directory = source if source.is_dir() else source.parent
    source_model = _source_model("tensorflow1", tensorflow1.read(source), find_tokenizer_file(directory), options)
    moments = tensorflow1.read_moments(source) if options.optimizer_state else None
    if moments is None:
        return source_model
    step, *trees = moments
    trees = (moments_from_huggingface(source_model.model, source_model.hf_model, tree) for tree in trees)
    return dataclasses.replace(source_model, optimizer_state=Moments(step, *trees))


def _read_torch(source: epath.Path, options: ReadOptions, scratch: Path) -> SourceModel:
    local = Path(source)
    kind = torch_checkpoint.detect_writer(local)
    if kind == "nvidia":
        return _source_model("nvidia", nvidia.read(local), find_tokenizer_file(source.parent), options)
    if kind == "state dict":
        raise UserError(
            f"{source} is a state dict without settings: name it pytorch_model.bin, put its config.json in the same "
            "directory, and give the directory"
        )
    hf_model, files, notes = fairseq.read(local)
    if not files:
        # vocab.bpe alone is not enough: without dict.txt its ids are GPT-2's.
        tokenizer_json = source.parent / "tokenizer.json"
        source_model = _source_model("fairseq", hf_model, tokenizer_json if tokenizer_json.exists() else None, options)
        return dataclasses.replace(source_model, notes=tuple(notes))
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    return dataclasses.replace(
        _source_model("fairseq", hf_model, find_tokenizer_file(epath.Path(scratch)), options), notes=tuple(notes)
    )


def _source_model(
    name: str, hf_model: HuggingFaceModel, tokenizer: StoredPath | None, options: ReadOptions
) -> SourceModel:
    """Apply the options to a model of transformers and convert it."""
    hf_model = dataclasses.replace(hf_model, config=normalize_hf_config(hf_model.config, hf_model.source))
    buffers = {key: hf_model.tensors[key] for key in hf_model.tensors if key.endswith(BUFFERS)}
    if options.drop:
        hf_model = _drop_tensors(hf_model, options.drop)
    size = None if tokenizer is None else Tokenizer.load(tokenizer).vocab_size
    if options.trim_vocabulary:
        hf_model = trim_vocabulary(
            hf_model, Settings(hf_model.config, hf_model.source).required_size("vocab_size") if size is None else size
        )
    model = from_huggingface(hf_model)
    if size is not None and size > model.config.vocab_size:
        raise UserError(
            f"{hf_model.source}: the tokenizer {tokenizer.name} has {size} tokens, the model rows for "
            f"{model.config.vocab_size}: it belongs to another model"
        )
    return SourceModel(name, hf_model.source, model, tokenizer, hf_model, buffers=buffers, hf_config=hf_model.config)


def _drop_tensors(hf_model: HuggingFaceModel, patterns: tuple[str, ...]) -> HuggingFaceModel:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in hf_model.tensors):
            near = difflib.get_close_matches(pattern, list(hf_model.tensors), n=1, cutoff=0.0)
            raise UserError(
                f"--drop '{pattern}' matches no tensor of {hf_model.source}, which has for example '{''.join(near)}'"
            )
    kept = {k: v for k, v in to_lazy(hf_model.tensors).items() if not any(fnmatch.fnmatchcase(k, p) for p in patterns)}
    return dataclasses.replace(hf_model, tensors=LazyTensors(kept))


def _is_torch_file(source: epath.Path) -> bool:
    return source.suffix in TORCH_FILES and source.is_file()


def _is_tensorflow1(source: epath.Path) -> bool:
    return tensorflow1.find_checkpoint(source) is not None


def _is_native(source: epath.Path) -> bool:
    return (source / native.DESCRIPTION).exists()


FORMATS = (
    InputFormat("bert-jax", f"{native.DESCRIPTION} of bert_jax", _is_native, _read_native),
    InputFormat(
        "huggingface",
        "model.safetensors or pytorch_model.bin with config.json",
        huggingface.is_huggingface,
        _read_huggingface,
    ),
    InputFormat("flax", "flax_model.msgpack with config.json", flax_msgpack_reader.is_flax, _read_flax),
    InputFormat("tensorflow1", "*.ckpt.index with bert_config.json", _is_tensorflow1, _read_tensorflow),
    InputFormat("torch", "a .pt of fairseq's RoBERTa or of NVIDIA's BERT", _is_torch_file, _read_torch),
)
"""In the order of detection: a directory may match several."""
