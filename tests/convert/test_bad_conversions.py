"""Failed conversions: one line on stderr, exit code 2, and neither a destination nor temporary files."""

import hashlib
import json
import shutil
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from bert_jax.cli import main as cli
from bert_jax.convert import conversion
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats, run

LAYER = "bert.encoder.layer.0"


pytestmark = pytest.mark.usefixtures("only_numpy", "quick_compilation")


@pytest.fixture(scope="module")
def forms(tmp_path_factory, tiny_run, only_numpy):
    """`tiny_run` in every readable format; copied before it is damaged."""
    directory = tmp_path_factory.mktemp("forms")
    for form in ("huggingface", "tensorflow1", "bert-jax"):
        convert(tiny_run, directory / form, form, input_formats.ReadOptions(optimizer_state=form != "huggingface"))
    return directory


@pytest.fixture
def spoil(forms, tmp_path):
    """Copies one of them, to be spoiled."""
    return lambda form: shutil.copytree(forms / form, tmp_path / "source")


@pytest.fixture
def refuses(tmp_path, capfd):
    """Sees a conversion refused, with these words; nothing comes of it."""

    def check(source, *words: str, destination=None, arguments: tuple[str, ...] = ()) -> None:
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        capfd.readouterr()
        assert cli.main(["convert", str(source), str(destination or place / "new"), *arguments]) == 2
        captured = capfd.readouterr()
        (line,) = captured.err.splitlines()
        assert captured.out == "" and line.startswith("error: ") and len(line) < 700, line
        for word in words:
            assert word in line, line
        assert list(place.iterdir()) == []

    return check


def change_json(path, change) -> None:
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


def change_tensors(directory, change, name: str = "model.safetensors") -> None:
    tensors = safetensors.numpy.load_file(directory / name)
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / name, metadata={"format": "pt"})


def parts_of(place) -> input_formats.SourceModel:
    with input_formats.open_model(place) as source_model:
        return source_model


def test_nothing_there(refuses, tmp_path, forms):
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(empty, str(empty), "is not a run or a model", "config.json", "bert_config.json", "work directory")
    shutil.copy(forms / "huggingface" / "config.json", empty)
    refuses(empty, str(empty), "is not a run or a model", "model.safetensors or pytorch_model.bin")
    refuses(tmp_path / "none", "none does not exist")


def test_a_tensor_is_missing(refuses, spoil):
    source = spoil("huggingface")
    change_tensors(source, lambda tensors: tensors.pop(f"{LAYER}.output.dense.weight"))
    refuses(source, str(source), f"tensor '{LAYER}.output.dense.weight' is missing; the nearest name is 'bert.enc")


def test_a_tensor_too_many(refuses, spoil, tmp_path):
    source = spoil("huggingface")
    spare = "bert.encoder.layer.0.output.densee.weight"
    change_tensors(source, lambda tensors: tensors.update({spare: np.zeros(3, np.float32)}))
    near = f"the nearest name is '{LAYER}.output.dense.weight'"
    refuses(source, str(source), f"tensor '{spare}' is not part of this architecture", near, f"--drop '{spare}'")
    refuses(source, spare, arguments=("--drop", "cls.*.dense.bias"))
    refuses(source, "--drop '*.dense.bias.*' matches no tensor of", arguments=("--drop", "*.dense.bias.*"))
    assert cli.main(["convert", str(source), str(tmp_path / "new"), "--drop", "*.densee.*"]) == 0
    assert spare not in safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors")
    # What is dropped and wanted is missing.
    patterns = ("--drop", "cls.predictions.transform.LayerNorm.*", "--drop", spare)
    refuses(source, "'cls.predictions.transform.LayerNorm.weight' is missing", arguments=patterns)


def test_shapes_that_contradict_the_config(refuses, spoil):
    source = spoil("huggingface")
    config = source / "config.json"
    change_json(config, lambda about: about.update(intermediate_size=95))
    refuses(source, f"tensor '{LAYER}.intermediate.dense.weight' has shape [96, 64], the config says [95, 64]")
    change_json(config, lambda about: about.update(intermediate_size=96, vocab_size=119))
    refuses(source, "embeddings.word_embeddings.weight' has shape [120, 64]", "the vocabulary has another size")
    for change, words in (
        ({"vocab_size": "many"}, "vocab_size is 'many' in config.json: it must be a whole number"),
        ({"num_attention_heads": 5}, "hidden_size 64"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps is 'small' in config.json: it must be a number"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"architectures": "BertModel", "model_type": ["bert"]}, "model_type"),
        ({"num_hidden_layers": 10**13}, "num_layers is 10000000000000: it must be a whole number in [1, 1e4]"),
        ({"hidden_size": 2**43}, "hidden_size is 8796093022208: it must be a whole number in [1, 1e7]"),
        ({"intermediate_size": 10**100}, "intermediate_size"),
        ({"vocab_size": 10**7}, "has shape [120, 64], the config says [10000000, 64]"),  # 2.6 GB
        ({"pad_token_id": 10**9}, "pad_token_id is 1000000000 in config.json: the vocabulary has 120 tokens"),
        ({"bos_token_id": "one"}, "bos_token_id is 'one' in config.json: it must be a whole number"),
        ({"layer_norm_eps": -1e-12}, "layer_norm_eps is -1e-12 in config.json: it must be from 0 to 1"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan in config.json: it must be from 0 to 1"),
        ({"initializer_range": -0.02}, "initializer_range is -0.02 in config.json: it must be from 0 to 100"),
        ({"hidden_dropout_prob": 10**400}, "it must be from 0 to 1"),
        ({"model_type": "t5"}, "model_type 't5' is not supported: use one of bert, roberta"),
        ({"model_type": None}, "is not supported: use one of bert, roberta"),
        ({"position_embedding_type": "relative_key"}, "only absolute positions can be read"),
        ({"hidden_act": "swish"}, "hidden_act 'swish' is not one of gelu"),
        ({"architectures": ["BertForMultipleChoice"]}, "architecture 'BertForMultipleChoice' is not supported"),
    ):
        shutil.copy(config, source / "kept")
        change_json(config, lambda about, change=change: about.update({"vocab_size": 120} | change))
        refuses(source, str(source), words)
        shutil.move(source / "kept", config)
    config.write_text("[1, 2]")
    refuses(source, "config.json")


def test_values_that_float32_does_not_hold(refuses, spoil):
    """In a row that no text reaches: a forward pass does not see it."""
    source, name = spoil("huggingface"), "bert.embeddings.word_embeddings.weight"
    for value in (np.inf, -np.inf, np.nan):
        change_tensors(source, lambda tensors, value=value: tensors[name].__setitem__((117, 5), value))
        refuses(source, str(source), f"tensor '{name}' has the value {value} at [117, 5]")
    change_tensors(source, lambda tensors: tensors.update({name: np.full((120, 64), 1e300)}))
    refuses(source, f"tensor '{name}' has the value inf at [0, 0]", "float32")


def test_moments_that_are_not_finite(refuses, spoil):
    """A native model with correct checksums, and a checkpoint of TensorFlow 1."""
    source = spoil("bert-jax")
    change_tensors(source, lambda moments: moments["nu/mlm/bias"].__setitem__(7, np.inf), "moments.safetensors")
    digest = hashlib.sha256((source / "moments.safetensors").read_bytes()).hexdigest()
    change_json(source / "model.json", lambda about: about["sha256"].update({"moments.safetensors": digest}))
    arguments = ("--to", "bert-jax", "--optimizer-state", "keep")
    refuses(source, "tensor 'nu/mlm/bias' has the value inf at [7]", arguments=arguments)
    shutil.rmtree(source)
    with input_formats.open_model(
        spoil("tensorflow1"), input_formats.ReadOptions(optimizer_state=True)
    ) as source_model:
        source_model.optimizer_state.mu["mlm"]["bias"][3] = np.nan
        (source.parent / "spoiled").mkdir()
        conversion.OUTPUT_FORMATS["tensorflow1"].write(source_model, source.parent / "spoiled")
    refuses(
        source.parent / "spoiled",
        "moments: tensor 'cls.predictions.bias' has the value nan at [3]",
        arguments=arguments,
    )


def test_a_run_that_diverged(refuses, tiny_run, monkeypatch):
    """Its newest checkpoint is intact, and has a value that is NaN."""
    restore = run.checkpoint.restore_parts

    def spoiled(*arguments):
        parts = restore(*arguments)
        parts["params"]["mlm"]["bias"] = np.where(np.arange(120) == 2, np.nan, parts["params"]["mlm"]["bias"])
        return parts

    monkeypatch.setattr(run.checkpoint, "restore_parts", spoiled)
    refuses(tiny_run, str(tiny_run), "tensor 'mlm/bias' has the value nan at [2]")


def pad(source, rows: int) -> None:
    """More rows than tokens, as trainers make for even sizes."""

    def grow(tensors) -> None:
        for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
            more = np.full((rows, *tensors[name].shape[1:]), 0.25, np.float32)
            tensors[name] = np.concatenate([tensors[name], more])

    change_tensors(source, grow)
    change_json(source / "config.json", lambda about: about.update(vocab_size=about["vocab_size"] + rows))


def test_a_padded_vocabulary_is_trimmed(spoil, tmp_path, tiny_run):
    import bert_jax

    source = spoil("huggingface")
    pad(source, 8)
    assert cli.main(["convert", str(source), str(tmp_path / "whole")]) == 0
    assert cli.main(["convert", str(source), str(tmp_path / "trimmed"), "--trim-vocabulary"]) == 0
    whole, trimmed, run = (bert_jax.load(place) for place in (tmp_path / "whole", tmp_path / "trimmed", tiny_run))
    tokens = run.tokenizer.vocab_size
    assert (whole.config.vocab_size, trimmed.config.vocab_size) == (128, tokens) and tokens < 120
    assert json.loads((tmp_path / "trimmed" / "config.json").read_text())["vocab_size"] == tokens
    table, body = (lambda m: np.asarray(m.params["encoder"]["embeddings"]["word"])), "the [MASK] sings"
    np.testing.assert_array_equal(table(trimmed), table(run)[:tokens])
    np.testing.assert_array_equal(trimmed.encode([body]), run.encode([body]))
    for actual, expected in zip(trimmed.fill_mask(body)[0], run.fill_mask(body)[0], strict=True):
        assert actual.token == expected.token


def test_fewer_rows_than_tokens(refuses, spoil):
    source = spoil("huggingface")

    def cut(tensors) -> None:
        for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
            tensors[name] = tensors[name][:20]

    change_tensors(source, cut)
    change_json(source / "config.json", lambda about: about.update(vocab_size=20))
    words = "the word table has 20 rows", "the tokenizer belongs to another model"
    refuses(source, *words, arguments=("--trim-vocabulary",))
    refuses(source, "20", "tokenizer")


def test_a_file_cut_short(refuses, spoil):
    source = spoil("huggingface")
    weights = source / "model.safetensors"
    whole = weights.read_bytes()
    for length in (len(whole) - 100, 200, 4, 0):
        weights.write_bytes(whole[:length])
        refuses(source, str(weights), "truncated or damaged")


def test_a_file_of_a_model_is_its_directory(forms, refuses, tmp_path):
    """The path of weights or of a config means its directory."""
    for form, file in (
        ("huggingface", "model.safetensors"),
        ("huggingface", "config.json"),
        ("bert-jax", "model.json"),
        ("bert-jax", "params.safetensors"),
        ("tensorflow1", "bert_model.ckpt.index"),
        ("tensorflow1", "bert_model.ckpt"),
    ):
        source = forms / form / file
        convert(source, tmp_path / form / file, "bert-jax")
        one, two = (parts_of(place).model.params for place in (forms / form, tmp_path / form / file))
        jax.tree.map(np.testing.assert_array_equal, one, two)
    lonely = tmp_path / "lonely.safetensors"
    shutil.copy(forms / "huggingface" / "model.safetensors", lonely)
    refuses(lonely, str(lonely), "is not a run or a model")


def test_places_that_cannot_be_written(forms, refuses, tmp_path):
    source = forms / "huggingface"
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    for there in ("there", "file"):
        refuses(source, f"{there} exists already: choose another destination", destination=tmp_path / there)
    for below in ("file/new", "file/deep/new"):
        refuses(source, "cannot write to", "choose another destination", destination=tmp_path / below)
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "there").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file", "place"}


BRACKETS = "[" * 100_000 + "]" * 100_000
NESTED = {
    "huggingface": ("config.json", "model.safetensors.index.json"),
    "tensorflow1": ("bert_config.json",),
    "bert-jax": ("model.json",),
}


@pytest.mark.parametrize(("form", "file"), [(form, file) for form, files in NESTED.items() for file in files])
def test_brackets_inside_brackets(refuses, spoil, form, file):
    """More than the stack holds; and as many as can be read, but not written again."""
    source = spoil(form)
    if file.endswith(".index.json"):
        (source / "model.safetensors").unlink()
    for content in (BRACKETS, '{"deep": %s}' % ("[" * 100 + "]" * 100)):
        (source / file).write_text(content)
        refuses(source, str(source / file), "is nested too deeply")


def test_tensors_without_axes(refuses, spoil):
    source = spoil("huggingface")
    change_json(source / "config.json", lambda about: about.update(architectures=["BertForSequenceClassification"]))
    for name in ("classifier.weight", "bert.embeddings.word_embeddings.weight"):
        kept = safetensors.numpy.load_file(source / "model.safetensors")
        change_tensors(source, lambda tensors, name=name: tensors.update({name: np.ones((), np.float32)}))
        refuses(source, f"tensor '{name}' has shape []")
        refuses(source, "[]" if "word" not in name else "rows", arguments=("--trim-vocabulary",))
        change_tensors(source, lambda tensors, kept=kept: (tensors.clear(), tensors.update(kept)))


def test_names_that_are_too_long(forms, refuses, tmp_path):
    source = forms / "huggingface"
    refuses(source, "file name too long", destination=tmp_path / "place" / ("a" * 300))
    refuses(source, "file name too long", destination=tmp_path / "place" / "new" / ("a" * 300) / "new")
    refuses(tmp_path / ("a" * 300), "file name too long")
    assert cli.main(["convert", str(source), str(tmp_path / ("a" * 250)), "--to", "bert-jax"]) == 0


def test_stores_that_cannot_be_reached(forms, refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    source = forms / "huggingface"
    refuses(source, "gs://bucket/new needs the package gcsfs, which is missing", destination="gs://bucket/new")
    refuses("gs://bucket/model", "gs://bucket/model needs the package gcsfs, which is missing")
    for url in ("https://example.org/model", "http://example.org/model"):
        refuses(url, f"{url}: ", ":// is not supported")
        refuses(source, f"{url}: ", ":// is not supported", destination=url)


def test_half_a_checkpoint_of_tensorflow(refuses, spoil):
    source = spoil("tensorflow1")
    data = source / "bert_model.ckpt.data-00000-of-00001"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    refuses(source, "bert_model.ckpt")
    data.unlink()
    refuses(source, "bert_model.ckpt.data-00000-of-00001")
    data.write_bytes(whole)
    (source / "bert_config.json").unlink()
    refuses(source, "bert_config.json")
    (source / "bert_model.ckpt.index").write_bytes(b"")
    refuses(source, "bert_model.ckpt.index")


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(bytes(content))


def about(**changes):
    """Changes the description; a name with "__" is a field inside a part, and None removes a field."""

    def damage(place) -> None:
        def change(description) -> None:
            for name, value in changes.items():
                *part, field = name.split("__")
                inside = description[part[0]] if part else description
                inside.pop(field) if value is None else inside.update({field: value})

        change_json(place / "model.json", change)

    return damage


def truncate(place) -> None:
    (place / "model.json").write_text((place / "model.json").read_text()[:300])


TAGGING = {"kind": "tagging", "labels": ["a"], "reads": "tokens", "activation": "none", "norm": False}
DAMAGES = {
    "a flipped bit": (lambda place: flip(place / "params.safetensors"), "params.safetensors is missing or damaged"),
    "a flipped bit in moments": (lambda place: flip(place / "moments.safetensors"), "moments.safetensors is missing"),
    "no parameters": (lambda place: (place / "params.safetensors").unlink(), "params.safetensors is missing or dam"),
    "half a description": (truncate, "model.json is not JSON"),
    "a list": (lambda place: (place / "model.json").write_text("[]"), "model.json is not a JSON object, but []"),
    "a later format": (about(format_version=3), "format version 3, and this bert_jax reads 2: update bert_jax"),
    "an earlier format": (
        about(format_version=1),
        "format version 1, and this bert_jax reads 2: convert the model again",
    ),
    "an unknown field of the model": (about(model__flavour="sweet"), "model.json: unknown field 'model.flavour'"),
    "an unknown field of the heads": (about(heads__flavour="sweet"), "model.json: unknown field 'heads.flavour'"),
    "no heads": (about(heads=None), "model.json: field 'heads' is missing"),
    "no sums": (about(sha256=None), "model.json: field 'sha256' is missing"),
    "no sum of the parameters": (about(**{"sha256__params.safetensors": None}), "model.json is damaged"),
    "no family": (about(family=None), "model.json: field 'family' is missing"),
    "no step": (about(step=None), "model.json lacks 'step'"),
    "an unknown family": (about(family="gpt"), "model.json is damaged"),
    "an impossible model": (about(model__num_heads=5), "model.json"),
    "a field of another type": (
        about(model__num_layers="two"),
        "model.json: model.num_layers is 'two': it must be a whole number in [1, 1e4]",
    ),
    "another width": (about(model__intermediate_size=97), "model.json needs encoder/layers/"),
    "another depth": (about(model__num_layers=2), "model.json needs encoder/layers/"),
    "a head that is not there": (about(heads__task=TAGGING), "model.json needs task/"),
    "half a task": (about(heads__task={"kind": "tagging"}), "model.json: field 'heads.task.labels' is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_native_model(refuses, spoil, name):
    damage, words = DAMAGES[name]
    source = spoil("bert-jax")
    damage(source)
    refuses(source, str(source), words)


@pytest.mark.slow
def test_a_pickle_that_wants_to_do_something(refuses, spoil, tmp_path):
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "done"), "w"))

    source = spoil("huggingface")
    (source / "model.safetensors").unlink()
    torch.save({"bert.embeddings.word_embeddings.weight": Evil()}, source / "pytorch_model.bin")
    refuses(source, "pytorch_model.bin", "refused, because reading it would execute")
    assert not (tmp_path / "done").exists()
