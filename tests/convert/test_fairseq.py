"""RoBERTa by fairseq 0.12.2 itself (fixtures/make_fairseq.py), and as versions before named it."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from bert_jax.convert.formats import fairseq, input_formats
from bert_jax.convert.translate import to_huggingface
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "fairseq"
FILES = ["new.pt", "omegaconf.pt", "legacy.pt"]


def read(path, drop: str = "lm_head.*") -> input_formats.SourceModel:
    """The fixtures have an MLM head and a classifier, which no class of transformers has together."""
    with input_formats.open_model(path, input_formats.ReadOptions(drop=(drop,) if drop else ())) as source_model:
        return source_model


@pytest.fixture
def gpt2(tmp_path):
    """A GPT-2 vocabulary of 256 bytes and two merges, and fairseq's dictionary of it, most frequent first."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    encoder = {token: number for number, token in enumerate([*letters, "Ġt", "he", "<|endoftext|>"])}
    (tmp_path / "encoder.json").write_text(json.dumps(encoder))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nĠ t\nh e\n")
    order = np.random.default_rng(0).permutation(len(encoder))
    lines = [f"{number} {1000 - place}" for place, number in enumerate(order)] + ["madeupword0000 0"]
    (tmp_path / "dict.txt").write_text("\n".join(lines) + "\n")
    return tmp_path, encoder, [int(number) for number in order]


def test_vocabulary(gpt2, tmp_path):
    """Against fairseq's rule: GPT-2's id as a word, its line in dict.txt, four special tokens before."""
    directory, encoder, order = gpt2
    files = fairseq.convert_dictionary(directory, 4 + 259 + 1 + 1)
    ids = json.loads(files["vocab.json"])
    specials = ("<s>", "<pad>", "</s>", "<unk>", "madeupword0000", "<mask>")
    assert [ids[token] for token in specials] == [0, 1, 2, 3, 263, 264]
    assert all(ids[token] == 4 + order.index(number) for token, number in encoder.items())
    assert sorted(ids.values()) == list(range(265))
    assert files["merges.txt"] == (directory / "vocab.bpe").read_bytes()
    (tmp_path / "out").mkdir()
    for name, content in files.items():
        (tmp_path / "out" / name).write_bytes(content)
    expected = [4 + order.index(encoder[token]) for token in ("Ġt", "he")]
    assert list(Tokenizer.load(tmp_path / "out").encode(" the")) == expected


def test_a_word_that_is_counted_again(gpt2):
    """fairseq keeps the first row and lets the word mean the last (dictionary.py, add_symbol with overwrite)."""
    directory, encoder, _ = gpt2
    path = directory / "dict.txt"
    path.write_text(path.read_text() + "7 5 #fairseq:overwrite\n")
    ids = json.loads(fairseq.convert_dictionary(directory, 266)["vocab.json"])
    token = next(token for token, number in encoder.items() if number == 7)
    assert ids[token] == 264 and ids["<mask>"] == 265


@pytest.mark.parametrize("line", ["99999 3", "noword", "a b", "\udcff"])
def test_dictionaries_that_do_not_fit(gpt2, line):
    with (gpt2[0] / "dict.txt").open("a", errors="surrogateescape") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"dict\.txt: '.*' is not a token of .*encoder\.json and its count"):
        fairseq.convert_dictionary(gpt2[0], 265)


@pytest.mark.slow
def test_dictionary_of_another_model(gpt2):
    shutil.copy(FIXTURES / "new.pt", gpt2[0])
    with pytest.raises(UserError, match=r"dict\.txt: has 265 tokens, .* the model 10 rows"):
        read(gpt2[0] / "new.pt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", FILES)
def test_transformers_predicts_what_fairseq_did(name):
    """Also: settings and notes of each layout of files."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    expected = np.load(FIXTURES / "expected.npz")
    ids = torch.tensor(expected["ids"])
    for drop, wanted in (("classifier.*", "logits"), ("lm_head.*", "classes")):
        source_model = read(FIXTURES / name, drop)
        assert source_model.tokenizer_path is None
        assert source_model.notes[0] == "tensors classifier.* are fairseq's classification head 'mnli'"
        assert "encoder.json, vocab.bpe is not in" in source_model.notes[1]
        config = source_model.model.config
        assert (config.num_heads, config.hidden_dropout, config.activation) == (2, 0.05, "gelu")
        assert (config.max_positions, config.vocab_size, config.num_layers, config.intermediate_size) == (10, 10, 2, 12)
        settings = {k: v for k, v in source_model.hf_config.items() if k != "architectures"}
        kind = "RobertaForMaskedLM" if wanted == "logits" else "RobertaForSequenceClassification"
        model = getattr(transformers, kind)(transformers.RobertaConfig(**settings)).eval()
        state = {key: torch.from_numpy(np.array(array)) for key, array in source_model.hf_model.tensors.items()}
        told = model.load_state_dict(state, strict=False)
        assert not [key for key in told.missing_keys if "decoder.bias" not in key and "pooler" not in key]
        with torch.no_grad():
            if wanted == "logits":
                model.lm_head.decoder.bias.copy_(state["lm_head.bias"])
            found = model(ids, attention_mask=(ids != 1).long()).logits.numpy()
        real = (expected["ids"] != 1) if wanted == "logits" else slice(None)
        assert np.abs(expected[wanted]).max() > 1
        np.testing.assert_allclose(found[real], expected[wanted][real], atol=2e-5)
        again = to_huggingface(source_model.model, "again").tensors
        assert source_model.hf_model.tensors.keys() - again.keys() <= {"lm_head.decoder.weight"}
        for key, array in again.items():
            np.testing.assert_array_equal(array, source_model.hf_model.tensors[key])


def older(model: dict) -> dict:
    """As fairseq before 0.9 named them: decoder, emb_layer_norm, q, k and v in one (upgrade_state_dict_named)."""
    import torch

    found = {}
    for name, tensor in model.items():
        if fairseq.UNUSED.search(name):
            continue
        name = name.replace("encoder.", "decoder.", 1) if name.startswith("encoder.") else name
        name = name.replace("layernorm_embedding", "emb_layer_norm")
        if ".q_proj." in name:
            parts = [model[name.replace("decoder.", "encoder.", 1).replace("q_proj", f"{p}_proj")] for p in "qkv"]
            name, tensor = name.replace("q_proj.", "in_proj_"), torch.cat(parts)
        if ".k_proj." not in name and ".v_proj." not in name:
            found[name] = tensor
    return found


@pytest.fixture
def model() -> dict:
    return pytest.importorskip("torch").load(FIXTURES / "new.pt", weights_only=False)["model"]


@pytest.fixture
def save(tmp_path):
    torch = pytest.importorskip("torch")

    def write(model, **settings):
        path = tmp_path / "model.pt"
        torch.save({"args": Namespace(**{"encoder_attention_heads": 2} | settings), "model": model}, path)
        return path

    return write


@pytest.mark.slow
def test_older_names(save, model):
    new, names = read(FIXTURES / "new.pt").hf_model.tensors, older(model)
    assert "decoder.sentence_encoder.layers.1.self_attn.in_proj_weight" in names
    assert "decoder.sentence_encoder.emb_layer_norm.bias" in names
    old = read(save(names)).hf_model.tensors
    assert set(old) == set(new)
    for name, array in new.items():
        assert old.lazy_tensors[name].shape == array.shape
        np.testing.assert_array_equal(old[name], array)


@pytest.mark.slow
def test_several_heads_are_left_out(save, model):
    more = {name.replace("mnli", "sst"): tensor + 1 for name, tensor in model.items() if "mnli" in name}
    source_model = read(save({name: tensor.half() for name, tensor in (model | more).items()}), "")
    assert source_model.notes[0] == "left out: classification heads mnli, sst"
    assert "classifier.dense.weight" not in source_model.hf_model.tensors
    assert source_model.hf_config["architectures"] == ["RobertaForMaskedLM"]
    assert source_model.hf_model.tensors["roberta.encoder.layer.0.attention.self.query.weight"].dtype == np.float16


@pytest.mark.slow
def test_settings(save, model):
    config = read(save(model, activation_fn="gelu_accurate", untie_weights_roberta=True)).hf_config
    assert config["hidden_act"] == "gelu_new" and not config["tie_word_embeddings"]


REFUSED = {
    "an activation": ({"activation_fn": "tanh"}, lambda model: model, "hidden_act 'tanh' is not one of"),
    "a pooler": ({"pooler_activation_fn": "relu"}, lambda model: model, "pooler_activation_fn 'relu'"),
    "a tensor": (
        {},
        lambda model: model | {"decoder.layers.0.x": model["encoder.lm_head.bias"]},
        "'layers.0.x' is not part of this",
    ),
    "a layer": ({}, lambda model: without(model, ".layers.0."), "has no 'roberta.encoder.layer.0.intermediate"),
    "pre-norm": (
        {},
        lambda model: model | {"sentence_encoder.layer_norm.bias": model["encoder.lm_head.bias"]},
        "pre-norm",
    ),
}


def without(model: dict, part: str) -> dict:
    return {name: tensor for name, tensor in model.items() if part not in name}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refused(save, model, name):
    settings, change, words = REFUSED[name]
    path = save(change(model), **settings)
    with pytest.raises(UserError, match=words) as caught:
        read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.slow
def test_no_settings_and_both_heads(tmp_path, model):
    pytest.importorskip("torch").save({"model": model, "args": None}, tmp_path / "x.pt")
    for path, words in ((tmp_path / "x.pt", "no settings"), (FIXTURES / "prenorm.pt", "encoder_normalize_before")):
        with pytest.raises(UserError, match=words):
            read(path)
