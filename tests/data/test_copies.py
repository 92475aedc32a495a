"""What repeats from epoch to epoch: examples, masks, or both, as docs/ablation.md states."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config import ObjectiveConfig, Phase
from bert_jax.data.batch import empty_rows
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition, Cursor
from bert_jax.data.row_reader import CorpusRows
from bert_jax.doctor.epochs import estimate_epochs
from bert_jax.doctor.schedule_checks import questionable_settings
from bert_jax.objectives.masking import Vocabulary, mask_tokens

SEQ_LEN, EPOCHS, ROOM = 32, 5, 160


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.fixture(scope="module")
def shown(corpus, special_ids, tiny_config):
    """Of an epoch: each example before and after masking, as bytes."""
    mask = jax.jit(
        lambda rows: mask_tokens(rows, jnp.uint32(7), ObjectiveConfig(), Vocabulary(120, 4, (0, 1, 2, 3, 4)))
    )

    def epochs(form, **copies):
        data = config_lib.replace(tiny_config, data={"format": form, **copies}, objective={"pair": "none"}).data
        rows_of = CorpusRows(corpus, data, special_ids, 0)
        return [one_epoch(rows_of, data, epoch) for epoch in range(EPOCHS)]

    def one_epoch(rows_of, data, epoch):
        windows = list(rows_of.epoch_windows(SEQ_LEN, epoch))
        count = sum(map(len, windows))
        assert count <= ROOM, "raise ROOM"
        rows = empty_rows(ROOM, SEQ_LEN, data.max_examples_per_row(SEQ_LEN), special_ids.pad_id)
        rows_of.read_into(rows, np.arange(count), CorpusPosition(epoch), count)
        masked = np.asarray(mask(rows)["input_ids"])
        examples, views = set(), set()
        for row, place in zip(*np.nonzero(rows["example_id"] >= 0), strict=True):
            mine = rows["segment_ids"][row] == place + 1
            example = b"".join(rows[name][row][mine].tobytes() for name in ("input_ids", "token_type_ids"))
            examples.add(example)
            views.add(example + masked[row][mine].tobytes())
        return examples, views, [window.order.tolist() for window in windows]

    return epochs


def repeated(one: set, other: set) -> float:
    """Share of one epoch's examples that are also in the other."""
    return len(one & other) / len(one)


PAIRS, RUNS = "segment_pair", "full_sentences"


@pytest.mark.parametrize(
    ("form", "copies", "examples_repeat", "views_repeat"),
    [
        # format, settings, epochs after which the same examples come again, and the same masks on them (None: never)
        (PAIRS, {}, None, None),
        (PAIRS, {"example_copies": 1}, 1, None),
        (PAIRS, {"example_copies": 1, "mask_copies": 1}, 1, 1),
        (PAIRS, {"example_copies": 2, "mask_copies": 4}, 2, 4),
        (PAIRS, {"mask_copies": 1}, None, None),
        (RUNS, {}, 1, None),
        (RUNS, {"mask_copies": 2}, 1, 2),
    ],
)
def test_what_comes_again(shown, form, copies, examples_repeat, views_repeat):
    epochs = shown(form, **copies)
    for (i, one), (j, other) in itertools.combinations(enumerate(epochs), 2):
        for period, (left, right) in zip((examples_repeat, views_repeat), zip(one, other, strict=True), strict=False):
            if period is not None and (j - i) % period == 0:
                assert repeated(left, right) == 1.0, (i, j)
            else:
                assert repeated(left, right) < 0.1, (i, j)
        assert one[2] != other[2], "the order of rows is new in every epoch"


def run_of(tiny_config, *phases, **data):
    """A run of phases, each given as (steps, tokens per row), of 8 rows a step."""
    made = tuple(Phase(steps=steps, seq_len=seq_len, batch_size=8, warmup_steps=0) for steps, seq_len in phases)
    return config_lib.replace(tiny_config, phases=made, data=data)


@pytest.mark.parametrize(
    ("copies", "phases", "warned"),
    [
        # two phases of the same length read epochs 0, 1, 2 and 3, 4, 5; a phase of another length has rows of its own
        (5, [(2.5, 32), (2.5, 32)], False),
        (6, [(2.5, 32), (2.5, 32)], True),
        (2, [(2.5, 32), (2.5, 48)], False),
        (3, [(2.5, 32), (2.5, 48)], True),
        (1, [(0.5, 32)], True),
    ],
)
def test_copies_that_never_come_again(corpus, special_ids, tiny_config, copies, phases, warned):
    """Compared with the stream, read from its first row to its last."""
    probe = run_of(tiny_config, *((1, seq_len) for _, seq_len in phases))
    rows = CorpusRows(corpus, probe.data, special_ids, 0)
    lengths = [sum(len(window) for window in rows.epoch_windows(seq_len, 0)) / 8 for _, seq_len in phases]
    steps = [(round(epochs * length), seq_len) for length, (epochs, seq_len) in zip(lengths, phases, strict=True)]
    config = run_of(tiny_config, *steps, example_copies=copies, mask_copies=copies)
    stream = TrainingStream([corpus], [1.0], config, special_ids)
    found = questionable_settings(config, estimate_epochs(config, [corpus], stream.mixture_orders))
    assert {name for name in found if "copies" in name} == (
        {"data.example_copies", "data.mask_copies"} if warned else set()
    )
    epochs = {}
    cursor = stream.normalize_cursor(Cursor())
    for _ in range(config.total_steps):
        epochs.setdefault(config.phases[cursor.phase].seq_len, set()).add(cursor.positions[0].epoch)
        cursor = stream.next_cursor(cursor)
    again = any(len({epoch % copies for epoch in read}) < len(read) for read in epochs.values())
    assert again == (not warned)
