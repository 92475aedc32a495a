"""Pseudo-log-likelihood of sentences beside minicons: same machine, same weights, largest difference and time.

    python scripts/benchmarks/bench_pll.py --model MODEL --sentences FILE --count 2000 --json pll.json

MODEL is a directory in the format of transformers (`bert-jax convert MODEL DIR`), FILE has one sentence per line.
Tokenisation is timed, too. minicons (`pip install minicons`) has batches of --peer-batch sentences, padded to the
longest; it is measured in the given order and, which is faster, with the sentences of a part sorted by length. It runs
in its own process, because two thread pools in one process busy-wait on each other's cores; only one process works at a
time.

The sentences are scored in parts of --part sentences, and each part by all sides in turn (bert_jax, minicons, minicons
sorted): a part is a round, and every sentence is scored by every side. The scores of all tokens are compared. bert_jax
first scores all parts once, which compiles its programs; that time is reported, not compared. The file of --json is
written after every part, and Ctrl-C ends with the parts that were measured. Needs torch, transformers and minicons.
"""

import argparse
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import bert_jax
from bert_jax.analysis.cloze.pll import token_scores
from bert_jax.analysis.rows import encode_sentences
from bert_jax.bench import harness
from bert_jax.bench.harness import positive, timed
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel

VARIANTS = ("original", "within_word_l2r")
TOLERANCE = 1e-4
"""Of the score of a token, nats."""

Scored = tuple[list[np.ndarray], harness.Timing]
"""Scores of the tokens of each sentence, nats, and timing."""


@functools.cache
def load_peer(model: str, threads: int) -> Any:
    """The scorer of minicons, in the peer's process."""
    import torch
    from minicons import scorer

    torch.set_num_threads(threads)
    return scorer.MaskedLMScorer(model, "cpu")


def score_with_peer(
    model: str, sentences: Sequence[str], variant: str, batch: int, threads: int, by_length: bool
) -> Scored:
    """Scores in the order of the sentences, and timing."""
    peer, scores = load_peer(model, threads), [np.zeros(0)] * len(sentences)
    with harness.clocked() as timing:
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i])) if by_length else range(len(sentences))
        for start in range(0, len(order), batch):
            chosen = list(order[start : start + batch])
            # minicons 0.3.39 tokenizes with a method that transformers 5 no longer has; it also takes encodings.
            encoded = peer.tokenizer([sentences[i] for i in chosen], padding="longest", return_tensors="pt")
            prepared = peer.prepare_text(encoded, PLL_metric=variant)
            for i, of_tokens in zip(chosen, peer.compute_stats(prepared, return_tensors=True), strict=True):
                scores[i] = of_tokens.numpy()
    return scores, timing


def score_with_bert_jax(model: LoadedModel, sentences: Sequence[str], variant: Any) -> Scored:
    """The same."""

    def score() -> list[np.ndarray]:
        rows = encode_sentences(sentences, model.tokenizer, model.config.max_positions)
        return token_scores(model, [row for row in rows if row is not None], [variant])[variant]

    return timed(score)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time the parts, each by bert_jax and by both orders of the peer.

    Raises:
      UserError: too few sentences, or the score of a token differs by more than TOLERANCE.
    """
    model = bert_jax.load(options.model)
    sentences = read_sentences(options, model)
    parts = [sentences[start : start + options.part] for start in range(0, len(sentences), options.part)]
    harness.progress(f"{len(sentences):,} sentences in {len(parts)} parts; first call of bert_jax")
    first = sum(score_with_bert_jax(model, part, options.variant)[1]["seconds"] for part in parts)
    # Ctrl-C goes to all processes of a terminal; the peer finishes its part.
    ignore_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), ignore_interrupts) as process:
        of_peer = (options.variant, options.peer_batch, options.threads)

        def peer(part: Sequence[str], by_length: bool) -> Scored:
            return process.submit(score_with_peer, options.model, part, *of_peer, by_length).result()

        sides: dict[str, Callable[[Sequence[str]], Scored]] = {
            "bert_jax": lambda part: score_with_bert_jax(model, part, options.variant),
            "minicons": lambda part: peer(part, False),
            "minicons, sorted": lambda part: peer(part, True),
        }
        peer(sentences[:2], False)  # loads the peer's model
        return measure_parts(options, parts, sides, first)


def measure_parts(
    options: argparse.Namespace,
    parts: Sequence[Sequence[str]],
    sides: dict[str, Callable[[Sequence[str]], Scored]],
    first_call_seconds: float,
) -> dict[str, Any]:
    """Results of all parts, or of those that were measured before Ctrl-C."""
    samples: dict[str, list[harness.Timing]] = {side: [] for side in sides}
    report, tokens, worst = {}, 0, 0.0
    try:
        for number, part in enumerate(parts, 1):
            scored = {side: score(part) for side, score in sides.items()}
            worst = max(worst, largest_difference(scored, options.model))
            tokens += sum(map(len, scored["bert_jax"][0]))
            for side, (_, timing) in scored.items():
                samples[side].append(timing)
            report = {
                "sentences": sum(map(len, parts[:number])),
                "tokens": tokens,
                "largest difference of a token (nats)": worst,
                "seconds of the first call of bert_jax": first_call_seconds,
                "all parts": {side: total(timings) for side, timings in samples.items()},
                "by part": harness.summary(samples, "bert_jax", sentences=options.part),
                "samples": samples,
            }
            options.save(report)
            cpu = ", ".join(f"{side} {timings[-1]['cpu']:.1f}" for side, timings in samples.items())
            harness.progress(f"part {number} of {len(parts)}: CPU seconds {cpu}; difference at most {worst:.1e}")
    except KeyboardInterrupt:
        if not report:
            raise
        harness.progress(f"interrupted after {report['sentences']:,} sentences")
    return report


def total(timings: Sequence[harness.Timing]) -> dict[str, float]:
    """Seconds of one side."""
    return {
        name: sum(timing[clock] for timing in timings) for name, clock in (("wall (s)", "seconds"), ("CPU (s)", "cpu"))
    }


def read_sentences(options: argparse.Namespace, model: LoadedModel) -> list[str]:
    """The first sentences that fit.

    Raises:
      UserError: there are too few.
    """
    lines = [line.strip() for line in options.sentences.read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = encode_sentences(lines, model.tokenizer, min(options.max_length, model.config.max_positions))
    sentences = [line for line, row in zip(lines, rows, strict=True) if row is not None][: options.count]
    if len(sentences) < options.count:
        raise UserError(f"--sentences {options.sentences}: {len(sentences)} sentences fit, --count is {options.count}")
    return sentences


def largest_difference(scored: dict[str, Scored], model: str) -> float:
    """Of the score of a token between bert_jax and the peer, nats.

    Raises:
      UserError: it is more than TOLERANCE, or the sides have different tokens.
    """
    reference, worst = scored["bert_jax"][0], 0.0
    for side, (scores, _) in scored.items():
        if [len(one) for one in scores] != [len(one) for one in reference]:
            raise UserError(f"--model {model}: {side} and bert_jax have different tokens")
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in zip(scores, reference, strict=True)))
    if not worst <= TOLERANCE:
        raise UserError(f"--model {model}: scores of a token differ by {worst:.2g} nats, more than {TOLERANCE:g}")
    return worst


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--model", required=True, help="a directory in the format of transformers, with its tokenizer")
    add("--sentences", required=True, type=Path, help="a text file with one sentence per line")
    add("--count", type=positive, default=2000, help="sentences to score, the first ones that fit")
    add("--part", type=positive, default=200, help="sentences that a side scores before the next one's turn")
    add("--max-length", type=positive, default=128, help="longer sentences are left out")
    add("--variant", choices=VARIANTS, default="original")
    add("--peer-batch", type=positive, default=8, help="sentences of a batch of minicons")
    add("--threads", type=positive, default=os.cpu_count(), help="CPU threads of the peer")


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
