"""One face for subword vocabularies: text to ids and back, the five special ids, a fingerprint.

Needs no jax: the corpus pipeline uses it where none is installed.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from etils import epath
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import UserError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"

# transformers' BERT tokenizers give up on longer words; google-research/bert did so at 200. An
# exported model must meet the same ids in other people's tools, so theirs is the limit here.
MAX_CHARS_PER_WORD = 100

# What each role is called, the BERT name first; the others are RoBERTa's and SentencePiece's habits.
_ROLE_NAMES = {
    "pad": (PAD, "<pad>"),
    "unk": (UNK, "<unk>"),
    "cls": (CLS, "<s>"),
    "sep": (SEP, "</s>"),
    "mask": (MASK, "<mask>"),
}
_WORD_START_MARKS = ("Ġ", "▁")

# Parts of a tokenizer.json that do not decide which ids a text gets here: [CLS] and [SEP] are added
# by the caller, texts are never cut or padded, and `version` names the file format.
_NOT_IN_FINGERPRINT = ("version", "truncation", "padding", "post_processor", "decoder")


class Tokenizer:
    """Turns text into ids without adding [CLS] or [SEP], and ids into text.

    Make one with `Tokenizer.load` or `wordpiece`. It is immutable, may be shared by threads, and can
    be pickled.

    Attributes:
      vocab_size: number of ids; every id is in [0, vocab_size).
      pad_id, unk_id, cls_id, sep_id, mask_id: the special ids.
      special_ids: those five, sorted.
      lowercase: whether text is lower-cased before it is cut into pieces.
    """

    def __init__(self, backend: tokenizers.Tokenizer, origin: str):
        """Wraps a `tokenizers` model.

        Args:
          backend: the model; its truncation and padding are switched off.
          origin: where it came from, for error messages.

        Raises:
          UserError: one of the five special tokens is missing, or ids are not 0..vocab_size-1.
        """
        backend.no_truncation()
        backend.no_padding()
        # Text is data: a document that talks about "[MASK]" must not contain the mask id.
        backend.encode_special_tokens = True
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = len(vocab)
        if set(vocab.values()) != set(range(self.vocab_size)):
            raise UserError(f"{origin}: token ids are not 0..{self.vocab_size - 1} without gaps or repeats")
        ids = {}
        for role, names in _ROLE_NAMES.items():
            ids[role] = next((vocab[name] for name in names if name in vocab), None)
            if ids[role] is None:
                raise UserError(f"{origin}: the vocabulary has no {names[0]} token; add it and load again")
        self.pad_id: int = ids["pad"]
        self.unk_id: int = ids["unk"]
        self.cls_id: int = ids["cls"]
        self.sep_id: int = ids["sep"]
        self.mask_id: int = ids["mask"]
        self.special_ids: tuple[int, ...] = tuple(sorted(ids.values()))
        self.lowercase: bool = _lowercases(json.loads(backend.to_str())["normalizer"])

    @classmethod
    def load(cls, path: os.PathLike | str, lowercase: bool | None = None) -> "Tokenizer":
        """Reads a `tokenizer.json`, a BERT `vocab.txt`, or a directory that holds one (the former first).

        Args:
          path: file or directory.
          lowercase: for a vocab.txt, whether to lower-case and strip accents; None decides from the
            vocabulary: one with upper-case letters outside its special tokens is cased. A
            tokenizer.json says so itself.

        Raises:
          UserError: no such file, a file that is not a vocabulary, a missing special token, or a
            `lowercase` that contradicts the tokenizer.json.
        """
        path = _find(epath.Path(path))
        try:
            text = path.read_text()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}, so not a vocabulary") from error
        if path.suffix != ".json":
            return wordpiece(_read_vocab(text, path), lowercase=lowercase, origin=str(path))
        loaded = cls.from_json(text, str(path))
        if lowercase is not None and lowercase != loaded.lowercase:
            raise UserError(f"{path}: it sets lowercase={loaded.lowercase} itself; do not ask for {lowercase}")
        return loaded

    @classmethod
    def from_json(cls, text: str, origin: str) -> "Tokenizer":
        """Makes one from the text of a tokenizer.json; `origin` says where it came from in messages.

        Raises:
          UserError: the text is not that of a tokenizer.json, or a special token is missing.
        """
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise UserError(f"{origin}: not a tokenizer.json that can be read ({error})") from error
        return cls(backend, origin)

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = False
        return backend

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Ids of one text. "[MASK]" and the like are plain text unless `specials` is set."""
        backend = self._with_specials if specials else self._backend
        return backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, special tokens as plain text; uses the library's threads."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; what lower-casing and unknown pieces lost stays lost."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def id_to_token(self, token_id: int) -> str:
        """The piece of an id; IndexError outside [0, vocab_size)."""
        token = self._backend.id_to_token(int(token_id)) if token_id >= 0 else None
        if token is None:
            raise IndexError(f"token id {token_id} is outside [0, {self.vocab_size})")
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a piece, or None where the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over what decides ids, equal for a vocab.txt and the tokenizer.json made of it."""
        description = json.loads(self._backend.to_str())
        for key in _NOT_IN_FINGERPRINT:
            description.pop(key, None)
        canonical = json.dumps(description, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """bool [vocab_size]: the piece continues the word of the piece before it ("##ing")."""
        tokens = [self.id_to_token(i) for i in range(self.vocab_size)]
        if isinstance(self._backend.model, models.WordPiece):
            prefix = self._backend.model.continuing_subword_prefix
            mask = np.array([token.startswith(prefix) for token in tokens])
        else:
            mask = np.array([not token.startswith(_WORD_START_MARKS) for token in tokens])
        mask[list(self.special_ids)] = False
        mask.setflags(write=False)
        return mask

    def to_json(self) -> str:
        """The text of a tokenizer.json that `load` and the `tokenizers` library read."""
        return self._backend.to_str(pretty=True) + "\n"

    def save(self, path: os.PathLike | str) -> None:
        """Writes a tokenizer.json."""
        epath.Path(path).write_text(self.to_json())

    def save_vocab(self, path: os.PathLike | str) -> None:
        """Writes a vocab.txt, one piece per line in the order of ids; only WordPiece has that form.

        Raises:
          UserError: the model is not WordPiece.
        """
        if not isinstance(self._backend.model, models.WordPiece):
            raise UserError(f"{path}: only a WordPiece vocabulary can be written as vocab.txt; save a tokenizer.json")
        lines = "".join(f"{self.id_to_token(i)}\n" for i in range(self.vocab_size))
        epath.Path(path).write_text(lines)


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
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        twice = next(piece for i, piece in enumerate(pieces) if vocab[piece] != i)
        raise UserError(f"{origin}: the piece {twice!r} occurs twice; ids would not be one to one")
    if lowercase is None:
        lowercase = not any(piece != piece.lower() for piece in vocab if not piece.startswith("["))
    backend = tokenizers.Tokenizer(
        models.WordPiece(
            vocab,
            unk_token=UNK,
            max_input_chars_per_word=MAX_CHARS_PER_WORD,
            continuing_subword_prefix=CONTINUATION,
        )
    )
    backend.normalizer = bert_normalizer(lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=True)
    backend.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocab])
    if CLS in vocab and SEP in vocab:
        # Not used here; whoever loads the exported file with add_special_tokens expects it.
        backend.post_processor = processors.BertProcessing((SEP, vocab[SEP]), (CLS, vocab[CLS]))
    return Tokenizer(backend, origin)


def bert_normalizer(lowercase: bool) -> normalizers.Normalizer:
    """BERT's text clean-up: control characters dropped, CJK characters spaced, case and accents folded."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )


def _find(path: epath.Path) -> epath.Path:
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path}: no such tokenizer; give a tokenizer.json or vocab.txt, or train one")
        return path
    for name in ("tokenizer.json", "vocab.txt"):
        if (path / name).exists():
            return path / name
    raise UserError(f"{path}: holds neither tokenizer.json nor vocab.txt")


def _read_vocab(text: str, path: epath.Path) -> list[str]:
    # Not splitlines(): a piece may itself be a Unicode line separator.
    pieces = [line.removesuffix("\r") for line in text.split("\n")]
    while pieces and not pieces[-1]:
        pieces.pop()
    if not pieces or text.lstrip().startswith("{"):
        raise UserError(f"{path}: not a vocabulary with one piece per line")
    return pieces


def _lowercases(normalizer: dict | None) -> bool:
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(_lowercases(part) for part in normalizer["normalizers"])
    return normalizer["type"] == "Lowercase" or bool(normalizer.get("lowercase"))
