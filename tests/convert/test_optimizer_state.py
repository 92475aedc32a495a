"""The optimizer's moments through `convert`, and in a run that starts from them."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.cli import main as cli
from bert_jax.config import to_dict
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.convert.init_from import load_initial_params
from bert_jax.data.cursor import Cursor
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import pretraining
from bert_jax.training.divergence import init_divergence_state
from bert_jax.training.programs import Programs, put_step_inputs
from bert_jax.training.run_directory.checkpoint import Checkpoints, checkpoint_directory
from bert_jax.training.sharding import make_mesh, put_rows
from bert_jax.training.state import Moments
from tests.cli.test_cli import CONFIG_FILE

pretrain = functools.partial(pretraining.pretrain, load_initial_params=load_initial_params)

JOURNEYS = {
    "native": ("run", "bert-jax"),
    "tensorflow1": ("native", "tensorflow1"),
    "native again": ("tensorflow1", "bert-jax"),
}
WITH_MOMENTS = ("run", *JOURNEYS)
pytestmark = pytest.mark.usefixtures("only_numpy", "quick_compilation")


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_run, only_numpy):
    """The run's model with its moments in each format, and without them; read only."""
    directory = tmp_path_factory.mktemp("moments")
    places = {"run": tiny_run} | {name: directory / name for name in (*JOURNEYS, "without", "tensorflow1 without")}
    for name, (source, to) in JOURNEYS.items():
        command = ["convert", str(places[source]), str(places[name]), "--to", to, "--optimizer-state", "keep"]
        assert cli.main(command) == 0
    convert(places["native"], places["without"], "bert-jax")
    convert(places["tensorflow1"], places["tensorflow1 without"], "tensorflow1")
    return places


def moments_of(place) -> Moments | None:
    with input_formats.open_model(place, input_formats.ReadOptions(optimizer_state=True)) as source_model:
        return source_model.optimizer_state


def starting(config, source, moments: str = "keep", **changes):
    """A run of the same recipe and one update that starts from `source`."""
    phase = dataclasses.replace(config.phases[0], steps=1, warmup_steps=0)
    start = {"source": str(source), "optimizer_state": moments}
    return config_lib.replace(config, name="second", phases=(phase,), start=start, **changes)


@pytest.mark.parametrize("name", JOURNEYS)
def test_moments_keep_every_bit(made, name, tiny_config):
    before, after = moments_of(made["run"]), moments_of(made[name])
    assert after.step == before.step == tiny_config.total_steps
    assert jax.tree.structure(after) == jax.tree.structure(before)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    for one, two in zip(jax.tree.leaves(before.mu), jax.tree.leaves(before.nu), strict=True):
        assert np.abs(one).max() > 0 and two.min() >= 0 and not np.array_equal(one, two)


def test_moments_are_dropped_by_default(made):
    assert moments_of(made["without"]) is None and moments_of(made["tensorflow1 without"]) is None
    assert not (made["without"] / "moments.safetensors").exists() and (made["native"] / "moments.safetensors").exists()
    with input_formats.open_model(made["native"]) as source_model:
        assert source_model.optimizer_state is None


@pytest.mark.parametrize("to", ["huggingface", "pytorch", "stablehlo"])
def test_formats_that_cannot_hold_moments(made, tmp_path, capsys, to):
    assert cli.main(["convert", str(made["run"]), str(tmp_path / "new"), "--to", to, "--optimizer-state", "keep"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: --optimizer-state keep: {to} cannot hold the optimizer's moments: use --to bert-jax"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["without", "tensorflow1 without"])
def test_a_source_without_moments(made, tmp_path, tiny_config, tiny_corpus, capsys, name):
    with pytest.raises(UserError, match=r"has no optimizer moments: set start\.optimizer_state new"):
        pretrain(starting(tiny_config, made[name]), [CorpusWeight(tiny_corpus)], tmp_path / "run")
    for to in ("bert-jax", "tensorflow1"):
        command = ["convert", str(made[name]), str(tmp_path / "new"), "--to", to, "--optimizer-state", "keep"]
        assert cli.main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "has no optimizer moments" in line and "--optimizer-state drop" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_first_update_is_that_of_the_run_continued(made, tiny_config, tiny_corpus):
    """One update of the same batch, on the state of the run's own checkpoint and on what each source starts with."""
    task = pretraining.open_task(tiny_config, [CorpusWeight(tiny_corpus)])
    mesh = make_mesh(tiny_config.mesh, jax.devices()[:1])
    programs = Programs(task, mesh)
    with Checkpoints(checkpoint_directory(made["run"]), 2) as checkpoints:
        continued, about = checkpoints.restore_newest(lambda about: programs.abstract_state(0))
    assert about["phase"] == 0 and int(continued.step) == tiny_config.total_steps
    batch = put_rows(task.train.rows_at(task.train.normalize_cursor(Cursor())), mesh, 8)
    update = programs.train_step(0, 1)
    shardings = jax.tree.map(lambda x: x.sharding, programs.abstract_state(0))

    def after(state):
        """Its next update, with dropout and masks of update 8 whatever it counts itself."""
        step, divergence = jax.device_put(
            (np.int32(8), jax.tree.map(np.array, init_divergence_state())), (shardings.step, shardings.divergence)
        )
        return jax.device_get(update(dataclasses.replace(state, step=step, divergence=divergence), batch, inputs)[0])

    inputs = put_step_inputs(1e-3, 1, 0, mesh)
    expected = after(continued)
    assert int(expected.optimizer.count) == 9
    for name in WITH_MOMENTS:
        config = starting(tiny_config, made[name])
        found = after(programs.state_from_initial(load_initial_params(config, Tokenizer.load(tiny_corpus))))
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
        jax.tree.map(np.testing.assert_array_equal, found.optimizer, expected.optimizer)
    config = starting(tiny_config, made["native"], "new")
    found = after(programs.state_from_initial(load_initial_params(config, Tokenizer.load(tiny_corpus))))
    assert int(found.optimizer.count) == 1
    distances = [
        np.abs(one - two).max()
        for one, two in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True)
    ]
    assert max(distances) > 1e-4


@pytest.mark.slow
def test_a_run_that_starts_with_moments(made, tmp_path, tiny_config, tiny_corpus):
    """Through `pretrain`. The sources give equal states (above), so one is enough."""
    config, source = tmp_path / "tiny.py", str(made["native"])
    config.write_text(CONFIG_FILE.format(text=json.dumps(to_dict(starting(tiny_config, "none", "new")))))
    command = ["pretrain", str(config), "--corpus", str(tiny_corpus), "--workdir", str(tmp_path / "run")]
    assert cli.main([*command, "--init_from", source, "--start.optimizer-state", "keep"]) == 0
    assert moments_of(tmp_path / "run").step == 9
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["start"]["source"] == source


def test_init_from_nothing(tmp_path, tiny_corpus, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["pretrain", "bert_tiny", "--corpus", str(tiny_corpus), "--workdir", "new"]
    common += ["--phases.0.steps", "1", "--phases.0.warmup-steps", "0"]
    for those in (["--init-from", "nowhere"], ["--init-from=nowhere"]):
        assert cli.main([*common, *those]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "nowhere does not exist" in line
    assert cli.main([*common, "--init-from"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--start.source" in line or "--init-from" in line
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_muon_has_no_moments_of_adam(tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    described = json.loads((run / "config.json").read_text())
    described["config"]["optimizer"]["name"] = "muon"
    (run / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"trained with muon.*--optimizer-state drop"):
        convert(run, tmp_path / "out", "bert-jax", input_formats.ReadOptions(optimizer_state=True))
