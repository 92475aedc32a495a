"""Writes the tokenizer of a converted model and compares it with that of the source."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from bert_jax.convert import tokenizer_files
from bert_jax.convert.parity import transformers_forward
from bert_jax.convert.parity.parity_report import TokenizerAgreement
from bert_jax.convert.parity.sample_texts import TEXTS
from bert_jax.convert.source_model import SourceModel
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, read_json_object
from bert_jax.tokenizers.files import vocab_name_for_merges
from bert_jax.tokenizers.hf_settings import CONFIG, COPY_AGAIN
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


def compare_written_tokenizer(
    source_model: SourceModel, directory: Path, for_transformers: bool
) -> TokenizerAgreement | None:
    """Compare the ids of the sample texts: source in a reference library, source in bert_jax, and written tokenizer.

    Args:
      source_model: the source.
      directory: the converted model.
      for_transformers: load the written tokenizer with transformers, if it is installed.

    Returns:
      the number of texts with equal ids in all three; None: the source has no tokenizer.

    Raises:
      UserError: transformers cannot open a tokenizer.
    """
    tokenizer = source_model.loaded_tokenizer
    if tokenizer is None:
        return None
    reference, library = _reference_tokenizer(source_model, tokenizer)
    if for_transformers and transformers_forward.available() and (directory / CONFIG).exists():
        written = _with_transformers(directory, {})
    else:
        written = Tokenizer.load(directory).encode
    encoders = (reference, tokenizer.encode, written)
    different = [text for text in TEXTS if len({tuple(encode(text)) for encode in encoders}) > 1]
    return TokenizerAgreement(len(TEXTS) - len(different), len(TEXTS), next(iter(different), None), library)


def _reference_tokenizer(source_model: SourceModel, tokenizer: Tokenizer) -> tuple[Encode, str]:
    """The source's tokenizer in another library than bert_jax if one can read it, and that library's name."""
    file = source_model.tokenizer_path
    if source_model.format in ("run", "bert-jax"):
        return tokenizer.encode, "bert_jax"
    paths = (file.parent / name for name in (CONFIG, "config.json"))
    stated, config = (read_json_object(path, COPY_AGAIN, missing_ok=True) for path in paths)
    named = config.get("model_type") or stated.get("tokenizer_class")
    if transformers_forward.available() and named and file.name in TRANSFORMERS_FILES:
        missing = _missing_settings(tokenizer, stated)
        return _with_transformers(Path(file.parent), missing), transformers_forward.library_version()
    return _with_libraries(file, stated, tokenizer), f"tokenizers {tokenizers.__version__}"


def _with_libraries(file: StoredPath, stated: dict[str, Any], tokenizer: Tokenizer) -> Encode:
    """The source's tokenizer in the `tokenizers` or `sentencepiece` library."""
    settings = tokenizer.settings | {name: value for name, value in stated.items() if value is not None}
    if file.suffix == ".model":
        processor = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
        prepare = _albert_text if "albert" in json.loads(tokenizer.to_json()) else lambda text, settings: text
        return lambda text: processor.encode(prepare(text, settings), out_type=int)
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
    return lambda text: library.encode(text, add_special_tokens=False).ids


def _albert_text(text: str, settings: dict[str, bool]) -> str:
    """preprocess_text of google-research/albert tokenization.py, with Python's Unicode tables."""
    if not settings["keep_accents"]:
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = text.replace("``", '"').replace("''", '"')
    return text.lower() if settings["do_lower_case"] else text


def _with_transformers(directory: Path, settings: dict[str, bool]) -> Encode:
    """The tokenizer of a directory in transformers.

    Raises:
      UserError: it cannot open the tokenizer.
    """
    import transformers

    try:
        opened = transformers.AutoTokenizer.from_pretrained(directory, **settings)
    except Exception as error:  # damaged files raise errors of many types
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"transformers cannot load the source's tokenizer: {reason}") from error
    return lambda text: opened.encode(text, add_special_tokens=False)
