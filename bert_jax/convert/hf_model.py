"""The common form of all foreign formats: a model with the names and layout of Hugging Face's transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model as `transformers` saves it, whatever format it is read from or written to.

    Readers and writers of the other formats rename tensors to and from this form; the model families (families/) map
    this form to and from the parameters of bert_jax.
    """

    config: dict[str, Any]
    """The content of ``config.json``; `model_type` is always present."""
    tensors: Mapping
    """Arrays by name in transformers, dense weights as [outputs, inputs]. The mapping may read a tensor on access."""
    source: str
    """Path it was read from, for messages."""
