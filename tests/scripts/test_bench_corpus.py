"""bench_corpus.py and bench_duplicates.py on tiny texts. Nothing is timed."""

import json
import random
from pathlib import Path

import pytest

from tests.pages import load_script, process_restored

BENCHMARKS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
pytestmark = pytest.mark.slow


def report_of(script: str, file: Path, *arguments) -> dict:
    with process_restored():
        assert load_script(BENCHMARKS / script).main(["--json", str(file), *map(str, arguments)]) == 0
    return json.loads(file.read_text())


def test_encoders_are_compared_on_the_same_ids(tmp_path):
    vocab, text = tmp_path / "vocab.txt", tmp_path / "text.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s", "[", "mask", "]"]))
    text.write_text("The the [MASK]\n\nthes")
    words = ["tokenizer", "--tokenizer", vocab, "--source", f"text-files:{text}", "--rounds", 2]
    found = report_of("bench_corpus.py", tmp_path / "report.json", *words)
    assert (found["sentences"], found["tokens"]) == (3, 7)
    assert [len(found["samples"][name]) for name in ("bert_jax", "library")] == [2, 2]


def test_a_build_is_compared_with_tokenisation(tmp_path, tiny_corpus):
    words = ["speed", "--tokenizer", tiny_corpus / "tokenizer.json", "--rounds", 1]
    words += ["--source", f"text:{tiny_corpus.parent / 'text.txt'}"]
    found = report_of("bench_corpus.py", tmp_path / "report.json", *words)
    assert set(found["seconds per MB"]) == {"build, 1 worker", "build, 2 workers", "tokenisation"}
    assert found["tokens"] > 0


def test_planted_copies_are_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # for the process of phase 2
    text = tmp_path / "text.txt"
    draw = random.Random(0)
    text.write_text(" ".join(f"word{draw.randrange(5000)}" + "." * (i % 20 == 19) for i in range(60_000)))
    (run,) = report_of("bench_duplicates.py", tmp_path / "report.json", text, "--documents", 100)["runs"]
    assert float(run["recall"]) >= 0.9 and float(run["precision"]) >= 0.9


def test_simulated_copies_are_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    words = ["--simulated", 3000, "--workers", 1, "--memory-mb", 1, "--scratch", tmp_path]
    (row,) = report_of("bench_duplicates.py", tmp_path / "report.json", *words)["simulated"]
    assert float(row["recall"]) >= 0.999 and float(row["precision"]) >= 0.99 and row["documents"] == 3000
    assert row["removed"] > 250
