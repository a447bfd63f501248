"""NNX modules, states and variables, and the boxes of Linen: their paths and names, and new ones."""

import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import in_turn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._trees import NO_ENTRY, flatten

flax = pytest.importorskip("flax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
named = pytest.importorskip("axisrules_flax").named

RULES = {"embed": "data", "mlp": "model"}


def annotated(initializer, *names):
    return nnx.with_partitioning(initializer, names)


def linear(inputs, outputs, names, rngs):
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=annotated(nnx.initializers.lecun_normal(), *names),
        bias_init=annotated(nnx.initializers.normal(), names[-1]),
        rngs=rngs,
    )


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.layers = nnx.List([linear(8, 32, ("embed", "mlp"), rngs), linear(32, 8, ("mlp", "embed"), rngs)])
        self.again = self.layers[1]  # shared: NNX gives it one path
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.table = jnp.ones((8, 4))  # an array without a variable
        self.activation, self.label, self.nothing = jax.nn.relu, "net", None

    def __call__(self, x):
        h = self.layers[1](self.activation(self.layers[0](self.norm(x, use_running_average=True))))
        return self.again(self.activation(h) @ self.table @ jnp.ones((4, 32)))


def net():
    with nnx.use_eager_sharding(False):  # else Flax asks for a mesh
        return Net(nnx.Rngs(0))


OWN = {"layers/0/kernel", "layers/0/bias", "again/kernel", "again/bias"}
TABLE = ar.NameTable({
    "again/kernel": "mlp embed",
    "again/bias": "embed",
    "dropout/**": (),
    "layers/0/kernel": "embed mlp",
    "layers/0/bias": "mlp",
    "norm/*": None,
    "table": None,
})  # fmt: skip
SPECS = {
    "again/bias": P("data"),
    "again/kernel": P("model", "data"),
    "dropout/rngs/count": P(),
    "dropout/rngs/key": P(),
    "layers/0/bias": P("model"),
    "layers/0/kernel": P("data", "model"),
    "norm/bias": P(None),
    "norm/mean": P(None),
    "norm/scale": P(None),
    "norm/var": P(None),
    "table": P(None, None),
}


def specs(plan):
    return {placement.path: placement.spec for placement in plan.placements}


def plan(tree, names=None, **options):
    return ar.plan(tree, names, **{"mesh": "data=4,model=2", "rules": RULES, **options})


def by_callable(path, leaf):
    return TABLE.find(path)


def by_tree():
    return {
        "again": {"kernel": "mlp embed", "bias": "embed"},
        "layers": [{"kernel": "embed mlp", "bias": "mlp"}],
        "norm": {"bias": None, "mean": None, "scale": None, "var": None},
        "dropout": {"rngs": {"count": (), "key": ()}},
        "table": None,
    }


def variable(value, **metadata):
    """A parameter with metadata that the constructor of Flax would act upon or rename."""
    made = nnx.Param(value)
    return type(made).from_metadata(value, made.get_metadata() | metadata)


# Modules: paths and names.


def test_paths_are_those_of_the_state():
    state = nnx.to_flat_state(nnx.state(net()))
    assert flatten(net()).paths == ["/".join(map(str, path)) for path, _ in state] == list(SPECS)


@pytest.mark.parametrize("names", [TABLE, by_callable, by_tree()], ids=["table", "call", "tree"])
def test_every_form_of_names_gives_the_same_specs(names):
    assert specs(plan(net(), names)) == SPECS


def test_names_in_the_metadata_give_the_same_specs():
    assert specs(plan(net(), unnamed="replicate")) == SPECS
    with pytest.raises(ar.MissingNamesError) as caught:
        plan({"model": net(), "step": np.array(3, np.int32)})
    scalars = {"dropout/rngs/count", "dropout/rngs/key"}
    assert set(caught.value.paths) == {f"model/{path}" for path in SPECS.keys() - OWN - scalars}


def test_names_that_do_not_fit_are_an_error_with_the_path():
    with pytest.raises(ar.RankError, match="2 names for 1 dimension") as caught:
        plan({"model": net()}, ar.NameTable({"**/bias": "embed mlp", "**": None}))
    assert set(caught.value.paths) == {"model/again/bias", "model/layers/0/bias", "model/norm/bias"}
    with pytest.raises(ar.PlanError) as caught:
        plan(net(), {**by_tree(), "tabel": "embed _", "table": "embed"})
    assert {(type(one), one.paths) for one in caught.value.failures} == {
        (ar.ExtraNamesError, ("tabel",)),
        (ar.RankError, ("table",)),
    }


def test_no_array_stays_alive_in_a_plan():
    layer = net().layers[0]
    made, kernel = plan(layer), weakref.ref(layer.kernel.get_raw_value())
    del layer
    gc.collect()
    assert kernel() is None
    assert made.specs.kernel.get_value() == P("data", "model")


# Modules: sharding.


def test_arrays_lie_as_planned_and_everything_else_is_as_it_was(mesh):
    source = net()
    before = nnx.to_flat_state(nnx.state(source))
    step = np.array(3, np.int32)
    placed = ar.shard_tree({"model": source, "step": step}, mesh=mesh, rules=RULES, unnamed="replicate")
    model = placed["model"]
    flat = flatten(model)
    assert {path: leaf.sharding for path, leaf in zip(flat.paths, flat.leaves, strict=True)} == {
        path: NamedSharding(mesh, spec) for path, spec in SPECS.items()
    }
    assert type(model) is Net
    assert model.again is model.layers[1]
    assert model.layers[0] is not source.layers[0]
    assert (model.activation, model.label, model.nothing) == (jax.nn.relu, "net", None)
    assert placed["step"].sharding == NamedSharding(mesh, P())
    after = nnx.to_flat_state(nnx.state(source))
    assert all(now is then for (_, now), (_, then) in zip(after, before, strict=True))
    assert source.again is source.layers[1]


def test_variables_keep_their_kind_and_their_metadata(mesh):
    source = net()
    placed = ar.shard_tree(source, mesh=mesh, rules=RULES, unnamed="replicate")
    pairs = zip(*(nnx.to_flat_state(nnx.state(one, nnx.Variable)) for one in (source, placed)), strict=True)
    for (path, old), (_, new) in pairs:
        assert new is not old
        assert type(new) is type(old), path
        assert new.get_metadata() == old.get_metadata(), path
    assert type(placed.norm.mean) is nnx.BatchStat
    assert type(placed.dropout.rngs.key) is nnx.RngKey


def test_a_placed_module_computes_what_its_source_does(mesh):
    source, x = net(), jnp.linspace(-1, 1, 16).reshape(2, 8)
    placed = ar.shard_tree(source, mesh=mesh, rules=RULES, unnamed="replicate")
    graphdef, state = nnx.split(placed)
    with jax.set_mesh(mesh):

        @jax.jit
        def call(state, x):
            return nnx.merge(graphdef, state)(x)

        if jax.sharding.AxisType.Explicit in mesh.axis_types:
            call = jax.sharding.auto_axes(call, out_sharding=P())
        found = call(state, x)
    np.testing.assert_allclose(found, source(x), rtol=1e-5, atol=1e-6)


def test_a_placed_module_can_be_trained_and_its_random_streams_go_on(mesh):
    placed = ar.shard_tree(net(), mesh=mesh, rules=RULES, unnamed="replicate")
    before = placed.dropout.rngs.count.get_value()
    placed.dropout(jnp.ones((2, 8)))
    assert placed.dropout.rngs.count.get_value() == before + 1
    placed.layers[0].bias.set_value(jnp.zeros(32))
    assert float(abs(placed.layers[0].bias.get_value()).sum()) == 0.0
    assert float(abs(net().layers[0].bias.get_value()).sum()) > 0.0


def test_constrain_takes_a_module_inside_jit_and_outside(mesh):
    source = net()

    @nnx.jit
    def inside(module):
        return nnx.state(ar.constrain(module, TABLE))

    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        outside = ar.constrain(source, TABLE)
        traced = inside(source)
    assert type(outside) is Net
    assert outside.again is outside.layers[1]
    for kernel in (outside.layers[0].kernel.get_value(), traced["layers"][0]["kernel"].get_value()):
        assert kernel.sharding.spec == P("data", "model")
        np.testing.assert_array_equal(kernel, source.layers[0].kernel.get_value())


def test_a_plan_shows_specs_shardings_and_abstract_arrays_in_modules(mesh):
    made = ar.plan(net(), TABLE, mesh=mesh, rules=RULES)
    for shown in (made.specs, made.shardings, made.abstract):
        assert type(shown) is Net
        assert shown.again is shown.layers[1]
        assert shown.activation is jax.nn.relu
    assert made.specs.layers[0].kernel.get_value() == P("data", "model")
    assert made.shardings.again.bias.get_value() == NamedSharding(mesh, P("data"))
    assert made.abstract.again.bias.get_value().sharding == NamedSharding(mesh, P("data"))
    again = plan(made.abstract.layers[0])  # an abstract module is planned like a real one
    assert specs(again) == {"bias": P("model"), "kernel": P("data", "model")}


def test_a_module_of_shapes_is_planned_and_gets_its_shardings(mesh):
    with nnx.use_eager_sharding(False):
        shapes = nnx.eval_shape(lambda: linear(8, 32, ("embed", "mlp"), nnx.Rngs(0)))
    assert specs(plan(shapes)) == {"bias": P("model"), "kernel": P("data", "model")}
    placed = ar.shard_tree(shapes, mesh=mesh, rules=RULES)
    assert placed.kernel.get_value().sharding == NamedSharding(mesh, P("data", "model"))


def test_an_optimizer_is_placed_with_the_names_of_its_parameters(mesh):
    optax = pytest.importorskip("optax")
    with nnx.use_eager_sharding(False):
        optimizer = nnx.Optimizer(net().layers[0], optax.adam(1e-3), wrt=nnx.Param)
    placed = ar.shard_tree(optimizer, mesh=mesh, rules=RULES)
    assert type(placed) is nnx.Optimizer
    assert placed.opt_state[0].mu["kernel"].get_value().sharding.spec == P("data", "model")
    assert placed.opt_state[0].count.get_value().sharding.spec == P()


def test_sharing_is_kept_whatever_mode_flax_is_in():
    if not hasattr(nnx, "set_graph_mode"):
        pytest.skip("this version of Flax knows one mode")
    with nnx.set_graph_mode(False):
        assert flatten(net()).paths == list(SPECS)


def test_a_module_that_is_no_pytree_and_one_without_leaves():
    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((8, 32)), axis_names="embed mlp")

    class Empty(nnx.Module):
        pass

    made = plan({"plain": Plain(), "empty": Empty()})
    assert specs(made) == {"plain/weight": P("data", "model")}
    assert type(made.specs["empty"]) is Empty


# States and variables.


def test_a_state_has_the_paths_and_names_of_its_module(mesh):
    state = nnx.state(net())
    assert flatten(state).paths == list(SPECS)
    assert specs(plan(state, TABLE)) == specs(plan(state, unnamed="replicate")) == SPECS
    placed = ar.shard_tree(state, TABLE, mesh=mesh, rules=RULES)
    assert type(placed) is nnx.State
    assert type(placed["norm"]["mean"]) is nnx.BatchStat
    assert placed["layers"][0]["kernel"].get_value().sharding == NamedSharding(mesh, P("data", "model"))
    fresh = net()
    nnx.update(fresh, placed)
    assert fresh.layers[0].kernel.get_value().sharding == NamedSharding(mesh, P("data", "model"))


def test_a_pure_state_is_a_tree_of_arrays():
    pure = nnx.to_pure_dict(nnx.state(net()))
    assert specs(plan(pure, TABLE)) == SPECS
    as_state = jax.tree.map(lambda array: array, nnx.State(pure))
    assert specs(plan(as_state, TABLE)) == SPECS


def test_a_variable_alone(mesh):
    one = variable(jnp.ones((8, 32)), axis_names="embed mlp")
    placed = ar.shard_tree(one, mesh=mesh, rules=RULES)
    assert type(placed) is nnx.Param
    assert placed is not one
    assert placed.get_value().sharding == NamedSharding(mesh, P("data", "model"))
    assert placed.get_metadata("axis_names") == "embed mlp"


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"axis_names": ("embed", None)}, ("embed", None)),
        ({"axis_names": "embed _"}, "embed _"),
        ({"out_sharding": ("embed", "mlp")}, ("embed", "mlp")),
        ({"out_sharding": ["embed", "mlp"]}, ("embed", "mlp")),
        ({"out_sharding": P("embed", None)}, ("embed", None)),
        ({"sharding": ("embed", "mlp")}, ("embed", "mlp")),
        ({"sharding_names": ("embed", "mlp")}, ("embed", "mlp")),
        ({"axis_names": ("a", "b"), "out_sharding": ("c", "d")}, ("a", "b")),
        ({"out_sharding": ("c", "d"), "sharding": ("e", "f")}, ("c", "d")),
        ({"axis_names": None, "out_sharding": ("c", "d")}, ("c", "d")),
        ({"out_sharding": (None, ("data", "model"))}, P(None, ("data", "model"))),
        ({"out_sharding": (None, ["data", "model"])}, P(None, ("data", "model"))),
        ({"out_sharding": P(("data", "model"))}, P(("data", "model"))),
        ({"out_sharding": None}, NO_ENTRY),
        ({"out_sharding": ()}, NO_ENTRY),
        ({"out_sharding": P()}, NO_ENTRY),
        ({}, NO_ENTRY),
    ],
)
def test_where_the_names_of_a_variable_stand(metadata, names):
    assert flatten(variable(jnp.ones((8, 32)), **metadata)).names == [names]


def test_an_annotation_that_belongs_to_a_mesh_is_a_layout(mesh):
    for sharding in (NamedSharding(mesh, P("model")), NamedSharding(mesh, P(None, ("data", "model")))):
        assert flatten(variable(jnp.ones((8, 32)), out_sharding=sharding)).names == [sharding.spec]
    one = variable(jnp.ones((8, 32)), out_sharding=NamedSharding(mesh, P("model")))
    assert specs(plan({"one": one})) == {"one": P("model", None)}


def test_malformed_metadata_is_an_error_with_the_path():
    with pytest.raises(ar.NamesError, match="3 cannot name the dimensions") as caught:
        plan({"odd": variable(jnp.ones(2), axis_names=3)})
    assert caught.value.paths == ("odd",)


def test_variables_of_other_values(mesh):
    tree = {
        "pytree": variable({"q": jnp.ones((8, 32)), "scale": jnp.ones((8, 1)), "zero": None}, axis_names="embed mlp"),
        "none": variable(None, axis_names="embed mlp"),
        "host": variable(np.ones((8, 32), np.float32), axis_names="embed mlp"),
        "text": variable("relu"),
    }  # fmt: skip
    assert specs(plan(tree)) == {
        "pytree/q": P("data", "model"),
        "pytree/scale": P("data", None),
        "host": P("data", "model"),
    }
    placed = ar.shard_tree(tree, mesh=mesh, rules=RULES)
    assert placed["pytree"].get_value()["zero"] is None
    assert placed["none"].get_value() is None
    assert placed["text"].get_value() == "relu"
    assert placed["host"].get_value().sharding == NamedSharding(mesh, P("data", "model"))


def test_other_kinds_of_variables(mesh):
    class Mine(nnx.Param):
        pass

    with nnx.use_eager_sharding(False):
        lora = nnx.LoRA(8, 2, 32, rngs=nnx.Rngs(0))
        tree = {
            "lora": lora,
            "mine": Mine(jnp.ones(8), out_sharding=("embed",)),
            "cache": nnx.Cache(jnp.ones(8)),
        }
    table = ar.NameTable(
        {"lora/lora_a": "embed _", "lora/lora_b": "_ mlp", "mine": "embed", "cache": "embed"}
    )
    placed = ar.shard_tree(tree, table, mesh=mesh, rules=RULES)
    assert type(placed["lora"].lora_a) is nnx.LoRAParam
    assert placed["lora"].lora_b.get_value().sharding.spec == P(None, "model")
    assert type(placed["mine"]) is Mine
    assert type(placed["cache"]) is nnx.Cache


def test_no_hook_runs_and_no_value_is_laid_out_by_flax(mesh):
    def fail(*_):
        raise AssertionError("a hook ran")

    hooks = {"on_get_value": fail, "on_set_value": fail, "on_create_value": fail}
    one = variable(jnp.ones((8, 32)), out_sharding=("mlp", "embed"), eager_sharding=True, **hooks)
    table = ar.NameTable({"one": "embed mlp"})
    placed = ar.shard_tree({"one": one}, table, mesh=mesh, rules=RULES)["one"]
    assert placed.get_raw_value().sharding == NamedSharding(mesh, P("data", "model"))
    assert placed.get_metadata() == one.get_metadata()


def test_variables_that_can_be_written_inside_jit(mesh):
    with nnx.use_eager_sharding(False):
        ref = nnx.Param(jnp.ones((8, 32)), ref=True, out_sharding=("embed", "mlp"))
    if not isinstance(ref.get_raw_value(), jax.Ref):
        pytest.skip("this version of Flax has no such option")
    assert plan({"ref": ref}).specs["ref"].get_raw_value() == P("data", "model")
    placed = ar.shard_tree({"ref": ref}, mesh=mesh, rules=RULES)["ref"]
    assert isinstance(placed.get_raw_value(), jax.Ref)
    assert placed.get_raw_value() is not ref.get_raw_value()
    assert placed[...].sharding == NamedSharding(mesh, P("data", "model"))


def test_hijax_variables(mesh):
    with nnx.use_eager_sharding(False):
        one = nnx.Param(jnp.ones((8, 32)), hijax=True, out_sharding=("embed", "mlp"))
    assert plan({"one": one}).specs["one"].get_raw_value() == P("data", "model")
    placed = ar.shard_tree({"one": one}, mesh=mesh, rules=RULES)["one"]
    assert type(placed) is type(one)
    assert placed[...].sharding == NamedSharding(mesh, P("data", "model"))


# `named`.


def shown(layer):
    """What the variables of a layer show: names and resolved spec by path."""
    return {
        "/".join(map(str, path)): (one.axis_names, one.partition_spec)
        for path, one in nnx.to_flat_state(nnx.state(layer, (nnx.Param, nnx.BatchStat)))
    }


def layouts(layer):
    flat = flatten(nnx.state(layer, (nnx.Param, nnx.BatchStat)))
    return {path: leaf.sharding for path, leaf in zip(flat.paths, flat.leaves, strict=True)}


def test_without_a_mesh_a_named_layer_only_carries_its_names():
    layer = named(nnx.Linear, ("embed", "mlp"))(8, 32, rngs=nnx.Rngs(0))
    assert type(layer) is nnx.Linear
    assert shown(layer) == {"bias": (("mlp",), None), "kernel": (("embed", "mlp"), None)}
    assert layer.kernel.axis_names == ("embed", "mlp")
    assert layer.kernel.partition_spec is None
    with nnx.use_eager_sharding(False):
        plain = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.kernel.get_value(), plain.kernel.get_value())
    assert specs(plan({"up": layer})) == {"up/bias": P("model"), "up/kernel": P("data", "model")}


def test_under_a_mesh_a_named_layer_lies_by_the_active_rules(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        layer = named(nnx.Linear, "embed mlp")(8, 32, rngs=nnx.Rngs(0))
    assert layouts(layer) == {
        "bias": NamedSharding(mesh, P("model")),
        "kernel": NamedSharding(mesh, P("data", "model")),
    }
    assert shown(layer) == {
        "bias": (("mlp",), P("model")),
        "kernel": (("embed", "mlp"), P("data", "model")),
    }


def test_the_kernel_of_a_named_layer_is_never_whole_on_a_device(mesh):
    seen = []

    mark = object()

    def initializer(key, shape, dtype):
        assert mark  # its own, so that this was not compiled before
        seen.append(isinstance(key, jax.core.Tracer))
        return jax.random.normal(key, shape, dtype)

    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        named(nnx.Linear, "embed mlp")(8, 32, kernel_init=initializer, rngs=nnx.Rngs(0))
    assert seen == [True]  # jitted, with the layout as the sharding of the result


SPECS_OF_LAYERS = [
    (P("data", "model"), {"bias": P("model"), "kernel": P("data", "model")}),
    (P("data"), {"bias": P(None), "kernel": P("data", None)}),
    (P(None, ("data", "model")), {"bias": P(("data", "model")), "kernel": P(None, ("data", "model"))}),
]


@pytest.mark.parametrize(("case", "axis_types"), in_turn(SPECS_OF_LAYERS))
def test_an_explicit_spec_is_the_layout(mesh, case):
    spec, found = case
    make = named(nnx.Linear, partition_spec=spec)
    later = make(8, 32, rngs=nnx.Rngs(0))
    assert shown(later) == {"bias": (None, None), "kernel": (None, None)}
    assert specs(plan(later)) == found
    with jax.set_mesh(mesh):
        now = make(8, 32, rngs=nnx.Rngs(0))
    assert shown(now) == {path: (None, one) for path, one in found.items()}
    assert layouts(now) == {path: NamedSharding(mesh, one) for path, one in found.items()}


def test_names_win_over_a_spec():
    layer = named(nnx.Linear, "embed mlp", P("model"))(8, 32, rngs=nnx.Rngs(0))
    assert specs(plan(layer)) == {"bias": P("model"), "kernel": P("data", "model")}


def test_placing_a_named_layer_shows_in_its_variables(mesh):
    source = {"names": named(nnx.Linear, "embed mlp"), "spec": named(nnx.Linear, partition_spec=P("model"))}
    source = {name: make(8, 32, rngs=nnx.Rngs(0)) for name, make in source.items()}
    placed = ar.shard_tree(source, mesh=mesh, rules=RULES)
    assert placed["names"].kernel.partition_spec == P("data", "model")
    assert placed["spec"].kernel.partition_spec == P("model", None)
    assert source["names"].kernel.partition_spec is None
    again = ar.shard_tree(placed, mesh=mesh, rules={"embed": "model"}, unmapped="replicate")
    assert again["names"].kernel.partition_spec == P("model", None)  # the names, not the earlier layout
    assert again["spec"].kernel.partition_spec == P("model", None)
    with jax.set_mesh(mesh), ar.map_logical_axis_names({"embed": "model", "mlp": None}):
        traced = nnx.jit(lambda layer: ar.constrain(layer, None))(placed["names"])
    assert traced.kernel.get_value().sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 2)
    assert traced.kernel.partition_spec == P("model", None)  # what it has, though no plan put it there


LAYERS = {
    "embed": (
        lambda rngs: named(nnx.Embed, "vocab embed")(16, 8, rngs=rngs),
        {"embedding": ("vocab", "embed")},
    ),
    "conv": (
        lambda rngs: named(nnx.Conv, "_ _ embed mlp")(8, 32, (3, 3), rngs=rngs),
        {"bias": ("mlp",), "kernel": (None, None, "embed", "mlp")},
    ),
    "conv with dots": (
        lambda rngs: named(nnx.Conv, "... embed mlp")(8, 32, (3, 3), rngs=rngs),
        {"bias": ("mlp",), "kernel": (None, None, "embed", "mlp")},
    ),
    "layer norm": (
        lambda rngs: named(nnx.LayerNorm, "embed")(8, rngs=rngs),
        {"bias": ("embed",), "scale": ("embed",)},
    ),
    "batch norm": (
        lambda rngs: named(nnx.BatchNorm, "embed")(8, rngs=rngs),
        {"bias": ("embed",), "mean": ("embed",), "scale": ("embed",), "var": ("embed",)},
    ),
    "several features": (
        lambda rngs: named(nnx.LinearGeneral, "embed mlp head")(8, (4, 3), rngs=rngs),
        {"bias": ("mlp", "head"), "kernel": ("embed", "mlp", "head")},
    ),
    "no bias": (
        lambda rngs: named(nnx.Linear, "embed mlp")(8, 32, use_bias=False, rngs=rngs),
        {"kernel": ("embed", "mlp")},
    ),
}


@pytest.mark.parametrize(("name", "axis_types"), in_turn(LAYERS))
def test_which_array_takes_which_names(mesh, name):
    make, names = LAYERS[name]
    assert shown(make(nnx.Rngs(0))) == {path: (given, None) for path, given in names.items()}
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        layer = make(nnx.Rngs(0))
    expected = {path: P(*map(RULES.get, given)) for path, given in names.items()}
    assert layouts(layer) == {path: NamedSharding(mesh, spec) for path, spec in expected.items()}
    assert {path: spec for path, (_, spec) in shown(layer).items()} == expected


def test_a_class_of_ones_own_is_named_by_its_init_arguments(mesh):
    class Scaled(nnx.Module):
        def __init__(self, size, weight_init=nnx.initializers.ones, *, rngs):
            self.weight = nnx.Param(weight_init(rngs.params(), (size, 4), jnp.float32))
            self.other = nnx.Param(jnp.ones(size))
            self.rngs = rngs

    rngs = nnx.Rngs(0)
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        layer = named(Scaled, "embed _")(8, nnx.initializers.normal(), rngs=rngs)
    assert layer.weight.get_value().sharding == NamedSharding(mesh, P("data", None))
    assert "axis_names" not in layer.other.get_metadata()
    assert layer.rngs is rngs


def test_inside_a_trace_a_named_layer_only_carries_its_names(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        shapes = nnx.eval_shape(lambda: named(nnx.Linear, "embed mlp")(8, 32, rngs=nnx.Rngs(0)))
    assert shown(shapes) == {"bias": (("mlp",), None), "kernel": (("embed", "mlp"), None)}
    assert specs(plan(shapes)) == {"bias": P("model"), "kernel": P("data", "model")}


def test_named_without_names_is_the_layer(mesh):
    with jax.set_mesh(mesh):
        layer = named(nnx.Linear)(8, 32, rngs=nnx.Rngs(0))
    whole = {"bias": (None, P(None)), "kernel": (None, P(None, None))}  # as JAX makes arrays under a mesh
    assert shown(layer) == whole
    assert flatten(layer).names == [NO_ENTRY, NO_ENTRY]


@pytest.mark.parametrize("active", [True, False])
def test_names_that_do_not_fit_the_layer_are_an_error_at_once(active):
    context = jax.set_mesh(ar.make_mesh("data=4,model=2")) if active else contextlib.nullcontext()
    with context:
        with pytest.raises(ar.RankError, match="3 names for 2 dimensions") as caught:
            named(nnx.Linear, "a b c")(8, 32, rngs=nnx.Rngs(0))
        assert caught.value.paths == ("kernel",)
        with pytest.raises(ar.SpecError, match="has 3 entries for 2 dimensions") as caught:
            named(nnx.Linear, partition_spec=P(None, None, "data"))(8, 32, rngs=nnx.Rngs(0))
        assert caught.value.paths == ("kernel",)
        with pytest.raises(ar.NamesError, match="a Dropout has no array with an initializer"):
            named(nnx.Dropout, "a b")(0.1)
    with pytest.raises(ar.NamesError, match="cannot name the dimensions"):
        named(nnx.Linear, 3)


# Linen.


class Dense(nn.Module):
    box: bool = True

    @nn.compact
    def __call__(self, x):
        box = nn.with_logical_partitioning if self.box else lambda init, names: init
        init = nn.initializers
        h = nn.Dense(
            32,
            kernel_init=box(init.lecun_normal(), ("embed", "mlp")),
            bias_init=box(init.zeros, ("mlp",)),
            name="up",
        )(x)
        return nn.Dense(
            8, kernel_init=nn.with_partitioning(init.lecun_normal(), ("mlp", "embed")), use_bias=False
        )(h)


def boxed():
    return Dense().init(jax.random.key(0), jnp.ones((1, 8)))


LINEN = {
    "params/Dense_0/kernel": P("model", "data"),
    "params/up/bias": P("model"),
    "params/up/kernel": P("data", "model"),
}


@pytest.mark.parametrize("container", [dict, flax.core.freeze])
def test_boxes_are_leaves_at_the_paths_of_their_arrays(mesh, container):
    variables = container(boxed())
    assert specs(plan(variables)) == LINEN
    assert specs(plan(variables, ar.NameTable({"**/up/*": "... mlp", "**/kernel": None}))) == {
        "params/Dense_0/kernel": P(None, None),
        "params/up/bias": P("model"),
        "params/up/kernel": P(None, "model"),
    }
    placed = ar.shard_tree(variables, mesh=mesh, rules=RULES)
    assert type(placed) is type(variables)
    up, down = placed["params"]["up"]["kernel"], placed["params"]["Dense_0"]["kernel"]
    assert (type(up), up.names) == (nn.LogicallyPartitioned, ("embed", "mlp"))
    assert (type(down), down.names) == (nn.Partitioned, ("mlp", "embed"))
    assert up.value.sharding == NamedSharding(mesh, P("data", "model"))
    assert not isinstance(variables["params"]["up"]["kernel"].value.sharding, NamedSharding)


def test_a_frozen_dict_without_boxes(mesh):
    params = flax.core.freeze({"up": {"kernel": np.ones((8, 32), np.float32)}})
    placed = ar.shard_tree(params, {"up": {"kernel": "embed mlp"}}, mesh=mesh, rules=RULES)
    assert type(placed) is flax.core.FrozenDict
    assert placed["up"]["kernel"].sharding == NamedSharding(mesh, P("data", "model"))


def test_unboxed_results_feed_the_linen_module(mesh):
    variables, x = boxed(), jnp.ones((2, 8))
    placed = nn.unbox(ar.shard_tree(variables, mesh=mesh, rules=RULES))
    with jax.set_mesh(mesh):
        call = jax.jit(Dense(box=False).apply)
        if jax.sharding.AxisType.Explicit in mesh.axis_types:
            call = jax.sharding.auto_axes(call, out_sharding=P())
        found = call(placed, x)
    np.testing.assert_allclose(found, Dense(box=False).apply(nn.unbox(variables), x), rtol=1e-5, atol=1e-6)


def test_a_box_that_gives_several_mesh_axes_to_a_dimension_is_a_layout():
    box = nn.Partitioned(jnp.ones((8, 32)), (None, ("data", "model")))
    assert specs(plan({"box": box})) == {"box": P(None, ("data", "model"))}


def test_dataclasses_of_flax_around_boxes():
    @flax.struct.dataclass
    class State:
        params: dict
        step: int
        apply: object = flax.struct.field(pytree_node=False)

    made = plan({"state": State(boxed()["params"], 0, len)})
    assert specs(made) == {path.replace("params", "state/params", 1): spec for path, spec in LINEN.items()}
    assert made.specs["state"].apply is len


def test_a_linen_module_itself_is_no_array():
    made = plan({"module": Dense(), "w": nn.Partitioned(jnp.ones(8), ("embed",))})
    assert specs(made) == {"w": P("data")}
    assert isinstance(made.specs["module"], Dense)
