"""The interface of a `Tokenizer`'s backends, and the backend of the `tokenizers` library."""

import abc
import copy
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken

from bert_jax.errors import UserError
from bert_jax.tokenizers.kinds import BYTE_SPACE, CONTROL_TOKENS, WORD_START, find_role_ids, to_added_tokens

# Parts of a tokenizer.json that do not affect ids in bert_jax: the caller adds [CLS] and [SEP], texts are not
# truncated or padded, and `version` is that of the file format.
_NOT_IN_FINGERPRINT = ("version", "truncation", "padding", "post_processor", "decoder")


class TokenizerModel(abc.ABC):
    """Converts text to ids and back. Immutable.

    Attributes:
      pieces: the vocabulary in the order of ids.
      roles: ids of pad, unk, cls, sep and mask.
      lowercase: whether text is lower-cased.
      kind: its name in messages.
      settings: normalization settings, by their names in transformers' tokenizer_config.json, if they have one.
      added_tokens: tokens that are matched in text before it is split, special ones included, in the order of ids.
      note: one line about an assumption that reading the file needed; None: no assumption.
      sentencepiece_model: the content of a .model file that gives the same ids in the SentencePiece library, or None.
    """

    pieces: list[str]
    roles: dict[str, int]
    lowercase: bool
    kind: str
    settings: dict[str, bool]
    added_tokens: tuple[str, ...] = ()
    note: str | None = None
    sentencepiece_model: bytes | None = None

    @abc.abstractmethod
    def with_added_tokens(self, tokens: Sequence[AddedToken], origin: str) -> "TokenizerModel":
        """The model that also matches pieces of its vocabulary as added tokens, or with other flags.

        Raises:
          UserError: it cannot match one of them; `origin` names the vocabulary.
        """

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts in which added tokens are matched, control tokens included."""

    @abc.abstractmethod
    def encode_corpus(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts in which `kinds.CONTROL_TOKENS` are plain text, as far as the library supports it."""

    @abc.abstractmethod
    def offsets(self, text: str) -> list[tuple[int, int]]:
        """First character and last character + 1 of each id of `encode`; with or without the space before a word."""

    @abc.abstractmethod
    def corpus_offsets(self, text: str) -> list[tuple[int, int]]:
        """As `offsets`, of each id of `encode_corpus`."""

    @abc.abstractmethod
    def encode_with_word_ids(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Ids of `encode` and for each the index of its word, ascending from 0."""

    @abc.abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens included."""

    @abc.abstractmethod
    def continues_word(self) -> np.ndarray | None:
        """bool [vocab_size], without regard to the roles; None if the pieces do not mark words."""

    @abc.abstractmethod
    def to_json(self) -> str:
        """The complete model as JSON."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that affects ids."""


class TokenizersBackend(TokenizerModel):
    """The backend of the `tokenizers` library."""

    def __init__(self, library: tokenizers.Tokenizer, origin: str):
        """Take ownership of a tokenizer of the library, and disable truncation and padding.

        Args:
          library: must not be changed afterwards.
          origin: names the tokenizer in messages.

        Raises:
          UserError: one of the five special tokens is missing, or ids are not 0..vocab_size-1.
        """
        library.no_truncation()
        library.no_padding()
        self.library = library
        vocab = library.get_vocab(with_added_tokens=True)
        self.pieces = sorted(vocab, key=vocab.__getitem__)
        if [vocab[piece] for piece in self.pieces] != list(range(len(vocab))):
            raise UserError(f"{origin}: token ids are not 0..{len(vocab) - 1} without gaps or repeats")
        description = json.loads(library.to_str())
        self._is_wordpiece = description["model"]["type"] == "WordPiece"
        self.roles = find_role_ids(vocab, self._is_wordpiece, origin)
        # As the classes of transformers do, which add the special tokens that a file does not add.
        added = {token.content for token in library.get_added_tokens_decoder().values()}
        library.add_special_tokens(
            to_added_tokens(sorted({self.pieces[i] for i in self.roles.values()} - added), self._is_wordpiece)
        )
        self._continuation: str | None = description["model"].get("continuing_subword_prefix")
        self._byte_level = any(step["type"] == "ByteLevel" for step in _steps(description["pre_tokenizer"]))
        self.lowercase = any(
            step["type"] == "Lowercase" or bool(step.get("lowercase")) for step in _steps(description["normalizer"])
        )
        self.kind = "byte-level BPE" if self._byte_level else description["model"]["type"]
        self.settings = _settings(description, self.lowercase)
        self.added_tokens = tuple(token.content for _, token in sorted(library.get_added_tokens_decoder().items()))

    def __reduce__(self):
        return TokenizersBackend, (self.library, "a copy")

    def with_added_tokens(self, tokens: Sequence[AddedToken], origin: str) -> "TokenizersBackend":
        """Itself, if it has them with these flags."""
        known = set(map(repr, self.library.get_added_tokens_decoder().values()))
        if known.issuperset(map(repr, tokens)):
            return self
        library = copy.deepcopy(self.library)
        library.add_tokens(tokens)
        model = TokenizersBackend(library, origin)
        model.note = self.note
        return model

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Uses the library's threads."""
        return [encoding.ids for encoding in self.library.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_corpus(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, by the `corpus_library`."""
        return [encoding.ids for encoding in self.corpus_library.encode_batch_fast(texts, add_special_tokens=False)]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """By the library, in the text before normalization.

        Without its post-processor: RoBERTa's takes a letter for each "Ġ" that does not come from a space of the text.
        """
        return self._without_post_processor.encode(text, add_special_tokens=False).offsets

    def corpus_offsets(self, text: str) -> list[tuple[int, int]]:
        """As `offsets`, by the `corpus_library`."""
        return self.corpus_library.encode(text, add_special_tokens=False).offsets

    def encode_with_word_ids(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Words are those of the library's pre-tokenizer; without one, a text is one word."""
        encodings = self.library.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.word_ids) for encoding in encodings]

    @functools.cached_property
    def _without_post_processor(self) -> tokenizers.Tokenizer:
        description = json.loads(self.library.to_str()) | {"post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(description))

    @functools.cached_property
    def corpus_library(self) -> tokenizers.Tokenizer:
        """The library's tokenizer that does not match control tokens: a document with "[MASK]" gets no mask id."""
        description = json.loads(self.library.to_str())
        for token in description["added_tokens"]:
            token["special"] = token["content"] in CONTROL_TOKENS
        library = tokenizers.Tokenizer.from_str(json.dumps(description))
        library.encode_special_tokens = True  # does not match special tokens
        return library

    def decode(self, ids: list[int]) -> str:
        """Text by the library's decoder."""
        return self.library.decode(ids, skip_special_tokens=False)

    def continues_word(self) -> np.ndarray | None:
        """By the prefix of continuations; without one, by the mark for a space before a word."""
        if self._continuation:
            continues = np.array([piece.startswith(self._continuation) for piece in self.pieces])
        else:
            mark = BYTE_SPACE if self._byte_level else WORD_START
            continues = np.array([not piece.startswith(mark) for piece in self.pieces])
            if continues.all():
                return None
        continues[[i for i, token in self.library.get_added_tokens_decoder().items() if token.special]] = False
        return continues

    def to_json(self) -> str:
        """The text of a tokenizer.json."""
        return self.library.to_str(pretty=True) + "\n"

    def fingerprint(self) -> str:
        """Equal for a vocab.txt and the tokenizer.json that was made from it."""
        description = json.loads(self.library.to_str())
        for key in _NOT_IN_FINGERPRINT:
            description.pop(key, None)
        canonical = json.dumps(description, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _settings(description: dict, lowercase: bool) -> dict[str, bool]:
    """Settings of transformers' classes for WordPiece, byte-level BPE and Unigram, from a tokenizer.json."""
    normalizers = {step["type"]: step for step in _steps(description["normalizer"])}
    splits = {step["type"]: step for step in _steps(description["pre_tokenizer"])}
    model, bert = description["model"]["type"], normalizers.get("BertNormalizer")
    if model == "WordPiece" and bert is not None:
        strips = bert["strip_accents"]
        return {
            "do_lower_case": lowercase,
            "strip_accents": lowercase if strips is None else strips,
            "tokenize_chinese_chars": bert["handle_chinese_chars"],
        }
    if "ByteLevel" in splits:
        return {"add_prefix_space": splits["ByteLevel"]["add_prefix_space"]}
    return {"do_lower_case": lowercase, "keep_accents": "StripAccents" not in normalizers} if model == "Unigram" else {}


def _steps(part: dict | None) -> Iterator[dict]:
    """The steps of a normalizer or pre-tokenizer."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part.get("normalizers") or part.get("pretokenizers") or []:
            yield from _steps(step)
    else:
        yield part
