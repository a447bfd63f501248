"""shard_tree on real arrays: where they lie, that nothing else changes, and that nothing is shared."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar

RULES = {"embed": "data", "mlp": "model"}


def values(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def params():
    return {
        "up": values(8, 4),
        "blocks": [{"scale": values(8)}, {"scale": values(8) + 1}],
        "step": np.int32(7),
    }


NAMES = {"up": "embed mlp", "blocks": [{"scale": "embed"}, {"scale": None}], "step": ()}
SPECS = {"up": P("data", "model"), "blocks": [{"scale": P("data")}, {"scale": P(None)}], "step": P()}


def assert_placed(result, mesh, specs=SPECS, source=None):
    for array, spec, host in zip(
        jax.tree.leaves(result), jax.tree.leaves(specs), jax.tree.leaves(source or params()), strict=True
    ):
        assert array.sharding == NamedSharding(mesh, spec)
        np.testing.assert_array_equal(np.asarray(array), host)


def test_mesh_and_rules_may_be_values(mesh):
    assert_placed(ar.shard_tree(params(), NAMES, mesh=mesh, rules=RULES), mesh)


def test_mesh_and_rules_may_be_active(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        assert_placed(ar.shard_tree(params(), NAMES), mesh)


@pytest.mark.parametrize("before", AXIS_TYPES)
@pytest.mark.parametrize("after", AXIS_TYPES)
def test_arrays_go_from_any_kind_of_mesh_to_any_other_and_carry_the_planned_sharding(before, after):
    placed = ar.shard_tree(params(), NAMES, mesh=mesh_of(before), rules=RULES)
    moved = ar.shard_tree(placed, NAMES, mesh=mesh_of(after), rules=RULES)
    assert_placed(moved, mesh_of(after))
    with jax.set_mesh(mesh_of(after)):  # and jit takes them
        assert float(jax.jit(lambda tree: tree["up"].sum())(moved)) == values(8, 4).sum()


@pytest.mark.parametrize("after", AXIS_TYPES)
@pytest.mark.parametrize("axes", ["data=2,model=4", "data=8,model=1", "data=2,model=2", "data=1,model=1"])
def test_a_live_tree_moves_to_another_mesh_and_to_fewer_devices(mesh, axes, after):
    placed = ar.shard_tree(params(), NAMES, mesh=mesh, rules=RULES)
    other = mesh_of(after, axes)
    assert_placed(ar.shard_tree(placed, NAMES, mesh=other, rules=RULES), other)


def test_placing_again_returns_the_same_arrays(mesh):
    placed = ar.shard_tree(params(), NAMES, mesh=mesh, rules=RULES)
    again = ar.shard_tree(placed, NAMES, mesh=mesh, rules=RULES)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again), strict=True))


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("given", [P("data"), P(("data",), None)])
def test_an_equivalent_layout_moves_no_byte_yet_carries_the_planned_sharding(given, mesh):
    array = jax.device_put(values(8, 4), NamedSharding(mesh, given))
    for target in map(mesh_of, AXIS_TYPES):
        placed = ar.shard_tree(array, "embed _", mesh=target, rules=RULES)
        assert placed.sharding == NamedSharding(target, P("data", None))
        assert pointers(placed) == pointers(array)


def test_typed_keys_and_what_is_no_array(mesh):
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {"keys": keys, "one": jax.random.key(1), "f": jax.nn.relu, "n": None, "s": "text", "i": 3}
    placed = ar.shard_tree(tree, {"keys": "embed"}, mesh=mesh, rules=RULES)
    assert placed["keys"].sharding == NamedSharding(mesh, P("data"))
    assert placed["one"].sharding == NamedSharding(mesh, P())
    np.testing.assert_array_equal(jax.random.key_data(placed["keys"]), jax.random.key_data(keys))
    assert {k: placed[k] for k in "fnsi"} == {k: tree[k] for k in "fnsi"}


def test_abstract_leaves_get_their_sharding(mesh):
    tree = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}
    placed = ar.shard_tree(tree, {"w": "embed mlp"}, mesh=mesh, rules=RULES)
    assert placed["w"] == jax.ShapeDtypeStruct(
        (8, 4), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "model"))
    )
    assert ar.shard_tree(tree, {"w": "embed mlp"}, mesh="data=4,model=2", rules=RULES)["w"].shape == (8, 4)


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, np.bool_, np.int8, np.complex64, ">f4"],
)
def test_dtypes_survive(dtype, mesh):
    source = values(8, 4, dtype=np.int8).astype(dtype)
    placed = ar.shard_tree(source, "embed mlp", mesh=mesh, rules=RULES)
    assert np.asarray(placed).tobytes() == source.astype(source.dtype.newbyteorder("=")).tobytes()


@pytest.mark.usefixtures("narrow")
def test_64_bit_integers_that_fit_are_placed_by_value(mesh):
    placed = ar.shard_tree(np.array([2**31 - 1, -(2**31)]), None, mesh=mesh, rules=RULES, unnamed="replicate")
    assert placed.dtype == np.int32
    np.testing.assert_array_equal(np.asarray(placed), [2**31 - 1, -(2**31)])


def test_dtype_casts_on_the_way(mesh):
    tree = {"host": values(8, 4, dtype=np.float64), "live": jnp.ones((8, 4)), "n": values(8, dtype=np.int8)}
    names = {"host": "embed mlp", "live": "embed mlp", "n": None}
    placed = ar.shard_tree(tree, names, mesh=mesh, rules=RULES, dtype="bfloat16")
    assert [str(a.dtype) for a in placed.values()] == ["bfloat16", "bfloat16", "int8"]
    assert placed["live"].sharding == NamedSharding(mesh, P("data", "model"))


@pytest.mark.parametrize("active", [*AXIS_TYPES, None])
@pytest.mark.parametrize("before", AXIS_TYPES)
def test_arrays_are_cast_whichever_mesh_is_active(before, active, mesh):
    source = {"w": values(8, 4)}
    placed = ar.shard_tree(source, {"w": "embed mlp"}, mesh=mesh_of(before), rules=RULES)
    with jax.set_mesh(mesh_of(active)) if active else contextlib.nullcontext():
        cast = ar.shard_tree(placed, {"w": "embed mlp"}, mesh=mesh, rules=RULES, dtype="bfloat16")["w"]
    assert cast.sharding.mesh == mesh
    assert cast.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(cast, np.float32), source["w"])


def test_memory_maps_and_views_are_placed(tmp_path, mesh):
    source = np.memmap(tmp_path / "w.bin", np.float32, "w+", shape=(8, 4))
    source[:] = values(8, 4)
    tree = {
        "map": source,
        "view": values(8, 8)[:, ::2],
        "turned": values(4, 8).T,
        "flipped": values(8, 4)[::-1],
    }
    placed = ar.shard_tree(tree, dict.fromkeys(tree, "embed mlp"), mesh=mesh, rules=RULES)
    for name, host in tree.items():
        np.testing.assert_array_equal(np.asarray(placed[name]), host)


def test_memory_kinds_are_honoured(mesh):
    placed = ar.shard_tree(values(8, 4), "embed mlp", mesh=mesh, rules=RULES, memory_kind="pinned_host")
    assert placed.sharding.memory_kind == "pinned_host"


# Nothing is shared with host arrays.


def at_offset(shape, offset):
    """A host array at a chosen distance from an address that JAX would take over."""
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.__array_interface__["data"][0] % 128 + offset
    return raw[start : start + size].view(np.float32).reshape(shape)


@pytest.mark.parametrize("offset", [0, 4, 16, 32, 64, 96])
@pytest.mark.parametrize("shape", [(8, 8), (64, 32), (512, 256), (4, 20, 64), (1, 4096)])
@pytest.mark.parametrize("names", ["embed", "_", "embed mlp", "_ mlp", "all"])
def test_a_result_never_shares_memory_with_a_host_array(offset, shape, names, mesh):
    source = at_offset(shape, offset)
    rules = ar.Rules(RULES | {"all": ("data", "model")})
    placed = ar.shard_tree(source, f"{names} ...", mesh=mesh, rules=rules, indivisible="next")
    source[:] = 1
    assert not np.asarray(placed).any()


def test_a_strided_view_whose_shards_are_contiguous_is_not_shared_either(mesh):
    source = at_offset((4, 64), 0)[:, :16]
    placed = ar.shard_tree(source, "embed _", mesh=mesh, rules=RULES)
    source[:] = 1
    assert not np.asarray(placed).any()


def test_the_input_tree_is_not_changed(mesh):
    tree = params()
    leaves = jax.tree.leaves(tree)
    ar.shard_tree(tree, NAMES, mesh=mesh, rules=RULES)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(tree), strict=True))
    assert_placed(ar.shard_tree(tree, NAMES, mesh=mesh, rules=RULES), mesh)


# Ties and donation.


def test_tied_leaves_stay_one_array(mesh):
    shared = values(8, 4)
    placed = ar.shard_tree(
        {"a": shared, "b": [shared]}, {"a": "embed _", "b": ["embed _"]}, mesh=mesh, rules=RULES
    )
    assert placed["a"] is placed["b"][0]


@pytest.mark.parametrize("start", [P("model"), P(None, "data")])
def test_donated_arrays_give_their_memory_back_and_tied_ones_once(mesh, start):
    source = jax.device_put(values(8, 4), NamedSharding(mesh, start))
    tree = {"a": source, "b": source}
    placed = ar.shard_tree(tree, {"a": "embed _", "b": "embed _"}, mesh=mesh, rules=RULES, donate=True)
    assert placed["a"] is placed["b"]
    assert source.is_deleted()
    np.testing.assert_array_equal(np.asarray(placed["a"]), values(8, 4))


def test_donating_an_array_that_shares_its_buffers_with_the_result_leaves_the_result_whole(mesh):
    single = jnp.asarray(values(8, 4))
    twin = jax.device_put(single, NamedSharding(mesh, P()))
    placed = ar.shard_tree([single, twin], [None, None], mesh=mesh, rules=RULES, donate=True)
    again = ar.shard_tree(placed, ["embed _", "embed _"], mesh=mesh, rules=RULES, donate=True)
    for array in again:
        np.testing.assert_array_equal(np.asarray(array), values(8, 4))


def test_what_lies_as_planned_is_not_given_up_by_donation(mesh):
    placed = ar.shard_tree(params(), NAMES, mesh=mesh, rules=RULES)
    again = ar.shard_tree(placed, NAMES, mesh=mesh, rules=RULES, donate=True)
    assert_placed(again, mesh)


def test_equal_paths_do_not_mix_arrays_up(mesh):
    one, other = values(8, 4), values(8, 4) + 100
    tree = {"a/b": one, "a": {"b": other}, "t": other}
    placed = ar.shard_tree(tree, lambda path, leaf: "embed _", mesh=mesh, rules=RULES)
    np.testing.assert_array_equal(np.asarray(placed["a/b"]), one)
    np.testing.assert_array_equal(np.asarray(placed["a"]["b"]), other)
    assert placed["t"] is placed["a"]["b"]


def test_donation_spares_what_the_result_or_a_kept_array_shares(mesh):
    single = jnp.arange(8192.0).reshape(128, 64)
    kept = jax.device_put(single, NamedSharding(mesh, P(None, None)))
    names = {"moves": "embed mlp", "stays": P()}
    placed = ar.shard_tree({"moves": single, "stays": kept}, names, mesh=mesh, rules=RULES, donate=True)
    for array in placed.values():
        np.testing.assert_array_equal(np.asarray(array), np.arange(8192.0).reshape(128, 64))


@pytest.mark.usefixtures("narrow")
def test_big_endian_integers_that_do_not_fit_are_refused():
    tree = {"a": np.ones((8, 4), ">i8"), "b": np.full((8, 4), 2**40, ">i8")}
    with pytest.raises(ar.LeafError, match="does not fit int32"):
        ar.shard_tree(tree, {"a": None, "b": None}, mesh=mesh_of("auto"), rules=RULES)


# Errors come before a byte has moved.


def test_a_bad_leaf_means_that_nothing_is_placed(mesh, monkeypatch):
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(ar.DivisibilityError):
        ar.shard_tree({"a": values(8), "b": values(6)}, {"a": "embed", "b": "embed"}, mesh=mesh, rules=RULES)


def test_sizes_alone_are_no_place_for_arrays():
    with pytest.raises(ar.NoMeshError, match="no devices to place arrays on"):
        ar.shard_tree(values(8), "embed", mesh="data=4,model=2", rules=RULES)


def test_a_deleted_array_is_named():
    array = jnp.ones(8)
    array.delete()
    with pytest.raises(ar.LeafError, match="deleted or donated before") as caught:
        ar.shard_tree({"a": {"b": array}}, {"a": {"b": "embed"}}, mesh=mesh_of("auto"), rules=RULES)
    assert caught.value.path == "a/b"


def test_a_traced_array_is_sent_to_constrain():
    mesh = mesh_of("auto")
    with pytest.raises(ar.LeafError, match="inside jit use axisrules.constrain"):
        jax.jit(lambda x: ar.shard_tree(x, "embed", mesh=mesh, rules=RULES))(values(8))
    with pytest.raises(ar.LeafError, match="while JAX is tracing"):
        jax.jit(lambda: ar.shard_tree(values(8), "embed", mesh=mesh, rules=RULES))()


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="indivisble"):
        ar.shard_tree(values(8), "embed", mesh=mesh_of("auto"), rules=RULES, indivisble="next")


def test_modules_come_back_as_new_modules(mesh):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Module:
        w: object

    module = Module(values(8))
    placed = ar.shard_tree(module, Module("embed"), mesh=mesh, rules=RULES)
    assert isinstance(placed, Module)
    assert isinstance(module.w, np.ndarray)
    assert placed.w.sharding == NamedSharding(mesh, P("data"))


def test_an_interrupt_in_the_middle_leaves_the_source_whole(monkeypatch, mesh):
    tree, real = params(), jax.device_put
    before = [leaf.copy() for leaf in jax.tree.leaves(tree)]

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(jax, "device_put", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process may start without one
    try:
        with pytest.raises(KeyboardInterrupt):
            ar.shard_tree(tree, NAMES, mesh=mesh, rules=RULES)
    finally:
        signal.signal(signal.SIGINT, handler)
    monkeypatch.undo()
    assert all(map(np.array_equal, before, jax.tree.leaves(tree)))
    assert_placed(ar.shard_tree(tree, NAMES, mesh=mesh, rules=RULES), mesh)


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, process)
import numpy as np
import axisrules as ar

for types in ("auto", "explicit", {"data": "explicit"}):
    mesh = ar.make_mesh("data=8,model=1", axis_types=types)
    source = np.arange(4096 * 64, dtype=np.float32).reshape(4096, 64) + process  # never compared
    placed = ar.shard_tree(
        {"w": source, "n": np.int64(3)}, {"w": "embed _"}, mesh=mesh, rules={"embed": "data"}
    )
    assert placed["w"].sharding.mesh == mesh
    assert len(placed["w"].addressable_shards) == 4
    for shard in placed["w"].addressable_shards:
        assert shard.data.shape == (512, 64)
        np.testing.assert_array_equal(np.asarray(shard.data), source[shard.index])
    source[:] = -1
    assert all(np.asarray(s.data).min() >= 0 for s in placed["w"].addressable_shards)
    assert placed["n"].sharding.is_fully_replicated
print("process", process, "ok")
"""


def test_each_of_two_processes_builds_its_own_shards_and_compares_nothing(tmp_path):
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    running = [
        subprocess.Popen([sys.executable, script, str(n), address], stdout=subprocess.PIPE, text=True)
        for n in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [output.splitlines()[-1] for output in outputs] == ["process 0 ok", "process 1 ok"]


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize(
    "make", [lambda: np.arange(64.0, dtype=np.float32), lambda: jax.random.split(jax.random.key(0), 64)]
)
def test_an_array_moves_to_a_mesh_that_lacks_its_axes(mesh, make, kind):
    before = ar.shard_tree({"w": make()}, {"w": "embed"}, mesh=mesh, rules=RULES)
    other = mesh_of(kind, "x=8")
    after = ar.shard_tree(before, {"w": "embed"}, mesh=other, rules={"embed": "x"})
    laid = ar.constrain(after["w"], "embed", mesh=mesh, rules=RULES)
    for array, where in ((after["w"], NamedSharding(other, P("x"))), (laid, before["w"].sharding)):
        assert array.sharding == where
        assert (array == make()).all() if array.dtype == np.float32 else bits_of(array) == bits_of(make())
    given = ar.shard_tree(before, {"w": "embed"}, mesh=other, rules={"embed": "x"}, donate=True)
    assert before["w"].is_deleted()
    assert given["w"].sharding == after["w"].sharding


def bits_of(keys):
    return np.asarray(jax.random.key_data(keys)).tobytes()
