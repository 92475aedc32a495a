"""The training stream of 1, 2 and 4 real processes: one set of global batches and masks, divided among them.

This is a part of promise 1. Processes differ in prefetch, and in whether threads or reader processes read.
"""

from collections import Counter

import numpy as np
import pytest

from bert_jax.data.corpus import Corpus
from bert_jax.tokenizers.tokenizer import Tokenizer
from tests.multi_process.configs import PHASES, STEPS, STREAMS

pytestmark = pytest.mark.slow

FEW = 4
NAMES = {
    *("input_ids", "token_type_ids", "segment_ids", "position_ids", "example_id", "pair_labels", "cls_positions"),
    *("row", "mask_epoch"),
    *(f"masked/{name}" for name in ("input_ids", "target_positions", "target_labels", "target_weights")),
}
StepRows = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def outcome(groups):
    """Arrays of each process, by number of processes."""
    return {n: groups.of("stream", n) for n in (1, 2, 4)}


def shares(outcome, processes: int, case: str) -> list[list[StepRows]]:
    """Rows of each process and step."""
    found = []
    for written in outcome[processes]:
        steps: list[StepRows] = [{} for _ in range(STEPS)]
        for key, array in written.items():
            name, _, rest = key.partition("/")
            step, _, rest = rest.partition("/")
            if name == case and rest in NAMES:
                steps[int(step)][rest] = array
        found.append(steps)
    assert all(step.keys() == NAMES for steps in found for step in steps)
    return found


def joined(shared: list[list[StepRows]], outcome, case: str) -> list[StepRows]:
    """The global batches; asserts that each row belongs to exactly one process, and that no example repeats."""
    found, sizes = [], [int(outcome[1][0][f"{case}/{step}/size"]) for step in range(STEPS)]
    for parts, size in zip(zip(*shared, strict=True), sizes, strict=True):
        rows = [row for part in parts for row in part["row"].tolist()]
        assert len({len(part["row"]) for part in parts}) == 1, "unequal shares"
        assert len(rows) == len(set(rows)), "two processes read the same row"
        assert sorted(rows) == list(range(size)), "a row that no process reads"
        assert all(len(array) == len(part["row"]) for part in parts for array in part.values())
        batch = {name: np.concatenate([part[name] for part in parts]) for name in NAMES}
        found.append({name: array[np.argsort(batch["row"])] for name, array in batch.items()})
    seen = set()
    for steps in shared:
        mine = {identity for step in steps for identity in identities(step)}
        assert not mine & seen, "two processes read the same example of one epoch"
        seen |= mine
    assert sum(len(identities(step)) for steps in shared for step in steps) == len(seen), "an example twice"
    return found


def identities(step: StepRows) -> list[tuple[int, int]]:
    """(epoch, example) of all examples; phases have epochs of their own."""
    return [
        (epoch, example)
        for epoch, examples in zip(step["mask_epoch"].tolist(), step["example_id"].tolist(), strict=True)
        for example in examples
        if example >= 0
    ]


def assert_same_batches(left: list[StepRows], right: list[StepRows]) -> None:
    for number, (one, two) in enumerate(zip(left, right, strict=True)):
        for name in NAMES:
            assert one[name].dtype == two[name].dtype
            np.testing.assert_array_equal(one[name], two[name], err_msg=f"{name} of step {number}")


@pytest.fixture(scope="module")
def batches(outcome):
    """Global batches of every case, as one process reads them."""
    return {case: joined(shares(outcome, 1, case), outcome, case) for case in STREAMS}


@pytest.mark.parametrize("case", STREAMS)
def test_streams_cover_the_cases(outcome, batches, case):
    """Several windows and epochs, a ramp, two phases, packed rows, changing masks."""
    sizes = [len(step["row"]) for step in batches[case]]
    assert sizes == [8] * 5 + [16] * 25 + [8] * 21
    assert [step["input_ids"].shape[1] for step in batches[case]] == [48] * 30 + [64] * 21
    assert outcome[1][0][f"{case}/windows"].min() >= 2 and outcome[1][0][f"{case}/windows"].max() >= 3
    assert max(step["mask_epoch"].max() for step in batches[case]) >= 2
    assert max(len(set(step["mask_epoch"].tolist())) for step in batches[case]) >= 2  # straddles two epochs
    assert max(step["segment_ids"].max() for step in batches[case]) >= 2
    labels = {label for step in batches[case] for label in step["pair_labels"][step["example_id"] >= 0].tolist()}
    assert labels == ({0, 1} if case == "mixture" else {-1})
    masked = [
        (step["masked/input_ids"] != step["input_ids"]).sum() / (step["segment_ids"] > 0).sum()
        for step in batches[case]
    ]
    assert 0.1 < np.mean(masked) < 0.17
    assert all(step["masked/target_weights"].any(1).all() for step in batches[case])


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", STREAMS)
def test_any_number_of_processes_reads_the_same_batches(outcome, batches, case, processes):
    shared = shares(outcome, processes, case)
    assert len(shared) == processes
    assert_same_batches(joined(shared, outcome, case), batches[case])
    for step in range(STEPS):
        assert len({str(written[f"{case}/{step}/following"]) for p in outcome for written in outcome[p]}) == 1


def assert_caught(shared, outcome, batches, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_batches(joined(shared, outcome, "doc_sentences"), batches["doc_sentences"])


def test_a_stream_that_is_not_divided_is_detected(outcome, batches):
    """Positive control: two processes that both read everything, and two that both act as process 0."""
    both = shares(outcome, 2, "unshared")
    assert_same_batches(both[0], batches["doc_sentences"])
    assert_caught(both, outcome, batches, "two processes read the same row")
    first, second = shares(outcome, 2, "doc_sentences")
    assert_caught([first, first], outcome, batches, "two processes read the same row")
    assert_caught([first], outcome, batches, "a row that no process reads")
    # Even if the second one claims other row numbers.
    renamed = [
        {**step, "row": other["row"], "masked/input_ids": step["masked/input_ids"]}
        for step, other in zip(first, second, strict=True)
    ]
    assert_caught([first, renamed], outcome, batches, "two processes read the same example")
    one_bit = [*second[:-1], second[-1] | {"masked/target_labels": second[-1]["masked/target_labels"] ^ 1}]
    assert_caught([first, one_bit], outcome, batches, "masked/target_labels of step 50")


class Text:
    """The sentences of a corpus, and how rows of one length contain them."""

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
            # A sentence longer than a row is cut into whole rows and a remainder.
            for start in range(0, len(tokens), room):
                self.pieces[tuple(tokens[start : start + room])] += 1
                self.sentence_of[tuple(tokens[start : start + room])] = sentence
        assert max(self.pieces.values()) == 1  # otherwise finding one would prove little

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
    """Decoded from the rows of four processes; these formats truncate nothing."""
    complete = 0
    for phase, first, last in ((PHASES[0], 0, 30), (PHASES[1], 30, 51)):
        text, seen = Text(corpora[0], phase.seq_len), {}
        assert text.longer >= 3
        for steps in shares(outcome, 4, case):
            for step in steps[first:last]:
                rows = zip(step["mask_epoch"].tolist(), step["input_ids"], step["segment_ids"], strict=True)
                for epoch, ids, segments in rows:
                    seen.setdefault(epoch, Counter()).update(text.shown(ids, segments))
        *whole, cut_off = sorted(seen)
        for epoch in whole:
            assert seen[epoch] == text.pieces
        assert not seen[cut_off] - text.pieces
        complete += len(whole)
    assert complete >= 3


def test_a_process_reads_only_its_own_records(outcome, corpora):
    """Each document is one record here, and no example crosses documents."""
    corpus, text, read = Corpus.open(corpora[0]), Text(corpora[0], PHASES[0].seq_len), {}
    records = len(corpus.record_offsets) - 1
    for processes in (1, 2, 4):
        for process, steps in enumerate(shares(outcome, processes, "doc_sentences")):
            needed = set()
            for step in steps[:FEW]:
                for ids, segments in zip(step["input_ids"], step["segment_ids"], strict=True):
                    sentences = [text.sentence_of[piece] for piece in text.shown(ids, segments)]
                    needed |= set(np.searchsorted(corpus.record_offsets, sentences, "right") - 1)
            read[processes, process] = set(outcome[processes][process]["doc_sentences/records"].tolist())
            assert read[processes, process] == needed
    together = set().union(*(read[4, process] for process in range(4)))
    assert together == read[1, 0]
    assert max(len(read[4, process]) for process in range(4)) < 0.6 * len(together) < records
