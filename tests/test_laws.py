"""The laws of the engine and of plans, on inputs that hypothesis makes."""

import copy
import itertools
import math
import warnings

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from strategies import AXES, NAMES, arrays, meshes, policies, rules, trees

import axisrules as ar
from axisrules._policies import Policies
from axisrules._resolve import resolve_array


def solve(array, rules, mesh, policy):
    names, shape = array
    return ar.resolve(names, shape, mesh=mesh, rules=rules, **policy)


def axes_of(entry):
    return (entry,) if isinstance(entry, str) else entry or ()


def used(spec):
    return [axis for entry in spec for axis in axes_of(entry)]


def abstract(mesh):
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def ways(spec, mesh):
    """How each dimension is cut: the axes that split it, in order."""
    return [tuple(axis for axis in axes_of(entry) if mesh[axis] > 1) for entry in spec]


@given(arrays(), rules, meshes(), policies)
def test_no_mesh_axis_is_used_twice(array, rules, mesh, policy):
    claimed = used(solve(array, rules, mesh, policy).spec)
    assert len(claimed) == len(set(claimed))


@given(arrays(), rules)
def test_no_mesh_axis_is_used_twice_without_a_mesh(array, rules):
    claimed = used(ar.logical_to_mesh_axes(array[0], rules))
    assert len(claimed) == len(set(claimed))


@given(arrays(), rules, meshes(), policies)
def test_jax_accepts_every_spec_and_every_shard_shape(array, rules, mesh, policy):
    resolution = solve(array, rules, mesh, policy)
    sharding = NamedSharding(abstract(mesh), resolution.spec)
    shard = sharding.shard_shape(array[1])
    expected = [
        s // math.prod(mesh[a] for a in axes_of(e)) for s, e in zip(array[1], resolution.spec, strict=True)
    ]
    assert list(shard) == expected


@given(arrays(), rules, meshes(), policies)
def test_rank_is_kept(array, rules, mesh, policy):
    assert len(solve(array, rules, mesh, policy).spec) == len(array[0])
    assert len(ar.logical_to_mesh_axes(array[0], rules)) == len(array[0])


@given(arrays(), rules, meshes(), policies, st.permutations(NAMES))
def test_renaming_names_changes_no_spec(array, rules, mesh, policy, order):
    new = dict(zip(NAMES, order, strict=True)) | {None: None}
    renamed = ar.Rules([(new[name], axes) for name, axes in rules])
    names = tuple(new[name] for name in array[0])
    assert solve(array, rules, mesh, policy).spec == solve((names, array[1]), renamed, mesh, policy).spec


@given(arrays(), rules, meshes(), policies, st.permutations(AXES))
def test_renaming_mesh_axes_renames_the_spec(array, rules, mesh, policy, order):
    new = dict(zip(AXES, order, strict=True))
    renamed = ar.Rules([(name, tuple(new[a] for a in axes_of(axes))) for name, axes in rules])
    sizes = {new[axis]: size for axis, size in mesh.items()}
    before = [tuple(new[a] for a in axes_of(e)) for e in solve(array, rules, mesh, policy).spec]
    after = [axes_of(e) for e in solve(array, renamed, sizes, policy).spec]
    assert before == after


@given(arrays(), rules, meshes(), policies, st.sampled_from(AXES), st.data())
def test_a_rule_for_an_unused_name_changes_nothing(array, rules, mesh, policy, axis, data):
    at = data.draw(st.integers(0, len(rules)))
    pairs = list(rules)
    more = ar.Rules([*pairs[:at], ("absent", axis), *pairs[at:]])
    assert solve(array, rules, mesh, policy).spec == solve(array, more, mesh, policy).spec


@given(arrays(), rules, meshes(), policies, st.sampled_from(["next", "partial", "error"]))
def test_a_mesh_axis_of_size_1_changes_no_shard(array, rules, mesh, policy, indivisible):
    """With it in mesh and rules, or in neither, the arrays are cut alike, or refused alike."""
    policy = policy | {"indivisible": indivisible}
    trivial = [axis for axis in AXES if axis not in mesh]
    assume(trivial)
    more = mesh | dict.fromkeys(trivial, 1)

    def outcome(sizes):
        try:
            return ways(solve(array, rules, sizes, policy).spec, sizes)
        except ar.DivisibilityError as error:
            return {failure.dim for failure in error.failures or [error]}

    assert outcome(mesh) == outcome(more)


@given(arrays(), rules, meshes(), policies)
def test_cached_equals_uncached(array, rules, mesh, policy):
    first = solve(array, rules, mesh, policy)
    assert solve(array, rules, mesh, policy) is first
    fresh = solve(array, ar.Rules(list(rules)), mesh, policy)
    assert fresh == first
    names = array[0]
    assert ar.logical_to_mesh_axes(names, rules) == ar.logical_to_mesh_axes(names, ar.Rules(list(rules)))
    assert ar.logical_to_mesh_axes(names, rules) == ar.logical_to_mesh_axes(names, tuple(rules))


@given(arrays(), rules, meshes(), policies)
def test_the_explanation_equals_the_result(array, rules, mesh, policy):
    """Replaying what the reasons claim, rule by rule, gives the spec."""
    resolution = solve(array, rules, mesh, policy)
    lines = str(resolution).splitlines()[1:]
    assert len(lines) == len(resolution.dims)
    for entry, dim, line in zip(resolution.spec, resolution.dims, lines, strict=True):
        assert axes_of(entry) == dim.axes
        split = any(mesh[axis] > 1 for axis in dim.axes)
        assert split == (dim.reason in {"split", "partly_taken", "partly_divisible"})
        assert ("split over" in line) == split
        for axis in dim.axes:
            assert f"{axis}={mesh[axis]}" in line
        for skip in dim.skips:
            assert f"rule #{skip.rule} {dim.name} -> " in line
            assert list(rules)[skip.rule][0] == dim.name
            if skip.holder is not None:
                assert skip.axis in resolution.dims[skip.holder].axes


@given(arrays(), rules, meshes(), policies)
def test_every_whole_dimension_says_why(array, rules, mesh, policy):
    resolution = solve(array, rules, mesh, policy)
    known = {name for name, _ in rules}
    for dim in resolution.dims:
        if dim.name is None:
            assert dim.reason == "unnamed"
        elif dim.name not in known:
            assert dim.reason == "unknown_name"
        else:
            assert dim.rule is not None
            assert list(rules)[dim.rule][0] == dim.name


@given(arrays(), rules, meshes(), policies)
def test_rules_apply_in_order_as_a_plain_reading_of_the_design_says(array, rules, mesh, policy):
    """A second, slow reading without size-1 axes: same cuts."""
    names, shape = array
    held, cuts, open_dims = {}, [()] * len(names), set(range(len(names)))
    for name, axes in rules:
        if name not in names or names.index(name) not in open_dims:
            continue
        dim = names.index(name)
        if not axes:
            open_dims.discard(dim)
            continue
        wanted = [a for a in axes_of(axes) if mesh.get(a, 1) > 1]
        if not wanted or shape[dim] == 1:
            continue
        if policy["taken"] == "partial":
            wanted = [a for a in wanted if a not in held]
        elif any(a in held for a in wanted):
            continue
        lengths = range(len(wanted), 0, -1) if policy["indivisible"] == "partial" else [len(wanted)]
        fits = [n for n in lengths if n and shape[dim] % math.prod(mesh[a] for a in wanted[:n]) == 0]
        if fits:
            cuts[dim] = tuple(wanted[: fits[0]])
            held |= dict.fromkeys(cuts[dim], dim)
            open_dims.discard(dim)
    assert ways(solve(array, rules, mesh, policy).spec, mesh) == cuts


@given(trees(), rules, meshes())
def test_a_plan_agrees_with_resolve_and_changes_no_input(tree_and_names, rules, mesh):
    tree, names = tree_and_names
    before = copy.deepcopy((tree, names, mesh, list(rules)))
    plan = ar.plan(tree, names, mesh=mesh, rules=rules, **LENIENT)
    leaves = jax.tree.leaves(tree)
    assert len(plan.placements) == len(leaves)
    for placement, leaf in zip(plan.placements, leaves, strict=True):
        assert placement.shape == leaf.shape
        found = ar.resolve(placement.names, leaf.shape, mesh=mesh, rules=rules, **LENIENT)
        assert placement.spec == found.spec
        assert placement.shard_shape == NamedSharding(abstract(mesh), found.spec).shard_shape(leaf.shape)
    assert plan.bytes_per_device == sum(math.prod(p.shard_shape) * p.dtype.itemsize for p in plan.placements)
    after = (tree, names, mesh, list(rules))
    assert jax.tree.structure(after[0]) == jax.tree.structure(before[0])
    assert all(map(np.array_equal, jax.tree.leaves(after[0]), jax.tree.leaves(before[0])))
    assert after[1:] == before[1:]


LENIENT = {"indivisible": "next", "absent": "drop", "unmapped": "replicate"}


@given(arrays(), rules, meshes(), st.sampled_from(AXES))
def test_fill_only_adds_its_axis_to_one_whole_dimension(array, rules, mesh, axis):
    names, shape = array
    assume(axis in mesh)
    sizes, policy = tuple(mesh.items()), Policies("next", "next", "drop", "replicate")
    plain = resolve_array(names, rules, sizes, shape, policy)
    filled = resolve_array(names, rules, sizes, shape, policy, fill=(axis,))
    changed = [
        d
        for d, (a, b) in enumerate(zip(ways(plain.spec, mesh), ways(filled.spec, mesh), strict=True))
        if a != b
    ]
    fitting = [
        d
        for d, cut in enumerate(ways(plain.spec, mesh))
        if not cut and shape[d] and shape[d] % mesh[axis] == 0
    ]
    free = mesh[axis] > 1 and axis not in used(plain.spec)
    assert changed == ([max(fitting, key=lambda d: shape[d])] if free and fitting else [])
    assert all(ways(filled.spec, mesh)[d] == (axis,) for d in changed)


def outcome_of(call):
    try:
        return tuple(call())
    except ar.AxisRulesError as error:
        return type(error)


@given(st.lists(st.sampled_from([*NAMES, None]), max_size=4), rules)
def test_short_form_lists_and_tuples_of_names_agree(names, rules):
    text = " ".join("_" if name is None else name for name in names)
    spellings = (names, tuple(names), text)
    assert len({outcome_of(lambda s=s: ar.logical_to_mesh_axes(s, rules)) for s in spellings}) == 1


@given(rules, rules, st.sampled_from(NAMES), st.sampled_from(AXES))
def test_rules_are_values(one, other, name, axis):
    assert (one == other) == (list(one) == list(other))
    assert one != other or hash(one) == hash(other)
    assert list(one.prepend(other)) == [*other, *one]
    assert list(one.append(other)) == [*one, *other]
    if name in dict(one):
        assert [rule for rule in one.replace(name, axis) if rule[0] == name] == [(name, axis)]
        assert name not in dict(one.drop(name))
    assert list(one) == list(copy.deepcopy(one)) == list(eval(repr(one), {"Rules": ar.Rules}))


def test_flax_resolves_names_alone_alike():
    """Against the installed Flax, over every small rule set of two names and two axes."""
    linen = pytest.importorskip("flax.linen", reason="the extra 'flax' is not promised here")
    choices = [(n, a) for n in "ab" for a in (None, "x", "y", ("x", "y"), ("y", "x"))]
    for count in range(4):
        for some in itertools.product(choices, repeat=count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = linen.logical_to_mesh_axes(("a", "b"), some)
            assert ar.logical_to_mesh_axes(("a", "b"), some) == theirs
