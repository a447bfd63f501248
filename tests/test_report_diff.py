"""Differences of plans: which arrays change, by which rule, and how it reads."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import axisrules as ar

DATA = Path(__file__).parent / "data"
RULES = ar.Rules({"embed": "data", "mlp": "model"})


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


TREE = {f"layer_{i}": {"up": zeros(8, 32), "scale": zeros(8), "down": zeros(32, 6)} for i in range(3)}
NAMES = ar.NameTable({"**/up": "embed mlp", "**/scale": "embed", "**/down": "mlp _"})


def plan(rules=RULES, tree=TREE, names=NAMES, mesh="data=4,model=2", **options):
    return ar.plan(tree, names, mesh=mesh, rules=rules, **options)


def test_a_changed_rule_changes_exactly_the_arrays_that_it_laid_out():
    found = plan().diff(plan(RULES.replace("embed", None)))
    assert [one.path for one in found.changed] == [
        f"layer_{i}/{w}" for i in range(3) for w in ("scale", "up")
    ]
    (dim,) = found.changed[1].dims
    assert (dim.dim, dim.name, dim.before, dim.after) == (0, "embed", ("data",), ())
    assert (dim.rule_before, dim.rule_after) == (0, 0)
    assert dim.why_before == "split over data=4 by rule #0 embed -> data"
    assert dim.why_after == "whole by rule #0 embed -> None"
    assert (found.rules_removed, found.rules_added) == ((0,), (0,))


def test_the_difference_reads_as_designed():
    found = plan().diff(plan(RULES.replace("embed", None)))
    assert (
        str(found)
        == """\
6 of 9 arrays change on data=4, model=2; bytes per device: 1,560 -> 2,784 (+1,224)
moving a live tree: 9,792 bytes received by all devices, 1,224 by one at most: 9,792 over data
- rule #0 embed -> data
+ rule #0 embed -> None
3 x layer_*/scale: spec P('data') -> P(None); +24 bytes per device each
    dimension 0 'embed' was split over data=4 by rule #0 embed -> data
                        now whole by rule #0 embed -> None
3 x layer_*/up: spec P('data', 'model') -> P(None, 'model'); +384 bytes per device each
    dimension 0 'embed' was split over data=4 by rule #0 embed -> data
                        now whole by rule #0 embed -> None"""
    )


def test_plans_of_the_same_layout_do_not_differ():
    assert not plan().diff(plan())
    assert str(plan().diff(plan())) == (
        "0 of 9 arrays change on data=4, model=2; bytes per device: 1,560 -> 1,560 (+0)"
    )


def test_rules_that_change_no_array_are_still_a_difference():
    found = plan().diff(plan(RULES.append({"vocab": "model"})))
    assert (bool(found), found.changed, found.rules_added) == (True, (), (2,))
    assert "+ rule #2 vocab -> model" in str(found)
    swapped = plan().diff(plan(ar.Rules(reversed(list(RULES)))))
    assert (bool(swapped), swapped.rules_added) == (True, ())
    assert "the rules stand in another order" in str(swapped)


def test_arrays_that_came_and_went_are_named_and_cost_nothing():
    tree = {**TREE, "head": {"up": zeros(8, 8)}}
    del tree["layer_0"]
    found = plan().diff(plan(tree=tree))
    assert found.added == ("head/up",)
    assert found.removed == ("layer_0/down", "layer_0/scale", "layer_0/up")
    assert (found.changed, found.received) == ((), 0)
    assert "- layer_0/down" in str(found)


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (zeros(16, 32), ("shape",)),
        (zeros(8, 32, dtype=np.int8), ("dtype",)),
        (zeros(8, 32, 1), ("shape", "names", "spec")),
    ],
)
def test_another_array_at_a_path_is_a_change_of_it(leaf, what):
    names = ar.NameTable({"up": "embed mlp" if leaf.ndim == 2 else "embed mlp _"})
    old = plan(tree={"up": zeros(8, 32)}, names=ar.NameTable({"up": "embed mlp"}))
    found = old.diff(plan(tree={"up": leaf}, names=names))
    assert found.changed[0].what == what
    assert found.changed[0].received == (None if "shape" in what else 0)
    assert found.received == 0


def test_tied_arrays_move_once():
    shared = zeros(8, 8)
    tree, names = {"in": shared, "out": shared}, {"in": "embed _", "out": "embed _"}
    found = plan(tree=tree, names=names).diff(plan(RULES.replace("embed", None), tree, names))
    assert [one.path for one in found.changed] == ["in", "out"]
    assert found.received == 8 * (256 - 64)


def test_another_mesh_changes_what_is_split_over_another_number():
    found = plan().diff(plan(mesh="data=2,model=4"))
    assert {one.what for one in found.changed} == {("mesh",)}
    assert str(found).startswith("9 of 9 arrays change on data=4, model=2 -> data=2, model=4;")
    more = plan().diff(plan(mesh="data=4,model=2,extra=1"))
    assert (more.changed, more.received, bool(more)) == ((), 0, True)


def test_another_memory_is_a_difference():
    found = plan().diff(plan(memory_kind="pinned_host"))
    assert (bool(found), found.received) == (True, 0)
    assert "memory: the default -> pinned_host" in str(found)


def test_what_is_no_plan_is_refused():
    with pytest.raises(ar.PlanError, match="is no plan"):
        plan().diff(plan().to_json())


def test_a_golden_file_of_405b_tells_which_arrays_a_changed_rule_moves():
    tree, names = {}, {}
    for row in json.loads((DATA / "models/llama3-405b.json").read_text())["params"]:
        for i in range(row["repeat"]):
            path = row["path"].replace("{i}", str(i))
            tree[path] = jax.ShapeDtypeStruct(row["shape"], "bfloat16")
            names[path] = tuple(row["names"])

    def on(rules, mesh="data=64,model=128"):
        return ar.plan(tree, names, mesh=mesh, rules=rules, indivisible="next")

    rules = ar.presets.fsdp_tensor_parallel()
    golden = on(rules).to_json()
    found = ar.Plan.from_json(golden).diff(on(rules.replace("vocab", None)))
    assert sorted(one.path for one in found.changed) == sorted(
        path for path, words in names.items() if "vocab" in words
    )
    assert found.added == found.removed == ()
    # Two arrays of 128,256 x 16,384 in bfloat16, of which a device held 1/128 of its 1/64, now all of it.
    tile = 128256 * 16384 * 2 // 64
    assert found.most == 2 * (tile - tile // 128)
    assert found.over == {"data": 0, "model": 8192 * found.most}
