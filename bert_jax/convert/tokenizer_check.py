"""Tokenizers beside a converted model: put there, and compared with what they came from."""

import json
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from bert_jax.convert import tokenizer_files
from bert_jax.convert.parity import transformers_forward
from bert_jax.convert.parity.parity_report import TokenizerAgreement, tokenizer_agreement
from bert_jax.convert.parity.sample_texts import TEXTS
from bert_jax.convert.source_model import SourceModel
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, read_object
from bert_jax.tokenizers.files import vocabulary_name
from bert_jax.tokenizers.hf_settings import CONFIG, COPY_AGAIN
from bert_jax.tokenizers.sentencepiece_backend import FORMAT
from bert_jax.tokenizers.tokenizer import Tokenizer

OURS = "tokenizer.json"
NAMES_OF_TRANSFORMERS = (OURS, "vocab.txt", "merges.txt", "spiece.model")
"""Files that its classes look for."""
Encode = Callable[[str], list[int]]


def write_native_tokenizer(source_model: SourceModel, directory: Path) -> None:
    """Copy the tokenizer's files, and write our tokenizer.json where they do not say everything."""
    tokenizer = source_model.loaded_tokenizer
    if tokenizer is None:
        return
    copied = tokenizer_files.carry(source_model.tokenizer_path.parent, directory)
    # What was assumed, because no file says it, is written down.
    if not copied or tokenizer.note or Tokenizer.load(directory).fingerprint != tokenizer.fingerprint:
        tokenizer.save(directory / OURS)


def write_hf_tokenizer(source_model: SourceModel, directory: Path) -> None:
    """Copy the tokenizer's files, make those that transformers needs besides, and state the settings they leave out.

    Raises:
      UserError: a tokenizer that transformers has no class for in this family.
    """
    tokenizer = source_model.loaded_tokenizer
    if tokenizer is None:
        return
    tokenizer_files.carry(source_model.tokenizer_path.parent, directory)
    copied = directory / OURS
    if copied.exists() and FORMAT in copied.read_text()[:100]:
        copied.unlink()
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as made:
        family, positions = source_model.model.family, source_model.model.config.max_positions
        for name in tokenizer_files.make(tokenizer, Path(made), family, positions):
            if not (directory / name).exists():
                (directory / name).write_bytes((Path(made) / name).read_bytes())
    stated = read_object(directory / CONFIG, COPY_AGAIN)
    if missing := _not_stated(tokenizer, stated):
        (directory / CONFIG).write_text(json.dumps(stated | missing, indent=2) + "\n")


def _not_stated(tokenizer: Tokenizer, stated: dict[str, Any]) -> dict[str, bool]:
    """Settings for which the class of transformers would take its default."""
    return {name: value for name, value in tokenizer.settings.items() if name not in stated}


def agreement(source_model: SourceModel, directory: Path, theirs_too: bool) -> TokenizerAgreement | None:
    """How the source's own tokenizer, ours of the source, and what was written cut the sample texts.

    Args:
      contents: the source.
      directory: what was written.
      theirs_too: it is for transformers, which then does the cutting, where it is installed.

    Returns:
      how many texts all three cut alike; None: the source has no tokenizer.

    Raises:
      UserError: transformers cannot open a tokenizer.
    """
    tokenizer = source_model.loaded_tokenizer
    if tokenizer is None:
        return None
    original, library = _original(source_model, tokenizer)
    if theirs_too and transformers_forward.available() and (directory / CONFIG).exists():
        written = _with_transformers(directory, {})
    else:
        written = Tokenizer.load(directory).encode
    return tokenizer_agreement([original, tokenizer.encode, written], TEXTS, library)


def _original(source_model: SourceModel, tokenizer: Tokenizer) -> tuple[Encode, str]:
    """The source's own tokenizer, run by another library than ours where one reads it, and the name of that library."""
    file = source_model.tokenizer_path
    if source_model.format in ("run", "bert-jax"):
        return tokenizer.encode, "bert_jax"
    beside = (file.parent / name for name in (CONFIG, "config.json"))
    stated, config = (read_object(path, COPY_AGAIN, missing_ok=True) for path in beside)
    named = config.get("model_type") or stated.get("tokenizer_class")
    if transformers_forward.available() and named and file.name in NAMES_OF_TRANSFORMERS:
        missing = _not_stated(tokenizer, stated)
        return _with_transformers(Path(file.parent), missing), transformers_forward.library_version()
    return _with_libraries(file, stated, tokenizer), f"tokenizers {tokenizers.__version__}"


def _with_libraries(file: StoredPath, stated: dict[str, Any], tokenizer: Tokenizer) -> Encode:
    """The `tokenizers` and `sentencepiece` libraries on the source's files, with the settings read once more."""
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
        vocabulary = str(file.parent / vocabulary_name(file))
        library = tokenizers.ByteLevelBPETokenizer(vocabulary, str(file), add_prefix_space=settings["add_prefix_space"])
    return lambda text: library.encode(text, add_special_tokens=False).ids


def _albert_text(text: str, settings: dict[str, bool]) -> str:
    """google-research/albert tokenization.py preprocess_text, with Python's own Unicode tables."""
    if not settings["keep_accents"]:
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = text.replace("``", '"').replace("''", '"')
    return text.lower() if settings["do_lower_case"] else text


def _with_transformers(directory: Path, settings: dict[str, bool]) -> Encode:
    """What transformers makes of a directory.

    Raises:
      UserError: it cannot open the tokenizer.
    """
    import transformers

    try:
        opened = transformers.AutoTokenizer.from_pretrained(directory, **settings)
    except Exception as error:  # of whatever kind the damage of its many files happens to raise there
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"transformers cannot open the tokenizer that the source has: {reason}") from error
    return lambda text: opened.encode(text, add_special_tokens=False)
