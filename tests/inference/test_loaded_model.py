"""A trained model in a user's hands, from its run and from its export."""

import functools
import inspect
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

import bert_jax
from bert_jax.convert.conversion import convert
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model import bert
from bert_jax.tokenizers.tokenizer import byte_bpe

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = [
    "The river sings.",
    "A",
    "Quick wind falls over the old stone, and the dark mountain runs.",
    "",
    "the slow light",
]


@pytest.fixture(scope="module")
def model(tiny_run):
    return bert_jax.load(tiny_run)


@pytest.fixture(scope="module")
def exported(tiny_export):
    return bert_jax.load(str(tiny_export))


def test_both_forms_hold_the_same_model(model, exported):
    one, two = (m.encode(TEXTS, ("mean", "cls")) for m in (model, exported))
    assert one.shape == (5, 128) and one.dtype == np.float32
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)
    assert np.abs(one[:, :64] - one[:, 64:]).max() > 0.01
    assert model.fill_mask("the [MASK] sings") == exported.fill_mask("the [MASK] sings")


def test_export_is_bit_identical(model, exported):
    assert jax.tree.structure(model.params) == jax.tree.structure(exported.params)
    for one, two in zip(jax.tree.leaves(model.params), jax.tree.leaves(exported.params), strict=True):
        np.testing.assert_array_equal(one, two)
    assert model.tokenizer.fingerprint == exported.tokenizer.fingerprint


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_row(config, heads, params, ids):
    """Hidden states and MLM logits of a row without padding, by the reference attention."""
    zeros, bound = jnp.zeros_like(ids), bert.merge_params(config, heads, params)
    hidden = bound.encoder(whole_rows(ids, zeros, zeros + 1)).hidden
    return hidden[0], bound.mlm(hidden, bound.encoder.embeddings.attend)[0]


def test_vectors_depend_on_the_text_alone(model):
    """Not on the order of the texts, nor on padding: against the plain mean over the tokens of one row."""
    together = model.encode(TEXTS, ("mean", "cls"))
    np.testing.assert_allclose(model.encode(TEXTS[::-1], ("mean", "cls"))[::-1], together, rtol=0, atol=1e-5)
    assert len({vector.tobytes() for vector in np.round(together, 4)}) == len(TEXTS)
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode(TEXTS[0]), model.tokenizer.sep_id]
    hidden, _ = one_row(model.config, model.heads, model.params, np.array([ids], np.int32))
    np.testing.assert_allclose(together[0], np.concatenate([hidden.mean(0), hidden[0]]), rtol=0, atol=1e-5)


def test_fill_mask(model):
    filled = model.fill_mask("the [MASK] sings over [MASK].", top=4)
    assert [len(candidates) for candidates in filled] == [4, 4]
    for candidates in filled:
        probabilities = [candidate.probability for candidate in candidates]
        assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) <= 1
        assert all(model.tokenizer.token_to_id(c.token) == c.token_id for c in candidates)


def test_probabilities_are_those_of_the_whole_softmax(model):
    """As in transformers, whose pipelines include padding rows of the vocabulary."""
    size = model.tokenizer.vocab_size
    assert size < model.config.vocab_size
    bias = model.params["mlm"]["bias"].at[size:].add(8.0)
    params = {**model.params, "mlm": {**model.params["mlm"], "bias": bias}}
    padded = LoadedModel(model.config, model.heads, params, model.tokenizer)
    (all_tokens,) = padded.fill_mask("the [MASK]", top=size)
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode("the [MASK]", specials=True), model.tokenizer.sep_id]
    _, logits = one_row(model.config, model.heads, params, np.array([ids], np.int32))
    expected = jax.nn.softmax(logits[-2])
    found = {candidate.token_id: candidate.probability for candidate in all_tokens}
    assert sorted(found) == list(range(size)) and sum(found.values()) < 0.5
    np.testing.assert_allclose([found[i] for i in range(size)], expected[:size], rtol=1e-3)


def test_special_tokens_in_texts_are_text_when_encoding(model):
    plain, masked = model.encode(["the [MASK] sings", "the [mask] sings"])
    np.testing.assert_allclose(plain, masked, atol=1e-6)


def unchecked(method):
    """Without the check of annotations, which happens in tests only."""
    return functools.partial(inspect.unwrap(method.__func__), method.__self__)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m.fill_mask("the river"), "no [MASK]: write [MASK] in place of a word"),
        (lambda m: m.fill_mask(""), "no [MASK]: write [MASK] in place of a word"),
        (lambda m: m.fill_mask("stone " * 80 + "[MASK]"), "position table 64: shorten it"),
        (lambda m: unchecked(m.fill_mask)(None), "the text is NoneType, not str"),
        (lambda m: unchecked(m.fill_mask)(b"the [MASK]"), "the text is bytes, not str"),
        (lambda m: m.fill_mask("the [MASK]", top=0), "top is 0: it must be from 1 to "),
        (lambda m: m.fill_mask("the [MASK]", top=-3), "top is -3: it must be from 1 to "),
        (lambda m: m.fill_mask("the [MASK]", top=100_000), "top is 100000: it must be from 1 to "),
        (lambda m: unchecked(m.encode)(None), "texts is NoneType, not an iterable of str"),
        (lambda m: m.encode("the"), "put a single text into a list"),
        (lambda m: unchecked(m.encode)(b"the"), "texts is bytes, not an iterable of str"),
        (lambda m: unchecked(m.encode)(["the", None]), "text 1 is NoneType, not str"),
        (lambda m: unchecked(m.encode)(iter(["the", b"river"])), "text 1 is bytes, not str"),
        (lambda m: m.encode(["the \ud800"]), "text 0 has a surrogate at character 4"),
        (lambda m: unchecked(m.encode)(["the"], prompt=3), "the prompt is int, not str"),
        (lambda m: m.forward([]), "texts is empty"),
        (lambda m: m.forward(["the", "stone " * 80]), "1 of 2 texts have more than 64 tokens"),
    ],
)
def test_impossible_texts(model, use, message):
    with pytest.raises(UserError) as caught:
        use(model)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_mask_token_of_other_vocabularies_is_named(model):
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), "<mask>"]
    tokenizer = byte_bpe({piece: i for i, piece in enumerate(pieces)}, [], False, prefix_space=False, origin="made")
    roberta = LoadedModel(model.config, model.heads, model.params, tokenizer)
    with pytest.raises(UserError, match="the text has no <mask>: write <mask> in place of a word"):
        roberta.fill_mask("the [MASK]")


def test_a_config_of_another_shape_than_the_checkpoint(tmp_path, tiny_run):
    copy = shutil.copytree(tiny_run, tmp_path / "run")
    described = json.loads((copy / "config.json").read_text())
    described["config"]["model"] |= {"vocab_size": 130}
    (copy / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"word has shape \(120, 64\), not \(130, 64\) as in the run's config"):
        bert_jax.load(copy)


def test_nothing_to_load(tmp_path, tiny_run, tiny_export):
    with pytest.raises(UserError, match="does not exist"):
        bert_jax.load(tmp_path / "none")
    with pytest.raises(UserError, match="is not a run or a model"):
        bert_jax.load(tmp_path)
    unfinished = shutil.copytree(tiny_run, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(UserError, match="no finished checkpoint yet"):
        bert_jax.load(unfinished)
    damaged = shutil.copytree(tiny_export, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or damaged"):
        bert_jax.load(damaged)
    (damaged / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        bert_jax.load(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5' is not supported: use one of bert, roberta"),
        ({"architectures": ["BertForMultipleChoice"]}, "'BertForMultipleChoice' is not supported"),
        ({"position_embedding_type": "relative_key"}, "only absolute positions"),
        ({"tie_word_embeddings": False}, "tied to the word embeddings"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_act": "swish"}, "hidden_act 'swish'"),
        ({"hidden_size": 32}, "the config says"),
        (
            {"num_hidden_layers": 2},
            "is missing; the nearest name is 'bert.encoder.layer.0.attention.self.query.weight'",
        ),
    ],
)
def test_an_export_that_contradicts_itself(tmp_path, tiny_export, change, message):
    copy = shutil.copytree(tiny_export, tmp_path / "copy")
    described = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(described | change))
    with pytest.raises(UserError, match=str(copy)) as caught:
        bert_jax.load(copy)
    assert message in str(caught.value)


def test_export_needs_a_free_place(tmp_path, tiny_run):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        convert(tiny_run, tmp_path / "there", "huggingface")
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_export_describes_itself(tiny_export, tiny_config):
    assert {path.name for path in tiny_export.iterdir()} == {
        *("config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json", "README.md")
    }
    described = json.loads((tiny_export / "config.json").read_text())
    assert described["architectures"] == ["BertForPreTraining"]
    assert described["num_hidden_layers"] == tiny_config.model.num_layers
    assert "transformers" in (tiny_export / "README.md").read_text()
