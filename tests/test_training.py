"""A GPT in three forms, trained on 8 devices under three layouts, does what it does on one device."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import gpt
import jax
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._layout import only_axes
from axisrules._trees import flatten

optax = pytest.importorskip("optax")

STEPS = 20
KEY = 0

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(3e-3),
    "adafactor": lambda: optax.adafactor(3e-2, min_dim_size_to_factor=8),
}


class Layout(NamedTuple):
    """A mesh and rules, and where they put two of the weights."""

    mesh: str
    rules: ar.Rules
    query: P
    up: P


LAYOUTS = {
    "data parallel": Layout("data=8", ar.presets.data_parallel(), P(None, None, None), P(None, None)),
    "fsdp": Layout("data=8", ar.presets.fsdp(), P("data", None, None), P("data", None)),
    "fsdp with tensor parallel": Layout(
        "data=4,model=2", ar.presets.fsdp_tensor_parallel(), P("data", "model", None), P("data", "model")
    ),
}


class Form(NamedTuple):
    """One form of the model.

    Attributes:
        make: Makes the whole model, with the same weights in every form.
        names: The names, or ``None`` where the model carries them.
        split: Takes a model apart into its parameters and what makes a model of them.
        loss: The loss of a model.
        up: The path of one kernel, and whether it lies the other way round.
    """

    make: Callable[[], Any]
    names: Any
    split: Callable[[Any], tuple[Any, Callable[[Any], Any]]]
    loss: Callable[[Any, Any], jax.Array]
    query: str
    up: tuple[str, bool]


def make_params():
    return gpt.init_params(jax.random.key(KEY))


def plain():
    def split(params):
        return params, lambda params: params

    paths = "blocks/1/attention/query", ("blocks/1/up/kernel", False)
    return Form(make_params, gpt.NAMES, split, gpt.loss, *paths)


def of_nnx():
    pytest.importorskip("axisrules_flax")
    nnx = pytest.importorskip("flax.nnx")

    def make():
        return gpt.load_nnx(gpt.nnx_model(nnx.Rngs(KEY)), make_params())

    def split(model):
        graphdef, params = nnx.split(model, nnx.Param)
        return params, lambda params: nnx.merge(graphdef, params)

    paths = "blocks/1/attention/query/kernel", ("blocks/1/up/kernel", False)
    return Form(make, None, split, gpt.nnx_loss, *paths)


def of_equinox():
    pytest.importorskip("axisrules_equinox")
    eqx = pytest.importorskip("equinox")

    def make():
        return gpt.load_equinox(gpt.equinox_model(jax.random.key(KEY)), make_params())

    def split(model):
        params, rest = eqx.partition(model, eqx.is_array)
        return params, lambda params: eqx.combine(params, rest)

    paths = "blocks/1/attention/query", ("blocks/1/up/weight", True)
    return Form(make, None, split, gpt.equinox_loss, *paths)


FORMS = {"plain": plain, "nnx": of_nnx, "equinox": of_equinox}


@pytest.fixture(autouse=True, scope="module")
def _quick_to_compile():
    """What is tested is where arrays lie, so the compiler need not try hard."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def compiled():
    """The names of the functions that are compiled while a test runs."""
    found: list[str] = []

    def listen(event, duration, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(facts.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    if hasattr(jax.monitoring, "unregister_event_duration_listener"):
        jax.monitoring.unregister_event_duration_listener(listen)


def by_path(tree):
    flat = flatten(tree)
    pairs = zip(flat.paths, flat.leaves, strict=True)
    return {path: leaf for path, leaf in pairs if isinstance(leaf, jax.Array)}


def check_layouts(tree, expected):
    """Every array lies as the one at its path; jit may leave out trailing entries of a spec."""
    found, expected = by_path(tree), by_path(expected)
    assert found.keys() == expected.keys()
    for path, array in found.items():
        assert array.sharding.mesh == expected[path].sharding.mesh, path
        assert array.sharding.is_equivalent_to(expected[path].sharding, array.ndim), path


def update(optimizer, loss, params, state, batch):
    """One step of training, wherever the arrays lie."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


@cache
def losses_of_one_device(name):
    optimizer = OPTIMIZERS[name]()
    params = jax.jit(make_params)()
    state = jax.jit(optimizer.init)(params)
    step = jax.jit(lambda *args: update(optimizer, gpt.loss, *args))
    losses = []
    for batch in gpt.batches(STEPS):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses


def check_moments(state, plan, **where):
    """Every moment lies where its parameter does; a factored one where the names that it keeps put it."""
    checked = 0
    for path, moment in by_path(state).items():
        if moment.size == 1:
            continue  # a count, or what stands in for a moment that is not kept
        (parameter,) = [one for one in plan.placements if path.endswith("/" + one.path)]
        names, spec = list(parameter.names), parameter.spec
        factor = next((name for name in ("v_row", "v_col") if name in path.split("/")), None)
        if factor is not None:
            order = np.argsort(parameter.shape)  # of the two largest, a row sums over the largest
            names.pop(order[-1] if factor == "v_row" else order[-2])
            spec = ar.resolve(tuple(names), moment.shape, **where).spec
        assert moment.sharding == NamedSharding(plan.mesh, spec), path
        checked += 1
    assert checked > len(plan.placements) // 2, "the state has no moments"


def check_parameters(params, form, layout):
    found = by_path(params)
    assert found[form.query].sharding.spec == layout.query
    path, transposed = form.up
    assert found[path].sharding.spec == (P(*reversed(tuple(layout.up))) if transposed else layout.up)


@cache
def born(form, layout, axis_types):
    """A model that is born sharded, and where that was."""
    form, layout = FORMS[form](), LAYOUTS[layout]
    where = {"mesh": mesh_of(axis_types, layout.mesh), "rules": layout.rules, "indivisible": "next"}
    return form, ar.init(form.make, form.names, **where), where


def typed(compute, mesh, params, state):
    """What computes a step; on Explicit axes the model would have to say how each of its products lies."""
    explicit = [
        a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    ]
    if not explicit:
        return compute
    specs = jax.tree.map(lambda array: only_axes(array.sharding.spec, explicit), (params, state))
    return jax.sharding.auto_axes(compute, out_sharding=(*specs, P()))


def cases():
    """Every form, layout and optimizer once, and the plain form on every kind of mesh; all else is slow."""
    once = zip(FORMS, reversed(LAYOUTS), [*OPTIMIZERS, *OPTIMIZERS], strict=False)
    quick = {(*one, "auto") for one in once}
    quick |= {("plain", "fsdp with tensor parallel", "adamw", kind) for kind in AXIS_TYPES}
    for one in itertools.product(FORMS, LAYOUTS, OPTIMIZERS, AXIS_TYPES):
        yield pytest.param(*one, marks=() if one in quick else pytest.mark.slow)


@pytest.mark.parametrize(("form", "layout", "optimizer", "axis_types"), list(cases()))
def test_training_goes_as_on_one_device(form, layout, optimizer, axis_types, compiled):
    expected = losses_of_one_device(optimizer)
    form, model, where = born(form, layout, axis_types)
    (params, join), tx = form.split(model), OPTIMIZERS[optimizer]()
    state_names = ar.state_names(jax.eval_shape(tx.init, params), params, form.names)
    state = ar.init(lambda: tx.init(params), state_names, **where)
    check_parameters(params, form, LAYOUTS[layout])
    check_moments(state, ar.plan(params, form.names, **where), **where)

    def compute(*args):
        return update(tx, lambda p, b: form.loss(join(p), b), *args)

    compute = typed(compute, where["mesh"], params, state)

    @jax.jit
    def training_step(params, state, batch):
        params, state, value = compute(params, state, batch)
        constrain = lambda tree, names: ar.constrain(tree, names, **where)  # noqa: E731
        return constrain(params, form.names), constrain(state, state_names), value

    losses, before = [], (params, state)
    for batch in gpt.batches(STEPS):
        with jax.set_mesh(where["mesh"]):
            placed = ar.shard_batch(batch, "batch length", **where)
            params, state, value = training_step(params, state, placed)
        check_layouts((params, state), before)
        losses.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)
    assert losses[-1] < losses[0] - 0.2
    assert [name for name in compiled if "training_step" in name] == ["jit(training_step)"]


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_give_the_same_logits(form):
    form, batch = FORMS[form](), next(gpt.batches(1))
    params, model = make_params(), form.make()
    parts, join = form.split(model)
    found, expected = jax.jit(lambda p: form.loss(join(p), batch))(parts), jax.jit(gpt.loss)(params, batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert sum(array.size for array in by_path(parts).values()) == sum(
        a.size for a in jax.tree.leaves(params)
    )


def test_the_batches_are_the_same_every_time():
    first, again = list(gpt.batches(2)), list(gpt.batches(2))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, again)))
    assert not np.array_equal(first[0]["inputs"], first[1]["inputs"])
    np.testing.assert_array_equal(first[0]["inputs"][:, 1:], first[0]["targets"][:, :-1])


def test_the_check_of_moments_can_fail():
    where = {"mesh": ar.make_mesh("data=8"), "rules": {"a": "data", "b": None}}
    params = ar.shard_tree({"w": np.zeros((8, 16), np.float32)}, {"w": "a b"}, **where)
    names = {"mu": {"w": "a b"}, "v_row": {"w": "a"}}
    state = ar.shard_tree({"mu": params, "v_row": {"w": np.zeros(8, np.float32)}}, names, **where)
    plan = ar.plan(params, {"w": "a b"}, **where)
    check_moments(state, plan, **where)
    for wrong in names:
        moved = ar.shard_tree(state, {**names, wrong: {"w": None}}, **where)
        with pytest.raises(AssertionError):
            check_moments(moved, plan, **where)
        with pytest.raises(AssertionError):
            check_layouts(moved, state)
