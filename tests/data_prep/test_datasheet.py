"""README.md of a corpus: a golden page, its header, text that would be markup, and what people may do with it."""

import json
import os
import pathlib
import shutil

import pytest
import yaml

from bert_jax.data.corpus import Corpus
from bert_jax.report import Bars, Command, Excerpt, Note, Section, Table, markdown
from data_prep import licenses
from data_prep.cli.main import main
from data_prep.inspection import datasheet
from data_prep.verify import verify_corpus
from tests.building import make_tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/datasheet.md"
EVIL = "a|b<i>&*[x](y)`\n---\n# z: _.jsonl"
"""Would be a cell, HTML, a link, a heading, another header."""


def build(out, *words):
    make_tokenizer().save("tokenizer.json")
    return main(["build", "--tokenizer", "tokenizer.json", "--out", out, "--workers", "1", *words])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A corpus of two sources with all that a page can have."""
    directory = tmp_path_factory.mktemp("datasheet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(datasheet, "code", lambda _: {"version": "1.2.3", "commit": "", "sha256": "0" * 16})
        records = [
            {"text": f"Dark river {i} sings. Write to {i}@mail.org, <b>light</b>|stone.\n\n\x07Slow.", "lang": lang}
            for i, lang in zip(range(40), ["is", "de", "de", "zh_hant"] * 10, strict=True)
        ]
        lines = [*map(json.dumps, records), "{broken", json.dumps(records[5])]
        pathlib.Path(EVIL).write_text("\n".join(lines))
        pathlib.Path("old.txt").write_text(
            "\n\n".join(f"The stone falls over the light. {i} mountains." for i in range(9))
        )
        pathlib.Path("short.json").write_text('{"c4": {"min_sentences": 2, "without_end_mark": false}}')
        words = ["--source", f"jsonl:{EVIL}@text", "--source", "text:old.txt", "--license", "Mine-1.0"]
        words += ["--license", "CC-BY-4.0", "--language", "@lang", "--language", "en", "--filter", "short.json"]
        words += ["--mask", "email", "--name", "tiny", "--validation-documents", "5", "--memory-mb", "64"]
        assert build("c", *words) == 0
    return directory


def test_golden_page(built):
    page = (built / "c/README.md").read_text()
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text()
    manifest = json.loads((built / "c/corpus.json").read_text())
    for split, counts in manifest["splits"].items():
        for count in ("documents", "tokens"):
            assert sum(source["kept"][split][count] for source in manifest["sources"]) == counts[count] > 0
    assert [source["license"] for source in manifest["sources"]] == ["Mine-1.0", "CC-BY-4.0"]


def test_the_header_is_yaml_and_the_rest_has_no_markup_of_a_name(built):
    _, header, body = (built / "c/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header) == {
        "pretty_name": "tiny",
        "language": ["de", "en", "is", "zh"],
        "license": ["other", "cc-by-4.0"],
        "license_name": "Mine-1.0",
        "size_categories": ["n<1K"],
        "task_categories": ["fill-mask"],
        "tags": ["bert_jax"],
        "viewer": False,
    }
    assert r"jsonl:a\|b\<i\>\&\*\[x\](y)\` --- \# z: \_.jsonl@text" in body
    assert "mail.org" not in body.partition("## Build")[0], "masked, as it is stored"
    assert {line for line in body.splitlines() if line.startswith("# ")} == {"# tiny"}


def test_people_may_edit_it(built, tmp_path):
    """It belongs neither to the identity nor to the files that are verified; corpora of older versions lack it."""
    corpus = shutil.copytree(built / "c", tmp_path / "c")
    before = Corpus.open(corpus).identity, verify_corpus(corpus)
    assert "not of this corpus" not in before[1]
    (corpus / "README.md").write_text("mine")
    assert (Corpus.open(corpus).identity, verify_corpus(corpus)) == before
    (corpus / "README.md").unlink()
    assert (Corpus.open(corpus).identity, verify_corpus(corpus)) == before
    manifest = json.loads((corpus / "corpus.json").read_text())
    for source in manifest["sources"]:
        del source["license"], source["kept"]
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    assert main(["inspect", str(corpus)]) == 0


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ([], {}),
        ([None], {"license": "unknown"}),
        (["CC-BY-SA-4.0"], {"license": "cc-by-sa-4.0"}),
        (["mit", None, "MIT"], {"license": ["mit", "unknown"]}),
        (["Mine", "Mine"], {"license": "other", "license_name": "Mine"}),
        (["Mine", "mit", "Yours"], {"license": ["other", "mit"]}),
        (["no"], {"license": "other", "license_name": "no"}),
    ],
)
def test_licenses_in_the_header(given, fields):
    assert licenses.hub_fields(given) == fields
    assert yaml.safe_load(yaml.safe_dump(licenses.hub_fields(given))) == fields


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a|b"], "error: --license 'a|b': write an identifier such as cc-by-sa-4.0"),
        (["a\nb"], r"error: --license 'a\nb': write an identifier"),
        (["<script>"], "write an identifier"),
        (["a: b"], "write an identifier"),
        (["x" * 101], "at most 100"),
        (["mit", "mit"], "error: 2 --license for 1 --source: give one for all, or one for each"),
    ],
)
def test_bad_licenses(text, words, message, capsys):
    assert build("c", "--source", "text:text.txt", *(part for word in words for part in ("--license", word))) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0] and not pathlib.Path("c").exists()


@pytest.mark.parametrize(
    ("documents", "category"),
    [(2, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**7, "10M<n<100M"), (10**12, "n>1T")],
)
def test_sizes_in_the_header(documents, category):
    assert datasheet._size_category(documents) == category


def test_markdown():
    sections = [
        Section("a *b*", (Note("x\n# y", warning=True), Command("ls\n  x")), level=1),
        Section("c", (Table(("", "n"), (("|", "<b>"),)), Excerpt("d_", ("`\x1b[0m", "    e"), cut=True))),
    ]
    assert markdown.render(sections).split("\n\n") == [
        r"# a \*b\*",
        r"warning: x \# y",
        "    ls   x",
        "## c",
        "|  | n |\n| --- | ---: |\n| \\| | \\<b\\> |",
        "d\\_:",
        "    `\\x1b[0m\n        e\n    ...\n",
    ]
    with pytest.raises(ValueError, match="Bars has no form in Markdown"):
        markdown.render([Section("", (Bars((), (), whole=True),))])
