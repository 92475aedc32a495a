"""Speed of bert_jax's WordPiece encoder and of the `tokenizers` library, both on one core, with identical ids.

    python scripts/benchmarks/bench_tokenizer.py --tokenizer vocab.txt --source corpus/*.txt --json speed.json

Every line of the files is one sentence. Rounds are interleaved (bert_jax, library, bert_jax, ...) and medians are
reported; reading the files and the first round, which compiles code and fills the character table, are not timed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The library reads these when it first encodes.
os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tokenizers

from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.tokenizers.wordpiece import FastWordPiece


def read_sentences(files: Sequence[Path]) -> list[str]:
    """Lines of the files; invalid UTF-8 is replaced."""
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(f"--source: no such file: {', '.join(missing)}")
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").split("\n")]


def measure(library: tokenizers.Tokenizer, sentences: list[str], rounds: int) -> dict[str, Any]:
    """Time both encoders on the same sentences and compare all ids.

    Raises:
      UserError: bert_jax's encoder does not support the tokenizer.
    """
    fast = FastWordPiece.from_tokenizer(library)
    if fast is None:
        raise UserError("--tokenizer: not BERT's WordPiece, so it has no compiled encoder; give a BERT vocab.txt")
    megabytes = sum(len(sentence.encode()) for sentence in sentences) / 1e6
    ids, lengths = fast.encode(sentences)
    expected = [encoding.ids for encoding in library.encode_batch_fast(sentences, add_special_tokens=False)]
    identical = lengths.tolist() == [len(part) for part in expected] and np.array_equal(
        ids, np.array([i for part in expected for i in part], np.uint32)
    )
    seconds: dict[str, list[float]] = {"ours": [], "library": []}
    for _ in range(rounds):
        start = time.perf_counter()
        fast.encode(sentences)
        seconds["ours"].append(time.perf_counter() - start)
        start = time.perf_counter()
        library.encode_batch_fast(sentences, add_special_tokens=False)
        seconds["library"].append(time.perf_counter() - start)
    speeds = {name: megabytes / statistics.median(times) for name, times in seconds.items()}
    return {
        "megabytes": megabytes,
        "sentences": len(sentences),
        "tokens": len(ids),
        "identical_ids": identical,
        "megabytes_per_second": speeds,
        "ratio": speeds["ours"] / speeds["library"],
        "seconds": seconds,
        "tokenizers": tokenizers.__version__,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a report; returns 1 if ids differ, 2 for a user error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="vocab.txt, tokenizer.json or a directory with one")
    parser.add_argument("--source", nargs="+", type=Path, required=True, help="text files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all measurements there")
    options = parser.parse_args(arguments)
    try:
        if options.rounds < 1:
            raise UserError(f"--rounds {options.rounds}: must be at least 1")
        library = tokenizers.Tokenizer.from_str(Tokenizer.load(options.tokenizer).to_json())
        library.encode_special_tokens = True
        report = measure(library, read_sentences(options.source), options.rounds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    speeds = report["megabytes_per_second"]
    print(f"{report['megabytes']:.1f} MB, {report['sentences']} sentences, {report['tokens']} tokens, one core each")
    print(f"bert_jax {speeds['ours']:8.1f} MB/s")
    print(f"library  {speeds['library']:8.1f} MB/s   ids {'identical' if report['identical_ids'] else 'DIFFER'}")
    print(f"ratio    {report['ratio']:8.1f}       load {report['machine']['load'][0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["identical_ids"] else 1


if __name__ == "__main__":
    sys.exit(main())
