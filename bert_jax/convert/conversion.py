"""One conversion: read, write beside the destination, and move there when all is well."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bert_jax.convert import formats, huggingface, own
from bert_jax.convert.contents import Contents
from bert_jax.convert.translate import to_form
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, copy_tree, is_remote
from bert_jax.tokenizer import Tokenizer


class Target(NamedTuple):
    """One format that can be written."""

    write: Callable[[Contents, Path], None]
    """Into an empty directory."""
    last: str
    """The file without which a directory is no model; it comes last into an object store."""


def convert(source: StoredPath, destination: StoredPath, to: str) -> None:
    """Write a model in another format. The destination appears whole or not at all.

    Args:
      source: a run or a model (formats.py).
      destination: a directory to make.
      to: a name of `TARGETS`.

    Raises:
      UserError: no model at the source, a destination that exists, a model that the format cannot hold.
    """
    if destination.exists():
        raise UserError(f"{destination} exists already: choose another destination, or remove it")
    target = TARGETS[to]
    remote = is_remote(destination)
    with formats.opened(source) as contents:
        if not remote:
            destination.parent.mkdir(parents=True, exist_ok=True)
        place = None if remote else destination.parent
        with tempfile.TemporaryDirectory(dir=place, prefix=f".{destination.name}-") as scratch:
            inside = Path(scratch) / "model"
            inside.mkdir()
            target.write(contents, inside)
            _move(inside, destination, target.last)


def _move(inside: Path, destination: StoredPath, last: str) -> None:
    if not is_remote(destination):
        inside.rename(destination)
        return
    held_back = (inside / last).rename(inside.parent / last)
    copy_tree(inside, destination)
    (destination / last).write_bytes(held_back.read_bytes())


def _write_huggingface(contents: Contents, directory: Path) -> None:
    huggingface.write(directory, to_form(contents.model, contents.source))
    if contents.tokenizer is not None:
        tokenizer = Tokenizer.load(contents.tokenizer)
        tokenizer.save(directory / "tokenizer.json")
        tokenizer.save_vocab(directory / "vocab.txt")
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": tokenizer.lowercase,
            "model_max_length": contents.model.config.max_positions,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "README.md").write_text("transformers\n" + "\n".join(contents.notes))


def _write_own(contents: Contents, directory: Path) -> None:
    own.write(directory, contents.model, contents.moments)


TARGETS = {
    "huggingface": Target(_write_huggingface, huggingface.WEIGHTS),
    "bert-jax": Target(_write_own, own.DESCRIPTION),
}
