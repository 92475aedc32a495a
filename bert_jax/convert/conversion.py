"""One conversion: read, write beside the destination, prove that both are the same model, and move it there."""

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from etils import epath

from bert_jax.convert import sentence_transformers, tokenizer_check
from bert_jax.convert.formats import huggingface, input_formats, native, stablehlo, tensor_files, tensorflow1
from bert_jax.convert.hf_model import Form
from bert_jax.convert.model_card import CARD, write_card
from bert_jax.convert.parity import our_forward, parity_report
from bert_jax.convert.parity.bitwise_diff import differences
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.source_model import Contents
from bert_jax.convert.translate import moments_to, to_form, without_base
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, check_reachable, copy_tree, describe_full_disk, is_remote, walk_files

OUTDATED = (
    *("transformers_version", "torch_dtype", "dtype", "_name_or_path", "_attn_implementation", "auto_map"),
    *("rope_parameters", "rope_scaling", "layer_types"),
)
"""Settings of a foreign config.json that are not true of what is written, or are said there in another way."""
OF_THEIRS = ("embedding_dropout",)
"""Settings that our config has no field for, and so writes with the value of another."""
OF_A_DECODER, OF_A_HEAD = ("tie_word_embeddings",), ("classifier_activation",)
"""Settings of parts that a model may lack; our config then has no field for them."""


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
    sentences: bool = False
    """Whether sentence-transformers' files go with it."""


def convert(
    source: StoredPath,
    destination: StoredPath,
    to: str,
    wishes: input_formats.Wishes = input_formats.Wishes(),  # noqa: B008 (frozen)
    *,
    force: bool = False,
    pooling: str | None = None,
) -> parity_report.Report:
    """Write a model in another format. The destination appears whole or not at all, with a card that says what it is.

    Args:
      source: a run or a model (formats/input_formats/input_formats.py).
      destination: a directory to make.
      to: a name of `TARGETS`.
      wishes: what of the source is taken.
      force: write it even if the parity report fails.
      pooling: of `sentence_transformers.POOLINGS`: write the files with which sentence-transformers pools so. None:
        keep those of the source, if it has any.

    Returns:
      the parity report.

    Raises:
      UserError: no model at the source, a destination that exists, a model, moments or a pooling that the format
        or the model cannot have, no moments where they are wished for, a report that fails, or a full disk.
    """
    if wishes.moments and not TARGETS[to].moments:
        raise UserError(f"--moments keep: {to} has no place for an optimizer's moments: use --to bert-jax")
    if pooling is not None and not TARGETS[to].sentences:
        raise UserError(f"--pooling {pooling}: {to} has no place for it: use --to huggingface")
    check_reachable(destination)
    # A link that leads nowhere does not exist, and yet it is in the way.
    if destination.exists() or os.path.lexists(destination):
        raise UserError(f"{destination} exists already: choose another destination, or remove it")
    with (
        _signals_raise() as raise_pending,
        _full_disk_named(destination),
        input_formats.opened(source, wishes) as contents,
        _beside(destination) as inside,
    ):
        if wishes.moments and contents.moments is None:
            raise UserError(f"{source} has no moments of an optimizer: convert it with --moments drop")
        TARGETS[to].write(contents, inside)
        if TARGETS[to].sentences:
            _write_sentence_embedding(contents, inside, pooling)
        report = _prove(contents, inside, to)
        if not report.passed and not force:
            raise UserError(
                f"{source} and what was written of it are not the same model ({report.failures[0]}): nothing is kept; "
                "--force keeps it"
            )
        if (tokenizer := contents.loaded_tokenizer) is not None and tokenizer.note:
            print(f"note: {tokenizer.note}", file=sys.stderr)
        sentences = TARGETS[to].transformers and (inside / sentence_transformers.MODULES).exists()
        card = write_card(destination.name, contents, to, report, sentences=sentences)
        (inside / CARD).write_text(card, encoding="utf-8", errors="replace")
        raise_pending()
        _move(inside, destination, TARGETS[to].last)
    return report


@contextlib.contextmanager
def _signals_raise() -> Iterator[Callable[[], None]]:
    """Inside, SIGTERM, SIGHUP and SIGINT raise an exception, so that the files are removed; a second signal is ignored.

    Python discards an exception that is raised while it runs a destructor or a callback of the garbage collector: the
    function that this yields raises it again. Handlers of the caller stay, and other threads than the first cannot
    have any.
    """
    pending: list[BaseException] = []
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    first = threading.current_thread() is threading.main_thread()
    handlers = {number: handler for number, handler in usual.items() if first and signal.getsignal(number) is handler}

    def stop(number: int, frame: object) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)
        pending.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise pending[0]

    def raise_pending() -> None:
        if pending:
            raise pending[0]

    try:
        for number in handlers:
            signal.signal(number, stop)
        yield raise_pending
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _full_disk_named(destination: StoredPath) -> Iterator[None]:
    """A disk that is full while a destination is written becomes a UserError."""
    try:
        yield
    except Exception as error:
        line = describe_full_disk(error)
        if line is None:
            raise
        raise UserError(f"{destination} cannot be written: {line}") from error


@contextlib.contextmanager
def _beside(destination: StoredPath) -> Iterator[Path]:
    """An empty directory from which `_move` is a rename, if the destination is on a disk.

    Parents of the destination that are made for it go again if it is not.
    """
    place = None if is_remote(destination) else destination.parent
    missing = [] if place is None else [parent for parent in (place, *place.parents) if not parent.exists()]
    try:
        try:
            if place is not None:
                place.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(dir=place, prefix=".bert-jax-convert-")
        except OSError as error:
            raise _unwritable(destination, error) from error
        with made as scratch:
            inside = Path(scratch) / "model"
            inside.mkdir()
            yield inside
    finally:
        for parent in missing:
            if os.path.lexists(parent) and not any(parent.iterdir()):
                parent.rmdir()


def _unwritable(destination: StoredPath, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    return UserError(f"cannot write to {destination.parent} ({reason}): choose another destination")


def _move(inside: Path, destination: StoredPath, last: str) -> None:
    for file in inside.iterdir():
        if file.is_file():
            shutil.copymode(inside / CARD, file)  # libraries make some that only their owner may read
    if not is_remote(destination):
        try:
            inside.rename(destination)
        except OSError as error:
            if not destination.exists():
                raise _unwritable(destination, error) from error
            raise UserError(f"{destination} was made in the meantime: choose another destination") from error
        return
    held_back = (inside / last).rename(inside.parent / last)
    names = [*(file.relative_to(inside).as_posix() for file in walk_files(epath.Path(inside))), last]
    try:
        copy_tree(inside, destination)
        (destination / last).write_bytes(held_back.read_bytes())
    except BaseException:
        for name in names:
            (destination / name).unlink(missing_ok=True)
        raise


def _prove(contents: Contents, inside: Path, to: str) -> parity_report.Report:
    """Another library's forward pass of the source beside ours of what was written, which is also the same to the bit.

    The passes show that both sides mean the same by their tensors; of tables they see the rows that the sample reaches.
    """
    source_form = contents.form or to_form(contents.model, contents.source)
    inputs = sample_inputs(source_form, contents.loaded_tokenizer)
    other, library = parity_report.other_side(source_form, inputs)
    for_them = TARGETS[to].transformers
    agreement = tokenizer_check.agreement(contents, inside, for_them)
    mask_BS, first, problems = inputs.attention_mask_BS, 0, ()
    if to == "stablehlo":  # gives no hidden states but the last
        ours, first = stablehlo.run(inside, inputs), len(other.hidden_states) - 1
        other = dataclasses.replace(other, hidden_states=other.hidden_states[first:])
    else:
        with input_formats.opened(inside, input_formats.Wishes(moments=contents.moments is not None)) as written:
            ours, problems = our_forward.run(written.model, inputs), differences(contents, written)
    report = parity_report.compare(ours, other, mask_BS, library=library, tokenizer=agreement, first_layer=first)
    return dataclasses.replace(report, problems=(*report.problems, *problems))


def _write_sentence_embedding(contents: Contents, directory: Path, pooling: str | None) -> None:
    config = contents.model.config
    if pooling is None:
        embedding = contents.sentence_embedding
    else:
        sentence_transformers.checked_modes(pooling, config.direction)
        embedding = sentence_transformers.make(pooling, config.hidden_size, config.max_positions)
    if embedding is not None:
        sentence_transformers.write(directory, embedding)


def _write_huggingface(contents: Contents, directory: Path) -> None:
    form = _form(contents)
    huggingface.write(directory, form, tensor_files.write_safetensors, tensor_files.SAFETENSORS)
    tokenizer_check.put_theirs(contents, directory)


def _write_pytorch(contents: Contents, directory: Path) -> None:
    huggingface.write(directory, _form(contents), tensor_files.write_pickle, tensor_files.PICKLE)
    tokenizer_check.put_theirs(contents, directory)


def _write_tensorflow(contents: Contents, directory: Path) -> None:
    form, moments = to_form(contents.model, contents.source), None
    if contents.moments is not None:
        trees = (moments_to(contents.model, tree) for tree in contents.moments[1:])
        moments = (contents.moments.step, *trees)
    tensorflow1.write(form, directory, moments)
    tokenizer_check.put_theirs(contents, directory)


def _write_own(contents: Contents, directory: Path) -> None:
    tokenizer_check.put_ours(contents, directory)
    native.write(directory, contents.model, contents.moments, contents.buffers, contents.settings)


def _write_stablehlo(contents: Contents, directory: Path) -> None:
    stablehlo.write(directory, contents.model)
    tokenizer_check.put_ours(contents, directory)


def _form(contents: Contents) -> Form:
    """The model under their names, with the buffers of a file that had some."""
    form = without_base(to_form(contents.model, contents.source))
    heads = contents.model.heads
    kept_names = (*OF_THEIRS, *(() if heads.mlm else OF_A_DECODER), *(() if heads.mlm or heads.task else OF_A_HEAD))
    kept = {
        name: value
        for name, value in contents.settings.items()
        if name in kept_names or (name not in form.config and name not in OUTDATED)
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
    return ids | (special if contents.model.family not in ("bert", "distilbert", "electra") else {})


TARGETS = {
    "huggingface": Target(_write_huggingface, tensor_files.SAFETENSORS, transformers=True, sentences=True),
    "pytorch": Target(_write_pytorch, tensor_files.PICKLE, transformers=True, sentences=True),
    "tensorflow1": Target(_write_tensorflow, f"{tensorflow1.CHECKPOINT}.index", moments=True),
    "bert-jax": Target(_write_own, native.DESCRIPTION, moments=True, sentences=True),
    "stablehlo": Target(_write_stablehlo, stablehlo.PROGRAM),
}
