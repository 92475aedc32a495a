"""Speed of bert_jax's WordPiece encoder and of the `tokenizers` library, both on one core, with identical ids.

    python scripts/benchmarks/bench_tokenizer.py --tokenizer vocab.txt --source corpus/*.txt --json speed.json

Every line of the files is one sentence. Rounds are interleaved (bert_jax, library, bert_jax, ...) and medians are
reported; reading the files and the first round, which compiles code and fills the character table, are not timed.
"""

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The library reads these when it first encodes.
os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import harness
import tokenizers

from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.tokenizers.wordpiece import FastWordPiece


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time both encoders on the same sentences and compare all ids.

    Raises:
      UserError: a file is missing, bert_jax's encoder does not support the tokenizer, or ids differ.
    """
    if missing := [str(file) for file in options.source if not file.is_file()]:
        raise UserError(f"--source: no such file: {', '.join(missing)}")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in options.source]
    sentences = [line for text in texts for line in text.split("\n")]
    library = tokenizers.Tokenizer.from_str(Tokenizer.load(options.tokenizer).to_json())
    library.encode_special_tokens = True
    fast = FastWordPiece.from_tokenizer(library)
    if fast is None:
        raise UserError("--tokenizer: not BERT's WordPiece, so it has no compiled encoder; give a BERT vocab.txt")

    def encode_with_library() -> list[tokenizers.Encoding]:
        return library.encode_batch_fast(sentences, add_special_tokens=False)

    ids, lengths = fast.encode(sentences)
    expected = [encoding.ids for encoding in encode_with_library()]
    if lengths.tolist() != list(map(len, expected)) or ids.tolist() != [i for part in expected for i in part]:
        raise UserError("--source: the ids of the two encoders differ, so speeds are not comparable")
    sides = {"bert_jax": lambda: fast.encode(sentences), "library": encode_with_library}
    samples = harness.interleave({name: harness.timer(side) for name, side in sides.items()}, options.rounds)
    megabytes = sum(len(sentence.encode()) for sentence in sentences) / 1e6
    sizes = {"sentences": len(sentences), "tokens": len(ids), "MB": megabytes}
    return sizes | {"encoders": harness.summary(samples, "bert_jax", MB=megabytes), "samples": samples}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--tokenizer", required=True, help="vocab.txt, tokenizer.json or a directory with one")
    add("--source", nargs="+", type=Path, required=True, help="text files")
    add("--rounds", type=harness.positive, default=5)


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
