"""trace_step.py: the kind of an instruction, from its line of a compiled program."""

from pathlib import Path

import pytest

from tests.pages import load_script

HLO = {
    "ynn_fusion.1": 'f32[8,64]{1,0} fusion(%x, %w), kind=kCustom, metadata={op_name="jit(step)/jvp()/dot_general"}',
    "ynn_fusion.2": 'f32[8,64]{1,0} fusion(%x, %table), metadata={op_name="jit(step)/transpose(jvp())/dot_general"}',
    "dot.7": "f32[2,8,8]{2,1,0} dot(%x, %x), lhs_batch_dims={0}",
    "ynn_fusion.3": 'f32[64]{0} fusion(%x, %zero), metadata={op_name="jit(train_step)/reduce_sum" stack_frame_id=3}',
    "multiply_erf_fusion": 'f32[8,64]{1,0} fusion(%x), metadata={op_name="jit(train_step)/jvp()/erf"}',
    "transpose_copy_fusion.4": 'f32[64,8]{1,0} fusion(%x), metadata={op_name="jit(train_step)/jvp()/mul"}',
    "slice.5": 'f32[4,64]{1,0} slice(%x), slice={[0:4], [0:64]}, metadata={op_name="jit(train_step)/slice"}',
    "wrapped_scatter": 'f32[30522,64]{1,0} fusion(%table, %x), metadata={op_name="jit(train_step)/scatter-add"}',
    "x": "f32[8,64]{1,0} parameter(0)",
    "table": "f32[30522,64]{1,0} parameter(1)",
}


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("ynn_fusion.1", "products of layers"),
        ("ynn_fusion.2", "products of the decoder"),
        ("dot.7", "products of layers"),
        ("ynn_fusion.3", "reductions"),
        ("multiply_erf_fusion", "element-wise"),
        ("transpose_copy_fusion.4", "copies and layouts"),
        ("slice.5", "copies and layouts"),
        ("wrapped_scatter", "lookups"),
    ],
)
def test_kinds(instruction, kind):
    script = load_script(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "trace_step.py")
    assert script.kind_of(instruction, HLO) == kind
