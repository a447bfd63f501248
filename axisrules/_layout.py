"""The JAX calls that lay a value out, by the kind of its mesh.

Owns which call expresses a layout on Auto, Explicit, mixed and Manual axes, and the errors for what
JAX cannot express. Decides no layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axisrules import _compat
from axisrules._errors import ConstraintError, NoMeshError
from axisrules._meshes import axis_sizes
from axisrules._names import UNCONSTRAINED
from axisrules._specs import axes_of, make_spec

AnyMesh = Mesh | AbstractMesh


def mesh_here(mesh: AnyMesh) -> AnyMesh:
    """The mesh as the surrounding trace knows it.

    Inside ``shard_map`` that one has Manual axes; ``auto_axes`` and ``explicit_axes`` of JAX change its
    types too.
    """
    here = jax.sharding.get_abstract_mesh()
    if not here.manual_axes:
        if not isinstance(mesh, AbstractMesh):
            changed = here.axis_types != mesh.axis_types and mesh == _compat.concrete_mesh()
            return here if changed and _compat.in_trace() else mesh
        if here.shape_tuple != mesh.shape_tuple:
            return mesh
        # sizes without devices stand for the active mesh of those sizes
        return here if _compat.in_trace() else _compat.concrete_mesh() or here
    if here.shape_tuple != mesh.shape_tuple:
        raise ConstraintError(
            "inside shard_map a constraint can only use the mesh of the shard_map",
            mesh=dict(axis_sizes(here)),
            fix="leave out mesh=, or pass the same mesh.",
        )
    return here


def manual_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes that a surrounding ``shard_map`` handles."""
    return _of_type(mesh, AxisType.Manual)


def _of_type(mesh: AnyMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, its in pairs if its == kind)


def mesh_of(leaf: Any) -> Any:
    """The mesh that the value's type names, if one."""
    sharding = getattr(jax.typeof(leaf), "sharding", None) if isinstance(leaf, jax.Array) else None
    return getattr(sharding, "mesh", None)


def with_auto_axes(mesh: AnyMesh) -> Any:
    """The mesh with Auto axes alone.

    On Explicit axes every value has a layout of its own, whole unless said otherwise: each device
    would make the whole of a new array, with other bits than on Auto axes.
    """
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def check_expressible(mesh: AnyMesh, spec: PartitionSpec, *, traced: bool, known: Any = None) -> None:
    """Refuses a constraint that JAX cannot express.

    Args:
        mesh: The mesh.
        spec: What it asks for.
        traced: Whether JAX is tracing.
        known: The mesh that the value's type names, if one.

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
    _check_mesh_of_trace(mesh, known, facts)
    here = jax.sharding.get_abstract_mesh()
    if explicit and (here.shape_tuple != mesh.shape_tuple or here.axis_types != mesh.axis_types):
        raise ConstraintError(
            "a mesh with Explicit axes has to be the mesh of the trace",
            fix="call the jitted function inside `with jax.set_mesh(mesh):`; "
            "in a function given to axisrules.init leave the constraint out, its result is laid out anyway.",
            **facts,
        )
    sizes = dict(axis_sizes(mesh))
    for dim, entry in enumerate(spec):
        split = [axis for axis in axes_of(entry) if sizes[axis] > 1]
        kinds = [axis in explicit for axis in split]
        if kinds != sorted(kinds, reverse=True):
            raise ConstraintError(
                f"dimension {dim} goes over {tuple(split)!r}: an Auto axis before an Explicit one",
                dim=dim,
                fix="inside jit JAX can only put Explicit axes before Auto ones: "
                "reorder the tuple, or give the axes one type.",
                **facts,
            )


def _check_mesh_of_trace(mesh: AnyMesh, known: Any, facts: dict[str, Any]) -> None:
    """Refuses a mesh that the trace could not lay anything out on."""
    here = jax.sharding.get_abstract_mesh()
    devices = here if here.axis_names else known
    if isinstance(mesh, AbstractMesh) and (devices is None or devices.size != mesh.size):
        raise NoMeshError(
            "the mesh has no devices, and no mesh of its size is active",
            fix="pass the mesh of axisrules.make_mesh, or enter `with jax.set_mesh(mesh):`.",
            **facts,
        )
    active = _compat.concrete_mesh()
    other_devices = (
        isinstance(mesh, Mesh)
        and active is not None
        and not np.array_equal(mesh.device_ids, active.device_ids)
    )
    if AxisType.Explicit in here.axis_types and (other_devices or here.axis_types != mesh.axis_types):
        raise ConstraintError(
            "another mesh, which has Explicit axes, is the mesh of the trace",
            fix="leave out mesh=, or call the jitted function inside `with jax.set_mesh(mesh):`.",
            **facts,
        )


def only_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The spec without any other axes; open dimensions stay open."""
    return make_spec(tuple(
        entry if entry is UNCONSTRAINED else tuple(a for a in axes_of(entry) if a in axes)
        for entry in spec
    ))  # fmt: skip


def without_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The spec without some axes; open dimensions stay open."""
    used = [axis for entry in spec for axis in axes_of(entry) if axis not in axes]
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
        return _typed(jax.sharding.reshard(leaf, spec), spec)
    typed = _keep_open(only_axes(spec, explicit), jax.typeof(leaf).sharding.spec, explicit)
    return _lay_out_mixed(leaf, mesh=mesh, typed=typed, rest=only_axes(spec, auto))


def _typed(value: Any, spec: PartitionSpec) -> Any:
    """The value, if its type has taken on the spec: outside of jit some versions do nothing."""
    found = tuple(jax.typeof(value).sharding.spec)
    if found + (None,) * (len(spec) - len(found)) != tuple(spec):
        raise ConstraintError(
            "this version of JAX does not lay out Explicit axes in a shard_map outside of jit",
            spec=spec,
            fix="call the function that holds the shard_map through jax.jit.",
        )
    return value


@partial(jax.jit, static_argnames=("mesh", "typed", "rest"))
def _lay_out_mixed(leaf: Any, *, mesh: AnyMesh, typed: PartitionSpec, rest: PartitionSpec) -> Any:
    """The two calls of a mixed mesh in one jit: one by one, the second would drop the first."""
    sharding = NamedSharding(_compat.constraint_mesh(mesh), rest)
    return jax.lax.with_sharding_constraint(jax.sharding.reshard(leaf, typed), sharding)


def _lay_out_array(leaf: Any, mesh: AnyMesh, spec: PartitionSpec) -> Any:
    if UNCONSTRAINED in tuple(spec):
        own = leaf.sharding.spec if isinstance(getattr(leaf, "sharding", None), NamedSharding) else ()
        spec = _keep_open(spec, own, mesh.axis_names)
        spec = _only_dividing(spec, mesh, leaf.shape)
    sharding = NamedSharding(mesh, spec)
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    return jax.device_put(_compat.movable(leaf, sharding.mesh), sharding)


def _only_dividing(spec: PartitionSpec, mesh: AnyMesh, shape: Sequence[int]) -> PartitionSpec:
    """The spec without the entries that do not divide: those of open dimensions, on another mesh."""
    sizes = dict(axis_sizes(mesh))

    def fits(axes: Sequence[str], size: int) -> bool:
        return size % math.prod(sizes[axis] for axis in axes) == 0

    held = zip(map(axes_of, spec), shape, strict=True)
    return make_spec(tuple(axes if fits(axes, size) else () for axes, size in held))


def _keep_open(spec: PartitionSpec, own: Sequence[Any], axes: Sequence[str]) -> PartitionSpec:
    """The spec with every open dimension as it is now, but for axes that another one takes."""
    used = {axis for entry in spec for axis in axes_of(entry)}
    known = (*own, *[None] * (len(spec) - len(own)))
    free = [tuple(axis for axis in axes_of(mine) if axis in axes and axis not in used) for mine in known]
    pairs = zip(spec, free, strict=True)
    return make_spec(tuple(kept if entry is UNCONSTRAINED else axes_of(entry) for entry, kept in pairs))
