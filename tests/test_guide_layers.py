"""The layers of the guides, made by ``named`` on four devices, on Auto, Explicit and mixed meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import in_turn, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._layout import only_axes
from axisrules._trees import flatten

nnx = pytest.importorskip("flax.nnx")
named = pytest.importorskip("axisrules_flax").named


@pytest.fixture(params=["auto", "explicit", pytest.param("mixed", marks=pytest.mark.slow)])
def axis_types(request):
    """Where a test does not share the kinds out, as layers compile much."""
    return request.param


@pytest.fixture
def mesh(axis_types):
    return mesh_of(axis_types, "data=2,model=2", devices=jax.devices()[:4])


def call(layer, mesh, *inputs, spec):
    """The layer under jit, with the result laid out."""
    forward = lambda layer, *inputs: layer(*inputs)  # noqa: E731
    explicit = [
        a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    ]
    forward = jax.sharding.auto_axes(forward, out_sharding=only_axes(spec, explicit)) if explicit else forward
    return jax.jit(forward, out_shardings=NamedSharding(mesh, spec))(layer, *inputs)


def test_a_linear_layer_with_an_explicit_spec_and_its_output(mesh):
    with jax.set_mesh(mesh):
        layer = named(nnx.Linear, partition_spec=P(None, "model"))(8, 12, rngs=nnx.Rngs(0))
        x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("data", None)))
        y = call(layer, mesh, x, spec=P("data", "model"))
    assert layer.kernel.get_value().shape == (8, 12)
    assert layer.kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))
    assert layer.bias.get_value().sharding.spec == P("model")
    assert layer.kernel.partition_spec == P(None, "model")
    assert y.shape == (4, 12)
    assert y.sharding.spec == P("data", "model")
    whole = np.asarray(layer.kernel.get_value())
    np.testing.assert_allclose(y, np.ones((4, 8)) @ whole + np.asarray(layer.bias.get_value()), rtol=1e-5)


def test_on_an_explicit_mesh_the_layer_says_by_itself_where_its_output_lies():
    mesh = ar.make_mesh("data=2,model=2", axis_types="explicit", devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        layer = named(nnx.Linear, partition_spec=P(None, "model"))(8, 12, rngs=nnx.Rngs(0))
        x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("data", None)))
        y = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert y.sharding.spec == P("data", "model")


def test_names_and_rules_give_the_same_layout_and_stay_apart_from_it(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names({"input": None, "output": "model"}):
        layer = named(nnx.Linear, axis_names=("input", "output"))(8, 12, rngs=nnx.Rngs(1))
    assert layer.kernel.axis_names == ("input", "output")
    assert layer.kernel.partition_spec == layer.kernel.get_value().sharding.spec == P(None, "model")
    assert layer.bias.axis_names == ("output",)
    assert layer.bias.partition_spec == P("model")


def test_names_replace_the_whole_spec(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names({"output": "model"}):
        layer = named(nnx.Linear, ("input", "output"), P("data", None))(8, 12, rngs=nnx.Rngs(2))
    assert layer.kernel.partition_spec == P(None, "model")
    assert layer.bias.partition_spec == P("model")


def test_names_without_rules_are_whole_on_the_mesh(mesh):
    with jax.set_mesh(mesh):
        layer = named(nnx.Linear, ("input", "output"))(8, 12, rngs=nnx.Rngs(2))
    assert layer.kernel.get_value().sharding == NamedSharding(mesh, P(None, None))
    assert layer.kernel.partition_spec == P(None, None)
    assert layer.kernel.axis_names == ("input", "output")


def test_several_dimensions_of_input_and_output(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names({"output": "model"}):
        make = named(nnx.LinearGeneral, ("input_group", "input_feature", "output_group", "output"))
        layer = make((2, 4), (3, 4), axis=(-2, -1), rngs=nnx.Rngs(4))
        y = call(layer, mesh, jnp.ones((4, 2, 4)), spec=P("data", None, "model"))
    assert layer.kernel.get_value().shape == (2, 4, 3, 4)
    assert layer.kernel.partition_spec == P(None, None, None, "model")
    assert layer.bias.get_value().shape == (3, 4)
    assert layer.bias.axis_names == ("output_group", "output")
    assert layer.bias.partition_spec == P(None, "model")
    assert y.sharding.spec == P("data", None, "model")


def test_an_initializer_of_its_own_and_the_layer_agree(mesh):
    initialize = ar.with_logical_partitioning(jax.nn.initializers.normal(), axis_names=("input", "output"))
    make = named(nnx.Linear, ("input", "output"))
    with jax.set_mesh(mesh), ar.map_logical_axis_names({"output": "model"}):
        weight = initialize(nnx.Rngs(3).params(), (8, 12), jnp.float32)
        layer = make(8, 12, kernel_init=jax.nn.initializers.normal(), rngs=nnx.Rngs(3))
    assert weight.sharding == layer.kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))
    np.testing.assert_array_equal(weight, layer.kernel.get_value())


RULES = {"a": "data", "b": "model"}

# Layers, and the names of their arrays.
LAYERS = {
    "linear": (lambda r: named(nnx.Linear, "a b")(8, 12, rngs=r), {"kernel": "a b", "bias": "b"}),
    "linear without a bias": (
        lambda r: named(nnx.Linear, "a b")(8, 12, use_bias=False, rngs=r), {"kernel": "a b"},
    ),
    "linear general": (
        lambda r: named(nnx.LinearGeneral, "a g b")(8, (3, 4), rngs=r), {"kernel": "a g b", "bias": "g b"},
    ),
    "linear general with a batch": (
        lambda r: named(nnx.LinearGeneral, "g a b")(8, 4, batch_axis={0: 4}, rngs=r),
        {"kernel": "g a b", "bias": "a b"},
    ),
    "einsum": (
        lambda r: named(nnx.Einsum, "a g b")("bni,iho->bnho", (8, 2, 4), (2, 4), rngs=r),
        {"kernel": "a g b", "bias": "g b"},
    ),
    "convolution": (
        lambda r: named(nnx.Conv, "_ _ a b")(8, 4, (3, 3), rngs=r), {"kernel": "_ _ a b", "bias": "b"},
    ),
    "transposed convolution": (
        lambda r: named(nnx.ConvTranspose, "_ _ a b")(8, 4, (3, 3), rngs=r),
        {"kernel": "_ _ a b", "bias": "b"},
    ),
    "embedding": (
        lambda r: named(nnx.Embed, "b a")(16, 8, rngs=r), {"embedding": "b a"},
    ),
    "layer norm": (lambda r: named(nnx.LayerNorm, "a")(8, rngs=r), {"scale": "a", "bias": "a"}),
    "rms norm": (lambda r: named(nnx.RMSNorm, "a")(8, rngs=r), {"scale": "a"}),
    "group norm": (
        lambda r: named(nnx.GroupNorm, "a")(8, num_groups=2, rngs=r), {"scale": "a", "bias": "a"},
    ),
    "instance norm": (lambda r: named(nnx.InstanceNorm, "a")(8, rngs=r), {"scale": "a", "bias": "a"}),
    "batch norm": (
        lambda r: named(nnx.BatchNorm, "a")(8, use_running_average=True, rngs=r),
        {"scale": "a", "bias": "a", "mean": "a", "var": "a"},
    ),
    "low rank": (
        lambda r: named(nnx.LoRALinear, "a b")(8, 12, lora_rank=2, rngs=r), {"kernel": "a b", "bias": "b"},
    ),
    "parametric": (lambda r: named(nnx.PReLU, "")(),
                   {"negative_slope": ""}),
    "attention": (
        lambda r: named(nnx.MultiHeadAttention, "a b _")(2, 8, decode=False, rngs=r),
        {f"{part}/kernel": "a b _" for part in ("query", "key", "value", "out")}
        | {f"{part}/bias": "b _" for part in ("query", "key", "value")} | {"out/bias": "_"},
    ),
    "recurrent cell": (
        lambda r: named(nnx.LSTMCell, "a b")(8, 4, rngs=r),
        {f"{one}/kernel": "a b" for one in ("ii", "if_", "ig", "io", "hi", "hf", "hg", "ho")}
        | {f"{one}/bias": "b" for one in ("hi", "hf", "hg", "ho")},
    ),
}  # fmt: skip


def by_path(layer):
    state = nnx.to_flat_state(nnx.state(layer, nnx.Any(nnx.Param, nnx.BatchStat)))
    return {"/".join(map(str, path)): one for path, one in state if "lora_" not in path[-1]}


@pytest.mark.parametrize(("name", "axis_types"), in_turn(LAYERS))
def test_every_kind_of_layer_takes_names_and_has_the_values_that_it_had(mesh, name):
    make, given = LAYERS[name]
    split = {path: tuple(None if one == "_" else one for one in text.split()) for path, text in given.items()}
    plain = make(nnx.Rngs(0))
    assert {path: one.axis_names for path, one in by_path(plain).items()} == split
    assert {one.partition_spec for one in by_path(plain).values()} == {None}
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        layer = make(nnx.Rngs(0))
    placed = by_path(layer)
    assert {path: one.axis_names for path, one in placed.items()} == split
    for path, one in placed.items():
        spec = P(*[RULES.get(each) for each in split[path]])
        assert one.partition_spec == spec, path
        assert one.get_value().sharding == NamedSharding(mesh, spec), path
        np.testing.assert_allclose(one.get_value(), by_path(plain)[path].get_value(), rtol=1e-6, atol=1e-7)
    assert nnx.graphdef(layer) == nnx.graphdef(make(nnx.Rngs(0)))  # nothing of the mesh is left in it


def test_a_whole_layer_of_attention_runs_sharded_and_decodes(mesh):
    make = named(nnx.MultiHeadAttention, "embed heads kv")
    rules = {"embed": "data", "heads": "model"}
    plain = make(2, 8, decode=True, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh), ar.map_logical_axis_names(rules):
        layer = make(2, 8, decode=True, rngs=nnx.Rngs(0))
    for one in (plain, layer):
        one.init_cache((4, 6, 8))
    table = ar.NameTable(
        {
            "cached_*": "batch _ heads kv",
            "cache_index": (),
            "**/kernel": "embed heads kv",
            "**/bias": None,
            "rngs/**": (),
        },
        optional={"rngs/**"},
    )
    placed = ar.shard_tree(layer, table, mesh=mesh, rules=rules | {"batch": "data", "kv": None})
    assert placed.cached_key.get_value().sharding == NamedSharding(mesh, P("data", None, "model", None))
    assert isinstance(placed.cached_key, nnx.Cache)

    def step(layer, x):
        return layer(x)

    token = jnp.linspace(-1, 1, 32).reshape(4, 1, 8)
    if AxisType.Explicit in mesh.axis_types:
        return  # Flax writes the cache with an update that JAX does not take on Explicit axes
    with jax.set_mesh(mesh):
        found = nnx.jit(step)(placed, token)
    np.testing.assert_allclose(found, plain(token), rtol=1e-4, atol=1e-5)
    assert int(placed.cache_index.get_value()) == 1
    assert placed.cached_key.get_value().sharding.spec == P("data", None, "model")


@pytest.mark.parametrize(
    ("layer", "names", "args", "born"),
    [
        (nnx.Linear, "a b", (8, 12), {"kernel", "bias"}),
        (nnx.Conv, "_ _ a b", (8, 4, (3, 3)), {"kernel", "bias"}),
        (nnx.Embed, "b a", (16, 8), {"embedding"}),
        (nnx.Einsum, "a g b", ("bni,iho->bnho", (8, 2, 4), (2, 4)), {"kernel", "bias"}),
        (nnx.LayerNorm, "a", (8,), {"scale"}),
    ],
)
def test_arrays_are_made_on_their_shards_with_the_bits_of_a_jitted_initializer(
    mesh, layer, names, args, born
):
    made, seen = {}, set()
    normal = jax.nn.initializers.normal()

    def initializer(name):
        mark = object()  # its own, so that nothing was compiled before

        def init(key, shape, dtype):
            assert mark
            if isinstance(key, jax.core.Tracer):
                seen.add(name)
            else:
                made[name] = key
            return normal(key, shape, dtype)

        return init

    options = {
        f"{name}_init": initializer(name)
        for name in sorted(born | ({"bias"} if layer is nnx.LayerNorm else set()))
    }
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        found = named(layer, names)(*args, **options, rngs=nnx.Rngs(0))
    assert born <= seen
    plain = layer(
        *args, **{f"{name}_init": jax.jit(normal, static_argnums=(1, 2)) for name in born}, rngs=nnx.Rngs(0)
    )
    flat = flatten(found)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if path in born:
            np.testing.assert_array_equal(leaf, getattr(plain, path).get_value())


def test_a_short_spec_never_splits_what_is_smaller_than_the_kernel(mesh):
    with jax.set_mesh(mesh):
        layer = named(nnx.Linear, partition_spec=P("data"))(8, 3, rngs=nnx.Rngs(0))
        general = named(nnx.LinearGeneral, partition_spec=P("data", "model"))(
            (4, 4), 3, axis=(-2, -1), rngs=nnx.Rngs(0)
        )
    assert layer.kernel.partition_spec == P("data", None)
    assert layer.bias.partition_spec == P(None)
    assert general.kernel.partition_spec == P("data", "model", None)
    assert general.bias.partition_spec == P(None)


def test_what_does_not_divide_is_one_error_with_every_path(mesh):
    rules = ar.map_logical_axis_names({"in": "data", "out": "model"})
    with jax.set_mesh(mesh), rules, pytest.raises(ar.AxisRulesError) as caught:
        named(nnx.Linear, "in out")(7, 9, rngs=nnx.Rngs(0))
    failures = getattr(caught.value, "failures", [caught.value])
    assert {(one.dim, path) for one in failures for path in one.paths} == {
        (0, "kernel"),
        (1, "kernel"),
        (0, "bias"),
    }


def test_a_layer_keeps_the_initializers_that_it_was_given(mesh):
    carry = nnx.initializers.ones_init()
    warned = pytest.warns(UserWarning, match="carry_init is provided")
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES), warned:
        cell = named(nnx.LSTMCell, "a b")(8, 4, carry_init=carry, rngs=nnx.Rngs(0))
    assert cell.carry_init is carry


def test_an_initializer_with_metadata_keeps_it_and_the_names_of_the_layer_win(mesh):
    init = nnx.with_partitioning(nnx.initializers.normal(), ("x", "y"), note="mine")
    plain = named(nnx.Linear, "a b")(8, 12, kernel_init=init, rngs=nnx.Rngs(0))  # without a mesh
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        layer = named(nnx.Linear, "a b")(8, 12, kernel_init=init, rngs=nnx.Rngs(0))
    for one in (plain, layer):
        metadata = one.kernel.get_metadata()
        assert metadata.get("out_sharding", metadata.get("sharding_names")) == ("x", "y")
        assert one.kernel.get_metadata("note") == "mine"
        assert one.kernel.axis_names == ("a", "b")
    assert layer.kernel.partition_spec == P("data", "model")
    assert ar.plan(plain, mesh=mesh, rules=RULES).specs.kernel.get_value() == P("data", "model")
