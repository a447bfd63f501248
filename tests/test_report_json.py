"""Plans as JSON: the identity, a stable form for committing, and texts that are no plan."""

import hashlib
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from strategies import meshes, policies, rules, trees

import axisrules as ar

DATA = Path(__file__).parent / "data"
MESH, RULES = "data=4,model=2", {"embed": "data", "mlp": "model"}


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def plan_of(tree, names, mesh=MESH, some_rules=RULES, **options):
    return ar.plan(tree, names, mesh=mesh, rules=some_rules, **options)


def by_path(plan):
    return {placement.path: placement for placement in plan.placements}


def assert_same(plan, again):
    assert by_path(again) == by_path(plan)
    assert again.mesh.shape_tuple == plan.mesh.shape_tuple
    assert again.mesh.axis_types == plan.mesh.axis_types
    assert (again.rules, again.memory_kind) == (plan.rules, plan.memory_kind)
    assert sorted(again.notes, key=repr) == sorted(plan.notes, key=repr)
    assert sorted(again.report, key=repr) == sorted(plan.report, key=repr)
    assert [again.explain(path) for path in by_path(plan)] == [plan.explain(path) for path in by_path(plan)]


@given(tree_and_names=trees(), some_rules=rules, mesh=meshes(), options=policies)
def test_a_plan_read_from_its_json_is_the_same_plan(tree_and_names, some_rules, mesh, options):
    plan = ar.plan(*tree_and_names, mesh=mesh, rules=some_rules, **options)
    text = plan.to_json()
    again = ar.Plan.from_json(text)
    assert_same(plan, again)
    assert again.to_json() == text
    assert not plan.diff(again)


TIED = zeros(8, 8)
ODD = {
    "a scalar": lambda: plan_of({"step": np.float32(3)}, {"step": ""}),
    "an empty tree": lambda: plan_of({}, {}),
    "an array alone": lambda: plan_of(zeros(8, 8), "embed mlp"),
    "tied arrays": lambda: plan_of({"in": TIED, "out": TIED}, {"in": "embed mlp", "out": "embed mlp"}),
    "what is no array": lambda: plan_of({"a": None, "f": print, "n": 3, "w": zeros(8)}, {"w": "embed"}),
    "lists and tuples": lambda: plan_of({"l": [zeros(8), (zeros(4),) * 11]}, lambda path, leaf: "embed"),
    "no names": lambda: plan_of({"w": zeros(8)}, ar.NameTable({"x": "embed"}), unnamed="replicate"),
    "names that are None": lambda: plan_of({"w": zeros(8)}, {"w": None}),
    "a spec": lambda: plan_of({"w": zeros(8, 8, 8)}, {"w": P(("data", "model"))}),
    "fill": lambda: plan_of({"w": zeros(8, 8)}, {"w": "_ mlp"}, fill="data", min_bytes=0),
    "patterns": lambda: plan_of({"w": zeros(8)}, ar.NameTable({"w": "embed", "*": "mlp", "no": "mlp"})),
    "memory": lambda: plan_of({"w": zeros(8)}, {"w": "embed"}, memory_kind="pinned_host"),
    "keys": lambda: plan_of({"rng": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))}, {"rng": "embed"}),
    "other keys": lambda: plan_of({"rng": jax.random.key(0, impl="rbg")}, {"rng": ""}),
    "small floats": lambda: plan_of(
        {name: jax.ShapeDtypeStruct((8,), name) for name in ("bfloat16", "float8_e4m3fn", "int4", "bool", "uint8")},
        lambda path, leaf: "embed",
    ),
    "axis types": lambda: plan_of(
        {"w": zeros(8)},
        {"w": "embed"},
        mesh=AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto)),
    ),
    "odd words": lambda: plan_of({"ü/'\"\n": {"\ud800": zeros(8)}}, lambda path, leaf: "naïve name"[:5]),
    "a prefix of another path": lambda: plan_of({"a": {"b": zeros(8)}, "a/b": {"c": zeros(8)}}, lambda p, x: "embed"),
    "one path twice": lambda: plan_of({"a": {"b": zeros(8)}, "a/b": zeros(4, 4)}, lambda p, x: "embed ..."),
    "skips of every kind": lambda: plan_of(
        {"w": zeros(6, 8, 1, 8), "v": zeros(8, 8)},
        {"w": "heads embed one other", "v": "embed mlp"},
        mesh="data=4,model=2,z=1",
        some_rules=[("heads", "data"), ("one", "model"), ("embed", "data"), ("mlp", ("data", "z")), ("mlp", "no")],
        indivisible="next",
        absent="drop",
        unmapped="replicate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore::axisrules.UnmappedAxisWarning")
def test_odd_plans_come_back_too(kind):
    plan = ODD[kind]()
    again = ar.Plan.from_json(plan.to_json())
    if kind == "one path twice":
        assert sorted(again.placements, key=repr) == sorted(plan.placements, key=repr)
        assert len(again.specs) == 2
        return
    assert_same(plan, again)
    assert again.to_json() == plan.to_json()
    assert len(jax.tree.leaves(again.shardings)) == len(plan.placements)


def test_the_tree_that_comes_back_is_nested_dicts_by_path():
    plan = plan_of({"b": [zeros(8), zeros(4)], "a": {"w": zeros(2, 2)}}, lambda path, leaf: "embed ..."
                   if path != "a/w" else "_ mlp")  # fmt: skip
    again = ar.Plan.from_json(plan.to_json())
    assert again.specs == {"a": {"w": P(None, "model")}, "b": {"0": P("data"), "1": P("data")}}
    assert again.abstract["b"]["0"].shape == (8,)
    paths = [one.path for one in again.placements]
    assert paths == ["a/w", "b/0", "b/1"]


def test_the_text_does_not_depend_on_the_order_of_the_tree_or_on_devices():
    tree = {"b": zeros(8, 8), "a": zeros(8)}
    names = {"b": "embed mlp", "a": "embed"}
    texts = {
        plan_of(tree, names).to_json(),
        plan_of(dict(reversed(tree.items())), dict(reversed(names.items()))).to_json(),
        plan_of(tree, names, mesh=ar.make_mesh("data=4,model=2")).to_json(),
    }
    assert len(texts) == 1
    other_mesh = plan_of(tree, names, mesh="model=2,data=4").to_json()
    assert other_mesh not in texts  # the order of the axes says which device holds what


def test_the_text_reads_as_designed():
    plan = plan_of({"b": {"0": zeros(8, 8), "1": zeros(8, 8)}, "a": zeros(3)}, lambda path, leaf: "mlp embed"
                   if "b" in path else "embed", indivisible="next")  # fmt: skip
    text = plan.to_json()
    assert (
        re.sub("sha256:[0-9a-f]{64}", "sha256:...", text)
        == """{
 "format": "axisrules.plan",
 "version": 1,
 "hash": "sha256:...",
 "mesh": [["data", 4], ["model", 2]],
 "axis_types": ["auto", "auto"],
 "memory_kind": null,
 "rules": [
  ["embed", "data"],
  ["mlp", "model"]
 ],
 "arrays": [
  {
   "shape": [3],
   "dtype": "float32",
   "names": ["embed"],
   "spec": [null],
   "why": [
    {"reason": "indivisible", "rule": 0, "skips": [{"rule": 0, "axes": ["data"], "reason": "indivisible"}]}
   ],
   "paths": [
    "a"
   ]
  },
  {
   "shape": [8, 8],
   "dtype": "float32",
   "names": ["mlp", "embed"],
   "spec": ["model", "data"],
   "why": [
    {"reason": "split", "rule": 1},
    {"reason": "split", "rule": 0}
   ],
   "paths": [
    "b/0",
    "b/1"
   ]
  }
 ],
 "tied": {},
 "notes": []
}
"""
    )


def test_the_hash_is_that_of_the_content():
    data = json.loads(plan_of({"a": zeros(8)}, {"a": "embed"}).to_json())
    stated = data.pop("hash")
    del data["format"], data["version"]
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert stated == f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def test_one_more_array_changes_few_lines_of_the_text():
    tree = {f"l{i}": {"up": zeros(8, 8), "down": zeros(8, 8)} for i in range(50)}

    def text(tree):
        return (
            plan_of(tree, lambda path, leaf: "embed mlp" if "up" in path else "mlp embed")
            .to_json()
            .split("\n")
        )

    before, after = text(tree), text({**tree, "l50": {"up": zeros(8, 8)}})
    assert len(set(after) - set(before)) == 2  # the path and the hash


# Texts that are no plan.

GOOD = plan_of({"a": zeros(8, 8), "b": zeros(8)}, {"a": "embed mlp", "b": "embed"}).to_json()


def changed(**parts):
    """The text with other parts, and the right hash for them."""
    data = {**json.loads(GOOD), **parts}
    content = {key: value for key, value in data.items() if key not in ("format", "version", "hash")}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**data, "hash": f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"})


def array(**parts):
    return changed(arrays=[{**json.loads(GOOD)["arrays"][0], **parts}])


BAD = {
    "": "the text of a plan does not parse as JSON: Expecting value: line 1 column 1",
    GOOD[:-20]: "does not parse as JSON: Expecting",
    "[" * 100_000: "does not parse as JSON",
    "[1]": 'no "format": "axisrules.plan"',
    '{"rules": []}': 'no "format": "axisrules.plan"',
    GOOD.replace(
        '"version": 1', '"version": 2'
    ): "has version 2 of the format, and this axisrules reads version 1",
    GOOD.replace('"embed"', '"embedding"', 1): "was changed: it does not have the hash that it states",
    GOOD.replace(' "tied": {},\n', ""): "lacks 'tied'",
    GOOD.replace('"tied": {}', '"tied": {}, "rule": 3'): "unknown part 'rule'; did you mean 'rules'?",
    changed(mesh=[["data", 4], ["data", 2]]): "malformed at mesh",
    changed(mesh=[["data", 0], ["model", 2]]): "malformed at mesh",
    changed(mesh=7): "malformed at mesh",
    changed(axis_types=["auto"]): "malformed at mesh",
    changed(axis_types=["auto", "odd"]): "malformed at mesh",
    changed(rules=[["embed"]]): "malformed at rules",
    changed(rules=[["embed", 3], ["mlp", "model"]]): "malformed at rules",
    changed(rules=[]): "malformed at arrays[0]",  # the reasons name rules
    changed(tied=[]): "malformed at tied",
    changed(notes=[{"pfad": "a"}]): "malformed at notes",
    changed(memory_kind=3): "malformed at memory_kind",
    changed(arrays=3): "malformed at arrays",
    changed(arrays=[3]): "malformed at arrays[0]",
    array(shape=[8]): "malformed at arrays[0]",
    array(shape=[8, -8]): "malformed at arrays[0]: ValueError: -8 is no size",
    array(shape=[8, 8.0]): "malformed at arrays[0]",
    array(shape=[6, 8]): "malformed at arrays[0]: dimension 0 (size 6) does not divide over data=4",
    array(spec=["data", "data"]): "malformed at arrays[0]",
    array(spec=["data", "modle"]): "is no mesh axis; did you mean 'model'?",
    array(spec=["data", 3]): "malformed at arrays[0]",
    array(names=["embed"]): "malformed at arrays[0]",
    array(names=["embed", 3]): "malformed at arrays[0]",
    array(dtype="float33"): "malformed at arrays[0]",
    array(dtype="key<new>"): "malformed at arrays[0]",
    array(dtype=None): "malformed at arrays[0]",
    array(why=[{"reason": "splitt"}] * 2): "'splitt' is no reason; did you mean 'split'?",
    array(why=[{"reason": "split", "rule": 9}] * 2): "9 is no number below 2",
    array(paths=[3]): "malformed at arrays[0]: TypeError: 3 is no text",
    array(paths=None): "malformed at arrays[0]",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_text_that_is_no_plan_is_one_clear_error(text):
    with pytest.raises(ar.PlanError) as caught:
        ar.Plan.from_json(text)
    assert BAD[text] in caught.value.headline
    assert caught.value.fix


def test_what_is_no_text_is_the_same_error():
    with pytest.raises(ar.PlanError, match="does not parse"):
        ar.Plan.from_json(None)


@pytest.mark.parametrize("name", ["llama-3-8b-gptq", "gpt2", "falcon-7b", "gpt-oss-20b"])
def test_plans_of_fused_and_quantised_checkpoints_come_back(name):
    tree = {}
    for row in json.loads((DATA / f"hf/{name}.json").read_text())["params"]:
        dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8", "I32": "int32"}[
            row["dtype"]
        ]
        path = row["path"].replace("{i}", "0").replace("{e}", "0")
        tree[path] = jax.ShapeDtypeStruct(row["shape"], dtype)
    table = ar.catalog.guess(tree).table
    plan = ar.plan(
        tree, table, mesh="data=64,model=8", rules=ar.presets.fsdp_tensor_parallel(), indivisible="next",
        unnamed="replicate",
    )  # fmt: skip
    assert_same(plan, ar.Plan.from_json(plan.to_json()))
    marks = {row.reason for row in plan.notes} & {"cuts_fused", "splits_heads"}
    assert marks <= {one.code for one in ar.report.lint(plan=plan)}
