"""Tokenizer files loaded by transformers: the ids equal those of bert_jax.

With BERT_JAX_TEXTS naming a folder of text (and a folder `vocab` in it with bert_base_uncased_vocab.txt,
bert_base_cased_vocab.txt, gpt2_vocab.bpe and gpt2_encoder.json), every line of every file in it is compared.
"""

import json
import os
import random
import zipfile
from pathlib import Path

import pytest
import sentencepiece
from etils import epath
from tokenizers import AddedToken

import bert_jax
from bert_jax.convert import tokenizer_files
from bert_jax.convert.conversion import OUTPUT_FORMATS, convert
from bert_jax.convert.parity.sample_texts import TEXTS
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.fixtures import make_documents
from tests.live import small_models

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

FOLDER = os.environ.get("BERT_JAX_TEXTS")
LINES = [
    "The river sings, over the old stone!",
    "Café ÉCOLE naïve ﬁne ½ Ⅳ",
    "he said ``quick'' and 'slow'",
    "1,000, 2,000 tabs\tand  spaces ",
    "日本語 русский",
    "",
] * 3


def every_line(folder: Path):
    """Lines of all files, also of those in archives; vocabularies and binary files left out."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "vocab" not in path.parts):
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                source_model = [archive.read(name) for name in archive.namelist()]
        else:
            source_model = [path.read_bytes()]
        for content in source_model:
            if b"\0" not in content[:1000]:
                yield from content.decode("utf-8", "replace").split("\n")


@pytest.fixture(scope="module")
def lines():
    return list(dict.fromkeys(every_line(Path(FOLDER)))) if FOLDER else LINES


RELEASED = {"bert": "bert_base_uncased_vocab.txt", "electra": "bert_base_cased_vocab.txt", "roberta": "gpt2_vocab.bpe"}


def tokenizer_of(family: str, scratch: Path) -> Tokenizer:
    """A released one where the folder has it, else a small one."""
    if FOLDER and family in RELEASED:
        return Tokenizer.load(Path(FOLDER) / "vocab" / RELEASED[family], add_missing_special_tokens=True)
    scratch.mkdir()
    return small_models.KINDS.get(family, small_models.wordpiece)(scratch)


def differing(tokenizer: Tokenizer, hf_tokenizer, lines: list[str]) -> list[str]:
    """Lines for which ids differ."""
    wrong = []
    for start in range(0, len(lines), 20_000):
        part = lines[start : start + 20_000]
        hf_ids = hf_tokenizer(part, add_special_tokens=False)["input_ids"] if part else []
        wrong += [line for line, one, two in zip(part, tokenizer.encode_batch(part), hf_ids, strict=True) if one != two]
    return wrong


@pytest.mark.parametrize("family", ["bert", "electra", "distilbert", "roberta"])
def test_made_files(tmp_path, lines, family):
    before, directory = tokenizer_of(family, tmp_path / "scratch"), tmp_path / "written"
    directory.mkdir()
    tokenizer_files.write_tokenizer_files(before, epath.Path(directory), family, 512)
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert differing(before, hf_tokenizer, lines) == []
    roles = ("pad", "unk", "cls", "sep", "mask")
    assert [getattr(hf_tokenizer, f"{r}_token_id") for r in roles] == [getattr(before, f"{r}_id") for r in roles]
    after = Tokenizer.load(directory)
    assert after.fingerprint == before.fingerprint
    assert after.encode_batch(lines) == before.encode_batch(lines)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert", "xlm-roberta"])
def test_added_tokens(tmp_path, family, seed):
    """Tokens added in transformers, with random flags: ids of texts with them and with special tokens."""
    rng, scratch, source = random.Random(seed), tmp_path / "scratch", tmp_path / "source"
    scratch.mkdir()
    small_models.save(family, source, scratch)
    tokens = ["<e1>", "</e1>", "covid-19", "River", "[E]", "the r", "é!", "##x"]
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    chosen = [AddedToken(token, **{flag: rng.random() < 0.5 for flag in flags}) for token in rng.sample(tokens, 4)]
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if seed or family != "albert":  # without added tokens ALBERT's is read from its .model
        hf_tokenizer.add_tokens(chosen)
        for path in source.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
        hf_tokenizer.save_pretrained(source)
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    roles = [getattr(hf_tokenizer, f"{role}_token") for role in ("pad", "unk", "cls", "sep", "mask")]
    parts = [*tokens, *roles, "the", "river", "stone", "É", "x", ",", "COVID-19", " ", "  ", "\t"]
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 10))) for _ in range(500)]
    tokenizer = Tokenizer.load(source)
    assert differing(tokenizer, hf_tokenizer, texts) == []
    assert tokenizer.encode_flat(texts)[0].tolist() == [i for ids in tokenizer.encode_batch(texts) for i in ids]


@pytest.mark.parametrize("seed", range(20))
def test_vocabulary_files(tmp_path, seed):
    """Generated ones with blank lines, duplicates and white space at the ends of lines, in BertTokenizer."""
    rng = random.Random(seed)
    pieces = ["ship", "sea", "the", "##s", "##ip", "s", "é", "", "", " ", "\u2028", "\x1c", "[PAD]", "a b", "##"]
    ends = ["", "", "", " ", "\t", "\r", "\xa0", "\x1f", "\x85", "\u200b", " \u2003"]
    lines = [piece + rng.choice(ends) for piece in rng.choices(pieces, k=rng.randint(1, 15))]
    (tmp_path / "vocab.txt").write_bytes("\n".join([*SPECIAL_TOKENS, *lines]).encode())
    hf_tokenizer, tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt")), Tokenizer.load(tmp_path, True)
    texts = ["".join(rng.choices([*pieces, "x", " ", "[MASK]", "line", "7"], k=rng.randint(1, 8))) for _ in range(50)]
    assert differing(tokenizer, hf_tokenizer, texts) == []
    assert tokenizer.pad_id == hf_tokenizer.pad_token_id


@pytest.mark.parametrize("how", ["a run's own", "released"])
def test_albert(tmp_path, lines, how):
    """A released directory has the model file alone. Of many lines a few differ: see sentencepiece_backend.py."""
    directory = tmp_path / "written"
    directory.mkdir()
    made = tokenizer_of("albert", tmp_path / "scratch")
    tokenizer_files.write_tokenizer_files(made, epath.Path(directory), "albert", 512)
    (directory / "config.json").write_text(json.dumps({"model_type": "albert"}))
    if how == "released":
        (directory / "tokenizer_config.json").unlink()
    tokenizer, hf_tokenizer = Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    wrong = differing(tokenizer, hf_tokenizer, lines)
    print(f"{how}: {len(wrong)} of {len(lines)} lines differ, as {wrong[:5]}")
    assert len(wrong) <= len(lines) // 1000


ALBERT_PIECES = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": "[CLS],[SEP],[MASK]"}
SENTENCEPIECE = {
    "XLMRobertaTokenizer": ("sentencepiece.bpe.model", {}),
    "CamembertTokenizer": ("sentencepiece.bpe.model", {}),
    "AlbertTokenizer": ("spiece.model", ALBERT_PIECES),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_the_advice_for_a_sentencepiece_model_of_another_class(tmp_path, name):
    """What the message and docs/conversion.md advise for XLM-RoBERTa and CamemBERT."""
    file, options = SENTENCEPIECE[name]
    options |= {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    with (tmp_path / file).open("wb") as model:
        sentences = iter(make_documents(0, 60))
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **options)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    if name != "AlbertTokenizer":
        with pytest.raises(UserError, match=r"give its tokenizer\.json, which AutoTokenizer and save_pretrained"):
            Tokenizer.load(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert differing(tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path), LINES) == []
    assert tokenizer.encode(LINES[0]).count(tokenizer.unk_id) < 5


ROLES = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
"""Those that AlbertTokenizer names otherwise."""
SETTINGS = [
    ("bert", {"do_lower_case": True, "strip_accents": False}),
    ("electra", {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False}),
    ("distilbert", {"do_lower_case": True, "tokenizer_class": "DistilBertTokenizerFast"}),
    ("roberta", {"add_prefix_space": True}),
    ("albert", {"do_lower_case": False, "keep_accents": True} | ROLES),
    ("albert", ROLES),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("family", "settings"), SETTINGS)
def test_settings_beside_a_vocabulary(tmp_path, family, settings):
    """Without a tokenizer.json, ids are those of transformers on the source, in `load` and in every target."""
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    scratch.mkdir()
    small_models.save(family, source, scratch)
    (source / "tokenizer.json").unlink(missing_ok=True)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    expected = [hf_tokenizer.encode(text, add_special_tokens=False) for text in (*LINES, *TEXTS)]
    assert bert_jax.load(source).tokenizer.encode_batch([*LINES, *TEXTS]) == expected
    targets = ("huggingface", "bert-jax", *(("tensorflow1", "stablehlo", "onnx") if family == "bert" else ()))
    for target in targets:
        report = convert(source, tmp_path / target, target)
        assert report.tokenizer.equal == report.tokenizer.total and "transformers" in report.tokenizer.source_library
        for_transformers = "transformers" in report.tokenizer.written_library
        assert for_transformers == OUTPUT_FORMATS[target].for_transformers
        assert Tokenizer.load(tmp_path / target).encode_batch([*LINES, *TEXTS]) == expected


def test_no_side_of_the_report_gets_settings_from_another(tmp_path):
    """No file gives do_lower_case: transformers lower-cases, and the cased tokenizer.json is rebuilt by its class."""
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    scratch.mkdir()
    small_models.save("bert", source, scratch)
    Tokenizer.load(source / "vocab.txt", lowercase=False).save(source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    with pytest.raises(UserError, match="the tokenizers give different ids for"):
        convert(source, tmp_path / "new", "huggingface")
