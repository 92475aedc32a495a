"""Which format a source is in, found by looking, and how it is read."""

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
    flax_msgpack,
    huggingface,
    native,
    nvidia,
    run,
    tensorflow1,
    torch_checkpoint,
)
from bert_jax.convert.formats.foreign_config import checked
from bert_jax.convert.formats.tensor_files import PICKLE, SAFETENSORS
from bert_jax.convert.formats.vocabulary import trim_vocabulary
from bert_jax.convert.hf_model import Form
from bert_jax.convert.source_model import Contents
from bert_jax.convert.tensors import BUFFERS, LazyTensors, stored
from bert_jax.convert.translate import from_form, moments_from
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, check_reachable, download_if_needed, is_remote, to_path
from bert_jax.tokenizers.files import find
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.state import Moments

OF_DIRECTORIES = (
    *(native.DESCRIPTION, native.PARAMS, huggingface.CONFIG, flax_msgpack.WEIGHTS),
    *(f"{name}{end}" for name in (SAFETENSORS, PICKLE) for end in ("", ".index.json")),
)
"""Names of files that are nothing without what lies beside them: who gives one means its directory."""
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What of a source is taken."""

    moments: bool = False
    """The optimizer's moments, too."""
    drop: tuple[str, ...] = ()
    """Patterns of tensors to leave out."""
    trim: bool = False
    """Cut tables of the vocabulary to the tokenizer's size."""


class Format(NamedTuple):
    """One format that can be read."""

    name: str
    what: str
    """It in words, for messages."""
    fits: Callable[[epath.Path], bool]
    """Whether a source is in this format."""
    read: Callable[[epath.Path, Wishes, Path], Contents]
    """(source, wishes, an empty directory that lasts as long as the contents)."""


@contextlib.contextmanager
def opened(source: str | StoredPath, wishes: Wishes = Wishes()) -> Iterator[Contents]:
    """The model that a source holds, read while the source is at hand: one in a bucket is copied for so long.

    Raises:
      UserError: nothing is there that is known, or it is damaged, or its store does not answer.
    """
    source = to_path(source)
    check_reachable(source)
    beside = [source.parent / name for name in (native.DESCRIPTION, huggingface.CONFIG)]
    if source.name in OF_DIRECTORIES and source.is_file() and any(file.exists() for file in beside):
        source = source.parent
    if source.is_dir() and _is_run(source):
        _refuse_changes(source, wishes)
        yield run.read(source, moments=wishes.moments)
        return
    with _at_hand(source) as local, tempfile.TemporaryDirectory(prefix="bert_jax-") as scratch:
        yield _detect(local).read(local, wishes, Path(scratch))


@contextlib.contextmanager
def _at_hand(source: StoredPath) -> Iterator[epath.Path]:
    """The source on this host; of a file in a bucket, all that lies beside it, too."""
    if source.is_dir() or not is_remote(source):
        with download_if_needed(source) as local:
            yield local
    else:
        with download_if_needed(source.parent) as local:
            yield local / source.name


def _detect(source: epath.Path) -> Format:
    for form in FORMATS:
        if form.fits(source):
            return form
    if not source.exists():
        raise UserError(f"{source} is no file and no directory: give the work directory of a run, or a model")
    known = "; ".join(form.what for form in FORMATS)
    raise UserError(f"{source} holds no run and no model that can be read. Known are: a work directory; {known}")


def _is_run(source: StoredPath) -> bool:
    if (source / run.workdir.LEDGER).exists():
        return True
    try:
        return "stream_version" in json.loads((source / run.workdir.CONFIG).read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _read_own(source: epath.Path, wishes: Wishes, scratch: Path) -> Contents:
    _refuse_changes(source, wishes)
    model, moments, buffers, settings = native.read(source)
    kept = moments if wishes.moments else None
    found = find(source)
    return Contents("bert-jax", str(source), model, found, moments=kept, buffers=buffers, settings=settings)


def _refuse_changes(source: StoredPath, wishes: Wishes) -> None:
    if wishes.drop or wishes.trim:
        raise UserError(f"{source} is a model of ours: --drop and --trim-vocabulary are for those of others")


def _read_huggingface(source: epath.Path, wishes: Wishes, scratch: Path) -> Contents:
    return _contents("huggingface", huggingface.read(source), find(source), wishes)


def _read_flax(source: epath.Path, wishes: Wishes, scratch: Path) -> Contents:
    return _contents("flax", flax_msgpack.read(source), find(source), wishes)


def _read_tensorflow(source: epath.Path, wishes: Wishes, scratch: Path) -> Contents:
    directory = source if source.is_dir() else source.parent
    contents = _contents("tensorflow1", tensorflow1.read(source), find(directory), wishes)
    found = tensorflow1.read_moments(source) if wishes.moments else None
    if found is None:
        return contents
    trees = (moments_from(contents.model, contents.form, moments) for moments in found[1:])
    return dataclasses.replace(contents, moments=Moments(found[0], *trees))


def _read_torch(source: epath.Path, wishes: Wishes, scratch: Path) -> Contents:
    local = Path(source)
    kind = torch_checkpoint.kind_of(local)
    if kind == "nvidia":
        return _contents("nvidia", nvidia.read(local), find(source.parent), wishes)
    if kind == "state dict":
        raise UserError(
            f"{source} is a state dict without settings: name it pytorch_model.bin, put its config.json beside it, and "
            "give the directory"
        )
    form, files, notes = fairseq.read(local)
    if not files:
        # Not vocab.bpe alone: without dict.txt its ids are GPT-2's.
        made = source.parent / "tokenizer.json"
        contents = _contents("fairseq", form, made if made.exists() else None, wishes)
        return dataclasses.replace(contents, notes=tuple(notes))
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    return dataclasses.replace(_contents("fairseq", form, find(epath.Path(scratch)), wishes), notes=tuple(notes))


def _contents(name: str, form: Form, tokenizer: StoredPath | None, wishes: Wishes) -> Contents:
    """A form of theirs, less what is not wanted, as ours."""
    form = dataclasses.replace(form, config=checked(form.config, form.source))
    buffers = {key: form.tensors[key] for key in form.tensors if key.endswith(BUFFERS)}
    if wishes.drop:
        form = _without(form, wishes.drop)
    size = None if tokenizer is None else Tokenizer.load(tokenizer).vocab_size
    if wishes.trim:
        form = trim_vocabulary(form, Settings(form.config, form.source).need("vocab_size") if size is None else size)
    model = from_form(form)
    if size is not None and size > model.config.vocab_size:
        raise UserError(
            f"{form.source}: the tokenizer {tokenizer.name} has {size} tokens, the model rows for "
            f"{model.config.vocab_size}: it is another model's"
        )
    return Contents(name, form.source, model, tokenizer, form, buffers=buffers, settings=form.config)


def _without(form: Form, patterns: tuple[str, ...]) -> Form:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in form.tensors):
            near = difflib.get_close_matches(pattern, list(form.tensors), n=1, cutoff=0.0)
            raise UserError(f"--drop '{pattern}' fits no tensor of {form.source}, which has such as '{''.join(near)}'")
    kept = {k: v for k, v in stored(form.tensors).items() if not any(fnmatch.fnmatchcase(k, p) for p in patterns)}
    return dataclasses.replace(form, tensors=LazyTensors(kept))


def _is_torch_file(source: epath.Path) -> bool:
    return source.suffix in TORCH_FILES and source.is_file()


def _has_tensorflow(source: epath.Path) -> bool:
    return tensorflow1.found(source) is not None


def _is_own(source: epath.Path) -> bool:
    return (source / native.DESCRIPTION).exists()


FORMATS = (
    Format("bert-jax", f"{native.DESCRIPTION} of ours", _is_own, _read_own),
    Format(
        "huggingface",
        "model.safetensors or pytorch_model.bin with config.json",
        huggingface.is_huggingface,
        _read_huggingface,
    ),
    Format("flax", "flax_model.msgpack with config.json", flax_msgpack.is_flax, _read_flax),
    Format("tensorflow1", "*.ckpt.index with bert_config.json", _has_tensorflow, _read_tensorflow),
    Format("torch", "a .pt of fairseq's RoBERTa or of NVIDIA's BERT", _is_torch_file, _read_torch),
)
"""In the order in which they are looked for: a directory may hold several."""
