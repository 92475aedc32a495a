"""`bert-data inspect`: every figure against a plain count, and the three forms it is shown in."""

import itertools
import json
import re
import shlex
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax import provenance
from bert_jax.cli import main as bert_jax_main
from bert_jax.command.flags import parse
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import open_corpora, parse_corpus_weight
from bert_jax.errors import UserError
from bert_jax.report import Bars, Bin, Histogram, Section, html, text
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, wordpiece
from data_prep.cli.inspect_corpus import Inspect
from data_prep.inspection import corpus_statistics, report
from data_prep.inspection.corpus_statistics import measure_corpus
from tests.corpus_writer import CorpusWriter

PIECES = ["the", "<b>", "rain", "##s", "&", *(f"word{i}" for i in range(20)), "never1", "never2"]
REPORT = {
    "dropped": {
        "empty_documents": {"documents": 3},
        "repeated_lines": {"lines": 7, "text_bytes": 500},
        "near_duplicates": {"documents": 2, "text_bytes": 1500},
    },
    "cleaned": {"control_characters": 14, "normalized_documents": 5},
    "skipped": {"malformed_json": {"count": 12, "bytes": 790, "first": ["a.jsonl:3: <script>", "a.jsonl:8: no colon"]}},
    "settings": {
        "validation_fraction": 0.1,
        "near_duplicates": {"threshold": 0.8, "shingles": [5]},
        "wide": None,
        "fast": True,
    },
    "sources": [{"spec": "jsonl:a.jsonl", "encodings": {"utf-8": 1}, "documents": 80, "text_bytes": 43210, "files": 1}],
}


def make_corpus(directory, seed, documents, changes=(), name="sample"):
    rng = np.random.default_rng(seed)
    tokenizer = wordpiece([*SPECIAL_TOKENS, *PIECES, *changes], lowercase=True, origin="test")
    with CorpusWriter(directory, name, tokenizer) as writer:
        for document in range(documents):
            lengths = rng.integers(1, 40, rng.integers(1, 9))
            if document == 7:
                lengths = np.array([700, 3])
            tokens = 5 + rng.integers(0, 25, lengths.sum())
            tokens[-1] = tokenizer.unk_id
            writer.add("validation" if document % 10 == 9 else "train", tokens, lengths, int(lengths.sum()) * 5)
        writer.finish(REPORT)
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("inspection") / "sample", 0, 80)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("inspection") / "sm all", 1, 20, name="small")


def inspect(*arguments):
    parse(Inspect, list(map(str, arguments)), "bert-data inspect").run()


def as_json(capsys, *arguments):
    inspect(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def lengths_of(directory, split):
    opened = Corpus.open(directory, split)
    offsets = opened.document_offsets
    documents = [int(opened.sentence_lengths[a:b].sum()) for a, b in itertools.pairwise(offsets)]
    return opened.sentence_lengths.tolist(), documents


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_summaries_are_exact(values):
    summary = corpus_statistics.summarize_lengths(Counter(values))
    assert summary["mean"] == pytest.approx(np.mean(values))
    for share, quantile in summary["quantiles"].items():
        assert quantile == np.quantile(values, float(share), method="inverted_cdf")
    bins = [Bin(*one.values()) for one in summary["bins"]]
    for before, after in itertools.pairwise(bins):
        assert after.first == before.last + 1
    for one in bins:
        inside = [value for value in values if one.first <= value <= one.last]
        assert (one.count, one.total) == (len(inside), sum(inside)) and one.last < 2 * one.first + 1
    assert sum(one.count for one in bins) == len(values) and bins[0].count and bins[-1].count


def test_lengths_of_a_corpus(corpus, monkeypatch):
    whole = measure_corpus(corpus)
    for split in ("train", "validation"):
        sentences, documents = lengths_of(corpus, split)
        for key, values in (("sentence_tokens", sentences), ("document_tokens", documents)):
            assert whole["splits"][split][key] == corpus_statistics.summarize_lengths(Counter(values))
    monkeypatch.setattr(corpus_statistics, "_BLOCK_DOCUMENTS", 7)
    assert measure_corpus(corpus) == whole


def test_json_says_what_corpus_json_says(corpus, capsys):
    found = as_json(capsys, corpus)
    (one,) = found["corpora"]
    assert found["mixture"] is None
    assert one["disk_bytes"] == sum(path.stat().st_size for path in corpus.iterdir())
    tokens = [one["splits"][split]["tokens"] for split in ("train", "validation")]
    assert tokens == [sum(lengths_of(corpus, split)[0]) for split in ("train", "validation")]
    assert one["disk_bytes_per_token"] == one["disk_bytes"] / sum(tokens)
    train = one["splits"]["train"]
    assert train["text_bytes_per_token"] == 5
    assert train["documents"] == train["unknown_tokens"] == 72
    assert train["unknown_rate"] == 72 / train["tokens"]
    assert {key: one[key] for key in REPORT} == REPORT
    assert [bins["first"] for bins in train["sentence_tokens"]["bins"]][:3] == [1, 2, 3]
    rows = {measured["seq_len"]: measured for measured in one["rows"]}
    assert rows[128]["unpacked_efficiency"] < rows[128]["packing_efficiency"] <= 1
    assert 0.5 <= rows[512]["random_pairs"] <= rows[128]["random_pairs"] + 0.1 < 1
    assert 0.7 < rows[128]["coverage"] < rows[512]["coverage"] <= 1


def test_pieces(corpus, capsys):
    (one,) = as_json(capsys, corpus)["corpora"]
    pieces, counts = one["pieces"], Corpus.open(corpus).token_counts
    assert pieces["total"] == len(PIECES)
    assert pieces["never_used"] == 2 and pieces["never_used_share"] == 2 / len(PIECES)
    assert sum(pieces["by_times_used"].values()) == len(PIECES) - 2
    assert {entry["piece"]: entry["count"] for entry in pieces["most_frequent"]} == {
        "[UNK]": 72,
        **{piece: counts[5 + i] for i, piece in enumerate(PIECES[:25])},
    }
    frequencies = [entry["count"] for entry in pieces["most_frequent"]]
    assert frequencies == sorted(frequencies, reverse=True)


def test_samples_are_the_beginnings_of_documents(corpus, capsys):
    (one,) = as_json(capsys, corpus)["corpora"]
    assert [sample["document"] for sample in one["samples"]] == [0, 18, 36, 53, 71]
    _, documents = lengths_of(corpus, "train")
    opened = Corpus.open(corpus)
    for sample in one["samples"]:
        document = sample["document"]
        assert sample["tokens"] == documents[document]
        assert sample["cut"] == (documents[document] > 96)
        first = opened.document_offsets[document]
        ids = opened.read_sentences(int(first), int(first) + 1)
        words = [(*SPECIAL_TOKENS, *PIECES)[i] for i in ids]
        assert sample["sentences"][0] == " ".join(words).replace(" ##", "")


def test_a_sample_of_a_very_long_sentence_is_cut(tmp_path, corpus):
    tokenizer = wordpiece([*SPECIAL_TOKENS, *PIECES], lowercase=True, origin="test")
    with CorpusWriter(tmp_path / "c", "c", tokenizer) as writer:
        for split in ("train", "validation"):
            writer.add(split, np.full(9000, 5), np.array([9000]), 9000)
        writer.finish(REPORT)
    (sample,) = measure_corpus(tmp_path / "c")["samples"]
    assert sample == {"document": 0, "tokens": 9000, "sentences": [" ".join(["the"] * 96)], "cut": True}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cleaned", {"control_characters": None}, r"cleaned\.control_characters is None: it must be a whole number"),
        ("skipped", {"malformed_json": {"count": 1, "bytes": 1}}, r"field 'skipped\.malformed_json\.first' is missing"),
        ("sources", [{"spec": 5}], r"field 'sources\.0\.encodings' is missing"),
    ],
)
def test_a_damaged_report(tmp_path, small, name, value, message):
    for path in small.iterdir():
        (tmp_path / path.name).symlink_to(path)
    manifest = json.loads((small / "corpus.json").read_text())
    (tmp_path / "corpus.json").unlink()
    (tmp_path / "corpus.json").write_text(json.dumps(manifest | {name: value}))
    with pytest.raises(UserError, match=message):
        measure_corpus(tmp_path)


def test_terminal(corpus, capsys):
    inspect(corpus)
    lines = capsys.readouterr().out.splitlines()
    squeezed = [re.sub(" +", " ", line) for line in lines]
    for expected in (
        "documents 72 8",
        "bytes of text per token 5.00 5.00",
        "empty documents 3 documents",
        "control characters 14",
        "malformed json 12 790 B 1.80%",
        "malformed json a.jsonl:8: no colon",
        "document 18, ",
        "validation fraction 0.1",
        "near duplicates: shingles [5]",
        "wide none",
        "fast yes",
        "jsonl:a.jsonl not stated utf-8 (1) 80 43.21 kB 1",
    ):
        assert any(line.startswith(expected) for line in squeezed), expected
    text_bytes = sum(Corpus.open(corpus, split).num_tokens for split in ("train", "validation")) * 5 + 2000
    assert f"near duplicates 2 documents 1.50 kB {1500 / text_bytes:.2%}" in squeezed
    assert any(re.match(r"128, packed +\d+\.\d\d%  █+", line) for line in lines)
    assert "2 of 27 pieces (7.4%) never occur" in " ".join(squeezed)
    assert not any(line.endswith(" ") for line in lines)


def test_bars_are_as_long_as_what_they_show():
    bins = (Bin(1, 1, 40, 40), Bin(2, 2, 20, 40), Bin(3, 3, 1, 3))
    drawn = text.render([Section("s", (Histogram("t", "things", "tokens", bins),))])
    bars = [line.rpartition("  ")[2] for line in drawn.splitlines()[-3:]]
    assert bars == ["█" * 40, "█" * 20, "█"]
    for whole, lengths in ((True, ["█" * 20, "▏"]), (False, ["█" * 40, "▏"])):
        section = Section("s", (Bars(("a", "b"), (0.5, 0.0001), whole),))
        assert [line.rpartition("  ")[2] for line in text.render([section]).splitlines()[-2:]] == lengths
        widths = [float(width) for width in re.findall(r'width:([\d.]+)%"', html.render([section]))]
        assert widths == [50 if whole else 100, 0]


def test_what_a_build_prints(corpus):
    manifest = json.loads((corpus / "corpus.json").read_text())
    printed = text.render(report.summary_sections(manifest))
    assert printed.startswith("sample\n======\n") and "repeated lines" in printed and "tokens in" not in printed
    printed = text.render(report.summary_sections(manifest | {"dropped": {}, "cleaned": {}, "skipped": {}}))
    assert "Nothing was filtered or cleaned." in printed and "Nothing was skipped while reading." in printed


def test_page(corpus, small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(provenance, "current_date", lambda: "2026-11-28T00:00:00+00:00")
    inspect(corpus, small, "--html", tmp_path / "page.html")
    inspect(corpus, small, "--json", "--html", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    printed = capsys.readouterr().out
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    tags = re.findall(r"<([a-z]\w*)", content)
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    assert "http" not in content and "url(" not in content and "@import" not in content
    assert tags.count("svg") == 4  # two histograms for each corpus
    assert "a.jsonl:3: &lt;script&gt;" in content and "&lt;b&gt;" in content and "&amp;" in content
    titles = re.findall(r"<h[12]>(.*?)</h[12]>", content)
    values = json.loads("{" + printed.partition("\n{")[2])
    made_by = values["provenance"]["hashes"]
    assert made_by == {str(one): Corpus.open(one).identity for one in (corpus, small)}
    assert all(f"SHA-256 of {one}" in content and identity in content for one, identity in made_by.items())
    shown = re.findall(r"^(.+)\n[=-]+$", printed.partition("\n{\n")[0], re.MULTILINE)
    assert titles == [*shown, "provenance"]
    numbers = [float(number) for number in re.findall(r'"(-?\d+\.\d+)"', content)]
    assert min(numbers) >= 0 and max(numbers) <= 640


def test_columns_of_the_plot_are_proportional(corpus, tmp_path):
    inspect(corpus, "--html", tmp_path / "page.html")
    plot = (tmp_path / "page.html").read_text(encoding="utf-8").split("<svg")[1]
    heights = [float(h) for h in re.findall(r'height="([\d.]+)"><title>', plot)]
    shares = [float(s) for s in re.findall(r"sentences \(([\d.]+)%\)", plot)]
    assert len(heights) == len(shares) > 8 and sum(shares) == pytest.approx(100, abs=0.1)
    np.testing.assert_allclose(np.array(heights) / max(heights), np.array(shares) / max(shares), atol=0.005)


def test_weights_for_several_corpora(corpus, small, capsys):
    found = as_json(capsys, corpus, small)
    tokens = np.array([one["splits"]["train"]["tokens"] for one in found["corpora"]])
    shares = tokens / tokens.sum()
    expected = shares**0.7 / (shares**0.7).sum()
    mixture = found["mixture"]
    assert mixture["sampling_exponent"] == 0.7 and mixture["obstacle"] is None
    assert [part["directory"] for part in mixture["corpora"]] == [str(corpus), str(small)]
    np.testing.assert_allclose([part["share"] for part in mixture["corpora"]], shares)
    np.testing.assert_allclose([part["weight"] for part in mixture["corpora"]], expected)
    np.testing.assert_allclose([part["repeats"] for part in mixture["corpora"]], expected / shares)
    inspect(corpus, small)
    weights = f"--corpus {corpus}={expected[0]:.4g} --corpus '{small}={expected[1]:.4g}'"
    (command,) = re.findall("    bert-jax pretrain (.*)\n", capsys.readouterr().out)
    assert weights in command
    parsed = bert_jax_main.parse("pretrain", shlex.split(command))
    assert parsed.workdir
    assert {one.name for one in open_corpora([parse_corpus_weight(one) for one in parsed.corpus])[1]} == {
        "sample",
        "small",
    }
    inspect(corpus, small, "--sampling-exponent", "0")
    assert f"--corpus {corpus}=0.5" in capsys.readouterr().out


def test_corpora_that_cannot_be_trained_on_together(corpus, tmp_path, capsys):
    make_corpus(tmp_path / "other", 2, 20, changes=["more"], name="other")
    make_corpus(tmp_path / "namesake", 2, 20)
    for other, message in (("other", "different tokenizers"), ("namesake", "have the same name, sample")):
        inspect(corpus, tmp_path / other)
        printed = capsys.readouterr().out
        assert message in printed and "--corpus" not in printed


def test_warnings():
    """Texts without a blank line within documents get no advice that they follow already."""
    short = corpus_statistics.summarize_lengths({60: 10})
    rows = [{"seq_len": 128, "coverage": 0.41, "random_pairs": 0.75}, {"seq_len": 512, "coverage": 0.9}]
    for spec, advised in {
        "text:*.txt": True,
        "lines:*.txt": True,
        "text-files:*.txt": False,
        "jsonl:x@y": False,
    }.items():
        warning = report.short_documents_warning({"document_tokens": short}, rows, [spec])
        assert ("use text-files" in warning) == advised and "75% of next-sentence pairs are random" in warning
    assert "rows of 128 cover 41.0% of the tokens" in report.coverage_warning(rows)
    assert "--phases.0.seq-len above 128" in report.coverage_warning(rows)
    assert report.coverage_warning(rows[1:]) is None
    assert "41.0% in rows of 128 and 90.0% in rows of 512" in report.coverage_line(rows)


def test_pages_that_cannot_be_written(corpus, tmp_path, capsys):
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        inspect(corpus, "--html", page)
    assert page.read_text() == "mine"
    with pytest.raises(UserError, match="there is no directory"):
        inspect(corpus, "--html", tmp_path / "absent" / "page.html")
    with pytest.raises(UserError, match=r"cannot be written .File name too long"):
        inspect(corpus, "--html", tmp_path / ("x" * 253 + ".html"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("array", "place", "value"),
    [
        ("document_offsets", 0, -1),
        ("document_offsets", 2, 1),
        ("document_offsets", 3, 2**60),
        ("sentence_lengths", 3, 0),
    ],
)
def test_damaged_arrays_are_an_error_not_a_crash(tmp_path, monkeypatch, array, place, value):
    """A block has three documents, so offset 3 is the end of one."""
    monkeypatch.setattr(corpus_statistics, "_BLOCK_DOCUMENTS", 3)
    directory = make_corpus(tmp_path / "c", 0, 20)
    values = np.load(directory / f"train.{array}.npy")
    values[place] = value
    np.save(directory / f"train.{array}.npy", values)
    with pytest.raises(UserError, match="arrays of train are damaged; `bert-data verify`"):
        measure_corpus(directory)
