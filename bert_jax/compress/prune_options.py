"""Options of `bert-jax compress prune`."""

from dataclasses import dataclass

from bert_jax.errors import require
from bert_jax.field_validation import Count, CountOrZero, Rate, Share, check
from bert_jax.finetune.options import FileOptions, FinetuneOptions

TEXT_LENGTH = 64
"""Default of the longest text, in tokens."""


@dataclass(frozen=True, kw_only=True)
class PruneOptions(FileOptions):
    """What is removed, by the importance for which loss."""

    task: str = ""
    """The task that MODEL was fine-tuned on, as of `bert-jax finetune`, whose files are in --data. Without it, heads
    and units are chosen by the loss of masked tokens in the lines of the .txt files in --data."""
    heads: Share = 0.5
    """Share of each layer's attention heads to keep; 1: all."""
    units: Share = 0.5
    """Share of each feed-forward layer's units to keep; 1: all."""
    iterations: Count = 8
    """Removals, each of an equal part after importances were computed again; 1: all at once. At most as many as a layer
    loses heads or units."""
    examples: Count = 512
    """Examples of train, or texts, from which importances are computed. Loss and score are those of all of dev, or of
    as many other texts."""
    max_length: Count | None = None
    """Tokens of an example or text. Default: as of `bert-jax finetune`; 64 for texts, of which longer ones are
    skipped."""
    mask_share: Rate = 0.15
    """Share of a text's tokens that are masked, without --task."""
    seed: CountOrZero = 0
    """Of the choice of examples and masked tokens."""

    def __post_init__(self) -> None:
        check(self, "--")
        require(self.mask_share > 0, "--mask-share is 0: it must be above 0")
        require(
            self.heads < 1 or self.units < 1, "--heads 1 and --units 1 remove nothing: give one of them less than 1"
        )

    def finetune_options(self) -> FinetuneOptions:
        """The options of fine-tuning that read the task."""
        return FinetuneOptions(**self.file_options(), max_length=self.max_length)
