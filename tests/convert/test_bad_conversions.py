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
    lonely = tmp_path / "lonely.safetensors"
    shutil.copy(forms / "huggingface" / "model.safetensors", lonely)
    refuses(lonely, str(lonely), "is not a run or a model")


# Damages: functions of the source's directory.


def json_file(name: str, **changes):
    """Changes an object of JSON; a name with "__" is a field inside a part, and `...` removes a field."""

    def damage(place) -> None:
        about = json.loads((place / name).read_text())
        for field, value in changes.items():
            *part, field = field.split("__")
            inside = about[part[0]] if part else about
            inside.pop(field) if value is ... else inside.update({field: value})
        (place / name).write_text(json.dumps(about))

    return damage


def config(**changes):
    return json_file("config.json", **changes)


def about(**changes):
    return json_file("model.json", **changes)


def tensors(change, name: str = "model.safetensors"):
    """Changes the dict of tensors in a file, and its checksum if there is one."""

    def damage(place) -> None:
        arrays = safetensors.numpy.load_file(place / name)
        change(arrays)
        safetensors.numpy.save_file(arrays, place / name, metadata={"format": "pt"})
        if (place / "model.json").exists():
            digest = hashlib.sha256((place / name).read_bytes()).hexdigest()
            json_file("model.json", **{f"sha256__{name}": digest})(place)

    return damage


def content(name: str, change):
    """Changes the bytes of a file."""
    return lambda place: (place / name).write_bytes(change((place / name).read_bytes()))


def text(name: str, new: str):
    return lambda place: (place / name).write_text(new)


def removed(*names: str):
    return lambda place: [(place / name).unlink() for name in names]


def both(*damages):
    return lambda place: [damage(place) for damage in damages]


def flip(old: bytes) -> bytes:
    return old[:-9] + bytes([old[-9] ^ 1]) + old[-8:]


def set_value(name: str, place, value):
    return lambda arrays: arrays[name].__setitem__(place, value)


def cut_vocabulary(arrays) -> None:
    arrays.update({name: arrays[name][:20] for name in (WORD, "cls.predictions.bias")})


BRACKETS = "[" * 100_000 + "]" * 100_000
DEEP = '{"deep": %s}' % ("[" * 100 + "]" * 100)
WORD, SPARE = "bert.embeddings.word_embeddings.weight", f"{LAYER}.output.densee.weight"
CLASSES = config(architectures=["BertForSequenceClassification"])
INDEX = removed("model.safetensors")
KEEP = ("--to", "bert-jax", "--optimizer-state", "keep")
HUGGINGFACE = {
    "a tensor is missing": (
        tensors(lambda arrays: arrays.pop(f"{LAYER}.output.dense.weight")),
        f"tensor '{LAYER}.output.dense.weight' is missing; the nearest name is 'bert.enc",
    ),
    "a tensor too many": (
        tensors(lambda arrays: arrays.update({SPARE: np.zeros(3, np.float32)})),
        f"tensor '{SPARE}' is not part of this architecture; the nearest name is '{LAYER}.output.dense.weight'; to "
        f"leave it out, use bert-jax convert --drop '{SPARE}'",
    ),
    "too few words": (
        both(tensors(cut_vocabulary), config(vocab_size=20)),
        "the tokenizer tokenizer.json has",
    ),
    "truncated": (content("model.safetensors", lambda old: old[:-100]), "model.safetensors: truncated or damaged"),
    "empty": (content("model.safetensors", lambda old: b""), "model.safetensors: truncated or damaged"),
    "no axes in a head": (
        both(CLASSES, tensors(lambda arrays: arrays.update({"classifier.weight": np.ones((), np.float32)}))),
        "tensor 'classifier.weight' has shape []",
    ),
    "no axes in a table": (
        tensors(lambda arrays: arrays.update({WORD: np.ones((), np.float32)})),
        f"tensor '{WORD}' has shape []",
    ),
    **{
        f"a value {value}": (  # in a row that no text reaches: a forward pass does not see it
            tensors(set_value(WORD, (117, 5), value)),
            f"tensor '{WORD}' has the value {value} at [117, 5]",
        )
        for value in (np.inf, -np.inf, np.nan)
    },
    "too large for float32": (
        tensors(lambda arrays: arrays.update({WORD: np.full((120, 64), 1e300)})),
        f"tensor '{WORD}' has the value inf at [0, 0]: every parameter must be finite in float32",
    ),
    "nested brackets": (text("config.json", BRACKETS), "config.json is nested too deeply"),
    "nested deeply": (text("config.json", DEEP), "config.json is nested too deeply"),
    "a nested index": (both(INDEX, text("model.safetensors.index.json", DEEP)), "index.json is nested too deeply"),
    "no object": (text("config.json", "[1, 2]"), "config.json is not a JSON object"),
}
CONFIGS = {
    "intermediate_size": (95, f"'{LAYER}.intermediate.dense.weight' has shape [96, 64], the config says [95, 64]"),
    "vocab_size": (119, "word_embeddings.weight' has shape [120, 64], the config says [119, 64]: the vocabulary has"),
    "vocab_size ": ("many", "vocab_size is 'many': it must be a whole number"),
    "vocab_size  ": (10**7, "has shape [120, 64], the config says [10000000, 64]"),  # 2.6 GB
    "num_attention_heads": (5, "hidden_size 64"),
    "hidden_size": (None, "lacks 'hidden_size'"),
    "hidden_size ": (2**43, "hidden_size is 8796093022208: it must be a whole number in [1, 1e7]"),
    "num_hidden_layers": (-1, "num_layers is -1"),
    "num_hidden_layers ": (1.5, "num_hidden_layers is 1.5: it must be a whole number"),
    "num_hidden_layers  ": (10**13, "num_layers is 10000000000000: it must be a whole number in [1, 1e4]"),
    "layer_norm_eps": ("small", "layer_norm_eps is 'small': it must be a number in [0, 1]"),
    "layer_norm_eps ": (float("nan"), "layer_norm_eps is nan: it must be a number in [0, 1]"),
    "hidden_dropout_prob": (10**400, "it must be a number in [0, 1]"),
    "hidden_dropout_prob ": (True, "hidden_dropout_prob is True: it must be a number in [0, 1]"),
    "initializer_range": (-0.02, "initializer_range is -0.02: it must be a number in [0, 100]"),
    "model_type": (["bert"], "model_type is ['bert']: it must be a string"),
    "model_type ": ("t5", "model_type 't5' is not supported: use one of bert, roberta"),
    "model_type  ": (None, "is not supported: use one of bert, roberta"),
    "architectures ": ("BertModel", "architectures is 'BertModel': it must be a list"),
    "architectures  ": ([None], "architectures.0 is None: it must be a string"),
    "pad_token_id": (10**9, "pad_token_id is 1000000000: the vocabulary has 120 tokens"),
    "pad_token_id ": ("0", "pad_token_id is '0': it must be a whole number"),
    "bos_token_id": ("one", "bos_token_id is 'one': it must be a whole number"),
    "id2label": (["a", "b"], "id2label is ['a', 'b']: it must be an object"),
    "id2label ": ({"x": "a"}, "id2label must map each number to a label"),
    "hidden_act": (["gelu"], "hidden_act is ['gelu']: it must be a string"),
    "hidden_act ": ("swish", "hidden_act 'swish' is not one of gelu"),
    "is_decoder": ("no", "is_decoder is 'no': it must be true or false"),
    "position_embedding_type": ("relative_key", "only absolute positions can be read"),
}
"""Field (spaces make names different), value, message."""
TENSORFLOW = {
    "half the data": (content("bert_model.ckpt.data-00000-of-00001", lambda old: old[:999]), "bert_model.ckpt.data-"),
    "no data": (removed("bert_model.ckpt.data-00000-of-00001"), "bert_model.ckpt.data-00000-of-00001"),
    "no config": (removed("bert_config.json"), "bert_config.json"),
    "an empty index": (text("bert_model.ckpt.index", ""), "bert_model.ckpt.index"),
    "nested deeply": (text("bert_config.json", DEEP), "bert_config.json is nested too deeply"),
}
TAGGING = {"kind": "tagging", "labels": ["a"], "reads": "tokens", "activation": "none", "norm": False}
NATIVE = {
    "a flipped bit": (content("params.safetensors", flip), "params.safetensors is missing or damaged"),
    "a flipped bit in moments": (content("moments.safetensors", flip), "moments.safetensors is missing"),
    "no parameters": (removed("params.safetensors"), "params.safetensors is missing or dam"),
    "half a description": (content("model.json", lambda old: old[:300]), "model.json is not JSON"),
    "a list": (text("model.json", "[]"), "model.json is not a JSON object, but []"),
    "nested deeply": (text("model.json", DEEP), "model.json is nested too deeply"),
    "a later format": (about(format_version=4), "format version 4, and this bert_jax reads 3: update bert_jax"),
    "an earlier format": (about(format_version=2), "version 2, and this bert_jax reads 3: convert the model again"),
    "an unknown field of the model": (about(model__flavour="sweet"), "model.json: unknown field 'model.flavour'"),
    "no heads": (about(heads=...), "model.json: field 'heads' is missing"),
    "no sum of the parameters": (about(**{"sha256__params.safetensors": ...}), "model.json is damaged"),
    "no step": (about(step=...), "model.json lacks 'step'"),
    "an unknown family": (about(family="gpt"), "model.json is damaged"),
    "an impossible model": (about(model__num_heads=5), "model.json"),
    "a field of another type": (
        about(model__num_layers="two"),
        "model.json: model.num_layers is 'two': it must be a whole number in [1, 1e4]",
    ),
    "another width": (about(model__intermediate_size=97), "model.json needs encoder/layers/"),
    "another depth": (about(model__num_layers=2), "model.json needs encoder/layers/"),
    "a head that is not there": (about(heads__task=TAGGING), "model.json needs task/"),
    "a value inf": (
        tensors(set_value("nu/mlm/bias", 7, np.inf), "moments.safetensors"),
        "tensor 'nu/mlm/bias' has the value inf at [7]",
    ),
}
CASES = {
    **{("huggingface", name): case for name, case in HUGGINGFACE.items()},
    **{("huggingface", name): (config(**{name.strip(): value}), said) for name, (value, said) in CONFIGS.items()},
    **{("tensorflow1", name): case for name, case in TENSORFLOW.items()},
    **{("bert-jax", name): case for name, case in NATIVE.items()},
}


@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_damaged_source(refuses, spoil, form, name):
    damage, words = CASES[form, name]
    source = spoil(form)
    damage(source)
    refuses(source, str(source), words, arguments=KEEP if form == "bert-jax" else ())


def test_tensors_are_dropped(refuses, spoil, tmp_path):
    source = spoil("huggingface")
    HUGGINGFACE["a tensor too many"][0](source)
    refuses(source, SPARE, arguments=("--drop", "cls.*.dense.bias"))
    refuses(source, "--drop '*.dense.bias.*' matches no tensor of", arguments=("--drop", "*.dense.bias.*"))
    assert cli.main(["convert", str(source), str(tmp_path / "new"), "--drop", "*.densee.*"]) == 0
    assert SPARE not in safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors")
    # What is dropped and wanted is missing.
    patterns = ("--drop", "cls.predictions.transform.LayerNorm.*", "--drop", SPARE)
    refuses(source, "'cls.predictions.transform.LayerNorm.weight' is missing", arguments=patterns)


def test_names_of_tensors_do_not_control_the_terminal(refuses, spoil):
    source = spoil("huggingface")
    arrays = safetensors.numpy.load_file(source / "model.safetensors")
    evil = {"a\x1b]0;title\x07\x9b2J\u202eb": np.ones(2, np.float32)}
    safetensors.numpy.save_file(arrays | evil, source / "model.safetensors")
    refuses(source, r"tensor 'a\x1b]0;title\x07\x9b2J\u202eb' is not part of")


def test_the_advice_to_drop_a_tensor_works_in_a_model_without_prefix(refuses, spoil, tmp_path):
    """Messages, --drop and the file of a BertModel have the same name for a tensor that the family does not know."""
    source = spoil("huggingface")
    arrays = safetensors.numpy.load_file(source / "model.safetensors")
    bare = {name.removeprefix("bert."): array for name, array in arrays.items() if name.startswith("bert.")}
    extra = {"criterion.weight": np.ones(2, np.float32), "encoder.layer.7.output.dense.bias": np.ones(64, np.float32)}
    safetensors.numpy.save_file(bare | extra, source / "model.safetensors")
    refuses(source, "use bert-jax convert --drop 'criterion.weight'")
    message = "use bert-jax convert --drop 'bert.encoder.layer.7.output.dense.bias'"
    refuses(source, message, arguments=("--drop", "criterion.weight"))
    patterns = ("--drop", "criterion.weight", "--drop", "bert.encoder.layer.7.*")
    assert cli.main(["convert", str(source), str(tmp_path / "new"), *patterns]) == 0
    assert safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors").keys() == bare.keys()


def test_a_padded_vocabulary_is_trimmed(refuses, spoil, tmp_path, tiny_run):
    import bert_jax

    def grow(arrays) -> None:
        for name in (WORD, "cls.predictions.bias"):
            more = np.full((8, *arrays[name].shape[1:]), 0.25, np.float32)
            arrays[name] = np.concatenate([arrays[name], more])

    source = spoil("huggingface")
    tensors(grow)(source)
    config(vocab_size=128)(source)
    assert cli.main(["convert", str(source), str(tmp_path / "whole")]) == 0
    assert cli.main(["convert", str(source), str(tmp_path / "trimmed"), "--trim-vocabulary"]) == 0
    whole, trimmed, run = (bert_jax.load(place) for place in (tmp_path / "whole", tmp_path / "trimmed", tiny_run))
    tokens = run.tokenizer.vocab_size
    assert (whole.config.vocab_size, trimmed.config.vocab_size) == (128, tokens) and tokens < 120
    assert json.loads((tmp_path / "trimmed" / "config.json").read_text())["vocab_size"] == tokens
    table, body = (lambda m: np.asarray(m.params["encoder"]["embeddings"]["word"])), "the [MASK] sings"
    np.testing.assert_array_equal(table(trimmed), table(run)[:tokens])
    np.testing.assert_array_equal(trimmed.encode([body]), run.encode([body]))
    assert [one.token for one in trimmed.fill_mask(body)[0]] == [one.token for one in run.fill_mask(body)[0]]
    tensors(cut_vocabulary)(source)
    refuses(source, "has shape [20, 64], the config says", arguments=("--trim-vocabulary",))


def test_a_run_that_diverged(refuses, tiny_run, monkeypatch):
    """Its newest checkpoint is intact, and has a value that is NaN."""
    restore = run.checkpoint.restore_parts

    def spoiled(*arguments):
        parts = restore(*arguments)
        parts["params"]["mlm"]["bias"] = np.where(np.arange(120) == 2, np.nan, parts["params"]["mlm"]["bias"])
        return parts

    monkeypatch.setattr(run.checkpoint, "restore_parts", spoiled)
    refuses(tiny_run, str(tiny_run), "tensor 'mlm/bias' has the value nan at [2]")


@pytest.mark.parametrize("arguments", [("--drop", "x"), ("--trim-vocabulary",)])
@pytest.mark.parametrize("form", ["run", "bert-jax"])
def test_runs_and_native_models_are_not_trimmed(refuses, tiny_run, forms, form, arguments):
    source = tiny_run if form == "run" else forms / form
    refuses(source, "apply to other formats only", arguments=arguments)


def test_a_file_of_a_model_is_its_directory(forms, tmp_path):
    """The path of weights or of a config means its directory."""
    for form, file in (
        ("huggingface", "model.safetensors"),
        ("huggingface", "config.json"),
        ("bert-jax", "model.json"),
        ("bert-jax", "params.safetensors"),
        ("tensorflow1", "bert_model.ckpt.index"),
        ("tensorflow1", "bert_model.ckpt"),
    ):
        one, two = (parts_of(place).model.params for place in (forms / form, forms / form / file))
        jax.tree.map(np.testing.assert_array_equal, one, two)


def test_places_that_cannot_be_written(forms, refuses, tmp_path):
    source = forms / "huggingface"
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for there in ("there", "file", "link"):
        refuses(source, f"{there} exists already: choose another destination", destination=tmp_path / there)
    for below in ("file/new", "file/deep/new"):
        refuses(source, "cannot write to", "choose another destination", destination=tmp_path / below)
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "there").iterdir())
    refuses(source, "file name too long", destination=tmp_path / "place" / ("a" * 300))
    refuses(source, "file name too long", destination=tmp_path / "place" / "new" / ("a" * 300) / "new")
    refuses(tmp_path / ("a" * 300), "file name too long")
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file", "link", "place"}


def test_stores_that_cannot_be_reached(forms, refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    source = forms / "huggingface"
    refuses(source, "gs://bucket/new needs the package gcsfs, which is missing", destination="gs://bucket/new")
    refuses("gs://bucket/model", "gs://bucket/model needs the package gcsfs, which is missing")
    url = "https://example.org/model"
    refuses(url, f"{url}: ", ":// is not supported")
    refuses(source, f"{url}: ", ":// is not supported", destination=url)
