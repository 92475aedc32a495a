"""Writes the tokenizer of a converted model and compares it with that of the source."""

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from etils import epath

from bert_jax.convert import tokenizer_files
from bert_jax.convert.parity import transformers_forward
from bert_jax.convert.parity.parity_report import TokenizerAgreement
from bert_jax.convert.parity.sample_texts import tokenizer_texts
from bert_jax.convert.source_model import SourceModel
from bert_jax.errors import UserError
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.hf_settings import CONFIG, COPY_AGAIN
from bert_jax.tokenizers.kinds import to_added_tokens
from bert_jax.tokenizers.readers import find_tokenizer_file, vocab_name_for_merges
from bert_jax.tokenizers.sentencepiece_backend import FORMAT
from bert_jax.tokenizers.tokenizer import Tokenizer

TOKENIZER_JSON = "tokenizer.json"
TRANSFORMERS_FILES = (TOKENIZER_JSON, "vocab.txt", "merges.txt", "spiece.model")
"""Vocabulary files that the classes of transformers read."""
Encode = Callable[[str], list[int]]


def write_native_tokenizer(source_model: SourceModel, directory: Path) -> None:
    """Copy the tokenizer's files, and write a tokenizer.json if they do not describe the tokenizer completely."""
    tokenizer = source_model.loaded_tokenizer
    if tokenizer is None:
        return
    copied = tokenizer_files.copy_tokenizer_files(source_model.tokenizer_path.parent, directory)
    # A setting that was assumed because no file gives it is written to tokenizer.json.
    if not copied or tokenizer.note or Tokenizer.load(directory).fingerprint != tokenizer.fingerprint:
        tokenizer.save(directory / TOKENIZER_JSON)


def write_hf_tokenizer(source_model: SourceModel, directory: Path) -> None:
    """Copy the tokenizer's files, add the files that transformers needs, and write out default settings.

    Raises:
      UserError: transformers has no class for this tokenizer in this family.
    """
    tokenizer = source_model.loaded_tokenizer
    if tokenizer is None:
        return
    tokenizer_files.copy_tokenizer_files(source_model.tokenizer_path.parent, directory)
    copied = directory / TOKENIZER_JSON
    if copied.exists() and FORMAT in copied.read_text()[:100]:
        copied.unlink()
    family, positions = source_model.model.family, source_model.model.config.max_positions
    tokenizer_files.write_tokenizer_files(tokenizer, directory, family, positions)
    stated = read_json_object(directory / CONFIG, COPY_AGAIN)
    if missing := _missing_settings(tokenizer, stated):
        (directory / CONFIG).write_text(json.dumps(stated | missing, indent=2) + "\n")


def _missing_settings(tokenizer: Tokenizer, stated: dict[str, Any]) -> dict[str, bool]:
    """Settings that no file gives, so that transformers would use its default."""
    return {name: value for name, value in tokenizer.settings.items() if name not in stated}


def written_tokenizer_agreement(
    source_model: SourceModel, directory: Path, for_transformers: bool
) -> TokenizerAgreement | None:
    """Compare the ids of the sample texts: source in a reference library, source in bert_jax, and written tokenizer.

    No side gets settings from another: each library reads the files of its directory, as its users do. Written files
    for transformers are read by transformers, which must also add [CLS] and [SEP], or, if it is not installed, by the
    `tokenizers` and `sentencepiece` libraries.

    Args:
      source_model: the source.
      directory: the converted model.
      for_transformers: whether transformers loads the directory; else bert_jax does.

    Returns:
      the number of texts with equal ids in all three; None: the source has no tokenizer.

    Raises:
      UserError: transformers cannot open a tokenizer.
    """
    tokenizer = source_model.loaded_tokenizer
    if tokenizer is None:
        return None
    source, source_library = _source_tokenizer(source_model, tokenizer)
    written, written_library = _written_tokenizer(directory, for_transformers)
    encoders = (_with_ends(source, tokenizer), _with_ends(tokenizer.encode, tokenizer), written)
    texts = tokenizer_texts(tokenizer)
    different = [text for text in texts if len({tuple(encode(text)) for encode in encoders}) > 1]
    first = next(iter(different), None)
    return TokenizerAgreement(len(texts) - len(different), len(texts), first, source_library, written_library)


def _source_tokenizer(source_model: SourceModel, tokenizer: Tokenizer) -> tuple[Encode, str]:
    """The source's tokenizer in another library than bert_jax if one can read it, and that library's name."""
    file = source_model.tokenizer_path
    if source_model.format in ("run", "bert-jax"):
        return tokenizer.encode, "bert_jax"
    paths = (file.parent / name for name in (CONFIG, "config.json"))
    stated, config = (read_json_object(path, COPY_AGAIN, missing_ok=True) for path in paths)
    named = config.get("model_type") or stated.get("tokenizer_class")
    # transformers would lower-case where no file gives the case; the note of the tokenizer names the assumed one.
    assumed = file.suffix == ".txt" and tokenizer.kind == "WordPiece" and "do_lower_case" not in stated
    if transformers_forward.available() and named and file.name in TRANSFORMERS_FILES and not assumed:
        opened = _with_transformers(Path(file.parent), "the source's tokenizer")
        return lambda text: opened.encode(text, add_special_tokens=False), transformers_forward.library_version()
    return _with_libraries(file, stated, tokenizer), f"tokenizers {tokenizers.__version__}"


def _written_tokenizer(directory: Path, for_transformers: bool) -> tuple[Encode, str]:
    """The tokenizer of a converted model, read as its users read it, with [CLS] and [SEP]; and the library's name."""
    tokenizer = Tokenizer.load(directory)
    if not for_transformers:
        return _with_ends(tokenizer.encode, tokenizer), "bert_jax"
    if transformers_forward.available():
        opened = _with_transformers(directory, "the written tokenizer")
        return lambda text: opened(text)["input_ids"], transformers_forward.library_version()
    stated = read_json_object(directory / CONFIG, COPY_AGAIN)
    encode = _with_libraries(find_tokenizer_file(epath.Path(directory)), stated, tokenizer)
    return _with_ends(encode, tokenizer), f"tokenizers {tokenizers.__version__}"


def _with_ends(encode: Encode, tokenizer: Tokenizer) -> Encode:
    """Also gives [CLS] and [SEP]."""
    return lambda text: [tokenizer.cls_id, *encode(text), tokenizer.sep_id]


def _with_libraries(file: StoredPath, stated: dict[str, Any], tokenizer: Tokenizer) -> Encode:
    """The source's tokenizer in the `tokenizers` or `sentencepiece` library."""
    settings = tokenizer.settings | {name: value for name, value in stated.items() if value is not None}
    if file.suffix == ".model":
        processor = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
        prepare = _albert_text if "albert" in json.loads(tokenizer.to_json()) else lambda text, settings: text
        return _around_added_tokens(tokenizer, lambda text: processor.encode(prepare(text, settings), out_type=int))
    if file.suffix == ".json":
        if FORMAT in file.read_text()[:100]:
            return tokenizer.encode
        library = tokenizers.Tokenizer.from_file(str(file))
        library.no_truncation()
        library.no_padding()
    elif file.suffix == ".txt" and tokenizer.kind == "WordPiece":
        library = tokenizers.BertWordPieceTokenizer(
            str(file),
            unk_token=tokenizer.id_to_token(tokenizer.unk_id),
            handle_chinese_chars=settings["tokenize_chinese_chars"],
            strip_accents=settings["strip_accents"],
            lowercase=settings["do_lower_case"],
        )
    else:
        vocabulary = str(file.parent / vocab_name_for_merges(file))
        library = tokenizers.ByteLevelBPETokenizer(vocabulary, str(file), add_prefix_space=settings["add_prefix_space"])
    library = tokenizers.Tokenizer.from_str(library.to_str())
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    missing = [token for token in tokenizer.added_tokens if token not in added]
    library.add_special_tokens(to_added_tokens(missing, tokenizer.kind == "WordPiece"))
    return lambda text: library.encode(text, add_special_tokens=False).ids


def _around_added_tokens(tokenizer: Tokenizer, encode: Encode) -> Encode:
    """Also gives the ids of added tokens, which the SentencePiece library does not match."""
    ids = {token: tokenizer.token_to_id(token) for token in tokenizer.added_tokens}
    split = re.compile(f"({'|'.join(map(re.escape, ids))})").split
    return lambda text: [i for part in split(text) for i in ([ids[part]] if part in ids else encode(part))]


def _albert_text(text: str, settings: dict[str, bool]) -> str:
    """preprocess_text of google-research/albert tokenization.py, with Python's Unicode tables."""
    if not settings["keep_accents"]:
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = text.replace("``", '"').replace("''", '"')
    return text.lower() if settings["do_lower_case"] else text


def _with_transformers(directory: Path, what: str) -> Any:
    """The tokenizer of a directory in transformers; `what` names it in messages.

    Raises:
      UserError: transformers cannot open it.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # damaged files raise errors of many types
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"transformers cannot load {what}: {reason}") from error
