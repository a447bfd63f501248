"""What the partitioner and the TPU compiler say of a user's own step."""

import importlib.util
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import cost
from axisrules.cost._compiling import _cache
from axisrules.cost._lowering import lower
from axisrules.cost._topologies import topology
from tests.pricing import TRUTH, lowered

MESH = "data=4,model=2"
RULES = {"batch": "data", "embed": "data", "mlp": "model"}
PARAMS = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
LAYOUTS = ["dp", "tp", "fsdp", "fsdp_tp"]


def abstract(tree, names, mesh=MESH):
    return ar.plan(tree, names, mesh=mesh, rules=RULES).abstract


def arguments(mesh=MESH):
    rows = {"x": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
    return abstract(PARAMS, {"up": "embed mlp"}, mesh), abstract(rows, {"x": "batch _"}, mesh)


def step(params, rows):
    def loss(params):
        return jnp.mean((rows["x"] @ params["up"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradient), value


@pytest.mark.parametrize("of", [step, jax.jit(step)], ids=["plain", "jitted"])
def test_a_step_is_partitioned_for_more_devices_than_there_are(of):
    found = cost.measure(of, *arguments("data=16,model=2"))
    assert found.mesh == {"data": 16, "model": 2}
    assert found.argument_bytes == 64 * 256 * 4 // 32 + 32 * 64 * 4 // 16
    assert found.wire_bytes_per_axis["data"] > 2 * 15 / 16 * 64 * 256 * 4 / 2
    assert {one.kind for one in found.collectives} >= {"all-gather", "reduce-scatter"}
    assert (found.fits, found.temp_bytes, found.peak_bytes, found.seconds) == (None, None, None, None)
    assert "after partitioning" in found.source
    assert found.flops >= 2 * 2 * 32 * 64 * 256  # the product, and its gradient


def test_hardware_adds_padding_and_times():
    found = cost.measure(step, *arguments(), hardware="v5e")
    assert found.argument_bytes == cost.array_bytes((16, 128), "float32", "v5e") + cost.array_bytes(
        (8, 64), "float32", "v5e"
    )
    assert found.seconds == max(found.seconds_per_axis.values())
    assert found.seconds_per_axis["data"] == found.wire_bytes_per_axis["data"] / 45e9


def test_arrays_scalars_keys_and_other_things_may_be_arguments():
    mesh = ar.make_mesh(MESH)
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data")))

    def of(x, keyed, scale, word, nothing):
        assert (scale, word, nothing) == (2, "word", None)
        return jnp.sum(x * scale + keyed["w"]) + jax.random.normal(jax.random.wrap_key_data(keyed["key"]))

    keyed = {"w": np.ones(4, np.float32), "key": np.zeros(2, np.uint32)}
    assert cost.measure(of, x, keyed, 2, "word", None).wire_bytes_per_axis == {"data": 6}


def test_what_a_module_of_flax_changes_in_place_is_part_of_its_step():
    nnx = pytest.importorskip("flax.nnx")
    named = pytest.importorskip("axisrules_flax").named

    def of(module, rows):
        gradient = nnx.grad(lambda module: jnp.mean(module(rows["x"]) ** 2))(module)
        new = jax.tree.map(lambda p, g: p - g, nnx.state(module, nnx.Param), nnx.state(gradient, nnx.Param))
        nnx.update(module, new)

    made = nnx.eval_shape(lambda: named(nnx.Linear, ("embed", "mlp"))(64, 256, rngs=nnx.Rngs(0)))
    module = ar.plan(made, mesh=MESH, rules=RULES).abstract
    for one in (of, nnx.jit(of)):
        found = cost.measure(one, module, arguments()[1])
        assert {kind for kind, _ in found.collectives.by_kind} >= {"all-gather", "reduce-scatter"}


def test_modules_of_equinox_may_be_arguments():
    eqx = pytest.importorskip("equinox")
    made = eqx.filter_eval_shape(lambda: eqx.nn.Linear(64, 128, key=jax.random.key(0)))
    module = ar.plan(
        made, lambda path, leaf: "mlp embed" if path == "weight" else "mlp", mesh=MESH, rules=RULES
    )

    def of(module, rows):
        return eqx.filter_grad(lambda module: jnp.mean(jax.vmap(module)(rows["x"]) ** 2))(module)

    for one in (of, eqx.filter_jit(of)):
        assert cost.measure(one, module.abstract, arguments()[1]).wire_bytes_per_axis["data"] > 0


def test_a_step_that_does_not_trace_raises_its_own_error_with_its_arguments():
    with pytest.raises(KeyError) as caught:
        cost.measure(lambda params, rows: rows["y"], *arguments())
    note = caught.value.__notes__[-1]
    assert "argument 0, up: float32 (64, 256) P('data', 'model')" in note
    assert "argument 1, x: float32 (32, 64) P('data', None)" in note


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"via": "gpu"}, ar.PolicyError, "is no way to measure"),
        ({"time_limit": 0.01}, ar.HardwareError, "took more than 0.01 seconds"),
        ({"hardware": "v5f"}, ar.HardwareError, "is unknown"),
        ({"via": "tpu"}, ar.HardwareError, "needs a topology"),
        ({"via": "tpu", "topology": "v5f:2x2"}, ar.HardwareError, "did you mean"),
        ({"via": "tpu", "topology": "v5e:4x4"}, ar.HardwareError, "has 16 devices, and the mesh"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        cost.measure(step, *arguments(), **options)


def test_what_is_no_step_or_has_no_mesh_is_refused():
    with pytest.raises(ar.PolicyError, match="no step"):
        cost.measure(3, *arguments())
    with pytest.raises(ar.PolicyError, match="no argument carries a sharding"):
        cost.measure(step, np.zeros(3))
    with pytest.raises(ar.MeshError, match="different meshes"):
        cost.measure(step, arguments()[0], arguments("data=8,model=2")[1])


@pytest.mark.parametrize("name", ["v5e:32x32", "v5e:4", "v5e", "v5e:3x3", "v4:2x2", "v5e:0x4", "v4:32x4x4"])
def test_a_topology_that_does_not_exist_is_refused(name):
    with pytest.raises(ar.HardwareError):
        topology(name)


@pytest.mark.parametrize(
    ("name", "devices"), [("v5e:4x4", 16), ("v4:2x2x1", 4), ("v3:4x4", 32), ("v5p:4x4x12", 192)]
)
def test_a_topology_has_its_devices(name, devices):
    assert topology(name).devices == devices


def test_without_libtpu_the_extra_is_named():
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed")
    with pytest.raises(ar.MissingExtraError, match=r"axisrules\[tpu\]"):
        cost.measure(step, *arguments(), via="tpu", topology="v5e:2x4")


def test_progress_is_told(monkeypatch):
    told = []
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    cost.measure(step, *arguments(), time_limit=1e9, progress=told.append)
    assert told[0].startswith("partitioning: ")


def test_the_partitioned_step_is_near_what_the_tpu_moves():
    total = {}
    for layout in LAYOUTS:
        truth = TRUTH[f"tpu_4x4_{layout}_scan"]
        found = cost.measure(*_spread(lowered(layout, truth["mesh"])), hardware="v5e")
        moved = sum(truth["wire_bytes_per_axis"].values())
        assert found.argument_bytes == truth["argument_bytes"]
        assert found.wire_bytes == pytest.approx(moved, rel=0.15)
        total[layout] = (found.wire_bytes, moved)
    assert sorted(LAYOUTS, key=lambda one: total[one][0]) == sorted(LAYOUTS, key=lambda one: total[one][1])


def _spread(pair):
    function, given = pair
    return function, *given


def test_one_step_has_one_place_in_the_cache_wherever_it_is_lowered():
    one = lower(step, arguments(), "cpu").order()
    two = lower(step, arguments(), "cpu").order()
    other = lower(step, arguments("data=8,model=2"), "cpu").order()
    extra = {"topology": "v5e:2x4", "topology_options": {}}
    places = [_cache({**order, **extra}, {}) for order in (one, two, other)]
    assert places[0] == places[1] != places[2]


@pytest.mark.slow
def test_the_tpu_compiler_says_what_it_was_found_to_say(tmp_path, monkeypatch):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    monkeypatch.setenv("AXISRULES_CACHE", str(tmp_path))
    function, given = lowered("fsdp_tp", {"data": 2, "model": 2}, L=2, V=4096, S=256)
    found = cost.measure(function, *given, via="tpu", topology="v5e:2x2", time_limit=1800)
    near = cost.measure(function, *given, hardware="v5e")
    assert found.fits
    assert found.argument_bytes == near.argument_bytes
    assert near.wire_bytes == pytest.approx(found.wire_bytes, rel=0.15)
    begin = time.monotonic()
    again = cost.measure(function, *given, via="tpu", topology="v5e:2x2")
    assert again.wire_bytes_per_axis == found.wire_bytes_per_axis
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_step_that_does_not_fit_a_tpu_is_a_result(tmp_path, monkeypatch):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    monkeypatch.setenv("AXISRULES_CACHE", str(tmp_path))
    tree = {"w": jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32)}
    large = ar.plan(
        tree, {"w": "embed mlp"}, mesh="data=2,model=2", rules={"embed": None, "mlp": None}
    ).abstract
    found = cost.measure(lambda tree: tree["w"] * 2, large, via="tpu", topology="v5e:2x2")
    assert (found.fits, found.collectives, found.wire_bytes_per_axis) == (False, None, {})
    assert "does not fit" in str(found)
