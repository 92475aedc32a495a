"""Google's TensorFlow 1 checkpoints as forms and back: names, transposes, settings, and what is refused."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bert_jax.convert.formats import tensor_bundle, tensorflow1, tensorflow1_names
from bert_jax.convert.formats.tensor_bundle import open_bundle
from bert_jax.convert.formats.tensorflow1 import read_hf_model, write_hf_model
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError
from tests.golden import recipe as parity_recipe
from tests.golden import tensor_bundle_recipe as recipe

GOLDEN = Path(__file__).parent.parent / "golden" / "tensor_bundle"

# Names in a state dict of transformers 5.23 (BertForPreTraining, AlbertForPreTraining) and Google's, written by hand.
LAYER, THEIR_LAYER = "bert/encoder/layer_1/", "bert.encoder.layer.1."
GROUP = "bert/encoder/transformer/group_1/inner_group_0/"
THEIR_GROUP = "albert.encoder.albert_layer_groups.1.albert_layers.0."
PAIRS = {
    "bert": {
        "bert.embeddings.word_embeddings.weight": "bert/embeddings/word_embeddings",
        "bert.embeddings.LayerNorm.weight": "bert/embeddings/LayerNorm/gamma",
        "bert.embeddings.LayerNorm.bias": "bert/embeddings/LayerNorm/beta",
        THEIR_LAYER + "attention.self.query.weight": LAYER + "attention/self/query/kernel",
        THEIR_LAYER + "attention.self.value.bias": LAYER + "attention/self/value/bias",
        THEIR_LAYER + "attention.output.dense.weight": LAYER + "attention/output/dense/kernel",
        THEIR_LAYER + "attention.output.LayerNorm.weight": LAYER + "attention/output/LayerNorm/gamma",
        THEIR_LAYER + "intermediate.dense.weight": LAYER + "intermediate/dense/kernel",
        THEIR_LAYER + "output.dense.weight": LAYER + "output/dense/kernel",
        THEIR_LAYER + "output.LayerNorm.bias": LAYER + "output/LayerNorm/beta",
        "bert.pooler.dense.weight": "bert/pooler/dense/kernel",
        "cls.predictions.transform.dense.weight": "cls/predictions/transform/dense/kernel",
        "cls.predictions.transform.LayerNorm.weight": "cls/predictions/transform/LayerNorm/gamma",
        "cls.predictions.bias": "cls/predictions/output_bias",
        "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
        "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    },
    "albert": {
        "albert.embeddings.position_embeddings.weight": "bert/embeddings/position_embeddings",
        "albert.encoder.embedding_hidden_mapping_in.weight": "bert/encoder/embedding_hidden_mapping_in/kernel",
        THEIR_GROUP + "attention.key.weight": GROUP + "attention_1/self/key/kernel",
        THEIR_GROUP + "attention.dense.weight": GROUP + "attention_1/output/dense/kernel",
        THEIR_GROUP + "attention.LayerNorm.weight": GROUP + "LayerNorm/gamma",
        THEIR_GROUP + "ffn.weight": GROUP + "ffn_1/intermediate/dense/kernel",
        THEIR_GROUP + "ffn_output.weight": GROUP + "ffn_1/intermediate/output/dense/kernel",
        THEIR_GROUP + "full_layer_layer_norm.bias": GROUP + "LayerNorm_1/beta",
        "albert.pooler.weight": "bert/pooler/dense/kernel",
        "predictions.dense.weight": "cls/predictions/transform/dense/kernel",
        "predictions.LayerNorm.bias": "cls/predictions/transform/LayerNorm/beta",
        "predictions.bias": "cls/predictions/output_bias",
        "sop_classifier.classifier.weight": "cls/seq_relationship/output_weights",
    },
}
VARIABLES = {"bert": recipe.bert_variables(), "albert": recipe.albert_variables()}


def equal(first: dict, second: dict) -> bool:
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name]) for name in first
    )


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def copied(tmp_path):
    """A copy of a golden checkpoint, by family."""

    def copy(family: str) -> Path:
        shutil.copytree(GOLDEN / family, tmp_path / family)
        return tmp_path / family

    return copy


def extended(family: str, extra: dict[str, tuple[int, ...]]) -> HuggingFaceModel:
    """The golden form with further tensors, in memory."""
    hf_model = read_hf_model(GOLDEN / family)
    return HuggingFaceModel(
        hf_model.config, dict(hf_model.tensors) | {name: recipe.values(name, extra[name]) for name in extra}, "test"
    )


def change_config(directory: Path, family: str, **settings) -> None:
    path = directory / f"{family}_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_every_tensor_has_the_value_of_the_name_written_by_hand(family):
    hf_model = read_hf_model(GOLDEN / family)
    assert len(hf_model.tensors) == len(VARIABLES[family])
    for hf_name, name in PAIRS[family].items():
        expected = recipe.values(name, VARIABLES[family][name])
        np.testing.assert_array_equal(hf_model.tensors[hf_name], expected.T if name.endswith("/kernel") else expected)


def test_names_and_shapes_are_those_of_berts_state_dict():
    shapes = {name: array.shape for name, array in read_hf_model(GOLDEN / "bert").tensors.items()}
    assert shapes == parity_recipe.tensor_shapes(recipe.BERT_CONFIG)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_the_table_goes_both_ways_for_every_variable(family):
    for name in VARIABLES[family]:
        hf_name, transposed = tensorflow1_names.huggingface_name(name, family, "test")
        assert tensorflow1_names.tensorflow_name(hf_name, family, "test") == (name, transposed)
        assert transposed == name.endswith("/kernel")


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_heads_of_tasks_are_not_transposed(family):
    for module, scope in (("classifier", ""), ("qa_outputs", "cls/squad/")):
        for part, suffix in (("weight", "weights"), ("bias", "bias")):
            hf_name, name = f"{module}.{part}", f"{scope}output_{suffix}"
            assert tensorflow1_names.tensorflow_name(hf_name, family, "test") == (name, False)
            assert tensorflow1_names.huggingface_name(name, family, "test") == (hf_name, False)


@pytest.mark.parametrize(
    ("family", "prefix", "config"),
    [("bert", "model.ckpt-7", recipe.BERT_CONFIG), ("albert", "model.ckpt-best", recipe.ALBERT_CONFIG)],
)
def test_configs(family, prefix, config):
    hf_model = read_hf_model(GOLDEN / family)
    assert hf_model.source == str(GOLDEN / family / prefix)
    assert hf_model.config == config | {
        "architectures": [f"{family.capitalize()}ForPreTraining"],
        "model_type": family,
        "hidden_act": {"bert": "gelu", "albert": "gelu_new"}[family],
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    }


def test_settings_that_a_config_lacks_are_googles_defaults(copied):
    """Of AlbertConfig, whose defaults are ALBERT xxlarge's."""
    directory = copied("albert")
    (directory / "albert_config.json").write_text('{"vocab_size": 30000}')
    config = read_hf_model(directory).config
    assert (config["hidden_size"], config["num_attention_heads"], config["hidden_dropout_prob"]) == (4096, 64, 0)


HEADS = {
    "ForPreTraining": [],
    "ForSequenceClassification": ["classifier.weight", "classifier.bias"],
    "ForQuestionAnswering": ["qa_outputs.weight", "qa_outputs.bias"],
    "Model": [],
}


@pytest.mark.parametrize("family", ["bert", "albert"])
@pytest.mark.parametrize("head", HEADS)
def test_a_form_comes_back_as_it_was(tmp_path, family, head):
    hf_model = extended(family, {name: (3, 4) if name.endswith("weight") else (3,) for name in HEADS[head]})
    tensors = dict(hf_model.tensors)
    if head != "ForPreTraining":
        tensors = {name: tensors[name] for name in tensors if name.startswith((family, *HEADS[head]))}
    write_hf_model(HuggingFaceModel(hf_model.config, tensors, "test"), tmp_path / "out")
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == sorted(
        [f"{family}_config.json", "bert_model.ckpt.data-00000-of-00001", "bert_model.ckpt.index"]
    )
    back = read_hf_model(tmp_path / "out")
    assert equal(dict(back.tensors), tensors)
    expected = {"architectures": [family.capitalize() + head]}
    assert (
        back.config == {key: hf_model.config[key] for key in hf_model.config if key != "net_structure_type"} | expected
    )
    assert tensorflow1.read_moments(tmp_path / "out") is None


def without(directory: Path, *left_out: str, **added) -> Path:
    """The golden BERT, rewritten in one shard without some tensors and with others."""
    bundle = open_bundle(GOLDEN / "bert" / "model.ckpt-7")
    kept = {name: bundle[name] for name in list(bundle) if name not in left_out}
    tensor_bundle.write(directory / "model.ckpt", kept | added)
    shutil.copy(GOLDEN / "bert" / "bert_config.json", directory)
    return directory


@pytest.mark.parametrize(
    ("family", "hf_name", "google", "kind"),
    [
        ("bert", "gelu", "gelu", "none"),
        ("bert", "gelu_new", "gelu", "tanh"),
        ("albert", "gelu", "gelu", "none"),
        ("albert", "gelu_new", "gelu", "tanh"),
        ("bert", "gelu_pytorch_tanh", "gelu", "tanh"),
        ("bert", "relu", "relu", None),
    ],
)
def test_activations_survive(tmp_path, family, hf_name, google, kind):
    hf_model = read_hf_model(GOLDEN / family)
    write_hf_model(
        HuggingFaceModel(hf_model.config | {"hidden_act": hf_name}, hf_model.tensors, "test"), tmp_path / "out"
    )
    written = json.loads((tmp_path / "out" / f"{family}_config.json").read_text())
    assert (written["hidden_act"], written.get("gelu_approximate")) == (google, kind)
    back = read_hf_model(tmp_path / "out").config
    assert back["hidden_act"] == {"gelu_pytorch_tanh": "gelu_new"}.get(hf_name, hf_name)
    assert "gelu_approximate" not in back


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_what_transformers_ties_and_buffers_is_left_out(tmp_path, family):
    hf_model = read_hf_model(GOLDEN / family)
    head = "cls.predictions" if family == "bert" else "predictions"
    copies = {
        f"{head}.decoder.weight": hf_model.tensors[f"{family}.embeddings.word_embeddings.weight"],
        f"{head}.decoder.bias": hf_model.tensors[f"{head}.bias"],
        f"{family}.embeddings.position_ids": np.arange(5)[None],
    }
    write_hf_model(HuggingFaceModel(hf_model.config, dict(hf_model.tensors) | copies, "test"), tmp_path / "out")
    assert equal(dict(read_hf_model(tmp_path / "out").tensors), dict(hf_model.tensors))
    untied = copies | {f"{head}.decoder.bias": np.ones(11, np.float32)}
    message = refusal(
        write_hf_model,
        HuggingFaceModel(hf_model.config, dict(hf_model.tensors) | untied, "test"),
        tmp_path / "untied",
    )
    assert f"'{head}.decoder.bias' is not tied" in message


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_written_as_float32(tmp_path, dtype):
    hf_model = read_hf_model(GOLDEN / "bert")
    halves = {name: array.astype(dtype) for name, array in hf_model.tensors.items()}
    write_hf_model(HuggingFaceModel(hf_model.config, halves, "test"), tmp_path / "out")
    assert equal(
        dict(read_hf_model(tmp_path / "out").tensors),
        {name: array.astype(np.float32) for name, array in halves.items()},
    )


@pytest.mark.parametrize("place", [".", "model.ckpt-7", "model.ckpt-7.index"])
def test_found(place):
    assert tensorflow1.find_checkpoint(GOLDEN / "bert" / place) == GOLDEN / "bert" / "model.ckpt-7"


def test_found_nothing(tmp_path):
    (tmp_path / "epoch-1.ckpt").write_bytes(b"a checkpoint of something else")
    assert tensorflow1.find_checkpoint(tmp_path) is None
    assert tensorflow1.find_checkpoint(tmp_path / "epoch-1.ckpt") is None
    assert tensorflow1.find_checkpoint(tmp_path / "absent") is None
    assert "needs a file *.ckpt.index" in refusal(read_hf_model, tmp_path)


def test_found_several(copied):
    directory = copied("bert")
    for file in list(directory.glob("model.ckpt-7.*")):
        shutil.copy(file, directory / file.name.replace("-7", "-10"))
    assert "name one of model.ckpt-10, model.ckpt-7" in refusal(tensorflow1.find_checkpoint, directory)
    state = directory / "checkpoint"
    state.write_text('model_checkpoint_path: "/elsewhere/model.ckpt-10"\nall_model_checkpoint_paths: "model.ckpt-7"\n')
    assert tensorflow1.find_checkpoint(directory) == directory / "model.ckpt-10"
    state.write_text('model_checkpoint_path: "model.ckpt-8"\n')
    assert "name one of" in refusal(tensorflow1.find_checkpoint, directory)


def test_names_of_the_hub_module(tmp_path):
    bundle = open_bundle(GOLDEN / "albert" / "model.ckpt-best")
    tensor_bundle.write(tmp_path / "model.ckpt", {f"module/{name}": bundle[name] for name in list(bundle)})
    shutil.copy(GOLDEN / "albert" / "albert_config.json", tmp_path)
    assert equal(dict(read_hf_model(tmp_path).tensors), dict(read_hf_model(GOLDEN / "albert").tensors))


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("bert", LAYER + "output/dens/kernel", f"the nearest known name is '{LAYER}output/dense/kernel'"),
        ("bert", "start_logits/dense/kernel", "'start_logits/dense/kernel' belongs to run_squad_v2.py's beam search"),
        ("bert", "bert/pooler/dense/bias/more", "tensor 'bert/pooler/dense/bias/more' is not part of Google's bert"),
        ("bert", "loss/output_weights", "tensor 'loss/output_weights' is not part of Google's bert"),
    ],
)
def test_unknown_tensor(tmp_path, family, name, said):
    assert said in refusal(read_hf_model, without(tmp_path, **{name: np.zeros(2, np.float32)}))


def test_unknown_tensor_to_write(tmp_path):
    message = refusal(write_hf_model, extended("bert", {"bert.pooler.weight": (4, 4)}), tmp_path / "out")
    nearest = "the nearest known name is 'bert.pooler.dense.weight'"
    assert message == f"test: tensor 'bert.pooler.weight' is not part of Google's bert; {nearest}"


def test_configs_that_cannot_be_read(copied):
    directory = copied("albert")
    path = directory / "albert_config.json"
    for settings, said in (
        ({"inner_group_num": 2}, "inner_group_num 2 is not supported"),
        ({"embedding_size": 4}, "whose embedding_size is its hidden_size"),
        ({"hidden_act": "swish"}, "hidden_act 'swish' is not one of gelu, relu, tanh, linear"),
        ({"gelu_approximate": "other"}, "gelu_approximate 'other' is not one of none, tanh"),
    ):
        shutil.copy(GOLDEN / "albert" / "albert_config.json", path)
        change_config(directory, "albert", **settings)
        assert f"{path}: " in (message := refusal(read_hf_model, directory)) and said in message
    for content, said in (("{", "is not JSON"), ("[1]", "is not a JSON object, but [1]"), ("{}", "has no vocab_size")):
        path.write_text(content)
        assert said in refusal(read_hf_model, directory)
    shutil.copy(GOLDEN / "bert" / "bert_config.json", directory)
    assert "has both of them" in refusal(read_hf_model, directory)
    for file in directory.glob("*.json"):
        file.unlink()
    assert "needs one of bert_config.json and albert_config.json, and has none" in refusal(read_hf_model, directory)


def test_an_activation_that_a_form_does_not_say_is_transformers_default(tmp_path):
    hf_model = read_hf_model(GOLDEN / "albert")
    config = {key: hf_model.config[key] for key in hf_model.config if key != "hidden_act"}
    write_hf_model(HuggingFaceModel(config, hf_model.tensors, "test"), tmp_path / "out")
    assert read_hf_model(tmp_path / "out").config["hidden_act"] == "gelu_new"


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("bert", {"model_type": "roberta"}, "a roberta cannot be written for TensorFlow 1: only bert, albert"),
        ("bert", {"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05 cannot be written"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type relative_key cannot be written"),
        ("bert", {"is_decoder": True}, "is_decoder True cannot be written"),
        ("bert", {"hidden_act": "silu"}, "hidden_act 'silu' is not one of gelu, gelu_new, relu"),
        ("albert", {"inner_group_num": 2}, "inner_group_num 2 is not supported"),
        ("albert", {"embedding_size": 4}, "whose embedding_size is its hidden_size is not supported"),
    ],
)
def test_models_that_google_does_not_support(tmp_path, family, settings, said):
    hf_model = read_hf_model(GOLDEN / family)
    changed = HuggingFaceModel(hf_model.config | settings, hf_model.tensors, "test")
    assert said in refusal(write_hf_model, changed, tmp_path / "out") and not (tmp_path / "out").exists()


def test_format_v1_says_so():
    for place in ("v1", "v1/v1.ckpt"):
        assert "format V1" in refusal(read_hf_model, GOLDEN / place)


def test_damage_is_told_when_a_tensor_is_read(copied):
    directory = copied("albert")
    path = directory / "model.ckpt-best.data-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    hf_model = read_hf_model(directory)
    assert "is damaged (CRC-32C)" in refusal(dict, hf_model.tensors)
