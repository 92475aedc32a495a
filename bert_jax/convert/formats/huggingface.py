"""Directories of transformers: ``config.json`` and weights as safetensors or a pickle (tensor_files.py)."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bert_jax.convert import tokenizer_check
from bert_jax.convert.formats import tensor_files, torch_checkpoint
from bert_jax.convert.formats.format import InputFormat, OutputFormat, ReadOptions, to_source_model
from bert_jax.convert.formats.tensor_files import PICKLE, SAFETENSORS
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import BUFFERS
from bert_jax.convert.translate import strip_prefix_of_headless_model, to_huggingface
from bert_jax.errors import UserError
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.readers import find_tokenizer_file

CONFIG = "config.json"
FILES = tuple(f"{name}{end}" for name in (SAFETENSORS, PICKLE) for end in ("", ".index.json"))
"""Names that weights of transformers have."""
STALE_HF_FIELDS = (
    *("transformers_version", "torch_dtype", "dtype", "_name_or_path", "_attn_implementation", "auto_map"),
    *("rope_parameters", "rope_scaling", "layer_types"),
)
"""Fields of a source's config.json that are dropped: they do not hold for the written model, or are replaced."""
HF_ONLY_FIELDS = ("embedding_dropout", "classifier_dropout_prob")
"""Fields that `ModelConfig` lacks, written with a value of another field or a default: the source's value takes
precedence."""
DECODER_FIELDS, HEAD_FIELDS = ("tie_word_embeddings",), ("classifier_activation",)
"""Fields of parts that a model may lack: the source's value is kept if the model lacks the part."""


def matches(source: StoredPath) -> bool:
    """Whether a directory has a weights file of transformers."""
    return any((source / name).exists() for name in FILES)


def read(source: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read a directory; tensors are read on access.

    Raises:
      UserError: files are missing or damaged.
    """
    config = read_json_object(source / CONFIG, f"without it, {source} is not a Hugging Face model")
    hf_model = HuggingFaceModel(config, tensor_files.open_tensors(source), str(source))
    return to_source_model("huggingface", hf_model, find_tokenizer_file(source), options)


def _writer(save: Callable[[Path, Mapping[str, np.ndarray]], None], name: str) -> Callable[[SourceModel, Path], None]:
    """A writer of config, weights (with `save`, in a file `name`) and tokenizer."""

    def write(source_model: SourceModel, directory: Path) -> None:
        hf_model, dtype = hf_model_to_write(source_model), source_model.dtype
        if dtype != "float32":  # transformers loads the weights in the dtype of the config
            tensors = {n: x if n.endswith(BUFFERS) else x.astype(dtype) for n, x in hf_model.tensors.items()}
            hf_model = dataclasses.replace(hf_model, config=hf_model.config | {"dtype": dtype}, tensors=tensors)
        (directory / CONFIG).write_text(json.dumps(hf_model.config, indent=2) + "\n")
        save(directory / name, hf_model.tensors)
        tokenizer_check.write_hf_tokenizer(source_model, directory)

    return write


def hf_model_to_write(source_model: SourceModel) -> HuggingFaceModel:
    """The model with the names of transformers, and with the buffers and config fields of the source.

    Raises:
      UserError: the model has a setting or a head that its family does not have.
    """
    hf_model = to_huggingface(source_model.model, source_model.source)
    hf_model = dataclasses.replace(hf_model, tensors={**hf_model.tensors, **source_model.buffers})
    hf_model = strip_prefix_of_headless_model(hf_model)
    heads = source_model.model.heads
    kept_names = (
        *HF_ONLY_FIELDS,
        *(() if heads.mlm else DECODER_FIELDS),
        *(() if heads.mlm or heads.task else HEAD_FIELDS),
    )
    kept = {
        name: value
        for name, value in source_model.hf_config.items()
        if name in kept_names or (name not in hf_model.config and name not in STALE_HF_FIELDS)
    }
    config = hf_model.config | kept | _special_ids(source_model)
    return dataclasses.replace(hf_model, config=config)


def _special_ids(source_model: SourceModel) -> dict[str, int | None]:
    """Ids of special tokens for config.json: those of the source's config, else those of the tokenizer.

    Raises:
      UserError: a RoBERTa's positions do not begin after its padding id, as transformers assumes.
    """
    known = {name: i for name, i in source_model.hf_config.items() if name.endswith("_token_id")}
    tokenizer, offset = source_model.loaded_tokenizer, source_model.model.config.position_offset
    if known or tokenizer is None:
        return known
    if offset and tokenizer.pad_id != offset - 1:
        raise UserError(
            f"{source_model.source}: model.position_offset {offset} needs the padding id {offset - 1}, but "
            f"the tokenizer's is {tokenizer.pad_id}: transformers would compute other positions"
        )
    ids = {"pad_token_id": tokenizer.pad_id}
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    special = {"bos_token_id": cls, "cls_token_id": cls, "eos_token_id": sep, "sep_token_id": sep}
    return ids | (special if source_model.model.family not in ("bert", "distilbert", "electra") else {})


INPUT = InputFormat("model.safetensors or pytorch_model.bin with config.json", matches, read)
OUTPUT = OutputFormat(
    _writer(tensor_files.write_safetensors, SAFETENSORS),
    SAFETENSORS,
    for_transformers=True,
    for_sentence_transformers=True,
    half_precision=True,
)
PICKLE_OUTPUT = OUTPUT._replace(write=_writer(torch_checkpoint.save, PICKLE), final_file=PICKLE)
