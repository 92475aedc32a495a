"""Where the commands of pages run, and the compiled steps that they share."""

import inspect
import shutil

import pytest

from bert_jax.finetune import finetune
from bert_jax.training import pretraining
from bert_jax.training.shared_programs import share_programs
from tests.pages import code_of


@pytest.fixture(scope="module", autouse=True)
def shared_steps():
    """Commands of a module's pages share compiled steps, as the runs of a study do."""
    share = share_programs()
    with pytest.MonkeyPatch.context() as patch:
        for function in (pretraining.pretrain, pretraining.evaluate_model):
            patch.setitem(inspect.unwrap(function).__kwdefaults__, "make_programs", share)
        patch.setattr(finetune, "share_programs", lambda: share)
        yield


@pytest.fixture
def folder(tmp_path, tiny_corpus, second_corpus, tiny_run, tiny_export):
    """A directory with `my_texts/`, `corpus/`, `other/`, `my_study.py`, a finished `runs/first` and `their_model`."""
    (tmp_path / "my_texts").mkdir()
    for index, document in enumerate((tiny_corpus.parent / "text.txt").read_text().split("\n\n")):
        (tmp_path / "my_texts" / f"{index}.txt").write_text(document)
    study = code_of("docs/ablation.md", "python")
    assert "steps=2000" in study and "seeds=3" in study
    (tmp_path / "my_study.py").write_text(study.replace("steps=2000", "steps=4").replace("seeds=3", "seeds=1"))
    shutil.copytree(tiny_corpus, tmp_path / "corpus")
    shutil.copytree(second_corpus, tmp_path / "other")
    shutil.copytree(tiny_run, tmp_path / "runs" / "first")
    shutil.copytree(tiny_export, tmp_path / "their_model")
    return tmp_path
