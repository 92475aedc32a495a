"""A model in memory between reading one format and writing another."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401 (registers the dtype bfloat16 in numpy)
import numpy as np

from bert_jax.convert import sentence_transformers
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.data.corpus_description import CorpusDescription
from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath, to_path
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.param_paths import map_with_paths
from bert_jax.training.state import Moments

RunCorpora = tuple[tuple[float, CorpusDescription], ...]


@dataclass(frozen=True)
class SourceModel:
    """A model that was read, with its tokenizer, its optimizer state and what else the source contained."""

    format: str
    """Name of the format (formats/input_formats.py)."""
    source: str
    """Path it was read from, for messages and the model card."""
    model: NativeModel
    tokenizer_path: StoredPath | None = None
    """File or directory that `Tokenizer.load` takes; None: the source has no tokenizer."""
    hf_model: HuggingFaceModel | None = None
    """The model as read, for the parity report; None if the source is a run or in the native format."""
    optimizer_state: Moments | None = None
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    """Tensors that are not parameters; a file of the same format gets them back unchanged."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The source's config.json; fields that `ModelConfig` does not have, such as `problem_type`, are written back."""
    notes: tuple[str, ...] = ()
    """Sentences for the model card."""

    corpora: RunCorpora = ()
    """What a run was trained on, as far as it recorded it: the share of the rows, and the corpus."""

    dtype: str = "float32"
    """Of the weights to write; the parameters are float32 values that it holds exactly (`round_params`)."""

    def __str__(self) -> str:
        return self.source

    @functools.cached_property
    def loaded_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, read once; None: the source has no tokenizer."""
        return None if self.tokenizer_path is None else Tokenizer.load(self.tokenizer_path)

    @property
    def sentence_embedding(self) -> sentence_transformers.SentenceEmbedding | None:
        """The pooling of sentence-transformers, if its files are in the model's directory."""
        return sentence_transformers.read_sentence_embedding(to_path(self.source), self.model.config.hidden_size)


def round_params(source_model: SourceModel, dtype: str) -> SourceModel:
    """The model with parameters that are rounded to float16 or bfloat16, still stored as float32.

    Raises:
      UserError: a parameter is too large for the dtype.
    """

    def rounded(path: str, leaf: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            values = np.asarray(leaf, np.float32).astype(dtype).astype(np.float32)
        if not np.isfinite(values).all():
            raise UserError(
                f"{source_model}: {path} has the value {np.abs(leaf).max():g}, which {dtype} cannot hold: use bfloat16"
            )
        return values

    model = source_model.model
    params = map_with_paths(rounded, model.params)
    return dataclasses.replace(source_model, model=model._replace(params=params), dtype=dtype)
