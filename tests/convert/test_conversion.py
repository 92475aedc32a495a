"""`bert-jax convert` between all output formats: equal tensors, a model card, and a complete destination or none."""

import dataclasses
import functools
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml

from bert_jax.cli import main as cli
from bert_jax.convert import conversion
from bert_jax.convert.conversion import OUTPUT_FORMATS, convert
from bert_jax.convert.formats import input_formats
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.parity import jax_forward
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.translate import to_huggingface
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer

FILES = {
    "huggingface": {"config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json"},
    "tensorflow1": {
        *("bert_config.json", "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"),
        *("vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    },
    "bert-jax": {"model.json", "params.safetensors", "tokenizer.json"},
    "stablehlo": {"model.stablehlo", "params.safetensors", "tokenizer.json"},
}
JOURNEYS = {
    # name: (source, format); each is made from the run or from one above it
    "huggingface": ("run", "huggingface"),
    "native": ("huggingface", "bert-jax"),
    "huggingface again": ("native", "huggingface"),
    "tensorflow1": ("run", "tensorflow1"),
    "native of tensorflow1": ("tensorflow1", "bert-jax"),
    "native of the run": ("run", "bert-jax"),
    "tensorflow1 again": ("native of the run", "tensorflow1"),
    "served": ("run", "stablehlo"),
}


pytestmark = pytest.mark.usefixtures("only_numpy", "quick_compilation")


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_run, only_numpy):
    """Each journey's directory, and the run; read only."""
    directory = tmp_path_factory.mktemp("journeys")
    places = {"run": tiny_run} | {name: directory / name for name in JOURNEYS}
    for name, (source, to) in JOURNEYS.items():
        assert convert(places[source], places[name], to).passed
    assert {path.name for path in directory.iterdir()} == set(JOURNEYS)  # no scratch
    return places


@functools.cache
def parts_of(place) -> input_formats.SourceModel:
    with input_formats.open_model(place) as source_model:
        return source_model


@pytest.mark.parametrize("name", [name for name in JOURNEYS if name != "served"])
def test_every_journey_keeps_every_bit(made, name):
    before, after = parts_of(made["run"]).model, parts_of(made[name]).model
    assert after.heads == dataclasses.replace(before.heads, pooler=after.heads.pooler) and after.family == "bert"
    assert jax.tree.structure(after.params) == jax.tree.structure(before.params)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    for field in ("hidden_size", "num_layers", "num_heads", "max_positions", "activation", "norm_epsilon"):
        assert getattr(after.config, field) == getattr(before.config, field), field


def test_the_same_model_is_the_same_file(made):
    """Converting there and back gives equal files: config, tensors, tokenizer."""
    for one, two in (
        ("huggingface", "huggingface again"),
        ("tensorflow1", "tensorflow1 again"),
        ("native", "native of tensorflow1"),
    ):
        for file in FILES[JOURNEYS[one][1]] - {"model.json"}:
            assert (made[one] / file).read_bytes() == (made[two] / file).read_bytes(), (one, file)
    weights = [(made[name] / "params.safetensors").read_bytes() for name in ("native", "native of the run", "served")]
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.parametrize("name", JOURNEYS)
def test_the_tokenizer_comes_along(made, name, tiny_corpus):
    to = JOURNEYS[name][1]
    files = {path.name for path in made[name].iterdir()}
    assert files >= FILES[to] | {"README.md"}
    assert files <= FILES[to] | FILES["huggingface"] - {"config.json", "model.safetensors"} | {"README.md"}
    expected = Tokenizer.load(tiny_corpus)
    for file in {"tokenizer.json", "vocab.txt"} & files:
        assert Tokenizer.load(made[name] / file).fingerprint == expected.fingerprint
    if to == "huggingface":
        assert json.loads((made[name] / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"


@pytest.mark.parametrize("name", JOURNEYS)
def test_cards(made, name):
    source, to = JOURNEYS[name]
    card = (made[name] / "README.md").read_text()
    params = parts_of(made["run"]).model.params
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    front, body = re.fullmatch(r"---\n(.*?)---\n\n(.*)", card, re.DOTALL).groups()
    library = {"huggingface": "transformers", "tensorflow1": "tensorflow", "bert-jax": "bert_jax", "stablehlo": "jax"}
    expected = {
        "language": ["en"],
        "library_name": library[to],
        "pipeline_tag": "fill-mask",
        "tags": ["bert", "bert_jax"],
    }
    assert yaml.safe_load(front) == expected and list(yaml.safe_load(front)) == list(expected)
    assert body.startswith(f"# {name}\n\nA bert with 1 layers of width 64, {count:,} parameters; on its encoder: mlm, ")
    origin = "run" if source == "run" else JOURNEYS[source][1]
    rows = [line for line in body.splitlines() if line.startswith("|") and "| 100.0% |" in line]
    assert [("en 100.0% | not stated | none |" in row) for row in rows] == [True] * (source == "run")
    assert ("## Training data" in body) == (source == "run")
    assert f"Converted from {origin} (" in card and f") to {to} by bert_jax " in card
    assert str(made[source].parent) not in card  # the card must not contain local paths
    table = card[card.index("## Parity") :]
    assert "parity with numpy, " in table and "parity: passed" in table
    assert bool(re.search(r"^  layer 1 +\d\.\de-\d\d \(", table, re.M))
    assert ("embeddings" in table) == (to != "stablehlo")
    assert "mlm logits" in table and "pair logits" in table and "texts equal" in table
    example = {"huggingface": "fill-mask", "bert-jax": "bert_jax.load", "stablehlo": "jax.export.deserialize"}
    assert ("pip install jax flatbuffers" in card) == (to == "stablehlo")
    assert example.get(to, "## Parity") in card and ("follows the first" in card) == (source == "run")


def test_files_may_be_read_as_the_umask_says(made, tmp_path):
    before = os.umask(0o027)
    try:
        convert(made["run"], tmp_path / "new", "bert-jax")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o640}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750


SERVER = """
import sys
from pathlib import Path

import jax.export
import numpy as np
from safetensors.numpy import load_file

place = Path(sys.argv[1])
model = jax.export.deserialize((place / "model.stablehlo").read_bytes())
weights = load_file(place / "params.safetensors")
batches, found = np.load(sys.argv[2]), {}
for name in ("small", "large"):
    outputs = model.call(weights, *(batches[f"{name} {part}"] for part in ("ids", "types", "mask")))
    found |= {f"{name} {part}": np.asarray(values) for part, values in outputs.items()}
np.savez(sys.argv[3], **found)
assert "bert_jax" not in sys.modules and "flax" not in sys.modules
"""


@pytest.mark.slow
def test_a_program_is_served_without_bert_jax(tiny_run, tmp_path):
    """In another process and directory, with batches of two shapes; outputs equal those of bert_jax."""
    convert(tiny_run, tmp_path / "served", "stablehlo")
    source_model = parts_of(tiny_run)
    sampled = sample_inputs(to_huggingface(source_model.model, "run"), Tokenizer.load(source_model.tokenizer_path))
    batches = {
        "small": ForwardInputs(*(part[:2, :9] for part in sampled)),
        "large": ForwardInputs(*(part[:5] for part in sampled)),
    }
    arrays = {
        f"{name} {part}": array
        for name, batch in batches.items()
        for part, array in zip(("ids", "types", "mask"), batch, strict=True)
    }
    np.savez(tmp_path / "batches.npz", **arrays)
    command = [sys.executable, "-c", SERVER, tmp_path / "served", tmp_path / "batches.npz", tmp_path / "found.npz"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    assert {name.split(" ")[1] for name in found} == {"hidden", "pooled", "mlm", "pair"}
    for name, batch in batches.items():
        expected, real = jax_forward.run(source_model.model, batch), batch.attention_mask_BS > 0
        np.testing.assert_allclose(found[f"{name} hidden"][real], expected["layer 1"][real], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[f"{name} mlm"][real], expected["mlm logits"][real], rtol=0, atol=1e-4)
        np.testing.assert_allclose(found[f"{name} pair"], expected["pair logits"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[f"{name} pooled"], expected["pooled vector"], rtol=0, atol=1e-5)


def test_json(made, tmp_path, capsys):
    assert cli.main(["convert", str(made["huggingface"]), str(tmp_path / "new"), "--to", "bert-jax", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == "" and report["passed"] is True and report["failures"] == []
    parts = {"embeddings", "layer 1", "mlm logits", "pair logits", "pooled vector"}
    assert report["library"] == "numpy" and set(report["differences"]) == parts
    assert all(0 <= part["largest"] <= part["limit"] for part in report["differences"].values())
    assert report["tokenizer"]["equal"] == report["tokenizer"]["total"] > 10
    assert cli.main(["convert", str(made["huggingface"]), str(tmp_path / "two"), "--to", "bert-jax"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert table[-1] == "parity: passed" and last == f"wrote {tmp_path / 'two'}"


def change_bias(tensors) -> None:
    tensors["bert.encoder.layer.0.output.dense.bias"][:8] += 0.01


def change_far_row(tensors) -> None:
    """A position that no text reaches."""
    tensors["bert.embeddings.position_embeddings.weight"][63] += 7


def lose_pair_head(tensors) -> None:
    for name in [name for name in tensors if "pooler" in name or "seq_relationship" in name]:
        del tensors[name]


@pytest.fixture
def spoiling(monkeypatch):
    """A function of a function that changes the tensors of every written Hugging Face model."""
    target = OUTPUT_FORMATS["huggingface"]

    def spoil(change) -> None:
        def write(source_model, directory):
            target.write(source_model, directory)
            tensors = safetensors.numpy.load_file(directory / "model.safetensors")
            change(tensors)
            safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

        monkeypatch.setitem(conversion.OUTPUT_FORMATS, "huggingface", target._replace(write=write))

    return spoil


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_bias, "parameter encoder/layers/"),
        (change_far_row, "parameter encoder/embeddings/position"),
        (lose_pair_head, "only the reference model has 'pair logits'"),
    ],
)
def test_a_different_model_is_not_kept(made, spoiling, tmp_path, capsys, change, words):
    spoiling(change)
    assert cli.main(["convert", str(made["run"]), str(tmp_path / "deep" / "below" / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {made['run']} and the converted model differ ({words}")
    assert "nothing is kept" in line and "--force" in line
    assert list(tmp_path.iterdir()) == []


def test_a_different_model_is_kept_by_force(made, spoiling, tmp_path, capsys):
    spoiling(change_bias)
    assert cli.main(["convert", str(made["run"]), str(tmp_path / "new"), "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False and "layer 1 differs by" in report["failures"][1]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    card = (tmp_path / "new" / "README.md").read_text()
    assert "<- FAILS" in card and "parity: FAILED, parameter encoder/layers/" in card and "passed" not in card


@pytest.fixture
def small_files():
    """Limits the size of files, in bytes: writes then fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("to", [to for to in OUTPUT_FORMATS if not to.endswith(("-int8", "-both"))])
def test_a_full_disk(made, small_files, tmp_path, monkeypatch, capsys, to):
    """Whichever library writes, and whatever it raises: one line, and nothing is left."""
    if to == "pytorch":
        pytest.importorskip("torch")
    target = OUTPUT_FORMATS[to]

    def write(source_model, directory):
        small_files(20_000)
        target.write(source_model, directory)

    monkeypatch.setitem(conversion.OUTPUT_FORMATS, to, target._replace(write=write))
    assert cli.main(["convert", str(made["huggingface"]), str(tmp_path / "deep" / "new"), "--to", to]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'deep' / 'new'} cannot be written: ")
    assert "File too large; raise the limit" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_during_a_destructor_leaves_nothing(made, tmp_path, monkeypatch):
    """Python discards the handler's exception in a destructor; the conversion must still stop."""

    class Destroyed:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    def write(source_model, directory):
        target.write(source_model, directory)
        Destroyed()

    target = OUTPUT_FORMATS["bert-jax"]
    monkeypatch.setitem(conversion.OUTPUT_FORMATS, "bert-jax", target._replace(write=write))
    assert cli.main(["convert", str(made["huggingface"]), str(tmp_path / "new"), "--to", "bert-jax"]) == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing(made, tmp_path, monkeypatch, capsys, number):
    """A signal while it writes, and another one while it removes the files."""

    def write(source_model, directory):
        (directory / "large").write_bytes(b"0")
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was lost")

    def remove(*arguments, **options):
        os.kill(os.getpid(), number)
        return rmtree(*arguments, **options)

    rmtree = tempfile.TemporaryDirectory._rmtree
    monkeypatch.setattr(tempfile.TemporaryDirectory, "_rmtree", staticmethod(remove))
    monkeypatch.setitem(conversion.OUTPUT_FORMATS, "bert-jax", OUTPUT_FORMATS["bert-jax"]._replace(write=write))
    before, command = signal.getsignal(number), ["convert", str(made["huggingface"]), str(tmp_path / "new"), "--to"]
    if number == signal.SIGINT:
        assert cli.main([*command, "bert-jax"]) == 130
        assert capsys.readouterr().err == "stopped\n"
    else:
        assert cli.main([*command, "bert-jax"]) == 128 + number
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(number) is before


def test_a_destination_that_appeared_meanwhile_is_left_alone(made, tmp_path, monkeypatch):
    """Another conversion to the same destination was faster."""
    check_parity = conversion._check_parity

    def slow(*arguments):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "file").write_text("whole")
        return check_parity(*arguments)

    monkeypatch.setattr(conversion, "_check_parity", slow)
    with pytest.raises(UserError, match="was created in the meantime"):
        convert(made["run"], tmp_path / "new", "bert-jax")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "file"]
