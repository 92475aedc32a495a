"""Options of fine-tuning, and the recipe that fills those that are not given."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from bert_jax.config import ModelConfig, OptimizerConfig, Phase
from bert_jax.errors import require
from bert_jax.field_validation import Count, CountOrZero, Interval, NonNegative, Positive, Rate, Share, Size, check

SMALL_TASK = 10_000
"""Training sets with fewer examples have the recipe of Mosbach et al. (2021)."""
TRIANGLE_RATIO = 32
"""Peak divided by the first and last rate of the triangular schedule (Howard and Ruder 2018, section 3.2)."""


def changed_flags(options: Any, without: Sequence[str] = ()) -> tuple[str, ...]:
    """The flags of a dataclass of options that differ from its defaults, as in ``--epochs 5``.

    Args:
      options: an instance whose fields are flags.
      without: fields to leave out.
    """
    found = []
    for field in dataclasses.fields(options):
        name, value = field.name.replace("_", "-"), getattr(options, field.name)
        if value == field.default or field.name in without:
            continue
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            words = value if isinstance(value, tuple) else (value,)
            found.append(shlex.join([f"--{name}", *map(str, words)]))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How the files of a task are read: flags of every command that reads them."""

    text_columns: tuple[str, ...] | None = None
    """For classification, multilabel and regression: the columns with the text, or with the two texts of a pair: names
    in the header, keys of JSON lines, or numbers from 0 of a file without header. For multiple_choice: with the context
    and, if there is one, the beginning of all endings. For tagging: the list of words, in files with a sentence in each
    row. Default: text; for multiple_choice sent1 and sent2, as in SWAG; for tagging tokens."""
    label_column: str = "label"
    """For classification, multilabel, regression and multiple_choice: the column with the label or labels. For tagging:
    the list of tags, in files with a sentence in each row. Default: label; for tagging the column that ends in tags."""
    label_separator: str = ","
    """For multilabel: what separates the labels of a text in a table; lists in JSON lines and Parquet need none."""
    tag_column: int = -1
    """For tagging: the column with the tags, from 0; -1 is the last one, or UPOS in CoNLL-U."""
    word_column: CountOrZero | None = None
    """For tagging: the column with the words, from 0. Default: FORM in CoNLL-U and CoNLL-U Plus, else 0."""
    skip_damaged: bool = False
    """For squad: leave out questions with an answer that is not where the file says, and count them."""

    def file_options(self) -> dict[str, Any]:
        """By name, the fields of this class."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(FileOptions)}


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(FileOptions):
    """The recipe. None: its default (`with_recipe`)."""

    max_length: Annotated[int, Interval("[8, 1e6]")] | None = None
    """Longest example in tokens; longer ones are truncated, and contexts of squad are split into windows. Default: 128,
    for squad 384, or the number of the model's positions if that is smaller."""
    stride: Count = 128
    """For squad: tokens by which a window of a long context advances."""
    null_threshold: float | None = None
    """For squad: a question has no answer if the score of no answer exceeds that of the best answer by more. Default:
    tuned on dev where dev has questions without an answer."""
    epochs: Positive | None = None
    """Passes over the training set. Default: 20 below 10,000 examples (Mosbach et al. 2021), else 3; adapters 5."""
    steps: Count | None = None
    """Number of steps, instead of epochs."""
    batch_size: Count | None = None
    """Examples per step. Default: 16 below 10,000 examples, else 32."""
    learning_rate: NonNegative | None = None
    """Peak learning rate. Default: 2e-5; with adapters 3e-4."""
    schedule: Literal["linear", "triangular", "cosine", "constant"] = "linear"
    """Decay after the warmup: linear or cosine to 0, none, or the slanted triangle of ULMFiT, which begins and ends at
    1/32 of the peak."""
    warmup: Share = 0.1
    """Share of the steps with a rising learning rate."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay; biases and LayerNorms have none."""
    clip_norm: Positive | None = 1.0
    """Largest norm of the gradient; None: not clipped."""
    bias_correction: bool = True
    """Correct the bias of Adam's moments. Google's BERT did not, a known cause of failed runs (Mosbach et al. 2021)."""
    class_weights: tuple[str, ...] = ()
    """For classification and tagging: weights of the classes in the loss, as `no=1 yes=2.5`, or `balanced`: examples
    (tokens) divided by the number of classes and by those of the class, as in scikit-learn. Default: none."""
    label_smoothing: Annotated[float, Interval("[0, 1)")] = 0.0
    """For classification, multiple_choice and tagging: share of the target distribution that is uniform (Szegedy et al.
    2016)."""
    dropout: Rate | None = None
    """Dropout rate of the encoder and on the input of the head. Default: those of the model."""
    layer_decay: Annotated[float, Interval("(0, 1]")] = 1.0
    """Factor of the learning rate per layer from the top: 0.8 gives the layer below the head 0.8 of the rate, the one
    below it 0.64."""
    freeze_encoder: bool = False
    """Train only the head (and the pooler, mix and [CLS] normalisation that it reads through)."""
    adapter_size: Size | None = None
    """Train adapters of this width with LayerNorms and head, and freeze all else (Houlsby et al. 2019)."""
    pooling: Literal["cls", "mean"] | None = None
    """The vector of an example that the head reads: that of [CLS], or the mean over its tokens, as in
    sentence-transformers. Default: what transformers' head of MODEL's family reads, in BERT the pooler's output."""
    mix: bool = False
    """The head reads a trained weighted sum of all layers (Peters et al. 2018) instead of the last one."""
    cls_norm: Literal["none", "centre", "standardise", "batch", "layer"] = "none"
    """Normalisation of the [CLS] vector that the head reads (docs/finetuning.md)."""
    new_layers: CountOrZero = 0
    """Top layers to initialise at random (Zhang et al. 2021)."""
    keep_head: bool = False
    """Begin with the head of MODEL, which was fine-tuned on a task with the same labels. Without it the head is new,
    and MODEL may be fine-tuned on another task (intermediate-task training; Phang et al. 2018)."""
    selection_share: Annotated[float, Interval("(0, 1)")] | None = None
    """Share of the training examples that is held out, drawn by the seed, to choose the best epoch: the run keeps the
    checkpoint of the epoch with the best score on them, and dev is scored once. Default: none, the last step counts."""
    test_score: Literal["auto", "required", "none"] = "auto"
    """Score of the test split, computed once, after training: `auto` if it has labels; `required` makes a test split
    without labels an error; `none` computes predictions only."""
    seeds: Annotated[int, Interval("[1, 1000]")] = 1
    """Number of runs, with consecutive seeds."""
    seed: Annotated[int, Interval("[0, 2147482647]")] = 0
    """First seed: of the head's initialisation, of the order of examples, and of dropout."""
    keep: Count = 1
    """Number of newest checkpoints to keep."""
    save_every: Count | None = None
    """Steps between checkpoints. Default: those of an epoch, but with --keep 1 at most a tenth of the run."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products."""
    dense_dtype: Literal["compute", "int8"] | None = None
    """`int8` trains with dense layers and embedding tables rounded to 8-bit integers (Zafrir et al. 2019). Default:
    int8 if MODEL is in int8 already, else compute, which is --compute-dtype."""

    def __post_init__(self) -> None:
        check(self, "--")
        count = 1 if self.text_columns is None else len(self.text_columns)
        require(count in (1, 2), f"--text-columns has {count} names: give one or two")
        require(self.label_separator != "", "--label-separator is empty: give the text between two labels, as ,")
        require(self.steps is None or self.epochs is None, "--steps and --epochs exclude each other: give one of them")
        require(
            self.keep == 1 or self.selection_share is None,
            f"--keep {self.keep}: with --selection-share a run keeps its best epoch only: leave it out",
        )
        for first, second in (
            ("freeze_encoder", "adapter_size"),
            ("freeze_encoder", "new_layers"),
            ("adapter_size", "new_layers"),
            ("selection_share", "save_every"),
            ("keep_head", "pooling"),
            ("keep_head", "mix"),
            ("keep_head", "cls_norm"),
        ):
            given = [getattr(self, name) not in (None, False, 0, "none") for name in (first, second)]
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in (first, second))
            require(not all(given), f"{flags} exclude each other: give one of them")
        require(
            self.pooling != "mean" or self.cls_norm == "none",
            "--cls-norm normalises [CLS], which --pooling mean does not read: leave one of them out",
        )

    def flags(self) -> tuple[str, ...]:
        """The flags of `bert-jax finetune` that differ from the defaults, but those that a continued run can change."""
        return changed_flags(self, without=("seed", "seeds", "keep", "save_every", "test_score"))

    def with_recipe(self, examples: int) -> "FinetuneOptions":
        """The options with all defaults filled in.

        Args:
          examples: of the training set.
        """
        small, adapters = examples < SMALL_TASK, self.adapter_size is not None
        batch_size = self.batch_size or (16 if small else 32)
        epochs = self.epochs or (5 if adapters else 20 if small else 3)
        return dataclasses.replace(
            self,
            batch_size=batch_size,
            epochs=None,
            steps=self.steps or max(1, math.ceil(epochs * -(-examples // batch_size))),
            learning_rate=(3e-4 if adapters else 2e-5) if self.learning_rate is None else self.learning_rate,
        )

    def with_length(self, model: ModelConfig, default: int) -> "FinetuneOptions":
        """The options with `max_length`.

        Args:
          model: of the source; bounds it.
          default: of the task.

        Raises:
          UserError: it exceeds the model's positions.
        """
        length = self.max_length or min(default, model.max_positions)
        require(
            length <= model.max_positions,
            f"--max-length {length} is longer than the model's {model.max_positions} positions: lower it",
        )
        return dataclasses.replace(self, max_length=length)

    def model_config(self, model: ModelConfig) -> ModelConfig:
        """The encoder to train."""
        require(
            model.adapter_size in (None, self.adapter_size),
            f"the model has adapters of size {model.adapter_size}: give --adapter-size {model.adapter_size}",
        )
        # Rows have any multiple of 8 tokens, and dropout is that of the options: only `reference` has both.
        changes = {
            "attention": "reference",
            "compute_dtype": self.compute_dtype,
            "dense_dtype": self.dense_dtype or model.inference_dense_dtype,
            "adapter_size": self.adapter_size,
            "scan_unroll": None,
        }
        if self.dropout is not None:
            changes |= {"hidden_dropout": self.dropout, "attention_dropout": self.dropout}
        return dataclasses.replace(model, **changes)

    def optimizer_config(self) -> OptimizerConfig:
        """AdamW with the options' values."""
        return OptimizerConfig(
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            bias_correction=self.bias_correction,
            layer_decay=self.layer_decay,
        )

    def phase(self, rows: int, seq_len: int, frozen: tuple[str, ...]) -> Phase:
        """The phase of the run; recipe defaults must be filled in.

        Args:
          rows: per step.
          seq_len: tokens per row.
          frozen: patterns of parameters that are not trained.
        """
        assert self.steps is not None and self.learning_rate is not None
        warmup = min(round(self.warmup * self.steps), self.steps - 1)
        triangular = self.schedule == "triangular"
        return Phase(
            steps=self.steps,
            seq_len=seq_len,
            batch_size=rows,
            learning_rate=self.learning_rate,
            warmup_steps=warmup,
            warmup_done=round(warmup / (TRIANGLE_RATIO - 1)) if triangular else 0,
            decay={"linear": "polynomial", "triangular": "polynomial"}.get(self.schedule, self.schedule),
            decay_start=warmup,
            accumulation=1 if self.cls_norm == "batch" else None,
            end_learning_rate=self.learning_rate / TRIANGLE_RATIO if triangular else 0.0,
            frozen=frozen,
        )
