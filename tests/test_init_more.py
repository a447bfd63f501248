"""``init`` where it is easy to go wrong: captured arrays, odd meshes, nested functions, arguments."""

import contextlib
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AUTO_FIRST, AXIS_TYPES, in_turn, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import _programs, _slices


def whole_names(path, leaf):
    return (None,) * leaf.ndim


def made_on(mesh, make, *args):
    return ar.init(make, whole_names, args=args, mesh=mesh, rules={})


@pytest.fixture(params=AUTO_FIRST)
def axis_types(request):
    """Where a test compiles much, Auto axes do at first."""
    return request.param


every_mesh = pytest.mark.parametrize("axis_types", AXIS_TYPES)


def normal(n=16):
    return jax.random.normal(jax.random.key(0), (n, 16))


@every_mesh
def test_a_donating_make_leaves_its_arguments_alive(mesh):
    key, count = jax.random.key(5), jnp.arange(8)
    make = jax.jit(lambda key, n: (jax.random.split(key)[0], n + 1), donate_argnums=(0, 1))
    one = jax.jit(lambda n: n + 1, donate_argnums=0)
    made_on(mesh, make, key, count)
    made_on(mesh, one, count)
    assert not key.is_deleted()
    assert not count.is_deleted()


@every_mesh
def test_integers_may_lie_on_a_mesh_as_argument_and_captured(mesh):
    counts = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, P("data")))
    made = made_on(mesh, lambda n: (n * 2, counts + 1), counts)
    np.testing.assert_array_equal(made[0], np.arange(8) * 2)
    np.testing.assert_array_equal(made[1], np.arange(8) + 1)


@every_mesh
def test_keys_may_lie_on_a_mesh(mesh):
    keys = jax.random.split(jax.random.key(1), 8)
    there = jax.device_put(keys, NamedSharding(mesh, P("data")))
    made = made_on(mesh, lambda k: (jax.random.fold_in(k[0], 3), jax.random.normal(k[1], (8,))), there)
    expected = jax.jit(lambda k: (jax.random.fold_in(k[0], 3), jax.random.normal(k[1], (8,))))(keys)
    np.testing.assert_array_equal(jax.random.key_data(made[0]), jax.random.key_data(expected[0]))
    np.testing.assert_array_equal(made[1], expected[1])


@pytest.mark.parametrize(("which", "axis_types"), in_turn(["reversed", "half", "one"]))
@pytest.mark.parametrize("is_active", [False, True])
def test_another_mesh_than_the_active_one_of_other_devices_or_order(which, is_active, mesh, axis_types):
    devices = np.array(jax.devices())
    sizes, chosen = {
        "reversed": ("data=4,model=2", devices[::-1]),
        "half": ("data=2,model=2", devices[4:]),
        "one": ("data=1,model=1", devices[3:4]),
    }[which]
    other = mesh_of(axis_types, sizes, devices=chosen)

    def make(key):
        n = jnp.arange(8) + jax.random.randint(key, (), 0, 9)
        return {"n": n, "k": jax.random.split(key), "w": jax.random.normal(key, (16, 16))}

    expected = jax.jit(make)(jax.random.key(3))
    with jax.set_mesh(mesh if is_active else other):
        made = made_on(other, make, jax.random.key(3))
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(made)} == {other}
    np.testing.assert_array_equal(made["n"], expected["n"])
    np.testing.assert_array_equal(made["w"], expected["w"])


@every_mesh
def test_literal_outputs_keep_their_weak_types(mesh):
    make = jax.jit(lambda: (1.0, 2, jnp.int8(3), True, jnp.float32(4)))
    for ours, theirs in zip(made_on(mesh, make), make(), strict=True):
        assert (ours.dtype, ours.weak_type, ours) == (theirs.dtype, theirs.weak_type, theirs)


def test_two_outputs_of_a_jit_are_two_arrays_that_can_both_be_donated(mesh):
    @jax.jit
    def make():
        w, keys = normal(), jax.random.split(jax.random.key(0))
        return w, w, keys, keys

    made = made_on(mesh, make)
    assert len(set(map(id, made))) == 4
    twice = jax.jit(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))(made[0], made[1])
    np.testing.assert_array_equal(twice[0], twice[1])


def plain(big):
    return lambda: big * 2


def in_a_nested_jit(big):
    return lambda: jax.jit(lambda x: jax.jit(lambda x: x + big)(x))(jnp.ones((64, 64)))


def in_a_scan(big):
    return lambda: jax.lax.scan(lambda c, _: (c + big, None), jnp.zeros((64, 64)), None, length=3)[0]


def in_a_rule_of_jvp(big):
    @jax.custom_jvp
    def double(x):
        return x * 2

    double.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * big))
    return lambda: double(jnp.ones((64, 64)))


def in_a_rule_of_vjp(big):
    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (x * 2, big), lambda big, g: (g * big,))
    return lambda: double(jnp.ones((64, 64)))


@pytest.mark.parametrize("how", [plain, in_a_nested_jit, in_a_scan, in_a_rule_of_jvp, in_a_rule_of_vjp])
def test_programs_keep_no_large_captured_array_and_are_shared(how, mesh):
    big = jnp.arange(64.0 * 64).reshape(64, 64)
    made_on(mesh, how(big))
    before = len(_programs._COMPILED)
    other = big + 1
    made = made_on(mesh, how(other))
    assert len(_programs._COMPILED) == before
    np.testing.assert_array_equal(made, how(other)())
    held = weakref.ref(big)
    del big
    jax.clear_caches()
    gc.collect()
    assert held() is None


@every_mesh
def test_small_parameters_on_the_mesh_share_their_programs(mesh):
    at = NamedSharding(mesh, P("model"))
    biases = [jax.device_put(np.full(8, i, np.float32), at) for i in range(5)]
    made_on(mesh, lambda: biases[0] * 0.25)
    before = len(_programs._COMPILED)
    made = made_on(mesh, lambda: [bias * 0.25 for bias in biases])
    assert len(_programs._COMPILED) == before
    np.testing.assert_array_equal(made[4], np.ones(8))


def test_unpacked_keys_compile_no_more_than_indexed_ones(mesh):
    def make(depth):
        return lambda: [jax.random.normal(key, (8, 8)) for key in jax.random.split(jax.random.key(0), depth)]

    compiled = []

    def listen(event, duration, **details):  # stays registered: jax 0.7.2 has no public way back
        if "backend_compile" in event:
            compiled.append(event)

    counts = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    for depth in (3, 9):
        jax.clear_caches()
        _programs._COMPILED.clear()
        compiled.clear()
        made = made_on(mesh, make(depth))
        counts.append(len(compiled))
    assert counts[0] == counts[1] > 0
    for ours, theirs in zip(made, jax.jit(make(9))(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return x * self.scale


def hiding():
    scale = jnp.sin(jnp.ones(4))
    return {
        "bound": Scaled(scale).apply,
        "closure": lambda x: x * scale,
        "default": lambda x, scale=scale: x * scale,
        "partial": functools.partial(jnp.add, scale),
        "w": scale,
    }


def test_functions_that_hide_arrays_of_the_trace_are_named(mesh):
    with pytest.raises(ar.AxisRulesError) as caught:
        made_on(mesh, hiding)
    text = str(caught.value)
    assert all(f"at:    {where}\n" in text for where in ("bound", "closure      (and 1 more)", "partial"))
    assert "4 leaves" in text  # the array itself is none of them
    with pytest.raises(ar.InitError) as caught:
        made_on(mesh, lambda: {"f": hiding()["partial"]})
    assert str(caught.value) == (
        "a partial holds an array that make computes, where no tree shows it\n"
        "  at:    f\n"
        "  fix:   use jax.tree_util.Partial for functools.partial, or keep the array in a field of a module."
    )


@every_mesh
def test_functions_that_hide_nothing_pass(mesh):
    functions = [jax.nn.gelu, jnp.tanh, functools.partial(jnp.add, 1), Scaled(2.0).apply, Scaled, np.sin]
    made = made_on(mesh, lambda: [normal(), *functions])
    assert made[1:] == functions


@every_mesh
def test_a_partial_of_jax_is_a_tree(mesh):
    made = made_on(mesh, lambda: jax.tree_util.Partial(jnp.add, jnp.sin(jnp.ones(4))))
    np.testing.assert_allclose(made(1.0), np.sin(1.0) + np.ones(4), rtol=1e-6)


def test_arguments_that_cannot_be_used_are_all_listed_with_their_paths(mesh):
    deleted = jnp.ones(8)
    deleted.delete()
    args = ({"wide": np.ones(4), "gone": deleted, "shape": jax.ShapeDtypeStruct((8,), jnp.float32)}, 1)
    with pytest.raises(ar.AxisRulesError) as caught:
        made_on(mesh, lambda x, n: x, *args)
    text = str(caught.value)
    assert all(f"at:    args/0/{name}\n" in text for name in ("wide", "gone", "shape"))
    assert "axisrules.plan of jax.eval_shape(make, *args)" in text


@every_mesh
def test_nothing_of_the_trace_is_left(mesh):
    with jax.checking_leaks():
        made = made_on(mesh, lambda: {"w": normal(), "b": jnp.zeros(3)})
    assert not isinstance(made["w"], jax.core.Tracer)


@every_mesh
def test_shard_map_and_constraints_inside(mesh, axis_types):
    def doubled():
        return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(normal())

    def held():
        return ar.constrain(normal(), "embed _", mesh=mesh, rules={"embed": "data"})

    if axis_types == "auto":
        expected = np.asarray(jax.jit(normal)())
        np.testing.assert_array_equal(made_on(mesh, held), expected)
        np.testing.assert_array_equal(made_on(mesh, doubled), 2 * expected)
        return
    with pytest.raises(ar.ConstraintError, match="has to be the mesh of the trace"):
        made_on(mesh, held)  # what make computes has no mesh in its type: that is given to the result


@pytest.mark.parametrize(("is_active", "axis_types"), [(True, "explicit"), (False, "mixed")])
def test_keys_made_under_the_mesh_serve_as_argument_and_captured(mesh, is_active):
    def make(key):
        first, second = jax.random.split(key)
        return {
            "n": jnp.arange(8) + jax.random.randint(first, (), 0, 9),
            "w": jax.random.normal(second, (8, 4)),
        }

    expected = jax.jit(make)(jax.random.key(3))
    with jax.set_mesh(mesh):
        key = jax.random.key(3)  # on Explicit axes their mesh is a part of its type
    with jax.set_mesh(mesh) if is_active else contextlib.nullcontext():
        for made in (made_on(mesh, make, key), made_on(mesh, lambda: make(key))):
            for name, array in made.items():
                assert array.sharding.mesh == mesh
                np.testing.assert_array_equal(array, expected[name])


@every_mesh
def test_loops_and_products_of_arguments_on_the_mesh(mesh):
    host = np.arange(128, dtype=np.float32).reshape(16, 8)
    there = jax.device_put(host, NamedSharding(mesh, P("data", "model")))
    loop, product = made_on(mesh, lambda x: (jax.lax.fori_loop(0, 3, lambda n, y: y + 1, x), x @ x.T), there)
    np.testing.assert_array_equal(loop, host + 3)
    np.testing.assert_array_equal(product, host @ host.T)


def test_random_contexts_are_part_of_a_program(mesh):
    def make():
        with jax.threefry_partitionable(False):
            old = normal()
        with jax.threefry_partitionable(True):
            new = normal()
        return old, new

    made, expected = made_on(mesh, make), jax.jit(make)()
    for ours, theirs in zip(made, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(made[0], made[1])


def test_one_warning_of_a_name_without_a_rule(mesh):
    with pytest.warns(ar.UnmappedAxisWarning) as caught:
        ar.init(lambda: [normal(), normal()], ["odd _", "odd _"], mesh=mesh, rules={})
    assert len(caught) == 1


def test_low_precision_and_nothing_at_all(mesh):
    kinds = (jnp.bfloat16, jnp.int4, bool)

    def make():
        return [normal().astype(kind) for kind in kinds], jnp.zeros((0, 3)), {}, None, jnp.zeros(())

    made, expected = made_on(mesh, make), jax.jit(make)()
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), strict=True)


@every_mesh
def test_a_small_result_of_something_large_is_not_made_on_one_device(mesh):
    def make():
        @jax.jit
        def position(key):
            return jnp.argmax(jax.random.normal(key, (512, 512)))

        return {"at": position(jax.random.key(0))}

    parts = _slices.cut(jax.make_jaxpr(make)())
    assert [eqn.primitive.name for eqn in parts.direct.eqns] == ["random_seed"]
    made = ar.init(make, {"at": ()}, mesh=mesh, rules={})
    assert int(made["at"]) == int(jax.jit(make)()["at"])
