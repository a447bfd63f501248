"""``init``: what is made, that it equals a jit of the whole, what is compiled, and what is refused."""

import io
import re
import threading
from contextlib import redirect_stdout

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AUTO_FIRST, AXIS_TYPES, in_turn, mesh_of
from jax.nn import initializers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import _programs

RULES = {"embed": "data", "mlp": "model"}
COMPILATION = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(params=AUTO_FIRST)
def axis_types(request):
    """Where a test compiles much, Auto axes do at first."""
    return request.param


every_mesh = pytest.mark.parametrize("axis_types", AXIS_TYPES)


@pytest.fixture
def compilations():
    """The number of compilations so far."""
    events = []

    def listen(event, duration, **details):
        if event == COMPILATION:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(events)
    if hasattr(jax.monitoring, "unregister_event_duration_listener"):
        jax.monitoring.unregister_event_duration_listener(listen)


def bits(value):
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def assert_same(made, expected, near=()):
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(expected), strict=True
    ):
        assert ours.dtype == theirs.dtype, path
        assert getattr(ours, "weak_type", False) == getattr(theirs, "weak_type", False), path
        if path[-1] in near:  # the order of a sum over a split dimension is another one
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, err_msg=str(path))
            continue
        np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=str(path), strict=True)


def whole(make, *args):
    """What one jit of the whole gives on one device."""
    return jax.jit(make)(*args)


def names_of(shape):
    return tuple(["embed", "mlp", None, None][: len(shape)])


def check(make, *args, mesh, names=None):
    """Makes the tree, with names for all its arrays, and compares it with one jit of the whole."""
    expected = whole(make, *args)
    if names is None:
        names = lambda path, leaf: (None,) * leaf.ndim if leaf.ndim != 2 else ("embed", "mlp")  # noqa: E731
    made = ar.init(make, names, args=args, mesh=mesh, rules=RULES)
    assert_same(made, expected)
    for leaf in jax.tree.leaves(made):
        spec = P("data", "model") if leaf.ndim == 2 else P(*[None] * leaf.ndim)
        assert leaf.sharding == NamedSharding(mesh, spec)
    return made


# The bits of one jit of the whole.

INITIALIZERS = {
    "zeros": initializers.zeros,
    "ones": initializers.ones,
    "constant": initializers.constant(0.3),
    "normal": initializers.normal(0.02),
    "truncated_normal": initializers.truncated_normal(0.02),
    "uniform": initializers.uniform(0.1),
    "glorot_normal": initializers.glorot_normal(),
    "glorot_uniform": initializers.glorot_uniform(),
    "xavier_normal": initializers.xavier_normal(),
    "xavier_uniform": initializers.xavier_uniform(),
    "he_normal": initializers.he_normal(),
    "he_uniform": initializers.he_uniform(),
    "kaiming_normal": initializers.kaiming_normal(),
    "kaiming_uniform": initializers.kaiming_uniform(),
    "lecun_normal": initializers.lecun_normal(),
    "lecun_uniform": initializers.lecun_uniform(),
    "orthogonal": initializers.orthogonal(),
    "delta_orthogonal": initializers.delta_orthogonal(),
    "variance_scaling": initializers.variance_scaling(2.0, "fan_avg", "truncated_normal"),
}


def test_every_initializer_of_jax_is_covered():
    public = {name for name, value in vars(initializers).items() if name[0].islower() and callable(value)}
    assert public - {"variance_scaling"} - set(INITIALIZERS) == set()


SHAPES = {name: (3, 16, 64) if name == "delta_orthogonal" else (16, 64) for name in INITIALIZERS}


def every_initializer():
    keys = iter(jax.random.split(jax.random.key(1), 3 * len(INITIALIZERS)))
    return {
        name: {
            "float32": [initializer(next(keys), SHAPES[name], jnp.float32) for _ in range(2)],
            # JAX has no QR of bfloat16 on CPU
            "bfloat16": None if "orthogonal" in name else initializer(next(keys), SHAPES[name], jnp.bfloat16),
        }
        for name, initializer in INITIALIZERS.items()
    }


@pytest.mark.parametrize(
    ("sizes", "axis_types"),
    [
        ("data=4,model=2", "explicit"),
        *[
            pytest.param(sizes, kind, marks=pytest.mark.slow)
            for sizes in ("data=1", "data=2", "data=4,model=2")
            for kind in AXIS_TYPES
            if (sizes, kind) != ("data=4,model=2", "explicit")
        ],
    ],
)
def test_values_of_every_initializer_are_those_of_one_jit(sizes, axis_types):
    names = ar.NameTable({"delta_orthogonal/**": "_ embed mlp", "**": "embed mlp"})
    mesh = mesh_of(axis_types, sizes)
    made = ar.init(every_initializer, names, mesh=mesh, rules=RULES, absent="drop")
    assert_same(made, whole(every_initializer))
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(made))


def test_eager_values_are_near(mesh):
    def make():
        return INITIALIZERS["normal"](jax.random.key(0), (64, 64))

    made = ar.init(make, "embed mlp", mesh=mesh, rules=RULES)
    np.testing.assert_allclose(np.asarray(made), np.asarray(make()), rtol=1e-5)


def dense(key, rows, columns):
    return initializers.lecun_normal()(key, (rows, columns))


@every_mesh
def test_on_every_kind_of_mesh_also_an_active_one(mesh):
    def make():
        first, second = jax.random.split(jax.random.key(0))
        return {"up": dense(first, 8, 32), "down": dense(second, 8, 16)}

    check(make, mesh=mesh)
    with jax.set_mesh(mesh):
        check(make, mesh=mesh)
        with ar.map_logical_axis_names(RULES):
            made = ar.init(make, {"up": "embed mlp", "down": "embed mlp"})
    assert made["up"].sharding == NamedSharding(mesh, P("data", "model"))


MAKERS = {}


def maker(function):
    MAKERS[function.__name__] = function
    return function


@maker
def literals_and_constants():
    captured, table = jnp.full((8, 4), 0.5), np.arange(5000.0, dtype=np.float32).reshape(1000, 5)[:, :4]
    return {"a": jnp.ones((8, 4)) * 3.0, "b": captured / jnp.float32(3), "c": table[:8] * 2 + captured}


@maker
def shared_intermediate():
    big = jax.random.normal(jax.random.key(0), (512, 256))
    return {"a": big, "top": big[:256], "sum": big.sum(0), "twice": big * 2}


@maker
def shared_costly_intermediate():
    matrix = jax.random.normal(jax.random.key(0), (32, 32))
    q, r = jnp.linalg.qr(matrix)
    return {"q": q, "r": r, "trace": jnp.trace(r), "scaled": q * 3}


@maker
def nested_jits():
    @jax.jit
    def layer(key):
        up, down = jax.random.split(key)
        return {"w": jax.jit(dense, static_argnums=(1, 2))(up, 8, 16), "b": jnp.zeros(16), "k": down}

    keys = jax.random.split(jax.random.key(7), 4)
    return jax.jit(lambda keys: [layer(key) for key in keys])(keys)


@maker
def custom_derivatives():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (g,))
    w = dense(jax.random.key(0), 8, 16)
    return {"relu": jax.nn.relu(w), "silu": jax.nn.silu(w), "double": double(w), "soft": jax.nn.softplus(w)}


@maker
def loops():
    def body(carry, key):
        w = jax.random.normal(key, (4, 8))
        return carry + 1, {"w": w, "b": w.sum(0)}

    count, stacked = jax.lax.scan(body, 0, jax.random.split(jax.random.key(0), 3))
    power = jax.lax.fori_loop(0, 3, lambda i, x: x @ x, jnp.eye(8) * 0.5)
    chosen = jax.lax.cond(count > 2, lambda: jnp.ones((8, 4)), lambda: jnp.zeros((8, 4)))
    return {"stacked": stacked, "count": count, "power": power, "chosen": chosen}


@maker
def random_functions():
    keys = iter(jax.random.split(jax.random.key(3), 20))
    return {
        "bits": jax.random.bits(next(keys), (300, 300)),
        "integers": jax.random.randint(next(keys), (1000,), 0, 50),
        "permutation": jax.random.permutation(next(keys), 100),
        "bernoulli": jax.random.bernoulli(next(keys), 0.3, (8, 8)),
        "gamma": jax.random.gamma(next(keys), 2.0, (8, 4)),
        "choice": jax.random.choice(next(keys), 50, (20,), replace=False),
        "truncated": jax.random.truncated_normal(next(keys), -1, 1, (8, 8)),
        "legacy": jax.random.normal(jax.random.PRNGKey(5), (8, 8)),
        "rbg": jax.random.uniform(jax.random.key(1, impl="rbg"), ()),
    }


@maker
def integers_keys_and_scalars():
    key = jax.random.key(9)
    return {
        "key": key,
        "keys": jax.random.split(key, 6),
        "legacy": jax.random.PRNGKey(2),
        "step": jnp.zeros((), jnp.int32),
        "range": jnp.arange(10) * 3,
        "mask": jnp.tri(8, dtype=bool),
        "large": jnp.arange(100_000),
        "scale": jnp.sqrt(2.0) / 3,
        "flag": jnp.asarray(True),
        "weak": jnp.asarray(2.0) * 1.5,
    }


@maker
def stacks():
    keys = jax.random.split(jax.random.key(0), 4)
    return {"vmapped": jax.vmap(lambda key: dense(key, 8, 16))(keys)}


@maker
def one_after_another():
    params = {"w": dense(jax.random.key(0), 400, 400), "b": jnp.zeros((400,))}
    average = jax.tree.map(jnp.copy, params)
    return {"params": params, "average": average, "moments": jax.tree.map(jnp.zeros_like, params)}


@maker
def bfloat16_model():
    w = initializers.normal()(jax.random.key(0), (64, 64), jnp.bfloat16)
    return {
        "w": w,
        "half": (w * 0.5).astype(jnp.float16),
        "empty": jnp.zeros((0, 4)),
        "one": jnp.ones((1, 1, 3)),
    }


@pytest.mark.parametrize(("name", "axis_types"), in_turn(MAKERS))
def test_equals_one_jit_of_the_whole(name, mesh):
    names = lambda path, leaf: (None,) * leaf.ndim  # noqa: E731
    fill = ("data", "model")
    made = ar.init(MAKERS[name], names, mesh=mesh, rules={}, fill=fill, min_bytes=1)
    assert_same(made, whole(MAKERS[name]), near=[jax.tree_util.DictKey(key) for key in ("sum", "trace")])
    expected = ar.plan(jax.eval_shape(MAKERS[name]), names, mesh=mesh, rules={}, fill=fill, min_bytes=1)
    assert jax.tree.map(lambda x: x.sharding.spec, made) == expected.specs


def test_arguments_are_traced_and_not_changed(mesh):
    host = np.arange(32, dtype=np.float32).reshape(8, 4)
    before = host.copy()

    def make(key, tree, size, activation):
        assert size == 16
        assert activation is jnp.tanh
        return {"w": dense(key, 8, size), "t": activation(tree["x"]), "u": tree["x"]}

    made = ar.init(
        make,
        {"w": "embed mlp", "t": "embed mlp", "u": "embed mlp"},
        args=(jax.random.key(0), {"x": host}, 16, jnp.tanh),
        mesh=mesh,
        rules=RULES,
    )
    assert_same(made, whole(lambda key, x: make(key, {"x": x}, 16, jnp.tanh), jax.random.key(0), host))
    host[:] = 0
    np.testing.assert_array_equal(made["u"], before)


def test_keys_as_arguments_and_captured_keys_share_their_programs(mesh):
    names = {"w": "embed mlp"}
    captured = jax.random.key(4)
    legacy = jax.random.PRNGKey(4)
    ar.init(lambda key: {"w": dense(key, 24, 40)}, names, args=(captured,), mesh=mesh, rules=RULES)
    before = len(_programs._COMPILED)
    for seed in range(3):
        key = jax.random.key(seed)
        ar.init(lambda key=key: {"w": dense(key, 24, 40)}, names, mesh=mesh, rules=RULES)
        ar.init(lambda s=seed: {"w": dense(jax.random.key(s), 24, 40)}, names, mesh=mesh, rules=RULES)
    assert len(_programs._COMPILED) == before
    ar.init(lambda: {"w": dense(legacy, 24, 40)}, names, mesh=mesh, rules=RULES)
    after = len(_programs._COMPILED)
    ar.init(lambda: {"w": dense(legacy + 1, 24, 40)}, names, mesh=mesh, rules=RULES)
    assert len(_programs._COMPILED) == after


def layers(depth, width=24):
    def make():
        keys = jax.random.split(jax.random.key(0), 2 * depth)
        return [
            {
                "up": initializers.lecun_normal()(keys[2 * i], (width, 4 * width)),
                "down": initializers.lecun_normal()(keys[2 * i + 1], (4 * width, width)),
                "bias": jnp.zeros(width),
            }
            for i in range(depth)
        ]

    return make, [{"up": "embed mlp", "down": "mlp embed", "bias": "embed"}] * depth


def test_compilations_do_not_grow_with_depth_and_rebuilding_compiles_nothing(compilations, mesh):
    counts = []
    for depth in (4, 8, 16):
        jax.clear_caches()
        _programs._COMPILED.clear()
        before = compilations()
        make, names = layers(depth)
        ar.init(make, names, mesh=mesh, rules=RULES)
        counts.append(compilations() - before)
    assert counts[0] == counts[1] == counts[2]
    before = compilations()
    make, names = layers(16)
    ar.init(make, names, mesh=mesh, rules=RULES)
    assert compilations() == before


def test_programs_that_differ_in_a_literal_or_a_shape_are_not_shared(mesh):

    def make():
        keys = jax.random.split(jax.random.key(0), 4)
        scale = [0.02, 0.03, -0.0, 0.0]
        return [initializers.normal(s)(k, (8, 8)) * s for s, k in zip(scale, keys, strict=True)]

    made = ar.init(make, ["embed mlp"] * 4, mesh=mesh, rules=RULES)
    assert_same(made, whole(make))
    assert np.signbit(np.asarray(made[2])).any() != np.signbit(np.asarray(made[2])).all()


@every_mesh
def test_what_is_not_an_array_stands_as_it_is(mesh):
    marker = object()

    def make():
        return {"w": jnp.ones((8, 4)), "f": print, "none": None, "text": "gelu", "n": 3, "marker": marker}

    made = ar.init(make, {"w": "embed mlp"}, mesh=mesh, rules=RULES)
    assert made.pop("w").sharding.spec == P("data", "model")
    assert made == {"f": print, "none": None, "text": "gelu", "n": 3, "marker": marker}


@every_mesh
def test_an_array_that_make_only_hands_on_is_placed(mesh):
    host, on_device = np.ones((8, 4), np.float32), jnp.ones((8, 4))
    made = ar.init(
        lambda: {"a": host, "b": on_device, "c": jnp.zeros((8, 4))},
        dict.fromkeys("abc", "embed mlp"),
        mesh=mesh,
        rules=RULES,
    )
    assert {array.sharding.spec for array in made.values()} == {P("data", "model")}
    host[:] = 0
    assert made["a"].sum() == 32


@every_mesh
def test_tied_outputs_stay_tied_and_may_be_named_once(mesh):
    def make():
        w = dense(jax.random.key(0), 8, 16)
        return {"embed": w, "head": w, "other": jnp.copy(w)}

    names = {"embed": "embed mlp", "other": "embed mlp"}
    made = ar.init(make, names, mesh=mesh, rules=RULES)
    assert made["embed"] is made["head"]
    assert made["other"] is not made["embed"]
    with pytest.raises(ar.TiedError) as caught:
        ar.init(make, {**names, "head": "mlp embed"}, mesh=mesh, rules=RULES)
    assert caught.value.paths == ("embed", "head")


def test_dtype_casts_inside_of_the_programs(mesh):
    def make():
        w = dense(jax.random.key(0), 400, 400)
        return {"w": w, "double": w * 2, "n": jnp.arange(4)}

    made = ar.init(
        make,
        {"w": "embed mlp", "double": "embed mlp", "n": "_"},
        mesh=mesh,
        rules=RULES,
        dtype="bfloat16",
    )
    expected = whole(lambda: {k: v.astype(jnp.bfloat16) if k != "n" else v for k, v in make().items()})
    assert_same(made, expected)


@every_mesh
def test_other_memory(mesh):
    make, names = layers(1)
    made = ar.init(make, names, mesh=mesh, rules=RULES, memory_kind="unpinned_host")
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(made)} == {"unpinned_host"}


@every_mesh
def test_the_optimizer_state_of_parameters_on_the_mesh(mesh):
    make, names = layers(2)
    params = ar.init(make, names, mesh=mesh, rules=RULES)
    moments = ar.init(lambda: jax.tree.map(jnp.zeros_like, params), names, mesh=mesh, rules=RULES)
    average = ar.init(lambda: jax.tree.map(lambda p: p * 0.5, params), names, mesh=mesh, rules=RULES)
    for made in (moments, average):
        assert jax.tree.map(lambda x: x.sharding, made) == jax.tree.map(lambda x: x.sharding, params)
    np.testing.assert_array_equal(average[0]["up"], np.asarray(params[0]["up"]) * np.float32(0.5))


def test_two_threads_may_make_at_once(mesh):
    make, names = layers(3)
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(ar.init(make, names, mesh=mesh, rules=RULES)))
        for _ in range(4)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made) == 4
    for one in made:
        assert_same(one, made[0])


# What is refused.


def test_missing_names_are_all_listed_and_nothing_is_made(compilations):
    make, _ = layers(2)
    with pytest.raises(ar.MissingNamesError) as caught:
        ar.init(make, [{"up": "embed mlp"}, {}], mesh=ar.make_mesh("data=4,model=2"), rules=RULES)
    assert caught.value.paths == ("0/bias", "0/down", "1/bias", "1/down", "1/up")


def test_a_stack_without_a_name_for_its_axis_gets_the_hint():
    with pytest.raises(ar.RankError, match="a stacked axis?"):
        ar.init(
            lambda: {"w": jnp.zeros((3, 8, 8))},
            {"w": "embed mlp"},
            mesh=ar.make_mesh("data=4,model=2"),
            rules=RULES,
        )


def printing():
    jax.debug.print("made")
    return {"w": jnp.ones((8, 4))}


def calling_back():
    jax.experimental.io_callback(lambda: None, None, ordered=True)
    return {"w": jnp.ones((8, 4))}


@pytest.mark.parametrize("make", [printing, calling_back, jax.jit(printing)])
def test_effects_are_refused(make):
    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(ar.InitError, match="make has effects"):
        ar.init(make, {"w": "embed mlp"}, mesh=ar.make_mesh("data=4,model=2"), rules=RULES)
    assert shown.getvalue() == ""


@every_mesh
def test_a_pure_callback_runs_once_for_all_that_use_it(mesh):
    calls = []

    def host(seed):
        calls.append(seed)
        return np.random.default_rng(int(seed)).normal(size=(8, 4)).astype(np.float32)

    def make():
        w = jax.pure_callback(host, jax.ShapeDtypeStruct((8, 4), jnp.float32), 3)
        return {"w": w, "double": w * 2}

    made = ar.init(make, dict.fromkeys(["w", "double"], "_ _"), mesh=mesh, rules={})
    np.testing.assert_array_equal(made["double"], 2 * np.asarray(made["w"]))


def test_an_array_is_no_function():
    with pytest.raises(ar.InitError, match="a dict is not a function"):
        ar.init({"w": jnp.ones(3)}, mesh=ar.make_mesh("data=4"), rules={})


def test_args_have_to_be_a_tuple():
    with pytest.raises(ar.InitError, match="not a tuple"):
        ar.init(lambda key: key, args=jax.random.key(0), mesh=ar.make_mesh("data=4"), rules={})


def test_inside_jit_it_says_what_to_do_instead():
    mesh = ar.make_mesh("data=4")
    with pytest.raises(ar.InitError, match="while JAX is tracing"):
        jax.jit(lambda: ar.init(lambda: jnp.ones(4), "a", mesh=mesh, rules={"a": "data"}))()


def test_sizes_alone_are_not_enough():
    with pytest.raises(ar.NoMeshError, match="no devices to make arrays on"):
        ar.init(lambda: jnp.ones(4), "a", mesh="data=4", rules={"a": "data"})


def test_an_error_of_make_comes_as_it_is_with_its_origin():
    def make():
        if jax.random.normal(jax.random.key(0), (4,)).sum() > 0:
            return jnp.ones(4)
        return jnp.zeros(4)

    with pytest.raises(jax.errors.TracerBoolConversionError, match="test_init.py"):
        ar.init(make, "a", mesh=ar.make_mesh("data=4"), rules={"a": "data"})
    with pytest.raises(KeyError, match="missing"):
        ar.init(lambda: {}["missing"], "a", mesh=ar.make_mesh("data=4"), rules={"a": "data"})


def test_the_messages():
    mesh = ar.make_mesh("data=4")
    with pytest.raises(ar.InitError) as caught:
        ar.init(printing, {"w": "embed mlp"}, mesh=mesh, rules={})
    assert re.sub(r"effects: .*", "effects: ...", str(caught.value)) == (
        "make has effects: ...\n"
        "  fix:   take prints, callbacks and the like out of make: its arrays are made one by one."
    )
