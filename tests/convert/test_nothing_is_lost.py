"""What a forward pass of a few texts would not see: settings, rows that no text reaches, parts that no head reads."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml

from bert_jax.convert import conversion
from bert_jax.convert.families.hf_config_validation import validate_hf_config
from bert_jax.convert.formats import input_formats, tensor_files
from bert_jax.convert.formats.huggingface import hf_model_to_write
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import jax_forward, parity_report
from bert_jax.convert.parity.numpy_forward import run as run_numpy
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.source_model import SourceModel, round_params
from bert_jax.convert.translate import from_huggingface
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.param_paths import name_leaves
from tests.golden import make_families, recipe

pytestmark = pytest.mark.usefixtures("only_numpy", "quick_compilation")


def save(directory, config, tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(a) for name, a in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def golden(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Config and tensors of a model of transformers (golden/make_families.py)."""
    found = make_families.goldens()[name]
    return found["config"], {key: make_families.drawn(key, tuple(shape)) for key, shape in found["shapes"].items()}


@pytest.fixture
def encoder(tmp_path):
    """A bare BERT with a pooler, and settings that bert_jax does not have."""
    tensors = recipe.make_weights(recipe.SETTINGS, 5)
    tensors = {name.removeprefix("bert."): array for name, array in tensors.items() if name.startswith("bert.")}
    settings = {"model_type": "bert", "problem_type": "multi_label_classification", "classifier_dropout": 0.3}
    return save(tmp_path / "encoder", recipe.SETTINGS | settings, tensors)


def test_what_is_not_there_is_not_tied(encoder, tmp_path):
    """Without an MLM head, tie_word_embeddings is kept; an untied decoder is refused."""
    settings = json.loads((encoder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (encoder / "config.json").write_text(json.dumps(settings))
    conversion.convert(encoder, tmp_path / "huggingface", "huggingface")
    assert json.loads((tmp_path / "huggingface" / "config.json").read_text())["tie_word_embeddings"] is False
    whole = recipe.make_weights(recipe.SETTINGS, 5)
    with pytest.raises(
        UserError, match=r"tie_word_embeddings is false, and 'cls.predictions.decoder.weight' is missing"
    ):
        from_huggingface(HuggingFaceModel(settings, whole, "here"))
    tied = {"cls.predictions.decoder.weight": whole["bert.embeddings.word_embeddings.weight"]}
    assert from_huggingface(HuggingFaceModel(settings, whole | tied, "here")).heads.mlm
    with pytest.raises(UserError, match=r"'cls.predictions.decoder.weight' differs from 'bert.embeddings"):
        from_huggingface(HuggingFaceModel(settings, whole | {name: 2 * array for name, array in tied.items()}, "here"))


def test_a_roberta_under_another_name_keeps_it(tmp_path):
    """Also through the native format; positions and heads are RoBERTa's."""
    config, tensors = golden("RobertaForMaskedLM 0")
    names = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"]}
    source = save(tmp_path / "source", config | names, tensors)
    assert conversion.convert(source, tmp_path / "native", "bert-jax").passed
    report = conversion.convert(tmp_path / "native", tmp_path / "huggingface", "huggingface")
    assert report.passed and report.differences[-1].name == "mlm logits"
    described = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    assert {name: described[name] for name in names} == names
    for name, array in tensor_files.open_tensors(tmp_path / "huggingface").items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)


def test_a_wider_window_is_seen():
    """ModernBERT's real windows are wider than most texts."""
    config, tensors = golden("ModernBertForMaskedLM 0")
    hf_model = HuggingFaceModel(config | {"local_attention": 60, "max_position_embeddings": 120}, tensors, "here")
    inputs = sample_inputs(hf_model, None)
    assert inputs.input_ids_BS.shape[1] == 76
    model, reference = from_huggingface(hf_model), run_numpy(hf_model, inputs)
    narrower = model._replace(config=dataclasses.replace(model.config, attention_window=29))
    reports = [
        parity_report.compare_outputs(
            jax_forward.run(each, inputs), reference, inputs.attention_mask_BS, library="numpy"
        )
        for each in (model, narrower)
    ]
    assert [report.passed for report in reports] == [True, False]


@pytest.fixture
def exported(tiny_export, tmp_path):
    return shutil.copytree(tiny_export, tmp_path / "exported")


def test_a_tokenizer_larger_than_the_table(exported, tmp_path):
    """Its last ids would all be read from the last row."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (exported / name).unlink()
    with (exported / "vocab.txt").open("a") as vocab:
        vocab.writelines(f"more{i}\n" for i in range(50))
    size = Tokenizer.load(exported).vocab_size
    with pytest.raises(UserError, match=f"the tokenizer vocab.txt has {size} tokens, the model rows for 120"):
        conversion.convert(exported, tmp_path / "new", "bert-jax")


@pytest.mark.parametrize("to", ["huggingface", "bert-jax"])
def test_settings_of_a_tokenizer_travel(exported, tmp_path, to, capsys):
    """A vocab.txt and settings, as in older directories: nothing else defines the normalization."""
    (exported / "tokenizer.json").unlink()
    settings = {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False}
    (exported / "tokenizer_config.json").write_text(json.dumps(settings))
    report = conversion.convert(exported, tmp_path / "new", to)
    assert report.tokenizer.equal == report.tokenizer.total
    assert report.tokenizer.source_library.startswith("tokenizers ")
    assert report.tokenizer.written_library.startswith("tokenizers " if to == "huggingface" else "bert_jax")
    assert Tokenizer.load(tmp_path / "new").settings == settings and capsys.readouterr().err == ""


def test_an_assumed_case_is_named_and_written(exported, tmp_path, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (exported / name).unlink()
    conversion.convert(exported, tmp_path / "new", "huggingface")
    error = capsys.readouterr().err
    assert error.startswith("note: ") and "vocab.txt: read as uncased" in error and error.count("\n") == 1
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())["do_lower_case"] is True
    assert Tokenizer.load(tmp_path / "new").note is None


def test_a_program_of_a_run_in_bfloat16(tiny_run, tmp_path):
    """It computes in float32, as its report does."""
    with input_formats.open_model(tiny_run) as source_model:
        config = dataclasses.replace(source_model.model.config, compute_dtype="bfloat16")
        half = dataclasses.replace(source_model, model=source_model.model._replace(config=config))
        (tmp_path / "half").mkdir()
        conversion.OUTPUT_FORMATS["bert-jax"].write(half, tmp_path / "half")
    assert conversion.convert(tmp_path / "half", tmp_path / "served", "stablehlo").passed


def test_half_precision_becomes_float32_exactly(encoder, tmp_path):
    tensors = safetensors.numpy.load_file(encoder / "model.safetensors")
    half = save(
        tmp_path / "half",
        json.loads((encoder / "config.json").read_text()),
        {name: array.astype(np.float16) for name, array in tensors.items()},
    )
    conversion.convert(half, tmp_path / "whole", "huggingface")
    for name, array in tensor_files.open_tensors(tmp_path / "whole").items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[name].astype(np.float16).astype(np.float32), err_msg=name)


def test_nulls_and_defaults():
    assert validate_hf_config({"model_type": "albert", "pad_token_id": None}, "x") == {
        "model_type": "albert",
        "hidden_act": "gelu_new",
    }
    kept = {"model_type": "modernbert", "pad_token_id": None}
    assert validate_hf_config(kept, "x") == kept | {"hidden_activation": "gelu"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "full_attention.rope_theta is 'x': it must be"),
        ({"local_attention": -4}, r"local_attention is -4: it must be a whole number in \[0, 1e9\]"),
        ({"layer_types": ["full_attention"]}, "layer_types must give each of 5 layers"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 10**9}, "must give each of 1000000000 layers"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max': only cls and mean are known"),
    ],
)
def test_settings_of_modernbert_that_mean_nothing(tmp_path, change, message):
    config, tensors = golden("ModernBertForSequenceClassification 0")
    source = save(tmp_path / "source", config | change, tensors)
    with pytest.raises(UserError, match=message):
        conversion.convert(source, tmp_path / "new", "bert-jax")


CARD = """---
license: apache-2.0
language: [en, no]
library_name: sentence-transformers
tags: [sentence-similarity, bert]
pipeline_tag: sentence-similarity
datasets: [snli]
---
# Theirs
"""


def test_config_fields_and_the_card_come_along(encoder, tmp_path):
    """Also through the native format; the library is that of the new format. Invalid YAML is left out, with a note.
    A card without a tokenizer shows no use of one.

    The language `no` is Norwegian, not a truth value.
    """
    (encoder / "README.md").write_text(CARD)
    settings = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(settings | {"_name_or_path": "someone/small-bert"}))
    conversion.convert(encoder, tmp_path / "native", "bert-jax")
    conversion.convert(tmp_path / "native", tmp_path / "huggingface", "huggingface")
    described = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    assert (described["problem_type"], described["classifier_dropout"]) == ("multi_label_classification", 0.3)
    cards = [(tmp_path / to / "README.md").read_text() for to in ("huggingface", "native")]
    assert not any("```python" in card for card in cards)
    front = yaml.safe_load(cards[0].split("---\n")[1])
    assert front == {
        "language": ["en", "no"],
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "sentence-similarity",
        "base_model": "someone/small-bert",
        "tags": ["sentence-similarity", "bert", "bert_jax"],
        "datasets": ["snli"],
    }
    (tmp_path / "native" / "README.md").write_text("---\nlicense: [\n---\n")
    conversion.convert(tmp_path / "native", tmp_path / "again", "bert-jax")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "could not be read" in card and "license:" not in card


def test_the_dropout_of_a_classifier_of_albert():
    """The source's value, or the default of transformers."""
    config, tensors = golden("AlbertForPreTraining 0")
    hf_model = HuggingFaceModel(config, tensors, "here")
    plain = {name: value for name, value in config.items() if name != "classifier_dropout_prob"}
    for changes, expected in (
        ({"classifier_dropout_prob": 0.0}, 0.0),
        ({"classifier_dropout_prob": 0.3}, 0.3),
        ({}, 0.1),
    ):
        settings = plain | changes
        source_model = SourceModel("huggingface", "here", from_huggingface(hf_model), hf_config=settings)
        assert hf_model_to_write(source_model).config["classifier_dropout_prob"] == expected


def test_all_leaves_are_compared(encoder, tmp_path):
    """The comparison itself sees a last bit."""
    with input_formats.open_model(encoder) as one:
        other = jax.tree.map(np.copy, one.model.params)
        same = dataclasses.replace(one, model=one.model._replace(params=other))
        assert parity_report.describe_differences(one, same) == ()
        headless = dataclasses.replace(one.model.heads, pooler=False)
        lost = dataclasses.replace(one, model=one.model._replace(heads=headless))
        assert parity_report.describe_differences(one, lost)[0].startswith("the heads were")
        scale = other["encoder"]["layers"]["attention_norm"]["scale"]
        scale[1, 3] = np.nextafter(scale[1, 3], np.float32(9))
        assert parity_report.describe_differences(one, same) == (
            "parameter encoder/layers/attention_norm/scale differs (1 in all)",
        )


WRAPPED = {
    "DistributedDataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "Lightning": lambda name: f"model.{name}",
    "a compiled encoder": lambda name: name.replace("bert.", "bert._orig_mod.", 1),
    "an encoder without prefix": lambda name: name.removeprefix("bert."),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_of_wrapped_models(exported, wrapper):
    with input_formats.open_model(exported) as source_model:
        expected = source_model.model
    arrays = safetensors.numpy.load_file(exported / "model.safetensors")
    renamed = {WRAPPED[wrapper](name): array for name, array in arrays.items()}
    assert renamed.keys() != arrays.keys()
    safetensors.numpy.save_file(renamed, exported / "model.safetensors")
    with input_formats.open_model(exported) as source_model:
        assert source_model.model.heads == expected.heads
        assert name_leaves(source_model.model.params).keys() == name_leaves(expected.params).keys()
        for path, leaf in name_leaves(source_model.model.params).items():
            np.testing.assert_array_equal(leaf, name_leaves(expected.params)[path])
    safetensors.numpy.save_file(renamed | arrays, exported / "model.safetensors")
    with pytest.raises(UserError, match="two tensors are '"), input_formats.open_model(exported):
        pass


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_half_precision(exported, tmp_path, dtype):
    """transformers takes the dtype from config.json; the report compares with float32, with the limit of the dtype."""
    report = conversion.convert(exported, tmp_path / "half", "huggingface", dtype=dtype)
    limit = parity_report.ROUNDED_LIMITS[dtype]
    assert {(part.measure, part.limit) for part in report.differences} == {("relative", limit)}
    assert 1e-5 < max(part.value for part in report.differences) < limit / 2
    stored = tensor_files.open_safetensors(tmp_path / "half" / "model.safetensors").lazy_tensors
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == dtype
    conversion.convert(tmp_path / "half", tmp_path / "again", "huggingface")
    assert "dtype" not in json.loads((tmp_path / "again" / "config.json").read_text())
    with pytest.raises(UserError, match=f"--dtype {dtype}: onnx has float32 or int8 weights: use --to huggingface"):
        conversion.convert(exported, tmp_path / "other", "onnx", dtype=dtype)
    with input_formats.open_model(exported) as source_model:
        source_model.model.params["encoder"]["embeddings"]["word"][0, 0] = 1e5
        if dtype == "float16":
            with pytest.raises(UserError, match="embeddings/word has the value 100000, which float16 cannot hold"):
                round_params(source_model, dtype)
