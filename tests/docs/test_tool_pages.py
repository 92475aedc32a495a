"""The commands of the pages on conversion, the doctor, measurements and launchers."""

import shlex
import shutil

import pytest

from tests.finetune import task_files
from tests.pages import ROOT, SMALL_RUN, TOOLS, code_of, run, run_page, shrink

pytestmark = pytest.mark.slow


@pytest.fixture
def models(folder, tiny_export):
    """`folder` with models in other formats, as docs/conversion.md assumes."""
    pytest.importorskip("transformers")
    import torch

    from tests.convert.test_nvidia import examples_name
    from tests.golden.make_families import make

    tests = ROOT / "tests"
    shutil.copytree(tiny_export, folder / "all-MiniLM-L6-v2")
    shutil.copytree(tests / "golden/tensor_bundle/bert", folder / "uncased_L-12_H-768_A-12")
    for place in ("roberta.large.mnli", "nvidia"):
        (folder / place).mkdir()
    shutil.copy(tests / "convert/fixtures/fairseq/new.pt", folder / "roberta.large.mnli/model.pt")
    hf_model = make("BertForPreTraining", 0)
    state = {examples_name(name): t for name, t in hf_model.state_dict().items() if not name.endswith("decoder.bias")}
    torch.save({"model": state}, folder / "nvidia/ckpt_8601.pt")
    hf_model.config.to_json_file(folder / "nvidia/bert_config.json")
    return folder


@pytest.mark.parametrize("page", TOOLS)
def test_commands(page, folder, monkeypatch, quick_compilation):
    run_page(page, folder, monkeypatch)


def test_commands_on_scaling(folder, monkeypatch, capsys):
    """As written, of the file of the sweep that is in the repository."""
    (folder / "docs").symlink_to(ROOT / "docs")
    run_page("docs/scaling.md", folder, monkeypatch, words_of=shlex.split)
    assert "efficiencies that fit: matmul" in capsys.readouterr().out


def test_commands_on_other_formats(models, monkeypatch, quick_compilation):
    run_page("docs/conversion.md", models, monkeypatch)


def test_commands_on_fine_tuning(folder, monkeypatch, quick_compilation):
    task_files.write_glue(folder / "sst2", "sst2")
    task_files.write_tagging(folder / "tags")
    task_files.write_squad(folder / "questions")
    (folder / "reviews").mkdir()
    for split in ("train", "dev"):
        lines = [f"{' '.join(row)},{i % 3 + 1}" for i, row in enumerate(task_files.sentences(1, 12))]
        (folder / "reviews" / f"{split}.csv").write_text("\n".join(["review,stars", *lines]))
    run_page("docs/finetuning.md", folder, monkeypatch)


def test_commands_on_distillation(folder, monkeypatch, quick_compilation):
    """The teacher has six layers; the matches are those of the page."""
    task_files.write_glue(folder / "sst2", "sst2")
    (folder / "matches.json").write_text(code_of("docs/compression/distillation.md", "json"))
    monkeypatch.chdir(folder)
    six_layers = SMALL_RUN.replace("--model.num-layers 1", "--model.num-layers 6").split()
    run(["bert-jax", "pretrain", "bert_tiny", "--corpus", "corpus", "--workdir", "runs/books", *six_layers])
    run(shrink("bert-jax finetune runs/books --task sst2 --data sst2 --workdir runs/sst2"))
    run_page("docs/compression/distillation.md", folder, monkeypatch)


@pytest.mark.parametrize("page", ["quantisation", "pruning"])
def test_commands_on_a_fine_tuned_model(page, folder, monkeypatch, quick_compilation):
    task_files.write_glue(folder / "sst2", "sst2")
    monkeypatch.chdir(folder)
    run(shrink("bert-jax finetune runs/first --task sst2 --data sst2 --workdir runs/sst2"))
    run_page(f"docs/compression/{page}.md", folder, monkeypatch)


def test_commands_on_the_reference_run(tmp_path, monkeypatch):
    """As written: their figures are compared with fixed ones."""
    run_page("docs/reference.md", tmp_path, monkeypatch, words_of=shlex.split)


def test_commands_on_serving(folder, tiny_export, monkeypatch, quick_compilation):
    task_files.write_glue(folder / "sst2", "sst2")
    shutil.copytree(tiny_export, folder / "my_bert")
    monkeypatch.chdir(folder)
    run(shrink("bert-jax finetune my_bert --task sst2 --data sst2 --workdir sst2_runs --max-length 64"))
    run(["bert-jax", "convert", "sst2_runs", "my_sst2"])
    run(["bert-jax", "convert", "my_sst2", "sst2_int8", "--to", "onnx-int8"])
    run_page("docs/compression/serving.md", folder, monkeypatch)
