"""The engine against Flax Linen, wherever the two are meant to agree: on meshes that divide everything."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import axisrules as ar
from axisrules import testing

NAMES = ("batch", "embed", "mlp", "heads", "vocab")
AXES = ("x", "y", "z", "w")


def axes_of(entry):
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


mesh_without_size_1 = st.permutations(AXES).flatmap(
    lambda axes: st.tuples(*(st.sampled_from([2, 3, 4, 8]) for _ in axes)).map(
        lambda sizes: dict(zip(axes, sizes, strict=True))
    )
)


@st.composite
def resolutions(draw):
    """Names, rules that mostly are for these names, a mesh, and a shape that divides over all of it."""
    names = draw(testing.axis_names(NAMES, min_rank=1))
    rules = draw(testing.rules([*filter(None, names), "batch"], AXES, min_size=3, max_size=10))
    mesh = draw(mesh_without_size_1)
    return names, rules, mesh, draw(testing.shapes(names, mesh, divides="always"))


@given(resolutions())
def test_resolve_on_a_mesh_equals_flax_where_all_divides_and_nothing_has_size_1(given_ones):
    """A differential test: 1,000 examples by default, 10,000 under the profile `thorough`."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed here")
    names, rules, mesh, shape = given_ones
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = linen.logical_to_mesh_axes(names, tuple(rules))
    ours = ar.resolve(names, shape, mesh=mesh, rules=rules, unmapped="replicate").spec
    assert [axes_of(entry) for entry in ours] == [axes_of(entry) for entry in theirs]


def test_the_resolutions_that_are_compared_have_splits_fallbacks_and_conflicts():
    """So that the two do not agree for want of anything to decide."""
    split, skipped = [], []

    @settings(max_examples=200, derandomize=True, database=None)
    @given(resolutions())
    def count(given_ones):
        names, rules, mesh, shape = given_ones
        found = ar.resolve(names, shape, mesh=mesh, rules=rules, unmapped="replicate")
        split.append(any(dim.axes for dim in found.dims))
        skipped.append(any(dim.skips for dim in found.dims))

    count()
    assert sum(split) > 40
    assert sum(skipped) > 10


def test_where_a_size_1_axis_is_involved_flax_leaves_an_axis_idle():
    """The differential test can fail: what it leaves out is where the two differ."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed here")
    rules = (("a", "x"), ("b", ("x", "y")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = linen.logical_to_mesh_axes(("a", "b"), rules)
    ours = ar.resolve(("a", "b"), (8, 8), mesh="x=1,y=8", rules=rules).spec
    assert (tuple(theirs), tuple(ours)) == (("x", None), ("x", "y"))
