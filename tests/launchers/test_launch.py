"""`bert-jax launch` writes the packaged scripts and overwrites nothing; a wheel contains them."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bert_jax import launchers
from bert_jax.cli import main as cli

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bert_jax" / "launchers"


@pytest.mark.parametrize(("cluster", "names"), launchers.SCRIPTS.items())
def test_scripts_are_written_as_packaged(tmp_path, capsys, cluster, names):
    out = tmp_path / "new" / "launch"
    assert cli.main(["launch", cluster, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {out / name}" for name in names]
    for name in names:
        assert (out / name).read_bytes() == (PACKAGE / name).read_bytes()
    (out / names[0]).write_text("mine")
    (out / names[0]).rename(out / names[-1])
    assert cli.main(["launch", cluster, "--out", str(out)]) == 2
    assert f"{out / names[-1]} exists already" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [names[-1]] and (out / names[-1]).read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["pbs", "--out", "x"], "launch pbs: give slurm, tpu or kubernetes"), (["slurm"], "launch slurm needs --out DIR")],
)
def test_mistakes(capsys, words, message):
    assert cli.main(["launch", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_wheel_contains_all_files(tmp_path):
    """Builds offline, with the setuptools and wheel of the environment."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
    copy = tmp_path / "clone"
    copy.mkdir()
    for name in ("LICENSE", "README.md", "setup.cfg", "setup.py", "bert_jax", "data_prep", "configs"):
        (copy / name).symlink_to(ROOT / name)
    done = subprocess.run([*build, str(copy)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    files = {"py.typed", "launchers/slurm.sbatch", "launchers/tpu_pod.sh", "launchers/tpu_worker.sh"}
    files |= {
        "launchers/kubernetes.py",
        "launchers/jobset.yaml",
        "configs/bert_base.py",
        "doctor/curves/bert_mini.json",
    }
    missing = {file for file in files if not any(name.startswith(f"bert_jax/{file}") for name in names)}
    assert not missing and "data_prep/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "scripts"))]
