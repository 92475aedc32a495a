"""What foreign formats are brought into and written from: a model under Hugging Face's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model as `transformers` would save it, wherever it came from or goes to.

    A format other than Hugging Face's is a renaming to and from this; so is a family of models (families/), on the
    side of our own parameters.
    """

    config: dict[str, Any]
    """What their ``config.json`` says; `model_type` is always there."""
    tensors: Mapping[str, np.ndarray]
    """By their names, dense weights as [outputs, inputs]. A mapping may read a tensor when it is asked for."""
    source: str
    """Where it was read, for messages."""
