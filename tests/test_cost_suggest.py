"""Comparison of rule sets, and rules that a search proposes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import axisrules as ar
from axisrules import cost, presets
from axisrules.cost._search import Layout, Pricer, as_pairs
from tests.pricing import MODELS, Adam, model

MESH = "data=8,model=4"
TREE = {
    "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
}
NAMES = {"up": "embed mlp", "down": "mlp embed"}


@pytest.mark.parametrize("hardware", [None, "v5e"])
@pytest.mark.parametrize("name", MODELS)
def test_no_preset_is_better_than_the_rules_that_are_proposed(name, hardware):
    tree, names = model(name)
    found = cost.suggest(tree, names, MESH, hardware=hardware, time_limit=3.0)
    assert len(found.presets) >= 6
    assert [label for label, score in found.presets.items() if score.beats(found.score)] == []
    again = ar.plan(tree, names, mesh=MESH, rules=found.rules, **found.options)
    assert again.bytes_per_device == found.plan.bytes_per_device
    moved = cost.traffic(again, hardware=hardware)
    assert moved.wire_bytes == found.score.traffic.wire_bytes


def test_a_model_without_names_for_half_of_its_weights_is_repaired_by_filling():
    tree, names = model("sdxl-unet")
    found = cost.suggest(tree, names, MESH, time_limit=6.0)
    assert found.score.waste < 1.1
    assert found.fill
    before = ar.plan(tree, names, mesh=MESH, rules=presets.fsdp(("data", "model")), indivisible="next")
    assert before.bytes_per_device * 32 / before.nbytes > 15
    assert found.score.traffic.wire_bytes <= cost.traffic(before).wire_bytes


def test_every_assignment_is_tried_where_these_are_few():
    found = cost.suggest(TREE, NAMES, "data=4,model=2", time_limit=30.0)
    assert found.exact
    assert found.score.waste == 1.0
    assert "every assignment was tried" in str(found)


def test_the_state_of_the_optimizer_has_to_fit_too():
    tree, names = model("llama3-70b")
    alone = cost.suggest(tree, names, "data=16,model=4", hardware="v5e", time_limit=60.0)
    assert alone.score.fits
    assert not cost.memory(alone.plan, Adam, hardware="v5e").fits
    found = cost.suggest(tree, names, "data=16,model=4", hardware="v5e", optimizer=Adam, time_limit=60.0)
    assert found.score.fits
    assert cost.memory(found.plan, Adam, hardware="v5e").fits
    assert not found.presets["fsdp"].fits


@pytest.mark.parametrize("form", ["init", "plan", "arrays"])
def test_the_optimizer_may_be_given_as_for_memory(form):
    rules = {"batch": "data", "embed": "data", "mlp": "model"}
    plan = ar.plan(TREE, NAMES, mesh="data=4,model=2", rules=rules)
    optimizer = {"init": Adam.init, "plan": plan, "arrays": plan.abstract}[form]
    held = cost.memory(plan, optimizer).bytes_per_device
    for limit, fits in ((held, True), (held - 1, False)):
        chip = cost.Hardware("small", memory_bytes=limit, link_bytes_per_s=10**9)
        found = cost.suggest(
            TREE, NAMES, "data=4,model=2", hardware=chip, fixed=rules, optimizer=optimizer, time_limit=0.0
        )
        assert found.score.fits is fits


@pytest.mark.parametrize("name", ["llama3-8b", "sdxl-unet", "mixtral-8x7b"])
def test_the_bytes_that_have_to_fit_are_those_of_memory(name):
    tree, names = model(name)
    for mesh in ("data=8,model=4", "data=2,model=3"):
        for rules in (presets.fsdp(), presets.fsdp_tensor_parallel(), presets.data_parallel()):
            options = {"mesh": mesh, "rules": rules, "unmapped": "replicate", "indivisible": "next"}
            held = cost.memory(ar.plan(tree, names, **options), Adam, hardware="v5e").bytes_per_device
            for limit, fits in ((held, True), (held - 1, False)):
                chip = dataclasses.replace(cost.hardware("v5e"), memory_bytes=limit)
                pricer = Pricer(tree, names, mesh, "batch", chip, Adam)
                assert pricer.score(Layout(as_pairs(rules))).fits is fits
        fill = ("data",)
        held = cost.memory(ar.plan(tree, names, **options, fill=fill), Adam, hardware="v5e").bytes_per_device
        for limit, fits in ((held, True), (held - 1, False)):
            chip = dataclasses.replace(cost.hardware("v5e"), memory_bytes=limit)
            pricer = Pricer(tree, names, mesh, "batch", chip, Adam)
            assert pricer.score(Layout(as_pairs(rules), fill)).fits is fits


def test_what_is_fixed_stays():
    found = cost.suggest(
        TREE, NAMES, "data=4,model=2", fixed={"embed": None, "batch": "data"}, time_limit=30.0
    )
    assert [axes for name, axes in found.rules if name == "embed"] == [None]
    assert found.plan.specs["up"][0] is None


def test_the_name_of_the_batch_may_be_another():
    found = cost.suggest(TREE, NAMES, "data=4,model=2", batch="rows", hardware="v5e")
    assert "rows" in found.rules.by_name
    assert found.score.fits


def test_a_search_without_time_still_returns_the_best_preset():
    found = cost.suggest(TREE, NAMES, MESH, time_limit=0.0)
    assert not found.exact
    assert all(not score.beats(found.score) for score in found.presets.values())


@pytest.mark.parametrize("tree", [{}, {"s": np.zeros((), np.float32)}, {"n": np.zeros((8, 8), np.int32)}])
def test_trees_with_nothing_to_move_have_rules(tree):
    found = cost.suggest(tree, {key: "_ _" if np.ndim(one) else "" for key, one in tree.items()}, MESH)
    assert found.score.traffic.wire_bytes in (0, 7)  # 7: the sum of one scalar's gradient


def test_changes_lead_from_the_start_to_what_is_proposed():
    rules = {"batch": "data", "embed": None, "mlp": "model"}
    found = cost.suggest(TREE, NAMES, "data=4,model=2", rules=rules, fixed=[("batch", "data")])
    if found.changes:
        assert found.changes[-1].score.waste == pytest.approx(found.score.waste)
        assert all(change.gain for change in found.changes)
    assert found.why.startswith("on data=4, model=2")


def test_the_one_change_that_helps_most_is_named():
    rules = {"batch": "data", "embed": None, "mlp": "model"}
    change = cost.best_change(rules, TREE, NAMES, "data=4,model=2")
    assert (change.name, change.after) == ("embed", (("data",),))
    assert change.score.waste == 1.0
    assert (
        cost.best_change({"batch": "data", "embed": "data", "mlp": "model"}, TREE, NAMES, "data=4,model=2")
        is None
    )


def make_step(plan):
    rows = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    rows = ar.plan(rows, "batch _", mesh=plan.mesh, rules=plan.rules, unmapped="replicate").abstract

    def step(params, rows):
        return jax.grad(lambda params: jnp.mean((rows @ params["up"] @ params["down"]) ** 2))(params)

    return step, (plan.abstract, rows)


def test_with_a_step_the_compiler_ranks_the_best_few():
    found = cost.suggest(TREE, NAMES, "data=2,model=2", step=make_step, time_limit=1.0)
    moved = [one.wire_bytes for one in found.measured]
    assert len(moved) >= 2
    assert moved == sorted(moved)
    with pytest.raises(ar.PolicyError, match="did not return a pair"):
        cost.suggest(TREE, NAMES, "data=2,model=2", step=lambda plan: 3, time_limit=0.0)


RULE_SETS = {
    "dp": presets.data_parallel(),
    "both": presets.fsdp_tensor_parallel(),
    "tp": presets.tensor_parallel(),
}


def test_rule_sets_stand_side_by_side_the_best_first():
    tree, names = model("llama3-8b")
    table = cost.compare(
        RULE_SETS, tree, names, meshes=["data=16,model=4", "data=4,model=4"], hardware="v5e", optimizer=Adam,
        tokens=2**20,
    )  # fmt: skip
    assert len(table.rows) == 6
    assert table.winner.name == "both"
    assert [row.memory.fits for row in table.rows] == [True] * 2 + [False] * 4
    assert table.winner.name in table.why
    assert table.why in str(table)
    params = sum(one.size for one in tree.values())
    assert table.winner.compute_seconds == pytest.approx(6 * params * 2**20 / 64 / 197e12)
    assert table.winner.flops_source == "6 * parameters * tokens"
    assert table.winner.bound == "compute"


def test_growth_is_told_in_numbers():
    table = cost.compare(RULE_SETS, TREE, NAMES, meshes="data=4,model=2")
    growth = table.growth["both"]
    assert [one.devices for one in growth][:2] == [8, 16]
    assert growth[0].bytes_per_device == 2 * growth[1].bytes_per_device
    assert len({one.bytes_per_device for one in table.growth["dp"]}) == 1


def test_what_would_break_is_told():
    tree = {"w": jax.ShapeDtypeStruct((6, 256), jnp.float32)}
    rules = {"whole": {"batch": "data", "embed": "data", "mlp": None}, "typo": {"bach": "data"}}
    table = cost.compare(rules, tree, {"w": "embed mlp"}, meshes="data=4,model=2")
    rows = {row.name: row for row in table.rows}
    assert rows["whole"].indivisible == ("w",)
    assert rows["whole"].idle == ("model",)
    assert "no rule mentions 'batch'" in rows["typo"].problem
    assert rows["typo"].problem in str(table)


def test_a_step_may_be_compared_by_the_compiler():
    table = cost.compare(
        {"dp": presets.data_parallel()}, TREE, NAMES, meshes="data=2", step=make_step, hardware="v5e"
    )
    assert table.winner.measured.wire_bytes > 0
    assert table.winner.compute_seconds > 0
    assert "lowered module" in table.winner.flops_source


@pytest.mark.parametrize("given", [{}, None, 3])
def test_a_comparison_of_nothing_is_refused(given):
    with pytest.raises(ar.PolicyError):
        cost.compare(given, TREE, NAMES, meshes=MESH)


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([6, 8, 64]),
    st.sampled_from([8, 12]),
)
def test_a_proposal_is_never_worse_than_a_preset_on_any_mesh(data, other, wide, narrow):
    tree = {"up": np.zeros((wide, narrow), np.float32), "table": np.zeros((narrow * 2, wide), np.float32)}
    names = {"up": "embed mlp", "table": "vocab embed"}
    found = cost.suggest(tree, names, {"data": data, "model": other}, time_limit=0.2)
    assert all(not score.beats(found.score) for score in found.presets.values())
