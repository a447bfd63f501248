"""constrain on every kind of mesh, in jit and out: the array lies as resolve says, or a clear error."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar

RULES = ar.Rules({"batch": "data", "embed": "model"})
KINDS = {
    "auto": "auto",
    "explicit": "explicit",
    "mixed": {"model": "explicit"},
    "mixed the other way": {"data": "explicit"},
}
OPEN = [kind for kind in KINDS if kind != "explicit"]  # where a dimension can be left open
NAMES = {
    "batch embed": P("data", "model"),
    "embed batch": P("model", "data"),
    "batch _": P("data", None),
    "_ _": P(None, None),
}


def mesh_of(kind):
    return ar.make_mesh("data=4,model=2", axis_types=KINDS[kind])


def values(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def run(function, x, mesh, how):
    """Calls a function in jit or out of it, with the mesh active."""
    with jax.set_mesh(mesh):
        return (jax.jit(function) if how == "jit" else function)(x)


def assert_lies(array, mesh, spec, source):
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    np.testing.assert_array_equal(np.asarray(array), source)


@pytest.mark.parametrize("start", [None, P(), P("model", "data"), P(None, ("data", "model"))])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_array_lies_as_resolve_says(kind, how, names, start):
    mesh, x = mesh_of(kind), values(16, 8)
    given = x if start is None else jax.device_put(x, NamedSharding(mesh, start))
    result = run(lambda y: ar.constrain(y, names, rules=RULES), given, mesh, how)
    spec = ar.resolve(names, x.shape, mesh=mesh, rules=RULES).spec
    assert spec == NAMES[names]
    assert_lies(result, mesh, spec, x)


@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_lies_as_resolve_says(kind, how):
    mesh = mesh_of(kind)
    tree = {"a": values(8, 8), "b": [values(4), np.float32(3)], "f": None}
    names = {"a": "batch embed", "b": ["embed", ()], "f": None}
    result = run(lambda t: ar.constrain(t, names, rules=RULES), tree, mesh, how)
    assert_lies(result["a"], mesh, P("data", "model"), tree["a"])
    assert_lies(result["b"][0], mesh, P("model"), tree["b"][0])
    assert_lies(result["b"][1], mesh, P(), tree["b"][1])


@pytest.mark.parametrize("manual", ["data", "model", "data model"])
@pytest.mark.parametrize("form", ["array", "tree"])
@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_inside_shard_map_manual_axes_are_left_out(kind, how, form, manual):
    mesh, x, manual = mesh_of(kind), values(16, 8), manual.split()
    spec = P(*[axis if axis in manual else None for axis in ("data", "model")])
    types = []

    def inside(block):
        assert block.shape == (16 // (4 if "data" in manual else 1), 8 // (2 if "model" in manual else 1))
        if form == "array":
            laid = ar.constrain(block, "batch embed", rules=RULES)
        else:
            laid = ar.constrain({"a": [block]}, {"a": ["batch embed"]}, rules=RULES)["a"][0]
        types.append(jax.typeof(laid).sharding.spec)
        return laid

    outside = jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual))
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    refused = ""
    try:
        result = run(lambda y: outside(y) * 1, placed, mesh, how)
    except ar.ConstraintError as error:
        refused = str(error)
    if refused:  # jax 0.10 cannot, and axisrules says so
        assert how == "eager"
        assert "does not lay out Explicit axes in a shard_map outside of jit" in refused
        return
    np.testing.assert_array_equal(np.asarray(result), x)
    explicit = {a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}
    typed = [axis if axis in explicit and axis not in manual else None for axis in ("data", "model")]
    assert tuple(types[-1]) == tuple(typed)


@pytest.mark.parametrize("kind", KINDS)
def test_manual_axes_are_left_out_of_a_given_spec_too(kind):
    mesh, x = mesh_of(kind), values(16, 8)
    inside = jax.shard_map(
        lambda block: ar.constrain(block, P("data", "model"), rules=RULES),
        mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
    )  # fmt: skip
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(np.asarray(jax.jit(inside)(placed)), x)


@pytest.mark.parametrize("kind", KINDS)
def test_host_arrays_outside_of_jit_are_copied_and_held_in_a_dtype_of_jax(kind):
    mesh, source = mesh_of(kind), np.zeros((16, 8), ">i4")
    laid = ar.constrain(source, "batch embed", mesh=mesh, rules=RULES)
    source[:] = 1
    assert laid.dtype == np.int32
    assert not np.asarray(laid).any()


def test_the_constraint_inside_shard_map_reaches_the_compiler():
    mesh, x = mesh_of("auto"), jnp.ones((16, 8))
    outside = jax.shard_map(
        lambda block: ar.constrain(block, "batch embed", rules=RULES),
        mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
    )  # fmt: skip
    with jax.set_mesh(mesh):
        text = str(jax.make_jaxpr(outside)(x))
    assert "sharding_constraint" in text
    assert "PartitionSpec(None, 'model')" in text or "P(None, 'model')" in text


@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
def test_a_tuple_keeps_its_order_or_is_refused(axes, kind, how):
    mesh, x = mesh_of(kind), values(16, 8)

    def lay(y):
        return ar.constrain(y, "batch _", rules={"batch": axes})

    auto_first = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axes[0]] == AxisType.Auto
    if how == "jit" and kind.startswith("mixed") and auto_first:
        with pytest.raises(ar.ConstraintError, match="an Auto axis before an Explicit one"):
            run(lay, x, mesh, how)
    else:
        assert_lies(run(lay, x, mesh, how), mesh, P(axes, None), x)


def test_size_1_axes_are_never_in_a_wrong_order():
    mesh = ar.make_mesh("data=1,model=8", axis_types={"model": "explicit"})
    x = values(16, 8)
    result = run(lambda y: ar.constrain(y, "batch _", rules={"batch": ("data", "model")}), x, mesh, "jit")
    assert_lies(result, mesh, P("model", None), x)


# Unconstrained dimensions.


@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize(
    ("names", "fixed"), [("* embed", {1: 4}), ("batch *", {0: 4}), (("batch", P.UNCONSTRAINED), {0: 4})]
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_unconstrained_dimension_is_left_open_or_refused(kind, names, fixed, how):
    mesh, x = mesh_of(kind), values(16, 8)

    def lay(y):
        return ar.constrain(y, names, rules=RULES)

    given = jax.device_put(x, NamedSharding(mesh, P("model", "data")))
    if kind == "explicit":
        with pytest.raises(
            ar.ConstraintError, match="is unconstrained, and every axis of the mesh is Explicit"
        ):
            run(lay, given, mesh, how)
        return
    result = run(lay, given, mesh, how)
    np.testing.assert_array_equal(np.asarray(result), x)
    shard = result.sharding.shard_shape(x.shape)
    assert {dim: shard[dim] for dim in fixed} == fixed


@pytest.mark.parametrize("kind", OPEN)
def test_outside_jit_an_open_dimension_stays_as_it_is(kind):
    mesh, x = mesh_of(kind), values(16, 8)
    placed = jax.device_put(x, NamedSharding(mesh, P("data", None)))
    assert_lies(ar.constrain(placed, "* embed", mesh=mesh, rules=RULES), mesh, P("data", "model"), x)


# What is missing, what cannot be.


def test_no_mesh_is_an_error_and_no_silent_no_op():
    for call in (
        lambda x: ar.constrain(x, "batch", rules=RULES),
        jax.jit(lambda x: ar.constrain(x, "batch", rules=RULES)),
    ):
        with pytest.raises(ar.NoMeshError):
            call(values(8))


def test_no_rules_is_an_error():
    with pytest.raises(ar.NoRulesError):
        ar.constrain(values(8), "batch", mesh=mesh_of("auto"))


def test_sizes_alone_do_for_jit_but_not_for_arrays():
    with pytest.raises(ar.NoMeshError, match="no devices"):
        ar.constrain(values(8), "batch", mesh="data=4,model=2", rules=RULES)


@pytest.mark.parametrize("kind", ["explicit", "mixed", "mixed the other way"])
def test_explicit_axes_in_a_jit_without_its_mesh_are_refused(kind):
    mesh = mesh_of(kind)
    with pytest.raises(ar.ConstraintError, match="has to be the mesh of the trace"):
        jax.jit(lambda y: ar.constrain(y, "batch embed", mesh=mesh, rules=RULES))(values(16, 8))


def test_sizes_as_mesh_in_a_jit_without_a_mesh_are_refused():
    with pytest.raises(ar.NoMeshError, match="no mesh of its size is active"):
        jax.jit(lambda y: ar.constrain(y, "batch embed", mesh="data=4,model=2", rules=RULES))(values(16, 8))


@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_as_mesh_stand_for_the_active_mesh_of_those_sizes(kind, how):
    mesh, x = mesh_of(kind), values(16, 8)
    result = run(lambda y: ar.constrain(y, "batch embed", mesh="data=4,model=2", rules=RULES), x, mesh, how)
    assert_lies(result, mesh, P("data", "model"), x)


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_another_mesh_than_the_explicit_one_of_the_trace_is_refused(types):
    mesh = mesh_of("explicit")
    other = ar.make_mesh("data=4,model=2", devices=jax.devices()[::-1], axis_types=types)
    with pytest.raises(ar.ConstraintError):
        run(lambda y: ar.constrain(y, "batch embed", mesh=other, rules=RULES), values(16, 8), mesh, "jit")


@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_given_mesh_is_that_of_the_trace_where_jax_changes_its_axis_types(kind, how):
    mesh, x = mesh_of(kind), values(16, 8)
    explicit = [a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit]
    out = P(*[axis if axis in explicit else None for axis in ("data", "model")])

    def lay(y):
        return ar.constrain(2 * y, "batch embed", mesh=mesh, rules=RULES)

    placed = jax.device_put(x, NamedSharding(mesh, P("model", "data")))
    for changed in (
        jax.sharding.auto_axes(lay, out_sharding=out),
        jax.sharding.explicit_axes(lay, in_sharding=P("model", "data")),
    ):
        assert_lies(run(changed, placed, mesh, how), mesh, P("data", "model"), 2 * x)


@pytest.mark.parametrize("kind", OPEN)
def test_an_open_dimension_that_does_not_divide_on_another_mesh_is_whole(kind):
    two = ar.make_mesh("data=2", devices=jax.devices()[:2])
    placed = jax.device_put(values(6, 8), NamedSharding(two, P("data")))
    laid = ar.constrain(placed, "* embed", mesh=mesh_of(kind), rules=RULES)
    assert laid.sharding.spec == P(None, "model")


def test_auto_axes_in_a_jit_need_no_active_mesh():
    mesh, x = mesh_of("auto"), values(16, 8)
    assert_lies(
        jax.jit(lambda y: ar.constrain(y, "batch embed", mesh=mesh, rules=RULES))(x),
        mesh,
        P("data", "model"),
        x,
    )


def test_another_mesh_inside_shard_map_is_refused():
    mesh, other = mesh_of("auto"), ar.make_mesh("data=2,model=4")
    inside = jax.shard_map(
        lambda b: ar.constrain(b, "_ embed", mesh=other, rules=RULES),
        mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
    )  # fmt: skip
    with pytest.raises(ar.ConstraintError, match="can only use the mesh of the shard_map"):
        jax.jit(inside)(values(16, 8))


def test_every_failure_of_a_tree_is_in_one_error_before_anything_is_laid_out():
    tree = {"a": values(6, 8), "b": values(8), "c": values(8), "d": jax.ShapeDtypeStruct((8,), np.float32)}
    with pytest.raises(ar.PlanError) as caught:
        ar.constrain(
            tree, {"a": "batch embed", "b": "batch embed", "d": "batch"}, mesh=mesh_of("auto"), rules=RULES
        )
    assert {one.path: type(one) for one in caught.value.failures} == {
        "a": ar.DivisibilityError,
        "b": ar.RankError,
        "c": ar.MissingNamesError,
        "d": ar.LeafError,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_policies_are_those_of_resolve(kind):
    mesh = mesh_of(kind)
    laid = ar.constrain(values(6, 8), "batch embed", mesh=mesh, rules=RULES, indivisible="next")
    assert laid.sharding.spec == P(None, "model")
    with pytest.raises(ar.UnknownNameError):
        ar.constrain(values(8), "other", mesh=mesh, rules=RULES, unmapped="error")


def test_an_unmapped_name_warns_once_per_rules_and_name():
    mesh, rules = mesh_of("auto"), ar.Rules({"batch": "data", "once": None})
    with pytest.warns(ar.UnmappedAxisWarning, match="'unheard'"):
        ar.constrain(values(8, 8), "batch unheard", mesh=mesh, rules=rules)
    ar.constrain(values(8, 8), "batch unheard", mesh=mesh, rules=ar.Rules(list(rules)))
    with pytest.warns(ar.UnmappedAxisWarning, match="'unheard too'"):
        ar.constrain(values(8, 8), ("batch", "unheard too"), mesh=mesh, rules=rules)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_may_be_the_constraint(kind):
    mesh, x = mesh_of(kind), values(16, 8)
    assert_lies(ar.constrain(x, P("model"), mesh=mesh, rules=RULES), mesh, P("model", None), x)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_batches_go_through(kind):
    mesh, x = mesh_of(kind), values(16, 8)

    def lay(y):
        return ar.constrain(y, "batch embed", rules=RULES)

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P()))
        gradient = jax.grad(lambda y: (lay(y) ** 2).sum() / 2)(placed)
        np.testing.assert_array_equal(np.asarray(gradient), x)
        batched = jax.jit(jax.vmap(lay))(jnp.stack([placed, placed]))
    np.testing.assert_array_equal(np.asarray(batched), np.stack([x, x]))


@pytest.mark.parametrize(("kind", "how"), list(itertools.product(KINDS, ["jit", "eager"])))
def test_a_constant_inside_a_trace_is_laid_out_too(kind, how):
    mesh, constant = mesh_of(kind), values(16, 8)
    result = run(
        lambda y: ar.constrain(constant, "batch embed", rules=RULES) + 0 * y, np.float32(0), mesh, how
    )
    assert_lies(result, mesh, P("data", "model"), constant)
