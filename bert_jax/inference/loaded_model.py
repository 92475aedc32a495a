"""A trained model in a user's hands: ``load``, ``fill_mask``, ``encode``, ``forward``.

Shapes in names: B texts (rows), S positions, H hidden, L layers, N heads.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.convert.formats import input_formats
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.convert.sentence_transformers import SentenceEmbedding, resolve_pooling
from bert_jax.errors import UserError
from bert_jax.inference import embedding
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs, EncoderOutput
from bert_jax.model.heads import Heads
from bert_jax.progress import progress as progress_bar
from bert_jax.storage import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.sharding import make_mesh, replicated, row_sharding

Params = dict[str, Any]
SHORTEST_BUCKET = 16
CHUNK_TEXTS, CHUNK_CHARACTERS = 16_384, 2**25
"""Texts, or characters of texts, that `encode` holds at a time."""


class Candidate(NamedTuple):
    """What the model would write at a mask token."""

    token: str
    token_id: int
    probability: float
    """Softmax over all rows of the model's vocabulary, those of padded vocabularies included, as in transformers."""


class ModelOutputs(NamedTuple):
    """What `Model.forward` returns; values at padded positions have no meaning. Floats are float32."""

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
    """[L, B, N, S, S]: probabilities of query position, key position, before dropout."""


class LoadedModel:
    """An encoder with its heads and tokenizer. Make one with `load`.

    Attributes:
      config: shapes of the model.
      heads: what stands on it.
      params: nested dict of arrays (model/bert.py), a copy on each local device.
      tokenizer: text to ids.
      sentence: how `encode` pools unless its arguments say otherwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        heads: Heads,
        params: Params,
        tokenizer: Tokenizer,
        sentence: SentenceEmbedding | None = None,
    ):
        self.config, self.heads, self.tokenizer = config, heads, tokenizer
        self.sentence = sentence or SentenceEmbedding()
        self._mesh = make_mesh(MeshConfig(), jax.local_devices())
        self.params = jax.device_put(params, replicated(self._mesh))

    def fill_mask(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """The likeliest tokens for every mask token in the text, likeliest first.

        Args:
          text: with one or more of the tokenizer's mask tokens: [MASK] in BERT's vocabularies, <mask> in RoBERTa's.
          top: candidates per mask token, at most the tokenizer's tokens.

        Raises:
          UserError: a text that is not a str or has no mask token, more tokens than the model has positions, a `top`
            out of bounds, a causal model, or one without an MLM head.
        """
        if not self.heads.mlm:
            raise UserError("the model has no MLM head to fill masks with: load one that was pretrained with one")
        if self.config.direction == "causal":
            raise UserError("a causal model cannot fill masks: use one trained with model.direction bidirectional")
        size = self.tokenizer.vocab_size
        if not 1 <= top <= size:
            raise UserError(f"top is {top}: it must be from 1 to {size}, the number of the tokenizer's tokens")
        text, mask = _checked_text(text, "the text"), self.tokenizer.id_to_token(self.tokenizer.mask_id)
        inputs = self._row(self.tokenizer.encode(text, specials=True))
        positions = np.flatnonzero(inputs.input_ids[0] == self.tokenizer.mask_id).tolist()
        if not positions:
            raise UserError(f"the text has no {mask}: write {mask} in place of a word")
        probabilities = np.asarray(_mlm_probabilities(self.config, self.heads, self.params, inputs))[0]
        filled = []
        for position in positions:
            # Rows beyond the tokenizer's last token stand for nothing: they are no candidates.
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
        rounding. Where an argument is None, a directory of sentence-transformers decides (`sentence`), so that the
        vectors are those of ``SentenceTransformer(directory).encode(texts)``; a model without its files has the
        defaults of `SentenceEmbedding`. All local devices share the work.

        Args:
          texts: any iterable; each text becomes ``[CLS] text [SEP]``. An iterator is read in pieces of CHUNK_TEXTS, so
            memory is needed for the vectors, but not for all texts.
          pooling: "mean" over all tokens, "mean_sqrt_len_tokens", "max", or "cls", the vector of [CLS], which causal
            models do not have. Several are concatenated: the vectors are as many times wider.
          batch_size: rows of the longest kind in a forward pass, on each device. A row holds a long text or several
            short ones, and a pass of shorter rows has as many more; so it bounds the memory, not the number of texts.
          max_length: tokens, [CLS] and [SEP] among them, to which longer texts are cut. None: the directory's
            maximum, or the number of the model's positions; cut texts are then counted in a warning.
          normalize: divide each vector by its length.
          prompt: text put in front of each text.
          progress: show a bar on stderr.

        Raises:
          UserError: texts that are not str, a max_length or batch_size that is impossible, an unknown pooling, or
            pooling 'cls' of a causal model.
        """
        sentence = self.sentence
        modes = resolve_pooling(sentence.pooling if pooling is None else pooling, self.config.direction)
        prompt = _checked_text((sentence.default_prompt or "") if prompt is None else prompt, "the prompt")
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: it must be at least 1")
        most = self._length(max_length, sentence.max_length)
        skip = 1 + len(self.tokenizer.encode(self._prepared(prompt))) if prompt and not sentence.include_prompt else 0
        vectors, cut = [np.zeros((0, self.config.hidden_size * len(modes)), np.float32)], 0
        total = len(texts) if hasattr(texts, "__len__") else None
        run, pad = functools.partial(self._pass, modes, skip), self.tokenizer.pad_id
        with progress_bar("encoding", total, "text", shown=progress) as bar:
            for chunk in _chunks(texts):
                ids, too_long = self._cut([self._prepared(prompt + text) for text in chunk], most)
                cut += too_long
                found = embedding.vectors_of(ids, pad, batch_size, run, devices=self._mesh.size, done=bar.update)
                vectors.append(_unit(found) if (sentence.normalize if normalize is None else normalize) else found)
        if cut and max_length is None:
            warnings.warn(
                f"{cut} of {sum(map(len, vectors))} texts have more than {most} tokens and were cut: give max_length "
                "to cut texts without this warning",
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
        """One forward pass over all texts, each a row of its own, padded to the longest.

        Args:
          texts: each becomes ``[CLS] text [SEP]``. The pass is not divided: memory bounds their number.
          max_length: tokens, [CLS] and [SEP] among them, to which longer texts are cut.
          hidden_states: return those of all layers.
          attentions: return the attention probabilities of all layers, computed with the `reference` attention.

        Raises:
          UserError: no texts, texts that are not str, one with more tokens than the model has positions and no
            max_length, or an impossible max_length.
        """
        limit = self._length(max_length, None)
        rows, too_long = self._cut([text for chunk in _chunks(texts) for text in chunk], limit)
        if not rows:
            raise UserError("texts is empty: give at least one text")
        if too_long and max_length is None:
            raise UserError(
                f"{too_long} of {len(rows)} texts have more than {limit} tokens, the model's position table: shorten "
                f"them, or give max_length {limit} to cut them"
            )
        longest = max(map(len, rows))
        shape = (len(rows), embedding.row_length(longest))
        input_ids, mask = np.full(shape, self.tokenizer.pad_id, np.int32), np.zeros(shape, np.int32)
        for b, row in enumerate(rows):
            input_ids[b, : len(row)], mask[b, : len(row)] = row, 1
        config = _quick(self.config)
        config = dataclasses.replace(config, attention="reference") if attentions else config
        output = _outputs(config, self.heads, hidden_states, attentions, self.params, input_ids, mask)
        hidden, pooled, states, probabilities = (None if x is None else np.asarray(x, np.float32) for x in output)
        return ModelOutputs(
            input_ids[:, :longest],
            mask[:, :longest],
            hidden[:, :longest],
            None if pooled is None else pooled[:, 0],
            None if states is None else states[:, :, :longest],
            None if probabilities is None else probabilities[..., :longest, :longest],
        )

    def _length(self, max_length: int | None, default: int | None) -> int:
        limit = self.config.max_positions
        most = min(default or limit, limit) if max_length is None else max_length
        if not 3 <= most <= limit:
            raise UserError(f"max_length {most} is outside 3 to {limit}, the model's position table: change it")
        return most

    def _prepared(self, text: str) -> str:
        return tokenizers.normalizers.Lowercase().normalize_str(text) if self.sentence.lowercase else text

    def _cut(self, texts: list[str], max_length: int) -> tuple[list[np.ndarray], int]:
        """The ids of every text, special ones around them; and how many texts were cut."""
        flat, lengths = self.tokenizer.encode_flat(texts)
        starts, kept = np.cumsum(lengths) - lengths, np.minimum(lengths, max_length - 2)
        cls, sep = np.uint32(self.tokenizer.cls_id), np.uint32(self.tokenizer.sep_id)
        ids = [np.r_[cls, flat[start : start + n], sep] for start, n in zip(starts, kept, strict=True)]
        return ids, int((lengths > kept).sum())

    def _pass(self, modes: tuple[str, ...], skip: int, inputs: EncoderInputs) -> jax.Array:
        """One forward pass, its rows shared among the local devices."""
        inputs = jax.device_put(inputs, row_sharding(self._mesh))
        return _vectors(_quick(self.config), self.heads, modes, self.params, inputs, np.int32(skip))

    def _row(self, ids: list[int]) -> EncoderInputs:
        """One row, padded to a power of two, so that few lengths are compiled."""
        limit = self.config.max_positions
        if len(ids) + 2 > limit:
            raise UserError(f"the text has {len(ids) + 2} tokens, the model's position table {limit}: shorten it")
        length = len(ids) + 2
        seq_len = max(SHORTEST_BUCKET, min(2 ** (length - 1).bit_length(), limit))
        input_ids = np.full((1, seq_len), self.tokenizer.pad_id, np.int32)
        input_ids[0, :length] = self.tokenizer.cls_id, *ids, self.tokenizer.sep_id
        places, zeros = np.arange(seq_len, dtype=np.int32)[None], np.zeros((1, seq_len), np.int32)
        return EncoderInputs(input_ids, zeros, (places < length).astype(np.int32), places, zeros[:, :1])


def _unit(vectors: np.ndarray) -> np.ndarray:
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
    """Pieces of CHUNK_TEXTS or CHUNK_CHARACTERS, none of them empty.

    Raises:
      UserError: it is not an iterable of str.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise UserError(
            f"texts is {type(texts).__name__}, not an iterable of str: put a single text into brackets, as in "
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


def _quick(config: ModelConfig) -> ModelConfig:
    """The same function without dropout, with the attention that was fastest here (docs/LOG.md)."""
    attention = "late" if jax.default_backend() == "cpu" else config.attention
    return dataclasses.replace(config, attention=attention, attention_dropout=0.0, hidden_dropout=0.0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mlm_probabilities(config: ModelConfig, heads: Heads, params: Params, inputs: EncoderInputs) -> jax.Array:
    model = bert.bind(config, heads, params)
    logits = model.mlm(model.encoder(inputs).hidden, model.encoder.embeddings.attend)
    return jax.nn.softmax(logits, axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _outputs(
    config: ModelConfig,
    heads: Heads,
    hidden_states: bool,
    attentions: bool,
    params: Params,
    input_ids: jax.Array,
    mask: jax.Array,
) -> EncoderOutput:
    inputs = whole_rows(input_ids, jnp.zeros_like(input_ids), mask)
    encoder = bert.bind(config, heads, params).encoder
    return encoder(inputs, hidden_states=hidden_states, attentions=attentions)


_vectors = functools.partial(jax.jit, static_argnums=(0, 1, 2))(embedding.pooled)


def load(source: str | StoredPath) -> LoadedModel:
    """A model from a run's work directory (its newest intact checkpoint), or from any file that `convert` reads.

    Raises:
      UserError: none is there, what is there is damaged, it has no tokenizer, its store does not answer, or it has
        modules of sentence-transformers that `encode` does not compute.
    """
    with input_formats.open_model(source) as source_model:
        if source_model.tokenizer_path is None:
            raise UserError(f"{source} has no tokenizer: put its tokenizer.json, or what it has of the kind, beside it")
        _, config, heads, params = source_model.model
        tokenizer = Tokenizer.load(source_model.tokenizer_path)
        return LoadedModel(config, heads, params, tokenizer, source_model.sentence_embedding)
