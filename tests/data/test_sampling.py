"""Documents by source, language and score: each as often as its weight says, and nothing else of the stream changes."""

import itertools

import numpy as np
import pytest

from bert_jax.config import Config, DataConfig, Phase
from bert_jax.data import epoch_plan as plan_module
from bert_jax.data.batches import TrainingStream
from bert_jax.data.cursor import Cursor
from bert_jax.data.epoch_plan import EpochPlanner
from bert_jax.data.sampling import DocumentSampling, document_sampling, group_shares
from bert_jax.errors import UserError
from tests.data.memory import FIRST, FORMATS, SPECIAL_IDS, make_corpus, random_documents

DOCUMENTS = 400
EPOCHS = 8


@pytest.fixture(scope="module")
def corpus():
    return make_corpus(random_documents(1, DOCUMENTS, longest=12), languages=["en"] * 8 + ["de", "is"])


def group_of(corpus, document):
    return corpus.groups[corpus.document_groups[document]]


def documents_of(corpus, tokens):
    """The documents of token ids of text."""
    sentences = np.searchsorted(corpus.token_offsets, tokens - FIRST, "right") - 1
    return np.searchsorted(corpus.document_offsets, sentences, "right") - 1


def own_tokens(corpus, window):
    """The tokens of the documents of a window that are in its examples, without random segments, and those of these."""
    own, random = [], []
    lengths, offsets = corpus.sentence_lengths, corpus.token_offsets
    starts = np.concatenate(
        [np.arange(offsets[a], offsets[b]) for a, b in corpus.record_offsets[window.chunks]] or [[]]
    )
    for example, segment in itertools.product(window.examples, "ab"):
        size, offset = example[f"{segment}_tokens"], example[f"{segment}_offset"]
        if size and offset >= 0:
            own.append(starts[offset : offset + size])
        elif size:
            begin = offsets[example["b_start"]] + example["b_skip"]
            random.append(np.arange(begin, begin + size))
    assert lengths.sum() == offsets[-1]
    return [np.concatenate(each or [np.zeros(0)]).astype(np.int64) for each in (own, random)]


@pytest.mark.parametrize("form", FORMATS)
def test_documents_are_in_the_epochs_that_their_weights_say(corpus, form, monkeypatch):
    """Against a loop over documents; the windows are small, and some are empty."""
    monkeypatch.setattr(plan_module, "CHUNK_TOKENS", 60)
    monkeypatch.setattr(plan_module, "WINDOW_CHUNKS", 1)
    weights = {"en": 0.25, "is": 0.0}
    data = DataConfig(format=form, language_weights=tuple(weights.items()))
    plan = EpochPlanner(corpus, data, 32, seed=3)
    assert plan.windows < len(plan._bounds) / 2
    sampling = document_sampling(corpus, data, 3)
    count, sizes = np.zeros(DOCUMENTS, np.int64), []
    for epoch in range(EPOCHS):
        windows = [plan.window(epoch, index) for index in range(plan.windows)]
        own, random = (
            np.concatenate(each) for each in zip(*(own_tokens(corpus, window) for window in windows), strict=True)
        )
        found = np.unique(documents_of(corpus, own + FIRST))
        expected = np.flatnonzero(sampling.is_chosen(np.arange(DOCUMENTS), epoch))
        assert found.tolist() == expected.tolist()
        count[found] += 1
        assert len(own) == len(np.unique(own))
        every = [np.arange(*corpus.token_offsets[corpus.document_offsets[d : d + 2]]) for d in expected]
        truncated = sum(window.truncated_tokens for window in windows)
        assert len(own) + truncated == sum(map(len, every)) and set(own) <= set(np.concatenate(every))
        drawn = [group_of(corpus, d)["language"] for d in documents_of(corpus, random + FIRST)]
        assert "is" not in drawn and (not data.paired or {"en", "de"} == {*drawn})
        sizes += map(len, windows)
    assert 0 in sizes
    for document in range(DOCUMENTS):
        assert count[document] == EPOCHS * weights.get(group_of(corpus, document)["language"], 1.0)
    first = sampling.is_chosen(np.arange(DOCUMENTS), 0)
    assert first.tolist() != document_sampling(corpus, data, 4).is_chosen(np.arange(DOCUMENTS), 0).tolist()


def test_a_window_has_a_bounded_number_of_chunks(corpus, monkeypatch):
    """So that the time to plan it is bounded, however few documents of it are in an epoch."""
    monkeypatch.setattr(plan_module, "CHUNK_TOKENS", 60)
    monkeypatch.setattr(plan_module, "WINDOW_CHUNKS", 1)
    monkeypatch.setattr(plan_module, "MAX_WINDOW_CHUNKS", 5)
    plan = EpochPlanner(corpus, DataConfig(language_weights=(("en", 1e-3), ("de", 1e-3))), 32, 0)
    assert plan.num_tokens < corpus.num_tokens / 8 and plan.windows == (len(plan._bounds) - 1) // 5


def test_shares_that_are_no_fractions():
    """In any n epochs in a row, floor(n p) or ceil(n p) times."""
    shares, documents = np.array([0.3, 0.77, 1.0]), np.arange(60)
    sampling = DocumentSampling(shares, np.repeat(np.arange(3), 20).astype(np.uint16), np.uint64(7), 0.0)
    chosen = np.array([sampling.is_chosen(documents, epoch) for epoch in range(1000)])
    for start, length in ((0, 1000), (400, 17), (3, 2)):
        count = chosen[start : start + length].sum(0) / length
        assert (np.abs(count - np.repeat(shares, 20)) < 1 / length).all()
    assert 100 < chosen[:10].sum(0)[:20].sum() * 2 < 140  # not all in the same epochs
    assert len(np.unique(chosen[:, :20].argmax(0))) > 2


def test_weights_of_one_leave_the_stream_as_it_is(corpus):
    plain = EpochPlanner(corpus, DataConfig(), 32, 0).window(0, 0)
    for data in (
        DataConfig(language_weights=(("en", 2.0), ("de", 2.0), ("is", 2.0))),
        DataConfig(source_weights=(("a", 1.0),)),
    ):
        np.testing.assert_array_equal(EpochPlanner(corpus, data, 32, 0).window(0, 0).examples, plain.examples)
    other = EpochPlanner(corpus, DataConfig(language_weights=(("en", 0.5),)), 32, 0).window(0, 0)
    assert len(other.examples) < len(plain.examples)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"language_exponent": 0.0}, {"language": {"en": 1, "de": 1, "is": 1}}),
        ({"language_weights": (("de", 3.0),)}, {"language": {"en": 0.8, "de": 0.3, "is": 0.1}}),
        ({"source_weights": (("a", 0.5),)}, {"source": {"a": 0.25, "b": 0.5}}),
        ({"score_weights": ((0.0, 1.0), (2.0, 3.0))}, {"score": {1.0: 1, 3.0: 3, None: 0}}),
        ({"source_weights": (("b", 2.0),), "score_weights": ((3.0, 1.0),)}, {"score": {1.0: 0, 3.0: 1, None: 0}}),
    ],
)
def test_tokens_of_an_epoch(data, expected):
    """The shares of languages, sources or scores are those that the weights give."""
    corpus = make_corpus([[10]] * 2000, languages=["en"] * 8 + ["de", "is"])
    shares = group_shares(corpus.groups, DataConfig(**data), "c")
    assert shares.max() == 1
    for field, wanted in expected.items():
        tokens = dict.fromkeys(wanted, 0.0)
        for group, share in zip(corpus.groups, shares, strict=True):
            tokens[group[field]] += share * group["tokens"]
        total, scale = sum(tokens.values()), sum(wanted.values())
        assert {key: value / total for key, value in tokens.items()} == pytest.approx(
            {key: value / scale for key, value in wanted.items()}
        )


def stream(corpora, process=0, processes=1, **data):
    phases = (Phase(steps=30, batch_size=8, seq_len=32),)
    config = Config(name="x", data=DataConfig(**data), phases=phases)
    return TrainingStream(corpora, [1 / len(corpora)] * len(corpora), config, SPECIAL_IDS, process, processes)


def test_processes_and_positions_see_the_same_rows(corpus):
    data = {"language_exponent": 0.3, "source_weights": (("a", 0.5),)}
    small = make_corpus(random_documents(3, 40), name="small", languages=["en", "en", "de"])
    corpora = [corpus, small]
    whole, parts = stream(corpora, **data), [stream(corpora, index, 2, **data) for index in range(2)]
    plain = stream(corpora)
    cursor, differ = Cursor(), False
    for _ in range(30):
        cursor = whole.normalize_cursor(cursor)
        rows = whole.rows_at(cursor)
        halves = [part.rows_at(cursor)["input_ids"] for part in parts]
        np.testing.assert_array_equal(np.concatenate(halves), rows["input_ids"])
        differ |= not np.array_equal(plain.rows_at(plain.normalize_cursor(Cursor())), rows["input_ids"])
        again = stream(corpora, **data)
        np.testing.assert_array_equal(again.rows_at(cursor)["input_ids"], rows["input_ids"])
        cursor = whole.next_cursor(cursor)
    assert differ and max(position.epoch for position in cursor.positions) >= 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"language_weights": (("fi", 1.0),)},
            "data.language_weights: no document has the language 'fi', there are: de, en, is",
        ),
        ({"source_weights": (("web", 1.0),)}, "data.source_weights: no document has the source 'web', there are: a, b"),
        ({"language_weights": (("en", 0.0), ("de", 0.0), ("is", 0.0))}, "no document has a positive weight"),
        ({"language_weights": (("en", 1e-7),)}, r"1e\+07 times as frequent as those of"),
        ({"score_weights": ((9.0, 1.0),)}, "no document has a positive weight"),
    ],
)
def test_weights_that_mean_nothing(corpus, data, message):
    with pytest.raises(UserError, match=message):
        stream([corpus], **data).corpora[0].epoch_planner(32)


def test_corpora_without_groups_or_with_damaged_ones(corpus):
    damaged = make_corpus(random_documents(1, 40), languages=["en", "de"])
    damaged.document_groups[3] = 60_000
    old = make_corpus(random_documents(1, 40))
    old.groups.clear()
    for broken, message in ((damaged, "train.document_groups.npy contradicts corpus.json"), (old, "was built before")):
        assert stream([broken]).rows_at(stream([broken]).normalize_cursor(Cursor()))
        with pytest.raises(UserError, match=message):
            stream([broken], language_exponent=0.5).corpora[0].epoch_planner(32)
    unscored = make_corpus([[9], [9]])
    unscored.groups[1]["score"] = None
    with pytest.raises(UserError, match=r"build the corpus with --score @FIELD"):
        stream([unscored], score_weights=((0.0, 1.0),))
    rare = make_corpus([[9]] * 20_001, languages=["en"] * 20_000 + ["de"])
    with pytest.raises(UserError, match=r"an epoch has 1 of 20,001 documents by data\.\* weights, and segment_pair"):
        stream([rare], language_weights=(("en", 0.0),)).corpora[0].epoch_planner(32)
    lonely = make_corpus([[9], [9]], languages=["en", "de"])
    with pytest.raises(UserError, match="has one document with a positive weight"):
        stream([lonely], language_weights=(("de", 0.0),)).corpora[0].epoch_planner(32)
