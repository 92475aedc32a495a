"""What README.md and docs/ say, against the code: links, files, flags; and the commands of the cheapest pages."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax.analysis.analyse import command_type
from bert_jax.command.flags import list_flags
from bert_jax.launchers.kubernetes import Kubernetes
from data_prep.cli import main as data_prep_cli
from data_prep.sources import python_docs
from tests.cli.test_flags import ARGUMENTS, flags_of
from tests.pages import PAGES, ROOT, lines_of, run, run_page

OTHER_FLAGS = """
--all --array --batch --budget --build-arg --chip --compilation-cache --constraint --corpus --cpus-per-task --documents
--dry --export --filename --floor --follow --formats --gpus-per-node --help --help-all --layers --lr --model --nodes
--ntasks --ntasks-per-node --peer --phases.1.batch-size --plot --prefix --preset --presets --recursive --requeue
--rounds --figure --published --seeds --selector --seq-len --seq-lens --serve --signal --stages --steps --sweep --tag
--time --tokens --wrap --wrong --xla_gpu_deterministic_ops
"""
"""Of scripts and of other programs."""
FOLDERS = ("bert_jax", "configs", "data_prep", "docs", "scripts", "tests")
ALL_PAGES = sorted(page.relative_to(ROOT) for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
CODE = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")]


@pytest.mark.parametrize("page", ["docs/kubernetes.md"])
def test_commands(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch)


def test_commands_for_slices_are_printed():
    """Dry runs: as written, with `--dry-run` where it is missing."""
    lines = [line for line in lines_of("docs/tpu.md") if line.startswith("bash launch/tpu_pod.sh")]
    assert any("--dry-run" in line for line in lines) and not all("--dry-run" in line for line in lines)
    for line in lines:
        program, script, verb, *rest = shlex.split(line)
        dry = [] if "--dry-run" in rest else ["--dry-run"]
        words = [program, str(ROOT / "bert_jax" / script.replace("launch/", "launchers/")), verb, *dry, *rest]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0 and "gcloud compute tpus" in done.stdout, f"{line}\n{done.stderr}"


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for page in {*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "index.md"}:
        assert f"docs/{page.name}" in readme, f"README.md does not link {page.name}"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the documentation site name them."""
    headings = re.findall(r"(?m)^#+ (.*)", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=str)
def test_links_lead_to_files_and_headings(page):
    """A link to a directory works in a checkout, but not in the documentation site."""
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", (ROOT / page).read_text())
    for target in re.findall(r"\]\(<?([^)>\s]+)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = ROOT / page.parent / name if name else ROOT / page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors_of(linked), target
    for target, date in re.findall(r"\]\(([^)\s]*log/\w+\.md)\)(?:,| of) (\d{4}-\d\d-\d\d)", text):
        assert f"\n## {date}: " in (ROOT / page.parent / target).read_text(), f"{target} has no entry of {date}"


def test_pages_that_the_code_names_exist():
    """Comments, docstrings and scripts cite pages, and entries of the log by their date."""
    cited = 0
    for file in [*CODE, *(ROOT / "constraints").iterdir(), ROOT / "setup.cfg"]:
        text = re.sub(r"\n[# ]*", " ", file.read_text())
        for page, date in re.findall(r"(?<!/)\b(docs/[\w/-]+\.(?:md|html|json|png|svg))(?:, (\d{4}-\d\d-\d\d))?", text):
            assert (ROOT / page).is_file(), f"{file}: {page}"
            assert not date or f"\n## {date}: " in (ROOT / page).read_text(), f"{file}: {page} has no entry of {date}"
            cited += page.startswith("docs/log/")
    assert cited > 25


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "log").glob("*.md")), ids=lambda page: page.stem)
def test_the_log_marks_figures_whose_script_is_gone(page):
    here = {path.name for path in CODE}
    for entry in re.split(r"(?m)^## ", page.read_text())[1:]:
        title, *paragraphs = re.split(r"\n\n|\n(?=- )", entry)
        assert re.match(r"\d{4}-\d\d-\d\d: ", title), title
        for paragraph in paragraphs if "† Whole entry." not in paragraphs else []:
            gone = set(re.findall(r"\b[a-z_]+\.(?:py|sh)\b", paragraph)) - here
            assert not gone or "†" in paragraph, f"{title}: {sorted(gone)}"


def test_pages_name_only_flags_that_exist():
    """Flags in running text, too: `--phases.0.batch-size` and the like."""
    known = set(OTHER_FLAGS.split())
    fields = [flag for command in ARGUMENTS for flag in flags_of(command)]
    for command in (*data_prep_cli.COMMANDS.values(), Kubernetes, command_type()):
        fields += list_flags(command)
    known |= {name for flag in fields for name in flag.names}
    known |= set(re.findall(r"--[a-z][a-z-]*\w", (ROOT / "bert_jax" / "launchers" / "tpu_pod.sh").read_text()))
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])--[a-z][\w.\-]*\w", (ROOT / page).read_text()))
        assert used <= known, f"{page}: {sorted(used - known)}"


def test_files_that_pages_name_exist():
    """Except files of an earlier commit, which is named, and the log, whose entries are of their date."""
    named = 0
    for page in ALL_PAGES:
        text = "" if page.parent.name == "log" else (ROOT / page).read_text()
        files = re.findall(r"`((?:bert_jax|data_prep|scripts|tests)/[\w/]+\.\w+)`(?! of [0-9a-f]{8})", text)
        assert [file for file in files if not (ROOT / file).is_file()] == [], page
        named += len(files)
    assert named > 30


def test_pages_of_studies_have_their_results_beside_them():
    """Four are older than the provenance of results, and their files were not kept."""
    pages = {path.stem for path in (ROOT / "docs" / "studies").glob("*.html")}
    files = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "studies").glob("*.json")}
    assert pages - files.keys() <= {"aa_tiny", "masking_tiny", "rtd_tiny", "schedules_tiny"}
    assert files.keys() <= pages and all("provenance" in values for values in files.values())


def test_the_architecture_has_every_package():
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = set(re.findall(r"(?m)^\| `(\w+)/` \|", text))
    assert packages == {path.parent.name for path in (ROOT / "bert_jax").glob("*/__init__.py")}
    figure = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    assert [package for package in packages if f">{package}<" not in figure] == []


@pytest.mark.slow
def test_quickstart(tmp_path, monkeypatch):
    """The whole script with 12 steps, and again on its finished output. It warns of nothing. Its first two commands
    run before it, on a tenth of the text.
    """
    directory = tmp_path / "quickstart"
    directory.mkdir()
    monkeypatch.setattr(python_docs, "MAX_BYTES", 2_000_000)
    script = (ROOT / "scripts" / "quickstart.sh").read_text().replace("\\\n", " ").replace("$run", str(directory))
    commands = re.findall(r"step (bert-data .*)", script)
    assert len(commands) == 2
    for command in commands:
        run(shlex.split(command))
    venv = os.environ.get("BERT_JAX_VENV", sys.prefix)
    smaller = ["--phases.0.steps", "12", "--phases.0.warmup-steps", "3", "--optimizer.beta2", "0.9"]
    smaller += ["--evaluation.rows", "32", "--evaluation.every", "12", "--checkpoint.every", "12", "--log.every", "4"]
    for _ in range(2):
        process = subprocess.run(
            ["bash", str(ROOT / "scripts" / "quickstart.sh"), str(directory), *smaller],
            capture_output=True,
            text=True,
            env=os.environ | {"BERT_JAX_VENV": venv},
        )
        assert process.returncode == 0, process.stderr[-3000:]
        assert "What to try next" in process.stdout and "warning" not in process.stdout + process.stderr
    summary = json.loads((directory / "summary.json").read_text())
    assert {"heldout", "baseline", "tokens_seen", "seconds", "export"} <= summary.keys()
    assert {"mlm_loss", "mlm_accuracy", "pair_accuracy"} == summary["heldout"].keys()
    assert summary["baseline"].keys() == summary["heldout"].keys() and summary["baseline"]["pair_accuracy"] >= 0.5
    assert 4 < summary["baseline"]["mlm_loss"] < 8 and 5 < summary["heldout"]["mlm_loss"] < 10
    assert (Path(summary["export"]) / "model.safetensors").is_file()
