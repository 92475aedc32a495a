"""Files of GLUE in their published forms, tables of one's own, and submissions."""

from pathlib import Path

import pytest

from bert_jax.errors import UserError
from bert_jax.finetune import glue
from bert_jax.finetune.tables import Columns, Example, class_names, read_rows, to_examples

PAIR = "{a}\t{b}"
FILES = {
    # task: (header of train and dev, line, header of test, line of test, label of the line, texts)
    "cola": (None, 'gj04\t1\t*\tA "quoted" text.', "index\tsentence", '0\tA "quoted" text.', 1, 1),
    "sst2": ("sentence\tlabel", 'A "quoted" text.\t1', "index\tsentence", '0\tA "quoted" text.', 1, 1),
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '0\t17\t18\tA "quoted" text.\tb',
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '0\t17\t18\tA "quoted" text.\tb',
        0,
        2,
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        '0\tg\tf\t2012\t1\tnone\tnone\tA "quoted" text.\tb\t3.250',
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
        '0\tg\tf\t2012\t1\tnone\tnone\tA "quoted" text.\tb',
        3.25,
        2,
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        '5\t1\t2\tA "quoted" text.\tb\t1',
        "id\tquestion1\tquestion2",
        '0\tA "quoted" text.\tb',
        1,
        2,
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
        '0\t1\t1n\tfiction\tA "quoted" text.\tb\tneutral\tneutral',
        "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2",
        '0\t1\t1n\tfiction\tA "quoted" text.\tb',
        1,
        2,
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        '0\tA "quoted" text.\tb\tnot_entailment',
        "index\tquestion\tsentence",
        '0\tA "quoted" text.\tb',
        1,
        2,
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        '0\tA "quoted" text.\tb\tentailment',
        "index\tsentence1\tsentence2",
        '0\tA "quoted" text.\tb',
        0,
        2,
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel",
        '0\tA "quoted" text.\tb\t1',
        "index\tsentence1\tsentence2",
        '0\tA "quoted" text.\tb',
        1,
        2,
    ),
}


def write(path: Path, *lines: str | None) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines if line is not None), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", glue.GLUE)
def test_published_files(name, tmp_path):
    header, line, test_header, test_line, label, count = FILES[name]
    task = glue.GLUE[name]
    write(tmp_path / "train.tsv", header, line, line)
    for ending in task.evaluated:
        write(tmp_path / f"dev{ending}.tsv", header, line)
        write(tmp_path / f"test{ending}.tsv", test_header, test_line)
    texts = ('A "quoted" text.', "b")[:count]
    assert glue.read_split(name, tmp_path, "train") == [Example(texts, label)] * 2
    assert glue.read_split(name, tmp_path, "dev", task.evaluated[-1]) == [Example(texts, label)]
    assert glue.read_split(name, tmp_path, "test", task.evaluated[0]) == [Example(texts, None)]


def test_cola_of_its_own_release(tmp_path):
    for stem in ("in_domain_dev", "out_of_domain_dev"):
        write(tmp_path / f"{stem}.tsv", f"x\t0\t\t{stem}")
    assert [example.texts[0] for example in glue.read_split("cola", tmp_path, "dev")] == [
        "in_domain_dev",
        "out_of_domain_dev",
    ]


def test_short_lines_of_qqp(tmp_path):
    header, line, *_ = FILES["qqp"]
    write(tmp_path / "train.tsv", header, line, "7\t1\t2\tonly one", line)
    assert len(glue.read_split("qqp", tmp_path, "train")) == 2


@pytest.mark.parametrize(
    ("name", "ending", "predictions", "file", "text"),
    [
        ("mnli", "_mismatched", [2, 0], "MNLI-mm.tsv", "index\tprediction\n0\tcontradiction\n1\tentailment\n"),
        ("sst2", "", [1, 0], "SST-2.tsv", "index\tprediction\n0\t1\n1\t0\n"),
        ("stsb", "", [5.5, 2.25, -1], "STS-B.tsv", "index\tprediction\n0\t5.000\n1\t2.250\n2\t0.000\n"),
    ],
)
def test_submissions(name, ending, predictions, file, text, tmp_path):
    path = glue.write_submission(name, tmp_path, ending, predictions)
    assert path == tmp_path / file and path.read_text() == text


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        ("t.tsv", ["text\tid\tlabel", 'one "two\tx\tb', "three\ty\ta"]),
        ("t.csv", ["text,id,label", '"one ""two",x,b', "three,y,a"]),
        ("t.jsonl", ['{"text": "one \\"two", "label": "b", "id": 1}', "", '{"text": "three", "label": "a"}']),
    ],
)
def test_own_tables(file, lines, tmp_path):
    rows = read_rows(write(tmp_path / file, *lines), Columns(("text",), "label"))
    assert class_names(rows) == ("a", "b")
    assert to_examples(rows, ("a", "b")) == [Example(('one "two',), 1), Example(("three",), 0)]


def test_columns_by_number_and_windows_line_ends(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_bytes("\ufeffa\tb\t10\r\nc\td\t9\r\n".encode())
    rows = read_rows(path, Columns(("0", "1"), "2"))
    assert class_names(rows) == ("9", "10")
    assert to_examples(rows, ()) == [Example(("a", "b"), 10.0), Example(("c", "d"), 9.0)]


TEXT = Columns(("text",), "label")


def test_long_text(tmp_path):
    text = "word " * 30_000  # longer than the limit of `csv`
    assert read_rows(write(tmp_path / "t.csv", "text,label", f'"{text}",a'), TEXT)[0].texts == (text,)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("t.tsv", b"text\tlabel\na\tb\tc\n", r"t\.tsv:2 has 3 columns, the first line 2"),
        ("t.tsv", b"texts\tlabel\na\tb\n", r"has no column 'text': it has texts, label\. did you mean 'texts'\?"),
        ("t.tsv", b"text\tlabel\n", r"t\.tsv has no examples"),
        ("t.tsv", b"text\tlabel\n\xff\tb\n", r"is not UTF-8 \(byte 11\)"),
        ("t.txt", b"a", r"unknown ending: it must be \.tsv, \.csv, \.jsonl"),
        ("t.csv", b'text,label\n"a,b\n', r"t\.csv:\d is not valid CSV"),
        ("t.jsonl", b"[1]\n", r"t\.jsonl:1 is not a JSON object"),
        ("t.jsonl", b"{\n", r"t\.jsonl:1 is not JSON"),
        ("t.jsonl", b'{"text": "a", "label": ' + b"1" * 5000 + b"}\n", r"t\.jsonl:1 is not JSON \(Exceeds the limit"),
        ("t.jsonl", rb'{"text": "a", "label": "\ud800"}', r"t\.jsonl:1 has half of a surrogate pair"),
        ("t.jsonl", rb'{"text": "\ud800", "label": 1}', r"t\.jsonl:1 has half of a surrogate pair"),
        ("t.jsonl", b'{"text": "a", "label": NaN}\n', r"t\.jsonl:1: the label is not a string or finite number"),
        ("t.tsv", b"text\ttext\tlabel\na\tb\tc\n", r"t\.tsv has two columns 'text'"),
        ("t.jsonl", b'{"text": "a"}\n', r"t\.jsonl:1 has no key 'label'"),
        ("t.jsonl", b'{"text": 3, "label": 1}\n', r"t\.jsonl:1: a text is not a string"),
        ("missing.tsv", None, r"missing\.tsv does not exist"),
    ],
)
def test_bad_tables(file, content, message, tmp_path):
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_rows(tmp_path / file, TEXT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("label", "labels", "message"),
    [
        ("c", ("a", "b"), r"t\.tsv:2: the label 'c' is not one of a, b"),
        ("nan", (), r"t\.tsv:2: the label 'nan' is not a number in \[-1e18, 1e18\]"),
        ("1e39", (), r"t\.tsv:2: the label '1e39' is not a number in"),
        ("", None, r"t\.tsv:2 has no label"),
        ("b", None, r"all examples have the label 'b'"),
    ],
)
def test_bad_labels(label, labels, message, tmp_path):
    rows = read_rows(write(tmp_path / "t.tsv", "text\tlabel", f"x\t{label}"), TEXT)
    with pytest.raises(UserError, match=message):
        class_names(rows) if labels is None else to_examples(rows, labels)


def test_spaces_around_a_label(tmp_path):
    rows = read_rows(write(tmp_path / "t.tsv", "text\tlabel", " x\t b", "y\tb ", "z\ta"), TEXT)
    assert class_names(rows) == ("a", "b") and [row.texts[0] for row in rows] == [" x", "y", "z"]


def test_missing_split(tmp_path):
    with pytest.raises(UserError, match=r"dev_matched\.tsv does not exist: --task mnli reads the files of GLUE's MNLI"):
        glue.read_split("mnli", tmp_path, "dev", "_matched")
