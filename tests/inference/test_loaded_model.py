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


@functools.partial(jax.jit, static_argnums=(0, 1))
def mlm_logits(config, heads, params, ids):
    """Of a row without padding, by the reference attention."""
    zeros, bound = jnp.zeros_like(ids), bert.model_from_params(config, heads, params)
    return bound.mlm(bound.encoder(whole_rows(ids, zeros, zeros + 1)).hidden, bound.encoder.embeddings.word[...])[0]


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
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode("the [MASK]"), model.tokenizer.sep_id]
    expected = jax.nn.softmax(mlm_logits(model.config, model.heads, params, np.array([ids], np.int32))[-2])
    found = {candidate.token_id: candidate.probability for candidate in all_tokens}
    assert sorted(found) == list(range(size)) and sum(found.values()) < 0.5
    np.testing.assert_allclose([found[i] for i in range(size)], expected[:size], rtol=1e-3)


def test_special_tokens_in_texts_are_matched_when_encoding(model):
    """As in sentence-transformers."""
    masked, plain = model.encode(["the [MASK] sings", "the [mask] sings"])
    assert np.abs(plain - masked).max() > 1e-2
    output = model.forward(["the [MASK] sings"])
    assert output.input_ids[0, 2] == model.tokenizer.mask_id
    np.testing.assert_allclose(masked, output.last_hidden_state[0].mean(0), atol=1e-5)


def unchecked(method):
    """Without the check of annotations, which happens in tests only."""
    return functools.partial(inspect.unwrap(method.__func__), method.__self__)


REFUSED = [
    (lambda m: m.fill_mask("the river"), "no [MASK]: write [MASK] in place of a word"),
    (lambda m: m.fill_mask("stone " * 80 + "[MASK]"), "position table 64: shorten it"),
    (lambda m: unchecked(m.fill_mask)(None), "the text is NoneType, not str"),
    (lambda m: m.fill_mask("the [MASK]", top=0), "top is 0: it must be a whole number from 1 to "),
    (lambda m: m.fill_mask("the [MASK]", top=100_000), "top is 100000: it must be a whole number from 1 to "),
    (lambda m: unchecked(m.fill_mask)("the [MASK]", 1.5), "top is 1.5: it must be a whole number from 1 to "),
    (lambda m: unchecked(m.encode)(None), "texts is NoneType, not an iterable of str"),
    (lambda m: m.encode("the"), "put a single text into a list"),
    (lambda m: unchecked(m.encode)(b"the"), "texts is bytes, not an iterable of str"),
    (lambda m: unchecked(m.encode)(["the", None]), "text 1 is NoneType, not str"),
    (lambda m: unchecked(m.encode)(iter(["the", b"river"])), "text 1 is bytes, not str"),
    (lambda m: m.encode(["the \ud800"]), "text 0 has a surrogate at character 4"),
    (lambda m: unchecked(m.encode)(["the"], prompt=3), "the prompt is int, not str"),
    (lambda m: m.forward([]), "texts is empty"),
    (lambda m: m.forward(["the", "stone " * 80]), "1 of 2 texts have more than 64 tokens"),
]
for _texts in (["the"], []):  # Without texts, too: a mistake does not wait for the first of them.
    REFUSED += [
        (
            lambda m, texts=_texts: m.encode(texts, max_length=2),
            "max_length is 2: it must be a whole number from 3 to 64",
        ),
        (lambda m, texts=_texts: m.encode(texts, max_length=65), "max_length is 65: it must be a whole number from 3"),
        (
            lambda m, texts=_texts: m.encode(texts, batch_size=0),
            "batch_size is 0: it must be a whole number of at least 1",
        ),
        (lambda m, texts=_texts: unchecked(m.encode)(texts, max_length=10.5), "max_length is 10.5: it must be a whole"),
        (lambda m, texts=_texts: unchecked(m.encode)(texts, batch_size=2.5), "batch_size is 2.5: it must be a whole"),
        (lambda m, texts=_texts: m.encode(texts, "sum"), "'sum' is not one of cls, max, mean, mean_sqrt_len_tokens"),
    ]


def test_impossible_texts_and_arguments(model):
    for use, message in REFUSED:
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


def test_nothing_to_load(tmp_path, tiny_run):
    with pytest.raises(UserError, match="does not exist"):
        bert_jax.load(tmp_path / "none")
    unfinished = shutil.copytree(tiny_run, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(UserError, match="no finished checkpoint yet"):
        bert_jax.load(unfinished)
