"""``--profile A:B`` leaves a trace of those steps, also when the run ends inside the window."""

import pytest

from bert_jax.data.mixture import CorpusWeight
from bert_jax.training import pretraining
from bert_jax.training.run_directory.metrics import read_metrics


@pytest.mark.parametrize("window", [(3, 5), pytest.param((6, 100), marks=pytest.mark.slow)])
def test_a_window_is_traced(tiny_config, tiny_corpus, tiny_programs, tmp_path, window):
    programs, workdir = tiny_programs(), tmp_path / "run"
    parts = [CorpusWeight(tiny_corpus)]
    progress = pretraining.pretrain(tiny_config, parts, workdir, profile=window, make_programs=programs)
    assert progress.cursor.step == tiny_config.total_steps
    traces = list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 10_000


def test_speed_is_reported(tiny_run):
    """Beside the reproducible figures, in their own field."""
    lines = [line for line in read_metrics(tiny_run / "metrics.jsonl") if line["split"] == "train"]
    assert {"tokens_per_second", "mfu", "step_seconds", "unix"} <= lines[-1]["timing"].keys()
    assert all(0 < line["timing"]["tokens_per_second"] < 1e9 for line in lines)
    assert {"loss", "mlm_accuracy", "learning_rate", "gradient_norm", "update_norm", "tokens_seen"} <= lines[0].keys()
