"""Which format a source is in, found by looking, and how it is read."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from etils import epath

from bert_jax.convert import huggingface, own, run
from bert_jax.convert.contents import Contents
from bert_jax.convert.form import Form
from bert_jax.convert.translate import from_form
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, fetched, path, reach
from bert_jax.tokenizer_files import find


class Format(NamedTuple):
    """One format that can be read."""

    name: str
    what: str
    """It in words, for messages."""
    fits: Callable[[epath.Path], bool]
    """Whether a source that exists is in this format."""
    read: Callable[[epath.Path], Contents]


@contextlib.contextmanager
def opened(source: str | StoredPath) -> Iterator[Contents]:
    """The model that a source holds, read while the source is at hand: one in a bucket is copied for so long.

    Raises:
      UserError: nothing is there that is known, or it is damaged, or its store does not answer.
    """
    source = path(source)
    reach(source)
    if not source.exists():
        raise UserError(f"{source} is no file and no directory: give the work directory of a run, or a model")
    if source.is_dir() and _is_run(source):
        yield run.read(source)
        return
    with fetched(source) as local:
        yield detect(local).read(local)


def detect(source: epath.Path) -> Format:
    """The format of a source on this host.

    Raises:
      UserError: it is in none that is known.
    """
    for form in FORMATS:
        if form.fits(source):
            return form
    known = "; ".join(form.what for form in FORMATS)
    raise UserError(f"{source} holds no run and no model that can be read. Known are: a work directory; {known}")


def _is_run(source: StoredPath) -> bool:
    try:
        return "stream_version" in json.loads((source / run.workdir.CONFIG).read_text())
    except (OSError, ValueError):
        return False


def _read_own(source: epath.Path) -> Contents:
    model, moments = own.read(source)
    return Contents("bert-jax", str(source), model, find(source), moments=moments)


def _read_huggingface(source: epath.Path) -> Contents:
    return _contents("huggingface", huggingface.read(source), find(source))


def _contents(name: str, form: Form, tokenizer: StoredPath | None) -> Contents:
    return Contents(name, form.source, from_form(form), tokenizer, form)


def _has(*names: str) -> Callable[[epath.Path], bool]:
    return lambda source: source.is_dir() and any((source / name).exists() for name in names)


FORMATS = (
    Format("bert-jax", f"{own.DESCRIPTION} of ours", _has(own.DESCRIPTION), _read_own),
    Format("huggingface", "a Hugging Face directory", _has(huggingface.WEIGHTS), _read_huggingface),
)
"""In the order in which they are looked for: a directory may hold several."""
