"""Tokenizer files that go with a model: carried as they are, or made of a tokenizer alone."""

import json
from pathlib import Path

import pytest
from etils import epath
from tokenizers import models

from bert_jax.convert import tokenizer_files
from bert_jax.errors import UserError
from bert_jax.tokenizers import tokenizer as tokenizer_lib
from bert_jax.tokenizers.kinds import BYTE_SPECIAL_TOKENS, AlbertPreprocessing, byte_alphabet
from bert_jax.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.test_tokenizer import BERT_IDS, train

TEXTS = [
    "The river sings, over the old stone!",
    "Café ÉCOLE naïve ﬁne ½ Ⅳ",
    "he said ``quick'' and 'slow'",
    "[MASK] <mask> a\u200bb\tc  d ",
    "日本語 नमस्ते किताब",
    "",
    "1,000, 2,000",
]
WORDS = [
    "the river sings over the old stone and wind",
    "quick light falls, slow dark mountain runs",
    "café école 1,000",
]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "sing", "##s", "over", "old", "stone", ",", "!"]


@pytest.fixture(scope="module")
def unigram():
    lines = [f"{words} {i}" for i in range(60) for words in WORDS]
    return tokenizer_lib.sentencepiece(train(lines, vocab_size=60, **BERT_IDS), "trained")


def byte_bpe() -> Tokenizer:
    """Its merges join the words of WORDS, character by character."""
    merges = {(f"Ġ{word[:i]}", word[i]) for word in " ".join(WORDS).split() if word.isascii() for i in range(len(word))}
    merges = sorted(merges, key=lambda pair: (len(pair[0]), pair))
    pieces = [*BYTE_SPECIAL_TOKENS, *byte_alphabet(), *map("".join, merges)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return tokenizer_lib.byte_bpe(vocab, merges, False, prefix_space=True, origin="made")


def ids(tokenizer: Tokenizer, texts: list[str] = TEXTS) -> list[int]:
    return tokenizer.encode_corpus(texts)[0].tolist()


def test_carried_files_are_the_same_bytes(tmp_path):
    source, destination = (epath.Path(tmp_path / name) for name in ("source", "destination"))
    source.mkdir()
    destination.mkdir()
    names = [*tokenizer_files.NAMES, "model.safetensors", "config.json"]
    for name in names:
        (source / name).write_bytes(f"{name}\r\n\xff".encode("latin-1"))
    assert tokenizer_files.copy_tokenizer_files(source, destination) == list(tokenizer_files.NAMES)
    assert {path.name for path in destination.iterdir()} == set(tokenizer_files.NAMES)
    for name in tokenizer_files.NAMES:
        assert (destination / name).read_bytes() == (source / name).read_bytes()
    assert tokenizer_files.copy_tokenizer_files(destination / "nothing", destination) == []


@pytest.mark.parametrize(
    ("kind", "family", "expected"),
    [
        ("WordPiece", "bert", "BertTokenizer"),
        ("WordPiece", "distilbert", "DistilBertTokenizer"),
        ("WordPiece", "electra", "ElectraTokenizer"),
        ("WordPiece", "roberta", "PreTrainedTokenizerFast"),
        ("byte-level BPE", "roberta", "RobertaTokenizer"),
    ],
)
def test_written_files(tmp_path, kind, family, expected):
    """Without tokenizer.json, too, they give the same ids."""
    tokenizer = byte_bpe() if kind == "byte-level BPE" else tokenizer_lib.wordpiece(BERT, None, "here")
    names = tokenizer_files.write_tokenizer_files(tokenizer, epath.Path(tmp_path), family, 128)
    vocabulary = {"vocab.txt"} if kind == "WordPiece" else {"vocab.json", "merges.txt"}
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert set(names) == {"tokenizer.json", "tokenizer_config.json"} | vocabulary
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == expected and settings["model_max_length"] == 128
    assert settings["mask_token"] == tokenizer.id_to_token(tokenizer.mask_id)
    assert settings.items() >= tokenizer.settings.items() and tokenizer.settings
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    (tmp_path / "tokenizer.json").unlink()
    # Without it, the mask token of RobertaTokenizer does not include the space before it.
    assert (Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint) == (kind == "WordPiece")
    assert ids(Tokenizer.load(tmp_path)) == ids(tokenizer)


def test_sentencepiece_files(tmp_path, unigram):
    """A run's model: by default, the class would also lower-case and strip accents."""
    tokenizer = unigram
    names = tokenizer_files.write_tokenizer_files(tokenizer, epath.Path(tmp_path), "albert", 512)
    assert sorted(names) == ["spiece.model", "tokenizer_config.json"]
    again = Tokenizer.load(tmp_path)
    assert ids(again) == ids(tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "AlbertTokenizer"
    assert settings["do_lower_case"] is False and settings["keep_accents"] is True
    with pytest.raises(UserError, match=r"model_type .bert."):
        tokenizer_files.write_tokenizer_files(tokenizer, epath.Path(tmp_path), "bert", 512)


def albert_directory(folder: Path, unigram, config: dict, settings: dict | None = None) -> Path:
    made = folder / "made"
    folder.mkdir()
    made.mkdir()
    tokenizer_files.write_tokenizer_files(unigram, epath.Path(made), "albert", 512)
    (made / "tokenizer_config.json").unlink()
    (made / "config.json").write_text(json.dumps(config))
    if settings is not None:
        (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def test_a_model_file_of_albert(tmp_path, unigram):
    plain = Tokenizer.load(albert_directory(tmp_path / "plain", unigram, {}))
    folder = albert_directory(tmp_path / "albert", unigram, {"model_type": "albert"})
    albert = Tokenizer.load(folder)
    assert ids(plain) == ids(unigram) != ids(albert)
    assert albert.lowercase and albert.fingerprint != plain.fingerprint
    assert ids(albert) == ids(plain, [AlbertPreprocessing()(text) for text in TEXTS])
    assert AlbertPreprocessing()("``Café'' ÉCOLE ﬁ") == '"cafe" ecole fi'
    assert ids(Tokenizer.from_json(albert.to_json(), "here")) == ids(albert)
    assert albert.encode("É [MASK]")[-1] == albert.mask_id
    cased = albert_directory(
        tmp_path / "cased", unigram, {"model_type": "albert"}, {"do_lower_case": False, "keep_accents": True}
    )
    assert ids(Tokenizer.load(cased)) == ids(plain, [AlbertPreprocessing(False, True)(text) for text in TEXTS])
    google = albert_directory(tmp_path / "google", unigram, {})
    (google / "config.json").rename(google / "albert_config.json")
    assert ids(Tokenizer.load(google)) == ids(albert)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        Tokenizer.load(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(UserError, match=r"config\.json cannot be read \(is a directory\): copy it again"):
        Tokenizer.load(folder)


VOCABULARIES = {
    "a byte order mark and CRLF": ("\ufeff{}\r\nship\r\n##s", {"ship": 5, "##s": 6}),
    "spaces at the end": ("{}\nship \n##s\u3000\u2028", {"ship": 5, "##s": 6}),
    "one blank line": ("{}\nship\n\n##s\n\u2028", {"ship": 5, "##s": 7}),
    "blank lines": ("{}\nship\n\n\n##s\n\n", {"ship": 5, "##s": 8}),
    "duplicates": ("{}\nship\n##s\nship\n[PAD]\nsea", {"[PAD]": 8, "ship": 7, "##s": 6, "sea": 9}),
}
"""Ids of WordPiece.from_file of the `tokenizers` library; a byte order mark would hide [PAD] from it."""


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_of_awkward_vocabulary_files(tmp_path, name):
    content, expected = VOCABULARIES[name]
    path = tmp_path / "vocab.txt"
    path.write_bytes(content.format("\n".join(tokenizer_lib.SPECIAL_TOKENS)).encode())
    tokenizer = Tokenizer.load(path)
    assert {piece: tokenizer.token_to_id(piece) for piece in expected} == expected
    assert tokenizer.pad_id == expected.get("[PAD]", 0) and tokenizer.mask_id == 4
    library = models.WordPiece.from_file(str(path), unk_token="[UNK]")
    for text in ("ship", "ships", "sea", "line"):
        assert tokenizer.encode(text) == [token.id for token in library.tokenize(text)]
    again = Tokenizer.from_json(tokenizer.to_json(), "again")
    assert again.fingerprint == tokenizer.fingerprint and again.encode("ships") == tokenizer.encode("ships")
