"""ALBERT and ModernBERT beside transformers', their weights copied name by name. Needs the extra `parity`."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.model import families, whole
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads

pytestmark = [
    pytest.mark.slow,
    # What torch and transformers warn about among themselves is theirs.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, ROWS, LENGTH, LENGTHS = 211, 3, 40, (40, 23, 31)
Read = Callable[[str], np.ndarray]


def drawn(model) -> dict[str, np.ndarray]:
    """Every tensor random, biases and scales too: a zero or a one would hide a swap. The tied decoder is left out."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            middle = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            tensor.copy_(middle + 0.15 * torch.randn(tensor.shape, generator=generator))
    model.tie_weights()
    tied = ("decoder.weight", "predictions.decoder.weight", "predictions.decoder.bias")
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items() if name not in tied}


def albert_params(read: Read, config: ModelConfig):
    heads, size, groups = config.num_heads, config.size_per_head, config.parameter_groups

    def dense(name):
        return {"kernel": read(f"{name}.weight").T, "bias": read(f"{name}.bias")}

    def norm(name):
        return {"scale": read(f"{name}.weight"), "bias": read(f"{name}.bias")}

    def layer(group):
        inside = f"albert.encoder.albert_layer_groups.{group}.albert_layers.0"
        parts = [dense(f"{inside}.attention.{name}") for name in ("query", "key", "value")]
        projection = dense(f"{inside}.attention.dense")
        return {
            "qkv": {
                "kernel": np.stack([part["kernel"].reshape(-1, heads, size) for part in parts], 1),
                "bias": np.stack([part["bias"].reshape(heads, size) for part in parts]),
            },
            "projection": projection | {"kernel": projection["kernel"].reshape(heads, size, -1)},
            "attention_norm": norm(f"{inside}.attention.LayerNorm"),
            "rise": dense(f"{inside}.ffn"),
            "fall": dense(f"{inside}.ffn_output"),
            "feed_forward_norm": norm(f"{inside}.full_layer_layer_norm"),
        }

    embeddings = {
        name: read(f"albert.embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type")
    }
    embeddings["norm"] = norm("albert.embeddings.LayerNorm")
    embeddings["projection"] = dense("albert.encoder.embedding_hidden_mapping_in")
    layers = jax.tree.map(lambda *xs: np.stack(xs), *map(layer, range(groups)))
    return {
        "encoder": {"embeddings": embeddings, "layers": layers, "pooler": dense("albert.pooler")},
        "mlm": {
            "transform": dense("predictions.dense"),
            "norm": norm("predictions.LayerNorm"),
            "bias": read("predictions.bias"),
        },
        "pair": {"dense": dense("sop_classifier.classifier")},
    }


def modern_params(read: Read, config: ModelConfig):
    heads, size = config.num_heads, config.size_per_head

    def layer(i):
        inside = f"model.layers.{i}"
        width = config.hidden_size
        # Theirs is [2 x intermediate, hidden]: the half that goes through the activation first.
        gate, rise = np.split(read(f"{inside}.mlp.Wi.weight"), 2)
        return {
            "qkv": {"kernel": read(f"{inside}.attn.Wqkv.weight").T.reshape(width, 3, heads, size)},
            "projection": {"kernel": read(f"{inside}.attn.Wo.weight").T.reshape(heads, size, width)},
            # The first layer has none.
            "attention_norm": {"scale": read(f"{inside}.attn_norm.weight") if i else np.full(width, np.nan)},
            "gate": {"kernel": gate.T},
            "rise": {"kernel": rise.T},
            "fall": {"kernel": read(f"{inside}.mlp.Wo.weight").T},
            "feed_forward_norm": {"scale": read(f"{inside}.mlp_norm.weight")},
        }

    return {
        "encoder": {
            "embeddings": {
                "word": read("model.embeddings.tok_embeddings.weight"),
                "norm": {"scale": read("model.embeddings.norm.weight")},
            },
            "layers": jax.tree.map(lambda *xs: np.stack(xs), *map(layer, range(config.num_layers))),
            "final_norm": {"scale": read("model.final_norm.weight")},
        },
        "mlm": {
            "transform": {"kernel": read("head.dense.weight").T},
            "norm": {"scale": read("head.norm.weight")},
            "bias": read("decoder.bias"),
        },
    }


def albert():
    settings = {
        "embedding_size": 16,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_hidden_groups": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
        "hidden_act": "gelu_new",
    }
    theirs = transformers.AlbertConfig(vocab_size=VOCAB, attn_implementation="eager", **settings)
    ours = families.albert(num_layers=4, hidden_size=48, num_heads=4, vocab_size=VOCAB)
    small = {"embedding_size": 16, "intermediate_size": 80, "max_positions": 64, "parameter_groups": 2}
    return transformers.AlbertForPreTraining(theirs), ours, small, albert_params


def modern():
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 56,
        "max_position_embeddings": 64,
        "local_attention": 12,
        "global_rope_theta": 400.0,
        "local_rope_theta": 30.0,
        "pad_token_id": 0,
    }
    theirs = transformers.ModernBertConfig(vocab_size=VOCAB, attn_implementation="eager", **settings)
    ours = families.modern(5, 64, 56, max_positions=64, vocab_size=VOCAB)
    small = {"num_heads": 4, "attention_window": 6, "rotary_base": 400.0, "local_rotary_base": 30.0}
    return transformers.ModernBertForMaskedLM(theirs), ours, small, modern_params


def batch():
    rng = np.random.default_rng(0)
    place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    real = place < np.array(LENGTHS)[:, None]
    ids = np.where(real, rng.integers(1, VOCAB, (ROWS, LENGTH)), 0).astype(np.int32)
    types = (real & (place > 15)).astype(np.int32)
    return EncoderInputs(ids, types, real.astype(np.int32), place, np.zeros((ROWS, 1), np.int32))


def forward(config, params) -> dict[str, np.ndarray]:
    @jax.jit
    def run(params, inputs):
        model = whole.bind(config, Heads(pair="pair" in params), params)
        output = model.encoder(inputs)
        found = {"hidden": output.hidden, "mlm": model.mlm(output.hidden, model.encoder.embeddings.attend)}
        return found | ({"pooled": output.pooled[:, 0], "pair": model.pair(output.pooled)[:, 0]} if model.pair else {})

    found = jax.tree.map(np.asarray, run(jax.tree.map(np.float32, params), batch()))
    return {name: x[np.asarray(batch().segment_ids) > 0] if x.ndim == 3 else x for name, x in found.items()}


def reference(model) -> dict[str, np.ndarray]:
    inputs, paired = batch(), hasattr(model, "sop_classifier")
    ids, types, mask = (torch.tensor(x).long() for x in inputs[:3])
    arguments = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if paired else {})
    with torch.no_grad():
        bare = model.base_model(**arguments)
        heads = model(**arguments)
    real = mask.bool()
    found = {"hidden": bare.last_hidden_state[real]}
    if paired:
        found |= {"mlm": heads.prediction_logits[real], "pooled": bare.pooler_output, "pair": heads.sop_logits}
    else:
        found["mlm"] = heads.logits[real]
    return {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("family", [albert, modern])
def test_forward_is_theirs(family):
    """To 1e-5 of the values; every tensor of theirs is read, and with another in its place the outputs differ."""
    model, config, small, make_params = family()
    config = dataclasses.replace(config, **small)
    weights = drawn(model.eval())
    taken = set()

    def read(name: str) -> np.ndarray:
        taken.add(name)
        return weights[name]

    params = make_params(read, config)
    assert taken == weights.keys()
    shapes = whole.shapes(config, Heads(pair="pair" in params))
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)

    expected, found = reference(model), forward(config, params)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert np.std(values) > 0.1
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5 * max(1, np.abs(values).max()), err_msg=name)
    for name, tensor in weights.items():
        if name.endswith("key.bias"):  # adds the same to every score of a query, which softmax does not see
            continue
        changed = weights | {name: tensor + np.random.default_rng(1).normal(0, 0.1, tensor.shape).astype(np.float32)}
        other = forward(config, make_params(changed.__getitem__, config))
        assert max(np.abs(other[part] - expected[part]).max() for part in expected) > 1e-3, name
