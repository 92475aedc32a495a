"""The training stream of 1, 2 and 4 real processes: one set of global batches and masks, shared out.

That is a part of promise 1. Processes differ in prefetch, and in whether threads or reader processes read.
"""

from collections import Counter

import numpy as np
import pytest

from bert_jax.data.corpus import Corpus
from bert_jax.tokenizers.tokenizer import Tokenizer
from tests.multi_process.configs import PHASES, STREAMS, UPDATES
from tests.multi_process.launch import launch

pytestmark = pytest.mark.slow

FEW = 4
NAMES = {
    *("input_ids", "token_type_ids", "segment_ids", "position_ids", "example_id", "pair_labels", "cls_positions"),
    *("row", "mask_epoch"),
    *(f"masked/{name}" for name in ("input_ids", "target_positions", "target_labels", "target_weights")),
}
Update = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, corpora):
    """What each process wrote, by number of processes."""
    return {n: launch("stream", n, tmp_path_factory.mktemp(f"stream{n}"), corpora) for n in (1, 2, 4)}


def shares(outcome, processes: int, case: str) -> list[list[Update]]:
    """Rows of each process and update."""
    found = []
    for written in outcome[processes]:
        updates: list[Update] = [{} for _ in range(UPDATES)]
        for key, array in written.items():
            name, _, rest = key.partition("/")
            update, _, rest = rest.partition("/")
            if name == case and rest in NAMES:
                updates[int(update)][rest] = array
        found.append(updates)
    assert all(update.keys() == NAMES for updates in found for update in updates)
    return found


def joined(shared: list[list[Update]], outcome, case: str) -> list[Update]:
    """The global batches, if each of their rows belongs to exactly one process, and no example comes twice."""
    found, sizes = [], [int(outcome[1][0][f"{case}/{update}/size"]) for update in range(UPDATES)]
    for parts, size in zip(zip(*shared, strict=True), sizes, strict=True):
        rows = [row for part in parts for row in part["row"].tolist()]
        assert len({len(part["row"]) for part in parts}) == 1, "unequal shares"
        assert len(rows) == len(set(rows)), "two processes read the same row"
        assert sorted(rows) == list(range(size)), "a row that no process reads"
        assert all(len(array) == len(part["row"]) for part in parts for array in part.values())
        batch = {name: np.concatenate([part[name] for part in parts]) for name in NAMES}
        found.append({name: array[np.argsort(batch["row"])] for name, array in batch.items()})
    seen = set()
    for updates in shared:
        mine = {identity for update in updates for identity in identities(update)}
        assert not mine & seen, "two processes read the same example of one epoch"
        seen |= mine
    assert sum(len(identities(update)) for updates in shared for update in updates) == len(seen), "an example twice"
    return found


def identities(update: Update) -> list[tuple[int, int]]:
    """(epoch, example) of all examples; phases have epochs of their own."""
    return [
        (epoch, example)
        for epoch, examples in zip(update["mask_epoch"].tolist(), update["example_id"].tolist(), strict=True)
        for example in examples
        if example >= 0
    ]


def assert_same_batches(left: list[Update], right: list[Update]) -> None:
    for number, (one, two) in enumerate(zip(left, right, strict=True)):
        for name in NAMES:
            assert one[name].dtype == two[name].dtype
            np.testing.assert_array_equal(one[name], two[name], err_msg=f"{name} of update {number}")


@pytest.fixture(scope="module")
def batches(outcome):
    """Global batches of every case, as one process reads them."""
    return {case: joined(shares(outcome, 1, case), outcome, case) for case in STREAMS}


@pytest.mark.parametrize("case", STREAMS)
def test_there_is_something_to_agree_on(outcome, batches, case):
    """Several windows and epochs, a ramp, two phases, packed rows, masks that change."""
    sizes = [len(update["row"]) for update in batches[case]]
    assert sizes == [8] * 5 + [16] * 25 + [8] * 21
    assert [update["input_ids"].shape[1] for update in batches[case]] == [48] * 30 + [64] * 21
    assert outcome[1][0][f"{case}/windows"].min() >= 2 and outcome[1][0][f"{case}/windows"].max() >= 3
    assert max(update["mask_epoch"].max() for update in batches[case]) >= 2
    assert max(len(set(update["mask_epoch"].tolist())) for update in batches[case]) >= 2  # straddles two epochs
    assert max(update["segment_ids"].max() for update in batches[case]) >= 2
    labels = {label for update in batches[case] for label in update["pair_labels"][update["example_id"] >= 0].tolist()}
    assert labels == ({0, 1} if case == "mixture" else {-1})
    masked = [
        (update["masked/input_ids"] != update["input_ids"]).sum() / (update["segment_ids"] > 0).sum()
        for update in batches[case]
    ]
    assert 0.1 < np.mean(masked) < 0.17
    assert all(update["masked/target_weights"].any(1).all() for update in batches[case])


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", STREAMS)
def test_any_number_of_processes_reads_the_same_batches(outcome, batches, case, processes):
    shared = shares(outcome, processes, case)
    assert len(shared) == processes
    assert_same_batches(joined(shared, outcome, case), batches[case])
    for update in range(UPDATES):
        assert len({str(written[f"{case}/{update}/following"]) for p in outcome for written in outcome[p]}) == 1


def assert_caught(shared, outcome, batches, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_batches(joined(shared, outcome, "doc_sentences"), batches["doc_sentences"])


def test_a_stream_that_is_not_shared_is_noticed(outcome, batches):
    """Positive control: two processes that both read everything, and two that are both the first."""
    both = shares(outcome, 2, "unshared")
    assert_same_batches(both[0], batches["doc_sentences"])
    assert_caught(both, outcome, batches, "two processes read the same row")
    first, second = shares(outcome, 2, "doc_sentences")
    assert_caught([first, first], outcome, batches, "two processes read the same row")
    assert_caught([first], outcome, batches, "a row that no process reads")
    # Even if the second says that its rows are others.
    renamed = [
        {**update, "row": other["row"], "masked/input_ids": update["masked/input_ids"]}
        for update, other in zip(first, second, strict=True)
    ]
    assert_caught([first, renamed], outcome, batches, "two processes read the same example")
    one_bit = [*second[:-1], second[-1] | {"masked/target_labels": second[-1]["masked/target_labels"] ^ 1}]
    assert_caught([first, one_bit], outcome, batches, "masked/target_labels of update 50")


class Text:
    """What the sentences of a corpus are, and how rows of one length show them."""

    def __init__(self, directory, seq_len: int):
        corpus, tokenizer = Corpus.open(directory), Tokenizer.load(directory / "tokenizer.json")
        (self.period,) = tokenizer.encode(".")
        self.cls_id, self.sep_id, room = tokenizer.cls_id, tokenizer.sep_id, seq_len - 2
        self.pieces, self.longer = Counter(), 0
        self.sentence_of = {}
        for sentence in range(corpus.num_sentences):
            tokens = corpus.sentences(sentence, sentence + 1).tolist()
            assert tokens.count(self.period) == 1 and tokens[-1] == self.period
            self.longer += len(tokens) > room
            # A sentence that is longer than a row is cut into whole rows and a rest.
            for start in range(0, len(tokens), room):
                self.pieces[tuple(tokens[start : start + room])] += 1
                self.sentence_of[tuple(tokens[start : start + room])] = sentence
        assert max(self.pieces.values()) == 1  # or finding one would say little

    def shown(self, ids: np.ndarray, segments: np.ndarray) -> list[tuple[int, ...]]:
        """Sentences, or parts of long ones, in one row."""
        found = []
        for place in range(1, segments.max() + 1):
            example = ids[segments == place].tolist()
            assert example[0] == self.cls_id and example[-1] == self.sep_id
            piece: list[int] = []
            for token in example[1:]:
                if token != self.sep_id:
                    piece.append(token)
                if piece and token in (self.sep_id, self.period):
                    found.append(tuple(piece))
                    piece = []
        return found


@pytest.mark.parametrize("case", ["doc_sentences", "full_sentences"])
def test_an_epoch_shows_every_sentence_once(outcome, corpora, case):
    """Read back from the rows of four processes; these formats truncate nothing."""
    complete = 0
    for phase, first, last in ((PHASES[0], 0, 30), (PHASES[1], 30, 51)):
        text, seen = Text(corpora[0], phase.seq_len), {}
        assert text.longer >= 3
        for updates in shares(outcome, 4, case):
            for update in updates[first:last]:
                rows = zip(update["mask_epoch"].tolist(), update["input_ids"], update["segment_ids"], strict=True)
                for epoch, ids, segments in rows:
                    seen.setdefault(epoch, Counter()).update(text.shown(ids, segments))
        *whole, cut_off = sorted(seen)
        for epoch in whole:
            assert seen[epoch] == text.pieces
        assert not seen[cut_off] - text.pieces
        complete += len(whole)
    assert complete >= 3


def test_a_process_reads_only_its_own_records(outcome, corpora):
    """Documents are one record each here, and no example leaves its document."""
    corpus, text, read = Corpus.open(corpora[0]), Text(corpora[0], PHASES[0].seq_len), {}
    records = len(corpus.record_offsets) - 1
    for processes in (1, 2, 4):
        for process, updates in enumerate(shares(outcome, processes, "doc_sentences")):
            needed = set()
            for update in updates[:FEW]:
                for ids, segments in zip(update["input_ids"], update["segment_ids"], strict=True):
                    sentences = [text.sentence_of[piece] for piece in text.shown(ids, segments)]
                    needed |= set(np.searchsorted(corpus.record_offsets, sentences, "right") - 1)
            read[processes, process] = set(outcome[processes][process]["doc_sentences/records"].tolist())
            assert read[processes, process] == needed
    together = set().union(*(read[4, process] for process in range(4)))
    assert together == read[1, 0]
    assert max(len(read[4, process]) for process in range(4)) < 0.6 * len(together) < records
