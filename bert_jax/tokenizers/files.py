"""Vocabularies as other tools write them, read from disk."""

import tokenizers
from etils import epath
from tokenizers import models

from bert_jax.errors import UserError
from bert_jax.storage import parse_json, read_json_object
from bert_jax.tokenizers import hf_settings, kinds
from bert_jax.tokenizers.albert import Preparation
from bert_jax.tokenizers.hf_settings import CONFIG, COPY_AGAIN, Settings
from bert_jax.tokenizers.models import LibraryModel, Model

FORMS = "tokenizer.json, vocab.txt, merges.txt (with vocab.json beside it), or a SentencePiece .model"

_NAMES = ("tokenizer.json", "vocab.txt", "merges.txt", "vocab.bpe")
# A merges file ends like one of these, and the vocabulary beside it ends the other way.
_VOCABULARY_OF = {"merges.txt": "vocab.json", "vocab.bpe": "encoder.json"}


def read(path: epath.Path, lowercase: bool | None, add_special_tokens: bool) -> Model:
    """Reads a vocabulary; what the arguments mean and what is raised is said at `Tokenizer.load`."""
    path = _given(path)
    if path.name.endswith(tuple(_VOCABULARY_OF.values())):
        raise UserError(f"{path}: half a tokenizer; name the merges file that goes with it")
    form = path.suffix if path.suffix in (".model", ".json") else ".bpe" if vocabulary_name(path) else ".txt"
    settings = hf_settings.read(path, form)
    if form == ".model":
        model = from_sentencepiece(path.read_bytes(), str(path), add_special_tokens, settings.preparation())
    elif form == ".json":
        model = from_json(_text(path), str(path), add_special_tokens)
    elif form == ".bpe":
        prefix_space = bool(settings.switch("add_prefix_space"))
        model = _read_merges(_text(path), path, bool(lowercase), prefix_space, add_special_tokens)
    else:
        model = _read_wordpiece(path, lowercase, settings, add_special_tokens)
    if form in (".model", ".json") and lowercase not in (None, model.lowercase):
        raise UserError(f"{path}: it sets lowercase={model.lowercase} itself; do not ask for {lowercase}")
    settings.check(model, lowercase)
    return model


def from_json(text: str, origin: str, add_special_tokens: bool = False) -> Model:
    """Makes a model of the text of a tokenizer.json, or of what `SentencePieceModel.to_json` wrote.

    Raises:
      UserError: it is neither, or a special token is missing.
    """
    # Only a file of ours says so at its beginning; parsing all of it twice would take long.
    if '"bert_jax.' in text[:100]:
        from bert_jax.tokenizers.sentencepiece_backend import unwrap

        content, preparation = unwrap(parse_json(text, origin, COPY_AGAIN), origin)
        return from_sentencepiece(content, origin, add_special_tokens, preparation)
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise UserError(f"{origin}: not a tokenizer.json that can be read ({error})") from error
    return _library(library, origin, add_special_tokens)


def _library(library: tokenizers.Tokenizer, origin: str, add_special_tokens: bool) -> LibraryModel:
    if add_special_tokens:
        is_wordpiece = isinstance(library.model, models.WordPiece)
        missing = kinds.missing_roles(library.get_vocab(with_added_tokens=True), is_wordpiece)
        library.add_special_tokens(kinds.special_tokens(missing, is_wordpiece))
    return LibraryModel(library, origin)


def from_sentencepiece(
    content: bytes, origin: str, add_special_tokens: bool = False, preparation: Preparation | None = None
) -> Model:
    """Makes a model of the content of a SentencePiece .model file, texts prepared first; raises as `from_json`."""
    # Imported here: most have no such model, and it takes longer than the rest of the tokenizer.
    from bert_jax.tokenizers.sentencepiece_backend import SentencePieceModel, with_special_tokens

    content = with_special_tokens(content, origin) if add_special_tokens else content
    return SentencePieceModel(content, origin, preparation)


def find(directory: epath.Path) -> epath.Path | None:
    """The file of a directory that holds its tokenizer, if one does.

    Raises:
      UserError: several .model files might.
    """
    found = [directory / name for name in _NAMES if (directory / name).exists()]
    found = found or sorted(directory.glob("*.model"))
    if not found:
        return None
    if found[0].suffix == ".model" and len(found) > 1:
        raise UserError(f"{directory}: holds {len(found)} .model files; name the one to use")
    return found[0]


def _given(path: epath.Path) -> epath.Path:
    if not path.exists():
        raise UserError(f"{path}: no such tokenizer; give a {FORMS}, or train one")
    if not path.is_dir():
        return path
    found = find(path)
    if found is None:
        raise UserError(f"{path}: holds no tokenizer; it should have a {FORMS}")
    return found


def _text(path: epath.Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}, so not a vocabulary") from error


def _read_vocab(text: str, path: epath.Path) -> list[str]:
    # Not splitlines(): a piece may itself be a Unicode line separator.
    pieces = [line.removesuffix("\r") for line in text.split("\n")]
    while pieces and not pieces[-1]:
        pieces.pop()
    if not pieces or text.lstrip().startswith("{"):
        raise UserError(f"{path}: not a vocabulary with one piece per line")
    return pieces


def _read_wordpiece(path: epath.Path, lowercase: bool | None, settings: Settings, add_special_tokens: bool) -> Model:
    pieces, note = _read_vocab(_text(path), path), None
    lowercase = settings.switch("do_lower_case") if lowercase is None else lowercase
    if lowercase is None:
        lowercase = kinds.is_uncased(pieces)
        case, has = ("uncased", "no piece has") if lowercase else ("cased", "some pieces have")
        note = f"{path}: read as {case}, as {has} upper-case letters: no {CONFIG} beside it gives do_lower_case"
    added = kinds.missing_roles({piece: i for i, piece in enumerate(pieces)}, True) if add_special_tokens else []
    chinese = settings.switch("tokenize_chinese_chars")
    library = kinds.wordpiece(
        [*pieces, *added],
        lowercase,
        str(path),
        strip_accents=settings.switch("strip_accents"),
        split_chinese=True if chinese is None else chinese,
    )
    model = LibraryModel(library, str(path))
    model.note = note
    return model


def vocabulary_name(path: epath.Path) -> str | None:
    """What the vocabulary beside a merges file is called; None for a file that by its name holds no merges."""
    for ending, vocabulary in _VOCABULARY_OF.items():
        if path.name.endswith(ending):
            return path.name.removesuffix(ending) + vocabulary
    return None


def _read_merges(
    text: str, path: epath.Path, lowercase: bool, prefix_space: bool, add_special_tokens: bool
) -> LibraryModel:
    beside = path.parent / vocabulary_name(path)
    if not beside.exists():
        raise UserError(f"{path}: these merges need their vocabulary beside them, as {beside.name}")
    vocab = read_json_object(beside, COPY_AGAIN)
    if not all(isinstance(i, int) for i in vocab.values()):
        raise UserError(f"{beside}: not a vocabulary; it should be a JSON object of pieces and their ids")
    missing = [byte for byte in kinds.byte_alphabet() if byte not in vocab]
    if missing:
        raise UserError(
            f"{beside}: not byte-level BPE (it lacks the byte {missing[0]!r}), and merges do not say how their text is"
            " cut into words; give a tokenizer.json"
        )
    merges = _merges(text, path, vocab)
    library = kinds.byte_bpe(vocab, merges, lowercase, prefix_space=prefix_space)
    return _library(library, str(path), add_special_tokens)


def _merges(text: str, path: epath.Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(piece in vocab for piece in (*pair, "".join(pair))):
            raise UserError(f"{path}:{number}: not two pieces of its vocabulary that make a third")
        merges.append((pair[0], pair[1]))
    return merges
