"""scripts/benchmarks/bench_start.py on a small corpus. Nothing is timed."""

import json
from pathlib import Path

import numpy as np

from bert_jax.data.corpus import Corpus
from tests.pages import load_script


def test_a_corpus_is_written_and_a_run_starts(tmp_path, monkeypatch):
    bench = load_script(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "bench_start.py")
    monkeypatch.setattr(bench, "SHARD_DOCUMENTS", 200)
    shared, report = ["--directory", f"{tmp_path}/corpus"], tmp_path / "report.json"
    assert not bench.main(["write", *shared, "--documents", "600"])
    corpus = Corpus.open(tmp_path / "corpus")
    assert corpus.num_documents == len(corpus.record_offsets) - 1 == 600
    records = corpus.records([0, 200, 599])
    assert [len(record.sentence_ends) for record in records] == np.diff(corpus.record_offsets)[[0, 200, 599]].tolist()
    start = ["start", *shared, "--processes", "1,4", "--batch-size", "8", "--json", f"{report}"]
    assert not bench.main(start)
    rows = json.loads(report.read_text())["start"]
    assert [row["processes"] for row in rows] == [1, 4] and all(row["all MB"] > 0 for row in rows)
