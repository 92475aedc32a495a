"""The encoder against slow reference implementations: values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import attention, bert, block, encoder, stack
from bert_jax.model.activations import Edit, LayerTap
from bert_jax.model.attention import attend
from bert_jax.model.block import Block
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.heads import Heads
from bert_jax.model.layer_plan import NormPlacement, layer_plans, parameter_groups, split_prefix_and_scan_body
from bert_jax.model.layers import gather_positions
from tests.jaxprs import primitives, scans
from tests.model.toy import (
    BERT,
    LENGTH,
    ROWS,
    assert_trees_close,
    attentions,
    encode,
    inputs,
    loss,
    parameters,
    probe,
    real,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODERN = dataclasses.replace(
    BERT,
    num_layers=5,
    positions="rotary",
    norm_placement="pre",
    attention_window=2,
    global_every=2,
    local_rotary_base=100.0,
    feed_forward="gated",
    biases="none",
)
ALBERT = dataclasses.replace(BERT, num_layers=4, parameter_groups=2, embedding_size=16)
CAUSAL = dataclasses.replace(BERT, direction="causal")


def gradients(config, batch, params=None, **options):
    params = parameters(config) if params is None else params
    return jax.jit(jax.value_and_grad(lambda p: loss(config, p, batch, **options)))(params)


def test_repetition_has_the_fewest_layer_bodies():
    def decomposed(config):
        repetition = split_prefix_and_scan_body(layer_plans(config))
        prefix, body = repetition.prefix, repetition.body
        assert prefix + body * repetition.repeats == layer_plans(config)
        return len(prefix), len(body), repetition.repeats

    assert decomposed(ModelConfig()) == (0, 1, 12)
    assert decomposed(ModelConfig(parameter_groups=1)) == (0, 1, 12)
    # ModernBERT-base: 22 layers, every third is global, the first has no attention norm.
    modern = dataclasses.replace(MODERN, num_layers=22, global_every=3)
    assert decomposed(MODERN) == (1, 2, 2)
    assert decomposed(modern) == (1, 3, 7)
    assert decomposed(dataclasses.replace(modern, num_layers=1)) == (0, 1, 1)
    plans = layer_plans(modern)
    assert [i for i, plan in enumerate(plans) if plan.window is None] == [0, 3, 6, 9, 12, 15, 18, 21]
    assert [plan.rotary_base for plan in plans[:4]] == [10000.0, 100.0, 100.0, 10000.0]
    assert plans[0].norm_placement is NormPlacement.PRE_FEED_FORWARD and {
        plan.norm_placement for plan in plans[1:]
    } == {NormPlacement.PRE}


def weighted(hidden, batch):
    return (hidden * probe((ROWS, LENGTH, BERT.hidden_size)) * real(batch)).sum()


def looped(config, params, batch):
    """All layers in a Python loop: no scan, no stack, no repetition."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Block(config, jax.random.key(0))))
    model = bert.model_from_params(config, Heads(pair=True), params)
    hidden = model.encoder.embeddings(batch, None, None)
    for layer, plan in enumerate(layer_plans(config)):
        group = parameter_groups(config)[layer]
        block = nnx.merge(graph, jax.tree.map(lambda x, group=group: x[group], params["encoder"]["layers"]))
        hidden = block(hidden, plan, batch, None, LayerTap())
    return model.encoder.final_norm(hidden) if config.norm_placement == "pre" else hidden


@functools.lru_cache
def looped_gradients(config):
    batch = inputs()
    return jax.jit(jax.value_and_grad(lambda p: weighted(looped(config, p, batch), batch)))(parameters(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "unroll"),
    [(BERT, 2), (MODERN, 1), (MODERN, 2), (ALBERT, 1)],
    ids=["bert-partly", "modern", "modern-unrolled", "albert"],
)
def test_scan_is_a_loop_over_layers(config, unroll):
    unrolled, batch, params = dataclasses.replace(config, scan_unroll=unroll), inputs(), parameters(config)
    repetition = split_prefix_and_scan_body(layer_plans(config))
    scanned = unroll < repetition.repeats

    def run(params):
        return encode(unrolled, params, batch).hidden

    assert scans(run, params) == ([(repetition.repeats, unroll)] if scanned else [])
    assert scans(lambda p: looped(config, p, batch), params) == []
    # Six products in a layer, seven if it is gated; the scan traces only the layers of its prefix and body.
    saved = scanned * (config.num_layers - len(repetition.prefix) - len(repetition.body))
    products = [primitives(f, params)["dot_general"] for f in (run, lambda p: looped(config, p, batch))]
    # The scanned encoder has one more product, the pooler.
    assert products[1] == products[0] - 1 + (7 if config.feed_forward == "gated" else 6) * saved
    one, one_gradient = jax.jit(jax.value_and_grad(lambda p: weighted(run(p), batch)))(params)
    two, two_gradient = looped_gradients(config)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    assert_trees_close(one_gradient, two_gradient, rtol=1e-3, atol=2e-5)


SHARED = {"bottleneck_size": 12, "bottleneck_attention": "shared", "feed_forward_networks": 2, "adapter_size": 4}
BOTTLENECK = dataclasses.replace(BERT, num_layers=2, **SHARED)


@pytest.mark.parametrize(
    ("config", "dense_dtype"),
    [
        pytest.param(MODERN, "compute", id="modern"),
        pytest.param(ALBERT, "compute", id="albert"),
        pytest.param(BOTTLENECK, "float8", id="bottleneck", marks=pytest.mark.slow),
    ],
)
def test_stored_gradients_of_layers_lose_nothing(config, dense_dtype, monkeypatch):
    """Unrolled, gradients are written into one stack per parameter, in the type that the layer computes them in."""
    monkeypatch.setattr(stack, "SMALL", 0)
    config = dataclasses.replace(
        config, compute_dtype="bfloat16", dense_dtype=dense_dtype, scan_unroll=config.num_layers, remat="none"
    )
    params, batch = parameters(dataclasses.replace(config, compute_dtype="float32", dense_dtype="compute")), inputs()
    read = jnp.asarray([[0, 2]] * ROWS)

    def gradient(params):
        def total(params):
            model = bert.model_from_params(config, Heads(pair=True), params)
            hidden = model.encoder(batch, positions=read).hidden.astype(jnp.float32)
            return (hidden * probe(hidden.shape)).sum()

        return jax.grad(total)(params)["encoder"]["layers"]

    layers = jax.tree.leaves(params["encoder"]["layers"])
    assert primitives(gradient, params)["dynamic_update_slice"] == sum(len(x) for x in layers)
    written = jax.jit(gradient)(params)
    monkeypatch.setattr(encoder, "_gradient_types", lambda stacked, config: None)
    jax.tree.map(np.testing.assert_array_equal, written, jax.jit(lambda p: gradient(p))(params))


@pytest.mark.parametrize(("config", "policy"), [(BERT, "dots"), (MODERN, "full")])
def test_remat_recomputes_the_same(config, policy):
    batch, params = inputs(), parameters(config)
    remat = dataclasses.replace(config, remat=policy)

    def traced(config):
        return primitives(jax.grad(lambda p: loss(config, p, batch)), params)

    plain, recomputing = traced(config), traced(remat)
    names = {"checkpoint", "remat", "remat2"}
    assert not names & plain.keys() and names & recomputing.keys()
    # `full` runs every product of the forward pass twice; `dots` keeps all but attention's, and statistics of norms.
    assert recomputing["dot_general"] > plain["dot_general"]
    assert (recomputing["rsqrt"] > plain["rsqrt"]) == (policy == "full")
    assert_trees_close(gradients(config, batch), gradients(remat, batch), rtol=1e-4, atol=1e-5)


def test_masking_a_head_is_removing_it():
    """A different head in each layer; the pruned encoder really is smaller."""
    batch, params = inputs(), parameters(BERT)
    removed = np.array([0, 2, 1])
    mask = jnp.ones((BERT.num_layers, BERT.num_heads)).at[np.arange(3), removed].set(0.0)
    kept = np.array([[h for h in range(3) if h != gone] for gone in removed])
    layers = np.arange(3)[:, None]
    pruned = jax.tree.map(lambda x: x, params)
    attention = pruned["encoder"]["layers"]
    qkv, attention_out = attention["qkv"], attention["attention_out"]
    qkv["kernel"] = jnp.stack([qkv["kernel"][i][:, :, kept[i]] for i in range(3)])
    qkv["bias"] = jnp.stack([qkv["bias"][i][:, kept[i]] for i in range(3)])
    attention_out["kernel"] = attention_out["kernel"][layers, kept]
    smaller = dataclasses.replace(BERT, num_heads=2, head_size=8)
    assert attention_out["kernel"].shape == (3, 2, 8, 24)
    masked = encode(BERT, params, batch, edits={"attention.context": Edit(mask[:, None, None, :, None])})
    assert np.abs(masked.hidden - encode(BERT, params, batch).hidden).max() > 0.01
    np.testing.assert_allclose(masked.hidden, encode(smaller, pruned, batch).hidden, rtol=1e-4, atol=1e-5)


def test_inputs_embeds_replace_the_lookup():
    """Before the projection of narrow embeddings."""
    batch, params = inputs(), parameters(ALBERT)
    vectors = params["encoder"]["embeddings"]["word"][batch.input_ids]
    assert vectors.shape[-1] == 16
    other_ids = batch._replace(input_ids=jnp.zeros_like(batch.input_ids))
    looked_up = encode(ALBERT, params, batch).hidden
    given = encode(ALBERT, params, other_ids, inputs_embeds=vectors).hidden
    np.testing.assert_allclose(looked_up, given, rtol=1e-6, atol=1e-6)
    assert np.abs(looked_up - encode(ALBERT, params, other_ids).hidden).max() > 0.1


def test_optional_outputs():
    batch = inputs()
    plain = encode(BERT, parameters(BERT), batch)
    assert plain.hidden_states is None and plain.activations == {}
    output = encode(BERT, parameters(BERT), batch, hidden_states=True, activations=("hidden",))
    assert output.hidden_states.shape == (4, 3, 12, 24) and output.activations.keys() == {"hidden"}
    np.testing.assert_array_equal(output.hidden_states[-1], output.hidden)
    np.testing.assert_array_equal(output.hidden_states[1:], output.activations["hidden"])
    np.testing.assert_allclose(output.hidden, plain.hidden, rtol=1e-6, atol=1e-6)
    assert output.pooled.shape == (3, 1, 24)
    pre = encode(MODERN, parameters(MODERN), batch, hidden_states=True)
    np.testing.assert_array_equal(pre.hidden_states[-1], pre.hidden)


@pytest.mark.parametrize(("config", "attention"), [(BERT, "reference"), (CAUSAL, "reference"), (MODERN, "xla")])
def test_packed_examples_do_not_mix(config, attention):
    """Gradients across examples are exactly zero."""
    config = dataclasses.replace(config, attention=attention)
    batch, params = inputs(lengths=(12, 10, 11), packed=True), parameters(config)
    vectors = params["encoder"]["embeddings"]["word"][batch.input_ids]

    @jax.jit
    @jax.grad
    def gradient_of(vectors, example):
        output = encode(config, params, batch, inputs_embeds=vectors)
        chosen = (batch.segment_ids == example)[:, :, None]
        pooled = output.pooled[:, example - 1] * probe((ROWS, BERT.hidden_size))
        return (output.hidden * chosen * probe(output.hidden.shape)).sum() + pooled.sum()

    for example in (1, 2):
        gradient = np.asarray(gradient_of(vectors, example))
        own = np.broadcast_to(np.asarray(batch.segment_ids == example)[:, :, None], gradient.shape)
        assert (gradient[~own] == 0).all() and np.abs(gradient[own]).max() > 0.1


@pytest.mark.parametrize(("config", "packed"), [(BERT, False), (MODERN, True)])
def test_xla_attention_equals_reference(config, packed, monkeypatch):
    batch, fused = inputs(packed=packed), dataclasses.replace(config, attention="xla")
    called = []
    original = jax.nn.dot_product_attention

    def spy(*arguments, **options):
        called.append(options)
        return original(*arguments, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    (one, one_gradient), (two, two_gradient) = gradients(config, batch), gradients(fused, batch, parameters(config))
    assert {call["implementation"] for call in called} == {"xla"}
    np.testing.assert_allclose(one, two, rtol=1e-4)
    assert_trees_close(one_gradient, two_gradient, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("config", "packed", "rate"), [(BERT, False, 0.0), (MODERN, True, 0.3)])
def test_deferred_attention_equals_reference(config, packed, rate):
    """With dropout, too; dense layers are products of matrices."""
    config = dataclasses.replace(config, num_layers=2, hidden_dropout=rate, attention_dropout=rate)
    batch, deferred = inputs(packed=packed), dataclasses.replace(config, attention="deferred")
    params, key = parameters(config), DropoutKey(jnp.uint32(5), jnp.arange(ROWS)) if rate else None

    def products_of_matrices(config):
        traced = jax.make_jaxpr(lambda params: loss(config, params, batch, dropout_key=key))(params)
        return str(traced).count("dimension_numbers=(([1], [0]), ([], []))")

    assert products_of_matrices(deferred) >= products_of_matrices(config) + 6
    one, one_gradient = gradients(config, batch, params, dropout_key=key)
    two, two_gradient = gradients(deferred, batch, params, dropout_key=key)
    np.testing.assert_allclose(one, two, rtol=1e-4)
    assert_trees_close(one_gradient, two_gradient, rtol=1e-3, atol=2e-5)
    with pytest.raises(UserError, match="'deferred' has no attention probabilities"):
        attentions(deferred, parameters(config), batch)


def test_rotary_positions_are_relative():
    config = dataclasses.replace(BERT, positions="rotary")
    batch, params = inputs(), parameters(config)

    def moved(position_ids):
        return attentions(config, params, batch._replace(position_ids=position_ids))

    unshifted = moved(batch.position_ids)
    np.testing.assert_allclose(unshifted, moved(batch.position_ids + 17), rtol=1e-3, atol=1e-5)
    assert np.abs(unshifted - moved(batch.position_ids * 2)).max() > 1e-3
    # Learned positions are absolute: the same shift changes them.
    learned = [
        encode(BERT, parameters(BERT), batch._replace(position_ids=batch.position_ids + shift)).hidden
        for shift in (0, 17)
    ]
    assert np.abs(learned[0] - learned[1]).max() > 0.1


def test_shared_groups_equal_copies():
    batch, shared = inputs(), parameters(ALBERT)
    copies = jax.tree.map(lambda x: x, shared)
    separate = dataclasses.replace(ALBERT, parameter_groups=None)
    copies["encoder"]["layers"] = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), shared["encoder"]["layers"])
    assert shared["encoder"]["layers"]["up"]["bias"].shape[0] == 2
    assert copies["encoder"]["layers"]["up"]["bias"].shape[0] == 4
    one, one_gradient = gradients(ALBERT, batch, shared)
    two, two_gradient = gradients(separate, batch, copies)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    summed = jax.tree.map(lambda g: g.reshape(2, 2, *g.shape[1:]).sum(1), two_gradient["encoder"]["layers"])
    assert_trees_close(one_gradient["encoder"]["layers"], summed, rtol=1e-3, atol=1e-5)


def test_bfloat16_is_close_to_float32():
    config, batch, params = dataclasses.replace(BERT, compute_dtype="bfloat16"), inputs(), parameters(BERT)
    half, full = encode(config, params, batch), encode(BERT, params, batch)
    assert half.hidden.dtype == jnp.bfloat16 and full.hidden.dtype == jnp.float32
    # 8 bits of mantissa through 4 layers: about 1 % of a unit-variance activation.
    difference = np.asarray(half.hidden, np.float32) - np.asarray(full.hidden)
    assert 1e-4 < np.sqrt(np.mean(np.square(difference))) < 0.03
    (_, one), (_, two) = gradients(BERT, batch, params), gradients(config, batch, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(two)} == {jnp.dtype("float32")}
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (one, two)]
    assert np.linalg.norm(flat[0] - flat[1]) < 0.05 * np.linalg.norm(flat[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        ALBERT,
        MODERN,
        CAUSAL,
        dataclasses.replace(BERT, remat="full", attention="xla"),
        dataclasses.replace(BERT, attention="deferred", num_layers=2),
    ],
    ids=["albert", "modern", "causal", "xla", "deferred"],
)
def test_the_last_layer_computes_only_the_positions_that_are_read(config):
    """Values and gradients equal those of all positions, with dropout: up to half of the row are read."""
    rates = (0.3, 0.3) if config.attention == "reference" else (0.3, 0.0)
    config = dataclasses.replace(config, hidden_dropout=rates[0], attention_dropout=rates[1])
    batch, params = inputs(packed=True), parameters(config)
    positions = jnp.asarray([[3, 11, 0, 3], [6, 5, 2, 0], [1, 0, 8, 7]])
    weights = probe((ROWS, 4, BERT.hidden_size)), probe((ROWS, 2, BERT.hidden_size), 8)

    def read(params, key, everywhere):
        output = encode(config, params, batch, dropout_key=key, positions=None if everywhere else positions)
        hidden = gather_positions(output.hidden, positions) if everywhere else output.hidden
        return (hidden * weights[0]).sum() + (output.pooled * weights[1]).sum()

    step = jax.jit(jax.value_and_grad(read), static_argnums=2)
    key, other = (DropoutKey(jnp.uint32(word), jnp.arange(5, 5 + ROWS)) for word in (1, 2))
    part, whole = (scans(functools.partial(read, everywhere=value), params, key) for value in (False, True))
    assert part != whole
    assert abs(step(params, key, True)[0] - step(params, other, True)[0]) > 0.1
    assert_trees_close(step(params, key, False), step(params, key, True), rtol=1e-4, atol=2e-4)


KERNELS = dataclasses.replace(BERT, num_layers=1, hidden_size=48, hidden_dropout=0.3, attention_dropout=0.3)
SEPARATE = {
    "rotary positions": (dataclasses.replace(KERNELS, positions="rotary"), {}),
    "an edited value": (KERNELS, {"edits": {"attention.value": Edit(factor=jnp.full((1, 1, 1, 1, 1), 0.5))}}),
    "two projections": (
        dataclasses.replace(KERNELS, hidden_size=40, bottleneck_size=48, bottleneck_attention="shared"),
        {},
    ),
}


@pytest.mark.parametrize("case", ["one projection", *SEPARATE])
def test_kernels_read_one_projection_in_place(monkeypatch, case):
    """Unless something changes query, key or value. They get whole rows; all else is as with the reference, at few
    positions of the last layer, too."""
    shapes, separate = [], []

    def whole_rows(projected, segment_ids, num_heads, bias=None, **settings):
        projected = projected if bias is None else projected + jnp.broadcast_to(bias, projected.shape)
        shapes.append(projected.shape)
        parts = jnp.moveaxis(projected.reshape(*projected.shape[:2], 3, num_heads, -1), 2, 0)
        return attend("reference", *parts, segment_ids, **settings)

    def of_separate(implementation, *arguments, **settings):
        separate.append(implementation)
        return attend(implementation, *arguments, **settings)

    monkeypatch.setattr(attention, "_kernel_attention", lambda name: whole_rows)
    monkeypatch.setattr(block, "attend", of_separate)
    reference, options = SEPARATE.get(case, (KERNELS, {}))
    batch, params = inputs(packed=True), parameters(reference)
    positions = jnp.asarray([[3, 1], [6, 5], [1, 0]])

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, config, rows):
        def loss(params):
            encoder = bert.model_from_params(config, Heads(pair=True), params).encoder
            found = encoder(batch, dropout_key=DropoutKey(jnp.uint32(1), rows), positions=positions, **options)
            return jnp.sin(found.hidden).sum() + found.pooled.sum(), (found.hidden, found.pooled)

        return jax.grad(loss, has_aux=True)(params)

    rows = jnp.arange(ROWS)
    expected = run(params, reference, rows)
    assert not shapes and set(separate) == {"reference"}
    separate.clear()
    fused = dataclasses.replace(reference, attention="pallas_gpu")
    found = run(params, fused, rows)
    assert {shape[1] for shape in shapes} == {LENGTH} and bool(separate) == (case in SEPARATE)
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(run(params, fused, rows + 1)[1][0] - expected[1][0]).max() > 0.1
