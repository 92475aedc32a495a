"""A run with every schedule, by 1, 2 and 4 processes."""

import numpy as np
import pytest

from tests.multi_process.commands import ROOT, end, lines, start

pytestmark = pytest.mark.slow

CONFIG = ROOT / "tests/training/schedules_config.py"
EXACT = ("step", "split", "mask_rate", "tokens_seen", "learning_rate")


def test_any_number_of_processes_trains_the_same(corpora, tmp_path):
    """Losses to rounding."""
    found = {}
    for processes in (1, 2, 4):
        workdir = tmp_path / str(processes)
        words = ["pretrain", str(CONFIG), "--corpus", str(corpora[0]), "--workdir", str(workdir)]
        for code, _, err in end(start(words, processes)):
            assert code == 0, err[-3000:]
        found[processes] = lines(workdir)
    expected = found.pop(1)
    assert len({line.get("mask_rate") for line in expected}) > 10
    for run in found.values():
        for line, wanted in zip(run, expected, strict=True):
            assert line.keys() == wanted.keys()
            assert [line.get(name) for name in EXACT] == [wanted.get(name) for name in EXACT]
            for name in wanted.keys() - {*EXACT}:
                np.testing.assert_allclose(line[name], wanted[name], rtol=2e-4, atol=1e-6, err_msg=name)
