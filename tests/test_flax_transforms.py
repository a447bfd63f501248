"""Stacks by ``nnx.vmap`` and ``nnx.scan``, and by Linen: names follow the axes of the arrays."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AUTO_FIRST, AXIS_TYPES, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._trees import flatten

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
named = pytest.importorskip("axisrules_flax").named

RULES = {"layers": None, "embed": "data", "mlp": "model"}
LAYERS = {nnx.PARTITION_NAME: "layers"}


class Block(nnx.Module):
    def __init__(self, rngs, width=8, hidden=32):
        self.up = named(nnx.Linear, "embed mlp")(width, hidden, rngs=rngs)
        self.down = named(nnx.Linear, "mlp embed")(hidden, width, rngs=rngs)
        self.norm = named(nnx.BatchNorm, "embed")(width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(self.norm(x, use_running_average=True))))


def stack(metadata, make=Block, size=3, out_axes=0, **options):
    options |= {"transform_metadata": metadata} if metadata is not None else {}
    made = nnx.vmap(lambda rngs: make(rngs), out_axes=out_axes, **options)
    return nnx.split_rngs(splits=size)(made)(nnx.Rngs(0))


def linear(rngs):
    return named(nnx.Linear, "embed mlp")(8, 32, rngs=rngs)


def plan(tree, **options):
    return ar.plan(tree, **{"mesh": "data=4,model=2", "rules": RULES, **options})


def names(tree):
    return {one.path: one.names for one in plan(tree).placements}


def specs(tree, **options):
    return {one.path: one.spec for one in plan(tree, **options).placements}


BLOCK = {
    "down/bias": ("embed",),
    "down/kernel": ("mlp", "embed"),
    "norm/bias": ("embed",),
    "norm/mean": ("embed",),
    "norm/scale": ("embed",),
    "norm/var": ("embed",),
    "up/bias": ("mlp",),
    "up/kernel": ("embed", "mlp"),
}


def of_stack(name, block=BLOCK):
    return {path: (name, *below) for path, below in block.items()}


@pytest.mark.parametrize(
    ("metadata", "name"), [(LAYERS, "layers"), ({nnx.PARTITION_NAME: None}, None), ({}, None), (None, None)]
)
def test_a_stack_has_the_name_of_the_new_axis_or_none(metadata, name):
    made = stack(metadata)
    assert names(made) == of_stack(name)
    assert made.up.kernel.axis_names == (name, "embed", "mlp")
    assert made.norm.mean.axis_names == (name, "embed")
    assert specs(made)["up/kernel"] == P(None, "data", "model")
    assert specs(nnx.state(made))["up/bias"] == P(None, "model")
    found = ar.plan(made, mesh="x=3,y=8", rules={"layers": "x", "embed": "y", "mlp": None})
    assert found.specs.up.kernel.get_value() == P("x" if name else None, "y", None)


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1])
@pytest.mark.parametrize("metadata", [LAYERS, {}])
def test_the_new_axis_may_stand_anywhere(out_axes, metadata):
    made = stack(
        metadata,
        lambda rngs: named(nnx.Linear, "embed mlp")(8, 32, use_bias=False, rngs=rngs),
        out_axes=out_axes,
    )
    expected = ["embed", "mlp"]
    expected.insert(out_axes % 3, "layers" if metadata else None)
    assert made.kernel.get_value().ndim == 3
    assert made.kernel.axis_names == tuple(expected)
    assert names(made) == {"kernel": tuple(expected)}


def test_where_sizes_leave_the_place_of_an_unnamed_axis_open_it_is_the_first():
    assert names(stack({}, linear, size=8)) == of_stack(None, {"bias": ("mlp",), "kernel": ("embed", "mlp")})
    assert names(stack({}, linear, size=1)) == of_stack(None, {"bias": ("mlp",), "kernel": ("embed", "mlp")})


@pytest.mark.parametrize("outer", [{nnx.PARTITION_NAME: "stages"}, {}])
@pytest.mark.parametrize("inner", [LAYERS, {}])
def test_stacks_of_stacks(outer, inner):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(transform_metadata=outer)
    def stages(rngs):
        made = nnx.split_rngs(splits=3)(nnx.vmap(linear, transform_metadata=inner))(rngs)
        assert made.kernel.axis_names == ("layers" if inner else None, "embed", "mlp")
        return made

    made = stages(nnx.Rngs(0))
    before = ("stages" if outer else None, "layers" if inner else None)
    assert made.kernel.get_value().shape == (2, 3, 8, 32)
    assert made.kernel.axis_names == (*before, "embed", "mlp")
    found = ar.plan(made, mesh="data=4,model=2", rules={**RULES, "stages": None})
    assert {one.path: one.names for one in found.placements} == {
        "bias": (*before, "mlp"),
        "kernel": (*before, "embed", "mlp"),
    }


@pytest.mark.parametrize("stacked", [LAYERS, {}])
@pytest.mark.parametrize("scanned", [LAYERS, {}])
def test_inside_a_scan_a_variable_shows_one_layer_and_afterwards_the_stack(stacked, scanned):
    seen = []

    def body(x, block):
        seen.append((block.up.kernel.axis_names, block.up.kernel.shape))
        return block(x)

    made = stack(stacked)
    run = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=scanned)
    run(jnp.ones((2, 8)), made)
    assert set(seen) == {(("embed", "mlp"), (8, 32))}
    assert names(made) == of_stack("layers" if stacked or scanned.get(nnx.PARTITION_NAME) else None)


def test_an_axis_is_taken_away_by_its_own_name_alone():
    made = stack(LAYERS)
    run = nnx.scan(
        lambda x, block: block(x),
        in_axes=(nnx.Carry, 0),
        out_axes=nnx.Carry,
        transform_metadata={nnx.PARTITION_NAME: "blocks"},
    )
    with pytest.raises(ar.NamesError, match="takes away the axis 'blocks' where the array has 'layers'"):
        run(jnp.ones((2, 8)), made)


def test_layers_made_in_a_scan_have_the_stacked_axis():
    @nnx.split_rngs(splits=3)
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), transform_metadata=LAYERS)
    def make(count, rngs):
        return count + 1, Block(rngs)

    _, made = make(0, nnx.Rngs(0))
    assert names(made) == of_stack("layers")


def test_state_axes_stack_the_parameters_and_share_the_statistics():
    class Net(nnx.Module):
        def __init__(self, rngs):
            axes = nnx.StateAxes({nnx.Param: 0, nnx.RngState: 0, ...: None})
            self.blocks = nnx.split_rngs(splits=3)(
                nnx.vmap(
                    Block,
                    in_axes=(axes,),
                    out_axes=nnx.StateAxes({nnx.Param: 0, ...: None}),
                    transform_metadata=LAYERS,
                )
            )(rngs)

    made = Net(nnx.Rngs(0)).blocks
    shared = {"norm/mean": ("embed",), "norm/var": ("embed",)}
    assert names(made) == of_stack("layers") | shared
    assert made.norm.mean.get_value().shape == (8,)


def test_metadata_that_flax_is_told_to_change_is_changed_once():
    made = stack({**LAYERS, "axis_names": "layers"})
    assert names(made) == of_stack("layers")


@pytest.mark.parametrize("metadata", [LAYERS, {}])
def test_an_explicit_layout_leaves_the_new_axis_whole(metadata):
    made = stack(metadata, lambda rngs: named(nnx.Linear, partition_spec=P(None, "model"))(8, 32, rngs=rngs))
    assert specs(made) == {"bias": P(None, "model"), "kernel": P(None, None, "model")}


def test_a_layer_whose_own_names_have_the_stacked_axis_is_scanned():
    class Stacked(nnx.Module):
        def __init__(self, rngs, weight_init=nnx.initializers.ones):
            self.weight = nnx.Param(weight_init(rngs.params(), (3, 8, 8), jnp.float32))

    made = named(Stacked, "layers embed _")(nnx.Rngs(0))
    seen = []

    def body(x, layer):
        seen.append(layer.weight.axis_names)
        return x @ layer.weight[...]

    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=LAYERS)(
        jnp.ones((2, 8)), made
    )
    assert set(seen) == {("embed", None)}
    assert names(made) == {"weight": ("layers", "embed", None)}


def test_annotations_of_flax_follow_under_a_partition_name_and_without_one_the_error_says_so():
    def annotated(rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
        return nnx.Linear(8, 32, kernel_init=init, use_bias=False, rngs=rngs)

    with nnx.use_eager_sharding(False):
        assert names(stack(LAYERS, annotated)) == {"kernel": ("layers", "embed", "mlp")}
        assert names(stack({nnx.PARTITION_NAME: None}, annotated)) == {"kernel": (None, "embed", "mlp")}
        without = stack({}, annotated)
    with pytest.raises(ar.RankError, match="size 3 more than names: a stacked axis\\?") as caught:
        plan({"blocks": without})
    assert caught.value.paths == ("blocks/kernel",)


def test_an_axis_that_was_stacked_by_hand_is_named_by_hand():
    def make():
        layers = [nnx.state(linear(nnx.Rngs(number))) for number in range(3)]
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)

    state = make()
    assert names(state)["kernel"] == (None, "embed", "mlp")
    nnx.spmd.add_axis(state, 0, LAYERS)
    assert state["kernel"].axis_names == names(state)["kernel"] == ("layers", "embed", "mlp")
    first = jax.tree.map(lambda array: array[0], state)
    assert names(first) == {"bias": ("mlp",), "kernel": ("embed", "mlp")}
    nnx.spmd.remove_axis(first, 0, LAYERS)
    assert first["kernel"].axis_names == names(first)["kernel"] == ("embed", "mlp")


def test_an_array_of_another_shape_is_no_stack():
    layer = linear(nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((5, 8, 33)))
    with pytest.raises(ar.RankError, match="2 names for 3 dimensions") as caught:
        plan({"layer": layer})
    assert caught.value.paths == ("layer/kernel",)
    layer.kernel.set_value(jnp.ones(32))
    with pytest.raises(ar.RankError, match="2 names for 1 dimension"):
        plan({"layer": layer})
    layer.kernel.set_value(jnp.ones((8, 64)))  # a grown array keeps its names
    assert names(layer)["kernel"] == ("embed", "mlp")


def test_hooks_of_the_user_are_called_too():
    calls = []
    init = nnx.with_metadata(nnx.initializers.normal(), note="mine")

    def make(rngs):
        return named(nnx.Linear, "embed mlp")(8, 32, kernel_init=init, rngs=rngs)

    made = stack(LAYERS, make)
    assert made.kernel.get_metadata("note") == "mine"
    one = linear(nnx.Rngs(0)).kernel
    theirs = nnx.Param.from_metadata(
        jnp.ones((8, 32)),
        nnx.Param(1.0).get_metadata() | {"on_add_axis": lambda *given: calls.append(given[1:])},
    )
    from axisrules_flax._variables import annotate

    annotate(theirs, ("embed", "mlp"), None)
    for variable in (one, theirs):
        variable.add_axis(0, "layers")
        assert variable.axis_names == ("layers", "embed", "mlp")
    assert calls == [(0, "layers")]
    theirs.remove_axis(0, "layers")
    assert theirs.axis_names == ("embed", "mlp")


def test_a_stack_is_placed_and_shows_where_it_lies(mesh):
    for metadata in (LAYERS, {}):
        placed = ar.shard_tree(stack(metadata), mesh=mesh, rules=RULES)
        assert placed.up.kernel.partition_spec == P(None, "data", "model")
        assert placed.up.kernel.get_value().sharding == NamedSharding(mesh, P(None, "data", "model"))
        assert placed.norm.var.partition_spec == P(None, "data")
        if mesh != mesh_of("auto"):
            continue  # on Explicit axes the layers would have to say how their products lie
        run = nnx.jit(
            nnx.scan(
                lambda x, block: block(x),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
                transform_metadata=metadata,
            )
        )
        with jax.set_mesh(mesh):
            found = run(jnp.ones((8, 8)), placed)
        assert found.shape == (8, 8)
        assert placed.up.kernel.axis_names == ("layers" if metadata else None, "embed", "mlp")
        assert placed.up.kernel.partition_spec == P(None, "data", "model")


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
def test_a_stack_made_under_a_mesh_is_traced_so_it_only_carries_names(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        made = stack(LAYERS)
        placed = ar.shard_tree(made)
    assert names(made) == of_stack("layers")
    assert placed.up.kernel.partition_spec == P(None, "data", "model")


@pytest.mark.parametrize("again", [copy.deepcopy, nnx.clone, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_of_a_layer_go_on_following(again):
    source = linear(nnx.Rngs(0))
    made = again(source)
    assert made.kernel is not source.kernel
    assert type(made.kernel) is type(source.kernel)
    assert isinstance(made.kernel, nnx.Param)
    made.kernel.add_axis(1, "layers")
    assert made.kernel.axis_names == ("embed", "layers", "mlp")
    assert source.kernel.axis_names == ("embed", "mlp")
    assert nnx.graphdef(again(source)) == nnx.graphdef(source)


def test_layers_that_were_made_apart_are_stacked_by_hand():
    layers = [linear(nnx.Rngs(number)) for number in range(3)]
    graphdefs, states = zip(*map(nnx.split, layers), strict=True)
    assert len(set(graphdefs)) == 1
    made = nnx.merge(graphdefs[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))
    assert names(made) == {"bias": (None, "mlp"), "kernel": (None, "embed", "mlp")}
    assert made.kernel.axis_names == (None, "embed", "mlp")


def test_an_optimizer_made_with_the_stack_follows_it():
    optax = pytest.importorskip("optax")

    def make(rngs):
        block = linear(rngs)
        return block, nnx.Optimizer(block, optax.adam(1e-3), wrt=nnx.Param)

    _, optimizer = stack(LAYERS, make)
    found = {one.path: one.names for one in plan(optimizer, unnamed="replicate").placements}
    assert found["opt_state/0/mu/kernel"] == ("layers", "embed", "mlp")
    assert found["opt_state/0/nu/bias"] == ("layers", "mlp")


# Linen.


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        box = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        bias = nn.with_partitioning(nn.initializers.zeros, ("mlp",))
        return nn.Dense(8, kernel_init=box, bias_init=bias)(x), None


def test_boxes_of_linen_stacks_have_the_name_of_the_new_axis():
    params = {nn.PARTITION_NAME: "layers"}
    scanned = nn.scan(
        Dense, variable_axes={"params": 0}, split_rngs={"params": True}, length=3, metadata_params=params
    )
    mapped = nn.vmap(
        Dense, variable_axes={"params": 1}, split_rngs={"params": True}, axis_size=3, metadata_params=params,
        in_axes=None, out_axes=0,
    )  # fmt: skip
    made = {
        name: of().init(jax.random.key(0), jnp.ones((2, 8)))["params"]["Dense_0"]
        for name, of in {"scan": scanned, "vmap": mapped}.items()
    }
    assert names(made) == {
        "scan/bias": ("layers", "mlp"),
        "scan/kernel": ("layers", "embed", "mlp"),
        "vmap/bias": ("mlp", "layers"),
        "vmap/kernel": ("embed", "layers", "mlp"),
    }
    for mesh in map(mesh_of, reversed(AXIS_TYPES)):  # the last one of Auto axes, where layers compute
        placed = ar.shard_tree(made, mesh=mesh, rules=RULES)
        kernel = placed["scan"]["kernel"]
        assert isinstance(kernel, nn.LogicallyPartitioned)
        assert kernel.names == ("layers", "embed", "mlp")
        assert kernel.value.sharding == NamedSharding(mesh, P(None, "data", "model"))
        np.testing.assert_array_equal(kernel.value, made["scan"]["kernel"].value)
    unboxed = nn.unbox({"params": {"Dense_0": placed["scan"]}})
    assert scanned().apply(unboxed, jnp.ones((2, 8)))[0].shape == (2, 8)


def test_a_flat_stack_keeps_the_paths_of_its_state():
    state = nnx.to_flat_state(nnx.state(stack(LAYERS)))
    assert flatten(stack(LAYERS)).paths == ["/".join(map(str, path)) for path, _ in state]
