"""`init` and `shard_tree` on several processes: every shard is right, and all of them fail alike."""

import sys

import pytest
from processes import run_processes

COUNTS = pytest.mark.parametrize(
    ("processes", "devices"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
)

PRELUDE = f"""
import sys
sys.path[:0] = {sys.path!r}
import jax.numpy as jnp, numpy as np
import axisrules as ar
rules = ar.Rules({{"embed": "data", "mlp": "model"}})
names = {{"layers": [{{"up": "embed mlp", "bias": "mlp"}}] * 3, "step": (), "key": (), "tied": "embed mlp"}}
process, count = jax.process_index(), jax.process_count()

def make(key):
    keys = jax.random.split(key, 4)
    layers = [{{"up": jax.nn.initializers.lecun_normal()(k, (16, 32)), "bias": jnp.ones(32)}} for k in keys[:3]]
    return {{"layers": layers, "step": jnp.zeros((), jnp.int32), "key": keys[3], "tied": layers[1]["up"]}}

def data(value):
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value

def assert_right(made, truth):
    assert jax.tree.structure(made) == jax.tree.structure(truth)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(truth), strict=True):
        assert len(ours.addressable_shards) == 8 // count
        for shard in ours.addressable_shards:
            assert np.array_equal(data(shard.data), np.asarray(data(theirs))[shard.index])

truth = jax.jit(make)(jax.random.key(0))
host = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), truth)
host["tied"] = host["layers"][1]["up"]

def error_of(call):
    try:
        call()
    except ar.AxisRulesError as error:
        return error
    raise AssertionError("no error")
"""


def run(script, processes, devices):
    return run_processes(PRELUDE + script, processes, devices, timeout=240)


@pytest.mark.parametrize(
    ("processes", "devices", "types"),
    [
        (2, 4, "explicit"),
        *[
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [(4, 2, "auto"), (4, 2, "explicit"), (2, 4, "auto"), (2, 4, {"data": "explicit"})]
        ],
    ],
)
def test_every_process_holds_its_shards(processes, devices, types):
    script = f"""
mesh = ar.make_mesh("data=4,model=2", axis_types={types!r})
options = dict(mesh=mesh, rules=rules)
made = ar.init(make, names, args=(jax.random.key(0),), **options)
assert_right(made, truth)
assert made["tied"] is made["layers"][1]["up"]
assert_right(ar.init(lambda: make(jax.random.key(0)), names, **options, check=False), truth)
moments = ar.init(lambda: jax.tree.map(jnp.zeros_like, made["layers"]), names["layers"], **options)
assert_right(moments, jax.tree.map(np.zeros_like, host["layers"]))
placed = ar.shard_tree(host, names, **options)
assert_right(placed, truth)
again = ar.shard_tree(placed, names, **options)
assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True))
other = ar.Rules({{"embed": "model", "mlp": "data"}})
assert_right(ar.shard_tree(placed, names, mesh=mesh, rules=other), truth)
print("right")
"""
    assert run(script, processes, devices) == ["right\n"] * processes


@COUNTS
def test_processes_that_hold_parts_make_up_the_whole(processes, devices):
    script = """
from jax.sharding import PartitionSpec as P
whole = {"w": np.arange(8 * 16.0, dtype=np.float32).reshape(8, 16), "v": np.arange(24, dtype=np.int32),
         "u": np.ones((4, 4), np.float32), "none": None, "f": print}
names = {"w": "embed mlp", "v": "mlp", "u": P(None, "data")}
for sizes, types in (("data=4,model=2", "auto"), ("data=2,model=4", {"data": "explicit"}), ("model=8,data=1", "explicit")):
    mesh = ar.make_mesh(sizes, axis_types=types)
    plan = ar.plan(whole, names, mesh=mesh, rules=rules)
    mine = dict(whole)
    for one, sharding in zip(plan.placements, plan.flat_shardings):
        indices = [sharding.devices_indices_map(one.shape)[d] for d in jax.local_devices()]
        span = tuple(slice(min(i[dim].start or 0 for i in indices), max(n if i[dim].stop is None else i[dim].stop for i in indices))
                     for dim, n in enumerate(one.shape))
        mine[one.path] = whole[one.path][span].copy()
    placed = ar.shard_tree(mine, names, mesh=mesh, rules=rules, parts=True)
    for array in mine.values():
        if isinstance(array, np.ndarray):
            array[...] = 0
    for path in ("w", "v", "u"):
        assert placed[path].sharding.spec == plan.specs[path]
        for shard in placed[path].addressable_shards:
            assert np.array_equal(shard.data, whole[path][shard.index]), path
error = error_of(lambda: ar.shard_tree({"w": np.ones((2 + process, 4))}, {"w": "embed _"}, mesh=mesh, rules={"embed": "model"}, parts=True, dtype="float32"))
assert type(error) in (ar.ProcessError, ar.DivisibilityError), error
print("whole")
"""
    assert run(script, processes, devices) == ["whole\n"] * processes


def test_all_processes_fail_where_one_does_or_differs():
    script = """
mesh = ar.make_mesh("data=4,model=2")
key = jax.random.key(0)
mine = rules if process == 0 else rules.replace("mlp", None)
for call in (
    lambda: ar.init(make, names, args=(key,), mesh=mesh, rules=mine),
    lambda: ar.shard_tree(host, names, mesh=mesh, rules=mine),
):
    error = error_of(call)
    assert type(error) is ar.ProcessError, error
    assert "rules" in str(error) and "layers/0/bias" in str(error)

def failing(key):
    if process == 1:
        raise KeyError("a file is missing here")
    return make(key)

try:
    ar.init(failing, names, args=(key,), mesh=mesh, rules=rules)
except KeyError as error:
    assert process == 1
except ar.ProcessError as error:
    assert process == 0 and "a file is missing here" in str(error)
bad = dict(names, step="embed") if process == 1 else names
error = error_of(lambda: ar.shard_tree(host, bad, mesh=mesh, rules=rules))
assert type(error) is (ar.RankError if process == 1 else ar.ProcessError), error
assert_right(ar.init(make, names, args=(key,), mesh=mesh, rules=rules), truth)  # and nobody hangs
print("alike")
"""
    assert run(script, 2, 4) == ["alike\n"] * 2
