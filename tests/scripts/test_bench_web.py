"""scripts/benchmarks/bench_web.py: its archive is what it says, its counts are those of builds. Nothing is timed."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest

from data_prep import sources
from data_prep.sources.base import Document, InputRecord
from tests.pages import load_script

pytest.importorskip("resiliparse", reason="needs the extra `web`")

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
WORDS = {
    "en": "the of and to that with have be which house river mountain winter children yesterday window never under"
    " people through morning their would always little friend because garden school another without letter knowledge",
    "de": "der die und nicht mit haben werden welche Haus Fluss Gebirge Winter Kinder gestern Fenster schön niemals"
    " Leute durch Morgen ihre würde immer kleine Freundin weil Garten Schule andere ohne Brief Erkenntnis zwischen",
    "ru": "и в не на что который быть дом река гора зима дети вчера окно никогда под люди через утро их бы всегда"
    " маленький друг потому сад школа другой без письмо знание между который после перед вместе",
}


def paragraphs(code: str, count: int) -> list[str]:
    """Words in random order, each paragraph with a number of its own and characters of HTML."""
    rng, words = np.random.default_rng(0), WORDS[code].split()
    return [f"{' '.join(rng.choice(words, 30))} <i{index}> &amp; {index}." for index in range(count)]


@pytest.fixture
def bench_web():
    return load_script(FOLDER / "bench_web.py")


def test_every_page_is_read_as_it_was_made(bench_web, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = bench_web.web_pages
    texts = {code: paragraphs(code, 40) for code in ("en", "ru", "de")}
    pages = make.make_pages(texts, paragraphs("de", 20), 240, seed=0)
    assert {page.kind for page in pages} == {*make.KINDS} and pages == make.make_pages(
        texts, paragraphs("de", 20), 240, 0
    )
    Path("pages.warc.gz").write_bytes(b"".join(make.archive(pages, 0)))
    found, skipped, source = {}, collections.Counter(), sources.parse("warc:pages.warc.gz")
    for part in source.inputs():
        for block in source.read_blocks(part, InputRecord()):
            for item in source.documents(block):
                if isinstance(item, Document):
                    found[int(item.origin.rpartition("/")[2])] = " ".join(item.text.split())
                else:
                    skipped[item.reason] += 1
    assert {*found} == {page.number for page in pages} and {*skipped} == {"http_status", "not_html"}
    for page in pages:
        place = 0
        for one in page.paragraphs:
            place = found[page.number].index(" ".join(one.split()), place)
        assert f"({page.original:06d})" in found[page.number] or page.kind == "print version"
    assert not any(around in text for text in found.values() for around in make.AROUND[:2])


def test_kept(bench_web):
    make = bench_web.web_pages
    rows = [(0, "article", 0), (1, "copy", 0), (2, "article", 2), (3, "stub", 3), (4, "copy", 2)]
    pages = [make.Page(number, kind, "en", ("text",), original) for number, kind, original in rows]
    counts = {kind: n for kind, n in bench_web.kept(pages, {0: 2, 2: 1}).items() if n}
    assert counts == {"article": 2, "copy": 1}


@pytest.mark.slow
def test_counts(bench_web, tmp_path, capsys):
    for package in ("pycld2", "apache_beam"):
        pytest.importorskip(package)
    for folder, codes in (("texts", ("en", "ru")), ("others", ("de",))):
        (tmp_path / folder).mkdir()
        for code in codes:
            (tmp_path / folder / f"{code}.txt").write_text("\n".join(paragraphs(code, 40)), encoding="utf-8")
    words = f"--texts {tmp_path}/texts --others {tmp_path}/others --pages 90 --rounds 1 --kills 1 --steps 10"
    assert bench_web.main([*words.split(), "--json", str(tmp_path / "web.json")]) == 0
    report = json.loads((tmp_path / "web.json").read_text())
    rows = {row["stage"]: row for row in report["stages"]}
    kinds = [*bench_web.web_pages.KINDS]
    assert {kind: rows["extract"][kind] for kind in kinds} == {kind: rows["archive"][kind] for kind in kinds}
    assert rows["extract"]["documents"] == 90 and report["extraction"][0]["paragraphs kept"] == 1
    assert rows["quality"]["repeated lines"] == rows["duplicates"]["copy"] == 0 < rows["quality"]["copy"]
    before, after = report["personal data"]
    assert before["email"] == before["ip"] == before["phone"] > 0 == after["email"] == after["ip"] == after["phone"]
    assert report["same bytes"] == [{"2 workers": True, "Beam": True}] and report["killed"][0]["same bytes"] == 1
    assert "CPU s" in capsys.readouterr().out
    assert bench_web.main(["--texts", str(tmp_path), "--others", str(tmp_path)]) == 2
    assert "no *.txt in it" in capsys.readouterr().err
