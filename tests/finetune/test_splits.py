"""Files of splits: their names and layouts, endings of a multiple choice, labels of test splits."""

import json

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.sentence_data import SentenceData, read_choices, read_own
from bert_jax.finetune.split_files import ENDINGS, find_splits
from bert_jax.finetune.squad import Question
from bert_jax.finetune.squad_data import SquadData
from bert_jax.finetune.tagging import TaggedSentence
from bert_jax.finetune.tagging_data import TaggingData
from bert_jax.tokenizers import tokenizer
from tests.finetune import task_files
from tests.fixtures import WORDS

OPTIONS = FinetuneOptions()


@pytest.fixture(scope="module")
def words():
    """A vocabulary of the words of the task files."""
    return tokenizer.wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], True, "test")


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_choices_of_swag(tmp_path, words):
    """The context, and `sent2` with each ending; a list of endings without `sent2` is the same."""
    rows = task_files.choice_rows("dev")
    task = read_choices(task_files.write_choices(tmp_path / "csv"), OPTIONS)
    expected = [(row["sent1"], *(f"the {row[f'ending{j}']}" for j in range(3))) for row in rows]
    assert [example.texts for example in task.splits["dev"]] == expected and task.labels == ("0", "1", "2")
    assert {example.label for example in task.splits["test"]} == {None}
    for split in ("train", "dev"):
        listed = [{"ctx": one[0], "endings": one[1:], "label": str(rows[i]["label"])} for i, one in enumerate(expected)]
        lines(tmp_path / f"list/{split}.jsonl", listed)
    again = read_choices(tmp_path / "list", FinetuneOptions(text_columns=("ctx",)))
    assert again.splits["dev"] == task.splits["dev"]

    data = SentenceData(task, words, 32, 2)
    labels = data.splits["dev"].examples.labels
    assert (data.kind, data.labels, data.splits["test"].has_labels) == ("multiple_choice", ("score",), False)
    logits = np.eye(3, dtype=np.float32)[labels]
    logits[0] = np.roll(logits[0], 1)
    for form in (logits, logits.reshape(-1, 1)):  # of a packed run, and of a model that reads one text after the other
        assert data.metrics("dev", form) == {"accuracy": pytest.approx(1 - 1 / len(labels))}
        assert data.correct("dev", form).tolist() == [False] + [True] * (len(labels) - 1)
    data.write_predictions(tmp_path, {"dev": logits.reshape(-1, 1)})
    written = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    assert [line["logits"] for line in written] == logits.tolist()
    assert [line["prediction"] == line["label"] for line in written] == [False] + [True] * (len(labels) - 1)
    counts = np.bincount(labels)
    assert data.baseline("dev") == {"accuracy": counts.max() / counts.sum()}


CHOICE = {"sent1": "a", "sent2": "b", "ending0": "c", "ending1": "d", "label": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ending2": "e"}, r"dev\.jsonl:1 has 3 endings, the first example 2: all examples need the same number"),
        ({"ending1": ""}, r"dev\.jsonl:1 has no two endings: it needs texts in the columns ending0, ending1"),
        ({"ending0": None}, r"dev\.jsonl:1 has no two endings"),
        ({"ending0": "\ud800"}, r"dev\.jsonl:1 has half of a surrogate pair"),
        ({"label": 2}, r"dev\.jsonl:1: the label '2' is not one of 0, 1"),
        ({"sent2": 3}, r"dev\.jsonl:1: a text is not a string"),
    ],
)
def test_bad_choices(changes, message, tmp_path):
    lines(tmp_path / "train.jsonl", [CHOICE, CHOICE | {"label": 1}])
    lines(tmp_path / "dev.jsonl", [CHOICE | changes])
    with pytest.raises(UserError, match=message) as error:
        read_choices(tmp_path, OPTIONS)
    assert "\n" not in str(error.value)


LAYOUTS = [
    ["train.csv", "validation.csv", "test.csv"],
    ["data/train.jsonl", "data/valid.jsonl"],
    ["plain_text/train-00000-of-00001.parquet", "plain_text/validation-00000-of-00001.parquet", "other/README.md"],
    [
        *("data/train-00000-of-00002.parquet", "data/train-00001-of-00002-a1b2.parquet"),
        *("data/dev-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
    ],
]


def empty_files(directory, names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()


@pytest.mark.parametrize("names", LAYOUTS)
def test_layouts(names, tmp_path):
    empty_files(tmp_path, names)
    found = [
        path.relative_to(tmp_path).as_posix() for paths in find_splits(tmp_path, ENDINGS).values() for path in paths
    ]
    assert found == [name for name in names if not name.endswith(".md")]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train.csv"], r"has no dev split: it needs a file dev with ending \.tsv, \.csv"),
        (["train.csv", "dev.csv", "validation.tsv"], r"has dev\.csv and validation\.tsv: remove or rename one of them"),
        (["a/train.csv", "a/dev.csv", "b/train.csv"], r"has the configurations a, b: give one of them as --data"),
        (
            ["train-00000-of-00002.parquet", "dev.parquet"],
            r"has 1 of the 2 files of train: copy the others too",
        ),
    ],
)
def test_bad_layouts(names, message, tmp_path):
    empty_files(tmp_path, names)
    with pytest.raises(UserError, match=message) as error:
        find_splits(tmp_path, ENDINGS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["a", "b"], [0, 1]), ([None, None], None), (["", ""], None), ([-1, -1], None), ([..., ...], None)],
)
def test_labels_of_test_splits(labels, expected, tmp_path, words):
    for split in ("train", "dev"):
        lines(tmp_path / f"{split}.jsonl", [{"text": "river", "label": "a"}, {"text": "stone", "label": "b"}])
    rows = [{"text": "wind", "label": label} for label in labels]
    lines(tmp_path / "test.jsonl", [{k: v for k, v in row.items() if v is not ...} for row in rows])
    data = SentenceData(read_own("classification", tmp_path, OPTIONS), words, 16, 2)
    assert data.splits["test"].has_labels == (expected is not None)
    if expected:
        assert data.splits["test"].examples.labels.tolist() == expected
        assert data.metrics("test", np.eye(2))["accuracy"] == 1.0


def test_some_labels_of_a_test_split(tmp_path):
    for split, second in (("train", "b"), ("dev", "b"), ("test", None)):
        lines(tmp_path / f"{split}.jsonl", [{"text": "river", "label": "a"}, {"text": "stone", "label": second}])
    with pytest.raises(UserError, match=r"test\.jsonl:2 has no label, other rows of the split have one: give all"):
        read_own("classification", tmp_path, OPTIONS)


def test_tags_of_a_test_split(words):
    sentences = [TaggedSentence(("river", "wind"), ("B-A", "O"))]
    for tags, has_labels in ((("O", "O"), False), (("O", "B-A"), True)):
        test = [TaggedSentence(("wind", "river"), tags)]
        data = TaggingData({"train": sentences, "dev": sentences, "test": test}, words, 16)
        assert data.splits["test"].has_labels == has_labels


def test_the_threshold_of_a_test_split_is_that_of_dev(words):
    """SQuAD's script tunes it on the split that it scores, which would be too good for a test split."""
    answered = Question("q", "river", "stone wind", ("stone",), (0,))
    unanswered = Question("r", "river", "stone wind", (), ())
    splits = {"train": [answered, unanswered], "dev": [answered, unanswered], "test": [unanswered]}
    splits["test"] = [unanswered._replace(question_id="s"), answered._replace(question_id="t")]
    data = SquadData(splits, words, FinetuneOptions(max_length=16), 2, 1)
    # [CLS] river [SEP] stone wind [SEP]: the logit of no answer, and that of "stone" as start and end.
    row = np.zeros((6, 2), np.float32)
    dev, test = np.concatenate([row, row]), np.concatenate([row, row])
    for logits, differences in ((dev, (-1.0, 1.0)), (test, (3.0, 2.0))):
        for i, difference in enumerate(differences):
            logits[6 * i + 3] = 5.0
            logits[6 * i] = 5.0 + difference / 2
    assert data.metrics("dev", dev)["f1"] == 100.0
    assert data.metrics("test", test)["f1"] == 100.0  # with a threshold of its own
    assert data.metrics("test", test, dev)["f1"] == 50.0
