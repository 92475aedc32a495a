"""An optimizer whose arrays are split over 8 devices computes the same updates as numpy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).with_name("optimizer_worker.py")
ROOT = WORKER.parents[2]
LAMB = {"name": "lamb", "weight_decay": 0.1}
CASES = {
    # name: (config, whether a parameter is frozen)
    "adamw": ({"weight_decay": 0.1}, False),
    "google": (LAMB | {"lamb_flavour": "google"}, False),
    "nvidia, bounds, frozen": (LAMB | {"min_trust_ratio": 1.5, "max_trust_ratio": 4.0}, True),
}


@pytest.fixture(scope="module")
def cases():
    command = [sys.executable, str(WORKER), json.dumps(list(CASES.values()))]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return dict(zip(CASES, json.loads(process.stdout), strict=True))


def test_arrays_are_really_split(cases):
    """Every logical tensor of the large arrays is split over several devices."""
    split = {
        "encoder/embeddings/word": [6, 3],
        "encoder/layers/qkv/kernel": [2, 3, 3, 1, 4],
        "encoder/layers/qkv/bias": [2, 3, 1, 4],
        "encoder/layers/down/kernel": [2, 2, 3],
        "mlm/transform/kernel": [3, 6],
        "mlm/bias": [6],
    }
    for case in cases.values():
        for shards in (case["shards"], case["moment_shards"]):
            assert {name: shards[name] for name in split} == split


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_numpy(cases, name):
    case = cases[name]
    assert max(case["distances"].values()) < 1e-5
    unchanged = {parameter for parameter, distance in case["moved"].items() if distance == 0}
    assert unchanged == ({"encoder/layers/down/kernel"} if CASES[name][1] else set())
    for metrics, expected in zip(case["records"], case["expected_records"], strict=True):
        assert metrics.keys() == expected.keys()
        for metric, value in expected.items():
            np.testing.assert_allclose(metrics[metric], value, rtol=1e-5, atol=1e-9, err_msg=metric)


@pytest.mark.parametrize("name", CASES)
def test_a_non_finite_gradient_on_one_device_skips_the_step(cases, name):
    assert cases[name]["skipped"] == 1 and cases[name]["unchanged"]
