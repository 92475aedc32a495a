"""Pseudo-log-likelihood of sentences beside minicons: same machine, same weights, largest difference and time.

    python scripts/benchmarks/bench_pll.py --model MODEL --sentences FILE --count 2000 --rounds 5 --json pll.json

MODEL is a directory in the format of transformers (`bert-jax convert MODEL DIR`), FILE has one sentence per line.
Tokenisation is timed, too. minicons (`pip install minicons`) has batches of --peer-batch sentences, padded to the
longest; it is measured in the given order and, which is faster, with the sentences sorted by length. It runs in its
own process, because two thread pools in one process busy-wait on each other's cores; only one process works at a time.
Rounds are interleaved (bert_jax, minicons, minicons sorted, bert_jax, ...), medians are reported; the first round,
which compiles programs and compares scores, is not timed. Needs torch, transformers and minicons.
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
from bert_jax.analysis.cloze.pll import pseudo_log_likelihoods
from bert_jax.analysis.rows import encode_sentences
from bert_jax.bench import harness
from bert_jax.bench.harness import positive, timed
from bert_jax.errors import UserError

VARIANTS = ("original", "within_word_l2r")
TOLERANCE = 1e-3
"""Of a sum over the tokens of a sentence, nats."""


@functools.cache
def load_peer(model: str, threads: int) -> Any:
    """The scorer of minicons, in the peer's process."""
    import torch
    from minicons import scorer

    torch.set_num_threads(threads)
    return scorer.MaskedLMScorer(model, "cpu")


def score_with_peer(
    model: str, sentences: list[str], variant: str, batch: int, threads: int, by_length: bool
) -> tuple[np.ndarray, harness.Timing]:
    """Scores in the order of the sentences, and timing."""
    peer, scores = load_peer(model, threads), np.zeros(len(sentences))
    with harness.clocked() as timing:
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i])) if by_length else range(len(sentences))
        for start in range(0, len(order), batch):
            chosen = list(order[start : start + batch])
            # minicons 0.3.39 tokenizes with a method that transformers 5 no longer has; it also takes encodings.
            encoded = peer.tokenizer([sentences[i] for i in chosen], padding="longest", return_tensors="pt")
            scores[chosen] = peer.sequence_score(encoded, reduction=lambda x: x.sum(0).item(), PLL_metric=variant)
    return scores, timing


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time interleaved rounds of bert_jax and of both orders of the peer.

    Raises:
      UserError: too few sentences, or scores differ by more than TOLERANCE.
    """
    model = bert_jax.load(options.model)
    lines = [line.strip() for line in options.sentences.read_text().splitlines() if line.strip()]
    rows = encode_sentences(lines, model.tokenizer, min(options.max_length, model.config.max_positions))
    sentences = [line for line, row in zip(lines, rows, strict=True) if row is not None][: options.count]
    if len(sentences) < options.count:
        raise UserError(f"--sentences {options.sentences}: {len(sentences)} sentences fit, --count is {options.count}")

    def score() -> np.ndarray:
        encoded = encode_sentences(sentences, model.tokenizer, model.config.max_positions)
        return pseudo_log_likelihoods(model, encoded, [options.variant])[options.variant]

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def peer(by_length: bool) -> tuple[np.ndarray, harness.Timing]:
            arguments = (options.variant, options.peer_batch, options.threads, by_length)
            return process.submit(score_with_peer, options.model, sentences, *arguments).result()

        sides: dict[str, Callable[[], tuple[np.ndarray, harness.Timing]]] = {
            "bert_jax": lambda: timed(score),
            "minicons": lambda: peer(False),
            "minicons, sorted": lambda: peer(True),
        }
        first = {name: side() for name, side in sides.items()}
        difference = max(float(np.abs(scores - first["bert_jax"][0]).max()) for scores, _ in first.values())
        if not difference < TOLERANCE:
            raise UserError(f"--model {options.model}: scores differ by {difference:.2g} nats from the peer's")
        samples = harness.interleave(
            {name: lambda side=side: side()[1] for name, side in sides.items()}, options.rounds
        )
    return {
        "tokens": int(sum(len(row.input_ids) - 2 for row in encode_sentences(sentences, model.tokenizer, 512) if row)),
        "largest difference (nats)": difference,
        "seconds of the first call of bert_jax": first["bert_jax"][1]["seconds"],
        "scorers": harness.summary(samples, "bert_jax", sentences=len(sentences)),
        "samples": samples,
    }


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--model", required=True, help="a directory in the format of transformers, with its tokenizer")
    add("--sentences", required=True, type=Path, help="a text file with one sentence per line")
    add("--count", type=positive, default=2000, help="sentences to score, the first ones that fit")
    add("--max-length", type=positive, default=128, help="longer sentences are left out")
    add("--variant", choices=VARIANTS, default="original")
    add("--peer-batch", type=positive, default=8, help="sentences of a batch of minicons")
    add("--threads", type=positive, default=os.cpu_count(), help="CPU threads of the peer")
    add("--rounds", type=positive, default=5)


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
