"""The pages on corpora, word for word; only the vocabularies are smaller."""

import gzip
import itertools
import json
import os
import pathlib
import shlex

import pytest

from data_prep.cli.main import main
from tests.building import make_documents, make_tokenizer
from tests.pages import code_of, lines_of


@pytest.fixture(autouse=True)
def one_worker(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def commands_of(page):
    return [shlex.split(line) for line in lines_of(page)]


def test_the_commands_and_code_of_the_page_on_corpora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("texts").mkdir()
    for index, document in enumerate(make_documents(3, 120, paragraphs=3)):
        pathlib.Path(f"texts/{index}.txt").write_text(document)
    pathlib.Path("my_dataset").mkdir()
    for seed, split in enumerate(("train", "validation"), 4):
        lines = [json.dumps({"text": text}) for text in make_documents(seed, 20)]
        pathlib.Path(f"my_dataset/{split}.jsonl").write_text("\n".join(lines))
    commands = commands_of("docs/corpus.md")
    kinds = ["tokenizer", "build", "inspect", "build", "build", "build", "inspect", "build", "inspect"]
    assert [command[1] for command in commands] == kinds
    pathlib.Path("thresholds.json").write_text(code_of("docs/corpus.md", "json"))
    pathlib.Path("keep.py").write_text(code_of("docs/corpus.md", "py"))
    for command in commands:
        assert main(["90" if word == "8192" else word for word in command[1:]]) == 0
    assert main(["verify", "corpus/mine"]) == 0
    exec(compile(code_of("docs/corpus.md", "python"), "docs/corpus.md", "exec"), {})


def test_the_commands_of_the_page_on_the_web(tmp_path, monkeypatch):
    pytest.importorskip("resiliparse", reason="needs the extra `web`")
    monkeypatch.chdir(tmp_path)
    documents = iter(make_documents(5, 400))
    for name in ("crawl", "site/sub", "datatrove_output", "dolma/documents/2024", "corpus"):
        pathlib.Path(name).mkdir(parents=True)
    make_tokenizer().save("corpus/tokenizer.json")
    member = (
        "WARC/1.0\r\nWARC-Type: {}\r\nContent-Type: {}\r\nWARC-Target-URI: http://x/{}\r\nContent-Length: {}\r\n\r\n"
    )

    def record(number, kind, content_type, body):
        return gzip.compress(member.format(kind, content_type, number, len(body)).encode() + body + b"\r\n\r\n")

    # Documents of 60 words, so that the filter keeps them.
    texts = [
        " ".join(itertools.islice(documents, 6)) + " The stone and the river, with that to be of it." for _ in range(30)
    ]
    header = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"
    pages = [f"{header}<main><p>{text}</p></main>".encode() for text in texts]
    archive = [record(i, "response", "application/http", page) for i, page in enumerate(pages)]
    pathlib.Path("crawl/a.warc.gz").write_bytes(b"".join(archive))
    pathlib.Path("crawl/b.warc.gz").write_bytes(record(99, "conversion", "text/plain", texts[0].upper().encode()))
    for index in range(9):
        pathlib.Path(f"site/sub/{index}.html").write_text(f"<p>{next(documents)}")
    lines = [{"text": next(documents), "id": str(i), "metadata": {"language": "de"}} for i in range(9)]
    content = gzip.compress("\n".join(map(json.dumps, lines)).encode())
    pathlib.Path("datatrove_output/00000.jsonl.gz").write_bytes(content)
    pathlib.Path("dolma/documents/2024/0000.json.gz").write_bytes(content)
    commands = [command for command in commands_of("docs/web.md") if command[0] == "bert-data"]
    assert [command[1] for command in commands] == ["build", "build", "inspect", "build", "build"]
    for command in commands:
        assert main(command[1:]) == 0
    assert json.loads(pathlib.Path("corpus/crawl/corpus.json").read_text())["sources"][0]["documents"] == 31
    assert [*json.loads(pathlib.Path("corpus/datatrove/corpus.json").read_text())["splits"]["train"]["languages"]] == [
        "de"
    ]


PAGE = """  <page>
    <title>{title}</title>
    <ns>0</ns>
    <id>{number}</id>
    <revision><id>{number}</id><text xml:space="preserve">'''{title}''' {{{{short|template}}}} {text}</text></revision>
  </page>
"""


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """Two small files of a dump, and questions to evaluate on."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("dump").mkdir()
    pathlib.Path("evaluation").mkdir()
    documents = make_documents(4, 400, paragraphs=8)
    for part in range(2):
        pages = [
            PAGE.format(title=f"Article {i}", number=i, text=text)
            for i, text in enumerate(documents[part * 200 : part * 200 + 200])
        ]
        content = "<mediawiki>\n" + "".join(pages) + "</mediawiki>\n"
        pathlib.Path(f"dump/part{part}.xml").write_text(content)
    pathlib.Path("evaluation/one.jsonl").write_text(json.dumps({"context": " ".join(["unheard"] * 20)}))


@pytest.mark.slow
def test_the_commands_of_the_page_on_wikipedia(dump):
    commands = [command for command in commands_of("docs/wikipedia.md") if "beam" not in command]
    assert [command[1] for command in commands] == ["install", "tokenizer", "build", "verify", "inspect", "install"]
    for command in commands:
        if command[0] == "bert-data":
            assert main(["90" if word == "30522" else word for word in command[1:]]) == 0


@pytest.mark.slow
@pytest.mark.beam
@pytest.mark.filterwarnings("default")
def test_the_cluster_command_of_the_page_on_wikipedia(dump):
    pytest.importorskip("apache_beam", reason="needs the extra `beam`")
    (command,) = [command for command in commands_of("docs/wikipedia.md") if "beam" in command]
    tokenizer = commands_of("docs/wikipedia.md")[1]
    assert main(["90" if word == "30522" else word for word in tokenizer[1:]]) == 0
    assert main(command[1:]) == 0
