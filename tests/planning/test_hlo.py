"""Parsing of collectives from HLO: small texts as XLA prints them, each with instructions that must not count."""

import pytest

from bert_jax.planning import hlo
from bert_jax.planning.hlo import Collective, bytes_by_kind, parse_collectives

ADD = "%add (x: f32[], y: f32[]) -> f32[] {\n  ROOT %sum = f32[] add(%x, %y)\n}\n"
REDUCED = "%r = f32[2048]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add"


def module(entry: str, others: str = "", header: str = "") -> str:
    body = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    return f"HloModule m{header}\n\n{ADD}\n{others}\n\nENTRY %main (a: f32[2048]) -> f32[2048] {{\n{body}\n}}\n"


def loop(condition: str, note: str = "", start: str = "constant(0)") -> str:
    """An all-reduce in a loop, as the TPU compiler prints it: without a trip count."""
    others = f"%body (p: f32[2048]) -> f32[2048] {{\n  {REDUCED}\n}}\n\n%cond (p: (s32[], f32[2048])) -> pred[] {{\n"
    others += f"{condition}\n}}"
    entry = f"""
%begin = s32[]{{:T(128)}} {start}
%copied = s32[]{{:T(128)}} copy(%begin)
%state = (s32[]{{:T(128)}}, f32[2048]{{0}}) tuple(%copied, %a)
%w = (s32[]{{:T(128)}}, f32[2048]{{0}}) while(%state), condition=%cond, body=%body{note}
"""
    return module(entry, others)


COUNTS = """  %limit = s32[]{:T(128)} constant(4), metadata={op_name="jit(f)/while"}
  %p = (s32[]{:T(128)}, f32[2048]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT"""


def test_a_collective():
    found = parse_collectives(module(f'{REDUCED}, metadata={{op_name="jit(f)/psum" stack_frame_id=3}}'))
    assert found == [Collective("all-reduce", ("f32[2048]",), 8192, 1, (0, 1, 2, 3))]
    assert found[0].bytes_sent == 2 * 8192 and bytes_by_kind(found) == {"all-reduce": 8192}


def test_a_tuple_with_layouts_and_counting_comments():
    text = module(
        "%r = (f32[2,1]{1,0:T(2,128)S(1)}, bf16[3,128]{1,0:T(8,128)(2,1)}, /*index=5*/pred[7]{0}) "
        "all-reduce(%x, %y, /*index=5*/%z), replica_groups={{0,1}}, to_apply=%add"
    )
    (found,) = parse_collectives(text)
    assert found.bytes == 8 + 2 * 3 * 128 + 7 and found.shapes == ("f32[2,1]", "bf16[3,128]", "pred[7]")


def test_loops_multiply():
    noted = loop("", ', backend_config={"known_trip_count":{"n":"6"}}')
    assert [one.executions for one in parse_collectives(noted)] == [6]
    assert [one.executions for one in parse_collectives(loop(COUNTS))] == [4]
    assert [one.executions for one in parse_collectives(loop(COUNTS, start="constant(1)"))] == [3]
    assert bytes_by_kind(parse_collectives(loop(COUNTS))) == {"all-reduce": 4 * 8192}


def test_a_loop_with_a_bound_known_at_run_time():
    dynamic = COUNTS.replace("constant(4)", "get-tuple-element(%p), index=1")
    assert [one.executions for one in parse_collectives(loop(dynamic))] == [1]
    assert [one.executions for one in parse_collectives(loop(dynamic), unknown_trip_count=8)] == [8]


def test_loops_in_loops():
    inner = f"%inner (p: f32[2048]) -> f32[2048] {{\n  {REDUCED}\n}}\n"
    trip_count = ', condition=%c, backend_config={"known_trip_count":{"n":"3"}}'
    outer = f"%outer (p: f32[2048]) -> f32[2048] {{\n  %w = f32[2048]{{0}} while(%p), body=%inner{trip_count}\n}}\n"
    text = module(f"%v = f32[2048]{{0}} while(%a), body=%outer{trip_count}", inner + outer)
    assert [one.executions for one in parse_collectives(text)] == [9]


def test_a_pair_of_start_and_done_is_one_collective():
    text = module("""
%s = (f32[512]{0}, f32[2048]{0}) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
%d = f32[2048]{0} all-gather-done(%s)
%t = f32[2048]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add
%u = f32[2048]{0} all-reduce-done(%t)
%p = (f32[9]{0}, f32[9]{0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1}}
%q = f32[9]{0} collective-permute-done(%p)
""")
    assert bytes_by_kind(parse_collectives(text)) == {"all-gather": 8192, "all-reduce": 8192, "collective-permute": 36}


def test_a_wrapped_start_counts_what_it_wraps_once():
    wrapped = (
        "%wrapped (p: f32[2048]) -> f32[512] {\n"
        "  ROOT %rs = f32[512]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%add\n}"
    )
    text = module(
        "%s = ((f32[2048]{0}), f32[512]{0}, u32[]) async-start(%a), calls=%wrapped\n"
        "%d = f32[512]{0} async-done(%s), calls=%wrapped",
        wrapped,
    )
    (found,) = parse_collectives(text)
    assert (found.kind, found.bytes, found.bytes_sent) == ("reduce-scatter", 8192, 8192), "the operand's bytes"


def test_a_chain_of_fusions_is_one_collective():
    """The TPU compiler spreads one all-gather over the matrix products that overlap with it."""
    gather = '  %g = bf16[64]{0} all-gather(%p), replica_groups={{0,1}}, frontend_attributes={chain_id="0"}\n'
    links = "".join(
        f"%{name} (p: bf16[32]) -> bf16[64] {{\n{gather}  ROOT %c = (bf16[64]{{0}}) custom-call(%g), "
        f'custom_call_target="AsyncCollective{what}"\n}}\n\n'
        for name, what in (("first", "Start"), ("middle", "Link"), ("last", "Done"))
    )
    entry = "\n".join(
        f"%{name}.1 = (bf16[64]{{0}}) fusion(%a), kind=kLoop, calls=%{name}" for name in ("first", "middle", "last")
    )
    assert bytes_by_kind(parse_collectives(module(entry, links))) == {"all-gather": 128}


def test_transfers_between_slices():
    text = module(
        "%s = (f32[4,128]{1,0}, u32[], token[]) send(%a, %after), is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}\n'
        "%d = token[] send-done(%s), is_host_transfer=true\n"
        "%r = (f32[4,128]{1,0}, u32[], token[]) recv(%after), is_host_transfer=true"
    )
    assert bytes_by_kind(parse_collectives(text)) == {hlo.BETWEEN_SLICES: 2048}


def test_branches_and_calls():
    others = "\n".join(f"%{name} (p: f32[2048]) -> f32[2048] {{\n  {REDUCED}\n}}\n" for name in ("one", "two"))
    text = module("%c = f32[2048]{0} conditional(%i, %a, %a), branch_computations={%one, %two}", others)
    assert len(parse_collectives(text)) == 2
    text = module("%c = f32[2048]{0} call(%a), to_apply=%one", others)
    assert len(parse_collectives(text)) == 1


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


def test_scalars_and_tokens_have_a_size():
    text = module(
        "%r = (f32[], f8e4m3fn[16]{0}, s4[2]{0}, u64[2]{0}) all-to-all(%a, %b, %c, %d), replica_groups={{0,1}}"
    )
    assert [one.bytes for one in parse_collectives(text)] == [4 + 16 + 2 + 16]
