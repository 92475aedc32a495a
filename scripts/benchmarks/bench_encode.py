"""Texts per second of `bert_jax.load(...).encode` and of transformers with PyTorch: same machine, same weights.

    python scripts/benchmarks/bench_encode.py --model MODEL --source WIKI_DIR --texts 1000 --rounds 5 --json encode.json

Texts are paragraphs of files in WikiExtractor's format, of all lengths, truncated to --max-length tokens. Tokenisation
is timed, too. The peer is measured twice: in the given order, with batches of 32 texts padded to the longest, the usual
code; and sorted by length first, as in sentence-transformers. The peer runs in its own process, because two thread
pools in one process busy-wait on each other's cores; only one process works at a time. Rounds are interleaved
(bert_jax, given order, sorted, bert_jax, ...), medians are reported; the first round, which compiles programs and
compares vectors, is not timed. Needs torch and transformers.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import bert_jax
from bert_jax.errors import UserError

PEER_BATCH = 32
TOLERANCE = 1e-4
Timing = tuple[float, float]
"""Wall-clock seconds and CPU seconds of the process."""


def paragraphs(folder: Path, count: int) -> list[str]:
    """Evenly spaced paragraphs of the articles in a folder of WikiExtractor files, including titles.

    Raises:
      UserError: the folder has none.
    """
    files = sorted(path for path in folder.rglob("wiki_*") if path.is_file())
    lines = [line.strip() for file in files for line in file.read_text().split("\n")]
    texts = [line for line in lines if line and not line.startswith(("<doc ", "</doc>"))]
    if not texts:
        raise UserError(f"--source {folder}: it has no wiki_* files with text in WikiExtractor's format")
    step = max(1, len(texts) // count)
    return texts[::step][:count]


def timed(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, Timing]:
    """Result and timing of a call."""
    clock, cpu = time.perf_counter(), time.process_time()
    vectors = work()
    return vectors, (time.perf_counter() - clock, time.process_time() - cpu)


def serve_peer(pipe: Connection, model: str, texts: list[str], max_length: int, threads: int) -> None:
    """Process of the peer: receives True (sorted) or False (given order), sends vectors and timing; None ends it."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    encoder = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def encode(by_length: bool) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i])) if by_length else list(range(len(texts)))
        vectors = np.zeros((len(texts), encoder.config.hidden_size), np.float32)
        with torch.inference_mode():
            for start in range(0, len(order), PEER_BATCH):
                chosen = order[start : start + PEER_BATCH]
                batch = tokenizer(
                    [texts[i] for i in chosen],
                    padding=True,
                    truncation=True,
                    max_length=max_length,
                    return_tensors="pt",
                )
                real = batch["attention_mask"].unsqueeze(-1).float()
                hidden = encoder(**batch).last_hidden_state
                vectors[chosen] = ((hidden * real).sum(1) / real.sum(1)).numpy()
        return vectors

    while (by_length := pipe.recv()) is not None:
        pipe.send(timed(lambda by_length=by_length: encode(by_length)))


def measure(model: str, texts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Time interleaved rounds of bert_jax and of both variants of the peer.

    Raises:
      UserError: vectors differ by more than TOLERANCE.
    """
    model_jax = bert_jax.load(model)
    connection, peer_connection = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(
        target=serve_peer, args=(peer_connection, model, texts, options.max_length, options.threads), daemon=True
    )
    peer.start()

    def run_peer(by_length: bool) -> tuple[np.ndarray, Timing]:
        connection.send(by_length)
        return connection.recv()

    works = {
        "bert_jax": lambda: timed(
            lambda: model_jax.encode(
                texts, batch_size=options.batch_size, max_length=options.max_length, normalize=False
            )
        ),
        "transformers, as given": lambda: run_peer(False),
        "transformers, sorted": lambda: run_peer(True),
    }
    first = {name: work() for name, work in works.items()}
    difference = max(float(np.abs(vectors - first["bert_jax"][0]).max()) for vectors, _ in first.values())
    if not difference < TOLERANCE:
        raise UserError(
            f"--model {model}: vectors differ by {difference:.2g} from the peer's, so speeds are not comparable"
        )
    timings: dict[str, list[Timing]] = {name: [] for name in works}
    for done in range(options.rounds):
        for name, work in works.items():
            timings[name].append(work()[1])
        last = ", ".join(f"{name} {pairs[-1][0]:.2f} s (CPU {pairs[-1][1]:.2f})" for name, pairs in timings.items())
        print(f"round {done + 1}, load {os.getloadavg()[0]:.1f}: {last}", file=sys.stderr)
    connection.send(None)
    peer.join()
    return {
        "texts": len(texts),
        "largest_difference": difference,
        "first_seconds": first["bert_jax"][1][0],
        "seconds": {name: [clock for clock, _ in pairs] for name, pairs in timings.items()},
        "cpu_seconds": {name: [cpu for _, cpu in pairs] for name, pairs in timings.items()},
        "load": os.getloadavg(),
    }


def ratio(seconds: list[float], baseline: list[float]) -> str:
    """Median, minimum and maximum over rounds of `seconds` / `baseline`."""
    ratios = [one / other for one, other in zip(seconds, baseline, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(report: dict[str, Any]) -> list[str]:
    """Table of medians, and of the peer's seconds and CPU seconds relative to bert_jax, by round."""
    seconds, cpu = report["seconds"], report["cpu_seconds"]
    lines = [
        f"{report['texts']} texts, largest difference {report['largest_difference']:.1g}, "
        f"first call of bert_jax {report['first_seconds']:.1f} s",
        f"{'':24}{'texts/s':>9}{'seconds':>9}{'CPU s':>8}   over bert_jax: seconds (rounds); CPU seconds (rounds)",
    ]
    for name, values in seconds.items():
        middle = statistics.median(values)
        lines.append(
            f"{name:24}{report['texts'] / middle:9.1f}{middle:9.2f}{statistics.median(cpu[name]):8.2f}   "
            f"{ratio(values, seconds['bert_jax'])}; {ratio(cpu[name], cpu['bert_jax'])}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; returns 0, or 2 for a user error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory with a BERT and its tokenizer")
    parser.add_argument("--source", required=True, type=Path, help="folder of WikiExtractor files")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--max-length", type=int, default=256, help="tokens; longer texts are truncated")
    parser.add_argument("--batch-size", type=int, default=16, help="of bert_jax: rows of the longest texts per batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of the peer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all measurements there")
    options = parser.parse_args(arguments)
    try:
        if min(options.texts, options.rounds) < 1:
            raise UserError("--texts and --rounds must be at least 1")
        report = measure(options.model, paragraphs(options.source, options.texts), options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(report)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
