"""fairseq's ids of GPT-2's tokens: its ``dict.txt`` renumbers GPT-2's ids by frequency, the most frequent first.

(fairseq 0.12.2 fairseq/data/dictionary.py, data/encoders/gpt2_bpe.py, tasks/masked_lm.py: four special tokens, then the
lines of the file in their order, and the task adds ``<mask>``.)
"""

import json
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.storage import read_json_object

DICTIONARY, ENCODER, MERGES = "dict.txt", "encoder.json", "vocab.bpe"
SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
MASK = "<mask>"
OVERWRITE = " #fairseq:overwrite"


def convert_tokenizer_files(directory: Path, rows: int) -> tuple[dict[str, bytes], list[str]]:
    """Tokenizer files from the directory of a checkpoint, and notes if files for them are missing.

    Args:
      directory: of the checkpoint.
      rows: number of rows of its word embeddings.

    Raises:
      UserError: the dictionary is damaged or belongs to another model.
    """
    missing = [name for name in (DICTIONARY, ENCODER, MERGES) if not (directory / name).exists()]
    if missing:
        return {}, [f"no tokenizer files, because {', '.join(missing)} is not in the checkpoint's directory"]
    return convert_dictionary(directory / DICTIONARY, directory / ENCODER, directory / MERGES, rows), []


def convert_dictionary(
    dict_txt: Path, encoder_json: Path, vocab_bpe: Path, rows: int | None = None
) -> dict[str, bytes]:
    """The files of a byte-level BPE tokenizer with the ids of a model of fairseq: ``vocab.json``, ``merges.txt``.

    Args:
      dict_txt: lines of a GPT-2 id and its count; words that are not a number (madeupword0000) are tokens themselves.
      encoder_json: GPT-2's token -> id.
      vocab_bpe: GPT-2's merges, used unchanged.
      rows: number of rows of the model's word embeddings; None: not checked.

    Raises:
      UserError: a file is damaged, a line is not an id of GPT-2, or the number of tokens is not that of the rows.
    """
    words = _words(dict_txt)
    numbers = read_json_object(encoder_json, "fetch GPT-2's again")
    tokens = {str(number): token for token, number in numbers.items()}
    ids = dict(SPECIALS)
    for position, word in enumerate(words):
        if word.isdigit() and word not in tokens:
            raise UserError(
                f"{dict_txt}, line {position + 1}: {word} is not an id in {encoder_json}: they belong "
                "to different models"
            )
        ids[tokens.get(word, word)] = len(SPECIALS) + position
    count = len(SPECIALS) + len(words)
    if MASK not in ids:
        ids[MASK] = count
        count += 1
    if rows is not None and rows != count:
        raise UserError(
            f"{dict_txt}: has {count} tokens, special ones included, the model {rows} rows: it belongs to another model"
        )
    try:
        merges = vocab_bpe.read_bytes()
        merges.decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{vocab_bpe}: not a file of merges: fetch GPT-2's again") from error
    return {"vocab.json": json.dumps(ids, ensure_ascii=False).encode(), "merges.txt": merges}


def _words(path: Path) -> list[str]:
    words = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a text file: fetch it again") from error
    for number, line in enumerate(lines, 1):
        word, _, count = line.rstrip().removesuffix(OVERWRITE).rpartition(" ")
        if not word or not count.isdigit():
            raise UserError(f"{path}, line {number}: '{line[:60]}' is not a token and its count: fetch it again")
        words.append(word)
    return words
