"""Corners of the engine and of rules that no other test states."""

import enum
import textwrap

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import _resolve
from axisrules._names import UNCONSTRAINED
from axisrules._policies import Policies
from axisrules._resolution import Dim, Skip
from axisrules._resolve import resolve_array

LENIENT = Policies(indivisible="next", absent="drop")


def filled(rules, shape, mesh, fill, names=(None, "a")):
    """A spec with the reasons, under ``fill``."""
    sizes = None if mesh is None else tuple(mesh.items())
    found = resolve_array(names, ar.Rules(rules), sizes, shape, LENIENT, fill=fill)
    return tuple(found.spec), [dim.reason for dim in found.dims]


# What is skipped, as data.


def test_every_skip_tells_rule_axes_and_cause():
    rules = [("a", "x"), ("b", ("x", "y")), ("b", ("gone", "lost")), ("b", "z"), ("c", "y"), ("c", "t")]
    found = ar.resolve(
        "a b c", (4, 6, 1), mesh="x=2,y=2,z=4,t=1", rules=rules, indivisible="next", absent="drop"
    )
    assert [dim.skips for dim in found.dims] == [
        (),
        (
            Skip(1, ("x", "y"), "axis_taken", "x", 0),
            Skip(2, ("gone", "lost"), "absent_axis", "gone"),
            Skip(3, ("z",), "indivisible"),
        ),
        (Skip(4, ("y",), "size_one_dim"),),
    ]


def test_a_dimension_of_which_every_rule_was_skipped_tells_the_first():
    found = ar.resolve("a b", (4, 4), mesh="x=2,y=2", rules=[("a", "x"), ("b", "x"), ("b", ("y", "x"))])
    skips = (Skip(1, ("x",), "axis_taken", "x", 0), Skip(2, ("y", "x"), "axis_taken", "x", 0))
    assert found.dims[1] == Dim("b", 4, (), "axis_taken", 1, 0, skips)


def test_the_reason_is_that_of_the_rule_that_split_not_of_one_taken_in_part_before():
    rules = [("a", "y"), ("b", ("t", "y")), ("b", "x")]
    found = ar.resolve("a b", (4, 4), mesh="x=2,y=2,t=1", rules=rules, taken="partial")
    skip = Skip(1, ("t", "y"), "partly_taken", "y", 0)
    assert found.dims[1] == Dim("b", 4, ("t", "x"), "split", 2, None, (skip,))


def test_a_tuple_without_the_axis_that_the_mesh_lacks_is_no_skipped_rule():
    found = ar.resolve("a", (8,), mesh="x=2", rules={"a": ("gone", "x")}, absent="drop")
    assert (tuple(found.spec), found.dims[0].reason, found.dims[0].skips) == (("x",), "split", ())


def test_a_rule_of_size_1_axes_that_the_dimension_holds_already_changes_nothing():
    rules = [("a", ("x", "y")), ("a", ("y", "x")), ("a", "x")]
    found = ar.resolve("a", (8,), mesh="x=1,y=1", rules=rules)
    assert (tuple(found.spec), found.dims[0].reason, found.dims[0].rule) == (
        (("x", "y"),),
        "size_one_axis",
        0,
    )
    assert found.dims[0].skips == (Skip(1, ("y", "x"), "nothing_left"), Skip(2, ("x",), "nothing_left"))


def test_partial_divisibility_tries_every_leading_part():
    for size, axes in [(12, ("x", "y")), (4, "x"), (15, None)]:
        found = ar.resolve(
            "a", (size,), mesh="x=2,y=3,z=5", rules={"a": ("x", "y", "z")}, indivisible="partial"
        )
        assert tuple(found.spec) == (axes,)


# What was decided before is not the answer to another question.

PAIRS = [("b", "x"), ("a", ("x", "y")), ("c", "z"), ("a", "gone")]
FIRST = {
    "names": ("a", "b", "c", "d"),
    "shape": (4, 4, 3, 8),
    "mesh": "x=2,y=2,z=2",
    "taken": "next",
    "indivisible": "next",
    "absent": "drop",
    "unmapped": "replicate",
}
OTHER = {
    "names": ("b", "a", "c", "d"),
    "shape": (4, 4, 6, 8),
    "mesh": "x=1,y=2,z=2",
    "taken": "partial",
    "indivisible": "error",
    "absent": "error",
    "unmapped": "error",
}


def answer(rules, **question):
    try:
        return ar.resolve(rules=rules, **question)
    except ar.AxisRulesError as error:
        return type(error)


@pytest.mark.parametrize("what", OTHER)
def test_an_answer_is_not_that_to_another_question(what):
    rules, other = ar.Rules(PAIRS), {**FIRST, what: OTHER[what]}
    before = answer(rules, **FIRST)
    assert answer(rules, **other) == answer(ar.Rules(PAIRS), **other) != before
    assert answer(rules, **FIRST) is before


def test_an_answer_is_not_that_of_other_rules():
    first, other = ar.Rules({"a": "x"}), ar.Rules({"a": "y"})
    question = {"names": "a", "shape": (4,), "mesh": "x=2,y=2"}
    assert [tuple(answer(rules, **question).spec) for rules in (first, other)] == [("x",), ("y",)]


@pytest.mark.parametrize("more", [{"manual": frozenset("x")}, {"fill": ("z",)}])
def test_an_answer_is_not_that_with_manual_axes_or_fill(more):
    rules, question = ar.Rules(PAIRS), {"sizes": (("x", 2), ("y", 2), ("z", 2)), "shape": (4, 6)}
    before = resolve_array(("a", "b"), rules, policy=LENIENT, **question)
    other = resolve_array(("a", "b"), rules, policy=LENIENT, **question, **more)
    assert other == resolve_array(("a", "b"), ar.Rules(PAIRS), policy=LENIENT, **question, **more)
    assert other.spec != before.spec
    assert resolve_array(("a", "b"), rules, policy=LENIENT, **question) is before


def test_a_cache_holds_no_more_than_its_limit(monkeypatch):
    monkeypatch.setattr(_resolve, "_CACHE_LIMIT", 2)
    cache = {}
    for key in range(5):
        _resolve.remember(cache, key, str(key))
        assert len(cache) <= 2
        assert cache[key] == str(key)


# Unconstrained dimensions.


@pytest.mark.parametrize(("manual", "spec"), [("", ("x", "y")), ("x", "y")])
def test_an_unconstrained_dimension_stays_so_in_the_spec_beside_manual_axes_too(manual, spec):
    sizes, names = (("x", 2), ("y", 2)), (UNCONSTRAINED, "a")
    found = resolve_array(names, ar.Rules({"a": ("x", "y")}), sizes, (3, 8), manual=frozenset(manual))
    assert found.spec == P(UNCONSTRAINED, spec)
    assert [(dim.name, dim.reason) for dim in found.dims] == [
        (UNCONSTRAINED, "unconstrained"),
        ("a", "split"),
    ]


# Fill.


def test_fill_over_an_axis_of_size_1_changes_nothing():
    assert filled({}, (8, 8), {"data": 1}, ("data",)) == ((None, None), ["unnamed", "unknown_name"])


def test_fill_over_two_parts_is_fill():
    assert filled({}, (8, 4), {"data": 2}, ("data",)) == (("data", None), ["filled", "unknown_name"])


def test_fill_over_several_axes_is_all_or_nothing():
    mesh = {"data": 4, "model": 2}
    spec, _ = filled({"a": "model"}, (8, 8), mesh, ("data", "model"))
    assert spec == (None, "model")


def test_nothing_is_filled_without_a_mesh_or_a_shape():
    assert filled({"a": "model"}, (8, 8), None, ("data",))[0] == (None, "model")
    assert filled({"a": "model"}, None, {"data": 4, "model": 2}, ("data",))[0] == (None, "model")


def test_the_remedy_for_an_indivisible_dimension_is_filled_as_the_plan_would_be():
    with pytest.raises(ar.DivisibilityError) as caught:
        ar.plan(
            {"w": np.zeros((6, 8), np.float32)},
            {"w": "heads _"},
            mesh="data=4,model=4",
            rules={"heads": "model"},
            fill="data",
            min_bytes=1,
        )
    assert "(then: P(None, 'data'))" in str(caught.value)


# Rules.


def test_rules_that_differ_are_unequal_even_where_their_hashes_are_equal():
    one, other = ar.Rules({"a": "x"}), ar.Rules({"a": "y"})
    assert one != other
    other._hash = one._hash
    assert one != other


def test_enums_of_texts_are_kept_as_plain_texts():
    word = enum.StrEnum("Word", {"EMBED": "embed", "DATA": "data"})
    rules = ar.Rules([(word.EMBED, word.DATA), (word.EMBED, ("model", word.DATA))])
    assert repr(rules) == "Rules([('embed', 'data'), ('embed', ('model', 'data'))])"


def test_rules_that_differ_hash_apart():
    assert len({hash(ar.Rules({"a": axis})) for axis in "xyzw"}) > 1


def test_a_tuple_of_lists_spells_rules_too():
    assert ar.logical_to_mesh_axes("a b", (["a", ["x", "y"]], ["b", None])) == P(("x", "y"), None)


REFUSED = {
    "no pair": (
        [("a", "x"), ("b",)],
        1,
        """
        rule #1 is ('b',), not a pair of a name and mesh axes
          fix:   write pairs like ("embed", "fsdp") or ("batch", ("data", "fsdp")).
        """,
    ),
    "no name": (
        [("", "x")],
        0,
        """
        rule #0 has the name '', which is not a non-empty text
          fix:   a dimension without a name needs no rule; drop this one.
        """,
    ),
    "no axes": (
        [("a", "x"), ("b", 1)],
        1,
        """
        rule #1 maps 'b' to 1, which is not a mesh axis
          fix:   mesh axes are a text, a tuple of texts in order, or None.
        """,
    ),
    "no axis": (
        [("a", ("x", ""))],
        0,
        """
        rule #0 maps 'a' to ('x', ''), in which '' is not a mesh axis
          fix:   every entry of the tuple is a non-empty text.
        """,
    ),
    "an axis twice": (
        [("a", ("x", "y", "x"))],
        0,
        """
        rule #0 maps 'a' to ('x', 'y', 'x'), which has an axis twice
          fix:   write ('x', 'y').
        """,
    ),
    "no rules": (
        "ab",
        None,
        """
        'ab' is no sequence of rules
          fix:   give a mapping like {"embed": "fsdp"} or pairs like [("embed", "fsdp")].
        """,
    ),
}


@pytest.mark.parametrize(("rules", "position", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_rule_is_named_with_its_position_and_a_remedy(rules, position, message):
    with pytest.raises(ar.RulesError) as caught:
        ar.Rules(rules)
    assert str(caught.value) == textwrap.dedent(message).strip()
    assert getattr(caught.value, "rule", None) == position


@pytest.mark.parametrize(
    ("rules", "nearest", "message"),
    [
        (
            {"mlp": "y", "embed": "x"},
            "embed",
            "no rule mentions 'embd'; did you mean 'embed'?\n  fix:   known names: embed, mlp.",
        ),
        ({}, None, "no rule mentions 'embd'\n  fix:   known names: none."),
    ],
)
def test_editing_an_unknown_name_lists_the_known_ones(rules, nearest, message):
    with pytest.raises(ar.RulesError) as caught:
        ar.Rules(rules).drop("embd")
    assert (str(caught.value), caught.value.name, caught.value.nearest) == (message, "embd", nearest)


@pytest.mark.parametrize(("wanted", "where"), [(None, "{}"), ("train", "{} [train]")])
def test_a_malformed_rule_of_a_file_is_named_with_file_set_and_position(tmp_path, wanted, where):
    path = tmp_path / "rules.json"
    path.write_text('{"train": {"rules": [["a", 1]]}}')
    where = where.format(path)
    with pytest.raises(ar.RulesError) as caught:
        ar.Rules.load(path, set=wanted)
    assert str(caught.value).splitlines() == [
        f"{where}: rule #0 maps 'a' to 1, which is not a mesh axis",
        f"  at:    {where}",
        "  fix:   mesh axes are a text, a tuple of texts in order, or None.",
    ]
    assert isinstance(caught.value.__cause__, ar.RulesError)


def test_all_malformed_rules_of_a_file_are_kept_as_data(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text('[["a", 1], ["b", "x"], ["", "x"]]')
    with pytest.raises(ar.RulesError, match="2 problems") as caught:
        ar.Rules.load(path)
    assert [failure.rule for failure in caught.value.failures] == [0, 2]
