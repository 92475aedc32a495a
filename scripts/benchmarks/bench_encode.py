"""Texts per second of `bert_jax.load(...).encode` and of transformers with PyTorch: same machine, same weights.

    python scripts/benchmarks/bench_encode.py --model MODEL --source WIKI_DIR --texts 1000 --rounds 5 --json encode.json

Texts are paragraphs of files in WikiExtractor's format, of all lengths, truncated to 256 tokens. Tokenisation
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

import numpy as np

import bert_jax
from bert_jax.bench import harness
from bert_jax.bench.harness import positive, timed
from bert_jax.errors import UserError

PEER_BATCH, MAX_LENGTH = 32, 256
TOLERANCE = 1e-4


@functools.cache
def load_peer(model: str, threads: int) -> tuple[Any, Any]:
    """Encoder and tokenizer of transformers, in the peer's process."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    return transformers.AutoModel.from_pretrained(model).eval(), transformers.AutoTokenizer.from_pretrained(model)


def encode_with_peer(model: str, texts: list[str], threads: int, by_length: bool) -> tuple[np.ndarray, harness.Timing]:
    """Vectors in the order of the texts, and timing."""
    import torch

    encoder, tokenizer = load_peer(model, threads)
    vectors = np.zeros((len(texts), encoder.config.hidden_size), np.float32)
    limits = {"padding": True, "truncation": True, "max_length": MAX_LENGTH, "return_tensors": "pt"}
    with harness.clocked() as timing, torch.inference_mode():
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i])) if by_length else range(len(texts))
        for start in range(0, len(order), PEER_BATCH):
            chosen = list(order[start : start + PEER_BATCH])
            batch = tokenizer([texts[i] for i in chosen], **limits)
            real = batch["attention_mask"].unsqueeze(-1).float()
            hidden = encoder(**batch).last_hidden_state
            vectors[chosen] = ((hidden * real).sum(1) / real.sum(1)).numpy()
    return vectors, timing


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time interleaved rounds of bert_jax and of both variants of the peer.

    Raises:
      UserError: there are no texts, or vectors differ by more than TOLERANCE.
    """
    files = sorted(path for path in options.source.rglob("wiki_*") if path.is_file())
    lines = [line.strip() for file in files for line in file.read_text().split("\n")]
    texts = [line for line in lines if line and not line.startswith(("<doc ", "</doc>"))]
    if not texts:
        raise UserError(f"--source {options.source}: it has no wiki_* files with text in WikiExtractor's format")
    texts = texts[:: max(1, len(texts) // options.texts)][: options.texts]
    model = bert_jax.load(options.model)
    ours = {"batch_size": 16, "max_length": MAX_LENGTH, "normalize": False}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def peer(by_length: bool) -> tuple[np.ndarray, harness.Timing]:
            return process.submit(encode_with_peer, options.model, texts, options.threads, by_length).result()

        sides: dict[str, Callable[[], tuple[np.ndarray, harness.Timing]]] = {
            "bert_jax": lambda: timed(lambda: model.encode(texts, **ours)),
            "transformers, as given": lambda: peer(False),
            "transformers, sorted": lambda: peer(True),
        }
        first = {name: side() for name, side in sides.items()}
        difference = max(float(np.abs(vectors - first["bert_jax"][0]).max()) for vectors, _ in first.values())
        if not difference < TOLERANCE:
            raise UserError(f"--model {options.model}: vectors differ by {difference:.2g} from the peer's")
        timers = {name: lambda side=side: side()[1] for name, side in sides.items()}
        samples = harness.interleave(timers, options.rounds)
    return {
        "largest difference": difference,
        "seconds of the first call of bert_jax": first["bert_jax"][1]["seconds"],
        "encoders": harness.summary(samples, "bert_jax", texts=len(texts)),
        "samples": samples,
    }


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--model", required=True, help="a Hugging Face directory with a BERT and its tokenizer")
    add("--source", required=True, type=Path, help="folder of WikiExtractor files")
    add("--texts", type=positive, default=1000)
    add("--threads", type=positive, default=os.cpu_count(), help="CPU threads of the peer")
    add("--rounds", type=positive, default=5)


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
