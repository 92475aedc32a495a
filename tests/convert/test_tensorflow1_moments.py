"""The optimizer's moments in Google's TensorFlow 1 checkpoints: whole, or refused."""

import numpy as np
import pytest

from bert_jax.convert.formats import tensorflow1
from bert_jax.convert.formats.tensor_bundle import open_bundle
from tests.convert.test_tensorflow1 import GOLDEN, PAIRS, VARIABLES, equal, refusal, without
from tests.golden import tensor_bundle_recipe as recipe


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_moments_come_back_as_they_were(tmp_path, family):
    hf_model = tensorflow1.read_hf_model(GOLDEN / family)
    first, second = (
        {name: recipe.values(name + slot, array.shape) for name, array in hf_model.tensors.items()} for slot in "mv"
    )
    tensorflow1.write_hf_model(hf_model, tmp_path / "out", (12345, first, second))
    step, *back = tensorflow1.read_moments(tmp_path / "out")
    assert step == 12345 and equal(back[0], first) and equal(back[1], second)
    bundle = open_bundle(tmp_path / "out" / "bert_model.ckpt")
    assert bundle["global_step"].dtype == np.int64 and bundle.lazy_tensors["global_step"].shape == ()
    assert set(bundle) == {*recipe.with_slots(VARIABLES[family]), "global_step"}
    assert equal(dict(tensorflow1.read_hf_model(tmp_path / "out").tensors), dict(hf_model.tensors))


def test_moments_that_tensorflow_wrote():
    step, first, second = tensorflow1.read_moments(GOLDEN / "bert")
    assert step == recipe.STEP and set(first) == set(second) == set(tensorflow1.read_hf_model(GOLDEN / "bert").tensors)
    for hf_name, name in PAIRS["bert"].items():
        for moments, slot in ((first, "/adam_m"), (second, "/adam_v")):
            expected = recipe.values(name + slot, VARIABLES["bert"][name])
            np.testing.assert_array_equal(moments[hf_name], expected.T if name.endswith("/kernel") else expected)


def test_a_pooler_without_gradients_has_no_moments(tmp_path):
    slots = [f"bert/pooler/dense/{part}{slot}" for part in ("kernel", "bias") for slot in ("/adam_m", "/adam_v")]
    hf_model = tensorflow1.read_hf_model(without(tmp_path, *slots))
    moments = tensorflow1.read_moments(tmp_path)
    assert set(hf_model.tensors) - set(moments[1]) == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    tensorflow1.write_hf_model(hf_model, tmp_path / "out", moments)
    assert equal(tensorflow1.read_moments(tmp_path / "out")[2], moments[2])


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (["global_step"], "no global_step"),
        (["bert/pooler/dense/bias/adam_m"], "'bert/pooler/dense/bias/adam_m' is missing"),
        (
            ["bert/embeddings/LayerNorm/beta/adam_v", "bert/embeddings/LayerNorm/beta/adam_m"],
            "'bert/embeddings/LayerNorm/beta/adam_m' is missing",
        ),
        (["bert/pooler/dense/bias"], "'bert/pooler/dense/bias/adam_m' belongs to no tensor"),
    ],
)
def test_part_of_the_moments(tmp_path, left_out, said):
    assert said in refusal(tensorflow1.read_moments, without(tmp_path, *left_out))


def test_moments_of_another_optimizer(tmp_path):
    slots = [name for name in recipe.with_slots(VARIABLES["bert"]) if name not in VARIABLES["bert"]]
    other = "bert/pooler/dense/bias/AdamWeightDecayOptimizer"
    without(tmp_path, *slots, **{other: np.zeros(4, np.float32), "beta1_power": np.zeros((), np.float32)})
    assert f"'{other}' belongs to an optimizer that is not supported" in refusal(tensorflow1.read_moments, tmp_path)
    assert len(tensorflow1.read_hf_model(tmp_path).tensors) == len(VARIABLES["bert"])


def test_moments_to_write_have_to_be_whole(tmp_path):
    hf_model = tensorflow1.read_hf_model(GOLDEN / "bert")
    zeros = {name: np.zeros_like(array) for name, array in hf_model.tensors.items()}
    less = {name: zeros[name] for name in zeros if name != "cls.predictions.bias"}
    half_pooler = {name: zeros[name] for name in zeros if name != "bert.pooler.dense.bias"}
    for moments, said in (
        ((1, zeros, half_pooler), "'bert.pooler.dense.bias' has no moments (adam_v)"),
        ((1, zeros, less), "'cls.predictions.bias' has no moments (adam_v)"),
        ((1, less, less), "'cls.predictions.bias' has no moments (adam_m)"),
        ((1, zeros | {"x": zeros["cls.predictions.bias"]}, zeros), "moments of 'x', which the model does not have"),
    ):
        assert said in refusal(tensorflow1.write_hf_model, hf_model, tmp_path / "out", moments)
    assert not (tmp_path / "out").exists()
