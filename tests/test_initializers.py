"""with_logical_partitioning: born sharded, the bits of jit, and compiled once per behaviour."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AUTO_FIRST, AXIS_TYPES
from jax.nn import initializers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._behaviour import behaviour

RULES = {"output": "model", "input": "data"}
ALL = {
    "normal": initializers.normal(),
    "truncated_normal": initializers.truncated_normal(),
    "uniform": initializers.uniform(),
    "zeros": initializers.zeros,
    "ones": initializers.ones,
    "constant": initializers.constant(3.0),
    "lecun_normal": initializers.lecun_normal(),
    "he_uniform": initializers.he_uniform(),
    "glorot_normal": initializers.glorot_normal(),
    "orthogonal": initializers.orthogonal(),
    "delta": functools.partial(initializers.variance_scaling(1.0, "fan_in", "normal")),
}


@pytest.fixture
def compilations():
    """Counts what is compiled while a test runs."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen) if hasattr(
        jax.monitoring, "unregister_event_duration_listener"
    ) else jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("name", ALL)
def test_born_where_the_rules_say_with_the_bits_of_jit(name, mesh):
    key = jax.random.key(3)
    init = ar.with_logical_partitioning(ALL[name], "input output")
    expected = jax.jit(ALL[name], static_argnums=(1, 2))(key, (8, 12), jnp.float32)
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        made = init(key, (8, 12), jnp.float32)
    assert made.sharding == NamedSharding(mesh, P("data", "model"))
    assert np.asarray(made).tobytes() == np.asarray(expected).tobytes()


def test_without_a_mesh_an_ordinary_array():
    init = ar.with_logical_partitioning(initializers.normal(), "input output")
    with ar.map_logical_axis_names(RULES):
        made = init(jax.random.key(0), (8, 12))
    assert made.sharding.num_devices == 1
    np.testing.assert_array_equal(made, initializers.normal()(jax.random.key(0), (8, 12), jnp.float32))


def test_without_rules_whole_on_the_mesh_and_without_a_warning(mesh):
    with jax.set_mesh(mesh):
        made = ar.with_logical_partitioning(initializers.normal(), "input output")(jax.random.key(0), (8, 12))
    assert made.sharding == NamedSharding(mesh, P(None, None))


def test_without_names_and_spec_the_initializer_itself(mesh):
    with jax.set_mesh(mesh):
        made = ar.with_logical_partitioning(initializers.ones)(jax.random.key(0), (8, 12))
    assert made.shape == (8, 12)


def test_names_win_over_an_explicit_spec(mesh):
    both = ar.with_logical_partitioning(initializers.ones, "input output", P("data", None))
    alone = ar.with_logical_partitioning(initializers.ones, None, P("data"))
    with jax.set_mesh(mesh), ar.map_logical_axis_names({"output": "model"}):
        assert both(jax.random.key(0), (8, 12)).sharding.spec == P(None, "model")
        assert alone(jax.random.key(0), (8, 12)).sharding.spec == P("data", None)


def test_rules_are_those_of_the_call_not_of_the_making(mesh):
    with ar.map_logical_axis_names({"output": "data"}):
        init = ar.with_logical_partitioning(initializers.ones, "input output")
    with jax.set_mesh(mesh), ar.map_logical_axis_names({"output": "model"}):
        assert init(jax.random.key(0), (8, 12)).sharding.spec == P(None, "model")


def test_what_does_not_fit_is_a_clear_error(mesh):
    init = ar.with_logical_partitioning(initializers.ones, "input output")
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        with pytest.raises(ar.RankError, match="2 names for 3 dimensions"):
            init(jax.random.key(0), (2, 8, 12))
        with pytest.raises(ar.DivisibilityError, match="does not divide over data=4"):
            init(jax.random.key(0), (6, 12))
        with pytest.raises(ar.SpecError, match="no mesh axis"):
            ar.with_logical_partitioning(initializers.ones, None, P("dta"))(jax.random.key(0), (8,))
    with pytest.raises(ar.NamesError):
        ar.with_logical_partitioning(initializers.ones, ("input", 3))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, "float32"])
def test_dtypes_are_those_of_the_call(dtype, mesh):
    with jax.set_mesh(mesh):
        made = ar.with_logical_partitioning(initializers.normal(), "a b")(jax.random.key(0), [8, 12], dtype)
    assert made.dtype == jnp.dtype(dtype)


def test_inside_a_trace_the_layout_is_a_constraint(mesh):
    init = ar.with_logical_partitioning(initializers.normal(), "input output")
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        made = jax.jit(lambda key: init(key, (8, 12)))(jax.random.key(0))
        abstract = jax.eval_shape(lambda key: init(key, (8, 12)), jax.random.key(0))
    assert made.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert abstract.shape == (8, 12)


def test_a_committed_key_is_taken_along(mesh):
    key = jax.device_put(jax.random.key(0), jax.devices()[3])
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        made = ar.with_logical_partitioning(initializers.normal(), "input output")(key, (8, 12))
    assert made.sharding == NamedSharding(mesh, P("data", "model"))


def test_raw_keys_work_as_typed_ones_do(mesh):
    init = ar.with_logical_partitioning(initializers.normal(), "input output")
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        raw, typed = init(jax.random.PRNGKey(0), (8, 12)), init(jax.random.key(0), (8, 12))
    np.testing.assert_array_equal(raw, typed)


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
def test_a_hundred_layers_compile_once_per_shape_and_layout(compilations, mesh, axis_types):
    keys = list(jax.random.split(jax.random.key(0), 100))
    rows = 24 + 8 * AXIS_TYPES.index(axis_types)  # what one kind of mesh has compiled serves another
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        for make in (initializers.lecun_normal, initializers.glorot_uniform):
            del compilations[:]
            for key in keys:
                ar.with_logical_partitioning(make(), "input output")(key, (rows, 32), jnp.float32)
                ar.with_logical_partitioning(make(in_axis=-1, out_axis=-2), "output input")(
                    key, (32, rows), jnp.float32
                )
            assert len(compilations) == 2


SCALE = 1.0


def helper(x):
    return x * SCALE


def named(scale, extra=None):
    table = {"scale": scale}

    def init(key, shape, dtype):
        return jnp.full(shape, table["scale"], dtype)

    def plain(key, shape, dtype, offset=extra):
        return jnp.full(shape, scale + (offset or 0), dtype)

    init.table = table
    return init, plain


def test_only_what_certainly_does_the_same_shares():
    def key(function):
        return behaviour(function, [])

    assert key(initializers.normal()) == key(initializers.normal())
    assert key(initializers.normal(0.1)) != key(initializers.normal(0.2))
    assert key(initializers.normal(np.float32(0.1))) == key(initializers.normal(np.float32(0.1)))
    assert key(initializers.constant(1)) != key(initializers.constant(1.0))
    assert key(initializers.constant(True)) != key(initializers.constant(1))
    assert key(initializers.constant(0.0)) != key(initializers.constant(-0.0))
    assert key(initializers.normal()) != key(initializers.uniform())
    assert key(named(1)[1]) == key(named(1)[1])
    assert key(named(1, 2)[1]) != key(named(1, 3)[1])
    assert key(named(1)[0]) == key(named(1)[0])
    assert key(named(1)[0]) != key(named(2)[0])
    changed = named(1)[0]
    changed.table["scale"] = 2
    assert key(changed) == key(named(2)[0])
    assert key(functools.partial(named(1)[1], offset=2)) == key(functools.partial(named(1)[1], offset=2))
    assert key(functools.partial(named(1)[1], offset=2)) != key(functools.partial(named(1)[1], offset=3))
    assert key(np.zeros(3).fill) != key(np.ones(3).fill)


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
def test_a_global_that_changes_makes_another_initializer(mesh):
    def make():
        return lambda key, shape, dtype: helper(jnp.ones(shape, dtype))

    def nested():
        return lambda key, shape, dtype: jnp.full(shape, SCALE, dtype)

    with jax.set_mesh(mesh):
        for scale in (1.0, 2.0, 1.0):
            globals().update(SCALE=scale)
            made = ar.with_logical_partitioning(nested(), "a b")(jax.random.key(0), (8, 8))
            assert float(made.mean()) == scale
    globals().update(SCALE=1.0)
    assert behaviour(make(), []) == behaviour(make(), [])


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
def test_functions_that_refer_to_themselves_are_compared(mesh):
    def make():
        def init(key, shape, dtype, depth=2):
            return jnp.ones(shape, dtype) if depth == 0 else init(key, shape, dtype, depth - 1)

        init.me = init
        return init

    assert behaviour(make(), []) == behaviour(make(), [])
    with jax.set_mesh(mesh):
        assert ar.with_logical_partitioning(make(), "a")(jax.random.key(0), (8,)).sum() == 8


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
def test_a_retrace_runs_the_initializer_of_the_call(mesh):
    def make(value):
        def init(key, shape, dtype):
            return jnp.full(shape, value, dtype)

        def set_value(new):
            nonlocal value
            value = new

        return init, set_value

    first, rebind = make(1.5)
    second, _ = make(1.5)
    with jax.set_mesh(mesh):
        ar.with_logical_partitioning(first, "a")(jax.random.key(0), (8,))
        rebind(7.0)
        raw = ar.with_logical_partitioning(second, "a")(jax.random.PRNGKey(0), (8,))
        assert float(raw.mean()) == 1.5
        assert float(ar.with_logical_partitioning(first, "a")(jax.random.key(0), (8,)).mean()) == 7.0


def test_the_dtype_reaches_the_initializer_as_it_was_given(mesh):
    seen = []

    def init(key, shape, dtype):
        seen.append(dtype)
        return jnp.ones(shape, dtype)

    with jax.set_mesh(mesh):
        ar.with_logical_partitioning(init, "a")(jax.random.key(0), (8,), jnp.float32)
        assert ar.with_logical_partitioning(init, "a")(jax.random.key(0), (8,), None).dtype == jnp.float32
    assert all(dtype is jnp.float32 for dtype in seen)


def test_functions_that_capture_different_arrays_make_different_parameters(mesh):
    def constant(array):
        return lambda key, shape, dtype: jnp.broadcast_to(array, shape).astype(dtype)

    with jax.set_mesh(mesh):
        made = [
            ar.with_logical_partitioning(constant(jnp.full(12, n)), "a b")(jax.random.key(0), (8, 12))
            for n in (1, 2)
        ]
    assert [float(one.mean()) for one in made] == [1, 2]
