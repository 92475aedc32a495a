"""A model as it lies between two formats."""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_jax.convert import sentence_transformers
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.storage import StoredPath, path
from bert_jax.tokenizers.tokenizer_path import Tokenizer
from bert_jax.training.state import Moments


@dataclass(frozen=True)
class SourceModel:
    """What a source held."""

    format: str
    """Name of the format (formats/input_formats/input_formats.py)."""
    source: str
    """Where it was read, for messages and the model card."""
    model: NativeModel
    tokenizer_path: StoredPath | None = None
    """File or directory that `Tokenizer.load` takes; None: there was none."""
    hf_model: HuggingFaceModel | None = None
    """What was read, if it was no file of ours: the other side of the parity report."""
    optimizer_state: Moments | None = None
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    """Tensors that are no parameters; a file of the same format gets them back as they were."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """Of a foreign config.json; those that no model of ours depends on, such as `problem_type`, are written again."""
    notes: tuple[str, ...] = ()
    """Sentences for the model card."""

    @functools.cached_property
    def loaded_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, read once; None: there is none."""
        return None if self.tokenizer_path is None else Tokenizer.load(self.tokenizer_path)

    @property
    def sentence_embedding(self) -> sentence_transformers.SentenceEmbedding | None:
        """How sentence-transformers pools its tokens, if its files are beside the model."""
        return sentence_transformers.read(path(self.source), self.model.config.hidden_size)
