"""``--profile A:B`` leaves a trace of those steps, also when the run ends inside the window."""

import pytest


@pytest.mark.parametrize("window", [(3, 5), pytest.param((6, 100), marks=pytest.mark.slow)])
def test_a_window_is_traced(tiny_config, train, tmp_path, window):
    progress = train(tiny_config, tmp_path / "run", profile=window)
    assert progress.cursor.step == tiny_config.total_steps
    traces = list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 10_000
