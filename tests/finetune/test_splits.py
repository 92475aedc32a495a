"""Files of splits: their names and layouts, endings of a multiple choice, labels of test splits."""

import decimal
import json
import sys

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.finetune import split_files
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.sentence_data import (
    SentenceData,
    SentenceTask,
    read_choices,
    read_glue,
    read_multilabel,
    read_own,
)
from bert_jax.finetune.split_files import ENDINGS, find_splits, hash_files
from bert_jax.finetune.squad import Question
from bert_jax.finetune.squad_data import SquadData, read_squad_splits
from bert_jax.finetune.tables import Columns, Example, to_row
from bert_jax.finetune.tagging import TaggedSentence
from bert_jax.finetune.tagging_data import TaggingData, read_tagging
from bert_jax.finetune.task_data import correct_examples
from bert_jax.finetune.tasks import hold_out
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
        assert correct_examples(data, "dev", form).tolist() == [False] + [True] * (len(labels) - 1)
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
    ["data/train.jsonl", "data/val.jsonl"],
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


def parquet(path, columns, features=None):
    """A file of Hugging Face's datasets."""
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_table(table, path)


NAMED = {"_type": "ClassLabel", "names": ["positive", "negative", "neutral"]}


def test_parquet_with_class_names(tmp_path, words):
    """Classes have the names and the order of the dataset; -1 is no label."""
    for i in range(2):
        name = f"data/train-0000{i}-of-00002.parquet"
        parquet(tmp_path / name, {"text": ["river", "stone"], "label": [1, i]}, {"label": NAMED, "text": {}})
    parquet(tmp_path / "data/validation-00000-of-00001.parquet", {"text": ["wind"], "label": [2]}, {"label": NAMED})
    parquet(tmp_path / "data/test-00000-of-00001.parquet", {"text": ["wind"], "label": [-1]}, {"label": NAMED})
    task = read_own("classification", tmp_path, OPTIONS)
    assert task.labels == ("positive", "negative", "neutral")
    assert [example.label for example in task.splits["train"]] == [1, 0, 1, 1]
    assert [task.splits[split][0].label for split in ("dev", "test")] == [2, None]
    parquet(tmp_path / "data/validation-00000-of-00001.parquet", {"text": ["wind"], "label": [3]}, {"label": NAMED})
    with pytest.raises(UserError, match=r"parquet, row 0: the label '3' is not one of positive, negative, neutral"):
        read_own("classification", tmp_path, OPTIONS)


def test_glue_in_parquet(tmp_path):
    """Labels are the numbers of GLUE's classes, whatever their names."""
    for split, label in (("train", 1), ("validation_matched", 2), ("validation_mismatched", 0), ("test_matched", -1)):
        path = tmp_path / f"mnli/{split}-00000-of-00001.parquet"
        parquet(path, {"premise": ["a"], "hypothesis": ["b"], "label": [label]}, {"label": NAMED})
    task = read_glue("mnli", tmp_path / "mnli")
    assert {split: examples[0].label for split, examples in task.splits.items()} == {
        "train": 1,
        "dev_matched": 2,
        "dev_mismatched": 0,
        "test_matched": None,
    }
    assert task.labels == ("entailment", "neutral", "contradiction")


def test_words_and_tags_in_rows(tmp_path):
    """Indices are named by the file's features; a column is chosen by its name if there is one of tags only."""
    feature = {"tokens": {}, "ner_tags": {"feature": {"_type": "ClassLabel", "names": ["O", "B-X"]}}}
    rows = {"tokens": [["the", "river"], ["far"]], "ner_tags": [[0, 1], [0]]}
    for split in ("train", "validation"):
        parquet(tmp_path / f"hub/data/{split}-00000-of-00001.parquet", rows, feature)
        lines(tmp_path / f"own/{split}.jsonl", [{"w": ["a", "b"], "t": ["x", 1], "pos_tags": ["y", "z"]}])
    expected = [TaggedSentence(("the", "river"), ("O", "B-X")), TaggedSentence(("far",), ("O",))]
    assert read_tagging(tmp_path / "hub", OPTIONS) == {"train": expected, "dev": expected}
    own = read_tagging(tmp_path / "own", FinetuneOptions(text_columns=("w",)))
    assert own["dev"] == [TaggedSentence(("a", "b"), ("y", "z"))]


def test_class_indices_of_rows(tmp_path):
    """Each kind of feature of another column is passed over, a test split may lack tags, and files agree on names."""
    for i, other in enumerate(([], None, "x", [[{}]], {"feature": [{}], "_type": "Sequence"})):
        features = {"a": other, "ner_tags": {"feature": NAMED}}
        for split, tags in (("train", [[0, 1]]), ("dev", [[1, 0]]), ("test", [[-1, -1]])):
            parquet(tmp_path / f"{i}/{split}.parquet", {"tokens": [["a", "b"]], "ner_tags": tags}, features)
        read = read_tagging(tmp_path / str(i), OPTIONS)
        assert [of[0].tags for of in read.values()] == [("positive", "negative"), ("negative", "positive"), ("O", "O")]
    names = {"ner_tags": {"feature": {"_type": "ClassLabel", "names": ["negative", "positive"]}}}
    parquet(tmp_path / "0/dev.parquet", {"tokens": [["a"]], "ner_tags": [[0]]}, names)
    with pytest.raises(UserError, match=r"dev\.parquet numbers the classes of 'ner_tags' differently from the other"):
        read_tagging(tmp_path / "0", OPTIONS)


def test_files_of_rows_that_do_not_fit(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = {"tokens": [["a"]], "ner_tags": [["x"]]}
    for name in ("train.parquet", "dev.parquet", "part/dev.parquet"):
        parquet(tmp_path / name, rows)
    with pytest.raises(UserError, match="has the columns tokens, ner_tags: give the one with the tags as"):
        read_tagging(tmp_path, FinetuneOptions(label_column="ner_tag"))
    (tmp_path / "part/train.conll").write_text("a x\n\nb y\n")
    with pytest.raises(UserError, match="has files in columns and files with a row for a sentence: give one form"):
        read_tagging(tmp_path / "part", OPTIONS)
    for name in ("00000-of-00002-aaaa", "00000-of-00002-bbbb", "00001-of-00002-aaaa"):
        parquet(tmp_path / f"twice/train-{name}.parquet", rows)
    with pytest.raises(UserError, match="has a part of train twice: remove or rename one of them"):
        read_tagging(tmp_path / "twice", OPTIONS)
    far = pyarrow.array([2**62], pyarrow.timestamp("us"))
    parquet(tmp_path / "dev.parquet", rows | {"date": far})
    with pytest.raises(UserError, match=r"dev\.parquet: column 'date' cannot be read \(.*\): leave it out of the file"):
        read_tagging(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({"tokens": ["a"], "ner_tags": ["x", "y"]}, {}, r"dev\.jsonl:1 has no list of words and list of as many tags"),
        ({"tokens": [], "ner_tags": []}, {}, "no list of words and list of as many tags: remove it"),
        ({"tokens": "a", "ner_tags": ["x"]}, {}, "no list of words"),
        ({"tokens": ["a", 1], "ner_tags": ["x", "y"]}, {}, "has a word that is no text, or a tag that"),
        ({"tokens": ["a"], "ner_tags": [-1]}, {}, "has a word that is no text, or a tag that"),
        ({"tokens": ["a"], "ner_tags": [None]}, {}, "has a word that is no text, or a tag that"),
        ({"tokens": ["\ud800"], "ner_tags": ["x"]}, {}, "half of a surrogate pair"),
        ({"words": ["a"], "ner_tags": ["x"]}, {}, "no key 'tokens': it has words, ner_tags: give the one with"),
        ({"tokens": ["a"], "labels": ["x"]}, {}, "has the columns tokens, labels: give the one with the tags as"),
        (
            {"tokens": ["a"], "a_tags": ["x"], "b_tags": ["x"]},
            {},
            "the columns tokens, a_tags, b_tags: give the",
        ),
        ({"tokens": ["a"], "b_tags": ["x"]}, {"text_columns": ("a", "b")}, "--text-columns has 2 names: tagging needs"),
    ],
)
def test_bad_words_and_tags(tmp_path, rows, options, message):
    good = {"tokens": ["a"], "ner_tags": ["x"]} if {*rows} == {"tokens", "ner_tags"} else rows
    lines(tmp_path / "train.jsonl", [good])
    lines(tmp_path / "dev.jsonl", [rows])
    with pytest.raises(UserError, match=message):
        read_tagging(tmp_path, FinetuneOptions(**options))


def test_questions_in_parquet(tmp_path):
    rows = {"id": ["1", "2"], "title": ["", ""], "question": ["where", "who"], "context": ["the river", "far"]}
    answers = [{"text": ["river", "river"], "answer_start": [4, 4]}, {"text": [], "answer_start": []}]
    for split in ("train", "validation"):
        parquet(tmp_path / f"squad_v2/{split}-00000-of-00001.parquet", rows | {"answers": answers})
    expected = [
        Question("1", "where", "the river", ("river", "river"), (4, 4)),
        Question("2", "who", "far", (), ()),
    ]
    assert read_squad_splits(tmp_path, OPTIONS) == {"train": expected, "dev": expected}
    path = tmp_path / "squad_v2/validation-00000-of-00001.parquet"
    for wrong, message in (
        ({"text": ["river"], "answer_start": [3]}, "row 0: the answer 'river' of question 1 is not at character 3"),
        (
            {"text": ["river"], "answer_start": []},
            "row 0 has 1 answers and 0 starts: write it as",
        ),
        ({"text": [None], "answer_start": [4]}, r"row 0: answers: text.0 is None"),
    ):
        parquet(path, rows | {"answers": [wrong, answers[1]]})
        with pytest.raises(UserError, match=message):
            read_squad_splits(tmp_path, OPTIONS)
    for more in (
        {"answers": [answers[0], answers[0]], "is_impossible": [False, True]},
        {"answers": [answers[0], {"text": [""], "answer_start": [0]}]},
        {"answers": [answers[0], None]},
    ):
        parquet(path, rows | more)
        assert read_squad_splits(tmp_path, OPTIONS)["dev"] == expected
    parquet(path, rows | {"id": ["1", "1"], "answers": answers})
    with pytest.raises(UserError, match="have the id of another"):
        read_squad_splits(tmp_path, OPTIONS)


def test_bad_parquet(tmp_path, monkeypatch):
    for split in ("train", "dev"):
        parquet(tmp_path / f"{split}.parquet", {"text": ["a", "b"], "label": ["x", "y"]})
    assert read_own("classification", tmp_path, OPTIONS).labels == ("x", "y")
    with pytest.raises(UserError, match=r"train\.parquet has no column 'review': it has text, label: name them with"):
        read_own("classification", tmp_path, FinetuneOptions(text_columns=("review",)))
    (tmp_path / "dev.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"dev\.parquet cannot be read as Parquet \(.*\): copy it again"):
        read_own("classification", tmp_path, OPTIONS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"train\.parquet needs pyarrow, which is missing: pip install") as error:
        read_own("classification", tmp_path, OPTIONS)
    assert "\n" not in str(error.value)


SETS = [["place", "thing"], [], ["thing"]]


def test_several_labels(tmp_path, words):
    """In lists, in a text with a separator, and as numbers of named classes."""
    texts = ["river stone", "far", "stone"]
    for split in ("train", "dev"):
        lines(tmp_path / f"lists/{split}.jsonl", [{"text": t, "label": s} for t, s in zip(texts, SETS, strict=True)])
        rows = [f"{text}\t{'; '.join(labels)}" for text, labels in zip(texts, SETS, strict=True)]
        (tmp_path / "table").mkdir(exist_ok=True)
        (tmp_path / f"table/{split}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
        numbers = [[{"place": 0, "thing": 1}[name] for name in labels] for labels in SETS]
        feature = {"_type": "List", "feature": NAMED | {"names": ["place", "thing"]}}
        parquet(tmp_path / f"numbers/{split}.parquet", {"text": texts, "label": numbers}, {"label": feature})
    lines(tmp_path / "lists/test.jsonl", [{"text": "river"}])
    (tmp_path / "table/test.tsv").write_text("text\tlabel\nriver\t\n")  # no labels, as of other tasks
    parquet(tmp_path / "numbers/test.parquet", {"text": ["river"], "label": [[-1]]}, {"label": feature})
    task = read_multilabel(tmp_path / "lists", OPTIONS)
    assert task.labels == ("place", "thing")
    assert [example.label for example in task.splits["dev"]] == [(1, 1), (0, 0), (0, 1)]
    separated = FinetuneOptions(label_separator=";")
    for found in (read_multilabel(tmp_path / "table", separated), read_multilabel(tmp_path / "numbers", OPTIONS)):
        assert found.splits["dev"] == task.splits["dev"] and found.splits["test"][0].label is None

    data = SentenceData(task, words, 16, 2)
    assert data.splits["test"].examples.labels.tolist() == [[-1, -1]] and not data.splits["test"].has_labels
    logits = np.array([[0.1, 3.0], [-1.0, 0.0], [2.0, 2.0]], np.float32)
    assert data.metrics("dev", logits) == pytest.approx({"micro_f1": 6 / 7, "macro_f1": (2 / 3 + 1) / 2})
    assert data.class_f1("dev", logits) == pytest.approx({"place": 2 / 3, "thing": 1.0})
    assert data.baseline("dev") == pytest.approx({"micro_f1": 2 / 3, "macro_f1": (1 / 2 + 4 / 5) / 2})
    data.write_predictions(tmp_path, {"dev": logits, "test": logits[:1]})
    written = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    assert [line["label"] for line in written] == SETS
    assert [line["prediction"] for line in written] == [["place", "thing"], [], ["place", "thing"]]
    assert "label" not in json.loads((tmp_path / "test.jsonl").read_text())


@pytest.mark.parametrize(
    ("dev", "message"),
    [
        (["a", "c"], r"dev\.jsonl:2: the label 'c' is not one of a, b"),
        ([3], r"dev\.jsonl:2: the label '3' is not one of a, b"),
        (None, r"dev\.jsonl:2 has no list or text of labels"),
        ([None], r"dev\.jsonl:2: a label is not a string or whole number"),
        ([0.5], r"dev\.jsonl:2: a label is not a string or whole number"),
    ],
)
def test_bad_sets_of_labels(dev, message, tmp_path):
    lines(tmp_path / "train.jsonl", [{"text": "x", "label": ["a", "b"]}])
    lines(tmp_path / "dev.jsonl", [{"text": "x", "label": "a"}, {"text": "y", "label": dev}])
    with pytest.raises(UserError, match=message) as error:
        read_multilabel(tmp_path, OPTIONS)
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


def test_the_hash_of_files(tmp_path):
    """Of names and contents, in folders too, and not of the directory's own name."""
    digests = []
    for name, files in (("a", {"x": "1", "y/z": "2"}), ("b", {"x": "1", "y/z": "2"}), ("c", {"x": "1", "y/w": "2"}),
                        ("d", {"x": "1", "y/z": "3"})):  # fmt: skip
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        digests.append(hash_files(tmp_path / name))
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_a_part_of_train_is_held_out(seed, tmp_path):
    """A quarter of each kind of task's train, by the seed; the rest is the training split."""
    task_files.write_choices(tmp_path / "choice")
    task_files.write_multilabel(tmp_path / "several")
    task_files.write_tagging(tmp_path / "tagging")
    task_files.write_squad(tmp_path / "squad", unanswerable=True)
    for splits in (
        read_choices(tmp_path / "choice", OPTIONS),
        read_multilabel(tmp_path / "several", OPTIONS),
        read_tagging(tmp_path / "tagging", OPTIONS),
        read_squad_splits(tmp_path / "squad", OPTIONS),
    ):
        parts, other = (hold_out(splits, 0.25, one) for one in (seed, seed + 2))
        whole, parts, other = (getattr(one, "splits", one) for one in (splits, parts, other))
        held = parts["selection"]
        assert len(held) == len(whole["train"]) // 4 and len(parts["train"]) == 3 * len(held)
        assert sorted(map(repr, [*held, *parts["train"]])) == sorted(map(repr, whole["train"]))
        assert parts["dev"] == whole["dev"] and held != other["selection"]


@pytest.mark.parametrize(("label", "text"), [(decimal.Decimal("4.5"), "4.5"), (np.float32(0.5), "0.5"), (2, "2")])
def test_numbers_of_other_types_are_labels(label, text):
    columns = Columns(("text",), "label", "")
    assert to_row("here", {"text": "a", "label": label}, columns).label == text
    for other in (b"a", decimal.Decimal("NaN"), [1], float("inf")):
        with pytest.raises(UserError, match="here: the label is not a string or finite number"):
            to_row("here", {"text": "a", "label": other}, columns)


def test_values_of_tfds():
    values = [np.array([b"a", b"b"], object), np.array([1, 0]), np.int64(3), b"x", np.float32(0.1)]
    assert [split_files._decoded(one) for one in values] == [["a", "b"], [1, 0], 3, "x", np.float32(0.1)]


def test_a_class_that_is_only_held_out():
    examples = [Example(("a",), 0)] * 9 + [Example(("b",), 1)]
    splits = SentenceTask(("no", "yes"), ("accuracy",), {"train": examples, "dev": examples})
    found = set()
    for seed in range(40):
        try:
            parts = hold_out(splits, 0.2, seed).splits
            found.add(examples[-1] in parts["train"])
        except UserError as error:
            assert str(error).startswith(
                f"--selection-share 0.2 with seed {seed} leaves no example of 'yes' for training"
            )
            found.add("refused")
    assert found == {True, "refused"}
