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
import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import positive, timed

import bert_jax
from bert_jax.errors import UserError

PEER_BATCH = 32
TOLERANCE = 1e-4


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


_peer: list[Any] = []
"""Of the peer's process: its encoder, its tokenizer, the texts, and the longest row in tokens."""


def load_peer(model: str, texts: list[str], max_length: int, threads: int) -> None:
    """Load transformers' model in this process."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    encoder = transformers.AutoModel.from_pretrained(model).eval()
    _peer[:] = encoder, transformers.AutoTokenizer.from_pretrained(model), texts, max_length


def encode_with_peer(by_length: bool) -> tuple[np.ndarray, harness.Timing]:
    """Vectors in the order of the texts, and timing."""
    import torch

    encoder, tokenizer, texts, max_length = _peer

    def encode() -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i])) if by_length else list(range(len(texts)))
        vectors = np.zeros((len(texts), encoder.config.hidden_size), np.float32)
        limits = {"padding": True, "truncation": True, "max_length": max_length, "return_tensors": "pt"}
        for start in range(0, len(order), PEER_BATCH):
            chosen = order[start : start + PEER_BATCH]
            batch = tokenizer([texts[i] for i in chosen], **limits)
            real = batch["attention_mask"].unsqueeze(-1).float()
            hidden = encoder(**batch).last_hidden_state
            vectors[chosen] = ((hidden * real).sum(1) / real.sum(1)).numpy()
        return vectors

    with torch.inference_mode():
        return timed(encode)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time interleaved rounds of bert_jax and of both variants of the peer.

    Raises:
      UserError: there are no texts, or vectors differ by more than TOLERANCE.
    """
    texts = paragraphs(options.source, options.texts)
    model = bert_jax.load(options.model)
    ours = {"batch_size": options.batch_size, "max_length": options.max_length, "normalize": False}
    loading = (options.model, texts, options.max_length, options.threads)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), load_peer, loading) as process:
        sides: dict[str, Callable[[], tuple[np.ndarray, harness.Timing]]] = {
            "bert_jax": lambda: timed(lambda: model.encode(texts, **ours)),
            "transformers, as given": lambda: process.submit(encode_with_peer, False).result(),
            "transformers, sorted": lambda: process.submit(encode_with_peer, True).result(),
        }
        first = {name: side() for name, side in sides.items()}
        difference = max(float(np.abs(vectors - first["bert_jax"][0]).max()) for vectors, _ in first.values())
        if not difference < TOLERANCE:
            raise UserError(f"--model {options.model}: vectors differ by {difference:.2g} from the peer's")
        timings = harness.interleave(
            {name: lambda side=side: side()[1] for name, side in sides.items()}, options.rounds
        )
    return {
        "texts": len(texts),
        "largest_difference": difference,
        "first_seconds": first["bert_jax"][1]["seconds"],
        **{clock: {name: [t[clock] for t in timings[name]] for name in sides} for clock in ("seconds", "cpu")},
    }


def render(report: dict[str, Any]) -> list[str]:
    """Table of medians, and of the peer's seconds and CPU seconds relative to bert_jax, by round."""
    seconds, cpu = report["seconds"], report["cpu"]
    lines = [
        f"{harness.header(report)}; {report['texts']} texts, largest difference {report['largest_difference']:.1g}, "
        f"first call of bert_jax {report['first_seconds']:.1f} s",
        f"{'':24}{'texts/s':>9}{'seconds':>9}{'CPU s':>8}   over bert_jax: seconds (rounds); CPU seconds (rounds)",
    ]
    for name in seconds:
        middle, middle_cpu = (harness.spread(clock[name])["median"] for clock in (seconds, cpu))
        ratios = [harness.show(harness.ratio(clock[name], clock["bert_jax"])) for clock in (seconds, cpu)]
        lines.append(f"{name:24}{report['texts'] / middle:9.1f}{middle:9.2f}{middle_cpu:8.2f}   {'; '.join(ratios)}")
    return lines


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--model", required=True, help="a Hugging Face directory with a BERT and its tokenizer")
    add("--source", required=True, type=Path, help="folder of WikiExtractor files")
    add("--texts", type=positive, default=1000)
    add("--max-length", type=positive, default=256, help="tokens; longer texts are truncated")
    add("--batch-size", type=positive, default=16, help="of bert_jax: rows of the longest texts per batch")
    add("--threads", type=positive, default=os.cpu_count(), help="CPU threads of the peer")
    add("--rounds", type=positive, default=5)


main = functools.partial(harness.run, __doc__, flags, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
