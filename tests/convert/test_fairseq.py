"""RoBERTa by fairseq 0.12.2 itself (fixtures/make_fairseq.py), and as versions before named it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bert_jax.convert.formats import fairseq, input_formats, torch_checkpoint
from bert_jax.convert.formats.format import ReadOptions
from bert_jax.convert.translate import from_huggingface, to_huggingface
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "fairseq"
slow = pytest.mark.slow
FILES = ["new.pt", "omegaconf.pt", "legacy.pt"]


def read(path):
    """The model with the names of transformers."""
    return fairseq.read_hf_model(torch_checkpoint.load(path, placeholders=True), path)[0]


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


def test_vocabulary(gpt2):
    """Against fairseq's rule: GPT-2's id as a word, its line in dict.txt, four special tokens before."""
    directory, encoder, order = gpt2
    files = fairseq.convert_dictionary(directory, 4 + 259 + 1 + 1)
    assert set(files) == {"vocab.json", "merges.txt"}
    ids = json.loads(files["vocab.json"])
    assert [ids[token] for token in ("<s>", "<pad>", "</s>", "<unk>", "madeupword0000", "<mask>")] == [
        *(0, 1, 2, 3, 263, 264)
    ]
    assert all(ids[token] == 4 + order.index(number) for token, number in encoder.items())
    assert sorted(ids.values()) == list(range(265))
    assert files["merges.txt"] == (directory / "vocab.bpe").read_bytes()


def test_our_tokenizer_opens_the_files(gpt2, tmp_path):
    directory, encoder, order = gpt2
    out = tmp_path / "out"
    out.mkdir()
    for name, content in fairseq.convert_dictionary(directory, 265).items():
        (out / name).write_bytes(content)
    tokenizer = Tokenizer.load(out)
    expected = [encoder[token] for token in ("Ġt", "he")]
    assert list(tokenizer.encode(" the")) == [4 + order.index(number) for number in expected]


def test_dictionaries_that_do_not_fit(gpt2):
    directory = gpt2[0]
    with pytest.raises(UserError, match=r"dict\.txt: has 265 tokens, special ones included, the model 300 rows"):
        fairseq.convert_dictionary(directory, 300)
    whole = (directory / "dict.txt").read_text()
    for line, message in (
        ("99999 3", "99999 is not an id"),
        ("noword", "not a token and its count"),
        ("a b", "not a token"),
    ):
        (directory / "dict.txt").write_text(whole + line + "\n")
        with pytest.raises(UserError, match=rf"dict\.txt, line 261: .*{message}"):
            fairseq.convert_dictionary(directory, 265)
    (directory / "dict.txt").write_text(whole)
    (directory / "encoder.json").write_text("{")
    with pytest.raises(UserError, match=r"encoder\.json is not JSON"):
        fairseq.convert_dictionary(directory, 265)


def test_a_word_that_is_counted_again(gpt2):
    """fairseq keeps the first row and lets the word mean the last (dictionary.py, add_symbol with overwrite)."""
    directory, encoder, _ = gpt2
    path = directory / "dict.txt"
    path.write_text(path.read_text() + "7 5 #fairseq:overwrite\n")
    ids = json.loads(fairseq.convert_dictionary(directory, 266)["vocab.json"])
    token = next(token for token, number in encoder.items() if number == 7)
    assert ids[token] == 264 and ids["<mask>"] == 265


def load(name: str):
    return pytest.importorskip("torch").load(FIXTURES / name, weights_only=False)["model"]


@slow
@pytest.mark.parametrize("name", FILES)
def test_real_files(tmp_path, name):
    pytest.importorskip("torch")
    content = torch_checkpoint.load(FIXTURES / name, placeholders=True)
    source_model = fairseq.read(content, FIXTURES / name, ReadOptions(), tmp_path)
    notes, config = source_model.notes, source_model.hf_config
    assert source_model.tokenizer_path is None and list(tmp_path.iterdir()) == []
    assert notes[0] == "tensors classifier.* are fairseq's classification head 'mnli'"
    assert "encoder.json, vocab.bpe is not in" in notes[1]
    assert config["num_attention_heads"] == 2 and config["hidden_dropout_prob"] == 0.05
    assert config["max_position_embeddings"] == 12 and config["vocab_size"] == 10 and config["hidden_act"] == "gelu"
    assert config["num_hidden_layers"] == 2 and config["intermediate_size"] == 12 and config["tie_word_embeddings"]


@slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", FILES)
def test_transformers_predicts_what_fairseq_did(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    hf_model = read(FIXTURES / name)
    expected = np.load(FIXTURES / "expected.npz")
    ids = torch.tensor(expected["ids"])
    config = transformers.RobertaConfig(**{k: v for k, v in hf_model.config.items() if k != "architectures"})
    state = {key: torch.from_numpy(np.array(array)) for key, array in hf_model.tensors.items()}
    for kind, wanted in (
        (transformers.RobertaForMaskedLM, "logits"),
        (transformers.RobertaForSequenceClassification, "classes"),
    ):
        model = kind(config).eval()
        told = model.load_state_dict(state, strict=False)
        assert not [key for key in told.missing_keys if "decoder.bias" not in key and "pooler" not in key]
        with torch.no_grad():
            if wanted == "logits":
                model.lm_head.decoder.bias.copy_(state["lm_head.bias"])
            found = model(ids, attention_mask=(ids != 1).long()).logits.numpy()
        real = (expected["ids"] != 1) if wanted == "logits" else slice(None)
        assert np.abs(expected[wanted]).max() > 1
        np.testing.assert_allclose(found[real], expected[wanted][real], atol=2e-5)


@slow
def test_into_ours_and_back():
    hf_model = read(FIXTURES / "new.pt")
    model = from_huggingface(hf_model)
    assert model.heads.mlm and model.heads.task.kind == "classification" and model.config.max_positions == 10
    again = to_huggingface(model, "again").tensors
    assert set(hf_model.tensors) - set(again) == {"lm_head.decoder.weight"}
    for name, array in again.items():
        np.testing.assert_array_equal(array, hf_model.tensors[name])


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
def save(tmp_path):
    torch = pytest.importorskip("torch")

    def write(model, **settings):
        from argparse import Namespace

        path = tmp_path / "model.pt"
        torch.save({"args": Namespace(**{"encoder_attention_heads": 2} | settings), "model": model}, path)
        return path

    return write


@slow
def test_older_names(save):
    new = read(FIXTURES / "new.pt").tensors
    names = older(load("new.pt"))
    assert "decoder.sentence_encoder.layers.1.self_attn.in_proj_weight" in names
    assert "decoder.sentence_encoder.emb_layer_norm.bias" in names
    old = read(save(names)).tensors
    assert set(old) == set(new)
    for name, array in new.items():
        assert old.lazy_tensors[name].shape == array.shape
        np.testing.assert_array_equal(old[name], array)


@slow
def test_half_precision_stays(save):
    half = read(save({name: tensor.half() for name, tensor in load("new.pt").items()})).tensors
    assert half["roberta.encoder.layer.0.attention.self.query.weight"].dtype == np.float16


@slow
def test_several_heads_are_left_out(save):
    model = load("new.pt")
    path = save(model | {n.replace("mnli", "sst"): t + 1 for n, t in model.items() if "mnli" in n})
    hf_model, notes = fairseq.read_hf_model(torch_checkpoint.load(path, placeholders=True), path)
    assert notes == ["left out: classification heads mnli, sst"]
    assert "classifier.dense.weight" not in hf_model.tensors
    assert hf_model.config["architectures"] == ["RobertaForMaskedLM"] and "id2label" not in hf_model.config


@slow
def test_settings(save):
    model = load("new.pt")
    hf_model = read(save(model, activation_fn="gelu_accurate", untie_weights_roberta=True))
    assert hf_model.config["hidden_act"] == "gelu_new" and not hf_model.config["tie_word_embeddings"]


@slow
def test_refused(save, tmp_path):
    torch = pytest.importorskip("torch")
    model = load("new.pt")

    def fails(path, *words):
        with pytest.raises(UserError) as caught, input_formats.open_model(path):
            pass
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        for word in words:
            assert word in str(caught.value), str(caught.value)

    fails(FIXTURES / "prenorm.pt", "encoder_normalize_before")
    fails(save(model, activation_fn="tanh"), "activation_fn 'tanh'")
    fails(save(model, pooler_activation_fn="relu"), "pooler_activation_fn 'relu'")
    fails(save(model, encoder_attention_heads=None), "encoder_attention_heads")
    fails(save(model | {"decoder.layers.0.x": torch.zeros(1)}), "tensor 'layers.0.x' is not part of this architecture")
    fails(save({n: t for n, t in model.items() if "embed_positions" not in n}), "no table of position")
    fails(save({n: t for n, t in model.items() if ".layers.0." not in n}), "only the layers [1]")
    path = tmp_path / "x.pt"
    torch.save({"model": model, "args": None}, path)
    fails(path, "no settings")


@slow
def test_dictionary_of_another_model(tmp_path, gpt2):
    pytest.importorskip("torch")
    shutil.copy(FIXTURES / "new.pt", gpt2[0])
    opened = input_formats.open_model(gpt2[0] / "new.pt")
    with pytest.raises(UserError, match=r"dict\.txt: has 265 tokens, .* the model 10 rows"), opened:
        pass
