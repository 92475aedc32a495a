"""bert_jax: pretrain BERT-family encoders with JAX on TPU and GPU pods.

Importing the package imports no jax; a name below is loaded when it is first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Config": "bert_jax.config",
    "Study": "bert_jax.experiments.study",
    "Tokenizer": "bert_jax.tokenizers.tokenizer",
    "UserError": "bert_jax.errors",
    "load": "bert_jax.inference.loaded_model",
}
__all__ = ["Config", "Study", "Tokenizer", "UserError", "load"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'bert_jax' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
