"""Pseudo-log-likelihood of sentences: the sum of the log-probabilities of their tokens, each masked in turn.

Variants differ in what is masked together with a token: nothing more (`original`, Wang and Cho 2019; Salazar et al.
2020), the later tokens of its word (`within_word_l2r`, Kauf and Ivanova 2023, arXiv:2305.10588), or all tokens of its
word (`whole_word`, Kauf and Ivanova 2023). [CLS] and [SEP] are neither masked nor scored.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from bert_jax.analysis.cloze.predictions import plan_shapes, token_log_probabilities
from bert_jax.command.progress import progress_bar
from bert_jax.inference.embedding import pad_rows
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.rows import TextRow

Variant = Literal["original", "within_word_l2r", "whole_word"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


def token_scores(
    model: LoadedModel, rows: Sequence[TextRow], variants: Sequence[Variant] = VARIANTS, *, progress: bool = False
) -> dict[Variant, list[np.ndarray]]:
    """Log-probabilities of the tokens of rows, each masked as the variant says.

    A masked copy of a row that several variants need is computed once: a word of one token is the same in all.
    The softmax is over all rows of the model's vocabulary, as in transformers.

    Args:
      model: with an MLM head.
      rows: from `rows.encode_sentences`.
      variants: to compute.
      progress: show a progress bar on stderr.

    Returns:
      for each variant and row float64 [tokens without special ones], nats.
    """
    copies = [masked_ranges(rows, variant) for variant in variants]
    distinct, index = np.unique(np.concatenate(copies), axis=0, return_inverse=True)
    scores = _score(model, rows, distinct, progress)[index.reshape(-1)]
    ends = np.cumsum([len(row.input_ids) - 2 for row in rows])[:-1]
    by_variant = np.split(scores, len(variants))
    return {variant: np.split(one, ends) for variant, one in zip(variants, by_variant, strict=True)}


def pseudo_log_likelihoods(
    model: LoadedModel, rows: Sequence[TextRow], variants: Sequence[Variant] = VARIANTS, *, progress: bool = False
) -> dict[Variant, np.ndarray]:
    """Sums of `token_scores` over the tokens of each row, float64 [rows], nats; arguments as there."""
    scores = token_scores(model, rows, variants, progress=progress)
    return {variant: np.array([one.sum() for one in of_rows]) for variant, of_rows in scores.items()}


def masked_ranges(rows: Sequence[TextRow], variant: Variant) -> np.ndarray:
    """What is masked to score each token, int64 [tokens, 4]: row, position, first masked position, last one + 1.

    Args:
      rows: each has [CLS] first and [SEP] last.
      variant: of the pseudo-log-likelihood.
    """
    copies = []
    for index, row in enumerate(rows):
        words, position = row.word_ids[1:-1], np.arange(1, len(row.input_ids) - 1)
        first = 1 + np.searchsorted(words, words, side="left") if variant == "whole_word" else position
        end = position + 1 if variant == "original" else 1 + np.searchsorted(words, words, side="right")
        copies.append(np.stack([np.full_like(position, index), position, first, end], axis=1))
    return np.concatenate(copies)


def _score(model: LoadedModel, rows: Sequence[TextRow], copies: np.ndarray, progress: bool) -> np.ndarray:
    """Log-probability of the token of each masked copy."""
    scores = np.zeros(len(copies))
    lengths = np.array([len(row.input_ids) for row in rows])
    pad_id, mask_id = model.tokenizer.pad_id, model.tokenizer.mask_id
    with progress_bar("masked tokens", len(copies), "token", shown=progress) as bar:
        for shape in plan_shapes(lengths[copies[:, 0]]):
            of_shape, row_in_shape = np.unique(copies[shape.indices, 0], return_inverse=True)
            ids, attention = pad_rows([rows[i].input_ids for i in of_shape], shape.length, pad_id)
            local = np.zeros(len(copies), np.int64)
            local[shape.indices] = row_in_shape
            columns = np.arange(shape.length)
            for chosen, count in shape.passes():
                _, positions, first, end = copies[chosen].T
                row = local[chosen]
                masked = (columns >= first[:, None]) & (columns < end[:, None])
                inputs = np.where(masked, mask_id, ids[row]).astype(np.int32)
                tokens = ids[row, positions]
                found = token_log_probabilities(model, inputs, attention[row], positions.astype(np.int32), tokens)
                scores[chosen[:count]] = found[:count]
                bar.update(count)
    return scores
