"""What a format provides, a reader, a writer or both, and what readers of other libraries' formats share."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from bert_jax.convert.families.family import HuggingFaceConfig
from bert_jax.convert.families.hf_config_validation import validate_hf_config
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity.parity_report import Comparison, largest_difference
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import BUFFERS, LazyStateDict, lazy_row_slice, lazy_transpose, to_lazy_tensors
from bert_jax.convert.translate import NativeModel, find_family, from_huggingface, with_base_prefix
from bert_jax.errors import UserError, require
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """What to read of a source."""

    optimizer_state: bool = False
    """Also read the optimizer's moments."""
    drop: tuple[str, ...] = ()
    """Patterns of the names of tensors to leave out."""
    trim_vocabulary: bool = False
    """Remove rows after the tokenizer's last token from the vocabulary's tables."""
    part: Literal["model", "generator", "both"] = "model"
    """What of a run of replaced-token detection, whose model is the discriminator; `both`: the tree of both models, as
    in its checkpoints (model/generator.py)."""


class InputFormat(NamedTuple):
    """One format that can be read."""

    description: str
    """For error messages."""
    matches: Callable[[StoredPath], bool]
    """Whether a source is in this format."""
    read: Callable[[StoredPath, ReadOptions, Path], SourceModel]
    """(source, options, an empty directory that exists as long as the model is read)."""


class GraphFile(NamedTuple):
    """A file for serving: a model that a runtime opens, not bert_jax."""

    path: str
    """In the directory."""
    run: Callable[[Path, NativeModel, ForwardInputs], ForwardOutputs]
    """Opens the file in its runtime, and runs a batch; some outputs may be missing."""
    compare: Comparison = largest_difference
    """How the parity report compares outputs."""


class OutputFormat(NamedTuple):
    """One format that can be written."""

    write: Callable[[SourceModel, Path], None]
    """(model, an empty directory to write into)."""
    final_file: str
    """The file that makes a directory a model; in an object store it is written last."""
    optimizer_state: bool = False
    """Whether it can hold the optimizer's moments."""
    for_transformers: bool = False
    """Whether transformers loads it, tokenizer included."""
    for_sentence_transformers: bool = False
    """Whether it includes the files of sentence-transformers."""
    half_precision: bool = False
    """Whether its weights may be float16 or bfloat16."""
    graphs: tuple[GraphFile, ...] = ()
    """Of a format for serving; none: bert_jax reads the format."""


def refuse_drop_and_trim(source: StoredPath, options: ReadOptions) -> None:
    """Raise UserError for options that a run or a model in the native format does not have."""
    if options.drop or options.trim_vocabulary:
        raise UserError(
            f"{source} is a run or model of bert_jax: --drop and --trim-vocabulary apply to other formats only"
        )


def to_source_model(
    name: str,
    hf_model: HuggingFaceModel,
    tokenizer: StoredPath | None,
    options: ReadOptions,
    notes: tuple[str, ...] = (),
) -> SourceModel:
    """Check a model of transformers, apply the options and convert it.

    Args:
      name: of the format.
      hf_model: the model.
      tokenizer: its tokenizer, as `SourceModel.tokenizer_path`.
      options: of the conversion.
      notes: sentences for the model card.

    Raises:
      UserError: the model or an option does not fit the family or the tokenizer.
    """
    hf_model = dataclasses.replace(hf_model, config=validate_hf_config(hf_model.config, hf_model.source))
    hf_model = with_base_prefix(hf_model)
    buffers = {key: hf_model.tensors[key] for key in hf_model.tensors if key.endswith(BUFFERS)}
    if options.drop:
        hf_model = _drop_tensors(hf_model, options.drop)
    size = None if tokenizer is None else Tokenizer.load(tokenizer).vocab_size
    if options.trim_vocabulary:
        rows = HuggingFaceConfig(hf_model.config, hf_model.source).required_size("vocab_size")
        hf_model = trim_vocabulary(hf_model, rows if size is None else size)
    model = from_huggingface(hf_model)
    if size is not None and size > model.config.vocab_size:
        raise UserError(
            f"{hf_model.source}: the tokenizer {tokenizer.name} has {size} tokens, the model rows for "
            f"{model.config.vocab_size}: it belongs to another model"
        )
    return SourceModel(
        name,
        hf_model.source,
        model,
        tokenizer,
        hf_model,
        buffers=buffers,
        hf_config=hf_model.config,
        notes=notes,
    )


def _drop_tensors(hf_model: HuggingFaceModel, patterns: tuple[str, ...]) -> HuggingFaceModel:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in hf_model.tensors):
            near = difflib.get_close_matches(pattern, list(hf_model.tensors), n=1, cutoff=0.0)
            raise UserError(
                f"--drop '{pattern}' matches no tensor of {hf_model.source}, which has for example '{''.join(near)}'"
            )
    kept = {
        k: v
        for k, v in to_lazy_tensors(hf_model.tensors).items()
        if not any(fnmatch.fnmatchcase(k, p) for p in patterns)
    }
    return dataclasses.replace(hf_model, tensors=LazyStateDict(kept))


def trim_vocabulary(hf_model: HuggingFaceModel, vocab_size: int) -> HuggingFaceModel:
    """Remove the rows after the tokenizer's last token from every table and bias of the vocabulary.

    Trainers add such rows for sizes that divide evenly: NVIDIA's BERT pads to a multiple of 8 (DeepLearningExamples
    PyTorch/LanguageModeling/BERT/run_pretraining.py), Megatron to a multiple of 128 times the number of tensor-parallel
    parts. Hidden states stay the same. Probabilities are then over the tokenizer's tokens only.
    """
    family, tensors = (
        find_family(HuggingFaceConfig(hf_model.config, hf_model.source)),
        to_lazy_tensors(hf_model.tensors),
    )
    word, bias = family.tensor_name("encoder/embeddings/word"), family.tensor_name("mlm/bias")
    tables = {word, word.removeprefix(f"{family.base}."), bias, f"{family.decoder}.weight", f"{family.decoder}.bias"}
    rows = {tensors[name].shape[0] for name in tables & tensors.keys()}
    require(
        len(rows) <= 1, f"{hf_model.source}: tables of the vocabulary have different numbers of rows: {sorted(rows)}"
    )
    kept = {name: lazy_row_slice(tensors[name], 0, vocab_size) for name in tables & tensors.keys()}
    # MobileBERT's further columns of the decoder are stored with a column for each token.
    columns = {entry.hf_name for entry in family.names if entry.param_path == "mlm/extra_columns"} & tensors.keys()
    kept |= {name: lazy_transpose(lazy_row_slice(lazy_transpose(tensors[name]), 0, vocab_size)) for name in columns}
    config = hf_model.config | {"vocab_size": vocab_size}
    return dataclasses.replace(hf_model, config=config, tensors=LazyStateDict(tensors | kept))
