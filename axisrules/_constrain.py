"""``constrain``: the layout of values inside and outside of jit.

Owns which JAX call expresses a constraint on Auto, Explicit, mixed and Manual axes, and the errors
for what JAX cannot express. Decides no layout.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axisrules import _compat, _leaves
from axisrules._entries import find_entries
from axisrules._errors import (
    AxisRulesError,
    ConstraintError,
    LeafError,
    MissingNamesError,
    NoMeshError,
    raise_all,
)
from axisrules._meshes import MeshLike, axis_sizes, need_mesh
from axisrules._names import UNCONSTRAINED, fit_names, parse_names
from axisrules._policies import Policies, policies
from axisrules._resolution import Resolution
from axisrules._resolve import resolve_array
from axisrules._rules import Rules, RulesLike
from axisrules._scope import need_rules
from axisrules._single import warn_unmapped
from axisrules._specs import check_spec, make_spec
from axisrules._trees import NO_ENTRY, flatten

AnyMesh = Mesh | AbstractMesh


def constrain(
    tree: Any,
    names: Any,
    *,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
) -> Any:
    """Lays arrays out where the rules say, inside jit and outside.

    On Auto axes this is ``jax.lax.with_sharding_constraint``, on Explicit axes
    ``jax.sharding.reshard``, and outside jit ``jax.device_put``. Inside ``shard_map`` manual axes
    are left out of the spec. A dimension may be left open with ``PartitionSpec.UNCONSTRAINED``
    (short form ``*``): the compiler chooses, and outside jit it stays as it is.

    Args:
        tree: An array or a tree of arrays.
        names: Axis names of the array, or names in any form that ``plan`` takes.
        mesh: The mesh; by default the active one.
        rules: The rules; by default the active ones.
        taken: As in ``resolve``.
        indivisible: As in ``resolve``.
        absent: As in ``resolve``.
        unmapped: As in ``resolve``, but a warning comes once per rules and name.

    Returns:
        A tree like the input.

    Raises:
        NoMeshError, NoRulesError: There is no mesh, or there are no rules.
        ConstraintError: JAX cannot express the constraint.
        AxisRulesError: Something does not fit; every failure of the tree is in the one error.

    Example:
        >>> import axisrules as ar, jax, jax.numpy as jnp
        >>> @jax.jit
        ... def double(x):
        ...     return ar.constrain(2 * x, "batch embed")
        >>> with jax.set_mesh(ar.make_mesh("data=4,model=2")), ar.map_logical_axis_names(
        ...     {"batch": "data", "embed": "model"}
        ... ):
        ...     double(jnp.ones((8, 6))).addressable_shards[0].data.shape
        (2, 3)
    """
    found = _mesh_here(need_mesh(mesh))
    flat = flatten(tree)
    entries = find_entries(tree, flat, names)
    job = _Job(found, need_rules(rules), policies(taken, indivisible, absent, unmapped))
    works, failures = [], list(entries.problems)
    for path, leaf, entry in zip(flat.paths, flat.leaves, entries.entries, strict=True):
        try:
            works.append(_work(job, leaf, entry))
        except AxisRulesError as error:
            failures += [one.at([path] if path else []) for one in error.failures or [error]]
    raise_all(failures)
    if job.policy.unmapped == "warn":
        _warn_once(job.rules, [work.resolution for work in works if work is not None])
    return flat.rebuild([
        leaf if work is None else work.lay_out(leaf)
        for leaf, work in zip(flat.leaves, works, strict=True)
    ])  # fmt: skip


class _Job(NamedTuple):
    mesh: AnyMesh
    rules: Rules
    policy: Policies


class _Work(NamedTuple):
    mesh: AnyMesh
    resolution: Resolution
    dtype: Any

    def lay_out(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):  # a copy, which JAX may take over, in a dtype that it holds
            leaf = np.array(leaf, dtype=self.dtype)
        return lay_out(leaf, self.mesh, self.resolution.spec)


def _mesh_here(mesh: AnyMesh) -> AnyMesh:
    """The mesh as the surrounding trace knows it: inside ``shard_map`` that one has Manual axes."""
    here = jax.sharding.get_abstract_mesh()
    if not here.manual_axes:
        return mesh
    if here.shape_tuple != mesh.shape_tuple:
        raise ConstraintError(
            "inside shard_map a constraint can only use the mesh of the shard_map",
            mesh=dict(axis_sizes(here)),
            fix="leave out mesh=, or pass the same mesh.",
        )
    return here


def _work(job: _Job, leaf: Any, entry: Any) -> _Work | None:
    """The resolution of one leaf, or ``None`` for what passes through."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise LeafError(
            "a ShapeDtypeStruct has no values to lay out",
            shape=leaf.shape,
            fix="axisrules.plan(...).abstract gives it a sharding.",
        )
    described = _leaves.describe(leaf)
    if described is None:
        return None
    shape, manual = described.shape, frozenset(manual_axes(job.mesh))
    sizes = axis_sizes(job.mesh)
    if isinstance(entry, PartitionSpec):
        kept = entry if not manual else _without(entry, manual)
        resolution = check_spec(kept, job.rules, sizes, shape, unconstrained=True)
    else:
        names = entry_names(entry, shape)
        resolution = resolve_array(names, job.rules, sizes, shape, job.policy, manual)
    raise_all(resolution.problems)
    check_expressible(job.mesh, resolution.spec, traced=_compat.in_trace())
    return _Work(job.mesh, resolution, described.dtype)


def entry_names(entry: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The names of one array from its entry; a constraint may leave dimensions open."""
    if entry is None or (entry is NO_ENTRY and not shape):
        return (None,) * len(shape)
    if entry is NO_ENTRY:
        raise MissingNamesError(
            "1 array has no names", shape=shape, fix="add its names; None leaves it whole."
        )
    return fit_names(parse_names(entry, unconstrained=True), shape)


class _Warned(threading.local):
    def __init__(self) -> None:
        self.names: set[tuple[Rules, str]] = set()


_WARNED = _Warned()


def _warn_once(rules: Rules, resolutions: Sequence[Resolution]) -> None:
    unknown = dict.fromkeys(name for one in resolutions for name in one.unknown_names)
    new = [name for name in unknown if (rules, name) not in _WARNED.names]
    if new:
        _WARNED.names.update((rules, name) for name in new)
        warn_unmapped(new, rules)


# What JAX can express, and how.


def manual_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes that a surrounding ``shard_map`` handles."""
    return _of_type(mesh, AxisType.Manual)


def _of_type(mesh: AnyMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, its in pairs if its == kind)


def check_expressible(mesh: AnyMesh, spec: PartitionSpec, *, traced: bool) -> None:
    """Refuses a constraint that JAX cannot express.

    Raises:
        ConstraintError: See the message.
        NoMeshError: A value outside of jit needs a mesh with devices.
    """
    auto, explicit = _of_type(mesh, AxisType.Auto), _of_type(mesh, AxisType.Explicit)
    facts: dict[str, Any] = {"mesh": dict(axis_sizes(mesh)), "spec": spec}
    if UNCONSTRAINED in tuple(spec) and explicit and not auto:
        raise ConstraintError(
            f"dimension {tuple(spec).index(UNCONSTRAINED)} is unconstrained, "
            "and every axis of the mesh is Explicit",
            fix="name the dimension or write None: on Explicit axes a layout is part of the type.",
            **facts,
        )
    if not traced:
        if isinstance(mesh, AbstractMesh):
            raise NoMeshError("the mesh has no devices", fix="pass the mesh of axisrules.make_mesh.", **facts)
        return
    here = jax.sharding.get_abstract_mesh()
    if explicit and (here.shape_tuple != mesh.shape_tuple or here.axis_types != mesh.axis_types):
        raise ConstraintError(
            "a mesh with Explicit axes has to be the mesh of the trace",
            fix="call the jitted function inside `with jax.set_mesh(mesh):`.",
            **facts,
        )
    sizes = dict(axis_sizes(mesh))
    for dim, entry in enumerate(spec):
        split = [axis for axis in _axes(entry) if sizes[axis] > 1]
        kinds = [axis in explicit for axis in split]
        if kinds != sorted(kinds, reverse=True):
            raise ConstraintError(
                f"dimension {dim} goes over {tuple(split)!r}: an Auto axis before an Explicit one",
                dim=dim,
                fix="inside jit JAX can only put Explicit axes before Auto ones: "
                "reorder the tuple, or give the axes one type.",
                **facts,
            )


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def only_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The spec without any other axes; open dimensions stay open."""
    return make_spec(tuple(
        entry if entry is UNCONSTRAINED else tuple(a for a in _axes(entry) if a in axes)
        for entry in spec
    ))  # fmt: skip


def _without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The spec without some axes; open dimensions stay open."""
    used = [axis for entry in spec for axis in _axes(entry) if axis not in axes]
    return only_axes(spec, used)


def lay_out(leaf: Any, mesh: AnyMesh, spec: PartitionSpec) -> Any:
    """One value where the spec says, by the JAX call that its mesh and its kind need."""
    if not _compat.in_trace():
        return _lay_out_array(leaf, mesh, spec)
    leaf = jnp.asarray(leaf)
    auto, explicit = _of_type(mesh, AxisType.Auto), _of_type(mesh, AxisType.Explicit)
    if not auto and not explicit:
        return leaf  # every axis is Manual: nothing is left to say
    if not explicit:
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(_compat.constraint_mesh(mesh), spec))
    if not auto:
        return jax.sharding.reshard(leaf, spec)
    typed = _keep_open(only_axes(spec, explicit), jax.typeof(leaf).sharding.spec, explicit)
    return _lay_out_mixed(leaf, mesh=mesh, typed=typed, rest=only_axes(spec, auto))


@partial(jax.jit, static_argnames=("mesh", "typed", "rest"))
def _lay_out_mixed(leaf: Any, *, mesh: AnyMesh, typed: PartitionSpec, rest: PartitionSpec) -> Any:
    """The two calls of a mixed mesh in one jit: one by one, the second would drop the first."""
    sharding = NamedSharding(_compat.constraint_mesh(mesh), rest)
    return jax.lax.with_sharding_constraint(jax.sharding.reshard(leaf, typed), sharding)


def _lay_out_array(leaf: Any, mesh: AnyMesh, spec: PartitionSpec) -> Any:
    if UNCONSTRAINED in tuple(spec):
        own = leaf.sharding.spec if isinstance(getattr(leaf, "sharding", None), NamedSharding) else ()
        spec = _keep_open(spec, own, mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    return jax.device_put(leaf, sharding)


def _keep_open(spec: PartitionSpec, own: Sequence[Any], axes: Sequence[str]) -> PartitionSpec:
    """The spec with every open dimension as it is now, but for axes that another one takes."""
    used = {axis for entry in spec for axis in _axes(entry)}
    known = (*own, *[None] * (len(spec) - len(own)))
    free = [tuple(axis for axis in _axes(mine) if axis in axes and axis not in used) for mine in known]
    pairs = zip(spec, free, strict=True)
    return make_spec(tuple(kept if entry is UNCONSTRAINED else _axes(entry) for entry, kept in pairs))
