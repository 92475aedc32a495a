"""One conversion: read the source, write a scratch directory, check parity, and move the directory into place."""

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from bert_jax import __version__
from bert_jax.convert import sentence_transformers, tokenizer_check
from bert_jax.convert.formats import (
    huggingface,
    input_formats,
    native,
    onnx_files,
    openvino_files,
    stablehlo,
    tensorflow1,
)
from bert_jax.convert.formats.format import OutputFormat
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.model_card import CARD, format_model_card
from bert_jax.convert.parity import jax_forward, parity_report
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.source_model import SourceModel, round_params
from bert_jax.convert.translate import to_huggingface, to_huggingface_config
from bert_jax.errors import UserError, printable
from bert_jax.storage.failures import describe_full_disk
from bert_jax.storage.files import copy_tree, walk_files
from bert_jax.storage.paths import StoredPath, check_reachable, is_remote, unwritable_parent


def convert(
    source: StoredPath | SourceModel,
    destination: StoredPath,
    to: str,
    read_options: input_formats.ReadOptions = input_formats.ReadOptions(),  # noqa: B008 (frozen)
    *,
    force: bool = False,
    pooling: str | None = None,
    dtype: str = "float32",
) -> parity_report.ParityReport:
    """Write a model in another format, with a model card. The destination appears complete or not at all.

    Args:
      source: a run or a model (formats/input_formats.py), or a model in memory; its `source` is for messages.
      destination: the directory to create.
      to: a name of `OUTPUT_FORMATS`.
      read_options: which parts of the source to read.
      force: keep the destination even if the parity report fails.
      pooling: one of `sentence_transformers.POOLINGS`: write the files that make sentence-transformers pool this way.
        None: copy the source's files, if it has any.
      dtype: of the written weights: float32, or float16 or bfloat16 for huggingface and pytorch.

    Returns:
      the parity report.

    Raises:
      UserError: no model at the source, an existing destination, a model, optimizer state or pooling that the format
        or the model does not support, missing optimizer state, a failed parity report, or a full disk.
    """
    _check_options(OUTPUT_FORMATS[to], to, read_options, pooling, dtype)
    check_destination(destination)
    with (
        _signals_as_exceptions() as raise_pending,
        _full_disk_as_user_error(destination),
        _open(source, read_options) as source_model,
        _scratch_directory(destination) as output_directory,
    ):
        if read_options.optimizer_state and source_model.optimizer_state is None:
            raise UserError(f"{source} has no optimizer moments: convert it with --optimizer-state drop")
        if (tokenizer := source_model.loaded_tokenizer) is not None and tokenizer.note:
            print(f"note: {printable(tokenizer.note)}", file=sys.stderr)
        embedding = _sentence_embedding(source_model, to, pooling)
        to_write = source_model if dtype == "float32" else round_params(source_model, dtype)
        OUTPUT_FORMATS[to].write(to_write, output_directory)
        if embedding is not None:
            sentence_transformers.write(output_directory, embedding)
        report = _check_parity(source_model, to_write, output_directory, to)
        if not report.passed and not force:
            raise UserError(
                f"{source} and the converted model differ ({report.failures[0]}): nothing is kept; "
                "use --force to keep it"
            )
        sentences = OUTPUT_FORMATS[to].for_transformers and (output_directory / sentence_transformers.MODULES).exists()
        graphs = [graph.path for graph in OUTPUT_FORMATS[to].graphs]
        card = format_model_card(destination.name, source_model, to, report, graphs, sentences=sentences)
        (output_directory / CARD).write_text(card, encoding="utf-8", errors="replace")
        raise_pending()
        _move_into_place(output_directory, destination, OUTPUT_FORMATS[to].final_file)
    return report


def _check_options(
    output_format: OutputFormat, to: str, read_options: input_formats.ReadOptions, pooling: str | None, dtype: str
) -> None:
    """Raise UserError for an option that the output format does not have."""
    if read_options.optimizer_state and not output_format.optimizer_state:
        raise UserError(f"--optimizer-state keep: {to} cannot hold the optimizer's moments: use --to bert-jax")
    if pooling is not None and not output_format.for_sentence_transformers:
        raise UserError(f"--pooling {pooling}: {to} cannot hold a pooling: use --to huggingface")
    if dtype != "float32" and not output_format.half_precision:
        raise UserError(f"--dtype {dtype}: {to} has float32 or int8 weights: use --to huggingface")


def check_destination(destination: StoredPath, option: str = "") -> None:
    """Check that a directory can be created, as far as this is known before it is written.

    Args:
      destination: the directory.
      option: the option that names it, with a space, for the message.

    Raises:
      UserError: it exists, or a parent of it is no directory or cannot be written to.
    """
    check_reachable(destination)
    # exists() is False for a broken link, which would block the rename.
    if destination.exists() or os.path.lexists(destination):
        raise UserError(f"{option}{destination} exists already: choose another destination, or remove it")
    if not is_remote(destination) and (parent := unwritable_parent(destination)):
        reason = "permission denied" if parent.is_dir() else "not a directory"
        raise UserError(f"{option}{destination}: cannot write to {parent} ({reason}): choose another destination")


def _open(
    source: StoredPath | SourceModel, read_options: input_formats.ReadOptions
) -> contextlib.AbstractContextManager[SourceModel]:
    in_memory = isinstance(source, SourceModel)
    return contextlib.nullcontext(source) if in_memory else input_formats.open_model(source, read_options)


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[Callable[[], None]]:
    """SIGTERM, SIGHUP and SIGINT raise an exception in the block, so that files are removed; later signals are ignored.

    Python discards an exception raised in a destructor or in a callback of the garbage collector: the yielded function
    raises it again. Handlers that the caller installed are kept; only the main thread can have handlers.
    """
    pending: list[BaseException] = []
    default_handlers = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {
        number: handler
        for number, handler in default_handlers.items()
        if is_main and signal.getsignal(number) is handler
    }

    def stop(number: int, frame: object) -> None:
        for handled in handlers:
            signal.signal(handled, signal.SIG_IGN)
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
def _full_disk_as_user_error(destination: StoredPath) -> Iterator[None]:
    """Turn the error of a full disk into a UserError."""
    try:
        yield
    except Exception as error:
        line = describe_full_disk(error)
        if line is None:
            raise
        raise UserError(f"{destination} cannot be written: {line}") from error


@contextlib.contextmanager
def _scratch_directory(destination: StoredPath) -> Iterator[Path]:
    """An empty directory on the destination's file system, so that `_move_into_place` is a rename.

    Parents of the destination that were created for it are removed if nothing is written.
    """
    parent = None if is_remote(destination) else destination.parent
    missing = [] if parent is None else [parent for parent in (parent, *parent.parents) if not parent.exists()]
    try:
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            scratch_directory = tempfile.TemporaryDirectory(dir=parent, prefix=".bert-jax-convert-")
        except OSError as error:
            raise _unwritable_error(destination, error) from error
        with scratch_directory as scratch:
            output_directory = Path(scratch) / "model"
            output_directory.mkdir()
            yield output_directory
    finally:
        for parent in missing:
            if os.path.lexists(parent) and not any(parent.iterdir()):
                parent.rmdir()


def _unwritable_error(destination: StoredPath, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    return UserError(f"cannot write to {destination.parent} ({reason}): choose another destination")


def _move_into_place(output_directory: Path, destination: StoredPath, final_file: str) -> None:
    for file in output_directory.iterdir():
        if file.is_file():
            shutil.copymode(output_directory / CARD, file)  # some libraries create files that only the owner can read
    if not is_remote(destination):
        try:
            output_directory.rename(destination)
        except OSError as error:
            if not destination.exists():
                raise _unwritable_error(destination, error) from error
            raise UserError(f"{destination} was created in the meantime: choose another destination") from error
        return
    held_back = (output_directory / final_file).rename(output_directory.parent / final_file)
    names = [
        *(file.relative_to(output_directory).as_posix() for file in walk_files(epath.Path(output_directory))),
        final_file,
    ]
    try:
        copy_tree(output_directory, destination)
        (destination / final_file).write_bytes(held_back.read_bytes())
    except BaseException:
        for name in names:
            (destination / name).unlink(missing_ok=True)
        raise


def _check_parity(
    source_model: SourceModel, to_write: SourceModel, output_directory: Path, to: str
) -> parity_report.ParityReport:
    """Compare the source in a reference library with the written model in JAX; parameters must be equal bit for bit.

    `to_write` is the source, or the source with rounded parameters.

    Formats for serving are opened by their runtime instead. The forward passes show that both sides interpret the
    tensors alike; they read only some embedding rows. A model
    that transformers does not have, e.g. with adapters, is compared with itself before it was written.
    """
    inputs, reference, library = _run_source(source_model)
    graphs, problems = OUTPUT_FORMATS[to].graphs, ()
    agreement = tokenizer_check.written_tokenizer_agreement(
        source_model, output_directory, OUTPUT_FORMATS[to].for_transformers
    )
    sides = [
        (graph.run(output_directory / graph.path, source_model.model, inputs), graph.compare, graph.path)
        for graph in graphs
    ]
    if graphs:  # all graphs of a format have the same outputs: the last hidden state at most
        reference = {
            name: values for name, values in reference.items() if name in sides[0][0] or name.endswith("logits")
        }
    else:
        with input_formats.open_model(
            output_directory, input_formats.ReadOptions(optimizer_state=source_model.optimizer_state is not None)
        ) as written:
            outputs = jax_forward.run(written.model, inputs)
            problems = parity_report.describe_differences(to_write, written)
        sides = [(outputs, _comparison(to_write.dtype), "")]
    reports = [
        parity_report.compare_outputs(
            outputs,
            reference,
            inputs.attention_mask_BS,
            library=library,
            tokenizer=agreement,
            compare=compare,
            file=file if len(sides) > 1 else "",
        )
        for outputs, compare, file in sides
    ]
    differences = tuple(part for report in reports for part in report.differences)
    if not differences:
        problems = "no output could be compared", *problems
    problems = (*(line for report in reports for line in report.problems), *problems)
    return dataclasses.replace(reports[0], differences=differences, problems=problems)


def _comparison(dtype: str) -> parity_report.Comparison:
    """How outputs of parameters in this dtype are compared."""
    if dtype == "float32":
        return parity_report.largest_difference
    return functools.partial(parity_report.relative_difference, limit=parity_report.ROUNDED_LIMITS[dtype])


def _run_source(source_model: SourceModel) -> tuple[ForwardInputs, ForwardOutputs, str]:
    """Sample texts, the source's outputs for them, and the library that computed these."""
    model, tokenizer = source_model.model, source_model.loaded_tokenizer
    try:
        hf_model = source_model.hf_model or to_huggingface(model, source_model.source)
    except UserError:
        sizes = HuggingFaceModel(to_huggingface_config(model), {}, source_model.source)
        inputs = sample_inputs(sizes, tokenizer)
        return inputs, jax_forward.run(model, inputs), f"bert_jax {__version__} (transformers has no such model)"
    inputs = sample_inputs(hf_model, tokenizer)
    return inputs, *parity_report.reference_forward(hf_model, inputs)


def _sentence_embedding(
    source_model: SourceModel, to: str, pooling: str | None
) -> sentence_transformers.SentenceEmbedding | None:
    """The pooling to write: the given one or the source's; None if there is none, or the output has nothing to pool."""
    output_format, config = OUTPUT_FORMATS[to], source_model.model.config
    if not output_format.for_sentence_transformers:
        return None
    only_logits = output_format.graphs and source_model.model.heads.reads_cls_only
    if pooling is None:
        return None if only_logits else source_model.sentence_embedding
    if only_logits:
        raise UserError(
            f"--pooling {pooling}: {source_model} classifies [CLS], and {to} then has its logits as the only output:"
            " leave --pooling out, or use --to huggingface"
        )
    sentence_transformers.validate_pooling(pooling, config.direction)
    return sentence_transformers.make(pooling, config.hidden_size, config.max_positions)


OUTPUT_FORMATS = {
    "huggingface": huggingface.OUTPUT,
    "pytorch": huggingface.PICKLE_OUTPUT,
    "tensorflow1": tensorflow1.OUTPUT,
    "bert-jax": native.OUTPUT,
    "stablehlo": stablehlo.OUTPUT,
    **onnx_files.OUTPUTS,
    **openvino_files.OUTPUTS,
}
"""By the name that --to takes."""
