"""Runs every command of the README and the task pages, with flags that make it small."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores import use_s3

ROOT = Path(__file__).parent.parent
# docs/corpus.md has its own test beside the code it documents (tests/data_prep/test_cli.py).
TASKS = ["pretrain", "large_batch", "stream", "ablation", "conversion", "pods", "performance", "object_stores"]
TASKS += ["scaling", "plan", "slurm", "doctor", "tpu", "kubernetes", "tutorials/own_text", "tutorials/other_models"]
AS_WRITTEN = "docs/reference.md"
"""A page whose commands compare with fixed figures: smaller runs would be refused."""
PAGES = ["README.md", AS_WRITTEN, *(f"docs/{task}.md" for task in TASKS)]
SMALL_RUN = (
    "--model.vocab-size 120 --model.hidden-size 64 --model.num-layers 1 --model.num-heads 2 "
    "--model.intermediate-size 96 --model.max-positions 64 --phases.0.steps 3 --phases.0.seq-len 32 "
    "--phases.0.batch-size 8 --phases.0.accumulation 1 --evaluation.rows 8 --evaluation.batch-size 8"
)
SMALLER = {
    "pretrain": SMALL_RUN,
    "doctor": SMALL_RUN,
    "plan": f"{SMALL_RUN} --topology v5e:2x2",
    "scripts/benchmarks/bench_loop.py": (
        "--preset bert_tiny --seq-len 16 --batch 2 --steps 2 --log-every 2 --rounds 1"
    ),
    "scripts/benchmarks/bench_optimizer.py": "--preset bert_tiny --rounds 1",
    "scripts/benchmarks/calibrate_roofline.py": "--presets bert_tiny --rounds 1 --seconds 0.01",
    "tokenizer": "--vocab-size 120",
    "build": "--workers 1 --validation-fraction 0.2",
    "scripts/benchmarks/bench.py": "--budget 30",
    "scripts/benchmarks/bench_stream.py": (
        "--rounds 1 --seconds 0.1 --seq-lens 32 --documents 1000 --tokens 100000 --preset bert_tiny --steps 4 --batch 8"
    ),
    "scripts/benchmarks/bench_masking.py": "--preset bert_tiny --seq-len 16 --batch 2 --rounds 1 --calls 1",
}


WITH_PYTHON = ["docs/conversion.md", "docs/tutorials/other_models.md"]
"""Pages whose Python blocks are run after their commands."""


def python_of(page: str) -> str:
    """All ```python blocks, concatenated."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S))


def commands_of(page: str) -> list[str]:
    """The lines of all ```bash blocks, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.strip()]


def shrink(line: str) -> list[str]:
    """The words of a command, with flags that make it small in place of its own."""
    words = shlex.split(line)
    smaller = shlex.split(SMALLER.get(words[1], ""))
    two_phases = ("bert_base", "bert_large", "bert_large_76min", "bert_large_lamb")
    if words[0] == "bert-jax" and words[1] in ("pretrain", "plan") and words[2] in two_phases:
        smaller += shlex.split(
            "--phases.1.steps 1 --phases.1.seq-len 32 --phases.1.batch-size 8 --phases.1.accumulation 1"
        )
    given = {flag for flag in smaller if flag.startswith("--")}
    kept, skip = [], False
    for word in words:
        skip = word in given or (skip and not word.startswith("--"))
        if not skip:
            kept.append(word)
    return kept + smaller


@pytest.fixture
def folder(tmp_path, tiny_corpus, second_corpus, tiny_run, tiny_export):
    """A directory with `my_texts/`, `corpus/`, `other/`, a finished `runs/first` and `their_model`."""
    (tmp_path / "my_texts").mkdir()
    for index, document in enumerate((tiny_corpus.parent / "text.txt").read_text().split("\n\n")):
        (tmp_path / "my_texts" / f"{index}.txt").write_text(document)
    shutil.copytree(tiny_corpus, tmp_path / "corpus")
    shutil.copytree(second_corpus, tmp_path / "other")
    shutil.copytree(tiny_run, tmp_path / "runs" / "first")
    shutil.copytree(tiny_export, tmp_path / "their_model")
    return tmp_path


@pytest.fixture
def models(folder, tiny_export):
    """`folder` with models in other formats, as docs/conversion.md assumes."""
    import torch

    from tests.convert.test_nvidia import examples_name
    from tests.live import zoo

    tests = ROOT / "tests"
    shutil.copytree(tiny_export, folder / "all-MiniLM-L6-v2")
    shutil.copytree(tests / "golden/tensor_bundle/bert", folder / "uncased_L-12_H-768_A-12")
    for place in ("roberta.large.mnli", "nvidia"):
        (folder / place).mkdir()
    shutil.copy(tests / "convert/fixtures/fairseq/new.pt", folder / "roberta.large.mnli/model.pt")
    hf_model = zoo.build("bert", "ForPreTraining")
    state = {examples_name(name): t for name, t in hf_model.state_dict().items() if not name.endswith("decoder.bias")}
    torch.save({"model": state}, folder / "nvidia/ckpt_8601.pt")
    hf_model.config.to_json_file(folder / "nvidia/bert_config.json")
    return folder


def run(words: list[str], folder: Path) -> None:
    program = {"bert-jax": ["-m", "bert_jax"], "bert-data": ["-m", "data_prep"], "python": []}[words[0]]
    words = words[: words.index(">")] if ">" in words else words
    arguments = [str(ROOT / word) if word.startswith("scripts/") else word for word in words[1:]]
    command = [sys.executable, *program, *arguments]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())
    assert process.returncode == 0, f"{shlex.join(words)}\n{process.stderr[-3000:]}"


def environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page, folder, request, monkeypatch):
    lines = [line for line in commands_of(page) if line.startswith(("bert-jax", "bert-data", "python"))]
    assert lines, f"{page} shows no command"
    makes_first = [line for line in lines if "pretrain" in line and "--workdir runs/first" in line]
    if makes_first:
        shutil.rmtree(folder / "runs" / "first")
    if page == "docs/object_stores.md":
        address, _ = request.getfixturevalue("s3_server")
        use_s3(monkeypatch, address, "my-bucket")
        monkeypatch.setenv("BERT_JAX_CACHE", str(folder / "cache"))
    if page in ("README.md", "docs/tutorials/own_text.md"):
        shutil.rmtree(folder / "corpus")
    if page == "docs/conversion.md":
        pytest.importorskip("transformers")
        request.getfixturevalue("models")
    for line in lines:
        run(shlex.split(line) if page == AS_WRITTEN else shrink(line), folder)
    if page in WITH_PYTHON:
        run(["python", "-c", python_of(page)], folder)


@pytest.mark.parametrize("page", ["docs/tpu.md"])
def test_commands_for_slices_are_printed(page):
    """Dry runs: as written, with `--dry-run` where it is missing."""
    lines = [line for line in commands_of(page) if line.startswith("bash launch/tpu_pod.sh")]
    assert any("--dry-run" in line for line in lines) and not all("--dry-run" in line for line in lines)
    for line in lines:
        program, script, verb, *rest = shlex.split(line)
        words = [
            program,
            str(ROOT / "bert_jax" / script.replace("launch/", "launchers/")),
            verb,
            *([] if "--dry-run" in rest else ["--dry-run"]),
            *rest,
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0 and "gcloud compute tpus" in done.stdout, f"{line}\n{done.stderr}"


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for page in {*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "index.md"}:
        assert f"docs/{page.name}" in readme, f"README.md does not link {page.name}"


def test_readme_names_only_flags_that_exist():
    """Flags in running text, too: `--phases.0.batch-size` and the like."""
    import dataclasses

    from bert_jax.config.presets import load_config
    from bert_jax.distributed.cluster_detection import ClusterConfig

    known = {"--help", "--all", "--json", "--to", "--corpus", "--workdir", "--profile", "--source", "--kind", "--out"}
    known |= {"--formats", "--documents", "--tokens", "--preset", "--seq-len", "--batch"}
    known |= {"--hosts", "--devices", "--topology", "--cluster.coordinator", "--cluster.processes", "--cluster.process"}
    known |= {"--micro-batch", "--plot", "--log.no-layers", "--against", "--wrong"}
    known |= {"--rounds", "--plot", "--format", "--seq-len", "--rows"}
    known |= {"--init-from", "--optimizer-state", "--drop", "--trim-vocabulary", "--force", "--pooling"}
    known |= {
        "--nodes",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--time",
        "--signal",
        "--constraint",
    }  # sbatch's, pip's
    known |= {"--topology", "--search", "--price-per-chip-hour", "--phases.1.batch-size"}
    known |= {
        "--help-all",
        "--lr",
        "--vocab-size",
        "--tokenizer",
        "--workers",
        "--presets",
        "--budget",
        "--peer",
        "--validation-fraction",
    }

    def flags(value, prefix):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            name = f"{prefix}{field.name.replace('_', '-')}"
            if dataclasses.is_dataclass(inner):
                yield from flags(inner, f"{name}.")
            else:
                yield f"--{name}"

    for launcher in ("tpu_pod.sh", "kubernetes.py"):
        known |= set(re.findall(r"--[a-z][a-z-]*\w", (ROOT / "bert_jax" / "launchers" / launcher).read_text()))
    known |= {f"--cluster.{field.name}" for field in dataclasses.fields(ClusterConfig)} | {"--compilation-cache"}
    known |= {
        "--recursive",
        "--build-arg",
        "--tag",
        "--filename",
        "--follow",
        "--selector",
        "--prefix",
    }  # of other tools
    config = load_config("bert_base")
    known |= set(flags(config, "")) | set(flags(config.phases[0], "phases.0."))
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])--[a-z][\w.\-]*\w", (ROOT / page).read_text()))
        assert used <= known, f"{page}: {sorted(used - known)}"


def test_the_files_of_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = re.findall(r"`((?:bert_jax|data_prep)/[\w/]+\.py)`", text)
    assert len(files) > 15 and [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.slow
def test_quickstart(tmp_path):
    """The whole script with 30 steps, and again on its finished output."""
    import json
    import os

    directory = tmp_path / "quickstart"
    venv = os.environ.get("BERT_JAX_VENV", sys.prefix)
    smaller = ["--phases.0.steps", "30", "--evaluation.rows", "32"]
    for _ in range(2):
        process = subprocess.run(
            ["bash", str(ROOT / "scripts" / "quickstart.sh"), str(directory), *smaller],
            capture_output=True,
            text=True,
            env=os.environ | {"BERT_JAX_VENV": venv},
        )
        assert process.returncode == 0, process.stderr[-3000:]
        assert "What to try next" in process.stdout
    summary = json.loads((directory / "summary.json").read_text())
    assert {"heldout", "baseline", "tokens_seen", "seconds", "export"} <= summary.keys()
    assert {"mlm_loss", "mlm_accuracy", "pair_accuracy"} == summary["heldout"].keys()
    assert summary["baseline"].keys() == summary["heldout"].keys() and summary["baseline"]["pair_accuracy"] >= 0.5
    assert 4 < summary["baseline"]["mlm_loss"] < 8 and 5 < summary["heldout"]["mlm_loss"] < 10
    assert (Path(summary["export"]) / "model.safetensors").is_file()
