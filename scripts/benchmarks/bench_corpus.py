"""Measure the corpus pipeline: speed of the tokenizer and of builds as ratios from one run, memory on a large input.

    python scripts/benchmarks/bench_corpus.py tokenizer --source "text-files:*.txt" --tokenizer vocab.txt
    python scripts/benchmarks/bench_corpus.py speed --source "text-files:*.txt" --tokenizer vocab.txt [--repeat-to-mb 9]
    python scripts/benchmarks/bench_corpus.py memory --tokenizer vocab.txt --gb 2 [--workers 2] [-- FLAG ...]
    python scripts/benchmarks/bench_corpus.py scaling --source text:large.txt.bz2 --tokenizer vocab.txt [-- FLAG ...]

`tokenizer` compares bert_jax's WordPiece encoder with the `tokenizers` library, both on one core, with identical ids;
every line of the text is a sentence, and the first round, which compiles code, is not timed. `speed` alternates between
tokenisation alone (bert_jax's encoder on prepared sentences, one core), a whole build with one worker, and a whole
build with two; its seconds are per MB of text. `memory` writes a synthetic text that contains a document of 300 MB on a
single line, builds a corpus of it, and reports the peak resident memory of every process. `scaling` builds a corpus of
the source in turn with one worker and with two, and reports CPU seconds and memory of every process by phase. On a
busy machine its wall times mean little; `CPU bound` is the CPU seconds with one worker over those of the busiest
process with two, phase by phase: the ratio of wall times if each process has a core. Flags after -- go to `bert-data
build`.
"""

import argparse
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from bert_jax.bench import harness
from bert_jax.data.corpus import INCOMPLETE
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.tokenizers.wordpiece import FastWordPiece
from data_prep import sources
from data_prep.builder.scratch import PLANS
from data_prep.builder.sentences import split_paragraphs, split_sentences
from data_prep.clean import clean

LONG_DOCUMENT_BYTES = 300_000_000
PHASES = ["prepare", "decide", "write"]
NOUNS = "time year people way day man thing woman life child world school state family student group"


def measure_tokenizer(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Seconds of both encoders on the same sentences.

    Raises:
      UserError: bert_jax's encoder does not support the tokenizer, or ids differ.
    """
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # read at the library's first use
    sentences = [line for spec in options.source for document in _documents(spec) for line in document.text.split("\n")]
    library = tokenizers.Tokenizer.from_str(Tokenizer.load(options.tokenizer).to_json())
    library.encode_special_tokens = True
    fast = FastWordPiece.from_tokenizer(library)
    if fast is None:
        raise UserError("--tokenizer: not BERT's WordPiece, so it has no compiled encoder; give a BERT vocab.txt")
    sides = {
        "bert_jax": lambda: fast.encode_flat(sentences),
        "library": lambda: library.encode_batch_fast(sentences, add_special_tokens=False),
    }
    (ids, lengths), encodings = (side() for side in sides.values())
    expected = [encoding.ids for encoding in encodings]
    if lengths.tolist() != list(map(len, expected)) or ids.tolist() != [i for part in expected for i in part]:
        raise UserError("--source: the ids of the two encoders differ, so speeds are not comparable")
    samples = harness.interleave({name: harness.timer(side) for name, side in sides.items()}, options.rounds)
    megabytes = sum(len(sentence.encode()) for sentence in sentences) / 1e6
    sizes = {"sentences": len(sentences), "tokens": len(ids), "MB": megabytes}
    return sizes | {"encoders": harness.summary(samples, "bert_jax", MB=megabytes), "samples": samples}


def measure_speed(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Seconds per MB of tokenisation alone and of whole builds, and the size of the corpus on disk."""
    documents = [document.text for spec in options.source for document in _documents(spec)]
    text = directory / "text"
    text.mkdir()
    size = _write_text(documents, text, options.repeat_to_mb) / 1e6
    tokenizer = Tokenizer.load(options.tokenizer)
    sentences = [s for t in documents for p in split_sentences(split_paragraphs(clean(t))) for s in p]
    sentence_size = sum(len(sentence.encode()) for sentence in sentences) / 1e6
    tokenizer.encode_corpus(sentences[:1000])
    build = functools.partial(_build, options, directory, f"text-files:{text}/*.txt")
    samples = harness.interleave(
        {
            "build, 1 worker": harness.timer(lambda: build(1), size),
            "build, 2 workers": harness.timer(lambda: build(2), size),
            "tokenisation": harness.timer(lambda: tokenizer.encode_corpus(sentences), sentence_size),
        },
        options.rounds,
    )
    manifest = json.loads((directory / "corpus" / "corpus.json").read_text())
    tokens, kept = (sum(split[count] for split in manifest["splits"].values()) for count in ("tokens", "documents"))
    on_disk = sum(path.stat().st_size for path in (directory / "corpus").iterdir())
    return {
        "input MB": size,
        "tokens": tokens,
        "bytes on disk per token": on_disk / tokens,
        "tokens per document": tokens / kept,
        "seconds per MB": harness.summary(samples, "build, 1 worker", ("seconds",), MB=1),
        "samples": samples,
    }


def _documents(spec: str) -> Iterable[sources.Document]:
    source = sources.parse(spec)
    for part in source.inputs():
        for block in source.blocks(part, sources.InputRecord()):
            yield from (item for item in source.documents(block) if isinstance(item, sources.Document))


def _write_text(documents: list[str], directory: Path, repeat_to_mb: int) -> int:
    """Write a file per document; further copies have the words of each line reversed, so that none is a duplicate."""
    size, copy = 0, 0
    while copy == 0 or size < repeat_to_mb * 1_000_000:
        for index, text in enumerate(documents):
            if copy:
                text = "\n".join(f"{copy} " + " ".join(line.split()[::-1]) if line else "" for line in text.split("\n"))
            path = directory / f"{copy:04d}-{index:07d}.txt"
            path.write_text(text)
            size += path.stat().st_size
            if copy and size >= repeat_to_mb * 1_000_000:
                return size
        copy += 1
    return size


def measure_memory(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Peak resident memory of the processes of a build of a large text."""
    text = directory / "large.txt"
    _write_synthetic(text, int(options.gb * 1e9))
    uses, timing = harness.timed(lambda: _build(options, directory, f"text:{text}", options.workers))
    return {"input MB": text.stat().st_size // 1_000_000, "seconds": timing["seconds"], "processes": _rows(uses)}


def measure_scaling(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Builds with one worker and with two, in turn."""
    (spec,) = options.source
    rounds, rows = [], []
    for _ in range(options.rounds):
        busiest, seconds, parent = {}, {}, 0.0
        for workers in (1, 2):
            uses, timing = harness.timed(functools.partial(_build, options, directory, spec, workers))
            seconds[workers] = timing["seconds"]
            busiest[workers] = sum(
                max(use.cpu_seconds for use in uses if use.phase == phase) for phase in {use.phase for use in uses}
            )
            parent = sum(use.cpu_seconds for use in uses if not use.process) / sum(use.cpu_seconds for use in uses)
            rows += [{"workers": workers, **row} for row in _rows(uses)]
        rounds.append(
            {
                "seconds, 1 worker": seconds[1],
                "seconds, 2 workers": seconds[2],
                "ratio": seconds[1] / seconds[2],
                "CPU bound": busiest[1] / busiest[2],
                "parent's share of the CPU": parent,
            }
        )
    return {"rounds": rounds, "processes": rows}


def _rows(uses: Iterable[harness.ProcessUse]) -> list[dict[str, Any]]:
    return [
        {"phase": use.phase, "process": use.process, "peak MB": use.peak_megabytes, "CPU seconds": use.cpu_seconds}
        for use in sorted(uses, key=lambda use: (PHASES.index(use.phase), use.process))
    ]


def _write_synthetic(path: Path, size: int) -> None:
    """Write documents of numbered sentences, with a 300 MB document without line break in the middle."""
    written, number, long_done, nouns = 0, 0, False, NOUNS.split()
    with path.open("w") as file:
        while written < size:
            sentences = []
            for _ in range(2000):
                number += 1
                chosen = [nouns[(number * 31 + i * i * 7 + number // 97 * i) % len(nouns)] for i in range(9)]
                sentences.append(f"{' '.join(chosen).capitalize()} {number}.")
            if not long_done and written > size // 2:
                line, long_done = " ".join(sentences) + " ", True
                written += file.write(line * (LONG_DOCUMENT_BYTES // len(line) + 1) + "\n\n")
            for begin in range(0, 2000, 50):
                written += file.write("\n".join(sentences[begin : begin + 50]) + "\n\n")


def _build(options: argparse.Namespace, directory: Path, spec: str, workers: int) -> list[harness.ProcessUse]:
    """Run a build; returns what its processes used in each phase."""
    out = directory / "corpus"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "data_prep", "build", "--source", spec, "--tokenizer", options.tokenizer]
    command += ["--out", str(out), "--workers", str(workers), "--validation-fraction", "0.05", *options.rest]

    def phase() -> str:
        scratch = out / INCOMPLETE
        if (scratch / PLANS).exists():
            return "write"
        return "decide" if any(scratch.glob("columns-*")) else "prepare"

    return harness.run_command(command, phase)


MODES = {
    "tokenizer": measure_tokenizer,
    "speed": measure_speed,
    "memory": measure_memory,
    "scaling": measure_scaling,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The results of a mode."""
    with tempfile.TemporaryDirectory(prefix="bench-corpus-") as directory:
        return MODES[options.mode](options, Path(directory))


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("mode", choices=MODES)
    add("--source", action="append", default=[], metavar="SPEC")
    add("--tokenizer", required=True, metavar="FILE")
    add("--repeat-to-mb", type=int, default=0, metavar="MB", help="repeat the text with reversed words")
    add("--rounds", type=harness.positive, default=3)
    add("--gb", type=float, default=2.0)
    add("--workers", type=harness.positive, default=2)


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
