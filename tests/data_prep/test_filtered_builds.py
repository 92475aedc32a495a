"""Builds with filters: what is removed and counted, the same for any number of workers; functions; mistakes."""

import json
import pathlib

import pytest

from bert_jax.errors import UserError
from data_prep.build_options import BuildOptions
from data_prep.builder import prepare
from data_prep.builder.engines.local import LocalEngine
from data_prep.cli.main import main
from data_prep.filters.chain import Filters
from data_prep.filters.function import FilterFunction
from data_prep.filters.gopher import GopherQuality
from tests.building import files, interrupted, make_tokenizer, run, texts

WORDS = {"min_words": 12, "min_mean_word_length": None, "min_stop_words": None}
OPTIONS = BuildOptions(
    validation_fraction=0.2, filters=Filters(gopher_quality=GopherQuality(**WORDS)), masks=("email",)
)


def is_short(document):
    return len(document.split()) < WORDS["min_words"]


@pytest.fixture
def two_sources(text):
    """The documents of text.txt, and records in two languages of which some are short."""
    records = [
        {"text": f"The river falls {i} {'over a dark stone ' * (i % 5)}. Write to {i}@mail.org.\n\nHome", "lang": lang}
        for i, lang in zip(range(60), ["is", "de", "de"] * 20, strict=True)
    ]
    pathlib.Path("data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return text, records


def build(out, *words):
    make_tokenizer().save("tokenizer.json")
    return main(["build", "--tokenizer", "tokenizer.json", "--validation-fraction", "0.2", "--out", out, *words])


def test_counts_examples_and_workers(two_sources):
    documents, records = two_sources
    manifest = run("one", ["text:text.txt", "jsonl:data.jsonl@text"], OPTIONS)
    run("two", ["text:text.txt", "jsonl:data.jsonl@text"], OPTIONS, LocalEngine(2))
    assert files("one") == files("two")
    short = [document for document in documents if is_short(document)]
    short_records = [record["text"] for record in records if is_short(record["text"])]
    filters, rule = manifest["filters"], "gopher_quality.min_words"
    found = {group["source"]: group for group in filters["groups"]}
    assert [found[0]["documents"], found[1]["documents"]] == [302, 60]
    assert found[0]["removed"][rule]["documents"] == len(short)
    assert found[1]["removed"][rule]["documents"] == len(short_records)
    both = short + [text.strip() for text in short_records]
    expected = {"documents": len(both), "text_bytes": sum(len(text.encode()) for text in both)}
    assert manifest["dropped"]["filtered_documents"] == expected and [*filters["rules"]] == [rule]
    examples = filters["rules"][rule].pop("examples")
    assert filters["rules"][rule] == expected and len({example["text"] for example in examples}) == 3
    assert all(is_short(example["text"]) for example in examples) and ":" in examples[0]["origin"]
    kept = [document for document in {*documents, *(record["text"] for record in records)} if not is_short(document)]
    masked = sum("mail.org" in document for document in kept)
    assert manifest["cleaned"]["email_masks"] == masked > 0
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(kept) == len(texts("one"))


def test_long_documents_are_judged_in_parts(text, monkeypatch):
    """A document is removed if a filter removes parts with at least half of its characters."""
    monkeypatch.setattr(prepare, "PART_CHARACTERS", 400)
    good, bad = "the river sings over a stone " * 30, "- 1 2 3 4 5 6 7 8 9 " * 30
    for name, content in {"good": good * 2, "tail": good + bad[:300], "bad": bad + good[:100], "b": good[:-2]}.items():
        pathlib.Path(f"{name}.md").write_text(content)
    few = GopherQuality(min_words=None, min_mean_word_length=None, min_stop_words=None)
    options = BuildOptions(validation_fraction=0.2, filters=Filters(gopher_quality=few))
    manifest = run("c", ["text-files:*.md"], options, block_bytes=150)
    assert manifest["dropped"]["filtered_documents"]["documents"] == 1
    (removed,) = manifest["filters"]["rules"].values()
    assert 690 < removed["text_bytes"] <= 700, "without spaces between the parts"
    assert {example["origin"] for example in removed["examples"]} == {"bad.md"}
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == 3


def test_inspect_and_flags(two_sources, capsys):
    pathlib.Path("words.json").write_text(json.dumps({"gopher_quality": WORDS}))
    pathlib.Path("c4.json").write_text('{"c4": {"min_sentences": null}}')
    flags = ["--language", "@lang", "--filter", "words.json", "--filter", "c4.json", "--workers", "1"]
    assert build("c", "--source", "jsonl:data.jsonl@text", *flags) == 0, capsys.readouterr().err
    assert "The filters read 60 documents." in capsys.readouterr().out
    assert main(["inspect", "c"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.startswith("gopher_quality.min_words ")]
    assert rows == [
        ["gopher_quality.min_words", "12", "20.00%", *rows[0][3:]],
        ["gopher_quality.min_words", "jsonl:data.jsonl@text", "de", "8", "20.00%"],
        ["gopher_quality.min_words", "jsonl:data.jsonl@text", "is", "4", "20.00%"],
    ]
    assert "Examples of what filters removed" in shown and "c4.without_end_mark: data.jsonl:" in shown
    assert main(["inspect", "c", "--json"]) == 0
    (corpus,) = json.loads(capsys.readouterr().out)["corpora"]
    assert corpus["filters"]["rules"]["gopher_quality.min_words"]["documents"] == 12
    assert (
        main(["inspect", "c", "--html", "c.html"]) == 0
        and "gopher_quality.min_words" in pathlib.Path("c.html").read_text()
    )


def test_a_resumed_build_has_the_new_thresholds(text):
    with interrupted("writer.finish_corpus"):
        run("c", ["text:text.txt"])
    with interrupted("pipeline.decide"):
        run("c", ["text:text.txt"], OPTIONS)
    run("c", ["text:text.txt"], OPTIONS)
    run("fresh", ["text:text.txt"], OPTIONS)
    assert files("c") == files("fresh") and len(texts("c")) < 300


KEEP = """
def keep(text, language):
    if "quick light" in text:
        raise ValueError("cannot read\\nthis")
    return "stone" in text and language == "en"

def wrong(text, language):
    return 1

number = 3
"""


def test_a_function(text, capsys):
    pathlib.Path("keep.py").write_text(KEEP)
    failed = [document for document in text if "quick light" in document]
    assert build("c", "--source", "text:text.txt", "--filter-function", "keep.py:keep") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        "text.txt:" in message and "keep.py:keep raises ValueError: cannot read this; or add --skip-damaged" in message
    )
    flags = ["--source", "text:text.txt", "--filter-function", "keep.py:keep", "--skip-damaged", "--workers", "2"]
    assert build("c", *flags) == 0
    manifest = json.loads(pathlib.Path("c/corpus.json").read_text())
    skipped = manifest["skipped"]["filter_function_failed"]
    assert skipped["count"] == len(failed) > 1 and skipped["bytes"] == sum(map(len, failed))
    assert "text.txt:" in skipped["first"][0] and "cannot read this" in skipped["first"][0]
    others = {document for document in text if "quick light" not in document}
    removed = [document for document in text if "quick light" not in document and "stone" not in document]
    assert manifest["filters"]["rules"]["keep.py:keep"]["documents"] == len(removed) > 0
    assert len(texts("c")) == len(others - {*removed})
    capsys.readouterr()
    for name, problem in {
        "keep.py:wrong": "keep.py:wrong returns int, not True (keep) or False",
        "keep.py:number": "keep.py has no function number",
        "none.py:keep": "FileNotFoundError",
        "no.such:keep": "ModuleNotFoundError",
        "no_such:keep": "there is no module no_such",
        "sys:exit": "sys is not a file of Python",
        "keep": "write MODULE:FUNCTION or PATH.py:FUNCTION",
    }.items():
        assert build("d", "--source", "text:text.txt", "--filter-function", name, "--workers", "1") == 2
        assert problem in capsys.readouterr().err.splitlines()[-1]
        assert not pathlib.Path("d").exists()


def test_what_a_function_failed_on_is_not_used_without_the_flag(text):
    pathlib.Path("keep.py").write_text(KEEP)
    options = BuildOptions(
        validation_fraction=0.2, filter_functions=(FilterFunction.load("keep.py:keep"),), skip_damaged=True
    )
    with interrupted("writer.finish_corpus"):
        run("c", ["text:text.txt"], options)
    with pytest.raises(UserError, match="cannot read this"):
        run("c", ["text:text.txt"], BuildOptions(validation_fraction=0.2, filter_functions=options.filter_functions))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--filter gopher", "--filter gopher: it is none of language, gopher_repetition, gopher_quality, c4, fineweb"),
        ("--filter c4 --filter c4", "--filter c4: the thresholds of c4 are given twice"),
        ("--filter language", "language.keep is empty"),
        ("--filter none.json", "none.json"),
        ("--filter bad.json", "bad.json: unknown field 'c4.min_sentence': did you mean 'min_sentences'?"),
        ("--filter order.json", "order.json: gopher_quality.min_words is 9 and gopher_quality.max_words is 8"),
        ("--mask name", "--mask name: it is none of email, ip, phone"),
        ("--keep-language english", "language english: it is not the ISO 639 code of a language that CLD2 identifies"),
    ],
)  # fmt: skip
def test_mistakes(text, flags, message, capsys):
    if "language" in flags:
        pytest.importorskip("pycld2")
    pathlib.Path("bad.json").write_text('{"c4": {"min_sentence": 3}}')
    pathlib.Path("order.json").write_text('{"gopher_quality": {"min_words": 9, "max_words": 8}}')
    assert build("c", "--source", "text:text.txt", *flags.split()) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1] and not pathlib.Path("c").exists()


def test_documents_of_a_language_that_is_not_kept_are_said(text, capsys):
    """Their language is identified for this filter only; `--filter language` beside it adds nothing."""
    pytest.importorskip("pycld2")
    flags = "--source text:text.txt --filter language --keep-language de --workers 1"
    assert build("c", *flags.split()) == 2, "no document is in German"
    note = "note: source text:text.txt: its documents count as en for all rules but --keep-language"
    assert note in capsys.readouterr().err
    assert build("c", *flags.replace("de", "de --keep-language en").split()) == 0
    assert note not in capsys.readouterr().err


def test_a_language_that_filters_remove_is_said(text, capsys):
    """Chinese has no spaces, so each document is a few words."""
    lines = [
        json.dumps({"text": f"人人生而自由，在尊严和权利上一律平等。{index}", "lang": "zh"}) for index in range(30)
    ]
    lines += [json.dumps({"text": f"{'the river and that ' * 15} {index}", "lang": "en"}) for index in range(30)]
    pathlib.Path("two.jsonl").write_text("\n".join(lines))
    flags = "--source jsonl:two.jsonl@text --language @lang --filter gopher_quality --workers 1"
    assert build("c", *flags.split()) == 0
    message = (
        "removed nearly all documents in zh (30 of 30, most by gopher_quality.min_words): their thresholds are for"
    )
    assert message in capsys.readouterr().err
