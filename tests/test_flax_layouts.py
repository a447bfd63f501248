"""What variables show after every way of moving arrays, modules inside traces, and no forced meshes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AUTO_FIRST, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._trees import flatten

flax = pytest.importorskip("flax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
axisrules_flax = pytest.importorskip("axisrules_flax")
named = axisrules_flax.named

RULES = {"vocab": None, "embed": "data", "mlp": "model"}


def linear(rngs=None):
    return named(nnx.Linear, "embed mlp")(8, 32, rngs=rngs or nnx.Rngs(0))


VAR_DEFAULTS = pytest.mark.skipif(
    not hasattr(nnx, "var_defaults"), reason="this version of Flax has no such option"
)


def place(tree, mesh, **rules):
    return ar.shard_tree(tree, mesh=mesh, rules=RULES | rules, unnamed="replicate")


# `.partition_spec` is that of the array, whatever moved it.


def test_a_spec_is_shown_once_something_is_placed_and_follows_what_is_placed_by_hand(mesh, axis_types):
    layer = linear()
    assert layer.kernel.partition_spec is None
    layer.kernel.set_value(jax.device_put(layer.kernel.get_value(), NamedSharding(mesh, P("model"))))
    assert layer.kernel.partition_spec == P("model", None)
    other = mesh_of(axis_types, "x=8")
    layer.kernel.set_value(
        jax.device_put(np.asarray(layer.kernel.get_value()), NamedSharding(other, P(None, "x")))
    )
    assert layer.kernel.partition_spec == P(None, "x")
    layer.kernel.set_value(jax.device_put(layer.kernel.get_value(), jax.devices()[0]))
    assert layer.kernel.partition_spec is None
    assert layer.kernel.axis_names == ("embed", "mlp")


def test_a_spec_is_that_of_the_last_placing(mesh, axis_types):
    placed = place(linear(), mesh)
    again = place(placed, mesh_of(axis_types, "data=2,model=4"), embed="model", mlp=None)
    assert placed.kernel.partition_spec == P("data", "model")
    assert again.kernel.partition_spec == P("model", None)
    assert again.kernel.get_value().sharding.mesh.shape["model"] == 4


def test_states_copies_and_merged_modules_show_what_they_hold(mesh):
    placed = place(linear(), mesh)
    graphdef, state = nnx.split(placed)
    moved = jax.device_put(state, NamedSharding(mesh, P()))
    kernels = {
        "state": (state["kernel"], P("data", "model")),
        "clone": (nnx.clone(placed).kernel, P("data", "model")),
        "copy": (placed.kernel.copy(), P("data", "model")),
        "replaced": (placed.kernel.replace(jnp.ones((8, 32))), None),
        "merged": (nnx.merge(graphdef, moved).kernel, P(None, None)),
        "mapped": (jax.tree.map(lambda one: np.asarray(one), state)["kernel"], None),
        "shapes": (nnx.eval_shape(linear).kernel, None),
        "planned": (ar.plan(placed, mesh=mesh, rules=RULES).abstract.kernel, None),
    }
    assert {name: one.partition_spec for name, (one, _) in kernels.items()} == {
        name: spec for name, (_, spec) in kernels.items()
    }
    assert {one.axis_names for one, _ in kernels.values()} == {("embed", "mlp")}
    nnx.update(placed, moved)
    assert placed.kernel.partition_spec == P(None, None)


def test_inside_a_trace_nothing_is_claimed_and_afterwards_the_result_is_shown(mesh):
    seen = []
    placed = place(linear(), mesh)

    @nnx.jit
    def step(layer):
        seen.append(layer.kernel.partition_spec)
        layer.kernel.set_value(ar.constrain(layer.kernel.get_value() * 2, "mlp embed"))

    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        step(placed)
    assert seen == [None]
    assert placed.kernel.partition_spec == P("model", "data")
    assert placed.kernel.get_value().sharding.is_equivalent_to(NamedSharding(mesh, P("model", "data")), 2)


def test_a_layout_changes_no_structure(mesh):
    layer = linear()
    placed = place(layer, mesh)
    assert nnx.graphdef(layer) == nnx.graphdef(placed)
    both = jax.tree.map(lambda one, other: one - other, nnx.state(layer), nnx.state(placed))
    assert float(abs(both["kernel"].get_value()).max()) == 0.0


def test_an_optimizer_keeps_names_and_layouts_through_updates(mesh):
    optax = pytest.importorskip("optax")
    layer = linear()
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)  # without a word about hooks
    moments = ar.plan(optimizer, mesh=mesh, rules=RULES).specs.opt_state[0]
    assert moments.mu["kernel"].get_value() == moments.nu["kernel"].get_value() == P("data", "model")
    assert moments.mu["bias"].get_value() == P("model")
    placed = ar.shard_tree({"model": layer, "optimizer": optimizer}, mesh=mesh, rules=RULES)
    layer, optimizer = placed["model"], placed["optimizer"]
    before = np.asarray(layer.kernel.get_value())

    @nnx.jit
    def step(layer, optimizer, grads):
        optimizer.update(layer, grads)

    grads = jax.tree.map(jnp.ones_like, nnx.state(layer, nnx.Param))
    with jax.set_mesh(mesh):
        step(layer, optimizer, grads)
        optimizer.update(layer, grads)
    assert (np.asarray(layer.kernel.get_value()) != before).all()
    assert layer.kernel.partition_spec == P("data", "model")
    assert layer.bias.partition_spec == P("model")
    for moment in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        sharding = moment["kernel"].get_value().sharding
        assert sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
        assert moment["kernel"].axis_names == ("embed", "mlp")
    assert int(optimizer.step.get_value()) == 2


@VAR_DEFAULTS
def test_variables_with_references_show_what_they_hold(mesh):
    with nnx.var_defaults(ref=True):
        layer = linear()
    if not isinstance(layer.kernel.get_raw_value(), jax.Ref):
        pytest.skip("this version of Flax has no such option")
    placed = place(layer, mesh)
    assert placed.kernel.partition_spec == P("data", "model")
    assert placed.kernel.axis_names == ("embed", "mlp")


@VAR_DEFAULTS
def test_a_hijax_layer_has_names_and_claims_nothing(mesh):
    with nnx.var_defaults(hijax=True):
        layer = linear()
    assert ar.plan(layer, mesh=mesh, rules=RULES).specs.kernel.get_raw_value() == P("data", "model")
    assert layer.kernel.axis_names == ("embed", "mlp")
    assert layer.kernel.partition_spec is None


# Modules that are taken apart inside a trace and put together outside of it.


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = named(nnx.Embed, "vocab embed")(16, 8, rngs=rngs)
        self.head = self.embed  # tied
        self.up = named(nnx.Linear, "embed mlp")(8, 32, rngs=rngs)
        self.lora = nnx.LoRALinear(32, 8, lora_rank=2, rngs=rngs)
        self.norm = named(nnx.BatchNorm, "embed")(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([linear(rngs)])

    def __call__(self, tokens):
        x = self.norm(self.lora(jax.nn.relu(self.up(self.embed(tokens)))))
        return self.head.attend(self.drop(x))


def traced(make):
    """A tree as it was taken apart inside of the trace, and the values of its leaves from jit."""
    kept = []

    def leaves():
        kept.append(flatten(make()))
        return kept[-1].leaves

    shapes = [
        jax.typeof(one).shape for one in jax.make_jaxpr(leaves)().jaxpr.outvars and jax.eval_shape(leaves)
    ]
    return kept[0], jax.jit(leaves)(), shapes


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
def test_a_module_of_a_trace_is_rebuilt_outside_and_can_be_used_and_changed(mesh):
    flat, values, _ = traced(lambda: Net(nnx.Rngs(0)))
    assert all(isinstance(leaf, jax.core.Tracer) for leaf in flat.leaves)
    made = flat.rebuild(values)
    assert made.head is made.embed
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(made)))
    assert flatten(made).paths == flat.paths == flatten(Net(nnx.Rngs(0))).paths
    count = int(made.drop.rngs.count.get_value())
    first, second = made(jnp.arange(4)), made(jnp.arange(4))
    assert int(made.drop.rngs.count.get_value()) == count + 2
    assert not np.array_equal(first, second)
    assert float(made.norm.mean.get_value().sum()) != 0.0  # statistics were written
    made.up.kernel.set_value(jnp.zeros((8, 32)))
    made.up.kernel.set_metadata("note", "mine")
    made.extra = nnx.Param(jnp.ones(2))
    assert made.up.kernel.axis_names == ("embed", "mlp")
    placed = place(made, mesh)
    assert placed.up.kernel.partition_spec == P("data", "model")


def test_a_module_of_a_trace_equals_one_that_was_made_outside():
    flat, values, _ = traced(lambda: Net(nnx.Rngs(0)))
    made, plain = flat.rebuild(values), Net(nnx.Rngs(0))
    assert nnx.graphdef(made) == nnx.graphdef(plain)
    for (path, one), (_, other) in zip(
        nnx.to_flat_state(nnx.state(made)), nnx.to_flat_state(nnx.state(plain)), strict=True
    ):
        assert type(one) is type(other), path
        one, other = one.get_value(), other.get_value()
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=str(path))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.state(Net(nnx.Rngs(0))),
        lambda: nnx.Rngs(params=0, dropout=1),
        lambda: {"model": linear(), "step": jnp.zeros((), int), "rngs": nnx.Rngs(3)},
        lambda: nnx.Param(jnp.ones(3), axis_names="embed"),
        lambda: nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0)),
        lambda: (linear(), [linear(), None]),
        lambda: nnx.split(linear())[1],
        lambda: nnx.to_pure_dict(nnx.state(linear())),
    ],
)
def test_whatever_a_trace_returns_is_rebuilt(make):
    flat, values, _ = traced(make)
    made = flat.rebuild(values)
    assert flatten(made).paths == flat.paths
    assert type(made) is type(make())
    assert jax.tree.structure(made) == jax.tree.structure(make())


def test_an_optimizer_of_a_trace_is_rebuilt_and_updates():
    optax = pytest.importorskip("optax")

    def make():
        layer = linear()
        return {"layer": layer, "optimizer": nnx.Optimizer(layer, optax.adam(0.1), wrt=nnx.Param)}

    flat, values, _ = traced(make)
    assert "optimizer/opt_state/0/mu/kernel" in flat.paths
    made = flat.rebuild(values)
    layer, before = made["layer"], np.asarray(made["layer"].kernel.get_value())
    made["optimizer"].update(layer, jax.tree.map(jnp.ones_like, nnx.state(layer, nnx.Param)))
    assert (np.asarray(layer.kernel.get_value()) < before).all()
    assert int(made["optimizer"].step.get_value()) == 1


def test_a_stack_of_a_trace_has_the_names_of_its_axes():
    def make():
        stack = nnx.vmap(lambda rngs: linear(rngs), transform_metadata={nnx.PARTITION_NAME: "layers"})
        return nnx.split_rngs(splits=3)(stack)(nnx.Rngs(0))

    flat, values, _ = traced(make)
    assert dict(zip(flat.paths, flat.names, strict=True)) == {
        "bias": ("layers", "mlp"),
        "kernel": ("layers", "embed", "mlp"),
    }
    assert flat.rebuild(values).kernel.axis_names == ("layers", "embed", "mlp")


def test_boxes_of_a_trace_are_rebuilt():
    init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
    module = nn.Dense(32, kernel_init=init)
    flat, values, _ = traced(lambda: module.init(jax.random.key(0), jnp.ones((1, 8))))
    made = flat.rebuild(values)
    assert made["params"]["kernel"].names == ("embed", "mlp")
    assert nn.unbox(made)["params"]["kernel"].shape == (8, 32)


# What is shared stays shared, for a plan and after placing.


def test_tied_embeddings_are_one_placement_and_one_variable(mesh):
    source = Net(nnx.Rngs(0))
    plan = ar.plan(source, mesh=mesh, rules=RULES, unnamed="replicate")
    assert [one.path for one in plan.placements if "embedding" in one.path] == ["embed/embedding"]
    assert plan.specs.head is plan.specs.embed
    placed = place(source, mesh)
    assert placed.head is placed.embed
    assert placed.embed.embedding.partition_spec == P(None, "data")
    placed.head.embedding.set_value(jnp.zeros((16, 8)))
    assert float(abs(placed.embed.embedding.get_value()).sum()) == 0.0


def test_a_variable_that_is_shared_alone_stays_one(mesh):
    class Tied(nnx.Module):
        def __init__(self):
            self.one = linear()
            self.other = linear()
            self.other.kernel = self.one.kernel

    placed = place(Tied(), mesh)
    assert placed.other.kernel is placed.one.kernel
    assert placed.one.kernel.partition_spec == P("data", "model")


# Nothing asks for a mesh.


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
@pytest.mark.parametrize("eager", [True, False])
def test_an_annotation_asks_for_no_mesh(mesh, eager):
    init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))

    def make():
        return named(nnx.Linear, "embed mlp")(8, 32, kernel_init=init, rngs=nnx.Rngs(0))

    with nnx.use_eager_sharding(eager):
        layer = make()
        assert ar.plan(layer, mesh="data=4,model=2", rules=RULES).specs.kernel.get_value() == P(
            "data", "model"
        )
        placed = ar.shard_tree(layer, mesh=mesh, rules=RULES)
        flat, values, _ = traced(make)
        for one in (layer, placed, flat.rebuild(values), nnx.clone(placed), nnx.merge(*nnx.split(placed))):
            one.kernel.set_value(one.kernel.get_value() * 2)
            assert one(jnp.ones((1, 8))).shape == (1, 32)
    assert nnx.using_eager_sharding()


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])  # Flax refuses mixed axes itself
def test_variables_that_flax_would_lay_out_eagerly_are_rebuilt_without_a_mesh(mesh, axis_types):
    with jax.set_mesh(mesh):
        one = nnx.Param(jnp.ones((8, 32)), out_sharding=("data", "model"), eager_sharding=True)
    assert one.get_metadata("eager_sharding")
    table = ar.NameTable({"one": "embed mlp"})
    placed = ar.shard_tree(
        {"one": one}, table, mesh=mesh_of(axis_types, "x=8"), rules={"embed": "x", "mlp": None}
    )["one"]
    assert placed.get_value().sharding.spec == P("x", None)
    assert placed.get_metadata("out_sharding") == ("data", "model")
    assert ar.plan({"one": one}, table, mesh="x=8", rules={"embed": "x", "mlp": None}).specs[
        "one"
    ].get_value() == P("x", None)


def test_names_under_the_older_spellings_and_by_metadata_are_found():
    with nnx.use_eager_sharding(False):
        by_metadata = nnx.with_metadata(nnx.initializers.ones, axis_names=("embed", "mlp"))
        by_partitioning = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        made = {
            name: nnx.Linear(8, 32, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
            for name, init in {"metadata": by_metadata, "partitioning": by_partitioning}.items()
        }
        made["own"] = nnx.Param(jnp.ones((8, 32)), axis_names="embed mlp")
        for key in ("sharding", "sharding_names"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # as later versions of Flax call them
                made[key] = nnx.Param(jnp.ones((8, 32)), **{key: ("embed", "mlp")})
    plan = ar.plan(made, mesh="data=4,model=2", rules=RULES)
    assert {one.spec for one in plan.placements} == {P("data", "model")}
    assert len(plan.placements) == 5


def test_low_rank_layers_split_and_merge(mesh):
    layer = named(nnx.LoRALinear, "embed mlp")(8, 32, lora_rank=2, rngs=nnx.Rngs(0))
    table = {"lora": {"lora_a": "embed _", "lora_b": "_ mlp"}, "kernel": "embed mlp", "bias": "mlp"}
    placed = ar.shard_tree(layer, table, mesh=mesh, rules=RULES)
    graphdef, lora, rest = nnx.split(placed, nnx.LoRAParam, ...)
    assert set(lora["lora"]) == {"lora_a", "lora_b"}
    assert lora["lora"]["lora_b"].get_value().sharding == NamedSharding(mesh, P(None, "model"))
    assert nnx.merge(graphdef, lora, rest).kernel.partition_spec == P("data", "model")


# The rules of Flax.


def test_rules_of_flax_are_read_in_their_order():
    pairs = (("embed", ("data", "model")), ("mlp", "model"), ("embed", "data"), ("heads", None))
    scopes = {
        "linen": nn.logical_axis_rules,
        "nnx": getattr(nnx, "logical_axis_rules", nn.logical_axis_rules),
    }
    for scope in scopes.values():
        with scope(pairs):
            found = axisrules_flax.rules_from_flax()
            names = ("mlp", "embed")
            assert ar.logical_to_mesh_axes(names, found) == nn.logical_to_mesh_axes(names)
            assert ar.get_logical_axis_rules() == ar.Rules(())
        assert found == ar.Rules(pairs)
    assert axisrules_flax.rules_from_flax() == ar.Rules(())
    before = nn.get_logical_axis_rules()
    nn.set_logical_axis_rules([["embed", "data"]])
    try:
        assert axisrules_flax.rules_from_flax() == ar.Rules({"embed": "data"})
        assert ar.plan(linear(), mesh="data=4", rules=axisrules_flax.rules_from_flax(), unmapped="replicate")
    finally:
        nn.set_logical_axis_rules(before)


def test_malformed_rules_of_flax_are_an_error():
    with nn.logical_axis_rules((("embed", 3),)), pytest.raises(ar.RulesError):
        axisrules_flax.rules_from_flax()
