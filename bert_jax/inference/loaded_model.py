"""A trained model for inference: ``load``, ``fill_mask``, ``encode``, ``forward``.

Shapes in names: B texts (rows), S positions, H hidden, L layers, N heads.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from bert_jax.array_types import Array, Float, Int
from bert_jax.command.progress import progress_bar
from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.convert.formats import input_formats
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.convert.sentence_transformers import SentenceEmbedding, validate_pooling
from bert_jax.errors import UserError
from bert_jax.inference import embedding
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs, EncoderOutput
from bert_jax.model.heads import Heads
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.sharding import make_mesh, replicated, row_sharding

PROBABILITIES = "attention.probabilities"
CHUNK_TEXTS, CHUNK_CHARACTERS = 16_384, 2**25
"""Maximum number of texts, and of characters, that `encode` processes at a time."""


class Candidate(NamedTuple):
    """A prediction for a mask token."""

    token: str
    token_id: int
    probability: float
    """Softmax over all rows of the model's vocabulary, padding rows included, as in transformers."""


class ModelOutputs(NamedTuple):
    """The result of `LoadedModel.forward`; values at padded positions have no meaning. Floats are float32."""

    input_ids: np.ndarray
    """int32 [B, S]; S is the length of the longest text."""
    attention_mask: np.ndarray
    """int32 [B, S]: 1 at tokens, 0 at padding."""
    last_hidden_state: np.ndarray
    """[B, S, H]."""
    pooled: np.ndarray | None
    """[B, H], the pooler's output; None in a model without one."""
    hidden_states: np.ndarray | None
    """[L + 1, B, S, H]: the embeddings, and the output of every layer."""
    attentions: np.ndarray | None
    """[L, B, N, S, S]: probabilities by query position and key position, before dropout."""


class LoadedModel:
    """An encoder with its heads and tokenizer, created by `load`.

    Attributes:
      config: shapes of the model.
      heads: which heads the model has.
      params: nested dict of arrays (model/bert.py), a copy on each local device.
      tokenizer: converts text to ids.
      sentence_embedding: defaults of `encode`.
    """

    def __init__(
        self,
        config: ModelConfig,
        heads: Heads,
        params: bert.Params,
        tokenizer: Tokenizer,
        sentence_embedding: SentenceEmbedding | None = None,
    ):
        self.config, self.heads, self.tokenizer = config, heads, tokenizer
        self.sentence_embedding = sentence_embedding or SentenceEmbedding()
        self._mesh = make_mesh(MeshConfig(), jax.local_devices())
        self.params = jax.device_put(params, replicated(self._mesh))

    def fill_mask(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """The most probable tokens for every mask token in the text, most probable first.

        Args:
          text: with one or more of the tokenizer's mask tokens: [MASK] in BERT's vocabularies, <mask> in RoBERTa's.
          top: candidates per mask token, at most the tokenizer's tokens.

        Raises:
          UserError: a text that is not a str or has no mask token, more tokens than the model has positions, a `top`
            out of range, a causal model, or a model without an MLM head.
        """
        if not self.heads.mlm:
            raise UserError("the model has no MLM head to fill masks with: load one that was pretrained with one")
        if self.config.direction == "causal":
            raise UserError("a causal model cannot fill masks: use one trained with model.direction bidirectional")
        size = self.tokenizer.vocab_size
        if not isinstance(top, Integral) or not 1 <= top <= size:
            raise UserError(
                f"top is {top}: it must be a whole number from 1 to {size}, the number of the tokenizer's tokens"
            )
        text, mask = _checked_text(text, "the text"), self.tokenizer.id_to_token(self.tokenizer.mask_id)
        ids = [self.tokenizer.cls_id, *self.tokenizer.encode(text), self.tokenizer.sep_id]
        if len(ids) > self.config.max_positions:
            raise UserError(
                f"the text has {len(ids)} tokens, the model's position table {self.config.max_positions}: shorten it"
            )
        input_ids, attention_mask = self._pad([ids])
        positions = np.flatnonzero(input_ids[0] == self.tokenizer.mask_id).tolist()
        if not positions:
            raise UserError(f"the text has no {mask}: write {mask} in place of a word")
        probabilities = _mlm_probabilities(self.config, self.heads, self.params, input_ids, attention_mask)
        probabilities = np.asarray(probabilities)[0]
        filled = []
        for position in positions:
            # Padding rows after the tokenizer's last token are not candidates.
            best = np.argsort(-probabilities[position, :size], kind="stable")[:top]
            filled.append(
                [Candidate(self.tokenizer.id_to_token(int(i)), int(i), float(probabilities[position, i])) for i in best]
            )
        return filled

    def encode(
        self,
        texts: Iterable[str],
        pooling: str | Sequence[str] | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        *,
        normalize: bool | None = None,
        prompt: str | None = None,
        progress: bool = False,
    ) -> np.ndarray:
        """One vector per text, float32 [number of texts, hidden_size], from the last layer.

        A text's vector does not depend on the other texts: neither order nor batch_size changes it by more than
        rounding. Arguments that are None take their value from `sentence_embedding`: for a directory of
        sentence-transformers, the vectors are those of ``SentenceTransformer(directory).encode(texts)``; other models
        have the defaults of `SentenceEmbedding`. All local devices are used.

        Args:
          texts: any iterable; each text becomes ``[CLS] text [SEP]``. An iterator is read in chunks of CHUNK_TEXTS, so
            only the vectors of all texts are held in memory.
          pooling: "mean" over all tokens, "mean_sqrt_len_tokens", "max", or "cls", the vector of [CLS], which causal
            models do not support. The vectors of several modes are concatenated.
          batch_size: number of rows of the longest row length in a forward pass, on each device. A row has one long
            text or several short ones, and passes of shorter rows have more; so this bounds the memory, not the texts.
          max_length: longer texts are truncated to this many tokens, [CLS] and [SEP] included. None: the directory's
            maximum, or the number of the model's positions; a warning then gives the number of truncated texts.
          normalize: divide each vector by its length.
          prompt: prefix for each text.
          progress: show a progress bar on stderr.

        Raises:
          UserError: texts that are not str, an invalid max_length or batch_size, an unknown pooling, or pooling 'cls'
            with a causal model.
        """
        defaults = self.sentence_embedding
        modes = validate_pooling(defaults.pooling if pooling is None else pooling, self.config.direction)
        prompt = _checked_text((defaults.default_prompt or "") if prompt is None else prompt, "the prompt")
        normalize = defaults.normalize if normalize is None else normalize
        if not isinstance(batch_size, Integral) or batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: it must be a whole number of at least 1")
        limit = self._length(max_length, defaults.max_length)
        skip = 1 + len(self.tokenizer.encode(self._preprocess(prompt))) if prompt and not defaults.include_prompt else 0
        vectors, num_truncated = [np.zeros((0, self.config.hidden_size * len(modes)), np.float32)], 0
        total = len(texts) if hasattr(texts, "__len__") else None
        run, pad = functools.partial(self._run_pass, modes, skip), self.tokenizer.pad_id
        with progress_bar("encoding", total, "text", shown=progress) as bar:
            for chunk in _chunks(texts):
                ids, too_long = self._tokenize([self._preprocess(prompt + text) for text in chunk], limit)
                num_truncated += too_long
                new = embedding.encode_ids(ids, pad, batch_size, run, devices=self._mesh.size, on_texts_done=bar.update)
                vectors.append(_normalize(new) if normalize else new)
        if num_truncated and max_length is None:
            warnings.warn(
                f"{num_truncated} of {sum(map(len, vectors))} texts have more than {limit} tokens and were truncated: "
                "give max_length to truncate texts without this warning",
                stacklevel=2,
            )
        return np.concatenate(vectors)

    def forward(
        self,
        texts: Sequence[str],
        max_length: int | None = None,
        *,
        hidden_states: bool = False,
        attentions: bool = False,
    ) -> ModelOutputs:
        """One forward pass over all texts, one text per row, padded to the longest.

        Args:
          texts: each becomes ``[CLS] text [SEP]``. The pass is not split: memory limits their number.
          max_length: longer texts are truncated to this many tokens, [CLS] and [SEP] included.
          hidden_states: return the hidden states of all layers.
          attentions: return the attention probabilities of all layers, computed with the `reference` attention.

        Raises:
          UserError: no texts, texts that are not str, a text with more tokens than the model has positions without
            max_length, or an invalid max_length.
        """
        limit = self._length(max_length, None)
        rows, too_long = self._tokenize([text for chunk in _chunks(texts) for text in chunk], limit)
        if not rows:
            raise UserError("texts is empty: give at least one text")
        if too_long and max_length is None:
            raise UserError(
                f"{too_long} of {len(rows)} texts have more than {limit} tokens, the model's position table: shorten "
                f"them, or give max_length {limit} to truncate them"
            )
        longest, (input_ids, mask) = max(map(len, rows)), self._pad(rows)
        config = _inference_config(self.config)
        config = dataclasses.replace(config, attention="reference") if attentions else config
        sites = (PROBABILITIES,) if attentions else ()
        output = _outputs(config, self.heads, hidden_states, sites, self.params, input_ids, mask)
        arrays = (output.hidden, output.pooled, output.hidden_states, output.activations.get(PROBABILITIES))
        hidden, pooled, states, probabilities = (None if x is None else np.asarray(x, np.float32) for x in arrays)
        return ModelOutputs(
            input_ids[:, :longest],
            mask[:, :longest],
            hidden[:, :longest],
            None if pooled is None else pooled[:, 0],
            None if states is None else states[:, :, :longest],
            None if probabilities is None else probabilities[..., :longest, :longest],
        )

    def run_ids(
        self,
        input_ids: Int[np.ndarray, "B S"],
        token_type_ids: Int[np.ndarray, "B S"],
        attention_mask: Int[np.ndarray, "B S"],
    ) -> Float[Array, "B n X"]:
        """One forward pass over ids: the logits of the task head, or the last hidden state of a model without one.

        Args:
          input_ids: rows that begin with [CLS]; each shape is compiled once.
          token_type_ids: 0 for models without token types.
          attention_mask: 1 at tokens, 0 at padding.

        Returns:
          float32 [B, 1, C] of a head that reads examples, [B, S, C] of one that reads tokens, or [B, S, H].
        """
        config = _inference_config(self.config)
        return _run_ids(config, self.heads, self.params, input_ids, token_type_ids, attention_mask)

    def _length(self, max_length: Any, default: int | None) -> int:
        max_positions = self.config.max_positions
        length = min(default or max_positions, max_positions) if max_length is None else max_length
        if not isinstance(length, Integral) or not 3 <= length <= max_positions:
            raise UserError(
                f"max_length is {length}: it must be a whole number from 3 to {max_positions}, the model's positions"
            )
        return length

    def _preprocess(self, text: str) -> str:
        return tokenizers.normalizers.Lowercase().normalize_str(text) if self.sentence_embedding.lowercase else text

    def _tokenize(self, texts: list[str], max_length: int) -> tuple[list[np.ndarray], int]:
        """The ids of every text with special tokens, and the number of truncated texts."""
        flat, lengths = self.tokenizer.encode_flat(texts)
        starts, kept = np.cumsum(lengths) - lengths, np.minimum(lengths, max_length - 2)
        cls, sep = np.uint32(self.tokenizer.cls_id), np.uint32(self.tokenizer.sep_id)
        ids = [np.r_[cls, flat[start : start + n], sep] for start, n in zip(starts, kept, strict=True)]
        return ids, int((lengths > kept).sum())

    def _run_pass(self, modes: tuple[str, ...], skip: int, inputs: EncoderInputs) -> jax.Array:
        """One forward pass, with the rows split over the local devices."""
        inputs = jax.device_put(inputs, row_sharding(self._mesh))
        return _vectors(_inference_config(self.config), self.heads, modes, self.params, inputs, np.int32(skip))

    def _pad(self, rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and attention mask [B, S] of rows; S is one of a few lengths, so that few are compiled."""
        length = embedding.row_length(max(map(len, rows)))
        return embedding.pad_rows(rows, length, self.tokenizer.pad_id)


def _normalize(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _checked_text(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{what} is {type(text).__name__}, not str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"a surrogate at character {error.start}, which is not valid text"
        raise UserError(f"{what} has {problem}: remove it") from error
    return text


def _chunks(texts: Any) -> Iterator[list[str]]:
    """Non-empty chunks of at most CHUNK_TEXTS texts, closed at CHUNK_CHARACTERS.

    Raises:
      UserError: `texts` is not an iterable of str.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise UserError(
            f"texts is {type(texts).__name__}, not an iterable of str: put a single text into a list, as in "
            "encode([text])"
        )
    chunk, characters = [], 0
    for i, text in enumerate(texts):
        chunk.append(_checked_text(text, f"text {i}"))
        characters += len(text)
        if len(chunk) == CHUNK_TEXTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _inference_config(config: ModelConfig) -> ModelConfig:
    """The config without dropout, with the fastest attention for inference on any device.

    Measured on a CPU: docs/log/conversion.md, 2026-11-22.
    """
    attention = "deferred" if jax.default_backend() == "cpu" else config.attention
    dense = {"dense_dtype": config.inference_dense_dtype}
    return dataclasses.replace(config, attention=attention, **dense, attention_dropout=0.0, hidden_dropout=0.0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mlm_probabilities(
    config: ModelConfig, heads: Heads, params: bert.Params, input_ids: jax.Array, mask: jax.Array
) -> jax.Array:
    model = bert.model_from_params(config, heads, params)
    hidden = model.encoder(whole_rows(input_ids, jnp.zeros_like(input_ids), mask)).hidden
    return jax.nn.softmax(model.mlm(hidden, model.encoder.embeddings.decoder_table()), axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _outputs(
    config: ModelConfig,
    heads: Heads,
    hidden_states: bool,
    sites: tuple[str, ...],
    params: bert.Params,
    input_ids: jax.Array,
    mask: jax.Array,
) -> EncoderOutput:
    inputs = whole_rows(input_ids, jnp.zeros_like(input_ids), mask)
    encoder = bert.model_from_params(config, heads, params).encoder
    return encoder(inputs, hidden_states=hidden_states, activations=sites)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_ids(
    config: ModelConfig,
    heads: Heads,
    params: bert.Params,
    input_ids: jax.Array,
    token_type_ids: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    model, inputs = bert.model_from_params(config, heads, params), whole_rows(input_ids, token_type_ids, mask)
    if heads.task is not None:
        return model.task_logits(inputs, model.encode(inputs))
    return model.encoder(inputs, pool=False).hidden.astype(jnp.float32)


_vectors = functools.partial(jax.jit, static_argnums=(0, 1, 2))(embedding.embed_packed_inputs)


def load(source: str | StoredPath) -> LoadedModel:
    """Load a run's newest intact checkpoint from its work directory, or a model in any format that `convert` reads.

    Raises:
      UserError: the source has no model, is damaged or has no tokenizer, its object store does not answer, or it has
        unsupported modules of sentence-transformers.
    """
    with input_formats.open_model(source) as source_model:
        if source_model.tokenizer_path is None:
            raise UserError(
                f"{source} has no tokenizer: put its tokenizer.json or other tokenizer files into its directory"
            )
        _, config, heads, params = source_model.model
        tokenizer = Tokenizer.load(source_model.tokenizer_path)
        return LoadedModel(config, heads, params, tokenizer, source_model.sentence_embedding)
