"""Settings in the directory of a vocabulary: each is used, or refused by its name."""

import json

import pytest
import tokenizers

from bert_jax.convert.parity.sample_texts import TEXTS
from bert_jax.errors import UserError
from bert_jax.tokenizers.kinds import BYTE_SPECIAL_TOKENS, byte_alphabet
from bert_jax.tokenizers.tokenizer import Tokenizer, byte_bpe

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fährt", "fahrt", "Fahrt", "小", "##船", "船", "##s", "<s>"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in BERT))
    return tmp_path


def write(folder, **files):
    """Write JSON files: config is config.json, and so on."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def pieces(tokenizer, text):
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]


SETTINGS = [
    ({"do_lower_case": True}, ["fahrt", "小", "船"]),
    ({"do_lower_case": True, "strip_accents": None}, ["fahrt", "小", "船"]),
    ({"do_lower_case": True, "strip_accents": False}, ["fährt", "小", "船"]),
    ({"do_lower_case": False}, ["[UNK]", "小", "船"]),
    ({"do_lower_case": False, "strip_accents": True}, ["Fahrt", "小", "船"]),
    ({"do_lower_case": True, "tokenize_chinese_chars": False}, ["fahrt", "小", "##船"]),
]


@pytest.mark.parametrize(("settings", "expected"), SETTINGS)
def test_settings_of_wordpiece(folder, settings, expected):
    tokenizer = Tokenizer.load(write(folder, tokenizer_config=settings))
    assert pieces(tokenizer, "Fährt 小船") == expected
    assert tokenizer.note is None
    assert tokenizer.settings == {"strip_accents": settings["do_lower_case"], "tokenize_chinese_chars": True} | {
        name: value for name, value in settings.items() if value is not None
    }
    assert tokenizer.encode_flat(["Fährt 小船"])[0].tolist() == tokenizer.encode("Fährt 小船")
    assert Tokenizer.from_json(tokenizer.to_json(), "a copy").settings == tokenizer.settings


def test_sample_texts_show_every_setting(folder):
    """Any two of these settings give different ids for the sample texts, even with a small vocabulary."""
    found = {}
    for settings, _ in SETTINGS[1:]:
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in [*BERT, "was", "i", "##n", "the"]))
        ids = Tokenizer.load(write(folder, tokenizer_config=settings)).encode_batch(TEXTS)
        found[json.dumps(ids)] = settings
    assert len(found) == len(SETTINGS) - 1


def test_the_assumed_case_is_named(folder):
    cased = Tokenizer.load(folder)
    assert not cased.lowercase and "vocab.txt: read as cased, because some pieces have upper-case letters" in cased.note
    write(folder, tokenizer_config={"tokenize_chinese_chars": False})
    assert "no tokenizer_config.json gives do_lower_case" in Tokenizer.load(folder).note
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in BERT if piece != "Fahrt"))
    assert "read as uncased, because no piece has" in Tokenizer.load(folder).note
    assert Tokenizer.load(folder, lowercase=True).note is None


REFUSED = [
    ({"tokenizer_config": {"tokenizer_class": "BertJapaneseTokenizer"}}, "class BertJapaneseTokenizer cannot"),
    ({"config": {"model_type": "bert", "tokenizer_class": "BertJapaneseTokenizer"}}, "BertJapaneseTokenizer cannot"),
    ({"config": {"model_type": "xlm-roberta"}}, r"XLMRobertaTokenizer .* give its tokenizer\.json"),
    ({"tokenizer_config": {"do_lower_case": None}}, "do_lower_case is None: it must be true or false"),
    ({"tokenizer_config": {"do_lower_case": 0}}, "do_lower_case is 0: it must be true or false"),
    (
        {"tokenizer_config": {"tokenize_chinese_chars": "no"}},
        "tokenize_chinese_chars is 'no': it must be true or false",
    ),
    ({"tokenizer_config": {"do_basic_tokenize": False}}, "do_basic_tokenize false is not supported; only true is"),
    ({"tokenizer_config": {"never_split": ["[MASK]", "New York"]}}, "never_split"),
    ({"tokenizer_config": {"wordpieces_prefix": "@@"}}, "wordpieces_prefix"),
    ({"tokenizer_config": {"mecab_kwargs": {}}}, "mecab_kwargs {} is not supported; only null is"),
    ({"tokenizer_config": {"word_tokenizer_type": "mecab"}}, 'word_tokenizer_type "mecab" is not supported'),
    ({"tokenizer_config": {"auto_map": {"AutoTokenizer": ["mine.Slow", None]}}}, "auto_map names a tokenizer"),
    ({"tokenizer_config": {"cls_token": "<s>"}}, r"cls_token is '<s>', but vocab.txt has '\[CLS\]'"),
    ({"special_tokens_map": {"mask_token": {"content": "<m>"}}}, r"special_tokens_map\.json: mask_token is '<m>'"),
    ({"added_tokens": {"covid": 13}}, "adds the token 'covid', which vocab.txt does not have as id 13"),
    ({"tokenizer_config": {"split_special_tokens": True}}, "split_special_tokens true is not supported; only false is"),
    ({"tokenizer_config": {"additional_special_tokens": ["[E1]"]}}, r"adds the token '\[E1\]', .* at all"),
    ({"tokenizer_config": {"added_tokens_decoder": {"0": {"content": "[CLS]", "special": True}}}}, "as id 0"),
    ({"tokenizer_config": []}, r"tokenizer_config\.json is not a JSON object, but \[\]: copy it again"),
    ({"tokenizer_config": {"chat_template": json.loads("[" * 60 + "]" * 60)}}, "is nested too deeply: copy it again"),
    ({"tokenizer_config": {"added_tokens_decoder": [1]}}, r"added_tokens_decoder is \[1\]: it must be an object"),
    ({"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: "[MASK]"}}}, "does not have as id 9{40}: give"),
    ({"tokenizer_config": {"added_tokens_decoder": {"-4": "[MASK]"}}}, "does not have as id -4: give"),
    ({"tokenizer_config": {"added_tokens_decoder": {"4": 5}}}, "adds the token '5', .* as id 4"),
    ({"tokenizer_config": {"extra_special_tokens": {"a": {"b": 1}}}}, r"adds the token '\{'b': 1\}', .* at all"),
    ({"special_tokens_map": {"cls_token": {"b": 1}}}, r"special_tokens_map\.json: cls_token is '\{'b': 1\}', but"),
]


@pytest.mark.parametrize(("files", "message"), REFUSED)
def test_what_cannot_be_reproduced_is_refused(folder, files, message):
    with pytest.raises(UserError, match=message):
        Tokenizer.load(write(folder, **files))


def test_what_has_no_effect_is_accepted(folder):
    plain = Tokenizer.load(folder, lowercase=False).fingerprint
    settings = {
        "do_lower_case": False,
        "model_max_length": 512,
        "padding_side": "left",
        "never_split": ["[MASK]"],
        "tokenizer_class": "BertTokenizerFast",
        "do_basic_tokenize": True,
        "keep_accents": False,
        "mask_token": {"content": "[MASK]", "lstrip": False},
        "added_tokens_decoder": {"4": {"content": "[MASK]", "special": True}},
        "init_inputs": [],
    }
    write(folder, tokenizer_config=settings, added_tokens={"[MASK]": 4}, config={"model_type": "bert"})
    assert Tokenizer.load(folder).fingerprint == plain


def test_settings_of_a_newer_transformers_are_named_in_a_note(folder):
    plain = Tokenizer.load(folder, lowercase=False).fingerprint
    write(
        folder, tokenizer_config={"do_lower_case": False, "newer_setting": True, "another": 1, "mask_token": "[MASK]"}
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.fingerprint == plain
    assert "tokenizer_config.json: not used, because it is unknown: another, newer_setting. If" in tokenizer.note
    write(folder, tokenizer_config={"newer_setting": True})
    assert "read as cased" in Tokenizer.load(folder).note and "unknown: newer_setting" in Tokenizer.load(folder).note


@pytest.mark.parametrize("name", ["XLMRobertaTokenizer", "CamembertTokenizer", "AlbertTokenizer"])
def test_a_tokenizer_json_that_transformers_made_of_a_sentencepiece_model(tmp_path, name):
    """save_pretrained of transformers 5 also writes the unknown id of the .model, which its classes do not use."""
    roles = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, -1.0) for piece in [*roles, "▁a"]], 3))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config={"tokenizer_class": name, "add_prefix_space": True, "is_local": True, "unk_id": 0})
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.encode("a a"), tokenizer.unk_id, tokenizer.note) == ([5, 5], 3, None)


def test_a_tokenizer_json_and_settings_that_contradict_it(folder):
    tokenizer = Tokenizer.load(folder, lowercase=True)
    tokenizer.save(folder / "tokenizer.json")
    for settings in ({}, {"do_lower_case": True, "strip_accents": None}, {"tokenize_chinese_chars": True}):
        write(folder, tokenizer_config={"tokenizer_class": "BertTokenizer"} | settings)
        assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        write(folder, tokenizer_config={"tokenizer_class": "BertTokenizer", name: False})
        with pytest.raises(UserError, match=rf"{name} is false, but tokenizer\.json has true: correct"):
            Tokenizer.load(folder)
    # Classes that do not read it, as in paraphrase-multilingual-MiniLM-L12-v2; tokenizer.json is complete.
    write(folder, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False, "x": 1})
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint


def test_settings_of_byte_level_bpe(tmp_path):
    vocab = {piece: i for i, piece in enumerate([*BYTE_SPECIAL_TOKENS, *byte_alphabet(), "Ġa"])}
    write(tmp_path, vocab=vocab)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    assert pieces(Tokenizer.load(tmp_path), "a a") == ["a", "Ġa"]
    write(tmp_path, tokenizer_config={"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True})
    tokenizer = Tokenizer.load(tmp_path)
    assert pieces(tokenizer, "a a") == ["Ġa", "Ġa"] and tokenizer.settings == {"add_prefix_space": True}
    byte_bpe(vocab, [("Ġ", "a")], False, prefix_space=False, origin="here").save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"add_prefix_space is true, but tokenizer\.json has false"):
        Tokenizer.load(tmp_path)
