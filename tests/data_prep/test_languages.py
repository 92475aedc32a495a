"""Languages of documents: given, from a field, or identified; rules of sentences, counts, mistakes."""

import json
import pathlib
import sys

import pytest
import sentencex

from data_prep import languages
from data_prep.build_options import BuildOptions
from data_prep.builder import prepare
from data_prep.cli.main import main
from tests.building import files, make_tokenizer, run

GERMAN = "Der Brief kam am 3. Januar an, und niemand hat ihn damals gelesen. Es war sehr kalt in der Stadt. Nummer {}."
"""Three sentences by German rules, four by English ones."""
ENGLISH = "The letter arrived in the winter and nobody has read it so far. It was very cold in the town. Number {}."
ICELANDIC = "Bréfið kom um veturinn og enginn hefur lesið það hingað til. Það var mjög kalt í bænum. Númer {}."
TEXTS = {"de": (GERMAN, 40), "en": (ENGLISH, 30), "is": (ICELANDIC, 20)}
FLAGS = ["--tokenizer", "tokenizer.json", "--validation-fraction", "0.2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A file of documents for each language, all as JSON lines and Parquet, and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    records = []
    for language, (text, count) in TEXTS.items():
        documents = [text.format(i) for i in range(count)]
        pathlib.Path(f"{language}.txt").write_text("\n\n".join(documents))
        records += [{"text": one, "meta": {"lang": language.upper()}} for one in documents]
    records[5]["meta"]["lang"] = "german"
    records[6]["meta"]["lang"] = None
    pathlib.Path("all.jsonl").write_text("\n".join(map(json.dumps, records)))
    make_tokenizer("äöüßéíðþæó").save("tokenizer.json")
    return tmp_path


def build(out, *words, workers=1):
    return main(["build", *FLAGS, "--out", out, "--workers", str(workers), *words])


def counts(out):
    """Counts by language, of both splits together; they sum to those of the splits."""
    manifest = json.loads(pathlib.Path(out, "corpus.json").read_text())
    total = {}
    for split in manifest["splits"].values():
        for name in ("documents", "sentences", "tokens", "unknown_tokens", "text_bytes"):
            assert sum(language[name] for language in split["languages"].values()) == split[name]
        for code, language in split["languages"].items():
            total[code] = {name: value + total.get(code, {}).get(name, 0) for name, value in language.items()}
    return total


def expected(rules):
    """Documents, sentences and bytes by language; `rules` are the codes by whose rules sentences are split."""
    return {
        code: {
            "documents": count,
            "sentences": count * len(sentencex.segment(rules.get(code, code), text.format(1))),
            "text_bytes": sum(len(text.format(i).encode()) for i in range(count)),
        }
        for code, (text, count) in TEXTS.items()
    }


def without_tokens(by_language):
    kept = ("documents", "sentences", "text_bytes")
    return {code: {name: language[name] for name in kept} for code, language in by_language.items()}


SOURCES = [word for code in TEXTS for word in ("--source", f"text:{code}.txt")]


def test_a_language_for_each_source(folder, capsys):
    assert build("each", *SOURCES, "--language", "de", "--language", "EN", "--language", "is") == 0
    captured = capsys.readouterr()
    assert (
        "note: 20 documents are in languages without rules for sentences (is (20)): those of a related language"
        in captured.err
    )
    assert without_tokens(counts("each")) == expected({}) and "Languages" in captured.out
    assert build("one", *SOURCES, "--language", "de") == 0
    sentences = sum(language["sentences"] for language in expected(dict.fromkeys(TEXTS, "de")).values())
    assert [*counts("one")] == ["de"] and counts("one")["de"]["sentences"] == sentences
    assert build("default", *SOURCES) == 0
    assert [*counts("default")] == ["en"] and counts("default")["en"]["sentences"] == sentences + 40
    sources = json.loads(pathlib.Path("each/corpus.json").read_text())["sources"]
    assert [source["language"] for source in sources] == ["de", "en", "is"]


def test_counts_of_several_shards_are_summed(folder):
    options = BuildOptions(validation_fraction=0.2, max_shard_bytes=1000)
    manifest = run("c", ["text:de.txt", "text:en.txt"], options)
    assert len(manifest["splits"]["train"]["shards"]) > 1
    assert counts("c")["en"]["documents"] == 70


def test_the_report_has_counts_by_language(folder, capsys):
    assert build("each", *SOURCES, "--language", "de", "--language", "en", "--language", "is") == 0
    capsys.readouterr()
    assert main(["inspect", "each", "--html", "page.html"]) == 0
    german, page = counts("each")["de"], pathlib.Path("page.html").read_text()
    row = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("de ")]
    assert row[0][1:4] == ["40", "120", f"{german['tokens']:,}"] and row[0][-2:] == ["its", "own"]
    assert f"{german['tokens']:,}" in page and "its own" in page
    assert main(["inspect", "each", "--json"]) == 0
    (described,) = json.loads(capsys.readouterr().out)["corpora"]
    assert sum(split["languages"]["de"]["tokens"] for split in described["splits"].values()) == german["tokens"]
    # A corpus from before languages were counted.
    manifest = json.loads(pathlib.Path("each/corpus.json").read_text())
    for split in manifest["splits"].values():
        del split["languages"]
    pathlib.Path("each/corpus.json").write_text(json.dumps(manifest))
    assert main(["inspect", "each"]) == 0 and "its own" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_has_the_language(folder, kind, capsys):
    pytest.importorskip("orjson")
    records = [json.loads(line) for line in pathlib.Path("all.jsonl").read_text().splitlines()]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), "all.parquet", row_group_size=17)
    assert build("c", "--source", f"{kind}:all.{kind}@text", "--language", "@meta.lang") == 0
    notes = capsys.readouterr().err
    assert "22 documents are in languages without rules for sentences (is (20), und (2)): " in notes
    assert "2 of 90 texts of source" in notes and "in the field 'meta.lang'; it has 'german'" in notes
    found, wanted = counts("c"), expected({})
    assert found.pop("und")["sentences"] == 2 * 4, "English rules"
    assert found["de"]["documents"] == 38 and found["de"]["sentences"] == 38 * 3
    assert {code: found[code]["sentences"] for code in ("en", "is")} == {
        code: wanted[code]["sentences"] for code in ("en", "is")
    }


def test_languages_are_identified(folder):
    pytest.importorskip("pycld2")
    assert build("auto", *SOURCES, "--language", "auto", "--name", "c") == 0
    assert build("each", *SOURCES, "--language", "de", "--language", "en", "--language", "is", "--name", "c") == 0
    assert counts("auto") == counts("each")
    auto, each = files("auto"), files("each")
    for about in ("corpus.json", "README.md"):
        assert auto.pop(about) != each.pop(about)
    assert auto == each


def test_identification():
    pytest.importorskip("pycld2")
    for code, (text, _) in TEXTS.items():
        assert languages.identify(text) == code
        # A long text: a preface in another language does not count.
        assert languages.identify(ENGLISH * 30 + text * 300) == code
        assert languages.identify(f"\ufdd0\x07{text}") == code, "characters that the library refuses"
    assert [languages.identify(text) for text in ("", " ", "12 34", "\x00")] == ["und"] * 4
    assert languages.identify("זו היא שפה עתיקה שנכתבת מימין לשמאל") == "he"
    assert languages.identify("這是一個用繁體中文寫成的句子，內容很長。") == "zh-Hant"


@pytest.mark.parametrize(
    ("value", "code", "splitter", "rules"),
    [
        (" EN ", "en", "en", True),
        ("zh_hant", "zh-Hant", "zh", False),
        ("deu", "de", "de", True),
        ("ger", "de", "de", True),
        ("slo", "sk", "sk", True),
        ("de-at", "de-AT", "de", True),
        ("pt-br", "pt-BR", "pt", True),
        ("arb", "arb", "ar", True),
        ("iw", "he", "he", False),
        ("is", "is", "is", False),
        *((value, "und", "und", False) for value in ("", "e", "german", "zzz", "xx", "x-private", "de at", None, 3)),
    ],
)
def test_codes(value, code, splitter, rules):
    assert languages.normalize(value) == code
    assert (languages.splitter_code(code), languages.has_rules(code)) == (splitter, rules)
    assert languages.has_rules(str(value)) == rules  # corpus.json may hold anything


def test_rules_are_those_of_the_language():
    assert len(sentencex.segment(languages.splitter_code("arb"), "ما هذا؟ لا أعرف.")) > 1
    assert len(sentencex.segment(languages.splitter_code("deu"), GERMAN)) < len(sentencex.segment("en", GERMAN))


def test_another_language_prepares_the_text_of_its_source_again(folder, monkeypatch):
    """The prepared text of the other sources is used again; the corpus is that of a new build."""
    words = [*SOURCES, "--language", "en", "--language", "en", "--language"]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data_prep.builder.pipeline._decide", interrupted)
        assert build("c", *words, "en", "--scratch", "s") != 0
    prepared, real = [], prepare.BlockPreparer.__call__
    monkeypatch.setattr(
        prepare.BlockPreparer, "__call__", lambda self, task: prepared.append(task.source) or real(self, task)
    )
    assert build("c", *words, "is", "--scratch", "s") == 0
    assert prepared == [2]
    assert build("new", *words, "is", "--name", "c") == 0
    assert files("c") == files("new")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["@meta.lang", "auto"])
def test_same_bytes_with_two_workers(folder, setting):
    pytest.importorskip("pycld2")
    pytest.importorskip("orjson")
    words = ["--source", "jsonl:all.jsonl@text", "--language", setting, "--name", "c"]
    assert build("one", *words) == 0 and build("two", *words, workers=2) == 0
    assert files("one") == files("two")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--language", "de", "--language", "en"], "2 --language for 3 --source: give one for all, or one for each"),
        (["--language", "english"], "--language english: it is not an ISO 639 code such as en, de or zh, nor @FIELD"),
        (["--language", "zzz"], "--language zzz: it is not an ISO 639 code"),
        (["--language", "@"], "--language @: it is not an ISO 639 code"),
        (["--language", "@lang"], "--language @lang: source text:de.txt has no fields"),
    ],
)
def test_mistakes(folder, capsys, words, message):
    assert build("c", *SOURCES, *words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0] and not pathlib.Path("c").exists()


def test_a_misspelt_field(folder, capsys):
    pytest.importorskip("orjson")
    assert build("c", "--source", "jsonl:all.jsonl@text", "--language", "@meta.language") == 2
    error = capsys.readouterr().err
    assert "no document of source jsonl:all.jsonl@text has an ISO 639 code in the field 'meta.language'" in error
    assert not pathlib.Path("c/corpus.json").exists()


def test_identification_is_an_extra(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycld2", None)
    assert build("c", *SOURCES, "--language", "auto") == 2
    error = capsys.readouterr().err
    assert "--keep-language) needs pycld2, which is missing: pip install" in error and not pathlib.Path("c").exists()
