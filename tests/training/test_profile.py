"""``--profile A:B`` leaves a trace of those steps; test_remote.py has a window that ends before the run."""


def test_a_window_is_traced_although_the_run_ends_in_it(tiny_config, train, tmp_path):
    progress = train(tiny_config, tmp_path / "run", profile=(6, 100))
    assert progress.cursor.step == tiny_config.total_steps
    traces = list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 10_000
