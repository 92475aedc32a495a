"""Config sections for model, objective and data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.errors import require
from bert_jax.field_validation import (
    Count,
    Interval,
    Layers,
    NonNegative,
    Positive,
    Rate,
    Share,
    Size,
    SizeOrZero,
    check,
)

GPU_ATTENTION_BLOCK, TPU_ATTENTION_BLOCK = 64, 128
"""Tokens of a block of the attention `pallas_gpu` and `pallas_tpu`."""
TPU_ATTENTION_MAX_LENGTH = 1024
"""Tokens of the longest row of the attention `pallas_tpu`."""
KERNEL_HEAD_SIZES = (16, 32, 64, 128)
"""Head sizes of the attention `pallas_gpu`, whose blocks are powers of two, and `pallas_tpu`, whose heads lie side by
side in rows of 128 numbers."""
KERNEL_ROW_LENGTHS = {"pallas_gpu": GPU_ATTENTION_BLOCK, "pallas_tpu": TPU_ATTENTION_BLOCK}
"""Attention by kernels of bert_jax: the length of a row is a multiple of this."""
GPU_NORM_WIDTHS = (256, 512, 768, 1024)
"""Widths of layers for which dropout, residual and LayerNorm are one kernel with the attention `pallas_gpu`."""
FUSED_ATTENTION = ("cudnn", *KERNEL_ROW_LENGTHS)
"""Attention whose scores are never written to memory."""


@dataclass(frozen=True)
class ModelConfig:
    """The encoder and its heads. The defaults are BERT-base, uncased (Devlin et al. 2019, section 3)."""

    vocab_size: Size = 30522
    """Number of token ids, special tokens included."""
    hidden_size: Size = 768
    """Width of the residual stream (H)."""
    num_layers: Layers = 12
    """Depth (L)."""
    num_heads: Size = 12
    """Attention heads per layer (A)."""
    head_size: Size | None = None
    """Width of one head; None is hidden_size / num_heads."""
    intermediate_size: Size = 3072
    """Width of the feed-forward layer."""
    max_positions: Size = 512
    """Number of positions: the longest sequence, in tokens."""
    position_offset: SizeOrZero = 0
    """Unused leading position embeddings: RoBERTa has two, since fairseq counts positions from its padding id, 1,
    plus one."""
    type_vocab_size: SizeOrZero = 2
    """Number of token types (sentence A and B); 0: no token type embeddings."""
    embedding_size: Size | None = None
    """Width of the embedding tables and of the MLM head's decoder, with a projection to hidden_size after the
    embeddings (ALBERT; Lan et al. 2020, section 3.1). None: hidden_size, and no projection."""
    embeddings: Literal["tokens", "trigrams"] = "tokens"
    """What the projection to hidden_size reads. `tokens`: the normalised sum of the embeddings of a token (ALBERT).
    `trigrams`: the word embeddings of the previous, this and the next token of an example, side by side; position and
    type embeddings have width hidden_size and are added after it. The MLM head's decoder then has hidden_size columns:
    the word embeddings and columns of its own (MobileBERT; Sun et al. 2020, section 3.2)."""
    bottleneck_size: Size | None = None
    """Width inside a layer, between projections from and to hidden_size with a residual connection around all of it
    (MobileBERT: 128 of 512; its teacher IB-BERT: 1024 of 512; Sun et al. 2020, section 3.1). None: hidden_size, and no
    projections."""
    bottleneck_attention: Literal["shared", "bottleneck", "input"] = "shared"
    """What attention in a bottleneck reads. `shared`: query and key a second projection of the layer's input, value the
    input itself (MobileBERT). `bottleneck`: all three the projection that the layer's residual connections begin with
    (MobileBERT-tiny). `input`: all three the layer's input (IB-BERT)."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Activation of the feed-forward layer and the MLM head. `gelu` is the exact (erf) form, as in published BERTs."""
    feed_forward: Literal["plain", "gated"] = "plain"
    """activation(x W) V, or (activation(x G) * x W) V, the elementwise product with a second projection as wide as
    the first (GEGLU with `gelu`; Shazeer 2020)."""
    feed_forward_networks: Annotated[int, Interval("[1, 8]")] = 1
    """Feed-forward networks of a layer, one after the other, each with its residual connection and norm (MobileBERT has
    4). Dropout applies to the last one."""
    biases: Literal["all", "none"] = "all"
    """`all`: dense layers and LayerNorms have a bias (BERT). `none`: only the output layers have one, the decoder over
    the vocabulary and the pair head (ModernBERT; Warner et al. 2024)."""
    norm: Literal["layer", "none"] = "layer"
    """LayerNorm, or only its scale and bias (the NoNorm of MobileBERT; Sun et al. 2020, section 3.4) in embeddings and
    layers. The MLM head always has LayerNorm."""
    norm_epsilon: NonNegative = 1e-12
    """Added to the variance in every LayerNorm."""
    initializer_range: NonNegative = 0.02
    """Standard deviation of the normal distribution, truncated at two deviations, that initialises all weights."""
    hidden_dropout: Rate = 0.1
    """Dropout rate on embeddings and on the output of each sub-layer; with bottleneck_size on embeddings and on the
    projection to hidden_size."""
    attention_dropout: Rate = 0.1
    """Dropout rate on attention probabilities; `xla` and `cudnn` attention do not support it."""
    positions: Literal["learned", "rotary"] = "learned"
    """Learned absolute positions (BERT), or rotary positions in attention (Su et al. 2021)."""
    rotary_base: Positive = 10000.0
    """Base of the rotary wavelengths in global layers."""
    local_rotary_base: Positive = 10000.0
    """Base of the rotary wavelengths in local layers."""
    norm_placement: Literal["post", "pre"] = "post"
    """LayerNorm after the residual sum (BERT), or before each sub-layer and once at the end."""
    attention_window: SizeOrZero | None = None
    """Local layers attend to this many tokens on each side; None: all layers are global."""
    global_every: Layers = 1
    """With attention_window set, every n-th layer, the first included, is global."""
    parameter_groups: Layers | None = None
    """Number of parameter sets shared by consecutive layers (ALBERT: 1); None: each layer has its own."""
    adapter_size: Size | None = None
    """Width of the two adapters of every layer: trained bottlenecks after the attention's and the feed-forward's output
    (Houlsby et al. 2019, section 2.1; 64 there). None: no adapters."""
    direction: Literal["bidirectional", "causal"] = "bidirectional"
    """What a token attends to: its whole example, or only itself and the tokens before it. A causal model is trained
    to predict the next token instead of masked tokens (the "LTR" of Devlin et al. 2019, section 5.1)."""
    attention: Literal["auto", "reference", "deferred", "xla", "cudnn", "pallas_gpu", "pallas_tpu"] = "reference"
    """Implementation: `reference` is plain jax.numpy; `deferred` divides by the sums of the softmax after the product
    with the values; `xla` and `cudnn` are `jax.nn.dot_product_attention` lowered by XLA or cuDNN; `pallas_gpu` and
    `pallas_tpu` are kernels with dropout, whose scores stay on the chip. `auto` chooses one for the devices
    (training/implementation.py). With `pallas_gpu`, dropout, residual and LayerNorm after a sub-layer are a kernel,
    too, in layers of a width of GPU_NORM_WIDTHS."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products. Parameters, norms, softmax and losses are always float32."""
    dense_dtype: Literal["compute", "float8", "int8"] = "compute"
    """Type of the operands of dense layers: compute_dtype; or `float8`, in the encoder's layers, forward and backward,
    8-bit floats, each array scaled by its largest value (Micikevicius et al. 2022), for GPUs that have them, while CPUs
    emulate them; or `int8`, forward, 8-bit integers with a scale per output channel and per token, in all dense layers
    but the heads' output layers, and in the embedding tables (Zafrir et al. 2019; model/int8.py)."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, everything but outputs of dense layers, or whole layers."""
    scan_unroll: Layers | None = None
    """Layers per iteration of the scan over depth; num_layers unrolls the scan. None: chosen for the devices
    (training/implementation.py)."""

    def __post_init__(self) -> None:
        check(self, "model.")
        width = "hidden_size" if self.bottleneck_size is None else "bottleneck_size"
        require(
            self.head_size is not None or self.layer_width % self.num_heads == 0,
            f"model.{width} {self.layer_width} is not divisible by model.num_heads {self.num_heads}: "
            "change one of them, or set model.head_size",
        )
        self._check_layers()
        require(
            self.positions == "learned" or self.size_per_head % 2 == 0,
            f"model.positions 'rotary' needs an even head size, not {self.size_per_head}: set model.head_size",
        )
        for name in ("rotary_base", "local_rotary_base"):
            value = getattr(self, name)
            require(
                self.positions == "rotary" or value == getattr(ModelConfig, name),
                f"model.{name} {value:g} has no effect with model.positions '{self.positions}': set model.positions "
                "rotary, or leave it out",
            )
        require(
            self.attention in ("auto", "reference", "deferred", *KERNEL_ROW_LENGTHS) or self.attention_dropout == 0,
            f"model.attention '{self.attention}' has no dropout on attention probabilities: "
            "set model.attention_dropout 0, or model.attention reference",
        )
        require(
            self.attention not in KERNEL_ROW_LENGTHS or self.size_per_head in KERNEL_HEAD_SIZES,
            f"model.attention '{self.attention}' has no kernels for heads of size {self.size_per_head}, only for "
            f"{', '.join(map(str, KERNEL_HEAD_SIZES))}: set model.attention reference",
        )
        all_heads = self.num_heads * self.size_per_head
        require(
            self.attention != "pallas_tpu" or all_heads % TPU_ATTENTION_BLOCK == 0,
            f"model.attention 'pallas_tpu' has no kernels for {self.num_heads} heads of size {self.size_per_head}: "
            f"their product must be a multiple of {TPU_ATTENTION_BLOCK}; set model.attention reference",
        )
        groups = self.parameter_groups
        require(
            groups is None or self.num_layers % groups == 0,
            f"model.parameter_groups {groups} does not divide model.num_layers {self.num_layers}",
        )

    def _check_layers(self) -> None:
        """The combinations of MobileBERT's settings with others."""
        require(
            self.bottleneck_size is None or self.norm_placement == "post",
            "model.bottleneck_size needs model.norm_placement 'post'",
        )
        require(
            self.embeddings == "tokens" or (self.embedding_size or self.hidden_size) < self.hidden_size,
            "model.embeddings 'trigrams' needs a model.embedding_size below model.hidden_size "
            f"{self.hidden_size}, not {self.embedding_size}",
        )
        require(
            self.embeddings == "tokens" or self.direction == "bidirectional",
            "model.embeddings 'trigrams' show each token the next one, which a causal model predicts: set "
            "model.embeddings 'tokens' or model.direction 'bidirectional'",
        )

    @property
    def size_per_head(self) -> int:
        """Width of one attention head."""
        return self.head_size or self.layer_width // self.num_heads

    @property
    def layer_width(self) -> int:
        """Width inside a layer."""
        return self.bottleneck_size or self.hidden_size

    @property
    def embedding_width(self) -> int:
        """Width of the word embedding table, and of the other tables unless `embeddings` is `trigrams`."""
        return self.embedding_size or self.hidden_size

    @property
    def inference_dense_dtype(self) -> Literal["compute", "int8"]:
        """Type of the operands of dense layers outside training: `float8` speeds up training, `int8` is the model."""
        return "int8" if self.dense_dtype == "int8" else "compute"

    @property
    def has_gpu_kernels(self) -> bool:
        """Whether layers use kernels for GPUs, which do not support tensors that are split over `mesh.tensor`."""
        return self.attention == "pallas_gpu"

    @property
    def decoder_width(self) -> int:
        """Width of the MLM head's decoder."""
        return self.hidden_size if self.embeddings == "trigrams" else self.embedding_width


@dataclass(frozen=True)
class ObjectiveConfig:
    """The training objective (Devlin et al. 2019, section 3.1). A causal model uses only `pair`."""

    token: Literal["mlm", "rtd"] = "mlm"
    """What is learned about tokens: to predict masked ones, or replaced-token detection (ELECTRA; Clark et al. 2020): a
    small generator predicts masked tokens, tokens sampled from its predictions replace them, and the model, the
    discriminator, learns which tokens are replaced. A causal model predicts the next token."""
    generator_width: Annotated[float, Interval("(0, 1e3]")] = 0.25
    """Width of the generator as a share of the discriminator's: of hidden_size, num_heads and intermediate_size."""
    generator_layers: Layers | None = None
    """Depth of the generator; None: that of the discriminator."""
    generator_embeddings: Literal["shared", "disentangled"] = "shared"
    """`shared`: generator and discriminator have the same embeddings, with their norm (ELECTRA). `disentangled`: the
    discriminator's tables are the generator's, without gradient, plus a difference that starts at 0 (DeBERTa-v3; He et
    al. 2023, section 3.2); export adds them."""
    discriminator_weight: Positive = 50.0
    """Weight of the discriminator's loss; that of the generator's has weight 1."""
    mask_rate: Annotated[float, Interval("(0, 1)")] = 0.15
    """Share of an example's tokens to predict: max(1, round(rate * length)), special tokens counted in length."""
    mask_token_share: Share = 0.8
    """Share of the predicted positions that are replaced by [MASK]."""
    random_token_share: Share = 0.1
    """Share of the predicted positions that are replaced by a random ordinary token; the rest are unchanged."""
    mask_unit: Literal["token", "word", "ngram", "span"] = "token"
    """Unit of masking: single tokens (BERT), whole words, n-grams of whole words with a probability proportional to
    1/n (ALBERT), or spans of whole words of geometric length, replaced as one (SpanBERT)."""
    max_ngram: Annotated[int, Interval("[1, 64]")] = 3
    """Longest n-gram, in words."""
    span_rate: Annotated[float, Interval("(0, 1]")] = 0.2
    """Probability that a span ends after each of its words; 0.2, cut at ten words, gives 3.8 words on average."""
    max_span: Annotated[int, Interval("[1, 64]")] = 10
    """Longest span, in words."""
    z_loss: NonNegative = 0.0
    """Factor of the mean squared log-partition of the predicted tokens, a term of the loss that keeps logits small
    (Chowdhery et al. 2022: 1e-4)."""
    pair: Literal["nsp", "sop", "none"] = "nsp"
    """Pair objective on [CLS]: next-sentence prediction (label 0: B follows A; 1: random B), sentence order
    (0: in order; 1: swapped; Lan et al. 2020), or none."""

    def __post_init__(self) -> None:
        check(self, "objective.")
        shares = self.mask_token_share, self.random_token_share
        require(
            sum(shares) <= 1,
            f"objective.mask_token_share {shares[0]} and random_token_share {shares[1]} must not exceed 1 together",
        )
        if self.token == "rtd":
            self._check_detection()

    def _check_detection(self) -> None:
        """The settings that replaced-token detection needs."""
        require(
            self.generator_width <= 1,
            f"objective.generator_width {self.generator_width:g} makes the generator wider than the discriminator: use "
            "at most 1",
        )
        require(
            self.random_token_share == 0,
            f"objective.random_token_share is {self.random_token_share}: with objective.token 'rtd', no token is "
            "replaced by a random one: set it to 0 (ELECTRA: with objective.mask_token_share 0.85)",
        )
        require(
            self.pair == "none",
            f"objective.pair '{self.pair}' does not go with objective.token 'rtd', whose model has no pair head: set "
            "objective.pair none",
        )


Format = Literal["segment_pair", "sentence_pair", "sentence_order", "full_sentences", "doc_sentences"]
PAIR_FORMATS = {"nsp": ("segment_pair", "sentence_pair"), "sop": ("sentence_order",)}
"""Formats that have the labels of a pair objective."""


Score = Annotated[float, Interval("[-1e30, 1e30]")]


@dataclass(frozen=True)
class DataConfig:
    """How examples and rows are made from the corpora, and how often they repeat."""

    format: Format = "segment_pair"
    """What an example is: two segments of which the second follows or is random (BERT), the same with single
    sentences, two segments in order or swapped (ALBERT), whole sentences up to the row's length that may
    cross documents, or that may not (RoBERTa)."""
    short_example_rate: Share = 0.1
    """Share of documents whose examples are shorter: their target length is drawn uniformly from [2, seq_len - 3],
    as BERT does; only segment_pair and sentence_order have it."""
    example_end: Literal["sentence", "row"] = "sentence"
    """Where full_sentences and doc_sentences end an example: before the sentence that no longer fits, or where
    the row ends, with the rest of that sentence in the next example (fuller rows)."""
    examples_per_row: Annotated[int, Interval("[1, 64]")] | None = None
    """Largest number of examples in a row; examples do not attend to each other; 1 disables packing. None: one per
    24 tokens of the row."""
    example_copies: Count | None = None
    """K sets of examples: epoch e uses set e mod K. None draws new examples in every epoch. full_sentences and
    doc_sentences draw nothing, so their examples are always the same."""
    mask_copies: Count | None = None
    """K sets of masks: epoch e uses set e mod K. None draws new masks in every epoch (dynamic masking). Masking is
    static only where the examples repeat too: BERT's is example_copies and mask_copies 10 (docs/ablation.md)."""
    mixture_exponent: Share = 1.0
    """Exponent of the sampling shares of corpora without a weight: their shares of tokens to this power, scaled to
    sum to 1 (multilingual BERT: 0.7)."""
    language_exponent: Share = 1.0
    """Exponent of the shares of the languages within each corpus: their shares of tokens to this power, scaled to sum
    to 1 (docs/multilingual.md)."""
    language_weights: tuple[tuple[str, NonNegative], ...] = ()
    """Weights of documents by language, within each corpus: epochs per epoch of a language with weight 1, which those
    that are not named have; 0: none of them."""
    source_weights: tuple[tuple[str, NonNegative], ...] = ()
    """The same by name of the source (`bert-data build --source-name`)."""
    score_weights: tuple[tuple[Score, NonNegative], ...] = ()
    """The same by score (`bert-data build --score`): pairs of a bound and the weight of scores from it to the next
    bound. Documents below all bounds, or without a score, have weight 0."""
    verify: Literal["checksums", "counts"] = "checksums"
    """Before the first step, check the SHA-256 of every shard, or only its number of records."""
    reader_processes: Annotated[int, Interval("[0, 1000]")] = 0
    """Processes that prepare batches; 0: threads of the main process prepare them."""
    prefetch: Annotated[int, Interval("[1, 1e4]")] = 4
    """Batches prepared ahead of the device; with reader processes, by each of them."""
    cache_dir: str | None = None
    """Directory of this host for copies of corpora in object stores (docs/object_stores.md). None: $BERT_JAX_CACHE, or
    else ~/.cache/bert_jax."""
    cache_limit_gb: Positive | None = None
    """Largest size of these copies together, in 10^9 bytes; what has no room is read from the store when it is
    needed. None: a tenth of the disk remains free."""

    def __post_init__(self) -> None:
        check(self, "data.")
        for name in ("language_weights", "source_weights", "score_weights"):
            keys = [key for key, _ in getattr(self, name)]
            require(len(set(keys)) == len(keys), f"data.{name} has a value twice: {', '.join(map(str, keys))}")

    @property
    def samples_documents(self) -> bool:
        """Whether an epoch has some documents more often than others."""
        return self.language_exponent != 1 or bool(self.language_weights or self.source_weights or self.score_weights)

    @property
    def paired(self) -> bool:
        """Whether examples have a second segment."""
        return any(self.format in formats for formats in PAIR_FORMATS.values())

    def max_examples_per_row(self, seq_len: int) -> int:
        """Largest number of examples in a row of `seq_len` tokens."""
        return max(1, seq_len // 24) if self.examples_per_row is None else self.examples_per_row
