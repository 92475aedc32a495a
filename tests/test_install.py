"""Install commands in messages and pages work: bert_jax itself is not on a package index."""

import configparser
import importlib.metadata
import re
from pathlib import Path

import pytest

from bert_jax.errors import install_command

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def extras():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {
        name: [line for line in text.splitlines() if line and not line.startswith("#")]
        for name, text in config["options.extras_require"].items()
    }


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def test_advice_names_the_packages_themselves(extras):
    sources = [file for package in ("bert_jax", "data_prep") for file in (ROOT / package).rglob("*.py")]
    advised = {name for file in sources for name in re.findall(r"install_command\(['\"](\w+)", file.read_text())}
    assert {"beam", "plan", "torch", "wandb"} <= advised
    for extra in (*advised, "gcs", "s3"):
        command = install_command(extra)
        assert command.startswith("pip install ") and "bert_jax" not in command and ";" not in command
        named = [name_of(word) for word in re.findall(r"'([^']+)'", command)]
        assert named == [name_of(line) for line in extras[extra]]


def test_advice_in_a_clone_that_is_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_command("gcs") == f"pip install '{ROOT}[gcs]'"


def test_advice_on_pages_is_not_a_package_index(extras):
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"install\b[^\n]*['\s]bert_jax\[", page.read_text()), f"{page}: it is on no package index"
        for names in re.findall(r"install\b[^\n]*['\"]\.\[([\w,-]+)\]", page.read_text()):
            assert set(names.split(",")) <= extras.keys(), f"{page}: {names}"


def test_extras_leave_jax_its_choice(extras):
    """Python 3.11 has jax 0.10, 3.12 has 0.11: an extra that allows one of them alone fails on the other."""
    for name in ("cuda12", "cuda13", "tpu"):
        assert extras[name] == [f"jax[{name}] >=0.10,<0.12"]
    # jax 0.10 [tpu] needs libtpu 0.0.42.*, jax 0.11 needs 0.0.48.*
    assert extras["plan"] == ["libtpu >=0.0.42,<0.1"]
    assert extras["plan-gpu"][0] == "jax[cuda13-local] >=0.10,<0.12"
