"""Models and runs of every format version that was ever released are read by today's code (golden/make_formats.py)."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.cli import main as cli
from bert_jax.convert.formats import input_formats, native
from bert_jax.errors import UserError
from bert_jax.training.run_directory import checkpoint, commit
from tests.golden.make_formats import CONFIG, FORMATS, WORDS, digest

pytestmark = pytest.mark.usefixtures("only_numpy")
DIGESTS = json.loads((FORMATS / "digests.json").read_text())
MOST_BYTES = 200_000


def sums_of(place) -> str:
    with input_formats.open_model(place) as source_model:
        return digest(source_model.model.params)


def test_every_version_has_a_place():
    """Whoever raises a version adds what it writes."""
    there = {path.name for path in FORMATS.iterdir() if path.is_dir()}
    assert there == DIGESTS.keys() >= {f"model-{native.FORMAT_VERSION}", f"run-{checkpoint.FORMAT_VERSION}"}
    assert sum(path.stat().st_size for path in FORMATS.rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.parametrize("name", DIGESTS)
def test_it_is_loaded(name):
    model = bert_jax.load(FORMATS / name)
    assert digest(model.params) == DIGESTS[name]
    config = dataclasses.replace(model.config, scan_unroll=None, dense_dtype="compute")
    assert (
        config == CONFIG.model
        and (model.config.dense_dtype == "int8") == name.endswith("-int8")
        and model.heads.mlm
        and model.heads.pair
    )
    vectors = model.encode(["the old river sings", "a stone"])
    assert vectors.shape == (2, 8) and np.isfinite(vectors).all()
    assert model.tokenizer.decode(model.tokenizer.encode("The river falls.")) == "the river falls."
    assert {candidate.token for candidate in model.fill_mask("the [MASK]", top=12)[0]} >= set(WORDS)


@pytest.mark.parametrize("name", DIGESTS)
def test_it_is_converted(name, tmp_path):
    command = ["convert", str(FORMATS / name), str(tmp_path / "new"), "--to", "bert-jax", "--optimizer-state", "keep"]
    assert cli.main(command) == 0
    assert sums_of(tmp_path / "new") == DIGESTS[name]
    with input_formats.open_model(tmp_path / "new", input_formats.ReadOptions(optimizer_state=True)) as source_model:
        found = source_model.optimizer_state
    assert found.step == 1 and found.mu.keys() == found.nu.keys() == bert_jax.load(FORMATS / name).params.keys()
    assert cli.main(["convert", str(tmp_path / "new"), str(tmp_path / "huggingface")]) == 0
    assert sums_of(tmp_path / "huggingface") == DIGESTS[name]


def test_a_digest_sees_every_value():
    params = bert_jax.load(FORMATS / "model-3").params
    changed = jax.tree.map(np.array, params)
    changed["mlm"]["bias"][3] = np.nextafter(changed["mlm"]["bias"][3], 1)
    assert digest(params) == DIGESTS["model-3"] != digest(changed)


@pytest.mark.parametrize(("version", "remedy"), [(5, "use the version that wrote it"), (7, "update bert_jax")])
def test_other_versions_of_checkpoints_are_refused(tmp_path, version, remedy):
    run = shutil.copytree(FORMATS / "run-6", tmp_path / "run")
    (save,) = (run / "checkpoints").iterdir()
    about = json.loads((save / "run.json").read_text())
    assert about["format_version"] == 6
    (save / "run.json").write_text(json.dumps(about | {"format_version": version}))
    restored = checkpoint.checkpoint_directory(run) / save.name
    commit.write_commit(restored, commit.checksums_of_this_process(restored))
    with pytest.raises(
        UserError, match=f"{re.escape(str(save))}/run.json has format version {version}, .* reads 6: {remedy}"
    ):
        bert_jax.load(run)
