"""Goldens are google-research/bert's own ids by name: the stand-in vocabulary holds the pieces they need."""

import pickle

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.tokenizer import Tokenizer, wordpiece

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
UNCASED = "hello world ! , how are you ? ¿ res ##pu ##bl ##ica superior ##em av ##di ##ja vr ##sa ##jevic in"
UNCASED += " [ ] un ##k mask [unused0] 力"
CASED = "Hello World ! , how are you ? H ##é ##ll ##ó ¿ Re ##sp ##ub ##lica superior ##em A ##v ##di ##ja V ##r"
CASED += " ##ša ##je ##vić î ##n [ ] UN ##K"


@pytest.fixture
def uncased():
    return wordpiece(SPECIALS + UNCASED.split(), None, "stand-in")


@pytest.fixture
def cased():
    return wordpiece(SPECIALS + CASED.split(), None, "stand-in")


def pieces(tokenizer, text, **options):
    return " ".join(tokenizer.id_to_token(i) for i in tokenizer.encode(text, **options))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello World!, how are you?", "hello world ! , how are you ?"),
        ("Hélló  WoŕlḊ¿", "hello world ¿"),
        ("Respublica superiorem", "res ##pu ##bl ##ica superior ##em"),
        ("Avdija Vršajević în", "av ##di ##ja vr ##sa ##jevic in"),
        (" \tHeLLo!how  \n Are yoU? [UNK]", "hello ! how are you ? [ un ##k ]"),
        ("力hello", "力 hello"),
        ("x" * 101, "[UNK]"),
        ("", ""),
    ],
)
def test_uncased_goldens(uncased, text, expected):
    assert uncased.lowercase
    assert pieces(uncased, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello World!, how are you?", "Hello World ! , how are you ?"),
        ("Hélló  WoŕlḊ¿", "H ##é ##ll ##ó [UNK] ¿"),
        ("Respublica superiorem", "Re ##sp ##ub ##lica superior ##em"),
        ("Avdija Vršajević în", "A ##v ##di ##ja V ##r ##ša ##je ##vić î ##n"),
    ],
)
def test_cased_goldens(cased, text, expected):
    assert not cased.lowercase
    assert pieces(cased, text) == expected


def test_special_tokens_in_text_are_text_unless_asked_for(uncased):
    assert uncased.mask_id not in uncased.encode("how [MASK] you")
    assert pieces(uncased, "how [MASK] you") == "how [ mask ] you"
    assert uncased.encode_batch(["how [MASK] you"]) == [uncased.encode("how [MASK] you")]
    assert pieces(uncased, "how [MASK] you [SEP]", specials=True) == "how [MASK] you [SEP]"
    assert uncased.mask_id not in uncased.encode("[MASK]"), "asking once must not change what follows"


def test_special_ids_and_continuations(uncased):
    assert (uncased.pad_id, uncased.unk_id, uncased.cls_id, uncased.sep_id, uncased.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )
    assert uncased.special_ids == (0, 1, 2, 3, 4)
    continues = uncased.continues_word
    assert continues.dtype == np.bool_ and continues.shape == (uncased.vocab_size,)
    assert continues[uncased.token_to_id("##em")] and not continues[uncased.token_to_id("superior")]
    assert continues.sum() == UNCASED.count("##")


def test_decode_and_lookups(uncased):
    assert uncased.decode(uncased.encode("Respublica superiorem")) == "respublica superiorem"
    assert "[MASK]" in uncased.decode(np.array([uncased.mask_id]))
    assert uncased.token_to_id("nowhere") is None
    with pytest.raises(IndexError):
        uncased.id_to_token(uncased.vocab_size)
    with pytest.raises(IndexError):
        uncased.id_to_token(-1)


def test_files_round_trip_and_fingerprint(uncased, cased, tmp_path):
    uncased.save(tmp_path / "tokenizer.json")
    uncased.save_vocab(tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text().split("\n")[:2] == ["[PAD]", "[UNK]"]
    for path in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "vocab.txt"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == uncased.fingerprint
        assert loaded.encode("Hello superiorem!") == uncased.encode("Hello superiorem!")
    assert Tokenizer.load(tmp_path / "vocab.txt", lowercase=False).fingerprint != uncased.fingerprint
    assert cased.fingerprint != uncased.fingerprint
    assert pickle.loads(pickle.dumps(uncased)).fingerprint == uncased.fingerprint


def test_fingerprint_ignores_what_does_not_decide_ids(uncased, tmp_path):
    import json

    description = json.loads(uncased.to_json())
    description["post_processor"] = None
    description["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    other = Tokenizer.from_json(json.dumps(description), "edited")
    assert other.fingerprint == uncased.fingerprint
    assert len(other.encode("how are you")) == 3
    description["model"]["vocab"]["how"], description["model"]["vocab"]["are"] = (
        description["model"]["vocab"]["are"],
        description["model"]["vocab"]["how"],
    )
    assert Tokenizer.from_json(json.dumps(description), "edited").fingerprint != uncased.fingerprint


def test_case_is_decided_by_letters_that_have_two_cases():
    # ℝ counts as upper case but has no lower-case form; bert-base-uncased holds it.
    assert wordpiece([*SPECIALS, "ℝ", "a"], None, "stand-in").lowercase
    assert not wordpiece([*SPECIALS, "A", "a"], None, "stand-in").lowercase


def test_a_vocabulary_that_is_not_wordpiece_loads(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    vocab = {piece: i for i, piece in enumerate(["<pad>", "<s>", "</s>", "<unk>", "<mask>", "Ġ", "l", "o", "lo"])}
    backend = Backend(models.BPE(vocab, [("l", "o")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.pad_id, tokenizer.cls_id, tokenizer.mask_id) == (0, 1, 4)
    assert pieces(tokenizer, "lo") == "Ġ lo"
    assert tokenizer.continues_word.tolist() == [False] * 6 + [True] * 3
    with pytest.raises(UserError, match=r"vocab\.txt"):
        tokenizer.save_vocab(tmp_path / "vocab.txt")


def test_user_errors(tmp_path, uncased):
    with pytest.raises(UserError, match="no such tokenizer"):
        Tokenizer.load(tmp_path / "absent.json")
    with pytest.raises(UserError, match="neither"):
        Tokenizer.load(tmp_path)
    cases = {
        "broken.json": (b"{", "not a tokenizer.json"),
        "empty.txt": (b"\n", "one piece per line"),
        "latin1.txt": (b"[PAD]\n\xe9\n", "byte 6"),
        "twice.txt": ("\n".join([*SPECIALS, "a", "a"]).encode(), "'a' occurs twice"),
        "no_mask.txt": ("\n".join([*SPECIALS[:4], "a"]).encode(), r"no \[MASK\] token"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            Tokenizer.load(tmp_path / name)
    uncased.save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="lowercase=True itself"):
        Tokenizer.load(tmp_path, lowercase=False)
