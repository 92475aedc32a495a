"""Config sections of a fine-tuned model: its head, and the run that trains it; and of pretraining with a teacher."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.errors import require
from bert_jax.field_validation import Count, CountOrZero, Interval, NonNegative, check


@dataclass(frozen=True)
class TaskHead:
    """Structure of the head of a fine-tuned model; published families differ in it."""

    kind: Literal["classification", "multilabel", "multiple_choice", "tagging", "span", "replaced"]
    """A label per example (RTE), any number of labels per example, the best of several endings (SWAG), a label per
    token (NER), start and end of an answer (SQuAD), or whether a token was replaced (ELECTRA's discriminator; Clark et
    al. 2020)."""
    labels: tuple[str, ...]
    """Names of the logits. A single one is a regression, the score of an ending, or with `replaced` the logit of
    "replaced"."""
    reads: Literal["pooled", "cls", "mean", "tokens"]
    """The pooler's output, or of the last layer: [CLS], the mean over an example, or every token."""
    activation: Literal["none", "tanh", "relu", "gelu", "gelu_tanh"] = "none"
    """Activation of a dense layer, as wide as the encoder, before the output layer; `none`: no such layer."""
    norm: bool = False
    """Whether a LayerNorm follows the activation (ModernBERT)."""
    mix: bool = False
    """Whether the head reads a trained mean of all L + 1 hidden states instead of the last layer's: gamma times the sum
    over l of softmax(s)_l h_l (Peters et al. 2018, equation 1, without their optional LayerNorm). A pooler reads the
    mixed [CLS]."""
    cls_norm: Literal["none", "centre", "standardise", "batch", "layer"] = "none"
    """Normalisation of the [CLS] vector (after `mix`) that the head, or its pooler, reads (proposed by Zhou, Du and Ren
    2019, arXiv 1911.03918; the formulas are those of bert_jax, model/cls_norm.py): subtract the training set's mean,
    also divide by its standard deviation, batch normalisation, or LayerNorm."""


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run: what it trains on labelled examples."""

    task: str
    """Name of the task: a key of `finetune.tasks.TASKS`, as `sst2` or `tagging`."""
    head: TaskHead
    family: str
    """Family of transformers that the model is exported as."""
    batch_examples: Count
    """Examples per step; they are packed into the phase's rows."""
    max_length: Annotated[int, Interval("[8, 1e6]")]
    """Longest example in tokens, special ones included; longer ones are truncated."""
    new_head: bool = True
    """Whether the head is initialised at random; False: it is that of the source."""
    new_layers: CountOrZero = 0
    """Top layers that are initialised at random, together with the pooler (Zhang et al. 2021, section 5)."""
    class_weights: tuple[NonNegative, ...] = ()
    """Weight of each label's examples or tokens in the loss; empty: all are 1."""
    label_smoothing: Annotated[float, Interval("[0, 1)")] = 0.0
    """Share of the target distribution that is uniform over the classes (Szegedy et al. 2016, section 7)."""
    flags: tuple[str, ...] = ()
    """The flags of the command that differ from its defaults, without those of seeds."""
    data_sha256: str = ""
    """Of the encoded training examples."""
    source_sha256: str = ""
    """Of the model that the run starts from."""
    command: Literal["finetune", "compress distil"] = "finetune"
    """The command of bert-jax that made the run."""

    def __post_init__(self) -> None:
        check(self, "finetune.")
        require(len(self.head.labels) >= 1, "finetune.head.labels: a head needs at least one label")
        count = len(self.class_weights)
        require(
            count in (0, len(self.head.labels)),
            f"finetune.class_weights has {count} weights for {len(self.head.labels)} labels: give one for each",
        )
        require(
            self.head.cls_norm == "none" or self.head.reads in ("pooled", "cls"),
            f"finetune.head.cls_norm '{self.head.cls_norm}' normalises [CLS], and a head that reads "
            f"'{self.head.reads}' does not read it: set finetune.head.cls_norm none",
        )


@dataclass(frozen=True)
class DistilConfig:
    """A pretraining run with a teacher (`bert-jax compress pretrain`), which `start.source` names."""

    flags: tuple[str, ...] = ()
    """The flags of student and loss that differ from the defaults."""
    source_sha256: str = ""
    """Of the teacher, and of the model that the student begins with, if it is another one."""
