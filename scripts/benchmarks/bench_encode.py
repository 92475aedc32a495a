"""Texts per second of `bert_jax.load(...).encode` beside transformers with PyTorch: one machine, the same weights.

    python scripts/benchmarks/bench_encode.py --model MODEL --source WIKI_DIR --texts 1000 --rounds 5 --json encode.json

Texts are paragraphs of files in WikiExtractor's form, of all lengths, cut to --max-length tokens. Tokenisation is timed
with the rest. The peer stands twice: in the order given, 32 texts a batch padded to the longest of them, as most write
it; and sorted by length first, as sentence-transformers does. It has a process of its own, because two pools of threads
in one process wait actively for work and take each other's cores; only one of the processes works at a time. Rounds are
interleaved (ours, given, sorted, ours, ...), medians are reported; a first round, in which programs are compiled and
vectors are compared, is not timed. Needs torch and transformers.
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
"""Seconds by the clock, and CPU seconds of the process."""


def paragraphs(folder: Path, count: int) -> list[str]:
    """Evenly spread paragraphs of the articles in a folder of WikiExtractor files, titles among them.

    Raises:
      UserError: there are none.
    """
    files = sorted(path for path in folder.rglob("wiki_*") if path.is_file())
    lines = [line.strip() for file in files for line in file.read_text().split("\n")]
    found = [line for line in lines if line and not line.startswith(("<doc ", "</doc>"))]
    if not found:
        raise UserError(f"--source {folder}: holds no wiki_* files with text, as WikiExtractor writes them")
    step = max(1, len(found) // count)
    return found[::step][:count]


def timed(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, Timing]:
    """What it returns, and how long it took."""
    clock, cpu = time.perf_counter(), time.process_time()
    vectors = work()
    return vectors, (time.perf_counter() - clock, time.process_time() - cpu)


def serve_peer(pipe: Connection, model: str, texts: list[str], max_length: int, threads: int) -> None:
    """The peer's process: answers True (sorted) or False (as given) with vectors and a timing; None ends it."""
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
    """Interleaved rounds of ours and of both ways of the peer.

    Raises:
      UserError: vectors differ by more than TOLERANCE.
    """
    ours = bert_jax.load(model)
    here, there = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(
        target=serve_peer, args=(there, model, texts, options.max_length, options.threads), daemon=True
    )
    peer.start()

    def ask(by_length: bool) -> tuple[np.ndarray, Timing]:
        here.send(by_length)
        return here.recv()

    works = {
        "bert_jax": lambda: timed(
            lambda: ours.encode(texts, batch_size=options.batch_size, max_length=options.max_length, normalize=False)
        ),
        "transformers, as given": lambda: ask(False),
        "transformers, sorted": lambda: ask(True),
    }
    first = {name: work() for name, work in works.items()}
    difference = max(float(np.abs(vectors - first["bert_jax"][0]).max()) for vectors, _ in first.values())
    if not difference < TOLERANCE:
        raise UserError(f"--model {model}: vectors differ by {difference:.2g} from the peer's, so speeds say nothing")
    timings: dict[str, list[Timing]] = {name: [] for name in works}
    for done in range(options.rounds):
        for name, work in works.items():
            timings[name].append(work()[1])
        last = ", ".join(f"{name} {pairs[-1][0]:.2f} s (CPU {pairs[-1][1]:.2f})" for name, pairs in timings.items())
        print(f"round {done + 1}, load {os.getloadavg()[0]:.1f}: {last}", file=sys.stderr)
    here.send(None)
    peer.join()
    return {
        "texts": len(texts),
        "largest_difference": difference,
        "first_seconds": first["bert_jax"][1][0],
        "seconds": {name: [clock for clock, _ in pairs] for name, pairs in timings.items()},
        "cpu_seconds": {name: [cpu for _, cpu in pairs] for name, pairs in timings.items()},
        "load": os.getloadavg(),
    }


def ratio(theirs: list[float], ours: list[float]) -> str:
    """Median, least and largest of the ratios of the rounds."""
    ratios = [other / mine for other, mine in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(report: dict[str, Any]) -> list[str]:
    """Lines to print: medians, and the peer's seconds and CPU seconds over ours, round by round."""
    seconds, cpu = report["seconds"], report["cpu_seconds"]
    lines = [
        f"{report['texts']} texts, largest difference {report['largest_difference']:.1g}, "
        f"first call of ours {report['first_seconds']:.1f} s",
        f"{'':24}{'texts/s':>9}{'seconds':>9}{'CPU s':>8}   ours is faster by (rounds); in CPU seconds (rounds)",
    ]
    for name, values in seconds.items():
        middle = statistics.median(values)
        lines.append(
            f"{name:24}{report['texts'] / middle:9.1f}{middle:9.2f}{statistics.median(cpu[name]):8.2f}   "
            f"{ratio(values, seconds['bert_jax'])}; {ratio(cpu[name], cpu['bert_jax'])}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 2 after an error of the user."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory with a BERT and its tokenizer")
    parser.add_argument("--source", required=True, type=Path, help="folder of WikiExtractor files")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--max-length", type=int, default=256, help="tokens; longer texts are cut")
    parser.add_argument("--batch-size", type=int, default=16, help="of ours: rows of the longest kind in a pass")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args(arguments)
    try:
        if min(options.texts, options.rounds) < 1:
            raise UserError("--texts and --rounds: give at least 1")
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
