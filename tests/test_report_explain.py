"""Why an array lies as it does, in prose: one line a dimension, for every reason that there is."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._errors import REASONS

# Names, shape and options by the reason that they bring about.
CASES = {
    "split": (("embed mlp", (8, 32)), {}),
    "whole_by_rule": (("norm", (8,)), {"rules": {"norm": None}}),
    "size_one_axis": (("embed", (8,)), {"rules": {"embed": "one"}}),
    "unnamed": (("_ mlp", (8, 32)), {}),
    "unknown_name": (("other mlp", (8, 32)), {"unmapped": "replicate"}),
    "axis_taken": (("embed mlp", (8, 32)), {"rules": [("mlp", "model"), ("embed", "model")]}),
    "partly_taken": (
        ("embed mlp", (8, 32)),
        {"rules": [("mlp", "model"), ("embed", ("model", "data"))], "taken": "partial"},
    ),
    "indivisible": (("embed mlp", (6, 32)), {"indivisible": "next"}),
    "partly_divisible": (("embed", (4,)), {"rules": {"embed": ("data", "model")}, "indivisible": "partial"}),
    "size_one_dim": (("embed mlp", (1, 32)), {}),
    "absent_axis": (("embed", (8,)), {"rules": {"embed": "expert"}, "absent": "drop"}),
    "nothing_left": (
        ("embed mlp", (8, 32)),
        {"rules": [("embed", "one"), ("mlp", "one"), ("embed", "one")]},
    ),
    "filled": (("_ mlp", (8, 32)), {"fill": "data", "min_bytes": 0}),
    "explicit_spec": ((P("data"), (8, 32)), {}),
    "whole_on_purpose": ((None, (8, 32)), {}),
    "names_missing": ((None, (8,)), {"unnamed": "replicate"}),
}

EXPLAINED = {
    "split": """\
w: float32 (8, 32), 1.0 KiB, 128 bytes per device
P('data', 'model') for ('embed', 'mlp')
  dimension 0 'embed' of size 8: split over data=4 by rule #0 embed -> data
  dimension 1 'mlp' of size 32: split over model=2 by rule #1 mlp -> model""",
    "whole_by_rule": """\
w: float32 (8,), 32 bytes, 32 bytes per device
P(None) for ('norm',)
  dimension 0 'norm' of size 8: whole by rule #0 norm -> None""",
    "size_one_axis": """\
w: float32 (8,), 32 bytes, 32 bytes per device
P('one') for ('embed',)
  dimension 0 'embed' of size 8: whole: one=1 by rule #0 embed -> one has size 1 and splits nothing""",
    "unnamed": """\
w: float32 (8, 32), 1.0 KiB, 512 bytes per device
P(None, 'model') for (None, 'mlp')
  dimension 0 None of size 8: whole: it has no name
  dimension 1 'mlp' of size 32: split over model=2 by rule #1 mlp -> model""",
    "unknown_name": """\
w: float32 (8, 32), 1.0 KiB, 512 bytes per device
P(None, 'model') for ('other', 'mlp')
  dimension 0 'other' of size 8: whole: no rule names it
  dimension 1 'mlp' of size 32: split over model=2 by rule #1 mlp -> model""",
    "axis_taken": """\
w: float32 (8, 32), 1.0 KiB, 512 bytes per device
P(None, 'model') for ('embed', 'mlp')
  dimension 0 'embed' of size 8: whole: rule #1 embed -> model was skipped: dimension 1 holds model
  dimension 1 'mlp' of size 32: split over model=2 by rule #0 mlp -> model""",
    "partly_taken": """\
w: float32 (8, 32), 1.0 KiB, 128 bytes per device
P('data', 'model') for ('embed', 'mlp')
  dimension 0 'embed' of size 8: split over data=4 by rule #1 embed -> (model, data); rule #1 embed -> (model, data) was taken in part: dimension 1 holds model
  dimension 1 'mlp' of size 32: split over model=2 by rule #0 mlp -> model""",
    "indivisible": """\
w: float32 (6, 32), 768 bytes, 384 bytes per device
P(None, 'model') for ('embed', 'mlp')
  dimension 0 'embed' of size 6: whole: rule #0 embed -> data was skipped: size 6 does not divide over data=4
  dimension 1 'mlp' of size 32: split over model=2 by rule #1 mlp -> model""",
    "partly_divisible": """\
w: float32 (4,), 16 bytes, 4 bytes per device
P('data') for ('embed',)
  dimension 0 'embed' of size 4: split over data=4 by rule #0 embed -> (data, model); rule #0 embed -> (data, model) was taken in part: size 4 divides over data=4 only""",
    "size_one_dim": """\
w: float32 (1, 32), 128 bytes, 64 bytes per device
P(None, 'model') for ('embed', 'mlp')
  dimension 0 'embed' of size 1: whole: rule #0 embed -> data was skipped: a dimension of size 1 cannot be split
  dimension 1 'mlp' of size 32: split over model=2 by rule #1 mlp -> model""",
    "absent_axis": """\
w: float32 (8,), 32 bytes, 32 bytes per device
P(None) for ('embed',)
  dimension 0 'embed' of size 8: whole: rule #0 embed -> expert was skipped: the mesh has no axis expert""",
    "nothing_left": """\
w: float32 (8, 32), 1.0 KiB, 1.0 KiB per device
P('one', None) for ('embed', 'mlp')
  dimension 0 'embed' of size 8: whole: one=1 by rule #0 embed -> one has size 1 and splits nothing; rule #2 embed -> one was skipped: its axes of size 1 stand in the spec already
  dimension 1 'mlp' of size 32: whole: rule #1 mlp -> one was skipped: its axes of size 1 stand in the spec already""",
    "filled": """\
w: float32 (8, 32), 1.0 KiB, 128 bytes per device
P('data', 'model') for (None, 'mlp')
  dimension 0 None of size 8: split over data=4 by fill
  dimension 1 'mlp' of size 32: split over model=2 by rule #1 mlp -> model""",
    "explicit_spec": """\
w: float32 (8, 32), 1.0 KiB, 256 bytes per device
P('data', None) for (None, None)
  dimension 0 None of size 8: laid out by the given PartitionSpec
  dimension 1 None of size 32: laid out by the given PartitionSpec""",
    "whole_on_purpose": """\
w: float32 (8, 32), 1.0 KiB, 1.0 KiB per device
P(None, None) for (None, None)
  dimension 0 None of size 8: whole: the leaf's names are None
  dimension 1 None of size 32: whole: the leaf's names are None""",
    "names_missing": """\
w: float32 (8,), 32 bytes, 32 bytes per device
P(None) for (None,)
  dimension 0 None of size 8: whole: the leaf has no names""",
}
OF_A_CONSTRAINT = {"unconstrained"}  # which no plan has
OF_A_LEAF_OR_RULE = {"pattern_overlap", "unused_pattern", "unused_rule", "cuts_fused", "splits_heads"}
OF_A_TABLE = {"splits_group"}  # of quantised checkpoints, explained with the catalog


def explain(reason):
    (names, shape), options = CASES[reason]
    names = ar.NameTable({"no": "embed"}) if reason == "names_missing" else {"w": names}
    options = {"mesh": "data=4,model=2,one=1", "rules": {"embed": "data", "mlp": "model"}, **options}
    plan = ar.plan({"w": np.zeros(shape, np.float32)}, names, **options)
    return plan, plan.explain("w")


@pytest.mark.parametrize("reason", CASES)
def test_the_explanation_reads_as_designed(reason):
    plan, text = explain(reason)
    assert text == EXPLAINED[reason]
    (placement,) = plan.placements
    dims = placement.resolution.dims
    assert reason in {dim.reason for dim in dims} | {skip.reason for dim in dims for skip in dim.skips}
    assert len(text.splitlines()) == 2 + len(placement.shape)


def test_every_reason_is_explained():
    assert set(REASONS) - OF_A_CONSTRAINT - OF_A_LEAF_OR_RULE - OF_A_TABLE == set(CASES)


@pytest.mark.parametrize("reason", CASES)
def test_an_explanation_survives_a_golden_file(reason):
    plan, text = explain(reason)
    assert ar.Plan.from_json(plan.to_json()).explain("w") == text
