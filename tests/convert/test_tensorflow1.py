"""Google's TensorFlow 1 checkpoints: names, transposes, settings, moments, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax.convert import conversion
from bert_jax.convert.formats import input_formats, tensor_bundle, tensor_files, tensorflow1, tensorflow1_names
from bert_jax.convert.formats.tensor_bundle import open_bundle
from bert_jax.convert.translate import moments_to_huggingface
from bert_jax.errors import UserError
from tests.golden import make_families
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
TASKS = {
    f"{module}.{part}": f"{scope}output_{suffix}"
    for module, scope in (("classifier", ""), ("qa_outputs", "cls/squad/"))
    for part, suffix in (("weight", "weights"), ("bias", "bias"))
}
"""Heads of run_classifier.py and run_squad.py in both families; none is transposed."""
VARIABLES = {"bert": recipe.bert_variables(), "albert": recipe.albert_variables()}
families = pytest.mark.parametrize("family", VARIABLES)


def read(place: Path, **options) -> input_formats.SourceModel:
    with input_formats.open_model(place, input_formats.ReadOptions(**options)) as source_model:
        return source_model


def refusal(place: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        read(place, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def expected_value(name: str, family: str, slot: str = "") -> np.ndarray:
    """What the golden checkpoint has under a name of Google, in the layout of transformers."""
    array = recipe.values(name + slot, VARIABLES[family][name])
    return array.T if name.endswith("/kernel") else array


def rewritten(family: str, directory: Path, left_out=(), prefix: str = "", **added) -> Path:
    """A golden checkpoint in one shard, without some tensors and with others."""
    bundle = open_bundle(tensorflow1.find_checkpoint(GOLDEN / family))
    kept = {f"{prefix}{name}": bundle[name] for name in bundle if name not in left_out}
    tensor_bundle.write(directory / "model.ckpt", kept | added)
    shutil.copy(GOLDEN / family / f"{family}_config.json", directory)
    return directory


@families
def test_every_tensor_has_the_value_of_the_name_written_by_hand(family):
    hf_model = read(GOLDEN / family).hf_model
    assert len(hf_model.tensors) == len(VARIABLES[family])
    for hf_name, name in PAIRS[family].items():
        np.testing.assert_array_equal(hf_model.tensors[hf_name], expected_value(name, family))
    if family == "bert":
        shapes = {name: array.shape for name, array in hf_model.tensors.items()}
        assert shapes == parity_recipe.tensor_shapes(recipe.BERT_CONFIG)


@families
def test_the_table_goes_both_ways_for_every_variable(family):
    both = {name: tensorflow1_names.huggingface_name(name, family, "test")[0] for name in VARIABLES[family]}
    assert both.items() >= {name: hf_name for hf_name, name in PAIRS[family].items()}.items()
    for hf_name, name in ({hf_name: name for name, hf_name in both.items()} | TASKS).items():
        assert tensorflow1_names.huggingface_name(name, family, "test") == (hf_name, name.endswith("/kernel"))
        assert tensorflow1_names.tensorflow_name(hf_name, family, "test") == (name, name.endswith("/kernel"))


@pytest.mark.parametrize(
    ("family", "prefix", "config"),
    [("bert", "model.ckpt-7", recipe.BERT_CONFIG), ("albert", "model.ckpt-best", recipe.ALBERT_CONFIG)],
)
def test_configs(family, prefix, config):
    source_model = read(GOLDEN / family)
    assert source_model.source == str(GOLDEN / family / prefix)
    assert source_model.hf_config == config | {
        "architectures": [f"{family.capitalize()}ForPreTraining"],
        "model_type": family,
        "hidden_act": {"bert": "gelu", "albert": "gelu_new"}[family],
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    }


HEADS = {
    "ForPreTraining": {},
    "ForSequenceClassification": {"output_weights": (3, 4), "output_bias": (3,)},
    "ForQuestionAnswering": {"cls/squad/output_weights": (2, 4), "cls/squad/output_bias": (2,)},
    "Model": {},
}


@families
@pytest.mark.parametrize("head", HEADS)
def test_a_model_comes_back_as_it_was(tmp_path, family, head):
    """Read, written and read again; also from TensorFlow Hub's module, whose names have a prefix."""
    added = {name: recipe.values(name, shape) for name, shape in HEADS[head].items()}
    left_out = [] if head == "ForPreTraining" else [name for name in VARIABLES[family] if name.startswith("cls/")]
    left_out += [name for name in recipe.with_slots(VARIABLES[family]) if "/adam_" in name] + ["global_step"]
    (tmp_path / "out").mkdir()
    first = read(rewritten(family, tmp_path, left_out, "module/", **added))
    assert first.hf_config["architectures"] == [family.capitalize() + head]
    tensorflow1.write(first, tmp_path / "out")
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == sorted(
        [f"{family}_config.json", "bert_model.ckpt.data-00000-of-00001", "bert_model.ckpt.index"]
    )
    written = open_bundle(tmp_path / "out" / "bert_model.ckpt")
    expected = {name: recipe.values(name, VARIABLES[family][name]) for name in VARIABLES[family].keys() - set(left_out)}
    assert written.keys() == (expected | added).keys()
    for name, array in (expected | added).items():
        assert written[name].dtype == np.float32
        np.testing.assert_array_equal(written[name], array)
    again = read(tmp_path / "out", optimizer_state=True)
    assert again.optimizer_state is None
    labels = {"id2label", "label2id"} if head == "ForSequenceClassification" else set()
    assert again.hf_config.keys() == first.hf_config.keys() - {"net_structure_type"} | labels
    assert {name: again.hf_config[name] for name in again.hf_config.keys() - labels}.items() <= first.hf_config.items()


@families
@pytest.mark.parametrize(("hf_name", "google"), [("gelu", "none"), ("gelu_new", "tanh"), ("relu", None)])
def test_activations_survive(tmp_path, family, hf_name, google):
    """Files of Google say "gelu" for both kinds; those of bert_jax have a field more."""
    source_model = read(GOLDEN / family)
    activation = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}[hf_name]
    config = dataclasses.replace(source_model.model.config, activation=activation)
    changed = source_model.model._replace(config=config)
    tensorflow1.write(input_formats.SourceModel("test", "test", changed), tmp_path)
    written = json.loads((tmp_path / f"{family}_config.json").read_text())
    assert (written["hidden_act"], written.get("gelu_approximate")) == ("gelu" if google else "relu", google)
    back = read(tmp_path).hf_config
    assert back["hidden_act"] == hf_name and "gelu_approximate" not in back


@pytest.mark.parametrize("place", [".", "model.ckpt-7", "model.ckpt-7.index"])
def test_found(place):
    assert tensorflow1.find_checkpoint(GOLDEN / "bert" / place) == GOLDEN / "bert" / "model.ckpt-7"


def test_found_several(tmp_path):
    directory = shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    for file in list(directory.glob("model.ckpt-7.*")):
        shutil.copy(file, directory / file.name.replace("-7", "-10"))
    assert "name one of model.ckpt-10, model.ckpt-7" in refusal(directory)
    state = directory / "checkpoint"
    state.write_text('model_checkpoint_path: "/elsewhere/model.ckpt-10"\nall_model_checkpoint_paths: "model.ckpt-7"\n')
    assert tensorflow1.find_checkpoint(directory) == directory / "model.ckpt-10"
    state.write_text('model_checkpoint_path: "model.ckpt-8"\n')
    assert "name one of" in refusal(directory)


def test_moments_that_tensorflow_wrote_come_back_as_they_were(tmp_path):
    source_model = read(GOLDEN / "bert", optimizer_state=True)
    state = source_model.optimizer_state
    assert state.step == recipe.STEP
    for tree, slot in ((state.mu, "/adam_m"), (state.nu, "/adam_v")):
        moments = moments_to_huggingface(source_model.model, tree)
        assert moments.keys() == source_model.hf_model.tensors.keys()
        for hf_name, name in PAIRS["bert"].items():
            np.testing.assert_array_equal(moments[hf_name], expected_value(name, "bert", slot))
    tensorflow1.write(source_model, tmp_path)
    bundle, written = open_bundle(GOLDEN / "bert" / "model.ckpt-7"), open_bundle(tmp_path / "bert_model.ckpt")
    assert list(written) == list(bundle) and all(np.array_equal(written[name], bundle[name]) for name in bundle)
    assert written.lazy_tensors["global_step"][:2] == ((), "int64")
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path, optimizer_state=True).optimizer_state, state)


def test_moments_of_dropped_tensors_are_dropped():
    source_model = read(GOLDEN / "bert", optimizer_state=True, drop=("cls.seq_relationship.*",))
    assert not source_model.model.heads.pair
    assert "pair" not in source_model.optimizer_state.mu and source_model.optimizer_state.mu["mlm"]["bias"].any()


def slots(*names: str) -> list[str]:
    return [f"{name}{slot}" for name in names for slot in ("/adam_m", "/adam_v")]


def test_a_pooler_without_gradients_has_no_moments(tmp_path):
    """They are 0: TensorFlow makes no slots for what the loss does not depend on."""
    directory = rewritten("bert", tmp_path, slots("bert/pooler/dense/kernel", "bert/pooler/dense/bias"))
    state = read(directory, optimizer_state=True).optimizer_state
    for tree in (state.mu, state.nu):
        assert not tree["encoder"]["pooler"]["kernel"].any() and tree["mlm"]["bias"].any()


NORM = "bert/embeddings/LayerNorm/beta"
CHECKPOINTS = {
    # tensors left out, tensors added, message; with the optimizer's moments
    "no step": (["global_step"], {}, "some moments or global_step are missing"),
    "one moment missing": (["bert/pooler/dense/bias/adam_m"], {}, "some moments or global_step are missing"),
    "both moments missing": (slots(NORM), {}, "moments: tensor 'bert.embeddings.LayerNorm.bias' is missing"),
    "moments of nothing": (
        [name for name in VARIABLES["bert"] if name.startswith("cls/")],
        {},
        "moments: tensor 'cls.predictions.",
    ),
    "another optimizer": (
        slots(*VARIABLES["bert"]),
        {"bert/pooler/dense/bias/AdamWeightDecayOptimizer": (4,), "beta1_power": ()},
        None,
    ),
    "a misspelt name": (
        [],
        {LAYER + "output/dens/kernel": (2,)},
        "known name is 'bert/encoder/layer_{n}/output/dense/",
    ),
    "a name in a name": ([], {"bert/pooler/dense/bias/more": (2,)}, "'bert/pooler/dense/bias/more' is not part of"),
    "a head of SQuAD 2": ([], {"start_logits/dense/kernel": (2,)}, "is not part of Google's bert"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_of_other_contents(tmp_path, name):
    left_out, added, message = CHECKPOINTS[name]
    added = {name: np.zeros(shape, np.float32) for name, shape in added.items()}
    directory = rewritten("bert", tmp_path, left_out, **added)
    if message is None:
        assert read(directory, optimizer_state=True).optimizer_state is None
    else:
        assert message in refusal(directory, optimizer_state=True)


CONFIGS = {
    "two layers in a group": ({"inner_group_num": 2}, "only one layer in a group can be read"),
    "no projection": ({"embedding_size": 4}, "whose embedding_size is its hidden_size"),
    "an activation": ({"hidden_act": "swish"}, "hidden_act 'swish' is not one of gelu, "),
    "a kind of gelu": ({"gelu_approximate": "other"}, "hidden_act 'other' is not one of gelu, "),
    "no size": ({"hidden_size": None}, "lacks 'hidden_size'"),
    "no vocabulary": ({"vocab_size": None}, "lacks 'vocab_size'"),
    "not JSON": ("{", "is not JSON"),
    "no object": ("[1]", "is not a JSON object, but [1]"),
    "none": (None, "needs one of bert_config.json and albert_config.json, and has none"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_cannot_be_read(tmp_path, name):
    change, message = CONFIGS[name]
    directory = shutil.copytree(GOLDEN / "albert", tmp_path / "albert")
    path = directory / "albert_config.json"
    if change is None:
        path.unlink()
    else:
        path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    assert message in refusal(directory)
    shutil.copy(GOLDEN / "bert" / "bert_config.json", directory)
    assert change is None or "has both of them" in refusal(directory)


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("bert", {"norm_epsilon": 1e-5}, "layer_norm_eps 1e-05 cannot be written"),
        ("bert", {"direction": "causal"}, "is_decoder True cannot be written"),
        ("albert", {"embedding_size": 4}, "whose embedding_size is its hidden_size is not supported"),
    ],
)
def test_models_that_google_does_not_support(tmp_path, family, settings, said):
    model = read(GOLDEN / family).model
    config = dataclasses.replace(model.config, **settings)
    with pytest.raises(UserError, match=said):
        tensorflow1.write(input_formats.SourceModel("test", "test", model._replace(config=config)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_format_v1_is_no_model():
    for place in ("v1", "v1/v1.ckpt"):
        assert "v1" in refusal(GOLDEN / place)


@pytest.mark.usefixtures("only_numpy")
@pytest.mark.parametrize(
    ("family", "kind"), [("Bert", "ForTokenClassification"), ("Albert", "ForSequenceClassification")]
)
def test_classifiers_and_taggers_with_named_labels(tmp_path, family, kind):
    """Both are called output_weights in Google's files; the config that bert_jax writes has class and labels."""
    golden = make_families.goldens()[f"{family}{kind} 0"]
    tensors = {name: make_families.drawn(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    labels = {str(i): f"label {i}" for i in range(len(tensors["classifier.weight"]))}
    (tmp_path / "source").mkdir()
    config = golden["config"] | {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    tensor_files.write_safetensors(tmp_path / "source" / "model.safetensors", tensors)
    assert conversion.convert(epath.Path(tmp_path / "source"), epath.Path(tmp_path / "tf"), "tensorflow1").passed
    with input_formats.open_model(tmp_path / "tf") as source_model:
        assert source_model.hf_config["architectures"] == [family + kind]
        assert source_model.model.heads.task.labels == tuple(labels.values())
