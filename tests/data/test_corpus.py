"""The on-disk format: the writer, the reader and TFDS agree."""

import functools
import json
import math
import operator
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading

import numpy as np
import pytest
import tensorflow_datasets as tfds
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import Config, Phase
from bert_jax.data.batch import SpecialIds
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.data.manifest import MAX_RECORD_TOKENS, token_dtype
from bert_jax.data.word_starts import LONG_SENTENCE_TOKENS
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import wordpiece
from data_prep.cli import main as data_cli
from data_prep.verify import verify_corpus
from tests import building
from tests.corpus_writer import CorpusWriter

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(vocab_size=300):
    return wordpiece(SPECIALS + [f"{'##' * (i % 3 == 1)}w{i}" for i in range(vocab_size - 5)], True, "test")


def write(directory, documents, tokenizer=None, **options):
    """`documents` are (split, list of sentences)."""
    with CorpusWriter(directory, "tiny", tokenizer or make_tokenizer(), **options) as writer:
        for split, sentences in documents:
            writer.add(split, np.concatenate(sentences), np.array([len(s) for s in sentences]), text_bytes=7)
        return writer.finish({"sources": [{"spec": "test"}]})


def random_documents(seed, count, vocab_size=300, validation_every=10):
    rng = np.random.default_rng(seed)
    return [
        (
            "validation" if i % validation_every == 0 else "train",
            [rng.integers(0, vocab_size, n) for n in rng.integers(1, 40, rng.integers(1, 30))],
        )
        for i in range(count)
    ]


def check(directory, documents):
    for split in ("train", "validation"):
        corpus = Corpus.open(directory, split)
        expected = [sentences for s, sentences in documents if s == split]
        assert corpus.num_documents == len(expected)
        for i, sentences in enumerate(expected):
            first, end = corpus.document_offsets[i : i + 2]
            np.testing.assert_array_equal(corpus.read_sentences(first, end), np.concatenate(sentences))
        assert corpus.num_tokens == corpus.sentence_lengths.sum(dtype=np.int64)
        flat = np.concatenate([sentence for sentences in expected for sentence in sentences])
        np.testing.assert_array_equal(corpus.token_counts, np.bincount(flat, minlength=corpus.vocab_size))


@pytest.fixture(scope="module")
def corpus_and_documents(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus") / "tiny"
    documents = random_documents(0, 200)
    write(directory, documents, max_shard_bytes=20_000)
    return directory, documents


def test_any_range_of_sentences(corpus_and_documents):
    directory, documents = corpus_and_documents
    corpus = Corpus.open(directory)
    flat = [s for split, sentences in documents if split == "train" for s in sentences]
    assert corpus.num_sentences == len(flat)
    rng = np.random.default_rng(1)
    for start in rng.integers(0, len(flat), 200):
        stop = int(rng.integers(start, min(len(flat), start + 60) + 1))
        tokens = corpus.read_sentences(int(start), stop)
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens, np.concatenate([np.zeros(0, np.int32), *flat[start:stop]]))
    np.testing.assert_array_equal(corpus.read_sentences(0, len(flat)), np.concatenate(flat))
    for bad in ((-1, 2), (3, 2), (0, len(flat) + 1)):
        with pytest.raises(IndexError):
            corpus.read_sentences(*bad)


def test_long_documents_and_sentences_span_records(tmp_path):
    rng = np.random.default_rng(2)
    lengths = [5, 20_001, MAX_RECORD_TOKENS, 3, 8189]
    documents = [("train", [rng.integers(0, 300, n) for n in lengths]), ("validation", [np.array([5])])]
    manifest = write(tmp_path / "c", documents)
    check(tmp_path / "c", documents)
    corpus = Corpus.open(tmp_path / "c")
    assert manifest["splits"]["train"]["records"] == 6
    assert corpus.sentence_lengths.tolist() == [5, 8192, 8192, 20_001 - 2 * 8192, 8192, 3, 8189]
    begins = ~make_tokenizer().continues_word[corpus.read_sentences(0, 7)]
    bits, byte, token = np.unpackbits(corpus.word_starts, bitorder="little"), 0, 0
    for length in corpus.sentence_lengths.astype(int):
        if length > LONG_SENTENCE_TOKENS:
            np.testing.assert_array_equal(bits[8 * byte :][:length], begins[token:][:length])
            byte += math.ceil(length / 8)
        token += length
    assert byte == len(corpus.word_starts) and 0.6 < bits.mean() < 0.72
    source = tfds.builder_from_directory(tmp_path / "c").as_data_source("train")
    assert [(int(r["document"]), int(r["part"])) for r in source] == [(0, i) for i in range(6)]
    assert verify_corpus(tmp_path / "c").startswith("intact; 16 files")


def test_large_vocabulary_needs_uint32(tmp_path):
    assert token_dtype(1 << 16) == np.uint16 and token_dtype((1 << 16) + 1) == np.uint32
    vocab_size = (1 << 16) + 1
    documents = [("train", [np.array([vocab_size - 1, 3])]), ("validation", [np.array([7])])]
    write(tmp_path / "c", documents, make_tokenizer(vocab_size))
    check(tmp_path / "c", documents)
    source = tfds.builder_from_directory(tmp_path / "c").as_data_source("train")
    assert source[0]["tokens"].dtype == np.uint32 and source[0]["tokens"][0] == vocab_size - 1


def test_tfds_opens_it(corpus_and_documents):
    directory, documents = corpus_and_documents
    builder = tfds.builder_from_directory(directory)
    assert set(builder.info.splits) == {"train", "validation"}
    assert len(list(directory.glob("*-train.array_record-*"))) > 3
    corpus = Corpus.open(directory)
    assert (corpus.name, corpus.split, corpus.vocab_size) == ("tiny", "train", 300)
    assert corpus.tokenizer_fingerprint == make_tokenizer().fingerprint
    for split in builder.info.splits:
        source = builder.as_data_source(split)
        expected = [sentences for s, sentences in documents if s == split]
        assert len(source) == len(expected)
        for i in range(0, len(source), 7):
            np.testing.assert_array_equal(source[i]["tokens"], np.concatenate(expected[i]))
            np.testing.assert_array_equal(source[i]["sentence_ends"], np.cumsum([len(s) for s in expected[i]]))
            assert source[i]["document"] == i
    assert "tensorflow" not in sys.modules


def test_identity_and_batches_do_not_depend_on_paths_or_names(tmp_path, monkeypatch):
    """The same texts under a relative path, an absolute one and in a copied directory; other text is another corpus."""
    texts, copy = tmp_path / "texts", tmp_path / "elsewhere" / "deep" / "copied texts"
    texts.mkdir()
    for index, document in enumerate(building.make_documents(0, 60)):
        (texts / f"{index}.txt").write_text(document)
    shutil.copytree(texts, copy)
    building.make_tokenizer().save(epath.Path(tmp_path / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    config = Config(name="x", phases=(Phase(steps=3, seq_len=32, batch_size=8),))

    def built(out, glob):
        fixed = ["--tokenizer", "tokenizer.json", "--workers", "1", "--validation-fraction", "0.2"]
        assert data_cli.main(["build", "--source", f"text-files:{glob}", "--out", out, *fixed]) == 0
        found = [Corpus.open(out, split) for split in ("train", "validation")]
        stream = TrainingStream(found[:1], [1.0], config, SpecialIds(0, 2, 3))
        return found, stream.rows_at(stream.normalize_cursor(Cursor()))

    first, batch = built("one", "./texts/*.txt")
    for out, glob in (("two", f"{texts}/*.txt"), ("three", f"{copy}/*.txt")):
        found, same = built(out, glob)
        assert [corpus.name for corpus in found] == [out, out]
        assert {corpus.identity for corpus in found} == {corpus.identity for corpus in first}
        assert batch.keys() == same.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], same[name])
    (texts / "0.txt").write_text("A river sings over the stone.")
    found, other = built("four", "texts/*.txt")
    assert found[0].identity != first[0].identity and (other["example_id"] != batch["example_id"]).any()


def test_pickle_and_threads(corpus_and_documents):
    directory, _ = corpus_and_documents
    corpus = Corpus.open(directory)
    whole = corpus.read_sentences(0, corpus.num_sentences)
    raw = pickle.dumps(corpus)
    assert len(raw) < 1000, "arrays must be opened again, not copied"
    copy = pickle.loads(raw)
    failures = []

    def read(seed):
        rng = np.random.default_rng(seed)
        starts = np.concatenate([[0], np.cumsum(corpus.sentence_lengths, dtype=np.int64)])
        for first in rng.integers(0, corpus.num_sentences - 5, 100):
            expected = whole[starts[first] : starts[first + 5]]
            if not np.array_equal(copy.read_sentences(int(first), int(first) + 5), expected):
                failures.append(first)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["train", "validation"]),
            st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=50), min_size=1, max_size=8),
        ),
        max_size=12,
    ).filter(lambda documents: len({split for split, _ in documents}) == 2),
    st.integers(100, 2000),
)
def test_round_trip_property(documents, max_shard_bytes):
    with tempfile.TemporaryDirectory() as scratch:
        write(f"{scratch}/c", documents, max_shard_bytes=max_shard_bytes)
        check(f"{scratch}/c", documents)
        verify_corpus(f"{scratch}/c")


DROP = object()


def set_in(*path_and_value):
    """Puts a value at a path of corpus.json, or removes what is there."""
    *path, last, value = path_and_value

    def change(directory):
        manifest = json.loads((directory / "corpus.json").read_text())
        inner = functools.reduce(operator.getitem, path, manifest)
        if value is DROP:
            inner.pop(last)
        else:
            inner[last] = value
        (directory / "corpus.json").write_text(json.dumps(manifest))

    return change


def change_header(old, new):
    """Replaces a text in the header of an array by one of the same length."""

    def change(directory):
        path = directory / "train.sentence_lengths.npy"
        path.write_bytes(path.read_bytes().replace(old.encode(), new.encode().ljust(len(old)), 1))

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "corpus.json").unlink(), "not a finished corpus"),
        (lambda d: (d / "corpus.json").write_text("{"), "corpus.json is not JSON"),
        (set_in("name", DROP), "field 'name' is missing: build the corpus again"),
        (set_in("splits", "train", "tokens", 10**13), "counts 10{13} tokens in train, but train.token_counts.npy"),
        *(
            (set_in("splits", "train", "groups", 0, "tokens", tokens), r"splits\.train\.groups contradicts its other")
            for tokens in (0, 10**13)
        ),
        (set_in("splits", "train", "shards", 0, "records", 10**30), r"shards\.0\.records is 10+: it must be a whole"),
        (set_in("format_version", 99), "format version 99, .*: update bert_jax"),
        (set_in("format_version", 1), "format version 1, .*: build the corpus again"),
        *(
            (
                set_in("files", "tokenizer.json", "sha256", sha256),
                r"sha256 is .*: it must be a string that is a SHA-256",
            )
            for sha256 in ("../" * 20 + "etc/hosts", "/etc/hosts", "A" * 64, "a" * 64 + "\n", 7)
        ),
        *(
            (set_in("splits", "train", "shards", 0, "file", name), "it must be a string that is the name of a file")
            for name in ("../other", "/etc/hosts", "..", "a\x00b", "a\\b")
        ),
        (set_in("files", "../other", {"sha256": "a" * 64, "bytes": 1}), r"files has the key '\.\./other': it must be"),
        (set_in("name", "../other"), "name is '../other': it must be"),
        (set_in("splits", "train", DROP), "no split 'train'; it has validation"),
        (set_in("splits", "train", "records", 17), "record_offsets.npy: contradicts"),
        (set_in("splits", "train", "shards", 0, DROP), "shards hold"),
        (shutil.rmtree, "no such corpus"),
        (lambda d: (d / "train.sentence_lengths.npy").unlink(), "sentence_lengths.npy: missing"),
        (lambda d: (d / "train.sentence_lengths.npy").write_bytes(b"no"), "sentence_lengths.npy: damaged"),
        (change_header("False", "(alse"), "sentence_lengths.npy: damaged"),
        (change_header("False", "\x04alse"), "sentence_lengths.npy: damaged"),
        (lambda d: np.save(d / "train.sentence_lengths.npy", np.zeros(3, np.uint16)), "contradicts"),
        (lambda d: np.save(d / "train.word_starts.npy", np.zeros(3, np.uint8)), r"word_starts\.npy: contradicts"),
        (set_in("files", "train.word_starts.npy", DROP), r"lacks 'train\.word_starts\.npy'; rebuild the corpus"),
        (set_in("splits", "train", "word_start_bytes", DROP), "word_start_bytes.*: build the corpus again"),
    ],
)
def test_open_names_what_is_wrong(tmp_path, spoil, message):
    write(tmp_path / "c", random_documents(4, 20))
    spoil(tmp_path / "c")
    with pytest.raises(UserError, match=message):
        Corpus.open(tmp_path / "c")


def test_shards_that_are_missing_or_exchanged(tmp_path):
    write(tmp_path / "c", random_documents(5, 60), max_shard_bytes=10_000)
    shards = sorted((tmp_path / "c").glob("*-train.array_record-*"))
    last = shards[-1].read_bytes()
    shards[-1].unlink()
    with pytest.raises(UserError, match="missing"):
        Corpus.open(tmp_path / "c").read_sentences(0, Corpus.open(tmp_path / "c").num_sentences)
    shards[-1].write_bytes(last)
    shards[0].write_bytes(last)
    with pytest.raises(UserError, match=r"where corpus\.json lists"):
        Corpus.open(tmp_path / "c").read_sentences(0, 1)


def test_a_record_that_contradicts_the_lengths(tmp_path):
    write(tmp_path / "c", random_documents(4, 20))
    lengths = np.load(tmp_path / "c" / "train.sentence_lengths.npy")
    lengths[0] += 1
    np.save(tmp_path / "c" / "train.sentence_lengths.npy", lengths)
    with pytest.raises(UserError, match=r"record 0, document 0 .* contradicts train\.sentence_lengths"):
        Corpus.open(tmp_path / "c").read_sentences(0, 1)


@pytest.mark.slow
def test_no_flipped_bit_is_read_as_something_else(tmp_path):
    write(tmp_path / "c", random_documents(6, 12))
    corpus = Corpus.open(tmp_path / "c")
    expected = corpus.read_sentences(0, corpus.num_sentences)
    (shard,) = (tmp_path / "c").glob("*-train.array_record-*")
    intact = shard.read_bytes()
    used = [i for i, byte in enumerate(intact) if byte]
    refused = 0
    for position in used[:: len(used) // 60]:
        shard.write_bytes(intact[:position] + bytes([intact[position] ^ 4]) + intact[position + 1 :])
        try:
            tokens = Corpus.open(tmp_path / "c").read_sentences(0, corpus.num_sentences)
        except UserError as error:
            assert str(shard) in str(error) and "\n" not in str(error)
            refused += 1
        else:
            np.testing.assert_array_equal(tokens, expected)
    assert refused > 40


@pytest.mark.slow
def test_works_where_jax_is_absent(corpus_and_documents):
    script = """
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("jax", "jaxlib", "flax"):
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, Block())
        import data_prep.cli.main
        from bert_jax.data.corpus import Corpus

        corpus = Corpus.open(sys.argv[1])
        assert len(corpus.read_sentences(0, 3)) == corpus.sentence_lengths[:3].sum()
        sys.exit(data_prep.cli.main.main(["verify", sys.argv[1]]))
    """
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(corpus_and_documents[0])], check=True, cwd=root)
