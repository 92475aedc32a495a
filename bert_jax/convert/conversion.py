"""One conversion: read, write beside the destination, prove that both are the same model, and move it there."""

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bert_jax.convert import (
    formats,
    huggingface,
    our_forward,
    own,
    parity,
    serving,
    tensor_files,
    tensorflow1,
    tokenizers_beside,
)
from bert_jax.convert.card import write_card
from bert_jax.convert.contents import Contents
from bert_jax.convert.form import Form
from bert_jax.convert.identity import differences
from bert_jax.convert.sample_texts import sample_inputs
from bert_jax.convert.translate import moments_to, to_form, without_base
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, copy_tree, is_remote

CARD = "README.md"
OUTDATED = (
    *("transformers_version", "torch_dtype", "dtype", "_name_or_path", "_attn_implementation", "auto_map"),
    *("rope_parameters", "rope_scaling", "layer_types"),
)
"""Settings of a foreign config.json that are not true of what is written, or are said there in another way."""
OF_THEIRS = ("embedding_dropout",)
"""Settings that ours have no word of their own for, and so write with another's value."""


class Target(NamedTuple):
    """One format that can be written."""

    write: Callable[[Contents, Path], None]
    """Into an empty directory."""
    last: str
    """The file without which a directory is no model; it comes last into an object store."""
    moments: bool = False
    """Whether it has a place for an optimizer's moments."""
    transformers: bool = False
    """Whether transformers opens it, tokenizer and all."""


def convert(
    source: StoredPath,
    destination: StoredPath,
    to: str,
    wishes: formats.Wishes = formats.Wishes(),  # noqa: B008 (frozen)
    *,
    force: bool = False,
) -> parity.Report:
    """Write a model in another format. The destination appears whole or not at all, with a card that says what it is.

    Args:
      source: a run or a model (formats.py).
      destination: a directory to make.
      to: a name of `TARGETS`.
      wishes: what of the source is taken.
      force: write it even if the parity report fails.

    Returns:
      the parity report.

    Raises:
      UserError: no model at the source, a destination that exists, a model or moments that the format cannot
        hold, no moments where they are wished for, or a report that fails.
    """
    if wishes.moments and not TARGETS[to].moments:
        raise UserError(f"--moments keep: {to} has no place for an optimizer's moments: use --to bert-jax")
    # A link that leads nowhere does not exist, and yet it is in the way.
    if destination.exists() or os.path.lexists(destination):
        raise UserError(f"{destination} exists already: choose another destination, or remove it")
    with formats.opened(source, wishes) as contents, _beside(destination) as inside:
        if wishes.moments and contents.moments is None:
            raise UserError(f"{source} has no moments of an optimizer: convert it with --moments drop")
        TARGETS[to].write(contents, inside)
        report = _prove(contents, inside, to)
        if not report.passed and not force:
            raise UserError(
                f"{source} and what was written of it are not the same model ({report.failures[0]}): nothing is kept; "
                "--force keeps it"
            )
        tokenizer = contents.loaded_tokenizer
        if tokenizer is not None and tokenizer.note:
            print(f"note: {tokenizer.note}", file=sys.stderr)
        mask = None if tokenizer is None else tokenizer.id_to_token(tokenizer.mask_id)
        (inside / CARD).write_text(write_card(destination.name, contents, to, report, mask))
        _move(inside, destination, TARGETS[to].last)
    return report


@contextlib.contextmanager
def _beside(destination: StoredPath) -> Iterator[Path]:
    """An empty directory from which `_move` is a rename, if the destination is on a disk.

    Parents of the destination that are made for it go again if it is not.
    """
    place = None if is_remote(destination) else destination.parent
    missing = [] if place is None else [parent for parent in (place, *place.parents) if not parent.exists()]
    try:
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=place, prefix=f".{destination.name}-")
    except OSError as error:
        told = f"cannot write to {place} ({(error.strerror or str(error)).lower()})"
        raise UserError(f"{told}: choose another destination") from error
    try:
        with made as scratch:
            inside = Path(scratch) / "model"
            inside.mkdir()
            yield inside
    finally:
        for parent in missing:
            if not any(parent.iterdir()):
                parent.rmdir()


def _move(inside: Path, destination: StoredPath, last: str) -> None:
    for file in inside.iterdir():
        shutil.copymode(inside / CARD, file)  # libraries make some that only their owner may read
    if not is_remote(destination):
        try:
            inside.rename(destination)
        except OSError as error:
            if not destination.exists():
                raise
            raise UserError(f"{destination} was made in the meantime: choose another destination") from error
        return
    held_back = (inside / last).rename(inside.parent / last)
    copy_tree(inside, destination)
    (destination / last).write_bytes(held_back.read_bytes())


def _prove(contents: Contents, inside: Path, to: str) -> parity.Report:
    """Another library's forward pass of the source beside ours of what was written, which is also the same to the bit.

    The passes show that both sides mean the same by their tensors; of tables they see the rows that the sample reaches.
    """
    theirs = contents.form or to_form(contents.model, contents.source)
    inputs = sample_inputs(theirs, contents.loaded_tokenizer)
    other, library = parity.other_side(theirs, inputs)
    for_them = TARGETS[to].transformers
    agreement = tokenizers_beside.agreement(contents, inside, for_them)
    mask_BS, first, problems = inputs.attention_mask_BS, 0, ()
    if to == "stablehlo":  # gives no hidden states but the last
        ours, first = serving.run(inside, inputs), len(other.hidden_states) - 1
        other = dataclasses.replace(other, hidden_states=other.hidden_states[first:])
    else:
        with formats.opened(inside, formats.Wishes(moments=contents.moments is not None)) as written:
            ours, problems = our_forward.run(written.model, inputs), differences(contents, written)
    report = parity.compare(ours, other, mask_BS, library=library, tokenizer=agreement, first_layer=first)
    return dataclasses.replace(report, problems=(*report.problems, *problems))


def _write_huggingface(contents: Contents, directory: Path) -> None:
    form = _form(contents)
    huggingface.write(directory, form, tensor_files.write_safetensors, tensor_files.SAFETENSORS)
    tokenizers_beside.put_theirs(contents, directory)


def _write_pytorch(contents: Contents, directory: Path) -> None:
    huggingface.write(directory, _form(contents), tensor_files.write_pickle, tensor_files.PICKLE)
    tokenizers_beside.put_theirs(contents, directory)


def _write_tensorflow(contents: Contents, directory: Path) -> None:
    form, moments = to_form(contents.model, contents.source), None
    if contents.moments is not None:
        trees = (moments_to(contents.model, tree) for tree in contents.moments[1:])
        moments = (contents.moments.step, *trees)
    tensorflow1.write(form, directory, moments)
    tokenizers_beside.put_theirs(contents, directory)


def _write_own(contents: Contents, directory: Path) -> None:
    tokenizers_beside.put_ours(contents, directory)
    own.write(directory, contents.model, contents.moments, contents.buffers, contents.settings)


def _write_stablehlo(contents: Contents, directory: Path) -> None:
    serving.write(directory, contents.model)
    tokenizers_beside.put_ours(contents, directory)


def _form(contents: Contents) -> Form:
    """The model under their names, with the buffers of a file that had some."""
    form = without_base(to_form(contents.model, contents.source))
    kept = {
        name: value
        for name, value in contents.settings.items()
        if name in OF_THEIRS or (name not in form.config and name not in OUTDATED)
    }
    config = form.config | kept | _special_ids(contents)
    return dataclasses.replace(form, config=config, tensors={**form.tensors, **contents.buffers})


def _special_ids(contents: Contents) -> dict[str, int | None]:
    """What config.json says of special tokens: as in the source's, or as the tokenizer has it.

    Raises:
      UserError: a RoBERTa's positions do not begin behind its padding id, as they do in other people's code.
    """
    known = {name: i for name, i in contents.settings.items() if name.endswith("_token_id")}
    tokenizer, offset = contents.loaded_tokenizer, contents.model.config.position_offset
    if known or tokenizer is None:
        return known
    if offset and tokenizer.pad_id != offset - 1:
        raise UserError(
            f"{contents.source}: model.position_offset {offset} goes with the padding id {offset - 1}, and the "
            f"tokenizer's is {tokenizer.pad_id}: transformers would count positions otherwise"
        )
    ids = {"pad_token_id": tokenizer.pad_id}
    first, last = tokenizer.cls_id, tokenizer.sep_id
    special = {"bos_token_id": first, "cls_token_id": first, "eos_token_id": last, "sep_token_id": last}
    return ids | (special if contents.model.family in ("roberta", "albert", "modernbert") else {})


TARGETS = {
    "huggingface": Target(_write_huggingface, tensor_files.SAFETENSORS, transformers=True),
    "pytorch": Target(_write_pytorch, tensor_files.PICKLE, transformers=True),
    "tensorflow1": Target(_write_tensorflow, f"{tensorflow1.CHECKPOINT}.index", moments=True),
    "bert-jax": Target(_write_own, own.DESCRIPTION, moments=True),
    "stablehlo": Target(_write_stablehlo, serving.PROGRAM),
}
