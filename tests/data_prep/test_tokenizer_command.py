"""`bert-data tokenizer` as a user meets it, and the commands of its page."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from bert_jax.tokenizers.kinds import SPECIAL_TOKENS, byte_alphabet
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.cli.main import main
from data_prep.vocabularies.train import KINDS
from tests.pages import code_of, lines_of
from tests.tokenizers.test_tokenizer import LINES, train

ROOT = Path(__file__).parents[2]
WORDS = {
    "en": "the a river mountain sings falls over quick slow light dark stone water cloud",
    "de": "der die das fluss berg singt fällt über schnell langsam licht dunkel stein wasser wolke",
    "is": "áin fjallið syngur fellur yfir hratt hægt ljós dimmt steinn vatn ský og þetta er",
}


@functools.cache
def unigram_model():
    return train(LINES, "unigram")


def make_texts(language, documents):
    rng = np.random.default_rng(len(language) + documents)
    words = WORDS[language].split()
    sentences = [" ".join(rng.choice(words, rng.integers(3, 12))).capitalize() + "." for _ in range(4 * documents)]
    return "\n\n".join(" ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Texts in three languages, and vocabularies as other tools write them."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for language, documents in (("en", 300), ("de", 100), ("is", 20)):
        Path(f"texts/{language}.txt").write_text(make_texts(language, documents))
    Path("vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "##b"]))
    Path("spiece.model").write_bytes(unigram_model())
    Path("gpt2").mkdir()
    Path("gpt2/merges.txt").write_text("#version: 0.2\nl o\n")
    Path("gpt2/vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate([*byte_alphabet(), "lo"])}))
    return tmp_path


def run(*words):
    return main(["tokenizer", "--workers", "1", *words])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(folder, capsys, kind):
    assert run("--source", "text:texts/*.txt", "--kind", kind, "--vocab-size", "300", "--out", "new/t.json") == 0
    tokenizer = Tokenizer.load("new/t.json")
    case = "uncased" if kind in ("wordpiece", "bpe") else "cased"
    summary = capsys.readouterr().out
    assert summary.startswith(f"new/t.json: {tokenizer.kind}, {tokenizer.vocab_size} pieces, {case}, in ")
    assert tokenizer.lowercase == (case == "uncased")


def test_defaults_are_those_of_bert(folder, capsys):
    assert run("--source", "text:texts/en.txt", "--out", "a.json") == 0
    assert run("--source", "text:texts/en.txt", "--out", "b.json", "--kind", "wordpiece", "--score", "count") == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    captured = capsys.readouterr()
    assert "not 30522" in captured.err and "WordPiece" in captured.out and "uncased" in captured.out
    assert run("--source", "text:texts/en.txt", "--out", "c.json", "--no-lowercase") == 0
    assert not Tokenizer.load("c.json").lowercase
    for flags in (["--score", "likelihood"], ["--keep-accents"], ["--vocab-size", "70"]):
        assert run("--source", "text:texts/en.txt", "--out", "d.json", *flags) == 0
        assert Path("d.json").read_bytes() != Path("a.json").read_bytes(), flags
        Path("d.json").unlink()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("vocab.txt", "WordPiece"), ("spiece.model", "SentencePiece unigram"), ("gpt2", "byte-level BPE")],
)
def test_taking_over(folder, capsys, path, kind):
    assert run("--from", path, "--add-special-tokens", "--out", "t.json") == 0
    printed = capsys.readouterr()
    assert f"t.json: {kind}, " in printed.out
    assert ("note: vocab.txt: read as uncased" in printed.err) == (path == "vocab.txt")
    tokenizer = Tokenizer.load("t.json")
    assert tokenizer.fingerprint == Tokenizer.load(path, add_missing_special_tokens=True).fingerprint
    assert run("--from", "t.json", "--out", "again.json") == 0
    assert Path("again.json").read_bytes() == Path("t.json").read_bytes()


def test_words_of_a_domain(folder, capsys):
    """They get new last ids; a text without them keeps its ids."""
    Path("words.txt").write_text("aaab\na\n\n##bb\naaab\n")
    assert run("--from", "vocab.txt", "--add-words", "words.txt", "--out", "t.json") == 0
    assert "t.json: WordPiece, 9 pieces" in capsys.readouterr().out
    before, after = Tokenizer.load("vocab.txt"), Tokenizer.load("t.json")
    assert [after.id_to_token(i) for i in range(9)] == [*SPECIAL_TOKENS, "a", "##b", "aaab", "##bb"]
    assert before.encode("aaab abb A ab") == [1, 5, 6, 6, 5, 5, 6]
    assert after.encode("aaab abb A ab") == [7, 5, 8, 5, 5, 6]


SOURCE = ["--source", "text:texts/en.txt", "--out", "new.json"]
FROM = ["--from", "vocab.txt", "--out", "new.json"]


USER_ERRORS = [
    (["--from", "gpt2", "--out", "new.json"], "no <pad>, <unk>, <s>, </s>, <mask> token"),
    (["--from", "absent.json", "--out", "new.json"], "absent.json: no such tokenizer"),
    (["--from", "texts/en.txt", "--out", "new.json"], "has no [PAD], [UNK], [CLS], [SEP], [MASK] token"),
    ([*FROM, "--kind", "bpe"], "--kind applies to --source only"),
    ([*FROM, "--keep-accents"], "--keep-accents applies to --source only"),
    ([*FROM, "--encoding", "auto"], "--encoding applies to --source only"),
    ([*SOURCE, "--kind", "byte-bpe", "--keep-accents"], "applies to --kind wordpiece or bpe, not to byte-bpe"),
    ([*SOURCE, "--no-lowercase", "--keep-accents"], "--keep-accents has no effect with --no-lowercase"),
    ([*FROM, "--skip-damaged"], "--skip-damaged applies to --source only"),
    (["--from", "vocab.txt", "--out", "vocab.txt"], "vocab.txt: exists already"),
    ([*SOURCE, "--add-special-tokens"], "applies to --from only"),
    ([*SOURCE, "--add-words", "vocab.txt"], "--add-words applies to --from only"),
    ([*FROM, "--add-words", "absent.txt"], "--add-words absent.txt: cannot be read"),
    ([*FROM, "--add-words", "vocab.txt"], "vocab.txt has no word that the vocabulary lacks"),
    ([*FROM, "--add-words", "texts/en.txt"], "the tokenizer would read 'Dark' as 'dark'"),
    (
        ["--from", "spiece.model", "--add-special-tokens", "--add-words", "vocab.txt", "--out", "new.json"],
        "a SentencePiece unigram vocabulary has no words of its own",
    ),
    ([*SOURCE, "--kind", "bpe", "--score", "count"], "--score applies to --kind wordpiece, not to bpe"),
    ([*SOURCE, "--kind", "byte-bpe", "--max-characters", "9"], "applies to --kind wordpiece or bpe"),
]


def test_user_errors(folder, capsys):
    before = sorted(Path().rglob("*"))
    for words, message in USER_ERRORS:
        assert run(*words) == 2
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and message in errors[0], captured.err
        assert not captured.out and sorted(Path().rglob("*")) == before


def test_sentencepiece_also_leaves_the_file_of_its_library(folder, capsys):
    command = ["--source", "text:texts/en.txt", "--kind", "sentencepiece-unigram", "--vocab-size", "60"]
    assert run(*command, "--out", "new/tokenizer.json") == 0
    tokenizer = Tokenizer.load("new/tokenizer.json")
    library = sentencepiece.SentencePieceProcessor(model_file="new/tokenizer.model")
    texts = [Path("texts/en.txt").read_text(), "[MASK] ﬁnal  Ü ①"]
    expected = [i for text in texts for i in library.encode(text)]
    assert tokenizer.encode_corpus(texts)[0].tolist() == expected and len(texts[0]) > 100
    assert [library.id_to_piece(i) for i in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # From the .model, beside it; an existing file that is another model is kept.
    Path("new/tokenizer.json").unlink()
    assert run("--from", "new/tokenizer.model", "--out", "new/tokenizer.json") == 0
    assert Tokenizer.load("new/tokenizer.json").fingerprint == tokenizer.fingerprint
    Path("other.model").write_bytes(b"another")
    capsys.readouterr()
    for words in (command, ["--from", "new/tokenizer.model"]):
        assert run(*words, "--out", "other.json") == 2
        assert "other.model: exists already" in capsys.readouterr().err
    assert Path("other.model").read_bytes() == b"another" and not Path("other.json").exists()
    assert run(*command, "--out", "x.model") == 2 and not Path("x.model").exists()
    # In a corpus, listed and verified.
    build = ["--source", "text:texts/en.txt", "--tokenizer", "new/tokenizer.json", "--out", "corpus", "--workers", "1"]
    assert main(["build", *build, "--validation-fraction", "0.1"]) == 0 and main(["verify", "corpus"]) == 0
    assert Path("corpus/tokenizer.model").read_bytes() == Path("new/tokenizer.model").read_bytes()
    Path("corpus/tokenizer.model").write_bytes(b"damaged")
    assert main(["verify", "corpus"]) == 2 and "tokenizer.model" in capsys.readouterr().err


MACHINE = (
    "import shlex, sys; from data_prep.cli.main import main; sys.exit(any(main(shlex.split(a)) for a in sys.argv[1:]))"
)


@pytest.mark.slow
def test_same_bytes_whatever_the_machine_does(folder, capsys):
    """Another process, with another number of workers and of threads, and another hash seed."""
    texts = (
        "--source text:texts/en.txt --source text:texts/de.txt --vocab-size 300 --sampling-exponent 0.7 --sample-mb 1"
    )
    kinds = ("wordpiece", "sentencepiece-unigram")
    for kind in kinds:
        assert run(*texts.split(), "--kind", kind, "--out", f"a/{kind}.json") == 0
    assert re.search(r"shares of the text: text:texts/en.txt [0-9.]+%, text:texts/de.txt", capsys.readouterr().err)
    commands = [f"tokenizer {texts} --kind {kind} --workers 2 --out b/{kind}.json" for kind in kinds]
    subprocess.run(
        [sys.executable, "-c", MACHINE, *commands],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "3", "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    for kind in kinds:
        assert Path(f"a/{kind}.json").read_bytes() == Path(f"b/{kind}.json").read_bytes()


def test_the_commands_of_the_page(folder):
    """docs/tokenizers.md, word for word; only the vocabularies are smaller, and there is one process."""
    commands = [shlex.split(line) for line in lines_of("docs/tokenizers.md")]
    assert len(commands) >= 8 and {tuple(command[:2]) for command in commands} == {("bert-data", "tokenizer")}
    smaller = {"30522": "300", "50265": "300", "120000": "300"}
    for command in commands:
        assert main([*(smaller.get(word, word) for word in command[1:]), "--workers", "1"]) == 0, command
        assert Tokenizer.load(command[command.index("--out") + 1]).continues_word.any()
    exec(compile(code_of("docs/tokenizers.md", "python"), "docs/tokenizers.md", "exec"), {})
