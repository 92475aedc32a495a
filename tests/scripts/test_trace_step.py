"""trace_step.py: the kind of an instruction, from its line of a compiled program, and of a kernel, from its name."""

import functools
from pathlib import Path

import pytest

from tests.pages import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "trace_step.py"
script = functools.partial(load_script, SCRIPT)
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
    assert script().kind_of(instruction, HLO) == kind


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16>", "products"),
        ("gemm_fusion_dot_26", "products"),
        ("key_gradient_kernel__1", "attention"),
        ("memcpy128", "copies and layouts"),
        ("loop_dynamic_update_slice_fusion_8", "copies and layouts"),
        ("input_add_compare_reduce_fusion", "reductions"),
        ("loop_multiply_fusion", "element-wise"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    """Names as in a trace of an H200 (docs/benchmarks/h200)."""
    assert script().kind_of_kernel(kernel) == kind


def test_kernels_are_events_on_streams():
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7(Compute)"}},
        {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "XLA Ops"}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
        *({"ph": "X", "pid": pid, "tid": tid, "name": "x", "dur": 1.0} for pid, tid in ((1, 7), (1, 8), (2, 7))),
    ]
    names = script().names_of(events)
    assert [(event["pid"], event["tid"]) for event in events if script().is_kernel(event, names)] == [(1, 7)]
