"""The examples of the public guides, in the terms of axisrules, on Auto, Explicit and mixed meshes.

Every block stands with the specs that its guide states; those with layers are in test_guide_layers.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import mesh_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules.presets import MeshRules, data_parallel_rules, fsdp_rules, partition_spec_for_names


@pytest.fixture
def four(axis_types):
    """The first guide's mesh: four devices, 2 x 2."""
    return mesh_of(axis_types, "data=2,model=2", devices=jax.devices()[:4])


# Sharding across devices.


def test_a_mesh_made_by_hand_works_as_well():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    placed = ar.shard_tree(np.ones((4, 8), np.float32), P("data", None), mesh=mesh, rules={})
    assert placed.sharding == NamedSharding(mesh, P("data", None))


def test_kernel_bias_input_and_output_of_the_complete_example(four):
    rules = {"input": None, "output": "model", "batch": "data"}
    with jax.set_mesh(four), ar.map_logical_axis_names(rules):
        kernel = ar.with_logical_partitioning(jax.nn.initializers.lecun_normal(), "input output")(
            jax.random.key(0), (8, 12)
        )
        bias = ar.with_logical_partitioning(jax.nn.initializers.zeros, "output")(jax.random.key(0), (12,))
        x = ar.shard_tree(np.ones((4, 8), np.float32), "batch input")
        y = jax.jit(lambda k, b, x: ar.constrain(x @ k + b, "batch output"))(kernel, bias, x)
    assert kernel.shape == (8, 12)
    assert kernel.sharding.spec == P(None, "model")
    assert bias.sharding.spec == P("model")
    assert x.sharding.spec == P("data", None)
    assert y.shape == (4, 12)
    assert y.sharding.spec == P("data", "model")


def test_names_take_precedence_over_an_explicit_spec(four):
    init = ar.with_logical_partitioning(jax.nn.initializers.normal(), ("input", "output"), P("data", None))
    with jax.set_mesh(four), ar.map_logical_axis_names({"output": "model"}):
        assert init(jax.random.key(2), (8, 12)).sharding.spec == P(None, "model")


def test_no_matching_rule_replicates(four):
    init = ar.with_logical_partitioning(jax.nn.initializers.normal(), ("input", "output"))
    with jax.set_mesh(four), ar.map_logical_axis_names({"other": "model"}):
        assert init(jax.random.key(2), (8, 12)).sharding.spec == P(None, None)


def test_preview_a_mapping():
    assert ar.logical_to_mesh_axes(
        ("batch", "feature"),
        rules=(("batch", "data"), ("feature", "model")),
    ) == P("data", "model")
    assert ar.logical_to_mesh_axes(
        ("input", "output"),
        rules=(("output", "model"), ("input", "model")),
    ) == P(None, "model")


def test_a_tuple_of_mesh_axes_needs_a_size_that_divides(four):
    rules = {"feature": ("data", "model")}
    assert ar.logical_to_mesh_axes(("feature",), rules) == P(("data", "model"))
    assert ar.resolve("feature", (8,), mesh=four, rules=rules).spec == P(("data", "model"))
    with pytest.raises(ar.DivisibilityError, match="data=2 \\* model=2 = 4"):
        ar.resolve("feature", (6,), mesh=four, rules=rules)


def test_nested_blocks_prepend_and_restore():
    with ar.map_logical_axis_names({"a": "data"}):
        with ar.map_logical_axis_names({"a": "model"}):
            assert ar.logical_to_mesh_axes(("a",)) == P("model")
        assert ar.logical_to_mesh_axes(("a",)) == P("data")
    assert ar.logical_to_mesh_axes(("a",)) == P(None)


def test_longer_lived_configuration():
    ar.set_logical_axis_rules((("a", "data"),))
    ar.map_logical_axis_names({"b": "model"})
    assert list(ar.get_logical_axis_rules()) == [("b", "model"), ("a", "data")]
    ar.set_logical_axis_rules({"c": None})
    assert list(ar.get_logical_axis_rules()) == [("c", None)]
    ar.set_logical_axis_rules(())


def test_a_wrapped_initializer(four):
    initialize = ar.with_logical_partitioning(jax.nn.initializers.normal(), axis_names=("input", "output"))
    with jax.set_mesh(four), ar.map_logical_axis_names({"output": "model"}):
        weight = initialize(jax.random.key(3), (8, 12), jnp.float32)
    assert weight.sharding.spec == P(None, "model")


def test_several_feature_dimensions_have_several_names(four):
    names = ("input_group", "input_feature", "output_group", "output")
    with jax.set_mesh(four), ar.map_logical_axis_names({"output": "model"}):
        init = ar.with_logical_partitioning(jax.nn.initializers.normal(), names)
        bias = ar.with_logical_partitioning(jax.nn.initializers.zeros, names[-2:])
        assert init(jax.random.key(4), (2, 4, 3, 4)).sharding.spec == P(None, None, None, "model")
        assert bias(jax.random.key(4), (3, 4)).sharding.spec == P(None, "model")


# Models and batches that exceed one accelerator.


def test_rows_over_data_columns_over_model(mesh):
    rules = {"batch": "data", "out": "model", "in": None}
    x = ar.shard_tree(np.ones((16, 8), np.float32), "batch in", mesh=mesh, rules=rules)
    w = ar.shard_tree(np.ones((8, 4), np.float32), "in out", mesh=mesh, rules=rules)

    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    with jax.set_mesh(mesh):
        y = layer(x, w)
    assert x.sharding.spec == P("data", None)
    assert w.sharding.spec == P(None, "model")
    assert y.shape == (16, 4)
    assert y.sharding.spec == P("data", "model")
    assert (len(y.addressable_shards), y.addressable_shards[0].data.shape) == (8, (4, 2))


# Sharding, with eight devices that do not exist.


def test_one_tile_per_device(mesh):
    x = ar.shard_tree(np.ones((8, 16)), "a b", mesh=mesh, rules={"a": "data", "b": "model"}, dtype="float32")
    assert x.sharding.spec == P("data", "model")
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 8)}


def test_global_mean_by_shard_map(mesh):
    @partial(ar.shard_map, mesh=mesh, in_names="rows _", out_names="", rules={"rows": "data"})
    def global_mean(block):  # this device's (2, 16) slice
        assert block.shape == (2, 16)
        return jax.lax.pmean(block.mean(), axis_name="data")

    with jax.set_mesh(mesh):
        assert float(global_mean(np.arange(128, dtype=np.float32).reshape(8, 16))) == 63.5


# Named-axis sharding rules.


def test_the_module_example_of_mesh_rules():
    rules = fsdp_rules(data_axis="data", model_axis="model")
    assert partition_spec_for_names(rules, "data", "embed") == P("data", "model")


def test_factories_of_mesh_rules():
    assert data_parallel_rules() == MeshRules(data="data")
    assert fsdp_rules() == MeshRules(data="data", embed="model", mlp="model", heads="model")
    assert partition_spec_for_names(data_parallel_rules("batch"), "data", "embed") == P("batch", None)
    assert partition_spec_for_names(MeshRules(), "data", "embed", "mlp") == P(None, None, None)


def test_a_sharding_from_a_mesh_and_axis_names(mesh):
    assert ar.create_named_sharding(mesh, "data", None) == NamedSharding(mesh, P("data", None))
    assert ar.create_named_sharding(mesh) == NamedSharding(mesh, P())
    assert ar.create_named_sharding(mesh, ("data", "model")) == NamedSharding(mesh, P(("data", "model")))


def test_where_the_system_before_was_wrong_axisrules_is_right():
    assert partition_spec_for_names(fsdp_rules(), "embed", "mlp") == P("model", None)
    assert partition_spec_for_names(fsdp_rules(), "data", None, "heads") == P("data", None, "model")
    with pytest.raises(ar.UnknownNameError, match="did you mean 'embed'"):
        partition_spec_for_names(fsdp_rules(), "embd")
