"""``--profile A:B`` leaves a trace of those steps, also when the run ends inside the window."""

import pytest

from bert_jax.data.mixture import CorpusWeight
from bert_jax.training import pretraining


@pytest.mark.parametrize("window", [(3, 5), pytest.param((6, 100), marks=pytest.mark.slow)])
def test_a_window_is_traced(tiny_config, tiny_corpus, tiny_programs, tmp_path, window):
    programs, workdir = tiny_programs(), tmp_path / "run"
    parts = [CorpusWeight(tiny_corpus)]
    progress = pretraining.pretrain(tiny_config, parts, workdir, profile=window, make_programs=programs)
    assert progress.cursor.step == tiny_config.total_steps
    traces = list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 10_000
