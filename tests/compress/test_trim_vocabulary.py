"""Vocabulary trimming: the same states and logits of kept tokens, a tokenizer of any text, mistakes in one line."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import bert_jax
from bert_jax.cli import main as cli
from bert_jax.compress import trim_vocabulary as module
from bert_jax.compress.trim_vocabulary import find_files, trim_vocabulary
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.errors import UserError
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import batches, encode_texts
from bert_jax.model.heads import Heads
from bert_jax.storage.paths import to_path
from tests.building import make_tokenizer
from tests.interventions.models import four_heads, write_native

pytestmark = pytest.mark.usefixtures("quick_compilation")
TEXTS = ["the river sings over the stone", "a dark stone", "the river falls", "zz"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`model`, whose embeddings have three rows more than its tokenizer tokens, and `texts`. Read only."""
    directory = tmp_path_factory.mktemp("trim")
    tokenizer = make_tokenizer()
    write_native(four_heads(2, vocab_size=tokenizer.vocab_size + 3), directory / "model")
    (directory / "texts").mkdir()
    (directory / "texts" / "a.txt").write_text("\n".join(TEXTS[:2]) + "\n\n")
    (directory / "texts" / "b.txt").write_text("\n".join(TEXTS[2:]))
    return directory


@pytest.fixture(scope="module")
def trimmed(folder, tmp_path_factory):
    """The result, and its directory. Read only."""
    out = tmp_path_factory.mktemp("trimmed") / "out"
    return trim_vocabulary(to_path(folder / "model"), [str(folder / "texts" / "*.txt")], to_path(out)), out


def test_the_smaller_model_computes_the_same(folder, trimmed):
    """Ids differ; hidden states are equal bit for bit, MLM logits of the kept tokens to 1e-6."""
    result, out = trimmed
    whole, smaller = bert_jax.load(folder / "model"), bert_jax.load(out)
    names = [smaller.tokenizer.id_to_token(i) for i in range(smaller.tokenizer.vocab_size)]
    kept = np.array([whole.tokenizer.token_to_id(name) for name in names])
    # 5 special tokens, 26 letters and their continuations, the full stop, 7 words.
    assert len(kept) == smaller.config.vocab_size == 5 + 53 + 7 and "mountain" not in names
    (before,), (after,) = (
        batches(encode_texts(TEXTS, model.tokenizer, 32), model.tokenizer.pad_id) for model in (whole, smaller)
    )
    assert (before.input_ids != after.input_ids).any() and np.array_equal(before.input_ids, kept[after.input_ids])
    outputs = ["hidden_states", "mlm_logits", "pair_logits"]
    expected, found = capture(whole, before, outputs), capture(smaller, after, outputs)
    np.testing.assert_array_equal(found["hidden_states"], expected["hidden_states"])
    np.testing.assert_array_equal(found["pair_logits"], expected["pair_logits"])
    np.testing.assert_allclose(found["mlm_logits"], expected["mlm_logits"][..., kept], rtol=0, atol=1e-6)
    assert result.differences["hidden_states"] == 0 and result.differences["mlm_logits"] <= 1e-6


def test_results(folder, trimmed):
    result, out = trimmed
    values = json.loads(json.dumps(result.to_dict()))
    before, after = (bert_jax.load(one).config.vocab_size for one in (folder / "model", out))
    assert values["rows"] == [before, after]
    assert values["parameters"][0] - values["parameters"][1] == (before - after) * 33
    counts = values["counts"]
    assert (counts["texts"], counts["changed_texts"], counts["unknown_after"]) == (4, 0, 0)
    assert counts["tokens"] == counts["tokens_after"] == 6 + 3 + 3 + 2 and values["compared_texts"] == 4
    assert f"vocabulary: {after} of {before} tokens" in result.summary_lines()[0]
    assert "tokens were removed from the vocabulary" in (out / "README.md").read_text()


def test_rare_tokens_become_letters(folder, tmp_path, monkeypatch, capsys):
    """Only "the", "river" and "stone" occur twice; the others are spelled, without an unknown token."""
    monkeypatch.chdir(folder)
    words = ["compress", "trim-vocabulary", "model", "--text", "texts/a.txt", "--text", "texts/b.txt", "--json"]
    assert cli.main([*words, "--min-count", "2", "--out", str(tmp_path / "new")]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["rows"][1] == 5 + 53 + 3 and values["counts"]["changed_texts"] == 3
    assert values["counts"]["tokens_after"] > values["counts"]["tokens"] and values["compared_texts"] == 1
    assert values["counts"]["unknown_after"] == 0
    tokenizer = bert_jax.load(tmp_path / "new").tokenizer
    ids = tokenizer.encode("a dark stone")
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "d", "##a", "##r", "##k", "stone"]


def test_other_formats_and_settings(folder, tmp_path):
    """Ids in the settings of transformers move, too; the model there has the smaller tokenizer."""
    with input_formats.open_model(folder / "model") as opened:
        settings = {"pad_token_id": 0, "sep_token_id": 3, "bos_token_id": None, "type_vocab_size": 2}
        moved = module._smaller(
            dataclasses.replace(opened, hf_config=settings),
            module.TrimmedTokenizer(opened.loaded_tokenizer, np.array([0, 3, 5])),
        )
    assert moved.hf_config == settings | {"sep_token_id": 1} and moved.model.config.vocab_size == 3
    trim_vocabulary(to_path(folder / "model"), [str(folder / "texts" / "a.txt")], to_path(tmp_path / "out"))
    report = convert(tmp_path / "out", tmp_path / "exported", "huggingface")
    assert report.tokenizer.equal == report.tokenizer.total
    again = bert_jax.load(tmp_path / "exported")
    assert again.tokenizer.encode("a dark stone") == bert_jax.load(tmp_path / "out").tokenizer.encode("a dark stone")


def test_files(folder, tmp_path, monkeypatch):
    (tmp_path / "one" / "deep").mkdir(parents=True)
    for name in ("one/a.txt", "one/b.md", "one/deep/c.txt", "d.txt"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)

    def names(*patterns):
        return [path.as_posix() for path in find_files(patterns)]

    assert names("*.txt", "d.txt") == ["d.txt"] and names("one/*") == ["one/a.txt", "one/b.md"]
    assert names("**/*.txt") == ["d.txt", "one/a.txt", "one/deep/c.txt"]
    assert names("o?e/[ab].*") == ["one/a.txt", "one/b.md"]
    assert names(f"{tmp_path}/one/*.md") == [f"{tmp_path}/one/b.md"]
    (tmp_path / "one" / "*").write_text("a name that it matches itself hides no other file")
    assert names("one/*") == ["one/*", "one/a.txt", "one/b.md"]
    (tmp_path / "[d].txt").write_text("a name that it does not match")
    assert names("[d].txt") == ["[d].txt"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--text texts", "--text texts is a directory: give its files, as in 'texts/*.txt'"),
        ("--text nowhere.txt", "--text nowhere.txt has no file"),
        ("--text none/*.txt", "--text none/*.txt has no file"),
        ("--text empty", "--text: there is no token in empty: give files with text"),
        ("--text binary", "binary, line 2 is not UTF-8: convert the file"),
        ("--text texts/a.txt --min-count 0", "--min-count is 0: it must be at least 1"),
        ("--text texts/a.txt --min-count 99", "no token occurs this often in texts/a.txt, at most 2 times: lower it"),
        ("--text texts/a.txt --out texts", "--out texts exists already"),
        ("--text texts/a.txt --out binary/new", "--out binary/new: cannot write to binary (not a directory)"),
        ("--text all", "the texts use or its tokenizer needs all "),
    ],
)
def test_refused_in_one_line(words, part, folder, tmp_path, monkeypatch, capsys):
    for name in ("model", "texts"):
        (tmp_path / name).symlink_to(folder / name)
    if part.startswith("the texts use or"):
        (tmp_path / "model").unlink()
        write_native(four_heads(2, Heads()), tmp_path / "model")
    (tmp_path / "empty").write_text(" \n\n")
    (tmp_path / "binary").write_bytes(b"one\n\xff\xfe\n")
    (tmp_path / "all").write_text("the a river mountain sings falls over quick slow light dark stone .")
    monkeypatch.chdir(tmp_path)
    given = words.split() if "--out" in words else [*words.split(), "--out", "new"]
    assert cli.main(["compress", "trim-vocabulary", "model", *given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert part in line, line
    assert {path.name for path in tmp_path.iterdir()} == {"model", "texts", "empty", "binary", "all"}


def test_a_wrong_row_is_found(folder):
    """Another embedding than that of the token."""
    with input_formats.open_model(folder / "model") as opened:
        tokenizer = opened.loaded_tokenizer
        trimmed = module.trim(tokenizer, np.unique(tokenizer.encode_flat(TEXTS)[0]), "made")
        smaller = module._smaller(opened, trimmed).model
        word = smaller.params["encoder"]["embeddings"]["word"]
        word[[tokenizer.cls_id, tokenizer.sep_id]] = word[[tokenizer.sep_id, tokenizer.cls_id]]
        with pytest.raises(AssertionError, match="hidden_states differ by"):
            module._compare(opened.model, smaller, tokenizer, trimmed, TEXTS)


def test_a_model_needs_a_tokenizer(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        trim_vocabulary(to_path(tmp_path / "model"), [str(folder / "texts/a.txt")], to_path(tmp_path / "out"))
