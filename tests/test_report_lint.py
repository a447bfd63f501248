"""Findings about rules: by themselves, on a mesh, in a plan, and over what is published."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from strategies import arrays, meshes, policies, rules, trees

import axisrules as ar
from axisrules.report import lint
from axisrules.report._findings import CODES, SEVERITIES

DATA = Path(__file__).parent / "data"
PUBLISHED = Path(__file__).parents[2] / "shared" / "rulesets.json"
SETS = json.loads(PUBLISHED.read_text()) if PUBLISHED.exists() else {}
published = pytest.mark.skipif(not SETS, reason="the published rule sets are not here")
LENIENT = {"indivisible": "next", "absent": "drop", "unmapped": "replicate"}
FAMILIES = {"t5x": "gpt2 t5-base vit-l16 whisper-large-v3", "maxdiffusion": "sdxl-unet"}
FAMILIES["maxtext"] = "llama3-8b llama3-70b llama3-405b gemma-2b mixtral-8x7b"


def zeros(*shape):
    return np.zeros(shape, np.int8)


def codes(found):
    return [one.code for one in found]


def only(found, code):
    (one,) = [one for one in found if one.code == code]
    return one


def plan(tree, names, some_rules, mesh="x=4,y=2", **options):
    return ar.plan(tree, names, mesh=mesh, rules=some_rules, **{**LENIENT, **options})


# The rules alone.


@pytest.mark.parametrize(
    ("some_rules", "rules"),
    [
        ([("a", None), ("a", "x")], (1, 0)),
        ([("a", ()), ("b", "y"), ("a", "x")], (2, 0)),
        ([("a", "x"), ("a", "x")], (1, 0)),
        ([("a", "x"), ("b", "x"), ("a", ("x", "y"))], (2, 0)),
        ([("b", "x"), ("a", "x"), ("a", "y"), ("a", ("y", "x"))], (3, 1)),
    ],
)
def test_a_rule_that_can_never_apply_is_found_with_the_one_that_keeps_it(some_rules, rules):
    found = only(lint(some_rules), "dead_rule")
    assert (found.rules, found.rule, found.severity) == (rules, rules[0], "warning")


@pytest.mark.parametrize(
    "some_rules",
    [
        [("b", "x"), ("a", "x"), ("a", "y")],  # b may hold x
        [("a", "x"), ("a", None)],  # a rule that says what is so anyway
        [("b", ("x", "y")), ("a", ("x", "y")), ("a", "x"), ("a", "z")],
    ],
)
def test_a_fallback_that_may_apply_is_no_finding(some_rules):
    assert not {"dead_rule", "fallback_rule"} & set(codes(lint(some_rules)))


def test_a_fallback_after_a_rule_that_is_always_free_is_noted():
    found = only(lint([("a", "x"), ("a", "y")]), "fallback_rule")
    assert (found.rule, found.severity) == (1, "note")
    assert "can only apply where a dimension does not divide" in found.message
    assert "#1 a -> y" in found.message


@given(one=arrays(), some_rules=rules, mesh=meshes(smallest=2))
def test_no_rule_that_is_said_to_be_dead_ever_decides(one, some_rules, mesh):
    names, shape = one
    dead = {f.rule for f in lint(some_rules) if f.code == "dead_rule"}
    mesh = dict.fromkeys("xyzw", 2) | mesh
    found = ar.resolve(names, shape, mesh=mesh, rules=some_rules, **LENIENT)
    used = {dim.rule for dim in found.dims if dim.axes or dim.reason == "whole_by_rule"}
    assert not dead & used


@given(one=arrays(), some_rules=rules, mesh=meshes())
def test_no_rule_that_is_said_to_be_dead_on_a_mesh_ever_decides_there(one, some_rules, mesh):
    names, shape = one
    dead = {
        rule
        for f in lint(some_rules, mesh)
        if f.code == "dead_rule" and f.severity == "note"
        for rule in f.rules
    }
    found = ar.resolve(names, shape, mesh=mesh, rules=some_rules, **LENIENT)
    used = {d.rule for d in found.dims if any(mesh[a] > 1 for a in d.axes) or d.reason == "whole_by_rule"}
    assert not dead & used


def test_names_that_can_never_both_be_split_are_noted():
    found = only(lint([("a", "x"), ("b", "x"), ("b", ("x", "y")), ("c", "x"), ("c", "y")]), "rival_names")
    assert (found.names, found.axis, found.rules, found.severity) == (("a", "b"), "x", (0, 1, 2), "note")


# On a mesh.


def test_an_axis_on_no_mesh_is_found_with_the_nearest():
    found = only(lint([("a", "modle"), ("b", ("modle", "data"))], "data=4,model=2"), "absent_axis")
    assert (found.axis, found.nearest, found.rules, found.names) == ("modle", "model", (0, 1), ("a", "b"))
    assert "did you mean 'model'?" in found.message


def test_an_axis_of_the_mesh_that_no_rule_uses_is_found():
    found = only(lint([("a", "x")], "x=2,y=4,z=1"), "idle_axis")
    assert (found.axis, found.rule) == ("y", None)


def test_an_axis_of_size_one_that_would_block_elsewhere_is_noted():
    found = only(lint([("a", "x"), ("b", ("x", "y"))], "x=1,y=8"), "size_one_axis")
    assert (found.axis, found.rule, found.rules) == ("x", 1, (1, 0))
    assert "size_one_axis" not in codes(lint([("a", "x"), ("b", ("x", "y"))], "x=2,y=4"))


# In a plan.


def test_rules_for_names_that_no_array_bears_are_one_finding():
    tree = {"w": zeros(8, 8)}
    found = lint(plan=plan(tree, {"w": "embed mlp"}, ar.presets.fsdp_tensor_parallel("x", "y")))
    bears_none, bears = [one for one in found if one.code == "unused_rule"]
    assert len(bears_none.rules) > 50
    assert bears.names == ("mlp",)  # its fallback
    assert set(codes(found)) == {"unused_rule"}


def test_a_name_that_no_rule_knows_is_found_with_the_nearest():
    found = only(
        lint(plan=plan({"w": zeros(8, 8)}, {"w": "embed mlpp"}, {"embed": "x", "mlp": "y"})), "unknown_name"
    )
    assert (found.names, found.nearest, found.paths, found.bytes) == (("mlpp",), "mlp", ("w",), 64)


def test_a_mesh_axis_that_no_array_uses_is_found():
    found = only(lint(plan=plan({"w": zeros(8, 7)}, {"w": "a b"}, {"a": "x", "b": "y"})), "idle_axis")
    assert (found.axis, found.rule) == ("y", 1)


def test_a_dimension_that_does_not_divide_is_found_with_its_size_when_padded():
    tree = {"a": zeros(7, 8), "b": zeros(7, 8)}
    found = only(lint(plan=plan(tree, dict.fromkeys(tree, "v e"), {"v": "x", "e": "y"})), "indivisible")
    assert (found.rule, found.names, found.paths, found.severity) == (0, ("v",), ("a", "b"), "warning")
    assert found.fix == "pad v to 8, or give it a later rule whose axes divide 7."
    rescued = lint(plan=plan({"a": zeros(6, 8)}, {"a": "v e"}, [("v", "x"), ("v", "y")]))
    assert only(rescued, "indivisible").severity == "note"


def test_names_that_fight_for_an_axis_in_every_array_are_found_and_others_are_not():
    some_rules = [("a", "x"), ("b", "x")]
    tree = {"w": zeros(8, 8), "v": zeros(8)}
    found = only(lint(plan=plan(tree, {"w": "a b", "v": "b"}, some_rules)), "rival_names")
    assert (found.names, found.axis, found.rule, found.paths) == (("a", "b"), "x", 1, ("w",))
    assert found.fix == "give b a rule with another axis, such as ('b', 'y')."
    tree["u"] = zeros(7, 8)  # where a does not divide, b gets the axis
    found = lint(plan=plan(tree, {"w": "a b", "v": "b", "u": "a b"}, some_rules))
    assert "rival_names" not in codes(found)


def test_a_rule_that_only_a_size_of_one_set_free_is_noted():
    found = lint(plan=plan({"w": zeros(8, 8)}, {"w": "a b"}, [("a", "x"), ("b", ("x", "y"))], "x=1,y=8"))
    one = only(found, "size_one_axis")
    assert (one.axis, one.rule, one.paths) == ("x", 1, ("w",))
    found = lint(plan=plan({"w": zeros(8)}, {"w": "a"}, [("a", "x"), ("a", "y")], "x=1,y=8"))
    assert only(found, "size_one_axis").rule == 1


def test_a_layout_without_defects_has_no_finding():
    assert lint(plan=plan({"w": zeros(8, 8)}, {"w": "a b"}, {"a": "x", "b": "y"})) == ()


@given(tree_and_names=trees(), some_rules=rules, mesh=meshes(), options=policies)
def test_every_finding_is_about_rules_and_arrays_that_there_are(tree_and_names, some_rules, mesh, options):
    the_plan = ar.plan(*tree_and_names, mesh=mesh, rules=some_rules, **options)
    paths = {placement.path for placement in the_plan.placements}
    for found in (lint(some_rules), lint(some_rules, mesh), lint(some_rules, mesh, the_plan)):
        for one in found:
            assert one.code in CODES
            assert one.severity in SEVERITIES
            assert set(one.rules) <= set(range(len(some_rules)))
            assert one.rule == (one.rules[0] if one.rules else None)
            assert paths.issuperset(one.paths)
            assert one.fix
            assert str(one).startswith(f"{one.severity} {one.code}: ")


def test_findings_are_values():
    (one,) = lint([("a", None), ("a", "x")])
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.code = "other"
    assert {one} == set(lint([("a", None), ("a", "x")]))


def test_rules_and_mesh_are_those_of_the_plan_and_no_others():
    the_plan = plan({"w": zeros(8)}, {"w": "a"}, {"a": "x"})
    assert lint({"a": "x"}, "x=4,y=2", the_plan) == lint(plan=the_plan)
    with pytest.raises(ar.PlanError, match="made under other rules"):
        lint({"a": "y"}, plan=the_plan)
    with pytest.raises(ar.PlanError, match="made on x=4, y=2, not on x=2"):
        lint(mesh="x=2", plan=the_plan)
    with pytest.raises(ar.PlanError, match="is no plan"):
        lint(plan="plan")
    with pytest.raises(ar.NoRulesError):
        lint()
    with ar.map_logical_axis_names([("a", None), ("a", "x")]):
        assert codes(lint()) == ["dead_rule"]


# What is published.


@cache
def model(name):
    tree, names = {}, {}
    for row in json.loads((DATA / f"models/{name}.json").read_text())["params"]:
        for i in range(row["repeat"]):
            path = row["path"].replace("{i}", str(i))
            tree[path] = jax.ShapeDtypeStruct(row["shape"], "bfloat16")
            names[path] = tuple(row["names"])
    return tree, names


def published_rules(name):
    return ar.Rules([(n, tuple(a) if isinstance(a, list) else a) for n, a in SETS[name]["rules"]])


def model_plan(name, some_rules, mesh):
    return ar.plan(*model(name), mesh=mesh, rules=some_rules, **LENIENT)


@published
@pytest.mark.parametrize("name", SETS)
def test_every_published_set_is_checked_with_its_models(name):
    some_rules = published_rules(name)
    axes = list(dict.fromkeys(axis for _, held in some_rules.pairs for axis in held))
    mesh = {axis: 4 if number < 2 else 1 + number % 2 for number, axis in enumerate(axes)}
    for found in (lint(some_rules), lint(some_rules, mesh), lint(some_rules, "data=8,model=16")):
        assert all(map(str, found))
    for model_name in FAMILIES[name.partition("/")[0]].split():
        the_plan = model_plan(model_name, some_rules, mesh)
        found = lint(some_rules, mesh, the_plan)
        assert len(found) < 40
        assert len([one for one in found if one.code == "unused_rule"]) <= 2


@published
def test_a_later_embed_rule_is_dead_in_the_1x1_set_of_t5x():
    some_rules = published_rules("t5x/a1p1").append({"embed": "data"})
    found = only(lint(some_rules), "dead_rule")
    assert (found.rules, found.names) == ((13, 2), ("embed",))
    the_plan = model_plan("gpt2", some_rules, "data=8,model=16")
    assert only(lint(plan=the_plan), "dead_rule").rule == 13


@published
@pytest.mark.parametrize(
    ("model_name", "name", "mesh", "factor"),
    [
        ("sdxl-unet", "maxdiffusion/base_xl", "fsdp=8,tensor=4", "16.6"),
        ("gpt2", "t5x/a1p2", "data=8,model=16", "5.76"),
    ],
)
def test_known_wasteful_layouts_are_found(model_name, name, mesh, factor):
    found = lint(plan=model_plan(model_name, published_rules(name), mesh))
    assert found[0].code == "waste"
    assert f" {factor} times the ideal" in found[0].message
    assert found[0].paths


@published
def test_the_vocabulary_of_gpt2_is_found_not_to_divide():
    found = only(lint(plan=model_plan("gpt2", published_rules("t5x/a1p2"), "data=8,model=16")), "indivisible")
    assert (found.names, found.paths) == (("vocab",), ("transformer/wte/embedding",))
    assert "pad vocab to 50272" in found.fix
