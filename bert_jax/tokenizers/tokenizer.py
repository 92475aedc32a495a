"""The tokenizer interface: text to ids and back, the five special ids, a fingerprint.

Does not need jax, because the corpus pipeline runs without it.
"""

import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tokenizers
from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import check_reachable, is_remote, to_path
from bert_jax.tokenizers import cleaning, kinds, offsets, readers
from bert_jax.tokenizers.kinds import CONTINUATION, SPECIAL_TOKENS
from bert_jax.tokenizers.models import TokenizerModel, TokenizersBackend

__all__ = ["CONTINUATION", "SPECIAL_TOKENS", "Tokenizer", "byte_bpe", "char_bpe", "sentencepiece", "wordpiece"]


class Tokenizer:
    """Converts text to ids without adding [CLS] or [SEP], and ids to text.

    Create one with `Tokenizer.load`, or from pieces with `wordpiece`, `char_bpe`, `byte_bpe` or `sentencepiece`. It is
    immutable, can be shared between threads, and can be pickled.

    Added tokens, special or not, are matched in text as by the `tokenizers` library (flags single_word, lstrip, rstrip
    and normalized), so that ids are those of transformers. In `encode_corpus` control tokens such as [MASK] are plain
    text: a document of a corpus is data, so that the unknown id is the only special id in the result.

    Attributes:
      kind: name of the kind of model, for messages.
      vocab_size: number of ids; every id is in [0, vocab_size).
      pad_id, unk_id, cls_id, sep_id, mask_id: the special ids.
      special_ids: those five, sorted.
      added_tokens: the tokens that are matched in text before it is split, special ones included, in the order of ids.
      lowercase: whether text is lower-cased before it is split into pieces.
      settings: normalization settings by their names in transformers' tokenizer_config.json (do_lower_case,
        strip_accents, tokenize_chinese_chars; add_prefix_space; keep_accents), if they have one.
      note: one line about an assumption of `load`; None: no assumption.
      sentencepiece_model: the content of a .model file that gives the same ids in the SentencePiece library; None for
        other kinds and for ALBERT, whose texts are preprocessed, which the file does not describe.
    """

    def __init__(self, model: TokenizerModel):
        """Wrap a model, which must not be changed afterwards."""
        self._model = model
        self.kind: str = model.kind
        self.vocab_size: int = len(model.pieces)
        self.pad_id: int = model.roles["pad"]
        self.unk_id: int = model.roles["unk"]
        self.cls_id: int = model.roles["cls"]
        self.sep_id: int = model.roles["sep"]
        self.mask_id: int = model.roles["mask"]
        self.special_ids: tuple[int, ...] = tuple(sorted(model.roles.values()))
        self.added_tokens: tuple[str, ...] = model.added_tokens
        self.lowercase: bool = model.lowercase
        self.settings: dict[str, bool] = dict(model.settings)
        self.note: str | None = model.note
        self.sentencepiece_model: bytes | None = model.sentencepiece_model
        self._ids = {piece: i for i, piece in enumerate(model.pieces)}
        # Some models match "<mask>" in text as an ordinary piece; it becomes the unknown id.
        self._as_text = np.arange(self.vocab_size, dtype=np.uint32)
        self._as_text[list(self.special_ids)] = self.unk_id
        self._compiled = {}

    def __reduce__(self):
        return Tokenizer, (self._model,)

    @classmethod
    def load(
        cls, path: os.PathLike | str, lowercase: bool | None = None, add_missing_special_tokens: bool = False
    ) -> "Tokenizer":
        """Read a vocabulary in one of the common file formats.

        Args:
          path: a `tokenizer.json`, a BERT `vocab.txt`, a `merges.txt` of byte-level BPE with a
            `vocab.json` in the same directory (also GPT-2's `vocab.bpe` and `encoder.json`; these names may have a
            prefix), a SentencePiece `.model`, or a directory with one of them, in this order. The settings in a
            tokenizer_config.json of its directory are used (tokenizers/hf_settings.py). If files in the directory of a
            .model identify an ALBERT, texts are preprocessed as in ALBERT (tokenizers/kinds.py).
          lowercase: for a vocab.txt, whether to lower-case, and to strip accents unless tokenizer_config.json has
            strip_accents; None uses its do_lower_case, or else is derived from the vocabulary: one with upper-case
            letters outside its special tokens is cased, and `note` reports this. For merges, whether to lower-case.
            The other formats define it themselves.
          add_missing_special_tokens: append the special tokens that the vocabulary lacks, as new last ids.

        Raises:
          UserError: no such file, a file that is not a vocabulary, a missing special token, a `lowercase` that
            contradicts the file, or an unsupported setting.
        """
        path = to_path(path)
        if is_remote(path):
            check_reachable(path)
        return cls(readers.read(epath.Path(path), lowercase, add_missing_special_tokens))

    @classmethod
    def from_json(cls, text: str, origin: str) -> "Tokenizer":
        """Build a tokenizer from the text of a tokenizer.json; `origin` names it in messages.

        Raises:
          UserError: the text is not that of a tokenizer.json, or a special token is missing.
        """
        return cls(readers.from_json(text, origin))

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts; may use several threads."""
        return self._model.encode(texts)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of many texts, the same as those of `encode_batch`, but faster for WordPiece.

        Returns:
          concatenated ids of all texts, uint32 [num_tokens], and
          the number of ids of each text, int64 [num_texts].
        """
        fast = self._fast("library")
        return fast.encode_flat(texts) if fast and texts else _flat(self._model.encode(texts))

    def encode_corpus(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a corpus's sentences, in the form of `encode_flat`, control tokens being plain text."""
        if sentences and (fast := self._fast("corpus_library")):
            return fast.encode_flat(sentences)
        ids, lengths = _flat(self._model.encode_corpus(sentences))
        return self._as_text[ids], lengths

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Ids of one text, the same as those of `encode`, and the characters that each comes from.

        Returns:
          the ids, and
          the first character and the last character + 1 of each, without spaces at its ends, int64 [num_tokens, 2].
        """
        return self.encode(text), offsets.trim_offsets(text, self._model.offsets(text))

    def unknown_bytes(self, texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Bytes in UTF-8 of the characters that became unknown ids; of a word if WordPiece does not know it.

        Args:
          texts: that were encoded, sentences of a corpus.
          ids, lengths: of `encode_corpus`.

        Returns:
          int64 [num_texts].
        """
        lost = np.zeros(len(texts), np.int64)
        ends = np.cumsum(lengths)
        unknown = np.flatnonzero(ids == self.unk_id)
        for index in np.unique(np.searchsorted(ends, unknown, "right")).tolist():
            text, own = texts[index], ids[ends[index] - lengths[index] : ends[index]]
            spans = itertools.compress(self._model.corpus_offsets(text), (own == self.unk_id).tolist())
            lost[index] = sum(len(text[first:last].encode()) for first, last in spans)
        return lost

    def encode_with_word_ids(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Ids of several texts, the same as those of `encode_batch`, and the word of each.

        Words are what the vocabulary's rules split a text into before its pieces are chosen, as in the `word_ids` of
        transformers: punctuation is a word of its own, and "don't" three words in BERT's vocabularies, two in GPT-2's.
        In SentencePiece models a word begins at each "▁".

        Returns:
          for each text its ids, and the index of the word of each id, ascending from 0.
        """
        return self._model.encode_with_word_ids(texts)

    def _fast(self, library: str):
        """Compiled WordPiece with the ids of a library of the model, or None for other models."""
        if not isinstance(self._model, TokenizersBackend):
            return None
        if library not in self._compiled:
            # Imported here because numba is slow to import.
            from bert_jax.tokenizers.wordpiece import FastWordPiece

            self._compiled[library] = FastWordPiece.from_tokenizer(getattr(self._model, library))
        return self._compiled[library]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; case and unknown pieces are not restored."""
        return self._model.decode([int(i) for i in ids])

    def id_to_token(self, token_id: int) -> str:
        """The piece of an id; IndexError outside [0, vocab_size)."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside [0, {self.vocab_size})")
        return self._model.pieces[token_id]

    def token_to_id(self, token: str) -> int | None:
        """The id of a piece, or None if the vocabulary lacks it."""
        return self._ids.get(token)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that affects ids; equal for a vocabulary and the tokenizer.json made from it."""
        return self._model.fingerprint()

    @functools.cached_property
    def begins_word(self) -> np.ndarray:
        """bool [vocab_size]: the opposite of `continues_word`; all False if the vocabulary does not mark words."""
        continues = self._model.continues_word()
        if continues is None:
            return np.zeros(self.vocab_size, np.bool_)
        begins = ~continues
        begins[list(self.special_ids)] = True
        begins.setflags(write=False)
        return begins

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """bool [vocab_size]: whether a piece continues the word of the previous piece ("##ing").

        A piece continues a word if it has WordPiece's prefix for that or, in other vocabularies, if it lacks the mark
        for a space before it ("Ġ", "▁"). So punctuation is a word of its own if text is split by BERT's rules
        (WordPiece, `char_bpe`); otherwise it belongs to the word that it follows without a space. Special tokens never
        continue a word. The first piece of a text always begins a word: GPT-2's vocabulary does not mark it.

        Raises:
          UserError: the vocabulary does not mark words.
        """
        if not self.begins_word.any():
            raise UserError(
                "this vocabulary does not mark which pieces begin a word (none has ##, Ġ or ▁), so whole words cannot"
                " be masked; choose another vocabulary, or mask pieces"
            )
        continues = ~self.begins_word
        continues.setflags(write=False)
        return continues

    def to_json(self) -> str:
        """The text of a file that `load` reads; except for SentencePiece, the `tokenizers` library reads it too."""
        return self._model.to_json()

    def save(self, path: os.PathLike | str) -> list[epath.Path]:
        """Write a tokenizer.json and, if there is a `sentencepiece_model`, the .model beside it for other libraries.

        Returns:
          the files, the tokenizer.json last.
        """
        path = epath.Path(path)
        files = {model_file(path): self.sentencepiece_model, path: self.to_json().encode()}
        files = {file: content for file, content in files.items() if content is not None}
        for file, content in files.items():
            write_atomic(file, content)
        return list(files)


def _flat(encoded: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(itertools.chain.from_iterable(encoded), np.uint32, int(lengths.sum())), lengths


def model_file(path: epath.Path) -> epath.Path:
    """The SentencePiece model beside a tokenizer.json: tokenizer.model."""
    return path.with_suffix(".model")


def wordpiece(
    pieces: Sequence[str], lowercase: bool | None, origin: str, strip_accents: bool | None = None
) -> Tokenizer:
    """BERT's tokenizer: see `kinds.wordpiece`."""
    return Tokenizer(TokenizersBackend(kinds.wordpiece(pieces, lowercase, origin, strip_accents), origin))


def char_bpe(
    pieces: Sequence[str], merges: kinds.Merges, lowercase: bool, origin: str, strip_accents: bool | None = None
) -> Tokenizer:
    """Character-level BPE: see `kinds.char_bpe`; `origin` names the vocabulary in error messages."""
    return Tokenizer(TokenizersBackend(kinds.char_bpe(pieces, merges, lowercase, strip_accents), origin))


def byte_bpe(
    vocab: Mapping[str, int], merges: kinds.Merges, lowercase: bool, *, prefix_space: bool, origin: str
) -> Tokenizer:
    """Byte-level BPE: see `kinds.byte_bpe`; `origin` names the vocabulary in error messages."""
    library = kinds.byte_bpe(vocab, merges, lowercase, prefix_space=prefix_space)
    return Tokenizer(TokenizersBackend(library, origin))


def with_cleaning(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer of the `tokenizers` library that cleans texts like those of corpora: see `cleaning.with_cleaning`."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    return Tokenizer(TokenizersBackend(cleaning.with_cleaning(library), "the vocabulary"))


def sentencepiece(content: bytes, origin: str) -> Tokenizer:
    """The content of a .model file (Kudo and Richardson 2018), run by the `sentencepiece` library.

    Raises:
      UserError: a special token is missing, or the content is not a SentencePiece model.
    """
    return Tokenizer(readers.from_sentencepiece(content, origin))
