"""Bytes of weights and gradients from the plan, against what the TPU compiler moves."""

import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import axisrules as ar
from axisrules import cost
from tests.pricing import TRUTH, entry_of, model, plan_of

TPU = [name for name, one in TRUTH.items() if one["platform"] == "tpu"]
GPU = [name for name, one in TRUTH.items() if one["platform"] == "gpu"]
MESHES = [{"data": 4, "model": 4}, {"data": 16, "model": 1}]
IDLE = ["tpu_4x4_fsdp_scan", "gpu_4x4_fsdp_scan"]


def other(name):
    return "z" + hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:6]


@pytest.mark.parametrize("name", [name for name in (*TPU, *GPU) if name not in IDLE])
@pytest.mark.parametrize("rename", [str, other], ids=["", "renamed"])
def test_traffic_over_the_batch_axes_is_near_what_the_compiler_moves(name, rename):
    entry = TRUTH[name]
    hardware = "H100" if name in GPU else None
    found = cost.traffic(plan_of(entry, rename, rename), rename("batch"), hardware)
    moved = entry["wire_bytes_per_axis"].get("data", 0)
    assert found.wire_bytes_per_axis.get(rename("data"), 0) == pytest.approx(moved, rel=0.1)
    assert not found.declined
    if entry["layout"] in ("dp", "tp"):
        assert found.wire_bytes_per_axis.get(rename("data"), 0) == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize("name", IDLE)
def test_beside_an_idle_axis_only_the_sum_is_known(name):
    entry = TRUTH[name]
    found = cost.traffic(plan_of(entry))
    assert found.wire_bytes_per_axis == {}
    assert set(found.reasons) == {"data", "model"}
    assert "nothing uses model" in found.reasons["data"]
    assert found.declined
    assert found.wire_bytes == pytest.approx(sum(entry["wire_bytes_per_axis"].values()), rel=0.1)


@pytest.mark.parametrize("rename", [str, other], ids=["", "renamed"])
@pytest.mark.parametrize("mesh", MESHES, ids=["4x4", "16x1"])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize(
    ("layout", "cause"),
    [("bad", "no kernel contracts"), ("bad_layers", "stacked layers"), ("tp_sp", "more than its weights")],
)
def test_layouts_that_a_plan_cannot_judge_have_a_reason_and_no_number(layout, cause, mesh, scan, rename):
    found = cost.traffic(plan_of(entry_of(layout, mesh, scan), rename, rename), rename("batch"))
    judged = {"bad": True, "bad_layers": scan and mesh["data"] == 4, "tp_sp": mesh["model"] > 1}[layout]
    assert found.declined == judged
    if judged:
        assert cause in found.reasons[rename("data")]
        assert rename("data") not in found.wire_bytes_per_axis
        assert (found.wire_bytes, found.seconds) == (None, None)


def test_weights_over_both_axes_move_over_both():
    found = cost.traffic(plan_of(entry_of("fsdp_all", MESHES[0])))
    assert list(found.wire_bytes_per_axis) == ["data+model"]


RULES = {"batch": ("replica", "data"), "embed": "data", "mlp": "model"}
TREE = {"up": np.zeros((64, 256), np.float32)}


def traffic(tree=TREE, names="embed mlp", mesh="replica=2,data=4,model=2", rules=RULES, **options):
    made = ar.plan(tree, dict.fromkeys(tree, names), mesh=mesh, rules=rules, unmapped="replicate")
    return cost.traffic(made, **options)


def test_weights_over_some_of_the_batch_axes_are_scattered_there_and_summed_over_the_rest():
    found = traffic(hardware="H100")
    size = 64 * 256 * 4 / 2
    assert found.wire_bytes_per_axis == {"data": 2 * 3 / 4 * size, "replica": 2 * 1 / 2 * size / 4}
    assert [(one.what, one.kind) for one in found.moves] == [
        ("weights", "all-gather"),
        ("gradients", "reduce-scatter"),
        ("gradients", "all-reduce"),
    ]


def test_the_least_time_is_bytes_over_the_bandwidth_of_the_axis():
    found = traffic(mesh="replica=1,data=16,model=2", hardware="v5e")
    (size,) = found.wire_bytes_per_axis.values()
    assert found.seconds_per_axis == {"data": size / 90e9}
    assert found.seconds == size / 90e9
    assert "at least" in str(found)
    unknown = traffic(mesh="replica=1,data=16,model=2", hardware="TPU7x")
    assert (unknown.seconds_per_axis, unknown.seconds) == ({"data": None}, None)
    assert traffic().seconds is None


def test_what_one_device_holds_alone_moves_nothing():
    found = traffic(mesh="replica=1,data=1,model=2")
    assert (found.wire_bytes_per_axis, found.wire_bytes, found.declined) == ({}, 0, False)
    assert traffic({}).wire_bytes == 0
    assert traffic({"n": np.zeros((64, 256), np.int32)}).wire_bytes == 0


def test_a_batch_that_no_rule_mentions_is_refused():
    with pytest.raises(ar.UnknownNameError, match="did you mean 'batch'"):
        traffic(batch="bach")
    with pytest.raises(ar.PolicyError, match="no plan"):
        cost.traffic(TREE)


def test_experts_split_over_the_batch_axes_of_a_model_move_what_the_rules_say():
    tree, names = model("mixtral-8x7b")
    made = ar.plan(
        tree, names, mesh="data=8,model=4", rules=ar.presets.fsdp_tensor_parallel(), indivisible="next"
    )
    found = cost.traffic(made, hardware="v5p")
    assert found.wire_bytes_per_axis["data"] > 0
    assert set(found.reasons) == {"model"}


@given(
    st.lists(st.tuples(st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16])), max_size=4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_gradients_of_whole_weights_are_summed_exactly_once(shapes, data, beside):
    tree = {f"w{'abcd'[at]}": jax.ShapeDtypeStruct(shape, jnp.float32) for at, shape in enumerate(shapes)}
    rules = {"batch": "data", "mlp": "model"}
    found = traffic(tree, "embed mlp", {"data": data, "model": beside}, rules)
    size = sum(math.prod(shape) for shape in shapes) * 4 / beside
    assert found.wire_bytes == round(2 * (data - 1) / data * size)


@given(st.integers(1, 5), st.sampled_from([2, 4, 8]))
def test_equal_layers_move_as_many_times_the_bytes(count, data):
    def layers(number):
        tree = {f"layer{at}": np.zeros((64, 64), np.float32) for at in range(number)}
        return traffic(tree, "embed mlp", {"data": data}, {"batch": "data", "embed": "data"}).wire_bytes

    assert layers(2 * count + 2) == pytest.approx(layers(2) * (count + 1))
