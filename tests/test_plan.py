"""Plans: forms of names, coverage in both directions, ties, dtypes, reports, limits."""

import dataclasses
import json
import math
from collections import OrderedDict, namedtuple
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_reports import nest

import axisrules as ar

MESH, RULES = "data=4,model=2", {"embed": "data", "mlp": "model"}
plan = partial(ar.plan, mesh=MESH, rules=RULES)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object
    activation: object = dataclasses.field(default=jax.nn.relu, metadata={"static": True})


Pair = namedtuple("Pair", "first second")


@jax.tree_util.register_pytree_node_class
class Custom:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


TREE = {
    "layer": Layer(zeros(8, 4), zeros(4)),
    "pair": Pair(zeros(8, 2), (zeros(4, 8), [zeros(2)])),
    "custom": Custom(zeros(8), {"x": zeros(8, 2)}),
    "ordered": OrderedDict(b=zeros(8), a=zeros(4, 4)),
}
NAMES = {
    "layer": Layer("embed mlp", ("mlp",)),
    "pair": Pair(("embed", "mlp"), ("mlp embed", [None])),
    "custom": Custom("embed", {"x": ("embed", None)}),
    "ordered": OrderedDict(b="embed", a=P("model", None)),
}
SPECS = {
    "custom/0": P("data"),
    "custom/1/x": P("data", None),
    "layer/kernel": P("data", "model"),
    "layer/bias": P("model"),
    "ordered/b": P("data"),
    "ordered/a": P("model", None),
    "pair/first": P("data", "model"),
    "pair/second/0": P("model", "data"),
    "pair/second/1/0": P(None),
}


def specs(made):
    return {placement.path: placement.spec for placement in made.placements}


def test_any_pytree_has_paths_and_a_plan():
    assert specs(plan(TREE, NAMES)) == SPECS


def test_trees_of_the_plan_are_shaped_like_the_input():
    made = plan(TREE, NAMES)
    assert jax.tree.structure(made.specs) == jax.tree.structure(TREE)
    assert made.specs["layer"].kernel == P("data", "model")
    assert made.shardings["pair"].first == NamedSharding(made.mesh, P("data", "model"))
    assert made.abstract["custom"].parts[0].sharding.spec == P("data")
    assert made.abstract["layer"].kernel.shape == (8, 4)


def test_names_may_stand_in_other_containers_with_the_same_paths():
    names = {
        "layer": {"kernel": "embed mlp", "bias": "mlp"},
        "pair": {"first": "embed mlp", "second": [("mlp", "embed"), (None,)]},
        "custom": ["embed", {"x": "embed _"}],
        "ordered": {"a": P("model", None), "b": "embed"},
    }
    assert specs(plan(TREE, names)) == SPECS


def test_names_may_be_a_table():
    table = ar.NameTable({"**/kernel": "embed mlp", "layer/bias": "mlp", "custom/0": "embed", "**": "..."})
    found = specs(plan(TREE, table))
    assert found["layer/kernel"] == P("data", "model")
    assert found["layer/bias"] == P("model")
    assert found["custom/0"] == P("data")
    assert found["ordered/a"] == P(None, None)


def test_names_may_be_a_callable_of_path_and_leaf():
    seen = {}

    def names(path, leaf):
        seen[path] = leaf.shape
        return ("embed", *[None] * (leaf.ndim - 1)) if leaf.shape[0] == 8 else None

    found = specs(plan(TREE, names))
    assert set(seen) == set(SPECS)
    assert found["ordered/b"] == P("data")
    assert found["layer/bias"] == P(None)


def test_a_tree_without_metadata_needs_names():
    with pytest.raises(ar.MissingNamesError) as caught:
        plan(TREE)
    assert set(caught.value.paths) == set(SPECS)


def test_a_single_array_is_a_tree():
    assert plan(zeros(8, 4), "embed mlp").specs == P("data", "model")
    assert plan(zeros(8, 4), ("embed", "mlp")).placements[0].path == ""


def test_flat_checkpoint_keys_match_patterns_by_segment():
    tree = {"model.layers.0.mlp.up.weight": zeros(4, 8), "model.layers.1.mlp.up.weight": zeros(4, 8)}
    made = plan(tree, ar.NameTable({"model.layers.*.mlp.up.weight": "mlp embed"}))
    assert set(specs(made).values()) == {P("model", "data")}


def test_keys_with_slashes_match_path_by_path():
    tree, names = {"a/b": {"w": zeros(8)}, "a/c": {"w": zeros(8)}}, {"a/b": {"w": "embed"}}
    with pytest.raises(ar.MissingNamesError) as caught:
        plan(tree, names)
    assert caught.value.paths == ("a/c/w",)


# Coverage in both directions.


def test_missing_and_extra_entries_are_named_in_one_error():
    tree = {"a": {"w": zeros(8), "v": zeros(8)}, "b": zeros(8)}
    names = {"a": {"w": "embed", "x": ("embed",)}, "c": {"d": "embed", "e": ["mlp"]}}
    with pytest.raises(ar.PlanError) as caught:
        plan(tree, names)
    extra, missing = caught.value.failures
    assert type(extra) is ar.ExtraNamesError
    assert set(extra.paths) == {"a/x", "c/d", "c/e"}
    assert type(missing) is ar.MissingNamesError
    assert missing.paths == ("a/v", "b")


def test_a_prefix_does_not_stand_for_what_is_below():
    with pytest.raises(ar.PlanError) as caught:
        plan({"a": {"w": zeros(8)}}, {"a": "embed"})
    assert [type(failure) for failure in caught.value.failures] == [ar.ExtraNamesError, ar.MissingNamesError]
    assert "names stand where the tree has a node" in str(caught.value)


def test_none_in_the_tree_may_have_names_or_none():
    for entry in (None, "embed", ("embed",)):
        assert specs(plan({"w": zeros(8), "bias": None}, {"w": "embed", "bias": entry})) == {"w": P("data")}


def test_empty_containers_may_be_of_another_kind():
    tree, names = [{"w": zeros(8)}, (), {}, [[]]], ({"w": "embed"}, (), [], [()])
    assert specs(plan(tree, names)) == {"0/w": P("data")}
    with pytest.raises(ar.ExtraNamesError):
        plan([zeros(8), ()], ("embed", ("mlp",)))


class Opaque:
    """No pytree."""


def test_names_for_an_object_that_jax_takes_for_a_leaf_are_refused():
    with pytest.raises(ar.LeafError, match="names are given for a Opaque") as caught:
        plan({"l": Opaque(), "w": zeros(8)}, {"l": {"w": "embed mlp"}, "w": "embed"})
    assert caught.value.path == "l"
    assert specs(plan({"l": Opaque(), "w": zeros(8)}, {"l": None, "w": "embed"})) == {"w": P("data")}


def test_a_tied_leaf_without_an_entry_has_the_names_of_its_twin():
    shared = zeros(8, 4)
    for names in ({"a": "embed mlp"}, {"b": "embed mlp"}):
        assert set(specs(plan({"a": shared, "b": shared}, names)).values()) == {P("data", "model")}


def test_a_callable_is_asked_for_arrays_alone():
    found = plan({"w": zeros(8), "s": "text", "f": len}, lambda path, leaf: "embed" if leaf.ndim else None)
    assert specs(found) == {"w": P("data")}


def test_unnamed_replicate_accepts_missing_entries_and_reports_them():
    made = plan({"a": zeros(8), "b": zeros(8, 2)}, {"a": "embed"}, unnamed="replicate")
    assert specs(made)["b"] == P(None, None)
    assert ar.ReportRow("b", reason="names_missing", bytes=64) in made.report
    with pytest.raises(ar.PolicyError, match="unnamed='replicat'"):
        plan({"a": zeros(8)}, {"a": "embed"}, unnamed="replicat")


def test_scalars_need_no_names():
    made = plan({"step": np.int32(3), "t": np.zeros(()), "w": zeros(8)}, {"w": "embed"}, dtype="float32")
    assert specs(made) == {"step": P(), "t": P(), "w": P("data")}


@pytest.mark.usefixtures("narrow")
def test_everything_that_fails_is_in_one_error():
    tree = {"a": zeros(6), "b": zeros(8, 8), "c": zeros(8, dtype=np.float64), "d": zeros(8), "e": zeros(8, 8)}
    names = {"a": "embed", "b": "embed", "c": "embed", "d": ("embed", 3), "e": ("mlp", "mlp")}
    with pytest.raises(ar.PlanError) as caught:
        plan(tree, names)
    assert {path: type(one) for one in caught.value.failures for path in one.paths} == {
        "a": ar.DivisibilityError,
        "b": ar.RankError,
        "c": ar.LeafError,
        "d": ar.NamesError,
        "e": ar.RepeatedNameError,
    }


def test_overlapping_and_unused_patterns_are_reported_unless_optional():
    table = ar.NameTable({"a": "embed", "*": "mlp", "gone": "embed", "maybe": "embed"}, optional=["maybe"])
    report = plan({"a": zeros(8), "b": zeros(8)}, table).report
    assert ar.ReportRow("a", name="a | *", reason="pattern_overlap") in report
    assert [row.name for row in report if row.reason == "unused_pattern"] == ["gone"]


def test_skipped_rules_and_unused_rules_are_reported():
    rules = [("embed", "data"), ("mlp", "data"), ("spare", "model")]
    report = plan({"w": zeros(8, 8)}, {"w": "embed mlp"}, rules=rules).report
    assert report == (
        ar.ReportRow("w", 1, "mlp", "axis_taken", 1, "data", 0, 256),
        ar.ReportRow("", None, "spare", "unused_rule", 2),
    )


# Leaves.


def test_what_is_no_array_passes_through():
    leaves = {
        "t": np.float32,
        "o": Opaque(),
        "f": jax.nn.relu,
        "s": "text",
        "n": None,
        "i": 3,
        "x": 2.5,
        "b": True,
        "c": 1j,
        "p": P("data"),
    }
    made = plan(leaves | {"w": zeros(8)}, {"w": "embed"}, unnamed="error")
    assert len(made.placements) == 1
    assert made.specs == leaves | {"w": P("data")}


def test_prng_keys_are_arrays_of_keys():
    made = plan({"keys": jax.random.split(jax.random.key(0), 8), "one": jax.random.key(1)}, {"keys": "embed"})
    assert specs(made) == {"keys": P("data"), "one": P()}
    assert made.bytes_per_device == 2 * 8 + 8


@pytest.mark.usefixtures("narrow")
def test_abstract_leaves_are_planned_without_values():
    tree = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), "i": jax.ShapeDtypeStruct((8,), np.int64)}
    made = plan(tree, {"w": "embed mlp", "i": None})
    assert made.bytes_per_device == 2 * 2 * 2 + 8 * 4
    assert made.abstract["i"].dtype == np.int32


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("source", "held"),
    [
        (np.array([1, -(2**31)]), np.int32),
        (np.array([2**32 - 1], np.uint64), np.uint32),
        (np.array([], np.int64), np.int32),
        (np.zeros(2, ">f4"), np.float32),
        (np.zeros(2, ml_dtypes.bfloat16), ml_dtypes.bfloat16),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), ml_dtypes.float8_e4m3fn),
        (np.zeros(2, ml_dtypes.int4), ml_dtypes.int4),
        (np.zeros(2, np.complex64), np.complex64),
        (np.zeros(2, bool), np.bool_),
    ],
)
def test_the_planned_dtype_is_what_jax_will_hold(source, held):
    assert plan({"a": source}, {"a": None}).placements[0].dtype == held


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    "source",
    [
        np.array([2**31]),
        np.array([-1 - 2**31]),
        np.array([2**32], np.uint64),
        np.zeros(2),
        np.zeros(2, np.complex128),
        np.zeros(2, np.longdouble),
        np.array(["a"]),
        np.array([None]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array(np.zeros(2, np.float32), [True, False]),
        jax.ShapeDtypeStruct((2,), np.float64),
    ],
)
def test_what_jax_cannot_hold_is_an_error_with_its_path(source):
    with pytest.raises(ar.LeafError) as caught:
        plan({"a": {"b": source}}, {"a": {"b": None}})
    assert caught.value.path == "a/b"


@pytest.mark.usefixtures("narrow")
def test_dtype_casts_floating_point_arrays_alone():
    tree = {"d": zeros(2, dtype=np.float64), "h": zeros(2, dtype=np.float16), "i": np.zeros(2, np.int8)}
    tree["c"] = zeros(2, dtype=np.complex128)
    made = plan(tree, dict.fromkeys(tree), dtype="bfloat16")
    assert {p.path: str(p.dtype) for p in made.placements} == {
        "c": "complex64",
        "d": "bfloat16",
        "h": "bfloat16",
        "i": "int8",
    }
    for wrong in ("int32", "float65", np.float64):
        with pytest.raises(ar.PolicyError):
            plan(tree, dict.fromkeys(tree), dtype=wrong)


def test_with_x64_on_64_bit_arrays_stay_as_they_are():
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable(True):
        made = plan({"a": np.array([2**40]), "b": np.zeros(2)}, {"a": None, "b": None})
    assert [str(p.dtype) for p in made.placements] == ["int64", "float64"]


# Ties.


def test_a_tied_array_is_placed_and_counted_once():
    shared = zeros(8, 4)
    made = plan(
        {"a": shared, "b": {"c": shared}, "d": zeros(8, 4)},
        {"a": "embed _", "b": {"c": "embed _"}, "d": None},
    )
    assert [p.tied_to for p in made.placements] == [None, "a", None]
    assert made.nbytes == 2 * 128
    assert made.bytes_per_device == 32 + 128
    assert "tied to a" in made.explain("b/c")


def test_equal_descriptions_and_numpy_scalars_are_not_tied():
    same = jax.ShapeDtypeStruct((8,), np.float32)
    made = plan({"a": same, "b": same, "c": np.True_, "d": np.True_}, {"a": "embed", "b": None})
    assert [p.tied_to for p in made.placements] == [None] * 4


# A spec as the layout itself.


@pytest.mark.parametrize(
    "given", [P("data", "model"), P("data"), P(None, ("data", "model")), P(), P(("model",), None)]
)
def test_a_spec_is_the_layout_itself_written_in_full(given):
    (placement,) = plan({"w": zeros(8, 16)}, {"w": given}).placements
    assert len(placement.spec) == 2
    mesh = ar.make_mesh(MESH)
    assert NamedSharding(mesh, given).is_equivalent_to(NamedSharding(mesh, placement.spec), 2)


def test_a_spec_and_a_tuple_of_names_that_read_alike_are_told_apart():
    tree = {"names": zeros(8), "spec": zeros(8)}
    found = ar.plan(tree, {"names": ("data",), "spec": P("data")}, mesh=MESH, rules={"data": "model"})
    assert specs(found) == {"names": P("model"), "spec": P("data")}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (P("dta"), "names 'dta', which is no mesh axis; did you mean 'data'?"),
        (P("data", "data"), "uses mesh axis 'data' twice"),
        (P(None, None, "data"), "has 3 entries for 2 dimensions"),
        (P(None, "data"), "dimension 1 (size 6) does not divide over data=4"),
        (P(P.UNCONSTRAINED), "leaves dimension 0 unconstrained, which is no layout"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_with_its_path(given, problem):
    with pytest.raises(ar.SpecError) as caught:
        plan({"w": zeros(8, 6)}, {"w": given})
    assert problem in str(caught.value)
    assert caught.value.path == "w"


# fill.


def test_fill_splits_large_arrays_over_a_free_axis():
    tree = {"big": zeros(512, 1024), "small": zeros(8, 8), "own": zeros(512, 1024)}
    made = plan(tree, {"big": "_ mlp", "small": None, "own": P()}, fill="data")
    assert specs(made) == {"big": P("data", "model"), "small": P(None, None), "own": P(None, None)}
    assert "split over data=4 by fill" in made.explain("big")
    lower = plan(tree, {"big": "_ mlp", "small": None, "own": P()}, fill="data", min_bytes=0)
    assert specs(lower)["small"] == P("data", None)


def test_fill_alone_is_automatic_fsdp():
    made = plan(
        {"a": zeros(512, 1024), "b": zeros(1024, 513)}, None, fill=("data", "model"), unnamed="replicate"
    )
    assert specs(made) == {"a": P(None, ("data", "model")), "b": P(("data", "model"), None)}


def test_fill_with_an_axis_that_the_mesh_lacks_is_an_error():
    with pytest.raises(ar.AbsentAxisError, match="fill='dta' is no axis of the mesh; did you mean 'data'?"):
        plan({"a": zeros(8)}, {"a": None}, fill="dta")


# Meshes, memory, limits.


@pytest.mark.parametrize(
    "mesh",
    [
        "data=4,model=2",
        {"data": 4, "model": 2},
        AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
    ],
)
def test_planning_needs_no_device(mesh):
    made = ar.plan({"w": zeros(8, 4)}, {"w": "embed mlp"}, mesh=mesh, rules=RULES)
    assert isinstance(made.mesh, AbstractMesh)
    assert made.shardings["w"].shard_shape((8, 4)) == (2, 2)


def test_a_concrete_mesh_and_its_axis_types_are_kept():
    mesh = ar.make_mesh(MESH, axis_types={"data": "explicit"})
    made = ar.plan({"w": zeros(8, 4)}, {"w": "embed mlp"}, mesh=mesh, rules=RULES)
    assert made.shardings["w"] == NamedSharding(mesh, P("data", "model"))


def test_memory_kinds_are_part_of_the_shardings():
    mesh = ar.make_mesh(MESH)
    made = ar.plan({"w": zeros(8, 4)}, {"w": "embed mlp"}, mesh=mesh, rules=RULES, memory_kind="pinned_host")
    assert made.shardings["w"].memory_kind == "pinned_host"
    with pytest.raises(ar.PolicyError, match="no memory 'pined_host'; did you mean 'pinned_host'?"):
        ar.plan({"w": zeros(8, 4)}, {"w": None}, mesh=mesh, rules=RULES, memory_kind="pined_host")


def test_limits_raise_with_the_offenders_largest_first():
    made = plan({"a": zeros(8, 8), "b": zeros(64), "c": zeros(8)}, {"a": "embed mlp", "b": None, "c": None})
    made.check(max_bytes_per_device=1000, max_replicated=0.6, max_waste=8)
    with pytest.raises(ar.LayoutError) as caught:
        made.check(max_bytes_per_device=100, max_replicated=0.1, max_waste=2)
    assert [one.limit for one in caught.value.failures] == [
        "max_bytes_per_device",
        "max_replicated",
        "max_waste",
    ]
    assert caught.value.failures[1].paths == ("b", "c")


def test_nothing_is_wasted_on_one_device():
    made = plan({"a": zeros(8)}, {"a": None}, mesh="data=1")
    made.check(max_replicated=0, max_waste=1)


def test_an_empty_tree_has_an_empty_plan():
    made = plan({}, {})
    assert (made.placements, made.bytes_per_device, made.specs) == ((), 0, {})
    made.check(max_bytes_per_device=0, max_replicated=0, max_waste=1)


def test_a_plan_explains_its_leaves_and_knows_near_paths():
    made = plan({"ffn": {"up": zeros(8, 4)}}, {"ffn": {"up": "embed mlp"}})
    assert made.explain("ffn/up").splitlines()[0] == "ffn/up: float32 (8, 4), 128 bytes, 16 bytes per device"
    assert str(made) == "plan of 1 arrays on data=4, model=2: 128 bytes, 16 bytes per device"
    with pytest.raises(ar.AxisRulesError, match="did you mean 'ffn/up'?"):
        made.explain("fn/up")


def test_a_plan_holds_no_array():
    import gc
    import weakref

    source = zeros(8, 4).view()
    gone = weakref.ref(source)
    made = plan({"w": source}, {"w": "embed mlp"})
    del source
    gc.collect()
    assert gone() is None
    assert made.placements[0].shape == (8, 4)


# Real models.

MODELS = sorted((Path(__file__).parent / "data/models").glob("*.json"))


def model_tree(path):
    params = json.loads(path.read_text())["params"]
    shapes, names = {}, {}
    for param in params:
        for i in range(param["repeat"]):
            at = param["path"].replace("{i}", str(i))
            shapes[at] = jax.ShapeDtypeStruct(tuple(param["shape"]), np.float32)
            names[at] = tuple(param["names"])
    return shapes, names


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_every_known_model_is_planned_alike_from_a_tree_and_from_a_table(path):
    shapes, names = model_tree(path)
    words = sorted({name for some in names.values() for name in some if name})
    rules = [(word, ("data", "model")) for word in words] + [(word, "model") for word in words]
    options = {"mesh": "data=16,model=16", "rules": rules, "indivisible": "next"}
    from_tree = ar.plan(nest(shapes), nest(names), **options)
    patterns = {p["path"].replace("{i}", "*"): p["names"] for p in json.loads(path.read_text())["params"]}
    from_table = ar.plan(nest(shapes), ar.NameTable(patterns), **options)
    assert specs(from_tree) == specs(from_table)
    assert from_tree.nbytes == 4 * json.loads(path.read_text())["total_params"]
    assert from_tree.bytes_per_device == sum(math.prod(p.shard_shape) * 4 for p in from_tree.placements)
