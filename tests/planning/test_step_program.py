"""Budgets of the train step's programs for an H200 and a TPU v5e: what kernels, bytes and instructions may not exceed.

Of three layers; the figures are those of scripts/benchmarks/step_program.py. A change that needs more raises a limit
here, with its reason. The compiler's output is kept between runs (bert_jax/planning/compiler_output.py).
"""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from bert_jax.bench.train_step import Case
from bert_jax.chips import CHIPS, Sizes
from bert_jax.cli import main as cli
from bert_jax.config import presets
from bert_jax.distributed.jax_setup import cuda_plugin_versions
from bert_jax.planning.workload import count_parameters
from bert_jax.training.pretraining_task import model_spec
from tests.pages import load_script

script = load_script(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "step_program.py")
LAYERS = 3
REST = "all but products and attention"
LIMITS = {
    ("bert_large", 512, 32): {"layer kernels": 18, "layer GB": 1.40, "copies ms": 0.24, "rest ms": 2.36},
    ("bert_base", 128, 256): {"layer kernels": 18, "layer GB": 2.00, "copies ms": 0.18, "rest ms": 2.75},
}
"""By preset, tokens and rows: kernels and GB of one layer, milliseconds at 4.0 TB/s of the copies of all, and of all
work, other than products and attention."""
LOOPS = {"forward_kernel": 640, "query_gradient_kernel": 575, "key_gradient_kernel": 715}
"""Instructions of the loops of attention over blocks of 64 x 64, with dropout."""
NORMS = {"dropout_add_norm": 0, "dropout_add_norm_backward": 660}
"""Instructions of the loops of the kernels of norms, over eight elements of a thread in each of two or three tiles."""
OPTIMIZER = {"instructions": 700, "two-byte loads": 0}
"""Of each kernel, where gradients that are concatenated inside need 5,632 and 768."""


@pytest.mark.slow
@pytest.mark.skipif(not cuda_plugin_versions(), reason="the extra plan-gpu is not installed")
@pytest.mark.parametrize("step", LIMITS, ids=lambda step: step[0])
def test_budgets(step):
    case = Case(*step, dtype="bfloat16", attention="pallas_gpu", optimizer="lamb")
    program = script.compile_step(case, LAYERS, "h200")
    kernels, code = program.kernels, list(script.machine_code(program))
    layer, total = (script.table(part, CHIPS["h200"]) for part in (script.one_layer(kernels), kernels))
    found = {
        "layer kernels": layer[REST]["kernels"],
        "layer GB": layer[REST]["GB"],
        "copies ms": total["copies"]["ms"],
        "rest ms": total[REST]["ms"],
    }
    assert all(found[name] <= limit for name, limit in LIMITS[step].items()), found
    attention = [one for one in code if one["kind"] == "attention"]
    assert len({one["kernel"].split("__")[0] for one in attention}) == len(LOOPS)
    assert all(one["matrix"] for one in attention), "no products on tensor cores"
    slow = [one for one in attention if one["loop"] > LOOPS[one["kernel"].split("__")[0]]]
    spilled = [one for one in code if one["spilled"]]
    assert not slow and not spilled
    norms = [one for one in code if one["kind"] == "other Pallas kernels"]
    assert {one["kernel"].split("__")[0] for one in norms} == set(NORMS)
    assert all(one["loop"] <= NORMS[one["kernel"].split("__")[0]] for one in norms), norms
    optimizer = [one for one in code if one["kind"] == "optimizer"]
    large = [one for one in optimizer if any(one[name] > limit for name, limit in OPTIMIZER.items())]
    assert optimizer and not large, "gradients are not one buffer"
    biases = [one for one in kernels if one.product and "BIAS" in one.product and "jvp" in one.op_name]
    assert len(biases) >= 3 * LAYERS, "biases of dense layers are not part of their products"


@pytest.mark.slow
@pytest.mark.skipif(not cuda_plugin_versions(), reason="the extra plan-gpu is not installed")
def test_plan_of_two_nodes(capsys):
    """The gradients of the program cross devices once, in each node and between nodes."""
    command = "plan bert_tiny --topology h200:2x2 --model.compute-dtype bfloat16 --json --model.attention pallas_gpu"
    assert cli.main([*command.split(), "--model.hidden-size", "256"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (row,) = plan["phases"]
    assert row["compiled"] and row["fits"] and not any("estimate" in note for note in plan["notes"])
    gradients = row["memory"]["parameters"]
    assert gradients <= row["collectives"]["all-reduce"] <= 1.1 * gradients
    assert row["sent"]["data"] == pytest.approx(row["collectives"]["all-reduce"], rel=0.01)
    assert row["sent"]["network"] == pytest.approx(row["sent"]["data"] / 2, rel=0.01)
    assert row["kernels"]["attention"]["kernels"] == 6 and row["kernels"]["other Pallas kernels"]["kernels"] == 4
    assert row["kernels"]["products"]["kernels"] > 20 and row["kernels"]["collectives"]["bytes"] >= 2 * gradients


@pytest.mark.slow
@pytest.mark.skipif(not cuda_plugin_versions(), reason="the extra plan-gpu is not installed")
def test_types_that_cross_gpus(capsys):
    """Kernels of layers are cast before they are gathered, and gradients before they are summed, as estimated."""
    command = "plan bert_tiny --topology h200:1x8 --mesh.fsdp 8 --json --model.hidden-size 256 --model.vocab-size 2048"
    command += " --model.compute-dtype bfloat16 --model.attention pallas_gpu --optimizer.reduce-dtype bfloat16"
    assert cli.main(command.split()) == 0
    (row,) = json.loads(capsys.readouterr().out)["phases"]
    config = presets.load_config("bert_tiny")
    model = dataclasses.replace(config.model, hidden_size=256, vocab_size=2048, compute_dtype="bfloat16")
    parameters = count_parameters(model_spec(dataclasses.replace(config, model=model), 0), Sizes(fsdp=8))
    assert row["compiled"] and parameters.gathered_bytes < 3 * parameters.gathered
    assert row["collectives"]["all-gather"] == pytest.approx(parameters.gathered_bytes, rel=0.01)
    assert row["collectives"]["reduce-scatter"] == pytest.approx(2 * parameters.gathered, rel=0.01)


OF_TPU = {"layer ms": 0.65, "copies ms": 0.92, "rest ms": 8.6, "temporaries GB": 0.43}
"""bert_large with `model.remat dots`, 8 rows of 512: milliseconds by the compiler's estimate, as in `LIMITS`."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_budgets_of_a_tpu():
    settings = {"attention": "pallas_tpu", "optimizer": "lamb", "remat": "dots"}
    program = script.compile_step(Case("bert_large", 512, 8, dtype="bfloat16", **settings), LAYERS, "v5e")
    layer, total = (script.table(part, CHIPS["v5e"]) for part in (script.one_layer(program.kernels), program.kernels))
    found = {"layer ms": layer[REST]["ms"], "copies ms": total["copies"]["ms"], "rest ms": total[REST]["ms"]}
    found["temporaries GB"] = program.temporary_bytes / 1e9
    assert all(found[name] <= limit for name, limit in OF_TPU.items()), found
    assert total["attention"]["kernels"] == 2 * LAYERS, "remat dots computes contexts again"


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
.L_x_2:
        /*0020*/              @!P0 LDG.E.U16 R3, desc[UR6][R2.64] ;
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0050*/              @!UP0 BRA `(.L_x_1) ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0070*/                   EXIT ;
"""


def test_loops_of_machine_code():
    instructions, loops = script.disassembled(SASS)
    assert len(instructions) == 8 and instructions[1].startswith("HGMMA")
    assert sorted(map(len, loops)) == [2, 5]
