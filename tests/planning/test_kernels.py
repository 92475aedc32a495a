"""Kernels of a program, from HLO as XLA prints it: kinds, bytes, products, loops, cycles."""

import pytest

from bert_jax.planning.kernels import Total, parse_kernels, sum_kernels_by_kind

BACKWARD = 'metadata={op_name="jit(train_step)/transpose(jvp())/add"}'
PROGRAM = f"""HloModule m, is_scheduled=true

%sliced (p: bf16[64,32], q: f32[2]) -> bf16[8,32] {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  %q = f32[2]{{0}} parameter(1)
  %s = bf16[8,32]{{1,0}} slice(%p), slice={{[0:8], [0:32]}}
  ROOT %t = bf16[8,32]{{0,1}} transpose(%s), dimensions={{0,1}}
}}

%updated (b: f32[4,32], u: f32[1,32], i: s32[]) -> f32[4,32] {{
  %b = f32[4,32]{{1,0}} parameter(0)
  %u = f32[1,32]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[4,32]{{1,0}} dynamic-update-slice(%b, %u, %i, %i)
}}

%summed (x: f32[64,32]) -> (f32[32], f32[64,32]) {{
  %x = f32[64,32]{{1,0}} parameter(0)
  %zero = f32[] constant(0)
  %r = f32[32]{{0}} reduce(%x, %zero), dimensions={{0}}, to_apply=%add
  %e = f32[64,32]{{1,0}} exponential(%x)
  ROOT %both = (f32[32]{{0}}, f32[64,32]{{1,0}}) tuple(%r, %e)
}}

%body (s: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {{
  %s = (s32[], f32[64,32]{{1,0}}) parameter(0)
  %v = f32[64,32]{{1,0}} get-tuple-element(%s), index=1
  %f = (f32[32]{{0}}, f32[64,32]{{1,0}}) fusion(%v), kind=kInput, calls=%summed, {BACKWARD}
}}

ENTRY %main (a: bf16[64,32], w: bf16[16,32], c: f32[64,32]) -> f32[64,32] {{
  %a = bf16[64,32]{{1,0}} parameter(0)
  %w = bf16[16,32]{{1,0}} parameter(1)
  %c = f32[64,32]{{1,0}} parameter(2)
  %two = f32[2]{{0}} constant({{1, 2}})
  %g = (bf16[64,16]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={{"gemm_backend_config":{{"beta":1,"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}},"epilogue":"BIAS"}}}}
  %cut = bf16[8,32]{{0,1}} fusion(%a, %two), kind=kLoop, calls=%sliced, {BACKWARD}
  %put = f32[4,32]{{1,0}} fusion(%stack, %row, %i), kind=kLoop, calls=%updated, {BACKWARD}
  %k = bf16[64,32]{{1,0}} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", \
metadata={{op_name="jit(train_step)/jvp()/forward_kernel/pallas_call"}}, backend_config={{ir = "%a\\0A(x)"}}
  %n = bf16[64,32]{{1,0}} custom-call(%a, %a), custom_call_target="__gpu$xla.gpu.triton", \
metadata={{op_name="jit(train_step)/jvp(norm_kernel)/pallas_call"}}
  %u = (f32[32]{{0}}, f32[64,32]{{1,0}}) fusion(%c), kind=kInput, calls=%summed, \
metadata={{op_name="jit(train_step)/sqrt"}}
  %z = (s32[], f32[64,32]{{1,0}}) while(%init), condition=%cond, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
  %e = f32[64,32]{{1,0}} custom-call(), custom_call_target="AllocateBuffer"
  %t = f32[32,64]{{1,0}} transpose(%c), dimensions={{1,0}}
  ROOT %all = f32[64,32]{{1,0}} all-reduce(%c), to_apply=%add
}}
"""


@pytest.fixture(scope="module")
def kernels():
    return {one.name: one for one in parse_kernels(PROGRAM)}


def test_kinds(kernels):
    assert {name: one.kind for name, one in kernels.items()} == {
        "g": "products",
        "cut": "copies",
        "put": "copies",
        "k": "attention",
        "n": "other Pallas kernels",
        "u": "optimizer",
        "f": "reductions",
        "t": "copies",
        "all": "collectives",
    }


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("g", 2 * (64 * 32 + 16 * 32), 2 * 64 * 16),  # without workspace
        ("cut", 2 * 8 * 32, 2 * 8 * 32),  # of what is sliced, the slice; nothing of what is not used
        ("put", 0, 4 * 32),  # updated in place
        ("n", 2 * 64 * 32, 2 * 64 * 32),  # an array that it has twice is read once
        ("u", 4 * 64 * 32, 4 * (32 + 64 * 32)),  # two results
    ],
)
def test_bytes(kernels, name, read, written):
    assert (kernels[name].read, kernels[name].written) == (read, written)


def test_products_and_loops(kernels):
    assert kernels["g"].product == "1x64x16x32 bf16 BIAS +C" and kernels["k"].product is None
    once = 4 * (2 * 64 * 32 + 32)
    assert sum_kernels_by_kind(kernels.values())["reductions"] == Total(3, 3 * once, 0), "three turns of the loop"


OF_TPU = f"""HloModule m, is_scheduled=true

%product (x: bf16[64,32], w: bf16[32,16]) -> bf16[64,16] {{
  %x = bf16[64,32]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = bf16[32,16]{{1,0:T(8,128)(2,1)}} parameter(1)
  %c = f32[64,16]{{1,0:T(8,128)}} convolution(%x, %w), dim_labels=bf_io->bf
  ROOT %r = bf16[64,16]{{1,0:T(8,128)(2,1)}} convert(%c)
}}

ENTRY %main (x: bf16[64,32], w: bf16[32,16]) -> bf16[64,16] {{
  %x = bf16[64,32]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = bf16[32,16]{{1,0:T(8,128)(2,1)}} parameter(1)
  %s = (bf16[64,32]{{1,0:T(8,128)(2,1)S(1)}}, bf16[64,32]{{1,0}}, u32[]{{:S(2)}}) copy-start(%x)
  %d = bf16[64,32]{{1,0:T(8,128)(2,1)S(1)}} copy-done(%s)
  %k = bf16[64,32]{{1,0:T(8,128)(2,1)}} custom-call(%d), custom_call_target="tpu_custom_call", \
metadata={{op_name="jit(train_step)/transpose(jvp())/backward_kernel/pallas_call"}}
  ROOT %p = bf16[64,16]{{1,0:T(8,128)(2,1)}} fusion(%k, %w), kind=kOutput, calls=%product, {BACKWARD}, \
backend_config={{"window_config":{{"estimated_cycles":"1829","iteration_bounds":["1"]}}}}
}}
"""


def test_a_program_for_a_tpu():
    """Products are convolutions. Copies from and to the memory of the core, and kernels of Pallas, have no estimate."""
    kernels = parse_kernels(OF_TPU)
    assert [(one.kind, one.cycles) for one in kernels] == [("copies", 0), ("attention", 0), ("products", 1829)]
    assert [one.cycles for one in parse_kernels(OF_TPU.replace('"1829"', f'"{2**64 - 1}"'))] == [0, 0, 0]
