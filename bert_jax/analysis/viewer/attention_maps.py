"""Attention of every head on one text, and its form on the page: 8 bits per weight, compressed.

Shapes in names: L layers, N heads, S queries, T keys (the same tokens).
"""

import base64
import zlib
from typing import NamedTuple

import numpy as np

from bert_jax.analysis.attention.mixing import transformed_values
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.translate import infer_model_type
from bert_jax.errors import UserError, short_repr
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, encode_texts
from bert_jax.model.layer_plan import parameter_groups

MAX_TOKENS = 512
"""Of a text, special tokens included."""
LEVELS = 255
"""A weight w is stored as the integer next to LEVELS * sqrt(w)."""
MAX_ERROR = 1 / LEVELS
"""No stored weight is farther off: at w the bound is sqrt(w) / LEVELS + 1 / (4 * LEVELS**2)."""
_PROBABILITIES, _VALUES = "layers.*.attention.probabilities", "layers.*.attention.value"


class AttentionMaps(NamedTuple):
    """Attention of every head on one text or pair."""

    tokens: tuple[str, ...]
    """As in the vocabulary, special tokens included."""
    token_types: np.ndarray
    """int32 [T]: 1 at tokens of the second text."""
    is_boundary: np.ndarray
    """bool [T]: [CLS] and [SEP]."""
    probabilities: np.ndarray
    """float32 [L, N, S, T], by query and key."""
    value_norms: np.ndarray
    """float32 [L, N, T]: norm of f(x), the value of a token times the head's part of the output projection (Kobayashi
    et al. 2020, equation 3)."""

    def norm_weighted(self, layer: int, head: int) -> np.ndarray:
        """Norms of what each key adds to a query's output, as shares of the query's sum, float32 [S, T]."""
        norms = self.probabilities[layer, head] * self.value_norms[layer, head]
        return norms / np.maximum(norms.sum(-1, keepdims=True), np.finfo(np.float32).tiny)


def encode_view(model: LoadedModel, text: str, second: str | None = None) -> TextRow:
    """[CLS] text [SEP], or [CLS] text [SEP] second [SEP].

    Args:
      model: from `inference.load`.
      text: mask tokens and other special tokens in it are kept as such.
      second: of a pair.

    Raises:
      UserError: a text that is not Unicode or has no tokens; more than MAX_TOKENS, or than the model has positions.
    """
    limit, sides = min(MAX_TOKENS, model.config.max_positions), [text, *([] if second is None else [second])]
    for side in sides:
        if any("\ud800" <= character <= "\udfff" for character in side):
            raise UserError(f"the text to view is not Unicode text: {short_repr(side)}")
    lengths = [len(model.tokenizer.encode(side)) for side in sides]
    if not all(lengths):
        raise UserError(f"the {'second ' if lengths[0] else ''}text to view has no tokens: give another one")
    separators = FAMILIES[infer_model_type(model.config, model.heads)].pair_separators
    total = sum(lengths) + (2 if second is None else 2 + separators)
    if total > limit:
        why = "the viewer shows" if limit == MAX_TOKENS else "the model has positions for"
        raise UserError(f"the text to view has {total} tokens, and {why} at most {limit}: shorten it")
    seconds = None if second is None else [second]
    (row,) = encode_texts([text], model.tokenizer, limit, seconds, separators=separators)
    assert row is not None
    return row


def read_attention(model: LoadedModel, text: str, second: str | None = None) -> AttentionMaps:
    """The attention of every head on a text or pair; arguments and errors are those of `encode_view`."""
    row = encode_view(model, text, second)
    (batch,) = batches([row], model.tokenizer.pad_id, 1)
    # RoBERTa has one token type, for both texts of a pair.
    types = np.minimum(batch.token_type_ids, max(0, model.config.type_vocab_size - 1))
    found, total = capture(model, batch._replace(token_type_ids=types), [_PROBABILITIES, _VALUES]), len(row.input_ids)
    values_LTND = found[_VALUES][:, 0, :total]
    kernels = model.params["encoder"]["layers"]["attention_out"]["kernel"]
    norms_LTN = [
        np.linalg.norm(transformed_values(values_TND, np.asarray(kernels[group], np.float32)), axis=-1)
        for values_TND, group in zip(values_LTND, parameter_groups(model.config), strict=True)
    ]
    return AttentionMaps(
        tuple(model.tokenizer.id_to_token(int(token)) for token in row.input_ids),
        row.token_type_ids,
        np.isin(row.input_ids, [model.tokenizer.cls_id, model.tokenizer.sep_id]),
        found[_PROBABILITIES][:, 0, :, :total, :total],
        np.stack(norms_LTN).swapaxes(1, 2),
    )


def encode_weights(weights_ST: np.ndarray) -> str:
    """The weights of a head as text: 8-bit integers [T, S], zlib, base64.

    Neighbours in a key's column are more alike than those in a query's row, so keys come first.

    Args:
      weights_ST: float [S, T], from 0 to 1.
    """
    levels = np.rint(LEVELS * np.sqrt(weights_ST.T)).astype(np.uint8)
    compressor = zlib.compressobj(6, memLevel=9, strategy=zlib.Z_FILTERED)
    return base64.b64encode(compressor.compress(levels.tobytes()) + compressor.flush()).decode()
