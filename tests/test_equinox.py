"""Equinox modules: their paths and names, `named`, and that a sharded module is the module it was."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._trees import NO_ENTRY, flatten

eqx = pytest.importorskip("equinox")
axisrules_equinox = pytest.importorskip("axisrules_equinox")
named = axisrules_equinox.named

RULES = {"embed": "data", "mlp": "model"}


class Norm(eqx.Module):
    scale: jax.Array = eqx.field(metadata={"axis_names": "embed"})
    size: int = eqx.field(static=True)

    def __init__(self, size):
        assert size, "the constructor ran without its arguments"
        self.scale, self.size = jnp.arange(1.0, size + 1), size

    def __check_init__(self):
        assert isinstance(self.scale, jax.Array), "the check ran on what is no array"

    def __call__(self, x):
        return x * self.scale


class Net(eqx.Module):
    norm: Norm
    layers: list
    gates: dict = eqx.field(metadata={"axis_names": ("embed",)})
    activation: Callable = jax.nn.relu
    label: str = "net"
    nothing: Any = None
    width: int = eqx.field(static=True, default=32)

    def __call__(self, x):
        up, down = self.layers
        h = down(self.activation(up(self.norm(x))))
        return h * self.gates["a"] + self.gates["b"]


def linear(inputs, outputs, seed=0):
    return eqx.nn.Linear(inputs, outputs, key=jax.random.key(seed))


def net():
    layers = [
        named(linear(8, 32), weight="mlp embed", bias="mlp"),
        named(linear(32, 8, 1), weight="embed mlp", bias="embed"),
    ]
    return Net(Norm(8), layers, {"a": jnp.ones(8), "b": jnp.zeros(8)})


PATHS = [
    "norm/scale",
    "layers/0/weight",
    "layers/0/bias",
    "layers/1/weight",
    "layers/1/bias",
    "gates/a",
    "gates/b",
]
TABLE = ar.NameTable({
    "norm/scale": "embed",
    "layers/0/weight": "mlp embed",
    "layers/0/bias": "mlp",
    "layers/1/weight": "embed mlp",
    "layers/1/bias": "embed",
    "gates/*": "embed",
})  # fmt: skip
SPECS = {
    "norm/scale": P("data"),
    "layers/0/weight": P("model", "data"),
    "layers/0/bias": P("model"),
    "layers/1/weight": P("data", "model"),
    "layers/1/bias": P("data"),
    "gates/a": P("data"),
    "gates/b": P("data"),
}


def specs(plan):
    return {placement.path: placement.spec for placement in plan.placements}


def by_callable(path, leaf):
    return TABLE.find(path) if TABLE.matches(path) else None


def by_tree():
    layers = [{"weight": "mlp embed", "bias": "mlp"}, {"weight": "embed mlp", "bias": "embed"}]
    return {"norm": {"scale": "embed"}, "layers": layers, "gates": {"a": "embed", "b": "embed"}}


# Paths and names.


def test_paths_are_those_of_jax():
    found, _ = jax.tree_util.tree_flatten_with_path(net())
    flat = flatten(net())
    assert flat.paths == [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
    assert [path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if eqx.is_array(leaf)] == PATHS


@pytest.mark.parametrize("names", [None, TABLE, by_callable, by_tree()], ids=["own", "table", "call", "tree"])
def test_every_form_of_names_gives_the_same_specs(names):
    assert specs(ar.plan(net(), names, mesh="data=4,model=2", rules=RULES)) == SPECS


def test_a_module_in_a_tree_among_host_arrays():
    tree = {"model": net(), "step": np.array(3, np.int32), "table": np.ones((8, 2), np.float32)}
    with pytest.raises(ar.MissingNamesError) as caught:
        ar.plan(tree, mesh="data=4,model=2", rules=RULES)
    assert caught.value.paths == ("table",)
    found = specs(ar.plan(tree, mesh="data=4,model=2", rules=RULES, unnamed="replicate"))
    assert found == {f"model/{path}": spec for path, spec in SPECS.items()} | {
        "step": P(),
        "table": P(None, None),
    }


def test_missing_names_are_listed_with_their_full_paths():
    with pytest.raises(ar.MissingNamesError) as caught:
        ar.plan({"model": [linear(8, 32), net()]}, mesh="data=4,model=2", rules=RULES)
    assert caught.value.paths == ("model/0/weight", "model/0/bias")


def test_names_that_do_not_fit_are_an_error_with_the_path():
    layer = named(linear(8, 32), weight="mlp", bias="mlp")
    with pytest.raises(ar.RankError, match="1 name for 2 dimensions") as caught:
        ar.plan({"model": [layer]}, mesh="data=4,model=2", rules=RULES)
    assert caught.value.paths == ("model/0/weight",)


def test_malformed_metadata_is_an_error_with_the_path():
    class Odd(eqx.Module):
        weight: jax.Array = eqx.field(metadata={"axis_names": 3})

    with pytest.raises(ar.NamesError, match="3 cannot name the dimensions") as caught:
        ar.plan({"odd": Odd(jnp.ones(2))}, mesh="data=4,model=2", rules=RULES)
    assert caught.value.paths == ("odd/weight",)


def test_names_of_an_instance_win_over_those_of_its_class():
    assert flatten(named(Norm(8), scale="mlp")).names == [("mlp",)]
    assert flatten(Norm(8)).names == ["embed"]


def test_names_of_a_field_do_not_override_those_below_it():
    class Outer(eqx.Module):
        layer: eqx.nn.Linear = eqx.field(metadata={"axis_names": "outer inner"})

    assert flatten(Outer(named(linear(8, 32), bias="mlp"))).names == ["outer inner", ("mlp",)]


def test_none_is_whole_on_purpose_and_a_spec_is_the_layout():
    layer = named(linear(8, 32), weight=P("data"), bias=None)
    found = specs(ar.plan(layer, mesh="data=4,model=2", rules=RULES))
    assert found == {"weight": P("data", None), "bias": P(None)}


def test_a_stack_made_by_vmap_keeps_its_names_and_the_error_hints_at_the_stacked_axis():
    def make(key):
        return named(eqx.nn.Linear(8, 32, key=key), weight="mlp embed", bias="mlp")

    stack = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
    assert stack.weight.shape == (3, 32, 8)
    with pytest.raises(ar.RankError, match="size 3 more than names: a stacked axis\\?") as caught:
        ar.plan(stack, mesh="data=4,model=2", rules=RULES)
    assert caught.value.paths == ("weight", "bias")
    stack = named(stack, weight="layers mlp embed", bias="layers mlp")
    found = specs(ar.plan(stack, mesh="data=4,model=2", rules=RULES | {"layers": None}))
    assert found == {"weight": P(None, "model", "data"), "bias": P(None, "model")}


def test_no_array_stays_alive_in_a_plan():
    import weakref

    layer = named(linear(8, 32), weight="mlp embed", bias="mlp")
    plan, weight = ar.plan(layer, mesh="data=4,model=2", rules=RULES), weakref.ref(layer.weight)
    del layer
    assert weight() is None
    assert plan.specs.weight == P("model", "data")


# Sharding.


def test_arrays_lie_as_planned_and_everything_else_is_as_it_was(mesh):
    source = net()
    before = jax.tree.leaves(source)
    placed = ar.shard_tree({"model": source}, mesh=mesh, rules=RULES)["model"]
    flat = flatten(placed)
    arrays = {path: leaf for path, leaf in zip(flat.paths, flat.leaves, strict=True) if eqx.is_array(leaf)}
    assert {path: array.sharding for path, array in arrays.items()} == {
        path: NamedSharding(mesh, spec) for path, spec in SPECS.items()
    }
    assert type(placed) is Net
    assert type(placed.layers[0]) is type(source.layers[0])
    assert (placed.activation, placed.label, placed.nothing, placed.width) == (jax.nn.relu, "net", None, 32)
    assert jax.tree.structure(placed) == jax.tree.structure(source)
    assert all(now is then for now, then in zip(jax.tree.leaves(source), before, strict=True))


def test_a_placed_module_computes_what_its_source_does(mesh):
    source, x = net(), jnp.linspace(-1, 1, 8)
    placed = ar.shard_tree(source, mesh=mesh, rules=RULES)
    arrays, rest = eqx.partition(placed, eqx.is_array)
    with jax.set_mesh(mesh):

        @jax.jit
        def call(arrays, x):
            return eqx.combine(arrays, rest)(x)

        if jax.sharding.AxisType.Explicit in mesh.axis_types:
            call = jax.sharding.auto_axes(call, out_sharding=P())
        found = call(arrays, x)
    np.testing.assert_allclose(found, source(x), rtol=1e-5, atol=1e-6)


def test_constrain_takes_a_module_inside_jit_and_outside(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        outside = ar.constrain(net(), TABLE)
        inside = eqx.filter_jit(lambda module: ar.constrain(module, TABLE))(net())
    for module in (outside, inside):
        assert type(module) is Net
        assert module.layers[0].weight.sharding.spec == P("model", "data")
        np.testing.assert_array_equal(module.layers[0].weight, net().layers[0].weight)


def test_a_plan_shows_specs_shardings_and_abstract_arrays_in_modules(mesh):
    plan = ar.plan(net(), mesh=mesh, rules=RULES)
    assert type(plan.specs) is Net
    assert plan.specs.layers[0].weight == P("model", "data")
    assert plan.specs.activation is jax.nn.relu
    assert plan.shardings.norm.scale == NamedSharding(mesh, P("data"))
    assert plan.abstract.layers[1].bias.sharding == NamedSharding(mesh, P("data"))
    again = ar.plan(plan.abstract, mesh=mesh, rules=RULES)  # an abstract module is planned like a real one
    assert specs(again) == SPECS


def test_a_module_of_shapes_gets_its_shardings(mesh):
    shapes = eqx.filter_eval_shape(net)
    placed = ar.shard_tree(shapes, mesh=mesh, rules=RULES)
    assert placed.layers[0].weight == jax.ShapeDtypeStruct(
        (32, 8), jnp.float32, sharding=NamedSharding(mesh, P("model", "data"))
    )


def test_tied_arrays_stay_one_array(mesh):
    class Tied(eqx.Module):
        embed: jax.Array = eqx.field(metadata={"axis_names": "mlp embed"})
        head: jax.Array = eqx.field(metadata={"axis_names": "mlp embed"})

    weight = jnp.ones((32, 8))
    source = Tied(weight, weight)
    placed = ar.shard_tree(source, mesh=mesh, rules=RULES)
    assert placed.embed is placed.head
    assert ar.plan(source, mesh=mesh, rules=RULES).placement("head").tied_to == "embed"
    with pytest.raises(ar.TiedError) as caught:
        ar.plan(source, {"embed": "mlp embed", "head": "mlp _"}, mesh=mesh, rules=RULES)
    assert caught.value.paths == ("embed", "head")


def test_a_layer_without_an_array_needs_no_names(mesh):
    bare = named(eqx.nn.Linear(8, 32, use_bias=False, key=jax.random.key(0)), weight="mlp embed")
    model = eqx.nn.Sequential([bare, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.1)])
    placed = ar.shard_tree(model, mesh=mesh, rules=RULES)
    assert placed[0].bias is None
    assert placed.layers[1].fn is jax.nn.relu
    assert placed.layers[2].p == 0.1
    assert placed[0].weight.sharding.spec == P("model", "data")


def test_the_state_of_stateful_layers_is_taken_apart_too(mesh):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="ema")
    norm = named(norm, weight="embed", bias="embed")
    placed, moved = ar.shard_tree((norm, state), mesh=mesh, rules=RULES, unnamed="replicate")
    assert placed.weight.sharding.spec == P("data")
    assert type(moved) is type(state)
    assert jax.tree.structure(moved) == jax.tree.structure(state)


# `named`.


def test_a_named_layer_is_the_layer_with_one_static_field_more():
    layer, given = linear(8, 32), named(linear(8, 32), weight="mlp embed", bias="mlp")
    assert isinstance(given, eqx.nn.Linear)
    assert type(given).__qualname__ == "Linear"
    assert given.axis_names == axisrules_equinox.AxisNames({"weight": ("mlp", "embed"), "bias": ("mlp",)})
    assert given.axis_names["weight"] == ("mlp", "embed")
    assert not hasattr(layer, "axis_names")
    assert jax.tree.leaves(given)[0].shape == (32, 8)
    assert "axis_names=AxisNames({'bias': ('mlp',), 'weight': ('mlp', 'embed')})" in repr(given)
    np.testing.assert_array_equal(given(jnp.ones(8)), layer(jnp.ones(8)))


def test_naming_again_keeps_what_is_not_given_anew_and_the_class():
    first = named(linear(8, 32), weight="mlp embed", bias="mlp")
    second = named(first, bias=None)
    assert dict(second.axis_names) == {"weight": ("mlp", "embed"), "bias": None}
    assert dict(first.axis_names) == {"weight": ("mlp", "embed"), "bias": ("mlp",)}
    assert type(first) is type(second) is type(named(linear(2, 2)))
    assert second.weight is first.weight


def test_equal_names_mean_equal_structure_and_one_compilation():
    traces = []

    @jax.jit
    def call(layer, x):
        traces.append(1)
        return layer(x)

    for seed in range(3):
        call(named(linear(8, 32, seed), weight="mlp embed"), jnp.ones(8))
    assert len(traces) == 1
    call(named(linear(8, 32), weight="mlp _"), jnp.ones(8))
    assert len(traces) == 2


def test_names_survive_what_is_done_with_modules():
    layer = named(linear(8, 32), weight="mlp embed", bias="mlp")
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    grads = eqx.filter_grad(lambda layer: layer(jnp.ones(8)).sum())(layer)
    for made in (
        jax.tree.map(lambda x: 2 * x, layer),
        eqx.tree_deserialise_leaves(file, layer),
        eqx.tree_at(lambda layer: layer.bias, layer, jnp.ones(32)),
        eqx.filter_jit(lambda layer: layer)(layer),
        eqx.combine(*eqx.partition(layer, eqx.is_array)),
        grads,
        copy.copy(layer),
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
    ):
        assert jax.tree.structure(made) == jax.tree.structure(layer)
        assert made.axis_names == layer.axis_names


def test_files_of_leaves_fit_both_the_layer_and_the_named_layer():
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, named(linear(8, 32), weight="mlp embed"))
    file.seek(0)
    restored = eqx.tree_deserialise_leaves(file, linear(8, 32, 1))
    assert eqx.tree_equal(restored, linear(8, 32))


def test_a_class_with_its_own_constructor_and_one_with_the_generated_one():
    assert named(Norm(8), scale="mlp").size == 8
    assert named(net(), gates="embed").axis_names["gates"] == ("embed",)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            {"wieght": "mlp embed"},
            "Linear has no field 'wieght'; did you mean 'weight'?\n  fix:   fields that may have names: weight, bias.",
        ),
        (
            {"in_features": "mlp"},
            "the field 'in_features' of Linear is static, so it has no dimensions\n"
            "  fix:   fields that may have names: weight, bias.",
        ),
        (
            {"weight": 3},
            "3 cannot name the dimensions of an array\n"
            "  at:    weight\n"
            "  fix:   give a tuple like ('embed', None) or a text like 'embed _'.",
        ),
    ],
)
def test_wrong_names_are_refused_at_once(names, text):
    with pytest.raises(ar.NamesError) as caught:
        named(linear(8, 32), **names)
    assert str(caught.value) == text


def test_all_wrong_names_of_a_call_are_in_one_error():
    with pytest.raises(ar.NamesError) as caught:
        named(linear(8, 32), wieght="mlp embed", bais="mlp")
    assert [one.nearest for one in caught.value.failures] == ["weight", "bias"]


def test_what_is_no_module_is_refused():
    with pytest.raises(ar.NamesError, match="is no Equinox module"):
        named(eqx.nn.Linear, weight="mlp embed")


def test_a_class_that_uses_the_attribute_itself_is_refused_but_its_names_are_read():
    class Own(eqx.Module):
        weight: jax.Array
        axis_names: axisrules_equinox.AxisNames = eqx.field(static=True)

    own = Own(jnp.ones((8, 2)), axisrules_equinox.AxisNames({"weight": ("embed", None)}))
    assert flatten(own).names == [("embed", None)]
    with pytest.raises(ar.NamesError, match="has an attribute 'axis_names' of its own"):
        named(own, weight="mlp embed")


def test_an_attribute_of_that_name_that_is_no_mapping_means_nothing():
    class Other(eqx.Module):
        weight: jax.Array
        axis_names: tuple = eqx.field(static=True, default=("x",))

    assert flatten(Other(jnp.ones(2))).names == [NO_ENTRY]
