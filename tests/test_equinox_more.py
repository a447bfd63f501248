"""Equinox beyond single layers: state, shared arrays, stacks, its transformations, and traces."""

import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import in_turn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._trees import NO_ENTRY, flatten

eqx = pytest.importorskip("equinox")
axisrules_equinox = pytest.importorskip("axisrules_equinox")
named, names_of, stacked = axisrules_equinox.named, axisrules_equinox.names_of, axisrules_equinox.stacked

RULES = {"embed": "data", "mlp": "model", "layers": None}
SIZES = "data=4,model=2"
KEY = jax.random.key(0)


def specs(tree, names=None, **options):
    plan = ar.plan(tree, names, mesh=SIZES, rules=RULES, **options)
    return {placement.path: placement.spec for placement in plan.placements}


def up(key=KEY, **options):
    return named(eqx.nn.Linear(8, 32, key=key, **options), weight="mlp embed", bias="mlp")


def down(key=KEY):
    return named(eqx.nn.Linear(32, 8, key=key), weight="embed mlp", bias="embed")


def layouts(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]


# A module as the names of a module.


@pytest.mark.parametrize("form", [("mlp", "embed"), "mlp embed", P("model", "data")])
def test_a_module_may_hold_names_of_any_form_in_the_places_of_its_arrays(form):
    layer = eqx.nn.Linear(8, 32, key=KEY)
    names = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (form, None))
    assert specs({"a": [layer]}, {"a": [names]}) == {"a/0/weight": P("model", "data"), "a/0/bias": P(None)}


def test_names_for_an_array_that_the_layer_does_without_are_no_error():
    layer = eqx.nn.Linear(8, 32, use_bias=False, key=KEY)
    assert specs(layer, {"weight": "mlp embed", "bias": "mlp"}) == {"weight": P("model", "data")}


def test_names_for_a_field_that_the_layer_lacks_are_an_error():
    with pytest.raises(ar.ExtraNamesError) as caught:
        specs(eqx.nn.Linear(8, 32, key=KEY), {"weight": "mlp embed", "bias": "mlp", "scale": "mlp"})
    assert caught.value.paths == ("scale",)


def test_a_name_table_reaches_every_layer_of_a_module():
    mlp = eqx.nn.MLP(8, 8, 32, 2, key=KEY)
    table = ar.NameTable({
        "layers/0/weight": "mlp embed",
        "layers/2/weight": "embed mlp",
        "layers/2/bias": "embed",
        "**/weight": "mlp _",
        "**/bias": "mlp",
    })  # fmt: skip
    assert specs(mlp, table) == {
        "layers/0/weight": P("model", "data"),
        "layers/0/bias": P("model"),
        "layers/1/weight": P("model", None),
        "layers/1/bias": P("model"),
        "layers/2/weight": P("data", "model"),
        "layers/2/bias": P("data"),
    }


# `eqx.nn.Shared`.


def shared():
    embedding = named(eqx.nn.Embedding(32, 8, key=KEY), weight="mlp embed")
    head = named(eqx.nn.Linear(8, 32, use_bias=False, key=KEY), weight="mlp embed")
    return eqx.nn.Shared((embedding, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight)


@pytest.mark.parametrize(
    "names",
    [
        None,
        ar.NameTable({"**/weight": "mlp embed"}),
        lambda path, leaf: "mlp embed",
        {"pytree": [{"weight": "mlp embed"}, {"weight": "mlp embed"}]},
        {"pytree": [{"weight": "mlp embed"}]},
    ],
    ids=["own", "table", "callable", "tree", "tree without the shared one"],
)
def test_a_shared_array_is_planned_once_where_it_stands(names):
    assert specs(shared(), names) == {"pytree/0/weight": P("model", "data")}


def test_a_shared_array_stays_shared_when_it_is_placed(mesh):
    placed = ar.shard_tree(shared(), mesh=mesh, rules=RULES)
    embedding, head = placed()
    assert embedding.weight is head.weight
    assert head.weight.sharding == NamedSharding(mesh, P("model", "data"))
    assert jax.tree.structure(placed) == jax.tree.structure(ar.shard_tree(placed, mesh=mesh, rules=RULES))


def test_the_gradient_of_a_shared_array_is_the_sum_of_its_uses(mesh):
    def loss(pair):
        embedding, head = pair()
        return head(embedding(3)).sum()

    placed = ar.shard_tree(shared(), mesh=mesh, rules=RULES)
    arrays, rest = eqx.partition(placed, eqx.is_array)
    gradient = jax.grad(lambda arrays: loss(eqx.combine(arrays, rest)))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.sharding.auto_axes(gradient, out_sharding=P()))(arrays)
    expected = eqx.filter_grad(loss)(shared())
    np.testing.assert_allclose(found.pytree[0].weight, expected.pytree[0].weight, rtol=1e-5, atol=1e-6)


# `eqx.nn.State`.


class Normed(eqx.Module):
    norms: list
    head: eqx.nn.Linear
    count: eqx.nn.StateIndex

    def __init__(self, key):
        ema = {"weight": "embed", "bias": "embed", "ema_state_index": "embed"}
        batch = {"weight": "embed", "bias": "embed", "batch_state_index": "embed"}
        self.norms = [
            named(eqx.nn.BatchNorm(8, "batch", mode="ema"), **ema),
            named(eqx.nn.BatchNorm(8, "batch", mode="batch"), **batch),
        ]
        self.head = up(key)
        self.count = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, x, state):
        for norm in self.norms:
            x, state = norm(x, state)
        state = state.set(self.count, state.get(self.count) + 1)
        return self.head(x), state


def forward(model, state, batch):
    call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return call(batch, state)


def normed():
    return eqx.nn.make_with_state(Normed)(KEY)


STATE_SPECS = {
    "1/0": P(),
    "1/1/0": P("data"),
    "1/1/1": P("data"),
    "1/2": P(),
    "1/3/0": P("data"),
    "1/3/1": P("data"),
    "1/4": P(),
}


def test_the_state_has_the_names_of_the_fields_that_hold_its_indices():
    pair = normed()
    found = specs(pair, names_of(pair))
    assert {path: spec for path, spec in found.items() if path.startswith("1/")} == STATE_SPECS
    assert found["0/head/weight"] == P("model", "data")
    assert found["0/norms/0/weight"] == P("data")


def test_a_state_alone_carries_no_names():
    with pytest.raises(ar.MissingNamesError) as caught:
        specs(normed())
    assert caught.value.paths == ("1/1/0", "1/1/1", "1/3/0", "1/3/1")


def test_state_without_names_is_reported_by_path():
    pair = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="ema")
    with pytest.raises(ar.MissingNamesError) as caught:
        specs(pair, names_of(pair))
    assert caught.value.paths == ("0/weight", "0/bias", "1/1/0", "1/1/1")


def test_a_state_is_named_by_a_table_too():
    _, state = normed()
    table = ar.NameTable({"*/*": "embed"})
    found = specs({"state": state}, ar.NameTable({"state/*/*": "embed"}))
    assert found == {path.replace("1/", "state/", 1): spec for path, spec in STATE_SPECS.items()}
    assert specs(state, table) == {path[2:]: spec for path, spec in STATE_SPECS.items()}


def test_the_state_within_a_module_has_names_too():
    class Training(eqx.Module):
        model: Normed
        state: eqx.nn.State
        step: jax.Array

    training = Training(*normed(), jnp.zeros((), jnp.int32))
    found = specs(training, names_of(training))
    assert {path: found[path.replace("1/", "state/", 1)] for path in STATE_SPECS} == STATE_SPECS


def test_a_model_with_its_initial_state_inside_needs_no_more_names():
    found = specs(Normed(KEY))
    assert found["norms/0/ema_state_index/init/0"] == P("data")
    assert found["norms/1/batch_counter/init"] == P()


def test_stateful_layers_train_on_where_they_lie():
    mesh = ar.make_mesh(SIZES)  # JAX maps a batch norm over values that lie alike alone, on Explicit axes
    model, state = normed()
    batch = jnp.linspace(-1, 1, 64).reshape(8, 8)
    pair = ar.shard_tree((model, state), names_of((model, state)), mesh=mesh, rules=RULES)
    traces = []

    @eqx.filter_jit
    def step(model, state, batch):
        traces.append(1)
        out, state = forward(model, state, batch)
        return out, ar.constrain(state, names_of((model, state))[1], mesh=mesh, rules=RULES)

    placed, before = pair
    for _ in range(3):
        found, moved = step(placed, before, batch)
        expected, state = eqx.filter_jit(forward)(model, state, batch)
        assert layouts(moved) == layouts(before)
        before = moved
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert int(moved.get(placed.count)) == 3
    assert len(traces) == 1


def test_placing_a_state_does_not_use_it_up(mesh):
    model, state = normed()
    placed = ar.shard_tree(state, names_of((model, state))[1], mesh=mesh, rules=RULES)
    for one in (state, placed):
        new = jnp.ones_like(one.get(model.count))  # on Explicit axes Equinox asks for one on the mesh too
        assert int(one.set(model.count, new).get(model.count)) == 1


def test_a_state_that_was_used_up_is_an_error_of_ours_with_the_reason():
    model, state = normed()
    state.set(model.count, jnp.ones((), jnp.int32))
    with pytest.raises(ar.LeafError, match="Attempted to use old state"):
        specs(state, unnamed="replicate")


def test_an_index_itself_cannot_be_named():
    with pytest.raises(ar.NamesError) as caught:
        named(eqx.nn.StateIndex(jnp.zeros(8)), init="embed")
    assert str(caught.value) == (
        "a StateIndex cannot carry names: Equinox takes no subclass of it\n"
        '  fix:   name the field that holds it: named(layer, state_index="embed").'
    )


def test_names_of_a_tree_without_state_are_those_it_carries():
    tree = {"layer": up(), "step": jnp.zeros(()), "table": jnp.zeros((8, 2))}
    names = names_of(tree)
    assert (names["layer"].weight, names["layer"].bias) == (("mlp", "embed"), ("mlp",))
    assert names["table"] is NO_ENTRY
    assert names["layer"].in_features == 8


# Stacks.


class Block(eqx.Module):
    layers: tuple
    scale: jax.Array = eqx.field(metadata={"axis_names": "embed"})
    gain: jax.Array = eqx.field(metadata={"axis_names": None})
    extra: dict
    activation: Callable
    nothing: Any = None

    def __init__(self, key):
        self.layers = (up(key), down(key))
        self.scale, self.gain, self.extra = jnp.ones(8), jnp.ones(8), {"plain": jnp.ones(8)}
        self.activation = jax.nn.relu

    def __call__(self, x):
        up, down = self.layers
        return x + down(self.activation(up(x))) * self.scale * self.gain + self.extra["plain"]


def stack():
    return eqx.filter_vmap(Block)(jax.random.split(KEY, 3))


def test_a_stack_is_refused_with_the_hint_until_its_axis_has_a_name():
    with pytest.raises(ar.AxisRulesError) as caught:
        specs({"blocks": eqx.filter_vmap(up)(jax.random.split(KEY, 3))})
    assert "One dimension of size 3 more than names: a stacked axis?" in str(caught.value)
    assert caught.value.paths == ("blocks/weight", "blocks/bias")


def test_stacked_names_the_new_axis_of_every_array_that_has_names():
    blocks = stacked(stack(), "layers")
    names = dict(zip(flatten(blocks).paths, flatten(blocks).names, strict=True))
    assert names == {
        "layers/0/weight": ("layers", "mlp", "embed"),
        "layers/0/bias": ("layers", "mlp"),
        "layers/1/weight": ("layers", "embed", "mlp"),
        "layers/1/bias": ("layers", "embed"),
        "scale": ("layers", "embed"),
        "gain": ("layers", ...),
        "extra/plain": NO_ENTRY,
        "activation": NO_ENTRY,
    }
    with pytest.raises(ar.MissingNamesError) as caught:
        specs({"blocks": blocks})
    assert caught.value.paths == ("blocks/extra/plain",)
    assert specs(blocks, unnamed="replicate")["layers/1/weight"] == P(None, "data", "model")


def test_a_stack_may_be_split_over_its_new_axis():
    blocks = stacked(eqx.filter_vmap(Block)(jax.random.split(KEY, 4)), "layers")
    plan = ar.plan(
        blocks, mesh=SIZES, rules={"layers": "data", "mlp": "model", "embed": None}, unnamed="replicate"
    )
    assert plan.placement("layers/0/weight").spec == P("data", "model", None)
    assert plan.placement("gain").spec == P("data", None)


def test_stacking_twice_and_without_a_name():
    keys = jax.random.split(KEY, (2, 3))
    twice = eqx.filter_vmap(eqx.filter_vmap(up))(keys)
    twice = stacked(stacked(twice, "layers"), None)
    assert twice.axis_names["weight"] == (None, "layers", "mlp", "embed")
    assert specs(twice) == {"weight": P(None, None, "model", "data"), "bias": P(None, None, "model")}


def test_naming_a_stack_anew_does_as_well():
    blocks = named(
        eqx.filter_vmap(up)(jax.random.split(KEY, 3)), weight="layers mlp embed", bias="layers mlp"
    )
    assert blocks.axis_names == stacked(eqx.filter_vmap(up)(jax.random.split(KEY, 3)), "layers").axis_names


def test_the_state_of_a_stack_has_the_name_of_its_axis():
    def make(key):
        names = {"weight": "embed", "bias": "embed", "ema_state_index": "embed", "ema_first_time_index": ""}
        return named(eqx.nn.BatchNorm(8, "batch", mode="ema"), **names)

    model, state = eqx.filter_vmap(eqx.nn.make_with_state(make))(jax.random.split(KEY, 3))
    pair = stacked(model, "layers"), state
    found = specs(pair, names_of(pair))
    assert found["0/weight"] == P(None, "data")
    assert (found["1/0"], found["1/1/0"], found["1/1/1"]) == (P(None), P(None, "data"), P(None, "data"))


def test_the_source_of_a_stack_and_its_arrays_stay_as_they_are():
    source = stack()
    blocks = stacked({"blocks": [source]}, "layers")["blocks"][0]
    assert flatten(source).names[4] == "embed"
    assert isinstance(blocks, Block)
    assert (blocks.activation, blocks.nothing) == (jax.nn.relu, None)
    pairs = zip(jax.tree.leaves(blocks), jax.tree.leaves(source), strict=True)
    assert all(one is other for one, other in pairs)


def test_a_stack_computes_in_a_scan_what_its_layers_do_one_by_one(mesh):
    blocks = ar.shard_tree(stacked(stack(), "layers"), mesh=mesh, rules=RULES, unnamed="replicate")
    x = jnp.linspace(-1, 1, 8)
    arrays, rest = eqx.partition(blocks, eqx.is_array)

    def call(arrays, x):
        return jax.lax.scan(lambda x, one: (eqx.combine(one, rest)(x), None), x, arrays)[0]

    with jax.set_mesh(mesh):
        if jax.sharding.AxisType.Explicit in mesh.axis_types:
            call = jax.sharding.auto_axes(call, out_sharding=P())
        found = jax.jit(call)(arrays, x)
    expected = x
    for key in jax.random.split(KEY, 3):
        expected = Block(key)(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_everything_that_cannot_be_stacked_is_in_one_error():
    odd = named(eqx.nn.Linear(8, 32, key=KEY), weight=P("model", "data"), bias=P("model"))
    with pytest.raises(ar.SpecError) as caught:
        stacked({"a": [odd]}, "layers")
    of_bias, of_weight = caught.value.failures
    assert of_bias.paths == ("a/0/bias",)
    assert str(of_weight) == (
        "P('model', 'data') is a layout, which cannot begin with the name 'layers'\n"
        "  at:    a/0/weight\n"
        "  fix:   give names in its place, or name the stack itself anew."
    )


def test_a_stack_that_has_the_name_already_is_refused_by_its_plan():
    twice = stacked(stacked(up(), "layers"), "layers")
    with pytest.raises(ar.RepeatedNameError, match="layers"):
        specs(
            eqx.tree_at(
                lambda layer: (layer.weight, layer.bias), twice, (jnp.ones((3, 3, 8, 8)), jnp.ones((3, 3, 8)))
            )
        )


@pytest.mark.parametrize("name", [3, ("layers",), ...])
def test_a_name_of_a_stack_is_a_text_or_none(name):
    with pytest.raises(ar.NamesError):
        stacked(up(), name)


# Abstract modules.


def test_an_abstract_model_with_its_state_is_planned_as_the_real_one():
    abstract = eqx.filter_eval_shape(normed)
    assert specs(abstract, names_of(abstract)) == specs(normed(), names_of(normed()))


def test_an_abstract_model_gets_its_shardings(mesh):
    abstract = eqx.filter_eval_shape(normed)
    model, state = ar.shard_tree(abstract, names_of(abstract), mesh=mesh, rules=RULES)
    assert model.head.weight == jax.ShapeDtypeStruct(
        (32, 8), jnp.float32, sharding=NamedSharding(mesh, P("model", "data"))
    )
    mean, _ = state.get(model.norms[0].ema_state_index)
    assert mean.sharding == NamedSharding(mesh, P("data"))


def test_an_abstract_stack_takes_the_name_of_its_axis():
    blocks = stacked(eqx.filter_eval_shape(stack), "layers")
    assert specs(blocks, unnamed="replicate")["layers/0/bias"] == P(None, "model")


# The layers of Equinox.

LAYERS = {
    "mlp": lambda: eqx.nn.MLP(8, 8, 32, 2, activation=jax.nn.gelu, key=KEY),
    "jitted activation": lambda: eqx.nn.MLP(8, 8, 32, 1, activation=jax.jit(jax.nn.gelu), key=KEY),
    "trained activation": lambda: eqx.nn.MLP(8, 8, 32, 1, activation=eqx.nn.PReLU(0.1), key=KEY),
    "attention": lambda: eqx.nn.MultiheadAttention(2, 8, use_key_bias=True, key=KEY),
    "embedding": lambda: eqx.nn.Embedding(32, 8, key=KEY),
    "rotary": lambda: eqx.nn.RotaryPositionalEmbedding(8),
    "convolution": lambda: eqx.nn.Conv2d(8, 16, 3, key=KEY),
    "layer norm": lambda: eqx.nn.LayerNorm(8),
    "rms norm": lambda: eqx.nn.RMSNorm(8, use_bias=False),
    "lstm": lambda: eqx.nn.LSTMCell(8, 8, key=KEY),
    "gru": lambda: eqx.nn.GRUCell(8, 8, key=KEY),
    "weight norm": lambda: eqx.nn.WeightNorm(eqx.nn.Linear(8, 32, key=KEY)),
    "sequential": lambda: eqx.nn.Sequential([up(), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.1), down()]),
    "stack": stack,
    "shared": shared,
    "pool": lambda: eqx.nn.MaxPool2d(2),
    "state": normed,
    "jax transformation": lambda: Holder(eqx.filter_vmap(up())),
}


class Holder(eqx.Module):
    function: Callable


def first_split(path, leaf):
    """The first dimension that divides, whatever it means."""
    free = [dim for dim, size in enumerate(leaf.shape) if size % 4 == 0]
    return tuple("embed" if free[:1] == [dim] else None for dim in range(leaf.ndim))


def serialised(tree, like):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


@pytest.mark.parametrize(("layer", "axis_types"), in_turn(LAYERS))
def test_a_layer_is_placed_whole_and_stays_itself(layer, mesh):
    source = LAYERS[layer]()
    plan = ar.plan(source, first_split, mesh=mesh, rules=RULES)
    placed = ar.shard_tree(source, first_split, mesh=mesh, rules=RULES)
    assert layouts(placed) == list(plan.flat_shardings)
    assert (
        any("data" in placement.spec for placement in plan.placements) == (layer != "pool")
        or layer == "rotary"
    )
    assert jax.tree.structure(placed) == jax.tree.structure(source)
    assert eqx.tree_equal(jax.device_get(placed), jax.device_get(source))


@pytest.mark.parametrize(("layer", "axis_types"), in_turn(LAYERS))
def test_a_file_written_from_a_placed_layer_fits_the_plain_one_and_back(layer, mesh):
    source = LAYERS[layer]()
    placed = ar.shard_tree(source, first_split, mesh=mesh, rules=RULES)
    restored = serialised(placed, like=source)
    assert eqx.tree_equal(restored, source)
    again = ar.shard_tree(serialised(source, like=placed), first_split, mesh=mesh, rules=RULES)
    assert layouts(again) == layouts(placed)
    assert eqx.tree_equal(jax.device_get(again), jax.device_get(source))


def test_a_named_and_placed_layer_survives_its_file(mesh):
    placed = ar.shard_tree(up(), mesh=mesh, rules=RULES)
    restored = serialised(placed, like=up(jax.random.key(1)))
    assert restored.axis_names == placed.axis_names
    assert layouts(ar.shard_tree(restored, mesh=mesh, rules=RULES)) == layouts(placed)
    np.testing.assert_array_equal(restored.weight, placed.weight)


# Equinox's transformations.


def test_filter_jit_compiles_once_while_the_layouts_stay(mesh):
    traces = []
    placed = ar.shard_tree([up(), down()], mesh=mesh, rules=RULES)

    @eqx.filter_jit
    def step(layers, x):
        traces.append(1)
        loss = lambda layers, x: jnp.sum(layers[1](jax.nn.relu(layers[0](x))) ** 2)  # noqa: E731
        grads = jax.sharding.auto_axes(eqx.filter_grad(loss), out_sharding=P())(layers, x)
        return ar.constrain(
            eqx.apply_updates(layers, jax.tree.map(lambda g: -0.1 * g, grads)), None, mesh=mesh, rules=RULES
        )

    moved, x = placed, jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))
    for _ in range(3):
        with jax.set_mesh(mesh):
            moved = step(moved, x)
        assert layouts(moved) == layouts(placed)
    assert len(traces) == 1
    assert type(moved[0]) is type(placed[0])
    assert moved[0].axis_names == placed[0].axis_names


def test_filter_shard_and_constrain_say_the_same():
    mesh = ar.make_mesh(SIZES)  # filter_shard only knows Auto axes
    source = eqx.nn.Sequential([up(), eqx.nn.Lambda(jax.nn.relu), down()])
    plan = ar.plan(source, mesh=mesh, rules=RULES)
    shardings = eqx.filter(plan.shardings, lambda leaf: isinstance(leaf, NamedSharding))
    by_equinox = eqx.filter_jit(lambda module: eqx.filter_shard(module, shardings))(source)
    by_us = eqx.filter_jit(lambda module: ar.constrain(module, None, mesh=mesh, rules=RULES))(source)
    assert layouts(by_equinox) == layouts(by_us) == list(plan.flat_shardings)
    assert jax.tree.structure(by_us) == jax.tree.structure(source)
    eagerly = eqx.filter_shard(source, shardings)
    assert layouts(eagerly) == layouts(ar.shard_tree(source, mesh=mesh, rules=RULES))


def test_a_transformed_module_as_a_field_is_seen_through(mesh):
    holder = Holder(eqx.filter_vmap(up()))
    assert specs(holder) == {"function/_fun/weight": P("model", "data"), "function/_fun/bias": P("model")}
    placed = ar.shard_tree(holder, mesh=mesh, rules=RULES)
    assert placed.function(jnp.ones((3, 8))).shape == (3, 32)


# Odd classes.


class Kind(eqx.Enumeration):
    first = "the first"
    second = "the second"


class Abstract(eqx.Module):
    weight: eqx.AbstractVar[jax.Array]
    size: eqx.AbstractClassVar[int]


CHECKED = []
ADD_ONE = functools.partial(jnp.add, 1)


class Odd(Abstract):
    weight: jax.Array = eqx.field(converter=jnp.asarray, metadata={"axis_names": "mlp embed"})
    kind: Kind
    partial: Callable
    jax_partial: Callable
    equinox_partial: Callable
    size = 8

    def __check_init__(self):
        assert eqx.is_array(self.weight), "the check ran on what is no array"
        CHECKED.append(self)


def odd():
    partials = jax.tree_util.Partial(ADD_ONE, jnp.ones(8)), eqx.Partial(ADD_ONE, jnp.ones(8))
    return Odd(np.ones((32, 8), np.float32), Kind.second, ADD_ONE, *partials)


def test_converters_enumerations_partials_and_abstract_fields_come_through(mesh):
    source, checks = odd(), len(CHECKED)
    placed = ar.shard_tree(source, mesh=mesh, rules=RULES, unnamed="replicate")
    assert placed.weight.sharding == NamedSharding(mesh, P("model", "data"))
    assert (type(placed), placed.size, placed.partial) == (Odd, 8, source.partial)
    assert placed.kind == Kind.second
    assert placed.jax_partial.args[0].sharding == NamedSharding(mesh, P(None))
    assert placed.equinox_partial.args[0].sharding == NamedSharding(mesh, P(None))
    assert isinstance(placed.jax_partial, jax.tree_util.Partial)
    assert len(CHECKED) == checks, "the check ran once more"


def test_the_arguments_of_partials_have_paths():
    with pytest.raises(ar.MissingNamesError) as caught:
        specs(odd())
    assert caught.value.paths == ("jax_partial/0/0", "equinox_partial/args/0")


def test_a_converter_does_not_run_on_specs_or_names():
    plan = ar.plan(odd(), mesh=SIZES, rules=RULES, unnamed="replicate")
    assert plan.specs.weight == P("model", "data")
    assert specs(odd(), plan.specs) == {one.path: one.spec for one in plan.placements}


def test_an_odd_class_may_be_named_by_hand():
    assert specs(named(odd(), weight="_ mlp"), unnamed="replicate")["weight"] == P(None, "model")


# In a trace, as `init` takes modules apart.


def tracers_in(node, seen=None):
    """Every tracer that is reachable from an object, through attributes, closures and containers."""
    seen = {} if seen is None else seen
    if id(node) in seen or isinstance(node, (type, str, np.ndarray)):
        return []
    seen[id(node)] = node
    if isinstance(node, jax.core.Tracer):
        return [node]
    below = list(node) if isinstance(node, (list, tuple, set, frozenset)) else []
    if isinstance(node, dict):
        below = [*node.keys(), *node.values()]
    if isinstance(node, functools.partial):
        below = [node.func, node.args, node.keywords]
    for cell in getattr(node, "__closure__", None) or ():
        below.append(cell.cell_contents)
    below += [getattr(node, "__self__", None), getattr(node, "__wrapped__", None)]
    if not isinstance(node, (jax.Array, type(jax))):
        below += list(getattr(node, "__dict__", {}).values())
    return [tracer for one in below if one is not None for tracer in tracers_in(one, seen)]


def taken_apart(make):
    """A module taken apart in a trace, and put together with arrays outside of it."""
    out = {}

    def trace():
        flat = out["flat"] = flatten(make())
        return [leaf for leaf in flat.leaves if eqx.is_array(leaf)]

    jaxpr = jax.make_jaxpr(trace)()
    flat = out["flat"]
    arrays = iter(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts))
    return flat, flat.rebuild([next(arrays) if eqx.is_array(leaf) else leaf for leaf in flat.leaves])


@pytest.mark.parametrize("layer", [*LAYERS, "named stack", "odd"])
def test_a_module_made_in_a_trace_is_whole_outside_of_it(layer):
    make = {**LAYERS, "named stack": lambda: stacked(stack(), "layers"), "odd": odd}[layer]
    flat, rebuilt = taken_apart(make)
    expected = make()
    assert flat.names == flatten(expected).names
    assert tracers_in(rebuilt) == []
    assert jax.tree.structure(rebuilt) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(wanted):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_search_for_tracers_finds_them():
    out = {}

    def trace(x):
        out.update(
            partial=functools.partial(jnp.add, x), closure=lambda: x, method=Holder(x).__call__, array=x
        )
        return x

    class Holder(eqx.Module):
        value: Any

        def __call__(self):
            return self.value

    jax.make_jaxpr(trace)(1.0)
    assert {name: len(tracers_in(one)) for name, one in out.items()} == dict.fromkeys(out, 1)


def test_a_model_with_state_made_in_a_trace_runs():
    _, (model, state) = taken_apart(normed)
    batch = jnp.linspace(-1, 1, 64).reshape(8, 8)
    out, state = eqx.filter_jit(forward)(model, state, batch)
    assert out.shape == (8, 32)
    assert int(state.get(model.count)) == 1


def test_a_module_made_in_a_trace_calls_its_activation():
    _, mlp = taken_apart(LAYERS["jitted activation"])
    np.testing.assert_allclose(mlp(jnp.ones(8)), LAYERS["jitted activation"]()(jnp.ones(8)), rtol=1e-5)
