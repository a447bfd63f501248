"""shard_map with names: the same as jax.shard_map with the specs that resolve gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar

RULES = ar.Rules({"batch": "data", "embed": "model", "feature": None})


def values(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def run(function, *args, mesh, how):
    with jax.set_mesh(mesh):
        return (jax.jit(function) if how == "jit" else function)(*args)


@pytest.mark.parametrize("how", ["jit", "eager"])
def test_inputs_are_laid_out_first_and_blocks_are_local(mesh, how):
    shapes = []

    @partial(ar.shard_map, in_names=("batch embed", "embed"), out_names="batch embed", rules=RULES)
    def scale(x, w):
        shapes.append((x.shape, w.shape))
        return x * w

    x, w = values(16, 8), values(8)
    for source in (x, jax.device_put(x, NamedSharding(mesh, P("model", None)))):
        result = run(scale, source, w, mesh=mesh, how=how)
        np.testing.assert_array_equal(np.asarray(result), x * w)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert set(shapes) == {((4, 4), (4,))}


@pytest.mark.parametrize("how", ["jit", "eager"])
def test_collectives_and_a_scalar_result(mesh, how):
    @partial(ar.shard_map, in_names="batch feature", out_names="", rules=RULES, mesh=mesh)
    def global_mean(block):
        assert block.shape == (2, 16)
        return jax.lax.pmean(block.mean(), axis_name="data")

    assert float(run(global_mean, values(8, 16), mesh=mesh, how=how)) == values(8, 16).mean()


@pytest.mark.parametrize("how", ["jit", "eager"])
def test_trees_in_and_out(mesh, how):
    @partial(
        ar.shard_map,
        in_names=({"x": "batch embed", "n": ()}, ar.NameTable({"*": "embed"})),
        out_names=("batch embed", {"sum": ("batch",)}),
        rules=RULES,
    )
    def work(data, weights):
        return data["x"] * weights["w"] + data["n"], {"sum": jax.lax.psum(data["x"].sum(1), "model")}

    x, w = values(16, 8), values(8)
    first, second = run(work, {"x": x, "n": np.float32(1)}, {"w": w}, mesh=mesh, how=how)
    np.testing.assert_array_equal(np.asarray(first), x * w + 1)
    np.testing.assert_array_equal(np.asarray(second["sum"]), x.sum(1))


def test_only_the_named_axes_are_manual(mesh):

    @partial(ar.shard_map, in_names="batch embed", out_names="batch embed", rules=RULES, axis_names={"data"})
    def double(block):
        assert block.shape == (4, 8)
        return ar.constrain(2 * block, "batch embed", rules=RULES)

    result = run(double, values(16, 8), mesh=mesh, how="jit")
    np.testing.assert_array_equal(np.asarray(result), 2 * values(16, 8))


def test_what_does_not_fit_is_in_one_error():
    mesh = ar.make_mesh("data=4,model=2")
    function = ar.shard_map(
        lambda x, w: x, in_names=("batch embed", "embed"), out_names="batch embed", rules=RULES
    )
    with jax.set_mesh(mesh):
        with pytest.raises(ar.PlanError) as caught:
            function(values(6, 8), values(8, 8))
        assert [(one.path, type(one)) for one in caught.value.failures] == [
            ("0", ar.DivisibilityError),
            ("1", ar.RankError),
        ]
        with pytest.raises(ar.NamesError, match="in_names has 2 entries for 1 arguments"):
            function(values(8, 8))
        wrong = ar.shard_map(lambda x: x, in_names="batch embed", out_names="batch", rules=RULES)
        with pytest.raises(ar.RankError, match="1 name for 2 dimensions"):
            wrong(values(8, 8))


@pytest.mark.parametrize(
    ("names", "rules", "shape", "options"),
    [
        ("batch embed", {"batch": "data", "embed": "model"}, (1, 8), {}),
        ("kv embed", {"kv": "model", "embed": "model"}, (1, 8), {}),
        ("batch embed", {"batch": "data", "embed": "model"}, (6, 8), {"indivisible": "next"}),
        ("batch", {"batch": ("data", "model")}, (12,), {"indivisible": "partial"}),
    ],
)
def test_results_are_laid_out_as_arguments_of_their_names_where_sizes_decide(
    names, rules, shape, options, mesh
):
    same = ar.shard_map(lambda x: x, in_names=names, out_names=names, rules=rules, **options)
    x = values(*shape)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(np.asarray(same(x)), x)


def test_a_name_without_a_rule_warns():
    function = ar.shard_map(
        lambda x: x, in_names="batch embd", out_names=P("data"), rules=ar.Rules(list(RULES)[:2])
    )
    with jax.set_mesh(ar.make_mesh("data=4,model=2")), pytest.warns(ar.UnmappedAxisWarning, match="'embd'"):
        function(values(8, 8))


def test_shard_maps_nest(mesh):
    inner = ar.shard_map(lambda x: x + 1, in_names="batch embed", out_names="batch embed", rules=RULES)
    outer = ar.shard_map(
        inner, in_names="batch embed", out_names="batch embed", rules=RULES, axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(np.asarray(jax.jit(outer)(values(8, 8))), values(8, 8) + 1)


def test_specs_of_results_are_checked():
    mesh = ar.make_mesh("data=4,model=2")
    for out in (P("dta"), "* embed"):
        function = ar.shard_map(lambda x: x, in_names="batch embed", out_names=out, rules=RULES)
        with jax.set_mesh(mesh), pytest.raises(ar.AxisRulesError):
            function(values(8, 8))


def test_mesh_and_rules_are_needed():
    function = ar.shard_map(lambda x: x, in_names="batch", out_names="batch")
    with pytest.raises(ar.NoMeshError):
        function(values(8))
    with jax.set_mesh(ar.make_mesh("data=8")), pytest.raises(ar.NoRulesError):
        function(values(8))


def test_gradients_go_through(mesh):
    square = ar.shard_map(lambda x: x**2, in_names="batch embed", out_names="batch embed", rules=RULES)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda x: square(x).sum()))(jnp.asarray(values(8, 8)))
    np.testing.assert_array_equal(np.asarray(gradient), 2 * values(8, 8))
