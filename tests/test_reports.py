"""Inputs after public bug reports: the right outcome, or an error that names what is wrong."""

import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar

REPORTS = {one["id"]: one for one in json.loads((Path(__file__).parent / "data/reports.json").read_text())}
RUNS = [
    pytest.param(one, run, id=f"{one['id']}-{number}")
    for one in REPORTS.values()
    if one["call"] in ("resolve", "shard_tree", "constraint", "init")
    for number, run in enumerate(one["expect"])
]
ERRORS = {
    "repeated_name": ar.RepeatedNameError,
    "unknown_name": ar.UnknownNameError,
    "no_mesh": ar.NoMeshError,
    "indivisible": ar.DivisibilityError,
    "names_missing": ar.MissingNamesError,
    "rank_mismatch": ar.RankError,
    "unconstrained_not_placeable": ar.UnconstrainedError,
    "too_much_replicated": ar.LayoutError,
}


def nest(flat):
    """A nested dict from paths."""
    root = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        at = root
        for segment in above:
            at = at.setdefault(segment, {})
        at[last] = value
    return root


def leaf(path, described):
    if described["shape"] is None:
        return print  # a callable
    size = int(np.prod(described["shape"]))
    values = np.arange(size) % 251
    return values.reshape(described["shape"]).astype(described["dtype"])


def params_and_names(one):
    """The tree with ties as one object, and names in the form that the report asks for."""
    leaves = {path: leaf(path, described) for path, described in one["tree"].items()}
    for first, *others in one.get("tied", []):
        leaves.update(dict.fromkeys(others, leaves[first]))
    if "path_rules" in one:
        return nest(leaves), ar.NameTable([(p, tuple(n)) for p, n in one["path_rules"]])
    names = {path: d["names"] for path, d in one["tree"].items() if d["names"] is not None}
    names = {path: edited(names[path], one.get("op")) for path in names}
    given = {path: tuple(P.UNCONSTRAINED if n == "*" else n for n in ns) for path, ns in names.items()}
    return nest(leaves), nest(given)


def edited(names, op):
    if op is None:
        return names
    (kind, (axis, name)) = next(iter(op.items()))
    assert kind == "push_axis"
    return [*names[:axis], name, *names[axis:]]


def spec_of(entries):
    return P(
        *(
            P.UNCONSTRAINED if e == "UNCONSTRAINED" else tuple(e) if isinstance(e, list) else e
            for e in entries
        )
    )


def meshes_of(one):
    """The mesh of a report, and where it states no axis types, one of every kind, that of Auto axes first."""
    if not one["mesh"]:
        return [{}]
    if "mesh_axis_types" in one:
        types = {axis: kind.lower() for axis, kind in one["mesh_axis_types"].items()}
        return [ar.make_mesh(one["mesh"], axis_types=types)]
    return [mesh_of(axis_types, one["mesh"]) for axis_types in AXIS_TYPES]


def perform(one, run):
    """Specs by path, and the plan where there is one."""
    options = dict(run["options"])
    replicated, manual = options.pop("max_replicated", None), options.pop("manual_axes", None)
    params, names = params_and_names(one)
    rules = ar.Rules([(n, tuple(a) if isinstance(a, list) else a) for n, a in one["rules"]])
    if one["call"] == "constraint":
        return constrained(one, params, names, rules, options, manual), None
    if one["call"] == "init":
        return born(one, run, params, names, rules, options), None
    plan = ar.plan(
        params, names, mesh=one["mesh"], rules=rules, **{k: v for k, v in options.items() if k != "donate"}
    )
    plan.check(max_replicated=replicated)
    specs = {placement.path: placement.spec for placement in plan.placements}
    if one["call"] == "shard_tree":
        for mesh in meshes_of(one):
            placed(one, params, names, rules, options, plan, mesh)
            params, names = params_and_names(one)  # what was donated is gone
    return specs, plan


def placed(one, params, names, rules, options, plan, mesh):
    result = ar.shard_tree(params, names, mesh=mesh, rules=rules, **options)
    leaves = {
        "/".join(str(k.key) for k in key): value
        for key, value in jax.tree_util.tree_flatten_with_path(result)[0]
    }
    for placement in plan.placements:
        array = leaves[placement.path]
        assert array.sharding == NamedSharding(mesh, placement.spec)
    again = ar.shard_tree(result, names, mesh=mesh, rules=rules, **options)
    assert all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(again), strict=True))
    for same in one.get("tied", []):
        assert len({id(leaves[path]) for path in same}) == 1
    if one.get("source") == "host numpy":
        sizes = {s.data.nbytes for a in jax.tree.leaves(result) for s in a.addressable_shards}
        expected = [run["device0_bytes"] for run in one["expect"] if "device0_bytes" in run]
        assert not expected or sizes == set(expected)


def born(one, run, params, names, rules, options):
    """Specs of the parameters that `init` makes, and of the optimizer state that it makes of them."""
    mesh = meshes_of(one)[0]

    def make():
        return jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape).astype(x.dtype), params)

    made = ar.init(make, names, mesh=mesh, rules=rules, **options)
    found = by_path(made)
    if "max_out_mib" in run:
        (sharding,) = [leaf.sharding for leaf in found.values()]
        memory = jax.jit(make, out_shardings={"w": sharding}).lower().compile().memory_analysis()
        assert memory.temp_size_in_bytes <= run["max_temp_mib"] * 2**20
        assert {s.data.nbytes for s in found["w"].addressable_shards} == {run["max_out_mib"] * 2**20}
    if "optimizer" in one:
        found.update(by_path({"opt": born_state(one, params, made, names, mesh, rules)}))
    assert all(leaf.sharding.mesh == mesh for leaf in found.values())
    return {path: leaf.sharding.spec for path, leaf in found.items() if path in run["specs"]}


def born_state(one, params, made, names, mesh, rules):
    optax = pytest.importorskip("optax")
    optimizer = getattr(optax, one["optimizer"])(1e-3)
    rules = ar.Rules(one["optimizer_rules"]) if "optimizer_rules" in one else rules
    source = params if one.get("source") == "host numpy" else made
    initialize = jax.jit(optimizer.init) if one.get("jit") else optimizer.init
    state_names = ar.state_names(jax.eval_shape(optimizer.init, source), source, names)
    state = ar.init(lambda: initialize(source), state_names, mesh=mesh, rules=rules)
    updates, after = jax.jit(optimizer.update)(jax.tree.map(jax.numpy.ones_like, made), state, made)
    stepped = jax.jit(optax.apply_updates, out_shardings=jax.tree.map(lambda x: x.sharding, made))(
        made, updates
    )
    for before, now in zip(jax.tree.leaves((made, state)), jax.tree.leaves((stepped, after)), strict=True):
        assert now.sharding.is_equivalent_to(before.sharding, now.ndim)
    return state


def by_path(tree):
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in key): leaf
            for key, leaf in found}  # fmt: skip


def constrained(one, params, names, rules, options, manual):
    mesh = ar.make_mesh(one["mesh"])

    def inside(tree):
        return ar.constrain(tree, names, rules=rules, **options)

    (path,) = one["tree"]
    with jax.set_mesh(mesh):
        if manual:
            spec = P(*[one["rules"][d][1] if one["rules"][d][1] in manual else None for d in range(2)])
            run = jax.jit(jax.shard_map(inside, in_specs=spec, out_specs=spec, axis_names=set(manual)))
        else:
            run = jax.jit(inside)
        result = run(params)
    return {path: result[path]}


@pytest.mark.parametrize(("one", "run"), RUNS)
def test_reported_input_has_the_right_outcome(one, run):
    if "error" in run:
        with pytest.raises(ERRORS[run["error"]]) as caught:
            perform(one, run)
        for word in run["mentions"]:
            assert word in str(caught.value)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specs, plan = perform(one, run)
    if one["call"] == "init":
        assert specs == {path: spec_of(entries) for path, entries in run["specs"].items()}
        return
    if plan is None:
        ((path, array),) = specs.items()
        assert_lies_as(array, spec_of(run["specs"][path]), one, run)
        return
    assert specs == {path: spec_of(entries) for path, entries in run["specs"].items()}
    assert_report(plan, run)


def assert_lies_as(array, spec, one, run):
    mesh = ar.make_mesh(one["mesh"])
    manual = run["options"].get("manual_axes", ())
    entries = list(spec)
    if manual:  # outside of shard_map its axes are back in their places
        entries = [
            rule[1] if rule[1] in manual else entry for rule, entry in zip(one["rules"], spec, strict=True)
        ]
    fixed = [dim for dim, entry in enumerate(entries) if entry is not P.UNCONSTRAINED]
    shards = array.sharding.shard_shape(array.shape)
    expected = NamedSharding(mesh, P(*(None if e is P.UNCONSTRAINED else e for e in entries))).shard_shape(
        array.shape
    )
    assert [shards[dim] for dim in fixed] == [expected[dim] for dim in fixed]


def assert_report(plan, run):
    for wanted in run.get("report", []):
        wanted = dict(wanted)
        if "holder_dim" in wanted:
            wanted["holder"] = wanted.pop("holder_dim")
        assert any(all(getattr(row, k) == v for k, v in wanted.items()) for row in plan.report), wanted
    unused = [row.name for row in plan.report if row.reason == "unused_rule"]
    assert unused == run.get("unused_rules", unused)
