"""Reads vocabularies in the file formats of other tools."""

from collections.abc import Callable

import tokenizers
from etils import epath
from tokenizers import models

from bert_jax.errors import UserError
from bert_jax.storage.json_files import parse_json, read_json_object
from bert_jax.storage.listing import matching_entries
from bert_jax.tokenizers import hf_settings, kinds
from bert_jax.tokenizers.hf_settings import CONFIG, COPY_AGAIN, Settings
from bert_jax.tokenizers.kinds import AlbertPreprocessing
from bert_jax.tokenizers.models import TokenizerModel, TokenizersBackend

SUPPORTED_FILES = "tokenizer.json, vocab.txt, merges.txt (with vocab.json), or a SentencePiece .model"

_FILE_NAMES = ("tokenizer.json", "vocab.txt", "merges.txt", "vocab.bpe")
# Of Unicode (property White_Space). str.rstrip() also removes U+001C to U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
# Suffix of a merges file -> suffix of its vocabulary.
_VOCABULARY_OF = {"merges.txt": "vocab.json", "vocab.bpe": "encoder.json"}


def read(path: epath.Path, lowercase: bool | None, add_missing_special_tokens: bool) -> TokenizerModel:
    """Read a vocabulary; arguments and errors are those of `Tokenizer.load`."""
    path = _resolve(path)
    if path.name.endswith(tuple(_VOCABULARY_OF.values())):
        raise UserError(f"{path}: this vocabulary needs merges; name the merges file instead")
    file_type = path.suffix if path.suffix in (".model", ".json") else ".bpe" if vocab_name_for_merges(path) else ".txt"
    settings = hf_settings.read(path, file_type)
    model = READERS[file_type](path, lowercase, settings, add_missing_special_tokens)
    if lowercase not in (None, model.lowercase):
        raise UserError(f"{path}: it sets lowercase={model.lowercase}; lowercase={lowercase} contradicts it")
    settings.check_against(model, lowercase)
    model = model.with_added_tokens(settings.added_tokens(model.added_tokens), str(path))
    model.note = "; ".join(note for note in (model.note, settings.note) if note) or None
    return model


def from_json(text: str, origin: str, add_missing_special_tokens: bool = False) -> TokenizerModel:
    """Build a model from the text of a tokenizer.json, or of `SentencePieceBackend.to_json`.

    Raises:
      UserError: the text is neither, or a special token is missing.
    """
    # Only files of SentencePieceBackend have this at the beginning; this avoids parsing the JSON twice.
    if '"bert_jax.' in text[:100]:
        from bert_jax.tokenizers.sentencepiece_backend import model_bytes_from_json

        content, preprocessing = model_bytes_from_json(parse_json(text, origin, COPY_AGAIN), origin)
        return from_sentencepiece(content, origin, add_missing_special_tokens, preprocessing)
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{origin}: not a readable tokenizer.json ({error})") from error
    return _from_library(library, origin, add_missing_special_tokens)


def _from_library(library: tokenizers.Tokenizer, origin: str, add_missing_special_tokens: bool) -> TokenizersBackend:
    if add_missing_special_tokens:
        is_wordpiece = isinstance(library.model, models.WordPiece)
        missing = kinds.missing_special_tokens(library.get_vocab(with_added_tokens=True), is_wordpiece)
        library.add_special_tokens(kinds.to_added_tokens(missing, is_wordpiece))
    return TokenizersBackend(library, origin)


def from_sentencepiece(
    content: bytes,
    origin: str,
    add_missing_special_tokens: bool = False,
    preprocessing: AlbertPreprocessing | None = None,
) -> TokenizerModel:
    """Build a model from a SentencePiece .model file, with optional preprocessing; raises as `from_json`."""
    # Imported here because the import is slow and most tokenizers do not need it.
    from bert_jax.tokenizers.sentencepiece_backend import SentencePieceBackend, add_missing_special_tokens_to_model

    content = add_missing_special_tokens_to_model(content, origin) if add_missing_special_tokens else content
    return SentencePieceBackend(content, origin, preprocessing)


def find_tokenizer_file(directory: epath.Path) -> epath.Path | None:
    """The tokenizer file of a directory, or None.

    Raises:
      UserError: the directory has several .model files and no other tokenizer file.
    """
    candidates = [directory / name for name in _FILE_NAMES if (directory / name).exists()]
    candidates = candidates or matching_entries(directory, "*.model")
    if not candidates:
        return None
    if candidates[0].suffix == ".model" and len(candidates) > 1:
        raise UserError(f"{directory}: has {len(candidates)} .model files; name the one to use")
    return candidates[0]


def _resolve(path: epath.Path) -> epath.Path:
    if not path.exists():
        raise UserError(f"{path}: no such tokenizer; give a {SUPPORTED_FILES}, or train one")
    if not path.is_dir():
        return path
    file = find_tokenizer_file(path)
    if file is None:
        raise UserError(f"{path}: has no tokenizer; it should have a {SUPPORTED_FILES}")
    return file


def _text(path: epath.Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}, so not a vocabulary") from error


def _read_vocab(text: str, path: epath.Path) -> list[str]:
    """The pieces of a vocab.txt in the order of ids, which are those of transformers.

    As in the `tokenizers` library, spaces at the end of a line do not count, and of equal lines, blank ones included,
    only the last is a piece. The others keep their ids: each gets a name that no text gives, because words do not
    contain brackets. A byte order mark is skipped, so that the first line is its piece.
    """
    # Not splitlines(): a piece may contain a Unicode line separator.
    pieces = [line.rstrip(_WHITE_SPACE) for line in text.removeprefix("\ufeff").split("\n")]
    while pieces and not pieces[-1]:
        pieces.pop()
    if not pieces or text.lstrip().startswith("{"):
        raise UserError(f"{path}: not a vocabulary with one piece per line")
    last = {piece: i for i, piece in enumerate(pieces)}
    return [piece if last[piece] == i else f"[line {i + 1}]" for i, piece in enumerate(pieces)]


def _read_wordpiece(
    path: epath.Path, lowercase: bool | None, settings: Settings, add_missing_special_tokens: bool
) -> TokenizerModel:
    pieces, note = _read_vocab(_text(path), path), None
    lowercase = settings.switch("do_lower_case") if lowercase is None else lowercase
    if lowercase is None:
        lowercase = kinds.is_uncased_vocab(pieces)
        case, has = ("uncased", "no piece has") if lowercase else ("cased", "some pieces have")
        note = f"{path}: read as {case}, because {has} upper-case letters and no {CONFIG} gives do_lower_case"
    added = (
        kinds.missing_special_tokens({piece: i for i, piece in enumerate(pieces)}, True)
        if add_missing_special_tokens
        else []
    )
    chinese = settings.switch("tokenize_chinese_chars")
    library = kinds.wordpiece(
        [*pieces, *added],
        lowercase,
        str(path),
        strip_accents=settings.switch("strip_accents"),
        split_chinese=True if chinese is None else chinese,
    )
    model = TokenizersBackend(library, str(path))
    model.note = note
    return model


def vocab_name_for_merges(path: epath.Path) -> str | None:
    """Name of the vocabulary that belongs to a merges file; None if the file's name is not that of a merges file."""
    for ending, vocabulary in _VOCABULARY_OF.items():
        if path.name.endswith(ending):
            return path.name.removesuffix(ending) + vocabulary
    return None


def _read_merges(
    path: epath.Path, lowercase: bool | None, settings: Settings, add_missing_special_tokens: bool
) -> TokenizerModel:
    vocabulary_path = path.parent / vocab_name_for_merges(path)
    if not vocabulary_path.exists():
        raise UserError(f"{path}: these merges need their vocabulary {vocabulary_path.name} in the same directory")
    vocab = read_json_object(vocabulary_path, COPY_AGAIN)
    if not all(isinstance(i, int) for i in vocab.values()):
        raise UserError(f"{vocabulary_path}: not a vocabulary; it should be a JSON object of pieces and their ids")
    missing = [byte for byte in kinds.byte_alphabet() if byte not in vocab]
    if missing:
        raise UserError(
            f"{vocabulary_path}: not byte-level BPE (it lacks the byte {missing[0]!r}), and merges files do not "
            "define how text is split into words; give a tokenizer.json"
        )
    prefix_space = bool(settings.switch("add_prefix_space"))
    library = kinds.byte_bpe(vocab, _merges(_text(path), path, vocab), bool(lowercase), prefix_space=prefix_space)
    if "<mask>" in vocab:  # RobertaTokenizer of transformers 5 does not include the space before it, unlike 4
        library.add_special_tokens(["<mask>"])
    return _from_library(library, str(path), add_missing_special_tokens)


def _merges(text: str, path: epath.Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(piece in vocab for piece in (*pair, "".join(pair))):
            raise UserError(f"{path}:{number}: not two pieces of its vocabulary that join to a third")
        merges.append((pair[0], pair[1]))
    return merges


READERS: dict[str, Callable[[epath.Path, bool | None, Settings, bool], TokenizerModel]] = {
    ".json": lambda path, lowercase, settings, add: from_json(_text(path), str(path), add),
    ".txt": _read_wordpiece,
    ".bpe": _read_merges,
    ".model": lambda path, lowercase, settings, add: from_sentencepiece(
        path.read_bytes(), str(path), add, settings.preprocessing()
    ),
}
"""By file type (`hf_settings.FILE_TYPES`): a function of the path, `lowercase` and `add_missing_special_tokens` of
`Tokenizer.load`, and the settings in the file's directory."""
