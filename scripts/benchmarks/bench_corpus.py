"""Measure the corpus pipeline: its speed as ratios from one run, and its memory on a large input.

    python scripts/benchmarks/bench_corpus.py speed --source "text-files:*.txt" --tokenizer vocab.txt [--repeat-to-mb 9]
    python scripts/benchmarks/bench_corpus.py memory --tokenizer vocab.txt --gb 2 [--workers 2] [-- FLAG ...]

`speed` alternates between tokenisation alone (bert_jax's encoder on prepared sentences, one core), a whole build with
one worker, and a whole build with two; it reports medians over rounds. `memory` writes a synthetic text that contains a
document of 300 MB on a single line, builds a corpus of it, and reports the peak resident memory of every process.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep import sources
from data_prep.build.sentences import split_paragraphs, split_sentences
from data_prep.clean import clean

_POLL_SECONDS = 0.25
_LONG_DOCUMENT_BYTES = 300_000_000


def main() -> None:
    """Parse the command line, measure, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speed", "memory"])
    parser.add_argument("--source", action="append", default=[], metavar="SPEC")
    parser.add_argument("--tokenizer", required=True, metavar="FILE")
    parser.add_argument("--repeat-to-mb", type=int, default=0, metavar="MB", help="repeat the text with reversed words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:end])
    arguments.flags = sys.argv[end + 1 :]  # for `bert-data build`
    with tempfile.TemporaryDirectory(prefix="bench-corpus-") as directory:
        measure = {"speed": measure_speed, "memory": measure_memory}[arguments.what]
        result = measure(arguments, pathlib.Path(directory))
    if arguments.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:<44} {value}")


def measure_speed(arguments: argparse.Namespace, directory: pathlib.Path) -> dict:
    """MB/s of tokenisation alone and of whole builds, and the size of the corpus on disk."""
    documents = [document.text for spec in arguments.source for document in _documents(spec)]
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    sample = documents if megabytes < 100 else documents[: max(1, int(len(documents) * 100 / megabytes))]
    text = directory / "text"
    text.mkdir()
    size = _write_text(documents, text, arguments.repeat_to_mb)
    tokenizer = Tokenizer.load(arguments.tokenizer)
    sentences = [s for t in sample for p in split_paragraphs(clean(t)) for s in split_sentences(p)]
    sentence_megabytes = sum(len(sentence.encode()) for sentence in sentences) / 1e6
    tokenizer.encode_flat(sentences[:1000])
    rates: dict[str, list[float]] = {"tokenise": [], "build_1": [], "build_2": []}
    for _ in range(arguments.rounds):
        started = time.perf_counter()
        tokenizer.encode_flat(sentences)
        rates["tokenise"].append(sentence_megabytes / (time.perf_counter() - started))
        for workers in (1, 2):
            seconds, _ = _build(arguments, directory, [f"text-files:{text}/*.txt"], workers)
            rates[f"build_{workers}"].append(size / 1e6 / seconds)
    manifest = json.loads((directory / "corpus" / "corpus.json").read_text())
    tokens = sum(split["tokens"] for split in manifest["splits"].values())
    on_disk = sum(path.stat().st_size for path in (directory / "corpus").iterdir())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "input MB": round(size / 1e6, 1),
        **{f"{name} MB/s": round(value, 2) for name, value in medians.items()},
        "build_1 / tokenise": round(medians["build_1"] / medians["tokenise"], 3),
        "build_2 / build_1": round(medians["build_2"] / medians["build_1"], 3),
        "tokens": tokens,
        "bytes on disk per token": round(on_disk / tokens, 3),
        "tokens per document": round(tokens / sum(split["documents"] for split in manifest["splits"].values()), 1),
        "rounds": {name: [round(value, 2) for value in values] for name, values in rates.items()},
    }


def _documents(spec: str):
    source = sources.parse(spec)
    for part in source.inputs():
        for block in source.blocks(part, []):
            yield from (item for item in source.documents(block) if isinstance(item, sources.Document))


def _write_text(documents: list[str], directory: pathlib.Path, repeat_to_mb: int) -> int:
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


def measure_memory(arguments: argparse.Namespace, directory: pathlib.Path) -> dict:
    """Peak resident memory of the processes of a build of a large text."""
    text = directory / "large.txt"
    size = _write_synthetic(text, int(arguments.gb * 1e9))
    seconds, peaks = _build(arguments, directory, [f"text:{text}"], arguments.workers)
    return {
        "input MB": size // 1_000_000,
        "seconds": round(seconds, 1),
        "MB/s": round(size / 1e6 / seconds, 1),
        "peak MB of a process": max(peaks),
        "peak MB of each process": sorted(peaks, reverse=True),
    }


def _write_synthetic(path: pathlib.Path, size: int) -> int:
    """Write documents of numbered sentences, with a 300 MB document without line break in the middle."""
    nouns = "time year people way day man thing woman life child world school state family student group"
    words = nouns.split()
    written, number, long_done = 0, 0, False
    with path.open("w") as file:
        while written < size:
            sentences = []
            for _ in range(2000):
                number += 1
                chosen = [words[(number * 31 + i * i * 7 + number // 97 * i) % len(words)] for i in range(9)]
                sentences.append(f"{' '.join(chosen).capitalize()} {number}.")
            if not long_done and written > size // 2:
                line = " ".join(sentences) + " "
                for _ in range(_LONG_DOCUMENT_BYTES // len(line) + 1):
                    written += file.write(line)
                long_done = True
                written += file.write("\n\n")
            for begin in range(0, 2000, 50):
                written += file.write("\n".join(sentences[begin : begin + 50]) + "\n\n")
    return path.stat().st_size


def _build(
    arguments: argparse.Namespace, directory: pathlib.Path, specs: list[str], workers: int
) -> tuple[float, list[int]]:
    """Run a build; returns its seconds and the peak memory in MB of each of its processes."""
    out = directory / "corpus"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "data_prep", "build", "--tokenizer", arguments.tokenizer, "--out", str(out)]
    command += [flag for spec in specs for flag in ("--source", spec)]
    command += ["--workers", str(workers), "--validation-fraction", "0.05", *arguments.flags]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in _descendants(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), _peak_megabytes(pid))
        time.sleep(_POLL_SECONDS)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(process.stderr.read()[-2000:])
    return seconds, list(peaks.values())


def _descendants(pid: int) -> list[int]:
    pids = [pid]
    for each in pids:
        try:
            tasks = list(pathlib.Path(f"/proc/{each}/task").iterdir())
            children = [(task / "children").read_text().split() for task in tasks]
        except OSError:
            continue
        pids += [int(child) for of_task in children for child in of_task]
    return pids


def _peak_megabytes(pid: int) -> int:
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0")
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    main()
