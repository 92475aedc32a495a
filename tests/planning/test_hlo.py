"""Parsing of collectives from HLO: small texts as XLA prints them, each with instructions that must not count."""

import pytest

from bert_jax.chips import Sizes
from bert_jax.planning import hlo
from bert_jax.planning.hlo import Collective, array_bytes_by_kind, parse_collectives

ADD = "%add (x: f32[], y: f32[]) -> f32[] {\n  ROOT %sum = f32[] add(%x, %y)\n}\n"
REDUCED = "%r = f32[2048]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add"


def module(entry: str, others: str = "", header: str = "") -> str:
    body = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    return f"HloModule m{header}\n\n{ADD}\n{others}\n\nENTRY %main (a: f32[2048]) -> f32[2048] {{\n{body}\n}}\n"


def computation(name: str, lines: str) -> str:
    return f"%{name} (p: f32[2048]) -> f32[2048] {{\n{lines}\n}}\n\n"


def test_a_collective():
    found = parse_collectives(module(f'{REDUCED}, metadata={{op_name="jit(f)/psum" stack_frame_id=3}}'))
    assert found == [Collective("all-reduce", ("f32[2048]",), 8192, 1, (0, 1, 2, 3))]
    assert found[0].bytes_sent == 2 * 8192 and array_bytes_by_kind(found) == {"all-reduce": 8192}


@pytest.mark.parametrize(
    ("shape", "size", "shapes"),
    [
        (  # layouts, and comments that count
            "(f32[2,1]{1,0:T(2,128)S(1)}, bf16[3,128]{1,0:T(8,128)(2,1)}, /*index=5*/pred[7]{0})",
            8 + 2 * 3 * 128 + 7,
            ("f32[2,1]", "bf16[3,128]", "pred[7]"),
        ),
        ("(f32[], s4[2]{0}, u64[2]{0}, token[])", 4 + 2 + 16, ("f32[]", "s4[2]", "u64[2]", "token[]")),
    ],
)
def test_tuples(shape, size, shapes):
    text = module(f"%r = {shape} all-reduce(%x, %y, /*index=5*/%z), replica_groups={{{{0,1}}}}, to_apply=%add")
    assert [(one.bytes, one.shapes) for one in parse_collectives(text)] == [(size, shapes)]


COUNTS = """  %limit = s32[]{:T(128)} constant(4), metadata={op_name="jit(f)/while"}
  %p = (s32[]{:T(128)}, f32[2048]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT"""
DYNAMIC = COUNTS.replace("constant(4)", "get-tuple-element(%p), index=1")
NOTED = ', backend_config={"known_trip_count":{"n":"6"}}'


@pytest.mark.parametrize(
    ("condition", "note", "unknown", "times"),
    [("", NOTED, 1, 6), (COUNTS, "", 8, 4), (DYNAMIC, "", 1, 1), (DYNAMIC, "", 8, 8)],
)
def test_loops_multiply(condition, note, unknown, times):
    """Loops in loops; XLA for TPUs does not note trip counts, and a batch ramp's is known only at run time."""
    loop = "%w = f32[2048]{0} while(%a), condition=%cond, body="
    others = computation("cond", condition) + computation("body", f"  {REDUCED}")
    found = parse_collectives(module(f"{loop}%body{note}", others), unknown)
    assert array_bytes_by_kind(found) == {"all-reduce": times * 8192} and found[0].executions == times
    outer = computation("outer", f"  {loop}%body{note}")
    assert parse_collectives(module(f"{loop}%outer{note}", others + outer), unknown)[0].executions == times**2


GATHER = '  %g = bf16[64]{0} all-gather(%p), replica_groups={{0,1}}, frontend_attributes={chain_id="0"}\n'
PROGRAMS = {
    "start and done": (
        """
%s = (f32[512]{0}, f32[2048]{0}) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
%d = f32[2048]{0} all-gather-done(%s)
%v = ((f32[2]{0}, f32[1]{0}), (f32[8]{0}, f32[4]{0})) all-gather-start(%a, %b), replica_groups=[1,4]<=[4]
%t = f32[2048]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add
%u = f32[2048]{0} all-reduce-done(%t)
%p = (f32[9]{0}, f32[9]{0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1}}
%q = f32[9]{0} collective-permute-done(%p)
%z = ((f32[2048]{0}), f32[512]{0}) reduce-scatter-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
""",
        "",
        {"all-gather": 8192 + 48, "all-reduce": 8192, "collective-permute": 36, "reduce-scatter": 8192},
    ),
    "a wrapped start counts what it wraps once, the bytes of a reduce-scatter's operand": (
        "%s = ((f32[2048]{0}), f32[512]{0}, u32[]) async-start(%a), calls=%wrapped\n"
        "%d = f32[512]{0} async-done(%s), calls=%wrapped",
        computation("wrapped", "  ROOT %r = f32[512]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%add"),
        {"reduce-scatter": 8192},
    ),
    # XLA for TPUs spreads one all-gather over the matrix products that overlap with it.
    "a chain of fusions is one collective": (
        "\n".join(f"%{name}.1 = (bf16[64]{{0}}) fusion(%a), kind=kLoop, calls=%{name}" for name in ("Start", "Done")),
        "".join(
            computation(
                name, f'{GATHER}  ROOT %c = bf16[64] custom-call(%g), custom_call_target="AsyncCollective{name}"'
            )
            for name in ("Start", "Done")
        ),
        {"all-gather": 128},
    ),
    "transfers between slices": (
        "%s = (f32[4,128]{1,0}, u32[], token[]) send(%a, %after), is_host_transfer=true\n"
        "%d = token[] send-done(%s), is_host_transfer=true\n"
        "%r = (f32[4,128]{1,0}, u32[], token[]) recv(%after), is_host_transfer=true\n"
        "%t = (f32[4,128]{1,0}, u32[], token[]) send(%a, %after)",
        "",
        {hlo.BETWEEN_SLICES: 2048},
    ),
    "both branches, and a call": (
        "%c = f32[2048]{0} conditional(%i, %a, %a), branch_computations={%one, %two}\n"
        "%d = f32[2048]{0} call(%a), to_apply=%one",
        computation("one", f"  {REDUCED}") + computation("two", f"  {REDUCED}"),
        {"all-reduce": 3 * 8192},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    entry, others, expected = PROGRAMS[name]
    assert array_bytes_by_kind(parse_collectives(module(entry, others))) == expected


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", (0, 2, 4, 6)),
        ("[4,2]<=[8]", (0, 1)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", (0, 1)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", (0, 2, 4, 6)),
        ("{}", tuple(range(8))),
    ],
)
def test_groups(written, group):
    text = module(f"%r = f32[8]{{0}} all-reduce(%a), replica_groups={written}", header=", num_partitions=8")
    assert [one.group for one in parse_collectives(text)] == [group]


def test_bytes_by_axis():
    """Groups over one axis, over two axes, and between slices; in a slice of 2 x 2 x 2."""
    found = [
        Collective("all-reduce", (), 1000, 3, (0, 1)),
        Collective("all-gather", (), 1000, 1, (0, 2)),
        Collective("reduce-scatter", (), 1000, 1, (0, 4)),
        Collective("all-reduce", (), 1000, 1, (0, 2, 4, 6)),
        Collective(hlo.BETWEEN_SLICES, (), 1000, 1, ()),
        Collective("all-reduce", (), 1000, 1, (5,)),
    ]
    sent = hlo.bytes_sent_by_axis(found, Sizes(data=4, fsdp=2, tensor=2, slices=2))
    assert sent == {"data": 500 + 1500, "fsdp": 500, "tensor": 3000, "network": 1000}


def test_bytes_across_nodes():
    """An all-reduce of 2 nodes of 4 devices, then one of the same device in each: inside, then between."""
    found = [Collective("all-reduce", (), 1000, 1, tuple(range(8))), Collective("reduce-scatter", (), 1000, 1, (1, 5))]
    sent = hlo.bytes_sent_by_axis(found, Sizes(data=8, slices=2))
    assert sent == {"data": 2000 * 3 / 4, "fsdp": 0, "tensor": 0, "network": 2000 / 4 / 2 + 1000 / 2}
