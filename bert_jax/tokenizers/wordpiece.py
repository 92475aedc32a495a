"""Compiled WordPiece with the ids of the `tokenizers` library, in one pass over the text.

The library defines the effect of each character, which is looked up when it first occurs. A sentence whose ids do not
follow from its characters alone, or that may contain an added token, is encoded by the library. So both agree on
Unicode, and on where added tokens are matched.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.numba_cache import cached_njit
from bert_jax.tokenizers import cleaning

# Effect of a character. An entry of the character table has the kind in bits 48 to 50.
_UNSEEN = 0  # not looked up yet
_LETTER = 1  # continues a word; bits 0 to 15: its symbol
_LETTERS = 2  # becomes two or three letters that continue a word; bits 0 to 47: their symbols, the first one lowest
_ALIEN = 3  # continues a word, but is in no piece, so that the word is unknown
_BLANK = 4  # ends a word
_SINGLE = 5  # ends a word and is a word itself; bits 0 to 31: its id
_DROPPED = 6  # is removed
_FOREIGN = 7  # none of these: the library encodes its sentence
_KIND = 48
_MOVES = 1 << 51  # canonical reordering may swap it with its neighbour if both have this bit
_STARTS = 1 << 52  # an added token may begin with it
# Letter of a character in the search for added tokens: the only character but spaces that it becomes, or one of these.
_NO_LETTER, _MANY_LETTERS = -1, -2

_MAX_SYMBOL = 0xFFFF
_SEPARATOR = 0x110000  # code of the byte 0xff, which does not occur in UTF-8 and so in no sentence
_ASCII = range(128)

# Canonical combining classes 240, the highest there is, and 1, the lowest that moves (UAX #15; never reassigned).
_CLASS_240, _CLASS_1 = "\u0345", "\u0334"


class FastWordPiece:
    """BERT's WordPiece encoder for one core, exact to the id.

    Create one with `from_tokenizer`. It can be pickled and shared between threads. Its character table takes 9 MB of
    address space; only the pages of characters that occurred use memory.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        """`backend` must be supported, which `from_tokenizer` checks."""
        self._backend = backend
        model, normalizer = backend.model, cleaning.last_step(backend.normalizer)
        self._normalizer = normalizer
        is_sequence = isinstance(backend.normalizer, normalizers.Sequence)
        self._before = cleaning.BertCleaning() if is_sequence else None
        # By id, so that frequent pieces, which come first in most vocabularies, are close together in memory.
        vocab = dict(sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]))
        prefix = model.continuing_subword_prefix
        starts = {piece: i for piece, i in vocab.items() if piece}
        rests = {piece[len(prefix) :]: i for piece, i in starts.items() if piece.startswith(prefix) and piece != prefix}
        characters = "".join(starts) + "".join(rests)
        self._symbols = {character: i for i, character in enumerate(sorted(set(characters)), 1)}
        sizes = [len(piece) for pieces in (starts, rests) for piece in pieces]
        begins = np.cumsum([0, *sizes])
        symbols = np.array([self._symbols[character] for character in characters], np.uint16)
        slots = np.zeros(2 << len(sizes).bit_length(), np.uint64)
        _fill(slots, begins, symbols, len(starts))
        ids = np.array([*starts.values(), *rests.values()], np.uint32)
        self._pieces = slots, begins, symbols, ids, len(starts)
        self._limits = max(sizes, default=0), model.max_input_chars_per_word, vocab[model.unk_token]
        strips = normalizer.strip_accents
        self._decomposes = normalizer.lowercase if strips is None else strips
        self._starts, self._trie = _make_trie(map(self._visible, _matched_tokens(backend)))
        self._letters = np.zeros(_SEPARATOR + 1, np.int32)
        self._table = np.zeros(_SEPARATOR + 1, np.int64)
        self._table[_SEPARATOR] = _BLANK << _KIND
        self._learn(_ASCII)

    @classmethod
    def from_tokenizer(cls, backend: tokenizers.Tokenizer) -> "FastWordPiece | None":
        """An encoder with the same ids as `backend`, or None if it is not supported.

        Supported is BertNormalizer with any options, BertPreTokenizer and WordPiece, without truncation or padding; and
        before BertNormalizer `cleaning.BertCleaning`, if no tokens are matched in texts. Do not change the backend
        afterwards.
        """
        known = (
            isinstance(cleaning.last_step(backend.normalizer), normalizers.BertNormalizer)
            and isinstance(backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(backend.model, models.WordPiece)
            and backend.truncation is None
            and backend.padding is None
        )
        is_plain = known and isinstance(backend.normalizer, normalizers.BertNormalizer)
        if not known or not (is_plain or (cleaning.is_bert_cleaning(backend) and not _matched_tokens(backend))):
            return None
        vocab = backend.get_vocab(with_added_tokens=False)
        if backend.model.unk_token not in vocab or len(set("".join(vocab))) > _MAX_SYMBOL:
            return None
        fast = cls(backend)
        # A token without a visible character, or whose marks canonical reordering may move, cannot be searched for.
        visible = [fast._visible(token) for token in _matched_tokens(backend)]
        return None if "" in visible or (fast._decomposes and any(map(_reorders, "".join(visible)))) else fast

    def __reduce__(self):
        return _remake, (self._backend, self._backend.encode_special_tokens)

    def encode_flat(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of sentences, without [CLS] and [SEP] around them.

        Args:
          sentences: of any length, line ends included.

        Returns:
          (uint32 [num_tokens], all ids in order; int64 [num_sentences], the number of ids of each sentence).

        Raises:
          UnicodeEncodeError: a sentence has half of a surrogate pair, which UTF-8 cannot encode.
        """
        if self._before:
            sentences = list(map(self._before, sentences))
        text = np.frombuffer(b"\xff".join([*(sentence.encode() for sentence in sentences), b""]), np.uint8)
        # A character becomes at most as many symbols as it has bytes, and so a text at most as many tokens.
        ids, word = np.empty(len(text), np.uint32), np.empty(len(text), np.uint16)
        lengths = np.empty(len(sentences), np.int64)
        added = self._letters, self._trie
        count = _encode(text, self._table, self._pieces, self._limits, added, word, ids, lengths)
        if count < 0:
            self._learn(_unseen(text, self._table))
            count = _encode(text, self._table, self._pieces, self._limits, added, word, ids, lengths)
        ids = ids[:count].copy()
        foreign = np.flatnonzero(lengths < 0)
        return self._with_foreign(sentences, foreign, ids, lengths) if len(foreign) else (ids, lengths)

    def _with_foreign(
        self, sentences: Sequence[str], foreign: np.ndarray, ids: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        encodings = self._backend.encode_batch_fast([sentences[i] for i in foreign], add_special_tokens=False)
        library_ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        lengths[foreign] = 0
        before, *after = np.split(ids, np.cumsum(lengths)[foreign])
        lengths[foreign] = [len(part) for part in library_ids]
        parts = [part for pair in zip(library_ids, after, strict=True) for part in pair]
        return np.concatenate([before, *parts]), lengths

    def _learn(self, codes: Iterable[int]) -> None:
        for code in codes:
            visible = self._visible(chr(code))
            self._letters[code] = ord(visible) if len(visible) == 1 else _MANY_LETTERS if visible else _NO_LETTER
            starts = 0 if self._starts.isdisjoint(visible) else _STARTS
            self._table[code] = self._entry(chr(code)) | starts  # last: other threads may use the table

    def _visible(self, text: str) -> str:
        """The characters that those of a text become, each by itself, without spaces."""
        return "".join("".join(map(self._backend.normalizer.normalize_str, text)).split())

    def _entry(self, character: str) -> int:
        """The table entry of a character, from how the library splits it between two letters."""
        becomes = self._normalizer.normalize_str(character)
        words = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(f"a{becomes}a")]
        moves = _MOVES if self._decomposes and any(map(_reorders, becomes)) else 0
        if not becomes:
            return _DROPPED << _KIND
        if words == ["a", "a"]:
            return _BLANK << _KIND
        if words == [f"a{becomes}a"] and len(becomes) <= min(3, len(character.encode())):
            symbols = [self._symbols.get(part) for part in becomes]
            if None in symbols:
                return _ALIEN << _KIND | moves
            packed = sum(symbol << 16 * i for i, symbol in enumerate(symbols))
            return (_LETTER if len(symbols) == 1 else _LETTERS) << _KIND | moves | packed
        if len(words) == 3 and words[0] == words[2] == "a" and len(words[1]) == 1 and not moves:
            [token] = self._backend.model.tokenize(words[1])
            return _SINGLE << _KIND | token.id
        return _FOREIGN << _KIND


def _remake(backend: tokenizers.Tokenizer, encode_special_tokens: bool) -> FastWordPiece:
    # Pickling by the library loses this setting.
    backend.encode_special_tokens = encode_special_tokens
    return FastWordPiece(backend)


def _matched_tokens(backend: tokenizers.Tokenizer) -> list[str]:
    """The added tokens that the library matches in text."""
    added = backend.get_added_tokens_decoder().values()
    return [token.content for token in added if not (token.special and backend.encode_special_tokens)]


def _make_trie(tokens: Iterable[str]) -> tuple[frozenset[str], tuple[np.ndarray, ...]]:
    """The first letters of tokens, and their trie: first child, next sibling, letter and end of a token, by node."""
    nodes, tokens = [[0, 0, 0, 0]], list(filter(None, tokens))
    for token in tokens:
        node = 0
        for letter in map(ord, token):
            child = nodes[node][0]
            while child and nodes[child][2] != letter:
                child = nodes[child][1]
            if not child:
                child = len(nodes)
                nodes.append([0, nodes[node][0], letter, 0])
                nodes[node][0] = child
            node = child
        nodes[node][3] = 1
    return frozenset(token[0] for token in tokens), tuple(np.array(nodes, np.int32).T.copy())


def _reorders(character: str) -> bool:
    """Whether a character's combining class is not 0, by the tables of the library's normalizer."""
    pairs = _CLASS_240 + character, character + _CLASS_1
    return any(normalizers.NFD().normalize_str(pair) != pair for pair in pairs)


# Pieces are stored consecutively in `symbols`, piece p from begins[p] to begins[p + 1]: first those that begin a word,
# then, from number `starts` on, those that continue one. They are looked up in an open hash table: a slot is 0, or the
# upper half of the hash and the piece's number plus 1. Every match is verified symbol by symbol.

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_REST = np.uint64(0xA0761D6478BD642F)
_UPPER, _LOWER = np.uint64(0xFFFFFFFF00000000), np.uint64(0x00000000FFFFFFFF)


@cached_njit
def _push(running, symbol):
    return running * _FACTOR + np.uint64(symbol)


@cached_njit
def _hash(running, starts_word):
    if not starts_word:
        running ^= _REST
    running *= np.uint64(0xD6E8FEB86659FD93)
    return running ^ (running >> np.uint64(32))


@cached_njit
def _fill(slots, begins, symbols, starts):
    mask = np.uint64(len(slots) - 1)
    for piece in range(len(begins) - 1):
        running = np.uint64(0)
        for k in range(begins[piece], begins[piece + 1]):
            running = _push(running, symbols[k])
        key = _hash(running, piece < starts)
        slot = key & mask
        while slots[slot]:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = (key & _UPPER) | np.uint64(piece + 1)


@cached_njit
def _find(pieces, running, word, start, stop):
    """The id of the piece word[start:stop], or -1."""
    slots, begins, symbols, ids, starts = pieces
    key = _hash(running, start == 0)
    mask = np.uint64(len(slots) - 1)
    slot = key & mask
    while slots[slot]:
        if (slots[slot] ^ key) & _UPPER == 0:
            piece = np.int64(slots[slot] & _LOWER) - 1
            begin = begins[piece]
            if begins[piece + 1] - begin == stop - start and (piece < starts) == (start == 0):
                same = 0
                while same < stop - start and word[start + same] == symbols[begin + same]:
                    same += 1
                if same == stop - start:
                    return np.int64(ids[piece])
        slot = (slot + np.uint64(1)) & mask
    return -1


@cached_njit
def _cut(word, size, pieces, longest, unknown, hashes, ids, count):
    """Write the ids of a word, longest piece first (Devlin et al. 2019); returns the new number of ids."""
    first = count
    start = 0
    while start < size:
        room = min(size - start, longest)
        running = np.uint64(0)
        for k in range(room):
            running = _push(running, word[start + k])
            hashes[k] = running
        found = -1
        while found < 0 and room > 0:
            found = _find(pieces, hashes[room - 1], word, start, start + room)
            room -= 1
        if found < 0:
            ids[first] = unknown
            return first + 1
        ids[count] = found
        count += 1
        start += room + 1
    return count


@cached_njit
def _decode(text, i):
    """The code point of the UTF-8 at byte i, and the index of the next one."""
    byte = np.int64(text[i])
    if byte < 0x80:
        return byte, i + 1
    if byte < 0xE0:
        return (byte & 0x1F) << 6 | text[i + 1] & 0x3F, i + 2
    if byte < 0xF0:
        return (byte & 0x0F) << 12 | (text[i + 1] & 0x3F) << 6 | text[i + 2] & 0x3F, i + 3
    if byte == 0xFF:
        return _SEPARATOR, i + 1
    return (byte & 7) << 18 | (text[i + 1] & 0x3F) << 12 | (text[i + 2] & 0x3F) << 6 | text[i + 3] & 0x3F, i + 4


@cached_njit
def _unseen(text, table):
    """Code points of the text that have no entry yet."""
    missing = np.zeros(len(table), np.bool_)
    i = 0
    while i < len(text):
        code, i = _decode(text, i)
        missing[code] = table[code] == 0
    return np.flatnonzero(missing)


@cached_njit
def _may_begin_token(text, i, code, letters, trie):
    """Whether an added token may begin with the character `code`, which ends before byte i; spaces do not count."""
    child, sibling, letter_of, ends = trie
    node = 0
    while True:
        letter = letters[code]
        if letter == _MANY_LETTERS:
            return True
        if letter != _NO_LETTER:
            node = child[node]
            while node and letter_of[node] != letter:
                node = sibling[node]
            if node == 0 or ends[node]:
                return node > 0
        if i == len(text):
            return False
        code, i = _decode(text, i)


@cached_njit
def _encode(text, table, pieces, limits, added, word, ids, lengths):
    """Fill `ids` and `lengths` (-1: encode by the library); returns the number of ids, or -1 at an unseen character."""
    longest, max_size, unknown = limits
    letters, trie = added
    hashes = np.empty(longest, np.uint64)
    count, first, sentence = 0, 0, 0
    size, running, alien, foreign = 0, np.uint64(0), False, False
    moved_count, moved_size = -1, -1
    i = 0
    while i < len(text):
        code, i = _decode(text, i)
        entry = table[code]
        kind = entry >> _KIND
        if kind == _LETTER:
            word[size] = entry & _MAX_SYMBOL
            running = _push(running, entry & _MAX_SYMBOL)
            size += 1
            continue
        if kind == _UNSEEN:
            return -1
        if entry & _STARTS:
            foreign = foreign or _may_begin_token(text, i, code, letters, trie)
            kind &= 15
        if kind in (_BLANK, _SINGLE):
            if size > 0:
                found = -1 if alien or size > max_size else _find(pieces, running, word, 0, size)
                if found < 0 and not alien and size <= max_size:
                    count = _cut(word, size, pieces, longest, unknown, hashes, ids, count)
                else:
                    ids[count] = unknown if found < 0 else found
                    count += 1
                size, running, alien = 0, np.uint64(0), False
            if kind == _SINGLE:
                ids[count] = entry & 0xFFFFFFFF
                count += 1
            elif code == _SEPARATOR:
                if foreign:
                    count = first
                lengths[sentence] = -1 if foreign else count - first
                first, foreign, moved_count = count, False, -1
                sentence += 1
            continue
        if entry & _MOVES:
            # If no token or symbol was added since the last character that moves, the two may be swapped.
            foreign |= moved_count == count and moved_size == size
        if kind & 7 == _ALIEN:
            alien = True
            size += 1
        elif kind & 7 == _FOREIGN:
            foreign = True
        elif kind & 7 != _DROPPED:
            symbols = entry & 0xFFFFFFFFFFFF
            while symbols:
                word[size] = symbols & _MAX_SYMBOL
                running = _push(running, symbols & _MAX_SYMBOL)
                size += 1
                symbols >>= 16
        if entry & _MOVES:
            moved_count, moved_size = count, size
    return count
