import os
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from bert_jax.errors import UserError
from bert_jax.tokenizer import bert_normalizer
from data_prep.train_tokenizer import train_wordpiece

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog is not amused.",
    "Foxes jumped; dogs slept. Nobody was amusing, nobody was quicker than the quickest fox!",
    "Über Straßen und Äcker — naïve café, 力加 1984 (x_1 + y_2) = z.",
] * 3


def pieces(tokenizer):
    return [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]


def test_worked_example():
    # Counts of pairs: ##e+##s 9, ##s+##t 9, l+##o 7, ... so a count-based trainer starts with "##es";
    # scoring by likelihood gain would start with w+##i.
    text = " ".join(["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3)
    # 5 specials, 10 letters, 8 letters inside a word, 3 merges
    assert pieces(train_wordpiece([text], 26))[-3:] == ["##es", "##est", "lo"]


def test_no_piece_occurs_twice():
    rng = np.random.default_rng(0)
    text = " ".join("".join(rng.choice(["a", "b"], size, p=[0.8, 0.2])) for size in rng.integers(1, 14, 3000))
    made = pieces(train_wordpiece([text], 400))
    assert len(made) == len(set(made)) == 400


def test_specials_first_and_only_the_size_asked_for():
    tokenizer = train_wordpiece(TEXTS, 140)
    assert tokenizer.vocab_size == 140
    assert pieces(tokenizer)[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.unk_id not in {i for ids in tokenizer.encode_batch(TEXTS) for i in ids}
    assert tokenizer.lowercase and "über" not in pieces(tokenizer)


def test_cased():
    tokenizer = train_wordpiece(TEXTS, 200, lowercase=False)
    assert not tokenizer.lowercase
    assert "Ü" in pieces(tokenizer)


def test_same_pieces_as_the_library_with_the_same_counts():
    """`tokenizers`' trainer breaks ties by chance, so compare the sets where no tie is cut in two."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = bert_normalizer(True), pre_tokenizers.BertPreTokenizer()
    text = [" ".join(f"{word} " * count for word, count in {"hug": 10, "pug": 5, "pun": 12, "bun": 4}.items())]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        text,
        trainers.WordPieceTrainer(vocab_size=40, special_tokens=special, show_progress=False, min_frequency=2),
    )
    assert set(pieces(train_wordpiece(text, 40))) == set(backend.get_vocab())


def test_a_short_text_gives_fewer_pieces_and_says_so(capsys):
    assert train_wordpiece(["low low lower"], 500).vocab_size < 30
    assert "gives only" in capsys.readouterr().err


def test_user_errors():
    with pytest.raises(UserError, match="no words"):
        train_wordpiece(["  "], 100)
    with pytest.raises(UserError, match="use at least"):
        train_wordpiece(TEXTS, 20)


def test_deterministic_over_processes_threads_and_hash_seeds(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(TEXTS))
    files = []
    for name, changes in {"a": {}, "b": {"RAYON_NUM_THREADS": "1"}, "c": {"PYTHONHASHSEED": "3"}}.items():
        out = tmp_path / f"{name}.json"
        command = [sys.executable, "-m", "data_prep", "tokenizer", "--source", f"text:{source}"]
        subprocess.run(
            [*command, "--vocab-size", "150", "--out", str(out)],
            check=True,
            env=os.environ | changes,
            cwd=_root(),
        )
        files.append(out.read_bytes())
    assert files[0] == files[1] == files[2]


def _root():
    import pathlib

    return pathlib.Path(__file__).parents[2]
