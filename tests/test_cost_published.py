"""Proposed rules beside every preset and every published rule set, and a model that they repair.

The published sets may not be copied: tests that need them are skipped where they are absent.
"""

import pytest
from jax.sharding import AbstractMesh, AxisType

import axisrules as ar
from axisrules import cost, presets
from benchmarks.suggested import HARDWARE, MESHES, PUBLISHED, compared
from tests.pricing import MODELS, model


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published rule sets are not here")
@pytest.mark.parametrize(
    ("mesh", "hardware"),
    [
        (MESHES[0], HARDWARE),
        *[pytest.param(mesh, HARDWARE, marks=pytest.mark.slow) for mesh in MESHES[1:3]],
        pytest.param(MESHES[3], HARDWARE, marks=pytest.mark.slow),
        (MESHES[3], None),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_no_published_rule_set_is_better_than_the_rules_that_are_proposed(name, mesh, hardware):
    one = compared(name, mesh, hardware, time_limit=4.0 if name == "mixtral-8x7b" else 1.0)
    assert len(one.others) > len(one.found.presets) >= 8
    assert one.worse_than == []


def abstract(sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def unet(rename=str):
    tree, names = model("sdxl-unet")
    renamed = {path: tuple(word and rename(word) for word in own) for path, own in names.items()}
    return tree, renamed


def waste(plan):
    return plan.bytes_per_device * plan.mesh.size / plan.nbytes


OTHERS = [
    ({"data": 4, "model": 8}, str),
    ({"data": 16, "model": 2}, str),
    ({"data": 2, "fsdp": 4, "model": 4}, str),
    ({"x": 8, "y": 4}, str),
    ({"fsdp": 8, "tensor": 4}, str),
    ({"model": 4, "data": 8}, str),
    ({"data": 8, "one": 1, "model": 4}, str),
    ({"data": 8, "model": 4}, lambda word: f"z_{word[::-1]}"),
]


@pytest.mark.parametrize(
    ("sizes", "rename"),
    [
        ({"data": 8, "model": 4}, str),
        *OTHERS[-2:],
        *[pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS[:-2]],
    ],
)
def test_a_model_that_published_names_leave_whole_is_repaired(sizes, rename):
    tree, names = unet(rename)
    mesh = abstract(sizes)
    found = cost.suggest(tree, names, mesh, time_limit=3.0)
    again = ar.plan(tree, names, mesh=mesh, rules=found.rules, **found.options)
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    for over in (axes, "data" if "data" in sizes else axes[0]):
        options = {"indivisible": "next", "absent": "drop", "unmapped": "replicate"}
        before = ar.plan(tree, names, mesh=mesh, rules=presets.fsdp(over), **options)
        assert waste(before) > 15
        assert cost.traffic(again).wire_bytes <= cost.traffic(before).wire_bytes
    assert waste(again) < 1.1
    assert waste(again) == pytest.approx(found.score.waste)
