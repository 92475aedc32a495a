"""Arguments that several commands of `bert-jax` have, and the printing of metrics."""

from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from bert_jax import config as config_lib
from bert_jax.config import Config, presets
from bert_jax.data import mixture as mixture_lib
from bert_jax.errors import UserError
from bert_jax.field_validation import Rows

ConfigArg = Annotated[Config, tyro.conf.arg(name="")]
"""The config that CONFIG names, changed by flags such as ``--model.num-layers``."""
Corpora = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR[=WEIGHT]")]
MicroBatch = Rows | Literal["auto"] | None
Words = tyro.conf.Suppress[tuple[str, ...]]
"""The arguments as typed."""


def with_vocabulary(config: Config, words: Sequence[str], mixture: Sequence[mixture_lib.CorpusWeight]) -> Config:
    """Set a preset's vocab_size to that of its corpora; that of a config file or of --model.vocab-size is kept.

    Corpora that cannot be opened are ignored here: the command reports them.

    Args:
      config: the parsed config.
      words: the arguments as typed, CONFIG first.
      mixture: the corpora.
    """
    if "model.vocab_size" in given_fields(words) or words[0] not in presets.preset_files():
        return config
    try:
        return config_lib.replace(config, model={"vocab_size": mixture_lib.vocab_size(mixture)})
    except UserError:
        return config


def given_fields(words: Sequence[str]) -> set[str]:
    """Dotted names of the fields that flags set, such as ``model.vocab_size``.

    Args:
      words: the arguments as typed.
    """
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    return {name.replace(".no_", ".") for name in names}


def print_metrics(metrics: dict[str, float]) -> None:
    """Print one metric on each line."""
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")
