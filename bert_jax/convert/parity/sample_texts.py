"""Inputs of the parity report: short texts in several scripts, and a batch of them."""

import itertools

import numpy as np

from bert_jax.convert.forward_types import ForwardInputs, family_of
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.tokenizers.tokenizer import Tokenizer

TEXTS = (
    "A small boat left the harbour before sunrise.",
    "Why did nobody tell her that the bridge was closed?",
    "rain, wind; RAIN again... and (finally) sun!",
    "The invoice of 03/11/1998 says $1,204.50 - 7% less than ``planned''.",
    "Der Zug fährt über die Brücke, größer als das alte Stellwerk.",
    "L'été dernier, nous avons mangé des crêpes près du château.",
    "El niño preguntó: ¿cuándo vuelve la cigüeña?",
    "Köyün yaşlı ağacı İstanbul'a bakan tepede duruyor.",
    "Con mèo ngủ trên mái nhà suốt buổi chiều.",
    "Старый мост стоит над рекой уже триста лет.",
    "Το πλοίο έφυγε νωρίς το πρωί από το λιμάνι.",
    "السفينة تغادر الميناء عند الفجر.",
    "הספינה יוצאת מהנמל עם שחר.",
    "नदी के किनारे एक पुराना पेड़ है।",
    "小船在日出之前离开了港口。",
    "小さな船は夜明け前に港を出た。カモメが鳴く。",
    "작은 배가 새벽에 항구를 떠났다.",
    "เรือลำเล็กออกจากท่าก่อนรุ่งสาง",
    "def area(r): return 3.14159 * r ** 2  # https://example.org/a?b=c&d=1",
    "  tabs\tand   spaces\n, ﬁne ligatures, e\u0301 in two parts, 🙂👍🏽 ☃ ½ ²",
    "x",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaftskapitän " + "ha" * 60,
)
"""Case, accents, CJK characters, quotes and a word of more than 100 characters reveal the settings of tokenizers."""
_ADDED_TOKENS_PER_TEXT = 8

MAX_ROW_LENGTH = 48
"""Maximum number of tokens in a row."""
MAX_WINDOW = 512
"""Largest attention window, in tokens, that a row is made to exceed: all rows are padded to the longest one."""
_PAIRED_EVERY = 3
_TYPES = {"bert": 2, "roberta": 2, "albert": 2, "electra": 2, "mobilebert": 2}
"""Defaults of type_vocab_size in transformers' configs; the other families have no token types."""


def tokenizer_texts(tokenizer: Tokenizer) -> list[str]:
    """`TEXTS`, and texts with every added token: alone, beside several spaces, inside a word, in upper case, twice."""
    parts = [f"The {t} boat,  {t}  {t.upper()} har{t}bour {t}{t}." for t in tokenizer.added_tokens]
    groups = (parts[first : first + _ADDED_TOKENS_PER_TEXT] for first in range(0, len(parts), _ADDED_TOKENS_PER_TEXT))
    return [*TEXTS, *map(" ".join, groups)]


def sample_inputs(hf_model: HuggingFaceModel, tokenizer: Tokenizer | None) -> ForwardInputs:
    """A deterministic padded batch: rows of 1 to `MAX_ROW_LENGTH` tokens, every third row a pair of texts.

    Args:
      hf_model: gives the sizes of the vocabulary, the positions and the token types.
      tokenizer: of the model; None: rows of random ids.
    """
    config, family = hf_model.config, family_of(hf_model)
    pad = config.get("pad_token_id")  # the config's first: RoBERTa counts positions from it
    positions = config.get("max_position_embeddings", 512)
    if family == "roberta":  # no token uses the rows of the position table up to the padding id
        positions -= (1 if pad is None else pad) + 1
    longest = min(MAX_ROW_LENGTH, positions)
    if pad is None or pad < 0:
        pad = 0 if tokenizer is None else tokenizer.pad_id
    if tokenizer is None:
        rows = _random_rows(config["vocab_size"], pad, longest)
    else:
        rows = [(one[:longest], two[: max(0, longest - len(one))]) for one, two in _text_rows(tokenizer)]
    if family == "modernbert":  # a row that is longer than the window of local layers
        window = min(config.get("local_attention", 128), MAX_WINDOW)
        length = min(window + 16, config["max_position_embeddings"])
        rows.append((np.random.default_rng(1).integers(0, config["vocab_size"], length).tolist(), []))
    shape = len(rows), max(len(first) + len(second) for first, second in rows)
    ids_BS, types_BS, mask_BS = np.full(shape, pad, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, (first, second) in enumerate(rows):
        length = len(first) + len(second)
        ids_BS[row, :length] = first + second
        mask_BS[row, :length] = 1
        if config.get("type_vocab_size", _TYPES.get(family, 0)) >= 2:
            types_BS[row, len(first) : length] = 1
    return ForwardInputs(ids_BS, types_BS, mask_BS)


def _text_rows(tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """First and second part of each row: [CLS] alone, then every text, every third one with the next text."""
    cls, sep = [tokenizer.cls_id], [tokenizer.sep_id]
    pieces = [list(ids) for ids in tokenizer.encode_batch(list(TEXTS))]
    rows = [(cls, [])]
    for i, (ids, following) in enumerate(itertools.pairwise([*pieces, pieces[0]])):
        # Both parts are short, so that the second is not truncated.
        paired = i % _PAIRED_EVERY == 0
        rows.append((cls + ids[:20] + sep, following[:20] + sep) if paired else (cls + ids + sep, []))
    return rows


def _random_rows(vocab_size: int, pad: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """The same number of rows of random ids, without the padding id."""
    rng = np.random.default_rng(0)
    others = np.setdiff1d(np.arange(vocab_size), [pad] if vocab_size > 1 else [])
    rows = []
    for i, length in enumerate(np.linspace(1, longest, len(TEXTS) + 1).astype(int)):
        ids = rng.choice(others, length).tolist()
        first = len(ids) // 2 + 1 if i % _PAIRED_EVERY == 0 else len(ids)
        rows.append((ids[:first], ids[first:]))
    return rows
