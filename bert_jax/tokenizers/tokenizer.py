"""One face for subword vocabularies: text to ids and back, the five special ids, a fingerprint.

Needs no jax: the corpus pipeline uses it where none is installed.
"""

import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from etils import epath

from bert_jax.errors import UserError
from bert_jax.tokenizers import files, kinds
from bert_jax.tokenizers.kinds import CONTINUATION, SPECIAL_TOKENS
from bert_jax.tokenizers.models import LibraryModel, Model

__all__ = ["CONTINUATION", "SPECIAL_TOKENS", "Tokenizer", "bpe", "byte_bpe", "sentencepiece", "wordpiece"]


class Tokenizer:
    """Turns text into ids without adding [CLS] or [SEP], and ids into text.

    Make one with `Tokenizer.load`, or of pieces with `wordpiece`, `bpe`, `byte_bpe` or `sentencepiece`. It is
    immutable, may be shared by threads, and can be pickled.

    Text is data: whatever it says, no id but that of the unknown piece is a special one, unless special
    tokens are asked for.

    Attributes:
      kind: name of the kind of model, for messages.
      vocab_size: number of ids; every id is in [0, vocab_size).
      pad_id, unk_id, cls_id, sep_id, mask_id: the special ids.
      special_ids: those five, sorted.
      lowercase: whether text is lower-cased before it is cut into pieces.
      settings: what is done to text, under the names of transformers' tokenizer_config.json (do_lower_case,
        strip_accents, tokenize_chinese_chars; add_prefix_space; keep_accents), as far as these have one.
      note: one line about what `load` assumed; None: nothing.
    """

    def __init__(self, model: Model):
        """Wraps a model, which is not to be changed any more."""
        self._model = model
        self.kind: str = model.kind
        self.vocab_size: int = len(model.pieces)
        self.pad_id: int = model.roles["pad"]
        self.unk_id: int = model.roles["unk"]
        self.cls_id: int = model.roles["cls"]
        self.sep_id: int = model.roles["sep"]
        self.mask_id: int = model.roles["mask"]
        self.special_ids: tuple[int, ...] = tuple(sorted(model.roles.values()))
        self.lowercase: bool = model.lowercase
        self.settings: dict[str, bool] = dict(model.settings)
        self.note: str | None = model.note
        self._ids = {piece: i for i, piece in enumerate(model.pieces)}
        # Some models of other tools find "<mask>" in text as a piece like any other; then it is unknown.
        self._not_text = frozenset(self.special_ids) - {self.unk_id}
        self._as_text = np.arange(self.vocab_size, dtype=np.uint32)
        self._as_text[list(self._not_text)] = self.unk_id

    def __reduce__(self):
        return Tokenizer, (self._model,)

    @classmethod
    def load(
        cls, path: os.PathLike | str, lowercase: bool | None = None, add_special_tokens: bool = False
    ) -> "Tokenizer":
        """Reads a vocabulary in any of the usual forms.

        Args:
          path: a `tokenizer.json`, a BERT `vocab.txt`, a `merges.txt` of byte-level BPE with its `vocab.json`
            beside it (GPT-2's `vocab.bpe` and `encoder.json`; anything may stand in front of these names), a
            SentencePiece `.model`, or a directory that holds one, in this order. The settings in a
            tokenizer_config.json beside it are used (tokenizers/hf_settings.py). Where the files beside a .model say
            that it is an ALBERT's, texts are prepared as ALBERT does (tokenizers/albert.py).
          lowercase: for a vocab.txt, whether to lower-case, and to strip accents unless a tokenizer_config.json says
            otherwise; None takes its do_lower_case, or else decides from the vocabulary: one with upper-case letters
            outside its special tokens is cased, which `note` says. For merges, whether to lower-case. The others say
            so themselves.
          add_special_tokens: append those of the five special tokens that the vocabulary lacks, as new last ids.

        Raises:
          UserError: no such file, a file that is not a vocabulary, a missing special token, a `lowercase` that
            contradicts what the file says, or a setting beside it that cannot be used.
        """
        return cls(files.read(epath.Path(path), lowercase, add_special_tokens))

    @classmethod
    def from_json(cls, text: str, origin: str) -> "Tokenizer":
        """Makes one from the text of a tokenizer.json; `origin` says where it came from in messages.

        Raises:
          UserError: the text is not that of a tokenizer.json, or a special token is missing.
        """
        return cls(files.from_json(text, origin))

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Ids of one text. "[MASK]" and the like are plain text unless `specials` is set."""
        return self._model.encode_with_specials(text) if specials else self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, special tokens as plain text; may use several threads."""
        return [
            ids if self._not_text.isdisjoint(ids) else self._as_text[ids].tolist() for ids in self._model.encode(texts)
        ]

    def encode_flat(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of many texts, special tokens as plain text: those of `encode_batch`, faster where that is possible.

        Returns:
          ids of all texts one after the other, uint32 [num_tokens], and
          how many each of them has, int64 [num_sentences].
        """
        if self._fast is not None and sentences:
            return self._fast.encode(sentences)
        encoded = self._model.encode(sentences)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ids = np.fromiter(itertools.chain.from_iterable(encoded), np.uint32, int(lengths.sum()))
        return self._as_text[ids], lengths

    @functools.cached_property
    def _fast(self):
        """Compiled WordPiece, or None where the model is another."""
        if not isinstance(self._model, LibraryModel):
            return None
        # Imported here: numba takes longer to import than a short text to encode.
        from bert_jax.tokenizers.wordpiece import FastWordPiece

        return FastWordPiece.of(self._model.library)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; what lower-casing and unknown pieces lost stays lost."""
        return self._model.decode([int(i) for i in ids])

    def id_to_token(self, token_id: int) -> str:
        """The piece of an id; IndexError outside [0, vocab_size)."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside [0, {self.vocab_size})")
        return self._model.pieces[token_id]

    def token_to_id(self, token: str) -> int | None:
        """The id of a piece, or None where the vocabulary lacks it."""
        return self._ids.get(token)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over what decides ids, equal for a vocabulary and the tokenizer.json made of it."""
        return self._model.fingerprint()

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """bool [vocab_size]: the piece continues the word of the piece before it ("##ing").

        A piece continues a word if it has WordPiece's mark for that, or else if it has no mark for a space in front
        ("Ġ", "▁"). So punctuation is a word of its own where BERT's rules cut the text (WordPiece, `bpe`), and
        elsewhere belongs to the word that it follows without a space. Special tokens never continue a word. The first
        piece of a text begins one whatever this says: GPT-2's vocabulary does not mark it.

        Raises:
          UserError: the vocabulary marks no piece.
        """
        continues = self._model.continues_word()
        if continues is None:
            raise UserError(
                "this vocabulary does not say which pieces begin a word (none has ##, Ġ or ▁), so whole words cannot be"
                " masked; choose another vocabulary, or mask pieces"
            )
        continues[list(self.special_ids)] = False
        continues.setflags(write=False)
        return continues

    def to_json(self) -> str:
        """The text of a file that `load` reads; the `tokenizers` library reads it too, but for SentencePiece models."""
        return self._model.to_json()

    def save(self, path: os.PathLike | str) -> None:
        """Writes a tokenizer.json."""
        epath.Path(path).write_text(self.to_json())

    def save_vocab(self, path: os.PathLike | str) -> None:
        """Writes a vocab.txt, one piece per line in the order of ids; only WordPiece has that form.

        Raises:
          UserError: the model is not WordPiece.
        """
        if self.kind != "WordPiece":
            raise UserError(f"{path}: only a WordPiece vocabulary can be written as vocab.txt; this one is {self.kind}")
        epath.Path(path).write_text("".join(f"{piece}\n" for piece in self._model.pieces))


def wordpiece(pieces: Sequence[str], lowercase: bool | None, origin: str) -> Tokenizer:
    """BERT's tokenizer over the given pieces: clean, fold case and accents, split at punctuation, WordPiece.

    Words are cut greedily, longest match first (Devlin et al. 2019, google-research/bert
    tokenization.py), and a word longer than 100 characters becomes [UNK].

    Args:
      pieces: the vocabulary in the order of ids.
      lowercase: lower-case and strip accents; None decides from the vocabulary.
      origin: where the pieces came from, for error messages.

    Raises:
      UserError: a special token is missing, or a piece occurs twice.
    """
    return Tokenizer(LibraryModel(kinds.wordpiece(pieces, lowercase, origin), origin))


def bpe(pieces: Sequence[str], merges: kinds.Merges, lowercase: bool, origin: str) -> Tokenizer:
    """BPE (Sennrich et al. 2016) over the words that BERT's tokenizer sees, each with "▁" in front.

    Args:
      pieces: in the order of ids, with BERT's special tokens, "▁", and every piece of the merges.
      merges: pairs of pieces, in the order in which they are joined.
      lowercase: lower-case and strip accents.
      origin: where the pieces came from, for error messages.
    """
    return Tokenizer(LibraryModel(kinds.bpe(pieces, merges, lowercase), origin))


def byte_bpe(
    vocab: Mapping[str, int], merges: kinds.Merges, lowercase: bool, *, prefix_space: bool, origin: str
) -> Tokenizer:
    """Byte-level BPE as in GPT-2 (Radford et al. 2019) and RoBERTa: no text has unknown pieces.

    Args:
      vocab: ids of the pieces, with RoBERTa's special tokens.
      merges: pairs of pieces, in the order in which they are joined.
      lowercase: lower-case.
      prefix_space: read every text as if a space stood before it, so that its first word is spelled like others;
        GPT-2 does not.
      origin: where the pieces came from, for error messages.

    Raises:
      UserError: a special token is missing.
    """
    library = kinds.byte_bpe(vocab, merges, lowercase, prefix_space=prefix_space)
    return Tokenizer(LibraryModel(library, origin))


def sentencepiece(content: bytes, origin: str) -> Tokenizer:
    """A SentencePiece model (Kudo and Richardson 2018), run by its own library.

    Args:
      content: of a .model file.
      origin: where it came from, for error messages.

    Raises:
      UserError: a special token is missing, or the content is no such model.
    """
    return Tokenizer(files.from_sentencepiece(content, origin))
