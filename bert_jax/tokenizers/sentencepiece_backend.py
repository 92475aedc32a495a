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
from collections.abc import Sequence

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from bert_jax.errors import UserError
from bert_jax.tokenizers.kinds import WORD_START, AlbertPreprocessing, find_roles, missing_special_tokens
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
        self.roles = find_roles({piece: i for i, piece in enumerate(self.pieces)}, False, origin)
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
        self._no_text = [i for i, piece in enumerate(proto.pieces) if piece.type in no_text]

    def __reduce__(self):
        return SentencePieceBackend, (self.content, "a copy", self.preprocessing)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Uses one thread; corpus builds use one process per core."""
        preprocessed = list(map(self.preprocessing, texts)) if self.preprocessing else list(texts)
        return self._processor.encode(preprocessed, out_type=int, num_threads=1)

    def encode_recognizing_special_tokens(self, text: str) -> list[int]:
        """Spaces next to a special token are ignored, and the text after one begins a word."""
        names = {self.pieces[i]: i for i in self.roles.values()}
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
            ids += [names[part]] if part in names else self.encode([part])[0]
        return ids

    def offsets(self, text: str) -> list[tuple[int, int]]:
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
        """A word begins at each mark for a space; the first piece of a text begins one in any case."""
        begins = [piece.startswith(WORD_START) for piece in self.pieces]
        encoded = self.encode(texts)
        return [
            (ids, list(itertools.accumulate((begins[i] for i in ids[1:]), initial=0))[: len(ids)]) for ids in encoded
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


def add_special_tokens_to_model(content: bytes, origin: str) -> bytes:
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
