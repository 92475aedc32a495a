"""`bert-data` as a user meets it: whole builds, and every mistake as one line and exit code 2."""

import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bert_jax.data.corpus import Corpus
from bert_jax.tokenizer import Tokenizer
from data_prep import build as build_module
from data_prep.cli import main

ROOT = pathlib.Path(__file__).parents[2]
WORDS = ["the", "a", "river", "mountain", "sings", "falls", "over", "quick", "slow", "light", "dark", "stone"]


def make_text(seed, documents):
    rng = np.random.default_rng(seed)

    def sentence():
        return " ".join(rng.choice(WORDS, int(rng.integers(3, 12)))).capitalize() + "."

    return [" ".join(sentence() for _ in range(rng.integers(1, 6))) for _ in range(documents)]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents = make_text(0, 300)
    pathlib.Path("text.txt").write_text("\n\n".join(documents))
    assert main(["tokenizer", "--source", "text:text.txt", "--vocab-size", "90", "--out", "t/tokenizer.json"]) == 0
    return documents


def build(out, *arguments, source="text:text.txt"):
    fixed = ["--tokenizer", "t", "--workers", "1", "--validation-fraction", "0.1"]
    return main(["build", "--source", source, "--out", out, *fixed, *arguments])


def texts(directory, split):
    corpus = Corpus.open(directory, split)
    tokenizer = Tokenizer.load(pathlib.Path(directory) / "tokenizer.json")
    offsets = corpus.document_offsets.tolist()
    return [tokenizer.decode(corpus.sentences(a, b)) for a, b in itertools.pairwise(offsets)]


def normal(text):
    return text.lower().replace(" .", ".")


def test_a_whole_build(workspace, capsys):
    assert build("c") == 0
    summary = capsys.readouterr().out
    assert "documents" in summary and "bert-data inspect c" in summary
    found = [normal(text) for split in ("train", "validation") for text in texts("c", split)]
    assert sorted(found) == sorted(normal(text) for text in set(workspace))
    assert 10 < Corpus.open("c", "validation").num_documents < 60
    assert Corpus.open("c").name == "c"
    assert main(["inspect", "c"]) == 0
    description = capsys.readouterr().out
    assert "tokens in a sentence, train" in description and "text:text.txt" in description
    assert main(["verify", "c"]) == 0
    assert "intact; 13 files" in capsys.readouterr().out
    manifest = json.loads(pathlib.Path("c/corpus.json").read_text())
    assert manifest["sources"][0]["files"][0]["bytes"] == pathlib.Path("text.txt").stat().st_size
    assert not pathlib.Path("c/corpus.incomplete").exists()


def test_same_bytes_for_any_number_of_workers(workspace, monkeypatch):
    monkeypatch.setattr(build_module, "_CHARACTERS_PER_TASK", 500)
    for out, workers in (("one", "1"), ("two", "2")):
        assert build(out, "--workers", workers, "--name", "same", "--max-shard-mb", "1") == 0
    names = sorted(path.name for path in pathlib.Path("one").iterdir())
    assert names == sorted(path.name for path in pathlib.Path("two").iterdir())
    for name in names:
        assert (pathlib.Path("one") / name).read_bytes() == (pathlib.Path("two") / name).read_bytes(), name


def test_duplicates_and_empty_documents_are_counted(workspace):
    again = [workspace[0], workspace[1].replace(" ", "  "), "\u200b\u00ad"]
    pathlib.Path("more.txt").write_text("\n\n".join(again))
    assert build("c", "--source", "text:more.txt") == 0
    repeated = len(workspace) - len(set(workspace))
    manifest = json.loads(pathlib.Path("c/corpus.json").read_text())
    assert manifest["dropped"] == {"empty_documents": 1, "duplicate_documents": 2 + repeated}


def test_adding_text_moves_no_document(workspace):
    pathlib.Path("more.txt").write_text("\n\n".join(make_text(1, 200)))
    assert build("before") == 0
    assert build("after", "--source", "text:more.txt") == 0
    for split in ("train", "validation"):
        before, after = texts("before", split), texts("after", split)
        assert len(before) < len(after)
        assert after[: len(before)] == before


def test_lines_keep_their_sentences(workspace):
    lines = ["The river. The stone.", "a wind", "", "water falls", "over", "", "dark"]
    pathlib.Path("lines.txt").write_text("\n".join(lines))
    assert build("c", "--validation-fraction", "0.4", source="lines:lines.txt") == 0
    sentences = sum(Corpus.open("c", split).num_sentences for split in ("train", "validation"))
    assert sentences == 5


def test_module_is_runnable_and_a_killed_build_does_not_count(workspace, capsys):
    code = (
        "import sys, time; from data_prep import writer, cli;"
        "writer.CorpusWriter.finish = lambda *_: (print('here', flush=True), time.sleep(60));"
        "cli.main(sys.argv[1:])"
    )
    command = ["build", "--source", "text:text.txt", "--tokenizer", "t", "--out", "c", "--workers", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout.readline() == b"here\n"
        process.send_signal(signal.SIGKILL)
    assert pathlib.Path("c/corpus.incomplete").exists()
    assert main(["verify", "c"]) == 2
    assert "not a finished corpus" in capsys.readouterr().err
    pathlib.Path("c/left-over").write_text("x")
    finished = subprocess.run(
        [sys.executable, "-m", "data_prep", *command], env=environment, check=True, capture_output=True
    )
    assert b"ready in" in finished.stdout
    assert not pathlib.Path("c/left-over").exists()
    assert main(["verify", "c"]) == 0


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def test_verify_names_the_file_with_one_flipped_bit(workspace, capsys):
    assert build("c") == 0
    files = [path for path in sorted(pathlib.Path("c").iterdir()) if path.name != "corpus.json"]
    assert len(files) == 13
    for path in files:
        flip(path, path.stat().st_size // 2)
        capsys.readouterr()
        assert main(["verify", "c"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {path}: damaged")
        flip(path, path.stat().st_size // 2)
    assert main(["verify", "c"]) == 0


@pytest.mark.parametrize(
    ("array", "message"),
    [("sentence_lengths", "record 0 of train contradicts"), ("token_counts", "token_counts.npy: contradicts")],
)
def test_verify_reads_records_too(workspace, capsys, array, message):
    """Checksums that were written over wrong content do not help it."""
    from data_prep.writer import file_facts

    assert build("c") == 0
    path = pathlib.Path(f"c/train.{array}.npy")
    values = np.load(path)
    values[0] += 1
    values[-1] -= 1
    np.save(path, values)
    manifest = json.loads(pathlib.Path("c/corpus.json").read_text())
    manifest["files"][path.name] = file_facts(path)
    pathlib.Path("c/corpus.json").write_text(json.dumps(manifest))
    assert main(["verify", "c"]) == 2
    assert message in capsys.readouterr().err


TOKENIZER = ["tokenizer", "--vocab-size", "90", "--out", "new.json", "--source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TOKENIZER, "txt:text.txt"], "unknown kind 'txt', did you mean 'text'?"),
        ([*TOKENIZER, "text-file:text.txt"], "did you mean 'text-files'?"),
        ([*TOKENIZER, "text"], "say which files"),
        ([*TOKENIZER, "python-docs:x"], "takes no glob"),
        ([*TOKENIZER, "text:absent/*.txt"], "no file matches absent/*.txt"),
        ([*TOKENIZER, "text:empty.txt"], "empty.txt: no text"),
        ([*TOKENIZER, "text:latin1.txt"], "latin1.txt: not UTF-8 at byte 7"),
        ([*TOKENIZER, "text:text.txt", "--vocab-size", "9"], "use at least"),
        ([*TOKENIZER, "text:text.txt", "--out", "text.txt"], "text.txt: exists already"),
        (["inspect", "absent"], "no such corpus"),
        (["verify", "t"], "not a finished corpus"),
    ],
)
def test_user_errors(workspace, capsys, arguments, message):
    pathlib.Path("empty.txt").write_text(" \n")
    pathlib.Path("latin1.txt").write_bytes(b"abc\nde \xe9")
    expect_error(capsys, arguments, message)
    assert not pathlib.Path("new.json").exists()


def expect_error(capsys, arguments, message):
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0], captured.err
    assert "Traceback" not in captured.err and not captured.out


def build_arguments(out="c", source="text:text.txt", *more):
    return ["build", "--source", source, "--tokenizer", "t", "--out", out, "--workers", "1", *more]


def test_build_refuses_to_overwrite(workspace, capsys):
    assert build("c") == 0
    before = {path: path.read_bytes() for path in pathlib.Path("c").iterdir()}
    expect_error(capsys, build_arguments("c"), "c: already holds a corpus")
    assert before == {path: path.read_bytes() for path in pathlib.Path("c").iterdir()}
    expect_error(capsys, build_arguments("text.txt"), "text.txt: is a file")
    expect_error(capsys, build_arguments("t"), "t: is not empty")


def test_build_errors(workspace, capsys):
    pathlib.Path("one.txt").write_text("Only one document.")
    expect_error(capsys, build_arguments("c", "text:one.txt"), "hold 1 different documents")
    expect_error(capsys, ["build", "--source", "text:one.txt", "--tokenizer", "no", "--out", "c"], "no such tokenizer")
    expect_error(capsys, build_arguments("c/1"), "give one with --name")
    pathlib.Path("few.txt").write_text("\n\n".join(make_text(2, 4)))
    tiny = build_arguments("c", "text:few.txt", "--validation-fraction", "1e-9")
    hint = "none of the 4 documents fell into the validation split; --validation-fraction "
    expect_error(capsys, tiny, hint)
    assert main(tiny) == 2
    fraction = capsys.readouterr().err.split("--validation-fraction ")[1].split()[0]
    assert main(build_arguments("c", "text:few.txt", "--validation-fraction", fraction)) == 0
    large = build_arguments("d", "text:few.txt", "--validation-fraction", "0.999999999")
    expect_error(capsys, large, "all of the 4 documents fell into the validation split")
    assert main(large) == 2
    fraction = capsys.readouterr().err.split("--validation-fraction ")[1].split()[0]
    assert main(build_arguments("d", "text:few.txt", "--validation-fraction", fraction)) == 0


def test_arguments_out_of_range(workspace, capsys):
    for more in (["--workers", "0"], ["--validation-fraction", "1"], ["--name", "Not a name"]):
        with pytest.raises(SystemExit) as exit_info:
            main([*build_arguments(), *more])
        assert exit_info.value.code == 2
        assert "error: argument" in capsys.readouterr().err


def test_a_failure_names_its_document(workspace, monkeypatch):
    def fail(text):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(build_module, "split_sentences", fail)
    with pytest.raises(ZeroDivisionError) as error:
        build("c")
    assert error.value.__notes__ == ["while preparing the document at text.txt:1"]


def test_python_docs_end_to_end(workspace, monkeypatch):
    from data_prep import python_docs

    started = time.perf_counter()
    monkeypatch.setattr(python_docs, "MAX_BYTES", 300_000)
    assert build("c", source="python-docs") == 0
    assert Corpus.open("c").num_documents > 20
    assert time.perf_counter() - started < 60
    manifest = json.loads(pathlib.Path("c/corpus.json").read_text())
    assert "numpy" in manifest["sources"][0]["packages"]


def test_the_commands_and_code_of_the_docs_page(tmp_path, monkeypatch):
    """docs/corpus.md, word for word; only the vocabulary is smaller."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("texts").mkdir()
    pathlib.Path("texts/a.txt").write_text("\n\n".join(make_text(3, 400)))
    page = (ROOT / "docs" / "corpus.md").read_text()
    bash = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [shlex.split(line) for block in bash for line in block.splitlines()]
    assert [command[:2] for command in commands] == [["bert-data", c] for c in ("tokenizer", "build", "inspect")]
    for command in commands:
        assert main(["90" if word == "8192" else word for word in command[1:]]) == 0
    assert main(re.search(r"`bert-data (verify [^`]+)`", page)[1].split()) == 0
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/corpus.md", "exec"), {})
