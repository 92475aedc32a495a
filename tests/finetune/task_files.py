"""Small data sets in the published forms of all tasks, whose answers follow from words of the tiny corpus."""

import json
from pathlib import Path

import numpy as np

from tests.fixtures import WORDS

TAGS = {"river": "B-place", "mountain": "B-place", "stone": "B-thing", "wind": "B-thing"}
GLUE_NAMES = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
COUNTS = {"train": 64, "dev": 24, "test": 8}


def sentences(seed: int, count: int) -> list[list[str]]:
    """Sentences of three to nine words, half of which contain "river"."""
    rng = np.random.default_rng(seed)
    others = [word for word in WORDS if word != "river"]
    made = [list(rng.choice(others, int(rng.integers(3, 10)))) for _ in range(count)]
    for sentence in made[::2]:
        sentence[int(rng.integers(len(sentence)))] = "river"
    return made


def glue_lines(name: str, split: str, ending: str = "") -> list[str]:
    """The lines of a file in GLUE's published form: a text, or the first of a pair, with "river" is of class 1."""
    rows = sentences(len(split + ending), COUNTS[split])
    texts, labels = [" ".join(row) for row in rows], [int("river" in row) for row in rows]
    test = split == "test"
    entailment = ["entailment", "not_entailment"]
    forms = {
        "cola": (None, lambda i, t, y: f"gj04\t{y}\t\t{t}"),
        "sst2": ("sentence\tlabel", lambda i, t, y: f"{t}\t{y}"),
        "mrpc": (
            "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
            lambda i, t, y: f"{i if test else y}\t1\t2\t{t}\tthe wind",
        ),
        "stsb": ("index\tsentence1\tsentence2\tscore", lambda i, t, y: f"{i}\t{t}\tthe wind\t{5.0 * y - 0.01 * i:.3f}"),
        "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", lambda i, t, y: f"{i}\t1\t2\t{t}\tfar\t{y}"),
        "mnli": (
            "index\tsentence1\tsentence2\tgold_label",
            lambda i, t, y: f"{i}\t{t}\tfar\t{'entailment' if y else 'neutral' if i % 3 else 'contradiction'}",
        ),
        "qnli": ("index\tquestion\tsentence\tlabel", lambda i, t, y: f"{i}\t{t}\tfar\t{entailment[y]}"),
        "rte": ("index\tsentence1\tsentence2\tlabel", lambda i, t, y: f"{i}\t{t}\tfar\t{entailment[y]}"),
        "wnli": ("index\tsentence1\tsentence2\tlabel", lambda i, t, y: f"{i}\t{t}\tfar\t{y}"),
    }
    header, line = forms[name]
    if test and name in ("cola", "sst2"):
        header, line = "index\tsentence", lambda i, t, y: f"{i}\t{t}"
    if test and name == "mrpc":
        header = header.replace("Quality", "index")
    lines = [line(i, text, label) for i, (text, label) in enumerate(zip(texts, labels, strict=True))]
    if test and name not in ("cola", "sst2", "mrpc"):
        header, lines = header.rpartition("\t")[0], [text.rpartition("\t")[0] for text in lines]
    return [*([header] if header else []), *lines]


def write_glue(directory: Path, name: str) -> Path:
    """All splits of a GLUE task."""
    directory.mkdir(parents=True, exist_ok=True)
    for split in COUNTS:
        endings = ("_matched", "_mismatched") if name == "mnli" and split != "train" else ("",)
        for ending in endings:
            (directory / f"{split}{ending}.tsv").write_text("\n".join(glue_lines(name, split, ending)) + "\n")
    return directory


def write_tagging(directory: Path) -> Path:
    """Sentences in two columns; some words are places or things."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        blocks = ["".join(f"{w}\t{TAGS.get(w, 'O')}\n" for w in row) for row in sentences(len(split), count)]
        (directory / f"{split}.conll").write_text("\n".join(blocks) + "\n")
    return directory


def write_squad(directory: Path, *, unanswerable: bool = False) -> Path:
    """Questions whose answer is the word "river" with the word before it; the other texts have no answer."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        entries = []
        for i, row in enumerate(sentences(len(split), count)):
            context = " ".join(["the", *row])
            at = context.find("river")
            if at < 0 and not unanswerable:
                continue
            start = context.rfind(" ", 0, at - 1) + 1 if at >= 0 else 0
            answers = [{"text": context[start : at + 5], "answer_start": start}] if at >= 0 else []
            entry = {"id": f"{split}{i}", "question": "Where?", "answers": [] if split == "test" else answers}
            if unanswerable:
                entry["is_impossible"] = at < 0
            entries.append({"context": context, "qas": [entry]})
        (directory / f"{split}.json").write_text(json.dumps({"version": "1", "data": [{"paragraphs": entries}]}))
    return directory


def choice_rows(split: str) -> list[dict[str, object]]:
    """Rows in the form of SWAG with three endings; the right one has "river"."""
    rows = []
    for i, row in enumerate(sentences(len(split), 3 * COUNTS[split])[1::2]):  # without "river"
        endings = [" ".join(row[: 2 + (i + j) % 3] + ["far"] * j) for j in range(3)]
        label = (i * 7) % 3
        endings[label] = f"river {endings[label]}"
        named = {f"ending{j}": ending for j, ending in enumerate(endings)}
        rows.append({"sent1": " ".join(row[-2:]), "sent2": "the", **named, "label": label})
    return rows


def write_choices(directory: Path) -> Path:
    """Multiple choices as CSV; the test split has no labels."""
    directory.mkdir(parents=True, exist_ok=True)
    for split in COUNTS:
        rows = choice_rows(split)
        names = [name for name in rows[0] if split != "test" or name != "label"]
        lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
        (directory / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return directory


def write_multilabel(directory: Path) -> Path:
    """Sentences as JSON lines with the kinds of their words as a list of labels, which may be empty."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        rows = [{"text": " ".join(row), "label": label_set(row)} for row in sentences(len(split), count)]
        (directory / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def label_set(row: list[str]) -> list[str]:
    """The kinds of the words of a sentence."""
    return sorted({TAGS[word].removeprefix("B-") for word in row if word in TAGS})


def write_tfds(directory: Path) -> Path:
    """SST-2 as a TFDS dataset in ArrayRecord files: example i of a split has i + 1 words and the label i mod 2."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.dataset_info import DatasetIdentity

    features = tfds.features.FeaturesDict(
        {"sentence": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=2), "idx": np.int32}
    )
    identity = DatasetIdentity("glue", tfds.core.Version("2.0.0"), data_dir=str(directory), module_name="test")
    info = tfds.core.DatasetInfo(builder=identity, features=features, description="SST-2")
    record_format = tfds.core.FileFormat.ARRAY_RECORD
    info.set_file_format(record_format)
    writer = tfds.core.SequentialWriter(info, 100, file_format=record_format)
    counts = {"train": 6, "validation": 4, "test": 4}
    writer.initialize_splits(list(counts))
    for split, count in counts.items():
        examples = [
            {"sentence": " ".join(WORDS[: i + 1]), "label": -1 if split == "test" else i % 2, "idx": i}
            for i in reversed(range(count))
        ]
        writer.add_examples({split: examples})
    writer.close_all()
    return directory
