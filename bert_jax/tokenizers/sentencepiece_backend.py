"""The backend of the `sentencepiece` library.

Converted to the `tokenizers` library, its models gave other ids for 3 of the 35,870 lines of the Universal
Declaration of Human Rights in 388 languages, unigram and BPE alike (because of combining marks), and took two to four
times as long.
"""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken

from bert_jax.errors import UserError
from bert_jax.tokenizers.kinds import (
    CONTROL_TOKENS,
    WORD_START,
    AlbertPreprocessing,
    find_role_ids,
    missing_special_tokens,
)
from bert_jax.tokenizers.models import TokenizerModel

FORMAT = "bert_jax.sentencepiece"
"""Value of `format` in a JSON file that contains a SentencePiece model."""

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece
_Trainer = sentencepiece_model_pb2.TrainerSpec


class SentencePieceBackend(TokenizerModel):
    """The backend of the `sentencepiece` library."""

    def __init__(self, content: bytes, origin: str, preprocessing: AlbertPreprocessing | None = None):
        """Parse the content of a .model file.

        Args:
          content: of the file.
          origin: names the file in messages.
          preprocessing: applied to every text first; only ALBERT has one.

        Raises:
          UserError: not a .model file, one of the five special tokens is missing, or the model marks the end of words
            and not their beginning.
        """
        proto = _parse(content, origin)
        self.pieces = [piece.piece for piece in proto.pieces]
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.roles = find_role_ids(self._ids, False, origin)
        trainer = proto.trainer_spec
        if trainer.treat_whitespace_as_suffix:
            raise UserError(f"{origin}: marks words at their end; only models that mark their beginning can be used")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise UserError(f"{origin}: the SentencePiece library rejects this model ({error})") from error
        self.content, self.preprocessing = content, preprocessing
        self.sentencepiece_model = None if preprocessing else content
        self.lowercase = proto.normalizer_spec.name.endswith("_cf") or bool(preprocessing and preprocessing.lowercase)
        # Normalization inside the .model file needs no setting.
        applied = preprocessing or AlbertPreprocessing(False, True)
        self.settings = {"do_lower_case": applied.lowercase, "keep_accents": applied.keep_accents}
        self.kind = f"SentencePiece {_Trainer.ModelType.Name(trainer.model_type).lower()}"
        no_text = (_Piece.CONTROL, _Piece.UNKNOWN, _Piece.UNUSED)
        matched = [i for i, piece in enumerate(proto.pieces) if piece.type in (_Piece.CONTROL, _Piece.USER_DEFINED)]
        self.added_tokens = tuple(self.pieces[i] for i in sorted({*matched, *self.roles.values()}))
        self._added = _any_of(self.added_tokens)
        self._added_in_corpus = _any_of(set(self.added_tokens) - CONTROL_TOKENS)
        self._no_text = [i for i, piece in enumerate(proto.pieces) if piece.type in no_text]

    def __reduce__(self):
        return SentencePieceBackend, (self.content, "a copy", self.preprocessing)

    def with_added_tokens(self, tokens: Sequence[AddedToken], origin: str) -> "SentencePieceBackend":
        """Itself; the file defines the tokens that it matches."""
        for token in tokens:
            if token.content not in self.added_tokens:
                raise UserError(
                    f"{origin}: the files beside it add the token '{token.content}', which it does not match in text: "
                    "give a tokenizer.json, which save_pretrained of transformers writes"
                )
        return self

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Added tokens are matched as by AlbertTokenizer of transformers: a word begins after each."""
        return self._encode_around(self._added, texts)

    def encode_corpus(self, texts: Sequence[str]) -> list[list[int]]:
        """Uses one thread; corpus builds use one process per core."""
        return self._encode_around(self._added_in_corpus, texts)

    def _encode_around(self, added: re.Pattern, texts: Sequence[str]) -> list[list[int]]:
        split = [added.split(text) for text in texts]  # a token is every second part
        others = [part for parts in split for part in parts[::2]]
        if self.preprocessing:
            others = list(map(self.preprocessing, others))
        encoded = iter(self._processor.encode(others, out_type=int, num_threads=1))
        ids_of = ([[self._ids[part]] if n % 2 else next(encoded) for n, part in enumerate(parts)] for parts in split)
        return [list(itertools.chain.from_iterable(ids)) for ids in ids_of]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Those of each added token, and those of the parts between them."""
        return self._offsets_around(self._added, text)

    def corpus_offsets(self, text: str) -> list[tuple[int, int]]:
        """As `offsets`, without the control tokens."""
        return self._offsets_around(self._added_in_corpus, text)

    def _offsets_around(self, added: re.Pattern, text: str) -> list[tuple[int, int]]:
        found, start = [], 0
        for n, part in enumerate(added.split(text)):
            inner = [(0, len(part))] if n % 2 else self._offsets_between(part)
            found += [(start + first, start + last) for first, last in inner]
            start += len(part)
        return found

    def _offsets_between(self, text: str) -> list[tuple[int, int]]:
        """By the library; through ALBERT's preprocessing, which works on single characters and pairs of quotes."""
        parts = re.findall("``|''|.", text, re.DOTALL) if self.preprocessing else list(text)
        changed = [self.preprocessing(part) if self.preprocessing else part for part in parts]
        ends = list(itertools.accumulate(map(len, parts)))
        # Of each character after preprocessing, the part of the text that it comes from.
        origin = [part for part, new in enumerate(changed) for _ in new]
        # Of a str, offset_mapping counts characters; proto counts bytes of UTF-8.
        mapped = self._processor.encode("".join(changed), out_type="offset_mapping")["offsets"]
        spans = (origin[first:last] or origin[first - 1 : first] for first, last in mapped)
        return [(ends[span[0]] - len(parts[span[0]]), ends[span[-1]]) if span else (0, 0) for span in spans]

    def encode_with_word_ids(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """A word begins at each mark for a space, at an added token and after it, and at the first piece of a text.

        The unknown token is a piece of its word.
        """
        begins = np.array([piece.startswith(WORD_START) for piece in self.pieces])
        added = np.isin(np.arange(len(begins)), [self._ids[token] for token in self.added_tokens])
        added[self.roles["unk"]] = False
        begins |= added
        encoded = self.encode(texts)
        return [
            (ids, np.cumsum(np.r_[False, begins[ids[1:]] | added[ids[:-1]]]).tolist() if ids else []) for ids in encoded
        ]

    def decode(self, ids: list[int]) -> str:
        """Special tokens, which the library omits, are separated by spaces."""
        special = set(self.roles.values())
        texts: list[str] = []
        for is_special, group in itertools.groupby(ids, special.__contains__):
            run = list(group)
            texts += [self.pieces[i] for i in run] if is_special else [self._processor.decode(run)]
        return " ".join(texts)

    def continues_word(self) -> np.ndarray | None:
        """By the mark for a space before a word."""
        continues = np.array([not piece.startswith(WORD_START) for piece in self.pieces])
        continues[self._no_text] = False
        return continues

    def to_json(self) -> str:
        """The .model file in base64, so that it can be stored as a tokenizer.json."""
        wrapped = {"format": FORMAT, "model": base64.b64encode(self.content).decode()}
        if self.preprocessing:
            wrapped["albert"] = self.preprocessing._asdict()
        return json.dumps(wrapped, indent=2) + "\n"

    def fingerprint(self) -> str:
        """Hash of the whole .model file and of the preprocessing."""
        front = json.dumps(self.preprocessing).encode() if self.preprocessing else b""
        return hashlib.sha256(self.content + front).hexdigest()


def _any_of(tokens: Iterable[str]) -> re.Pattern:
    """A group that matches the longest token; of no tokens one that never matches."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})")


def model_bytes_from_json(wrapped: dict, origin: str) -> tuple[bytes, AlbertPreprocessing | None]:
    """The model and the preprocessing from the JSON object of `SentencePieceBackend.to_json`.

    Raises:
      UserError: the object is damaged.
    """
    try:
        front = wrapped.get("albert")
        return base64.b64decode(wrapped["model"], validate=True), AlbertPreprocessing(**front) if front else None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: the SentencePiece model in it is damaged; make the file again") from error


def add_missing_special_tokens_to_model(content: bytes, origin: str) -> bytes:
    """Append the special tokens that a model lacks.

    Raises:
      UserError: `content` is not a SentencePiece model.
    """
    proto = _parse(content, origin)
    for name in missing_special_tokens({piece.piece: i for i, piece in enumerate(proto.pieces)}, False):
        proto.pieces.add(piece=name, score=0.0, type=_Piece.CONTROL)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True)


def _parse(content: bytes, origin: str) -> sentencepiece_model_pb2.ModelProto:
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise UserError(f"{origin}: not a SentencePiece model, or a damaged one") from error
    if not proto.pieces:
        raise UserError(f"{origin}: not a SentencePiece model: it has no pieces")
    return proto
