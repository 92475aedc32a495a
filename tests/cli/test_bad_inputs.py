"""Invalid corpora and configs: a one-line error before the first step, exit code 2, no file written."""

import json
import re
import shutil

import numpy as np
import pytest
from array_record.python import array_record_module

from bert_jax.cli import main as cli
from bert_jax.config import to_dict
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.sources.files import file_entry
from tests.corpus_writer import CorpusWriter

REPORT = {"dropped": {}, "cleaned": {}, "skipped": {}, "settings": {}, "sources": []}


@pytest.fixture
def here(tmp_path, monkeypatch, tiny_corpus, tiny_config):
    """A directory with a config file and a corpus to spoil."""
    monkeypatch.chdir(tmp_path)
    text = repr(json.dumps(to_dict(tiny_config)))
    config = (
        f"import json\nfrom bert_jax.config import from_dict\ndef config():\n    return from_dict(json.loads({text}))\n"
    )
    (tmp_path / "tiny.py").write_text(config)
    shutil.copytree(tiny_corpus, tmp_path / "corpus")
    return tmp_path


def refused(here, capfd, arguments) -> str:
    """The error line of `bert-jax pretrain`, which must not change any file."""
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    assert cli.main(["pretrain", "tiny.py", "--workdir", "new", *arguments]) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and captured.out == "" and len(line) < 400
    assert not re.search(r"[│╭╰─\x1b]|  ", line)
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before
    return line


FLAGS = {
    # name: (flags, words of the error line)
    "rows shorter than an example": (["--phases.0.seq-len", "7"], ["seq_len is 7", "in [8, 1e6]"]),
    "no token masked": (["--objective.mask-rate", "0.01"], ["mask_rate 0.01 rounds to no token", "at least 0.031"]),
    "no pairs in the format": (["--data.format", "full_sentences"], ["'nsp' needs data.format segment_pair", "none"]),
    "pairs of another kind": (["--data.format", "sentence_order"], ["'nsp' needs data.format segment_pair or sent"]),
    "order of segments": (["--objective.pair", "sop"], ["'sop' needs data.format sentence_order, not 'segment_pair'"]),
    "no order in the format": (
        ["--objective.pair", "sop", "--data.format", "doc_sentences"],
        ["'sop' needs data.format sentence_order, not 'doc_sentences'"],
    ),
    "pairs left to right": (["--model.direction", "causal"], ["cannot learn pairs: set objective.pair none"]),
    "no such format": (["--data.format", "nsp"], ["--data.format", "segment_pair"]),
    "exponent above 1": (["--data.mixture-exponent", "7"], ["data.mixture_exponent is 7", "[0, 1]"]),
    "weight in words": (["--corpus", "corpus=much"], ["--corpus corpus=much", "'much' is not a weight", "books=0.3"]),
    "weight below 0": (["--corpus", "corpus=-1"], ["'-1' is not a weight: write a positive number"]),
    "weight nan": (["--corpus", "corpus=nan"], ["'nan' is not a weight"]),
    "weight infinite": (["--corpus", "corpus=inf"], ["'inf' is not a weight"]),
    "no weight behind the sign": (["--corpus", "corpus="], ["'' is not a weight"]),
    "the same corpus twice": (["--corpus", "corpus", "--corpus", "./corpus"], ["is given twice"]),
    "two corpora of one name": (["--corpus", "corpus", "--corpus", "other"], ["both named 'corpus'", "--name"]),
    "some weights": (["--corpus", "corpus=2", "--corpus", "named"], ["has no weight", "give all of them a weight"]),
    "a share too small": (
        ["--corpus", "corpus=1", "--corpus", "named=99999"],
        ["rounded to 0 of 10,000", "give it more"],
    ),
    "two tokenizers": (["--corpus", "corpus", "--corpus", "foreign"], ["different tokenizers", "--tokenizer"]),
    "one corpus is missing": (["--corpus", "corpus", "--corpus", "nowhere"], ["nowhere: no such corpus", "bert-data"]),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags(here, capfd, second_corpus, other_corpus, name):
    flags, words = FLAGS[name]
    sources = {"named": second_corpus, "foreign": other_corpus, "other": other_corpus}
    for copy, source in sources.items() if len(flags) == 4 else ():
        shutil.copytree(source, here / copy)
        manifest = json.loads((source / "corpus.json").read_text())
        if copy != "other":
            (here / copy / "corpus.json").write_text(json.dumps(manifest | {"name": copy}))
    line = refused(here, capfd, flags if "--corpus" in flags else [*flags, "--corpus", "corpus"])
    for word in words:
        assert word in line, line


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    "form",
    [
        ["--data.format", "segment_pair"],
        ["--data.format", "sentence_pair"],
        ["--data.format", "sentence_order", "--objective.pair", "sop"],
        ["--data.format", "segment_pair", "--objective.pair", "none"],
    ],
)
def test_fewer_documents_than_pairs_need(here, capfd, split, form):
    """One document; `bert-data build` makes no empty split."""
    tokenizer, other = Tokenizer.load(here / "corpus"), "validation" if split == "train" else "train"
    with CorpusWriter(here / "few", "few", tokenizer) as writer:
        for which in [split] + [other] * 5:
            writer.add(which, np.arange(5, 15), np.array([5, 5]), text_bytes=9)
        writer.finish(REPORT)
    line = refused(here, capfd, ["--corpus", "few", *form])
    assert f"corpus few: split '{split}' has 1 document(s), but " in line and "needs at least 2" in line


def shard(here, split="train"):
    (path,) = (here / "corpus").glob(f"corpus-{split}.array_record-*")
    return path


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards(here, capfd, split):
    path = shard(here, split)
    content, where, remedy = path.read_bytes(), f"corpus/{path.name}: ", "; copy the corpus again or rebuild it"
    arguments = ["--corpus", "corpus"]
    damage(path)
    line = refused(here, capfd, arguments)
    assert line == f"error: {where}damaged, its SHA-256 is not the recorded one{remedy}"
    path.write_bytes(content[:-100])
    for verify in ("checksums", "counts"):
        line = refused(here, capfd, [*arguments, "--data.verify", verify])
        assert f"{where}damaged, it has {len(content) - 100} bytes where corpus.json lists {len(content)}" in line
    path.unlink()
    for verify in ("checksums", "counts"):
        assert refused(here, capfd, [*arguments, "--data.verify", verify]).startswith(f"error: {where}missing")


@pytest.mark.parametrize("verify", ["checksums", "counts"])
def test_a_shard_with_another_number_of_records(here, capfd, verify):
    path = shard(here)
    reader = array_record_module.ArrayRecordReader(str(path))
    records = reader.read_all()
    reader.close()
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records[1:]:
        writer.write(record)
    writer.close()
    manifest = json.loads((here / "corpus" / "corpus.json").read_text())
    manifest["files"][path.name] = file_entry(path)
    (here / "corpus" / "corpus.json").write_text(json.dumps(manifest))
    line = refused(here, capfd, ["--corpus", "corpus", "--data.verify", verify])
    assert f"{path.name}: holds {len(records) - 1} records where corpus.json lists {len(records)}; copy the" in line


@pytest.mark.parametrize("name", ["train.sentence_lengths.npy", "validation.document_offsets.npy", "features.json"])
def test_other_files(here, capfd, name):
    damage(here / "corpus" / name)
    line = refused(here, capfd, ["--corpus", "corpus"])
    assert f"corpus/{name}: " in line and "rebuild it" in line


def test_a_vocabulary_that_changed_under_the_corpus(here, capfd, other_corpus):
    shutil.copy(other_corpus / "tokenizer.json", here / "corpus" / "tokenizer.json")
    line = refused(here, capfd, ["--corpus", "corpus"])
    assert "corpus/tokenizer.json is not the tokenizer that the corpus was built with" in line
    assert "copy the corpus again or rebuild it" in line


def test_a_vocabulary_of_the_same_words_in_another_order(here, capfd):
    """Same size, same words: only the ids differ."""
    path = here / "corpus" / "tokenizer.json"
    values = json.loads(path.read_text())
    words = values["model"]["vocab"]
    (one, first), (two, second) = list(words.items())[-2:]
    words[one], words[two] = second, first
    path.write_text(json.dumps(values))
    assert "is not the tokenizer" in refused(here, capfd, ["--corpus", "corpus"])


def test_valid_inputs_are_accepted(here, monkeypatch):
    """The errors above have the named cause: without the damage, training starts."""
    from bert_jax.training import loop

    begun = []
    monkeypatch.setattr(
        loop, "train", lambda task, *more, **options: begun.append(task) or (_ for _ in ()).throw(SystemExit(9))
    )
    assert cli.main(["pretrain", "tiny.py", "--workdir", "new", "--corpus", "corpus"]) == 9
    assert begun and (here / "new" / "config.json").exists()
