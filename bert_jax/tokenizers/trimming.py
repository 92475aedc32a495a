"""Smaller vocabularies: a tokenizer with the pieces that texts use, which splits these texts as before.

WordPiece takes the longest piece at each place (Devlin et al. 2019), Unigram the most probable path, BPE the first
merge: each keeps its choice when only pieces disappear that it does not use. Ids are renumbered in their old order.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer

TokenizerJson = dict[str, Any]
"""The content of a tokenizer.json."""


class TrimmedTokenizer(NamedTuple):
    """A smaller tokenizer."""

    tokenizer: Tokenizer
    kept: np.ndarray
    """The old id of each of its ids, ascending, int64 [new vocab_size]."""


def trim(tokenizer: Tokenizer, used: np.ndarray, origin: str) -> TrimmedTokenizer:
    """The tokenizer without the pieces that are neither used nor needed.

    Needed are added tokens, special tokens and those of the post-processor, and what makes every text that could be
    encoded before encodable: single characters, in WordPiece also as continuations; in BPE every piece that no merge
    makes, such as the 256 bytes, and all pieces on the way to a kept one; in Unigram also the piece of the lowest
    score, on which the score of unknown characters depends.

    Args:
      tokenizer: WordPiece, BPE or Unigram of the `tokenizers` library.
      used: ids to keep.
      origin: names the tokenizer in messages.

    Raises:
      UserError: a tokenizer of another kind.
    """
    description = json.loads(tokenizer.to_json())
    kind = description["model"]["type"] if isinstance(description.get("model"), dict) else tokenizer.kind
    if kind not in _KINDS:
        raise UserError(
            f"{origin}: a {tokenizer.kind} tokenizer cannot be trimmed, only {', '.join(_KINDS)} in a tokenizer.json"
        )
    needed, change = _KINDS[kind]
    added = {token["id"] for token in description["added_tokens"]}
    kept = {*map(int, used), *tokenizer.special_ids, *added, *_post_processor_ids(description["post_processor"])}
    kept = np.array(sorted(needed(description["model"], kept)), np.int64)
    new_ids = {int(old): new for new, old in enumerate(kept)}
    change(description["model"], new_ids)
    description["added_tokens"] = [token | {"id": new_ids[token["id"]]} for token in description["added_tokens"]]
    _renumber(description["post_processor"], new_ids)
    return TrimmedTokenizer(Tokenizer.from_json(json.dumps(description, ensure_ascii=False), origin), kept)


def _needed_of_wordpiece(model: TokenizerJson, kept: set[int]) -> set[int]:
    prefix = model["continuing_subword_prefix"]
    return kept | {i for piece, i in model["vocab"].items() if len(piece.removeprefix(prefix)) == 1}


def _change_wordpiece(model: TokenizerJson, new_ids: dict[int, int]) -> None:
    model["vocab"] = {piece: new_ids[i] for piece, i in model["vocab"].items() if i in new_ids}


def _needed_of_bpe(model: TokenizerJson, kept: set[int]) -> set[int]:
    """All kept pieces, the pieces that no merge makes, and the parts of both, down to these."""
    vocab = model["vocab"]
    parts: dict[int, set[int]] = {}
    for first, second in _pairs(model):
        parts.setdefault(vocab[_joined(model, first, second)], set()).update((vocab[first], vocab[second]))
    found = kept | {i for i in vocab.values() if i not in parts}
    waiting = list(found)
    while waiting:
        new = parts.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _change_bpe(model: TokenizerJson, new_ids: dict[int, int]) -> None:
    vocab = model["vocab"]
    model["merges"] = [
        [first, second] for first, second in _pairs(model) if vocab[_joined(model, first, second)] in new_ids
    ]
    _change_wordpiece(model, new_ids)


def _pairs(model: TokenizerJson) -> Iterator[tuple[str, str]]:
    """The merges; files of older versions have them as strings."""
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        yield first, second


def _joined(model: TokenizerJson, first: str, second: str) -> str:
    return first + second.removeprefix(model.get("continuing_subword_prefix") or "")


def _needed_of_unigram(model: TokenizerJson, kept: set[int]) -> set[int]:
    vocab = model["vocab"]
    lowest = min(range(len(vocab)), key=lambda i: vocab[i][1])
    unknown = set() if model["unk_id"] is None else {model["unk_id"]}
    is_byte = [len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") for piece, _ in vocab]
    return kept | unknown | {lowest} | {i for i, (piece, _) in enumerate(vocab) if len(piece) == 1 or is_byte[i]}


def _change_unigram(model: TokenizerJson, new_ids: dict[int, int]) -> None:
    model["vocab"] = [entry for i, entry in enumerate(model["vocab"]) if i in new_ids]
    if model["unk_id"] is not None:
        model["unk_id"] = new_ids[model["unk_id"]]


_KINDS: dict[str, tuple[Callable[[TokenizerJson, set[int]], set[int]], Callable[[TokenizerJson, dict], None]]] = {
    "WordPiece": (_needed_of_wordpiece, _change_wordpiece),
    "BPE": (_needed_of_bpe, _change_bpe),
    "Unigram": (_needed_of_unigram, _change_unigram),
}
"""By type of the model in a tokenizer.json: what is kept besides some ids, and the change of the model in place."""


def _processors(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if part is not None:
        yield part
        for inner in part.get("processors", []):
            yield from _processors(inner)


def _post_processor_ids(part: dict[str, Any] | None) -> Iterator[int]:
    """Ids that a post-processor adds to a text."""
    for one in _processors(part):
        yield from (one[name][1] for name in ("cls", "sep") if isinstance(one.get(name), list))
        for token in one.get("special_tokens", {}).values():
            yield from token["ids"]


def _renumber(part: dict[str, Any] | None, new_ids: dict[int, int]) -> None:
    """Renumber the ids of a post-processor in place."""
    for one in _processors(part):
        for name in ("cls", "sep"):
            if isinstance(one.get(name), list):
                one[name][1] = new_ids[one[name][1]]
        for token in one.get("special_tokens", {}).values():
            token["ids"] = [new_ids[i] for i in token["ids"]]
