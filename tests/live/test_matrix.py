"""Every cell of the table in docs/conversion.md, through the command's own function. Needs the extra `parity`.

What transformers saved, random models of every family with tokenizers, goes out; what transformers, TensorFlow, Flax
and fairseq wrote comes in. Tensors are compared bit for bit; that both ends compute the same, the parity report says.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from bert_jax.cli import main as cli
from bert_jax.convert import conversion
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats, onnx_files
from bert_jax.convert.formats.tensor_files import PICKLE, open_tensors
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.errors import UserError
from tests.convert.test_nvidia import mlperf_name
from tests.convert.test_support_matrix import FAMILIES, FORMATS, SERVING, SUPPORT, supported
from tests.live import small_models
from tests.live.small_models import BESIDE_TRANSFORMERS

pytestmark = BESIDE_TRANSFORMERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent.parent
BUNDLES, FIXTURES = HERE / "golden/tensor_bundle", HERE / "convert/fixtures"
FLAX, FAIRSEQ = FIXTURES / "flax", FIXTURES / "fairseq"
FLAX_FILES = {
    "bert": "BertForPreTraining",
    "roberta": "RobertaForMaskedLM",
    "albert": "AlbertForPreTraining",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForPreTraining",
}
"""convert/test_flax_msgpack.py reads the others, and convert/test_fairseq.py other files of fairseq."""
INT8 = ("onnx-int8", "onnx-both")
ONLY_IN = [format for format in FORMATS if format not in conversion.OUTPUT_FORMATS]


@pytest.fixture(scope="module", autouse=True)
def quick(quick_compilation):
    """Little is computed, much compiled."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> its directory as transformers saved it, and the model in memory."""
    made = {}

    def get(family: str):
        if family not in made:
            directory = tmp_path_factory.mktemp(family) / "huggingface"
            model = small_models.save(family, directory, tmp_path_factory.mktemp("tokenizer"))
            made[family] = directory, model
        return made[family]

    return get


@pytest.fixture(scope="module")
def written(saved, tmp_path_factory):
    """(family, format) -> what `convert` wrote of it, and the report."""
    made = {}

    def get(family: str, format: str):
        if (family, format) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{format}") / "out"
            report = convert(epath.Path(saved(family)[0]), epath.Path(directory), format, force=format in INT8)
            made[family, format] = directory, report
        return made[family, format]

    return get


def proved(report, tokenizer: bool) -> None:
    """The report has all layers and heads, used transformers, and passed; a difference of 8-bit products may be a fifth
    over its limit, since CPUs without VNNI saturate them.
    """
    assert report.library.startswith("transformers") and not report.problems, report.lines()
    for part in report.differences:
        assert part.passed or (part.measure == "relative" and part.value < 1.2 * part.limit), report.lines()
    assert report.tokens > 30 and report.differences
    assert (report.tokenizer is not None) == tokenizer
    assert not tokenizer or report.tokenizer.equal == report.tokenizer.total > 10


def same(found, expected, *, tied: bool = False) -> None:
    """Bit for bit; `tied`: `expected` may have copies that `found` lacks."""
    assert set(found) <= set(expected) if tied else set(found) == set(expected)
    for name in found:
        assert found[name].dtype == np.float32, name
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    digests = {expected[name].tobytes() for name in found}
    assert all(expected[name].tobytes() in digests for name in expected)


def refused(source: Path, destination: Path, to: str, *words: str, options=input_formats.ReadOptions()) -> None:  # noqa: B008
    """In one line, and nothing is left."""
    with pytest.raises(UserError) as caught:
        convert(epath.Path(source), epath.Path(destination), to, options)
    message = str(caught.value)
    assert "\n" not in message and not destination.exists() and list(destination.parent.glob(".*")) == []
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("family", "format"), supported("out"), ids=lambda part: part)
def test_out(family, format, saved, written):
    """From transformers' own directory: the report passes, and the tensors are those that transformers saved."""
    source, model = saved(family)
    directory, report = written(family, format)
    proved(report, tokenizer=True)
    tensors = open_tensors(epath.Path(source))
    if format == "pytorch":
        same({k: t.numpy() for k, t in torch.load(directory / PICKLE, weights_only=True).items()}, tensors)
    elif format == "tensorflow1":
        same(tensors_of(directory), tensors)
    elif format == "stablehlo":
        native_directory = written(family, "bert-jax")[0]
        assert (directory / "params.safetensors").read_bytes() == (native_directory / "params.safetensors").read_bytes()
    elif format == "huggingface":
        assert json.loads((directory / "config.json").read_text())["model_type"] == family
        same(open_tensors(epath.Path(directory)), tensors)
        again, told = type(model).from_pretrained(directory, output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", [family for family, format in supported("out") if format == "onnx"])
def test_padding_before_the_tokens(family, saved, written):
    """ONNX Runtime computes what transformers computes of the same padded batch, longer than ModernBERT's window. In
    the batch of the report, padding is behind the tokens.
    """
    model = saved(family)[1].eval()
    session = onnx_files.open_session(epath.Path(written(family, "onnx")[0]) / onnx_files.MODEL)
    places, lengths = np.arange(22)[None], np.array([[22], [15], [4]])
    mask = places >= 22 - lengths
    pad = model.config.pad_token_id
    ids = np.random.default_rng(0).integers(5, 40, mask.shape)
    assert pad < 5
    batch = ForwardInputs(np.where(mask, ids, pad), np.zeros_like(ids), mask.astype(np.int64))
    names = [port.name for port in session.get_inputs()]
    found = session.run(["last_hidden_state"], onnx_files.feeds(names, batch))[0]
    tensors = {name: torch.tensor(array) for name, array in onnx_files.feeds(names, batch).items()}
    with torch.no_grad():
        outputs = model(**tensors, output_hidden_states=True)
    np.testing.assert_allclose(found[mask], outputs.hidden_states[-1].numpy()[mask], rtol=0, atol=1e-4)


def tensors_of(place: Path, *drop: str) -> dict[str, np.ndarray]:
    """The tensors of a model as it is read, under transformers' names."""
    with input_formats.open_model(place, input_formats.ReadOptions(drop=drop)) as source_model:
        return dict(source_model.hf_model.tensors)


def source_in(family: str, format: str, saved, written, place: Path) -> tuple[Path, dict]:
    """A file or directory in this format, and the tensors in it under transformers' names."""
    directory, model = saved(family)
    tensors = dict(open_tensors(epath.Path(directory)))
    if format == "pytorch":  # as transformers 4 saved it: tied tensors twice
        shutil.copytree(directory, place / "pickle", ignore=shutil.ignore_patterns("*.safetensors"))
        torch.save(model.state_dict(), place / "pickle" / PICKLE)
        return place / "pickle", tensors
    if format == "nvidia":
        state = {mlperf_name(k): t for k, t in model.state_dict().items() if not k.endswith("decoder.bias")}
        torch.save({"model": state, "optimizer": {"state": {}}}, place / "ckpt_1.pt")
        shutil.copy(directory / "config.json", place / "bert_config.json")
        shutil.copy(directory / "vocab.txt", place)
        return place / "ckpt_1.pt", tensors
    if format == "tensorflow1":
        return BUNDLES / family, tensors_of(BUNDLES / family)
    if (family, format) == ("xlm-roberta", "flax"):  # the same names under another type
        shutil.copytree(FLAX / "RobertaForMaskedLM", place / "flax")
        settings = json.loads((place / "flax/config.json").read_text())
        (place / "flax/config.json").write_text(json.dumps(settings | {"model_type": family}))
        return place / "flax", tensors_of(place / "flax")
    if format == "flax":
        return FLAX / FLAX_FILES[family], tensors_of(FLAX / FLAX_FILES[family])
    if format == "fairseq":
        return FAIRSEQ / "new.pt", tensors_of(FAIRSEQ / "new.pt", "lm_head.*")
    return written(family, "bert-jax")[0], tensors


@pytest.mark.parametrize(
    ("family", "format"), [cell for cell in supported("in") if cell[1] != "huggingface"], ids=lambda part: part
)
def test_in(family, format, saved, written, tmp_path):
    """To a directory of transformers: the report passes, and every tensor of the source is in it. Such a directory is
    the source of test_out.
    """
    source, tensors = source_in(family, format, saved, written, tmp_path)
    out, drop = epath.Path(tmp_path / "out"), ("lm_head.*",) if format == "fairseq" else ()
    report = convert(epath.Path(source), out, "huggingface", input_formats.ReadOptions(drop=drop))
    proved(report, tokenizer=format in ("pytorch", "nvidia", "bert-jax"))
    assert json.loads((out / "config.json").read_text())["model_type"] == family
    same(open_tensors(out), tensors, tied=True)
    assert f"from {'huggingface' if format == 'pytorch' else format} (" in (out / "README.md").read_text()


def impossible(family: str, format: str, saved, place: Path) -> tuple[Path, str]:
    """A model of a family in a format that has none: a source, and a word of the refusal."""
    directory, model = saved(family)
    if format == "tensorflow1":
        shutil.copytree(BUNDLES / "bert", place / "source")
        (place / "source/bert_config.json").rename(place / "source" / f"{family}_config.json")
        return place / "source", "bert_config.json and albert_config.json"
    if format == "flax":
        shutil.copytree(FLAX / "BertForPreTraining", place / "source")
        shutil.copy(directory / "config.json", place / "source/config.json")
        return place / "source", f"'{family}' is not one of"
    shutil.copy(saved("bert")[0] / "config.json", place / "bert_config.json")
    settings = {"encoder_attention_heads": 4}
    content = {"model": model.state_dict()} | ({"cfg": {"model": settings}} if format == "fairseq" else {})
    torch.save(content, place / "model.pt")
    return place / "model.pt", "model.pt"


NOT_IN = [cell for cell in SUPPORT if cell not in supported("in") and cell[1] not in SERVING]


@pytest.mark.parametrize(("family", "format"), NOT_IN, ids=lambda part: part)
def test_not_in(family, format, saved, tmp_path):
    source, word = impossible(family, format, saved, tmp_path)
    refused(source, tmp_path / "out", "bert-jax", word)


@pytest.mark.parametrize("format", SERVING)
def test_a_program_for_serving_is_no_source(format, written, tmp_path):
    refused(written("bert", format)[0], tmp_path / "out", "bert-jax", "is not a run or a model")


NOT_OUT = [cell for cell in SUPPORT if cell not in supported("out") and cell[1] in conversion.OUTPUT_FORMATS]


@pytest.mark.parametrize(("family", "format"), NOT_OUT, ids=lambda part: part)
def test_not_out(family, format, saved, tmp_path):
    tensorflow = f"a {family} cannot be written for TensorFlow 1"
    message = tensorflow if format == "tensorflow1" else "ONNX and OpenVINO files are written of BERT"
    refused(saved(family)[0], tmp_path / "out", format, message)


@pytest.mark.parametrize("format", ONLY_IN)
def test_formats_that_are_only_read(format, saved, tmp_path, capsys):
    code = cli.main(["convert", str(saved("bert")[0]), str(tmp_path / "out"), "--to", format])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and format in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["bert-jax", "tensorflow1"])
def test_moments_that_are_not_there(format, saved, tmp_path):
    """They are not left out in silence."""
    refused(
        saved("bert")[0],
        tmp_path / "out",
        format,
        "has no optimizer moments",
        options=input_formats.ReadOptions(optimizer_state=True),
    )


def test_every_cell_is_tried():
    """Each is made or refused by a test above."""
    assert {*supported("in"), *supported("out"), *NOT_IN, *NOT_OUT} == set(SUPPORT)
    assert len(SUPPORT) == len(FAMILIES) * len(FORMATS)
    assert {format for _, format in supported("out")}.isdisjoint(ONLY_IN) and len(ONLY_IN) == 3
