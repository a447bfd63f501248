"""The twelve points of resolution, one by one, and the cases of the systems that came before."""

import enum
import json
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._policies import Policies
from axisrules._resolve import resolve_array

CASES = json.loads((Path(__file__).parent / "data/resolve.json").read_text())


def frozen(entries):
    return tuple(tuple(e) if isinstance(e, list) else e for e in entries)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
@pytest.mark.parametrize("form", ["lists", "tuples", "Rules", "active"])
def test_case_of_the_peers(case, form):
    def solve():
        if form == "lists":
            return ar.logical_to_mesh_axes(case["names"], case["rules"])
        pairs = tuple(frozen(pair) if isinstance(pair, list) else pair for pair in case["rules"])
        names = tuple(case["names"])
        if form == "tuples":
            return ar.logical_to_mesh_axes(names, pairs)
        if form == "Rules":
            return ar.logical_to_mesh_axes(names, ar.Rules(pairs))
        with ar.map_logical_axis_names(pairs):
            return ar.logical_to_mesh_axes(names)

    if case["expected"] == {"error": True}:
        with pytest.raises(ar.AxisRulesError):
            solve()
    else:
        assert solve() == P(*frozen(case["expected"]))


def spec(names, rules, mesh=None, shape=None, **options):
    return tuple(ar.resolve(names, shape, mesh=mesh, rules=rules, **options).spec)


def reasons(names, rules, mesh=None, shape=None, **options):
    return [d.reason for d in ar.resolve(names, shape, mesh=mesh, rules=rules, **options).dims]


def test_1_the_order_of_rules_decides_not_that_of_dimensions():
    assert spec("a b", [("b", "x"), ("a", "x")]) == (None, "x")


@pytest.mark.parametrize("whole", [None, (), []])
def test_2_none_settles_a_dimension(whole):
    assert spec("a", [("a", whole), ("a", "x")]) == (None,)
    assert reasons("a", [("a", whole), ("a", "x")]) == ["whole_by_rule"]


def test_3_a_tuple_is_all_or_nothing_by_default():
    rules = [("a", "x"), ("b", ("x", "y")), ("b", "y")]
    assert spec("a b", rules) == ("x", "y")
    assert spec("a b", rules[:2]) == ("x", None)


def test_3_partial_takes_the_free_axes():
    rules = [("a", "x"), ("b", ("z", "x", "y"))]
    assert spec("a b", rules, taken="partial") == ("x", ("z", "y"))
    assert reasons("a b", rules, taken="partial") == ["split", "partly_taken"]


def test_3_error_names_both_dimensions():
    with pytest.raises(ar.AxisTakenError) as caught:
        spec("a b", [("a", "x"), ("b", "x")], taken="error")
    assert (caught.value.holder, caught.value.dim, caught.value.axis) == (0, 1, "x")


def test_4_the_two_kinds_of_open_dimensions_are_told_apart():
    resolution = ar.resolve("a b c", rules=[("a", "x"), ("b", "x")])
    assert [dim.reason for dim in resolution.dims] == ["split", "axis_taken", "unknown_name"]
    assert resolution.dims[1].holder == 0


def test_5_trailing_nones_are_kept():
    assert spec("a _ _", {"a": "x"}) == ("x", None, None)


@pytest.mark.parametrize(
    "names", [("a", "a"), "a b a", ("a", 1), ("a", ("b",)), ("a", b"b"), 3, None, {"a"}, ("",)]
)
def test_6_malformed_names_are_refused(names):
    with pytest.raises(ar.NamesError):
        ar.resolve(names, rules={"a": "x"})


def test_6_a_repeated_name_is_refused_even_where_it_could_fall_back():
    with pytest.raises(ar.RepeatedNameError):
        ar.logical_to_mesh_axes(("a", "a"), [("a", "x"), ("a", "y")])


TRIVIAL = {"x": 1, "y": 8}


def test_7_a_size_1_axis_stands_where_it_was_first_claimed_and_blocks_nothing():
    assert spec("a b", [("a", "x"), ("b", ("x", "y"))], TRIVIAL) == ("x", "y")


def test_7_a_rule_of_nothing_but_a_size_1_axis_that_stands_elsewhere_is_skipped():
    assert spec("a b", [("a", "x"), ("b", "x"), ("b", "y")], TRIVIAL) == ("x", "y")
    assert reasons("a b", [("a", "x"), ("b", "x")], TRIVIAL) == ["size_one_axis", "nothing_left"]


def test_7_a_dimension_held_by_size_1_axes_alone_stays_open_for_a_rule_that_splits_it():
    assert spec("a", [("a", "x"), ("a", "y")], TRIVIAL) == (("x", "y"),)
    assert spec("a", [("a", "x"), ("a", ("y", "x"))], TRIVIAL) == (("y", "x"),)
    assert spec("a", [("a", "x"), ("a", None), ("a", "y")], TRIVIAL) == ("x",)


def test_7_a_size_1_axis_is_no_conflict_under_the_strict_policy():
    assert spec("a b", [("a", "x"), ("b", ("x", "y"))], TRIVIAL, taken="error") == ("x", "y")


@pytest.mark.parametrize("indivisible", ["error", "next", "partial"])
def test_8_a_dimension_of_size_1_is_not_split_and_claims_nothing(indivisible):
    rules = [("kv", "y"), ("embed", "y")]
    assert spec("kv embed", rules, TRIVIAL, (1, 16), indivisible=indivisible) == (None, "y")
    assert reasons("kv embed", rules, TRIVIAL, (1, 16), indivisible=indivisible) == ["size_one_dim", "split"]


def test_8_size_1_is_no_error_under_any_strict_policy():
    rules = [("embed", "y"), ("kv", "y")]
    strict = {"taken": "error", "indivisible": "error", "unmapped": "error", "absent": "error"}
    assert spec("kv embed", rules, TRIVIAL, (1, 16), **strict) == (None, "y")


def test_8_size_1_may_be_held_by_a_size_1_axis():
    assert spec("kv", {"kv": "x"}, TRIVIAL, (1,)) == ("x",)


def test_9_indivisible_is_an_error_even_where_a_later_rule_would_fit():
    with pytest.raises(ar.DivisibilityError):
        spec("a", [("a", ("x", "y")), ("a", "x")], "x=2,y=4", (6,))


def test_9_next_frees_the_axis_for_another_dimension():
    rules = [("a", "y"), ("b", "y")]
    assert spec("a b", rules, "y=4", (6, 8), indivisible="next") == (None, "y")


def test_9_partial_takes_the_longest_leading_part_that_divides():
    assert spec("a", {"a": ("x", "y", "z")}, "x=2,y=3,z=5", (12,), indivisible="partial") == (("x", "y"),)
    assert spec("a", {"a": ("y", "x")}, "x=2,y=3", (4,), indivisible="partial") == (None,)
    assert reasons("a", {"a": ("x", "y")}, "x=2,y=3", (4,), indivisible="partial") == ["partly_divisible"]


def test_9_all_indivisible_dimensions_are_in_one_error():
    with pytest.raises(ar.DivisibilityError) as caught:
        spec("a b", {"a": "x", "b": "y"}, "x=4,y=4", (6, 7))
    assert [failure.dim for failure in caught.value.failures] == [0, 1]


def test_9_a_dimension_of_size_0_divides():
    assert spec("a", {"a": "x"}, "x=4", (0,)) == ("x",)


def test_10_an_absent_axis_is_an_error_with_the_nearest_name():
    with pytest.raises(ar.AbsentAxisError, match="did you mean 'model'") as caught:
        spec("a", {"a": "modl"}, "data=2,model=2")
    assert caught.value.nearest == "model"


def test_10_dropped_axes_are_as_if_not_written():
    rules = [("a", "gone"), ("b", ("gone", "x")), ("a", "x"), ("a", "y")]
    assert spec("a b", rules, "x=2,y=2", absent="drop") == ("y", "x")


def test_10_only_rules_that_are_tried_can_fail():
    assert spec("a", [("a", "x"), ("a", "gone"), ("other", "gone")], "x=2") == ("x",)


def test_11_without_a_mesh_nothing_is_warned_of():
    assert spec("a zzz", {"a": "x"}) == ("x", None)


def test_11_with_a_mesh_an_unmapped_name_warns_each_time_unless_silenced():
    for _ in range(2):
        with pytest.warns(ar.UnmappedAxisWarning, match="'zzz'"):
            assert spec("a zzz", {"a": "x"}, "x=2") == ("x", None)
    assert spec("a zzz", {"a": "x"}, "x=2", unmapped="replicate") == ("x", None)
    with pytest.raises(ar.UnknownNameError):
        spec("a zzz", {"a": "x"}, "x=2", unmapped="error")


def test_11_a_none_rule_is_not_an_unmapped_name():
    assert spec("a", {"a": None}, "x=2", unmapped="error") == (None,)


def test_12_fill_takes_the_largest_whole_dimension_that_divides():
    def filled(names, rules, shape, axes=("data",)):
        sizes = (("data", 4), ("model", 2))
        policy = Policies("next", "next", "error", "replicate")
        return tuple(resolve_array(names, ar.Rules(rules), sizes, shape, policy, fill=axes).spec)

    assert filled((None, "mlp"), {"mlp": "model"}, (8, 32)) == ("data", "model")
    assert filled((None, None), (), (8, 32)) == (None, "data")
    assert filled((None, None), (), (32, 32)) == ("data", None)
    assert filled((None, None), (), (8, 33)) == ("data", None)
    assert filled((None, "mlp"), {"mlp": "data"}, (8, 32)) == (None, "data")
    assert filled((None, "mlp"), {"mlp": None}, (8, 32)) == (None, "data")
    assert filled((None,), (), (64,), ("data", "model")) == (("data", "model"),)
    assert filled((None,), (), (7,)) == (None,)


def test_manual_axes_claim_but_are_left_out_of_the_spec():
    def inside(names, rules, shape, manual):
        sizes, policy = (("x", 4), ("y", 2)), Policies()
        return tuple(resolve_array(names, ar.Rules(rules), sizes, shape, policy, frozenset(manual)).spec)

    assert inside(("a", "b"), {"a": "x", "b": "y"}, (2, 2), {"x"}) == (None, "y")
    assert inside(("a",), {"a": ("x", "y")}, (2,), {"x"}) == ("y",)
    assert inside(("a", "b"), [("a", "x"), ("b", "x"), ("b", "y")], (2, 2), {"x"}) == (None, "y")


def test_policies_are_checked():
    for key in ("taken", "indivisible", "absent", "unmapped"):
        with pytest.raises(ar.PolicyError, match=f"{key}='nonsense'"):
            ar.resolve("a", rules={"a": "x"}, **{key: "nonsense"})


@pytest.mark.parametrize(
    "mesh", ["x=2,y=4", {"x": 2, "y": 4}, AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)]
)
def test_anything_mesh_like_will_do(mesh):
    assert spec("a", {"a": ("x", "y")}, mesh, (16,)) == (("x", "y"),)


def test_the_active_mesh_and_rules_are_used_where_none_are_given():
    with jax.set_mesh(ar.make_mesh("x=2,y=4")), ar.map_logical_axis_names({"a": ("x", "y")}):
        assert tuple(ar.resolve("a", (16,)).spec) == (("x", "y"),)
        with pytest.raises(ar.DivisibilityError):
            ar.resolve("a", (12,))
    assert tuple(ar.resolve("a", (12,), rules={"a": ("x", "y")}).spec) == (("x", "y"),)


def test_the_legacy_mesh_context_counts_as_active():
    mesh = ar.make_mesh("x=2,y=4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh, pytest.raises(ar.DivisibilityError):
            ar.resolve("a", (12,), rules={"a": ("x", "y")})


def test_dots_stand_for_any_number_of_unnamed_dimensions():
    rules = {"a": "x", "b": "y"}
    assert spec("a ... b", rules, shape=(1, 2, 3, 4)) == ("x", None, None, "y")
    assert spec("a ... b", rules, shape=(1, 2)) == ("x", "y")
    assert spec("...", rules, shape=()) == ()
    with pytest.raises(ar.RankError, match="2 names for 1 dimension"):
        spec("a ... b", rules, shape=(1,))


@pytest.mark.parametrize("names", ["", (), []])
def test_a_scalar_has_an_empty_spec(names):
    assert spec(names, {"a": "x"}, "x=2", ()) == ()


def test_a_resolution_explains_itself():
    rules = [
        ("batch", ("data", "model")),
        ("heads", "model"),
        ("mlp", "data"),
        ("mlp", None),
        ("one", "data"),
    ]
    shown = str(
        ar.resolve(
            "batch heads mlp one _ other",
            (16, 8, 6, 1, 3, 2),
            mesh="data=2,model=4",
            rules=rules,
            unmapped="replicate",
        )
    )
    assert shown.splitlines() == [
        "P(('data', 'model'), None, None, None, None, None) for ('batch', 'heads', 'mlp', 'one', None, 'other')",
        "  dimension 0 'batch' of size 16: split over data=2 * model=4 by rule #0 batch -> (data, model)",
        "  dimension 1 'heads' of size 8: whole: rule #1 heads -> model was skipped: dimension 0 holds model",
        "  dimension 2 'mlp' of size 6: whole by rule #3 mlp -> None; rule #2 mlp -> data was skipped: dimension 0 holds data",
        "  dimension 3 'one' of size 1: whole: rule #4 one -> data was skipped: a dimension of size 1 cannot be split",
        "  dimension 4 None of size 3: whole: it has no name",
        "  dimension 5 'other' of size 2: whole: no rule names it",
    ]


def test_partial_and_dropped_rules_are_explained():
    rules = [("a", "x"), ("b", ("x", "y")), ("c", ("z", "w")), ("d", "gone"), ("e", "one"), ("e", None)]
    shown = str(
        ar.resolve("a b c d e", (4, 4, 6, 4, 4), mesh="x=2,y=2,z=3,w=4,one=1", rules=rules,
                   taken="partial", indivisible="partial", absent="drop")
    )  # fmt: skip
    assert shown.splitlines()[1:] == [
        "  dimension 0 'a' of size 4: split over x=2 by rule #0 a -> x",
        "  dimension 1 'b' of size 4: split over y=2 by rule #1 b -> (x, y); rule #1 b -> (x, y) was taken in part: dimension 0 holds x",
        "  dimension 2 'c' of size 6: split over z=3 by rule #2 c -> (z, w); rule #2 c -> (z, w) was taken in part: size 6 divides over z=3 only",
        "  dimension 3 'd' of size 4: whole: rule #3 d -> gone was skipped: the mesh has no axis gone",
        "  dimension 4 'e' of size 4: whole by rule #5 e -> None; one=1, of an earlier rule, has size 1 and splits nothing",
    ]


@pytest.mark.parametrize(
    ("names", "rules", "shape"),
    [("a b", [("a", "y"), ("b", ("x", "y"))], (8, 8)), ("b", [("b", ("x", "y"))], (6,))],
)
def test_a_partly_taken_rule_that_leaves_only_size_1_axes_splits_nothing(names, rules, shape):
    partial = {"taken": "partial", "indivisible": "partial"}
    resolution = ar.resolve(names, shape, mesh=TRIVIAL, rules=rules, **partial)
    assert resolution.dims[-1].reason == "size_one_axis"
    assert "whole: x=1 by rule" in str(resolution).splitlines()[-1]


def test_a_tuple_of_which_neither_part_fits_is_not_said_to_be_taken_in_part():
    rules = [("a", "x"), ("b", ("x", "y"))]
    resolution = ar.resolve("a b", (2, 7), mesh="x=2,y=2", rules=rules, taken="partial", indivisible="next")
    assert [skip.reason for skip in resolution.dims[1].skips] == ["axis_taken", "indivisible"]
    assert str(resolution).splitlines()[2] == (
        "  dimension 1 'b' of size 7: whole: rule #1 b -> (x, y) was skipped: dimension 0 holds x; "
        "rule #1 b -> (x, y) was skipped: size 7 does not divide over y=2"
    )


class Word(enum.StrEnum):
    EMBED = "embed"
    DATA = "data"


def test_enums_of_texts_are_names_and_axes_and_leave_no_trace_in_caches():
    rules = ar.Rules({Word.EMBED: Word.DATA, "mlp": ("model", Word.DATA)})
    for names in [(Word.EMBED, "mlp"), ("embed", "mlp"), [Word.EMBED, "mlp"]]:
        found = ar.logical_to_mesh_axes(names, rules)
        assert found == P("data", None)
        assert type(found[0]) is str
        assert ar.resolve(names, (8, 8), mesh="data=4,model=2", rules=rules).spec == found


def test_fill_does_not_hide_a_name_that_no_rule_mentions():
    tree = {"w": np.zeros((8, 4), np.float32)}
    options = {"mesh": "data=4", "rules": {"embed": "data"}, "fill": "data", "min_bytes": 1}
    with pytest.raises(ar.UnknownNameError, match="did you mean 'embed'"):
        ar.plan(tree, {"w": "embde _"}, unmapped="error", **options)
    with pytest.warns(ar.UnmappedAxisWarning, match="'embde'"):
        ar.plan(tree, {"w": "embde _"}, **options)


def test_a_repeated_name_is_one_error_under_every_policy():
    with pytest.raises(ar.RepeatedNameError) as caught:
        ar.resolve("embed embed", (8, 4), mesh="data=4", rules={"embed": "data"}, unmapped="error")
    assert caught.value.failures == ()


RULES_OF_A = ar.Rules({"a": "x"})


def test_each_raise_is_an_error_of_its_own():
    raised = []
    for _ in range(2):
        with pytest.raises(ar.DivisibilityError) as caught:
            ar.resolve("a", (6,), mesh="x=4", rules=RULES_OF_A)
        raised.append(caught.value)
    assert raised[0] is not raised[1]


@pytest.mark.parametrize("call", [
    lambda: ar.resolve("a", 8, rules=RULES_OF_A),
    lambda: ar.resolve("a", ("x",), rules=RULES_OF_A),
    lambda: ar.resolve("a", (8.5,), rules=RULES_OF_A),
    lambda: ar.resolve("a", "8", rules=RULES_OF_A),
    lambda: ar.resolve("a", rules=RULES_OF_A, taken=["next"]),
    lambda: ar.resolve((np.array([1, 2]),), rules=RULES_OF_A),
    lambda: ar.make_mesh(8),
    lambda: ar.make_mesh([("a", 2)]),
    lambda: ar.plan({}, {}, mesh="x=2", rules=(), fill=5),
    lambda: ar.plan({}, {}, mesh="x=2", rules=(), fill=("x", "x")),
    lambda: ar.plan({}, {}, mesh="x=2", rules=(), min_bytes="1MiB"),
    lambda: ar.plan({}, {}, mesh="x=2", rules=(), dtype="array"),
    lambda: ar.plan({}, {}, mesh="x=2", rules=(), memory_kind="gpu"),
    lambda: ar.NameTable({"a": "x"}, optional="a"),
    lambda: ar.NameTable({"a": "x"}, optional=[["a"]]),
    lambda: ar.plan({"w": np.zeros(8, np.float32)}, {"w": P(1)}, mesh="x=2", rules=()),
])  # fmt: skip
def test_odd_arguments_are_refused_by_axisrules_itself(call):
    with pytest.raises(ar.AxisRulesError):
        call()


def test_the_answer_is_the_same_from_a_worker_thread():
    answers = []
    worker = threading.Thread(
        target=lambda: answers.append(spec("a b", {"a": "x", "b": "y"}, "x=2,y=2", (4, 4)))
    )
    worker.start()
    worker.join()
    assert answers == [("x", "y")]
