"""What moving a tree costs, counted by brute force on what JAX says of every device."""

import jax
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from strategies import policies, rules, trees

import axisrules as ar
from axisrules._tiles import move

MESHES = [
    {"x": 8},
    {"x": 2, "y": 4},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2},
    {"x": 1, "y": 8, "z": 1},
    {"y": 6},
]
LENIENT = {"indivisible": "next", "absent": "drop", "unmapped": "replicate"}


def concrete(sizes, order=None):
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count] if order is None else [jax.devices()[i] for i in order])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def masks(mesh, spec, shape):
    """Per device, which elements it holds."""
    found = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        found[device] = np.zeros(shape, bool)
        found[device][index] = True
    return found


def counted(shape, old, new):
    """Elements received per device in the order of the new mesh, and elements that cross each axis."""
    held, wanted = masks(*old, shape), masks(*new, shape)
    places = {device: place for place, device in np.ndenumerate(old[0].devices)}
    received, over = [], dict.fromkeys(old[0].axis_names, 0)
    for device in new[0].devices.flat:
        here = held.get(device, np.zeros(shape, bool))
        lacking = wanted[device] & ~here
        received.append(int(lacking.sum()))
        if device not in places:
            continue
        for element in np.argwhere(lacking):
            sources = [places[other] for other, mask in held.items() if mask[tuple(element)]]
            crossed = [
                {axis for axis, a, b in zip(over, places[device], place, strict=True) if a != b}
                for place in sources
            ]
            nearest = min(crossed, key=len)
            assert sum(len(one) == len(nearest) for one in crossed) == 1, "the nearest source is one"
            for axis in nearest:
                over[axis] += 1
    return received, over


@st.composite
def layouts(draw, sizes, shape):
    axes, entries = list(sizes), []
    for size in shape:
        chosen = draw(st.lists(st.sampled_from(axes), max_size=2, unique=True)) if axes else []
        ways = int(np.prod([sizes[axis] for axis in chosen], initial=1))
        if size % ways:
            chosen = []
        axes = [axis for axis in axes if axis not in chosen]
        entries.append(tuple(chosen))
    return tuple(entries)


@st.composite
def moves(draw):
    sizes = [draw(st.sampled_from(MESHES)) for _ in range(2)]
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 8, 12, 6, 0]), max_size=3)))
    return shape, [(one, draw(layouts(one, shape))) for one in sizes]


@given(case=moves(), shuffled=st.booleans(), data=st.data())
def test_moved_elements_are_those_that_a_count_over_all_devices_finds(case, shuffled, data):
    shape, ((old_sizes, old), (new_sizes, new)) = case
    count = int(np.prod(list(new_sizes.values())))
    order = data.draw(st.permutations(range(8)))[:count] if shuffled else list(range(count))
    old_mesh, new_mesh = concrete(old_sizes), concrete(new_sizes, order)
    received, over = counted(shape, (old_mesh, P(*old)), (new_mesh, P(*new)))
    places = list(old_mesh.devices.flat)
    homes = np.array([places.index(d) if d in places else -1 for d in new_mesh.devices.flat])
    found = move(shape, (old, old_sizes), (new, new_sizes), homes)
    assert found.received.tolist() == received
    assert {axis: found.over.get(axis, 0) for axis in over} == over
    assert found.to_new == sum(n for n, home in zip(received, homes, strict=True) if home < 0)


def planned(tree, names, sizes, some_rules, options):
    return ar.plan(tree, names, mesh=sizes, rules=some_rules, **{**LENIENT, **options})


@given(
    tree_and_names=trees(),
    before=rules,
    after=rules,
    meshes=st.tuples(*[st.sampled_from(MESHES)] * 2),
    options=policies,
)
def test_bytes_of_a_diff_are_those_of_its_leaves_and_none_without_a_change(
    tree_and_names, before, after, meshes, options
):
    old, new = (planned(*tree_and_names, m, r, options) for m, r in zip(meshes, (before, after), strict=True))
    found = old.diff(new)
    assert found.received == sum(one.received for one in found.changed)
    assert found.bytes_per_device == new.bytes_per_device - old.bytes_per_device
    for axis, size in found.over.items():
        assert size == sum(one.over[axis] for one in found.changed)
    assert found.received <= sum(found.over.values()) + found.to_new_devices
    assert found.most <= found.received <= found.most * new.mesh.size
    assert not old.diff(old)
    changed = {one.path for one in found.changed}
    if meshes[0] == meshes[1]:
        assert changed == {
            a.path for a, b in zip(old.placements, new.placements, strict=True) if a.spec != b.spec
        }
    assert str(found)


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
@given(tree_and_names=trees(), before=rules, after=rules)
@settings(max_examples=settings.default.max_examples // 3 + 1)  # of each kind
def test_moved_bytes_equal_those_counted_by_placing_a_tree_for_real(
    axis_types, tree_and_names, before, after
):
    tree, names = tree_and_names
    mesh = mesh_of(axis_types, "x=2,y=4,z=1")
    placed = [ar.shard_tree(tree, names, mesh=mesh, rules=some, **LENIENT) for some in (before, after)]
    counted_bytes = 0
    for old, new in zip(*map(jax.tree.leaves, placed), strict=True):
        held = {}
        for shard in old.addressable_shards:
            held[shard.device] = np.zeros(old.shape, bool)
            held[shard.device][shard.index] = True
        for shard in new.addressable_shards:
            counted_bytes += int((~held[shard.device][shard.index]).sum()) * new.dtype.itemsize
    plans = [ar.plan(tree, names, mesh=mesh, rules=some, **LENIENT) for some in (before, after)]
    assert plans[0].diff(plans[1]).received == counted_bytes


def test_a_byte_that_crosses_two_axes_counts_for_both():
    plans = [
        ar.plan({"w": np.zeros((4, 4), np.int8)}, {"w": spec}, mesh="x=2,y=2", rules=())
        for spec in (P("x", "y"), P())
    ]
    found = plans[0].diff(plans[1])
    # Every device holds 4 of 16 bytes: 4 more lie across x, 4 across y, 4 across both.
    assert (found.received, found.most, found.over) == (48, 12, {"x": 32, "y": 32})


def test_splitting_what_every_device_holds_moves_nothing():
    plans = [
        ar.plan({"w": np.zeros((8, 8), np.int8)}, {"w": spec}, mesh="x=4,y=2", rules=())
        for spec in (P(), P("x", "y"))
    ]
    found = plans[0].diff(plans[1])
    assert (bool(found), found.received, found.over) == (True, 0, {"x": 0, "y": 0})


def test_devices_that_were_not_in_the_mesh_receive_all_of_their_tile():
    small, large = (
        ar.plan({"w": np.zeros((8, 8), np.int8)}, {"w": "a _"}, mesh=mesh, rules={"a": "x"})
        for mesh in ("x=2", "x=4")
    )
    grown = small.diff(large)
    # Device 1 holds rows 4 to 7 and wants 2 and 3; devices 2 and 3 hold nothing.
    assert (grown.received, grown.over, grown.to_new_devices) == (48, {"x": 16}, 32)
    shrunk = large.diff(small)
    assert (shrunk.received, shrunk.over, shrunk.to_new_devices) == (16 + 32, {"x": 48}, 0)


def test_a_mesh_of_the_same_devices_in_another_order_moves_what_lies_elsewhere():
    a, b = concrete({"x": 8}), concrete({"x": 8}, [1, 0, 2, 3, 4, 5, 6, 7])
    plans = [ar.plan({"w": np.zeros(8, np.int8)}, {"w": "a"}, mesh=m, rules={"a": "x"}) for m in (a, b)]
    found = plans[0].diff(plans[1])
    assert (found.received, found.changed[0].what) == (2, ("mesh",))


def test_the_cost_on_8192_devices_is_counted_exactly_and_at_once():
    tree = {f"w{i}": jax.ShapeDtypeStruct((8192, 8192), "bfloat16") for i in range(300)}
    plans = [
        ar.plan(tree, dict.fromkeys(tree, "a b"), mesh=AbstractMesh((64, 128), ("x", "y")), rules=r)
        for r in ({"a": "x", "b": "y"}, {"a": ("x", "y"), "b": None})
    ]
    found = plans[0].diff(plans[1])
    tile = 8192 * 2
    own = tile // 128  # of its one row, a device holds the columns of its own tile
    assert found.received == 300 * 8192 * (tile - own)
    assert found.over == {"x": 0, "y": found.received}
    assert found.bytes_per_device == 0


def test_the_count_by_brute_force_tells_the_axes_apart():
    mesh = concrete({"x": 2, "y": 4})
    received, over = counted((8,), (mesh, P("x")), (mesh, P("y")))
    assert (sum(received), over) == (8, {"x": 8, "y": 0})
