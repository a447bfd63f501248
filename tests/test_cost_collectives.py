"""Compiled modules read collective by collective, against what compilers were found to move."""

import gzip
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import axisrules as ar
from axisrules import cost
from axisrules.cost._groups import of_groups, of_pairs

DATA = Path(__file__).parent / "data/pricing"
TRUTH = {one["name"]: one for one in json.loads((DATA / "truth.json").read_text())}
MODULES = sorted(path.name.removesuffix(".hlo.gz") for path in (DATA / "hlo").glob("*.gz"))


def text_of(name):
    return gzip.open(DATA / f"hlo/{name}.hlo.gz", "rt").read()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_moves_what_the_compiler_was_found_to_move(name):
    truth = TRUTH[name]
    found = cost.collectives(text_of(name), truth["mesh"])
    assert found.not_understood == ()
    assert found.wire_bytes_per_axis == pytest.approx(truth["wire_bytes_per_axis"], rel=1e-3)
    executions = {}
    for one in found:
        key = f"{one.kind} {one.key}"
        executions[key] = executions.get(key, 0) + one.executions
    assert executions == {key: kind["executions"] for key, kind in truth["by_kind"].items()}


def test_the_axes_have_the_names_of_the_mesh():
    text = text_of("tpu_4x4_fsdp_tp_scan")
    found = cost.collectives(text, "a=4,b=4").wire_bytes_per_axis
    assert list(found) == ["a+b", "b", "a"]
    assert cost.collectives(text, {"a": 2, "c": 2, "b": 4}).wire_bytes_per_axis["a+c"] == found["a"]


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ar.MeshError, match="8 devices, and the module was compiled for 16"):
        cost.collectives(text_of("tpu_4x4_dp_scan"), "data=4,model=2")


@pytest.mark.parametrize("given", ["", "module @jit_f { }", "hello", 3])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(ar.PolicyError):
        cost.collectives(given, "data=4")


def test_a_program_that_is_not_compiled_is_refused():
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(ar.PolicyError, match="StableHLO"):
        cost.collectives(lowered, "data=1")
    assert len(cost.collectives(lowered.compile(), "data=1")) == 0


def test_a_program_compiled_here_is_read():
    mesh = ar.make_mesh("data=4,model=2")
    rows = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = cost.collectives(jax.jit(lambda x: x.sum(0)).lower(rows).compile(), mesh)
    assert found.wire_bytes_per_axis == {"data": 2 * 3 / 4 * 64}
    (one,) = found
    assert (one.kind, one.axes, one.group, one.dtype, one.executions) == (
        "all-reduce",
        ("data",),
        4,
        "f32",
        1,
    )


HEAD = "HloModule m, num_partitions=16\n"
COLLECTIVES = {
    "all-gather": ("f32[64,8]{1,0:T(8,128)S(1)} all-gather(%p)", 3 / 4 * 2048),
    "all-gather-start": ("(f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%p)", 3 / 4 * 2048),
    "all-reduce": ("(f32[16,8]{1,0}, /*index=1*/bf16[4]{0}) all-reduce(%p, %q)", 2 * 3 / 4 * 520),
    "reduce-scatter": ("f32[4,8]{1,0} reduce-scatter(%p)", 3 / 4 * 512),
    "reduce-scatter-start": ("((f32[16,8]{1,0}), f32[4,8]{1,0}) reduce-scatter-start(%p)", 3 / 4 * 512),
    "all-to-all": ("f32[16,8]{1,0} all-to-all(%p)", 3 / 4 * 512),
    "s4": ("s4[16,8]{1,0} all-to-all(%p)", 3 / 4 * 64),
}
GROUPS = {
    "listed": "{{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}",
    "iota": "[4,4]<=[4,4]T(1,0)",
    "mesh": "mesh['axis_0'=4,'axis_1'=4] {'axis_0'}",
    "mesh of three": "mesh['axis_0'=4,'axis_1'=1,'axis_2'=4] {'axis_0','axis_1'}",
    "turned mesh": "mesh['axis_0'=4,'axis_1'=4], device_ids=([4,4]T(1,0)) {'axis_1'}",
    "turned mesh inside": "mesh['axis_0'=4,'axis_1'=4, device_ids=([4,4]T(1,0))] {'axis_1'}",
    "split axis": "mesh['axis_0'=16] {'axis_0':(1)4}",
}


def module(instruction, before="", entry=""):
    return (
        f"{HEAD}{before}\nENTRY %main (p: f32[16,8], q: bf16[4]) -> f32[16,8] {{\n"
        f"  %p = f32[16,8]{{1,0}} parameter(0)\n{entry}  ROOT %r = {instruction}\n}}\n"
    )


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_kind_is_read_with_every_spelling_of_its_groups(kind, groups):
    instruction, size = COLLECTIVES[kind]
    text = module(
        f"{instruction}, channel_id=1, replica_groups={GROUPS[groups]}, dimensions={{0}}, "
        'metadata={op_name="a{b}(c)"}'
    )
    assert cost.collectives(text, "data=4,model=4").wire_bytes_per_axis == {"data": size}


def test_the_devices_of_a_turned_mesh_change_its_meaning():
    text = module(f"{COLLECTIVES['all-to-all'][0]}, replica_groups={GROUPS['mesh']}")
    turned = text.replace("4] {", "4], device_ids=([4,4]T(1,0)) {")
    assert cost.collectives(text, "data=4,model=4").wire_bytes_per_axis == {"data": 384}
    assert cost.collectives(turned, "data=4,model=4").wire_bytes_per_axis == {"model": 384}


def test_no_groups_mean_all_devices():
    text = module("f32[16,8]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add")
    assert cost.collectives(text, "data=4,model=4").wire_bytes_per_axis == {"data+model": 2 * 15 / 16 * 512}


def test_a_permute_counts_for_the_devices_that_send():
    pairs = "{{0,1},{1,2},{2,3},{3,3},{4,4}}"
    text = module(
        f"(f32[16,8]{{1,0}}, f32[16,8]{{1,0}}) collective-permute-start(%p), source_target_pairs={pairs}"
    )
    assert cost.collectives(text, "data=4,model=4").wire_bytes_per_axis == {"model": 512 * 3 / 16}


LOOP = """
%cond (c: (s32[], f32[16,8])) -> pred[] {{
  %c = (s32[], f32[16,8]{{1,0}}) parameter(0)
  %limit = s32[] constant({limit})
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction={direction}
}}
%body (b: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {{
  %b = (s32[], f32[16,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[16,8]{{1,0}} get-tuple-element(%b), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %y = f32[16,8]{{1,0}} all-reduce(%x), channel_id=1, replica_groups=[4,4]<=[16], to_apply=%add
  ROOT %t = (s32[], f32[16,8]{{1,0}}) tuple(%next, %y)
}}
"""
WHILE = "(s32[], f32[16,8]{1,0}) while(%start), condition=%cond, body=%body"
START = "  %zero = s32[] constant({start})\n  %start = (s32[], f32[16,8]{{1,0}}) tuple(%zero, %p)\n"


@given(
    st.integers(-20, 20),
    st.integers(-20, 60),
    st.sampled_from([-3, -1, 1, 2, 5]),
    st.sampled_from(["LT", "LE", "GT"]),
)
def test_a_loop_counts_as_often_as_it_runs(start, limit, step, direction):
    count, value = 0, start
    holds = {"LT": lambda v: v < limit, "LE": lambda v: v <= limit, "GT": lambda v: v > limit}[direction]
    while holds(value) and count <= 10_000:
        count, value = count + 1, value + step
    text = module(WHILE, LOOP.format(limit=limit, step=step, direction=direction), START.format(start=start))
    found = cost.collectives(text, "data=4,model=4")
    if count > 10_000:
        assert "unknown" in found.not_understood[0]
    else:
        assert found.wire_bytes_per_axis == ({"model": 768 * count} if count else {})


def test_a_loop_whose_end_is_unknown_is_listed():
    entry = '  %zero = s32[] custom-call(), custom_call_target="f"\n' + START.split("\n")[1].replace(
        "{{", "{"
    ).replace("}}", "}")
    text = module(WHILE, LOOP.format(limit=4, step=1, direction="LT"), entry + "\n")
    found = cost.collectives(text, "data=4,model=4")
    assert found.wire_bytes_per_axis == {"model": 768}
    assert found.not_understood == ("loop r: how often it runs is unknown; counted once",)
    printed = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert cost.collectives(printed, "data=4,model=4").wire_bytes_per_axis == {"model": 768 * 7}


CLONES = """
%start (s: f32[16,8]) -> f32[64,8] {
  %s = f32[16,8]{1,0} parameter(0)
  %g = f32[64,8]{1,0} all-gather(%s), channel_id=5, replica_groups=[4,4]<=[16], dimensions={0}
  ROOT %c = f32[64,8]{1,0} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%more (s: f32[16,8]) -> f32[64,8] {
  %s = f32[16,8]{1,0} parameter(0)
  ROOT %g = f32[64,8]{1,0} all-gather(%s), channel_id=5, replica_groups=[4,4]<=[16], dimensions={0}
}
"""


def test_the_clones_of_an_asynchronous_collective_count_once():
    entry = "  %a = f32[64,8]{1,0} fusion(%p), kind=kCustom, calls=%start\n"
    clone = "f32[64,8]{1,0} fusion(%p), kind=kOutput, calls=%more"
    assert cost.collectives(module(clone, CLONES, entry), "data=4,model=4").wire_bytes_per_axis == {
        "model": 1536
    }
    other = CLONES.replace("channel_id=5, replica_groups=[4,4]<=[16], dimensions={0}\n}", "channel_id=6, replica_groups=[4,4]<=[16], dimensions={0}\n}")  # fmt: skip
    assert cost.collectives(module(clone, other, entry), "data=4,model=4").wire_bytes_per_axis == {
        "model": 3072
    }


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        ("f32[16,8]{1,0} all-shuffle(%p)", "all-shuffle in main: unknown kind of collective"),
        ("f32[16,8]{1,0} all-reduce(%p), replica_groups=@new<4>", "groups of devices are not readable"),
        ("f32[16,8]{1,0} all-reduce(%p), replica_groups={{0,99}}", "groups of devices are not readable"),
        (
            'f32[16,8]{1,0} custom-call(%p), custom_call_target="MyAllReduce"',
            "a collective of another library",
        ),
        ("f32[16,8]{1,0} call(%p), to_apply=%gone", "not in the module"),
        ("(f32[16,8]{1,0}, token[]) send(%p), channel_id=1", "by a way that is not readable"),
    ],
)
def test_what_is_not_understood_is_listed(instruction, text):
    found = cost.collectives(module(instruction), "data=4,model=4")
    assert text in "; ".join(found.not_understood)
    assert text in str(found)


def test_traffic_between_slices_is_a_send_over_the_first_axes():
    send = (
        "(f32[16,8]{1,0}, u32[], token[]) send(%p, %q), channel_id=4, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    text = module(send)
    assert cost.collectives(text, "slice=2,data=4,model=4").wire_bytes_per_axis == {"slice": 512}
    with pytest.raises(ar.MeshError):
        cost.collectives(text, "slice=2,data=4,model=8")


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(meshes, st.data())
def test_every_spelling_of_groups_means_the_same_axes(lengths, data):
    names = [f"a{at}" for at in range(len(lengths))]
    sizes = tuple(zip(names, lengths, strict=True))
    inside = [at for at in range(len(lengths)) if data.draw(st.booleans())]
    outside = [at for at in range(len(lengths)) if at not in inside]
    order = outside + inside
    count = math.prod(lengths[at] for at in inside)
    ids = np.arange(math.prod(lengths)).reshape(lengths).transpose(order).reshape(-1, count)
    listed = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in ids) + "}"
    iota = f"[{ids.shape[0]},{count}]<=[{','.join(map(str, lengths))}]T({','.join(map(str, order))})"
    axes = ",".join(f"'{name}'={length}" for name, length in sizes)
    mesh = f"mesh[{axes}] {{{','.join(repr(names[at]) for at in inside)}}}"
    expected = tuple(names[at] for at in inside if lengths[at] > 1)
    for text in (listed, iota, mesh) if inside else (listed, iota):
        found = of_groups(text, sizes)
        assert (found.axes, found.size) == (expected, count)


@given(meshes, st.data())
def test_a_permute_crosses_the_axes_in_which_its_ends_differ(lengths, data):
    sizes = tuple((f"a{at}", length) for at, length in enumerate(lengths))
    devices = math.prod(lengths)
    targets = data.draw(st.permutations(range(devices)))
    found = of_pairs("{" + ",".join(f"{{{s},{t}}}" for s, t in enumerate(targets)) + "}", sizes)
    where = list(itertools.product(*map(range, lengths)))
    differ = {at for s, t in enumerate(targets) for at in range(len(lengths)) if where[s][at] != where[t][at]}
    assert found.axes == tuple(f"a{at}" for at in sorted(differ))
    assert found.share == sum(s != t for s, t in enumerate(targets)) / devices
