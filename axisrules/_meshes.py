"""Anything mesh-like as axis sizes; the active mesh; meshes made from text.

Owns what counts as a mesh. Touches devices only in ``make_mesh``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axisrules import _compat
from axisrules._errors import AbsentAxisError, MeshError, NoMeshError
from axisrules._text import did_you_mean, format_mesh

MeshLike: TypeAlias = "Mesh | AbstractMesh | Mapping[str, int] | str"
Sizes: TypeAlias = tuple[tuple[str, int], ...]

_EXAMPLE = 'write axes with their sizes, like "data=4,model=2".'


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes from text like ``"data=16,model=16"``.

    Raises:
        MeshError: The text does not parse; the message says where.
    """
    sizes: dict[str, int] = {}
    position = 0
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^\s=]+)\s*=\s*(-?\d+)\s*", part)
        if match is None:
            raise MeshError(
                f"cannot read {part.strip()!r} at position {position} of mesh {text!r}", fix=_EXAMPLE
            )
        axis, size = match.group(1), int(match.group(2))
        if axis in sizes:
            raise MeshError(
                f"mesh {text!r} has axis {axis!r} twice, again at position {position}", fix=_EXAMPLE
            )
        sizes[axis] = size
        position += len(part) + 1
    return sizes


def _check_sizes(sizes: Any, smallest: int = 1) -> dict[str, int]:
    if not isinstance(sizes, Mapping):
        raise MeshError(f"{sizes!r} are no mesh axes", fix=_EXAMPLE)
    for axis, size in sizes.items():
        if not isinstance(axis, str) or not axis:
            raise MeshError(f"mesh axis {axis!r} is not a non-empty text", fix=_EXAMPLE)
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not whole or size < smallest or size == 0:
            raise MeshError(
                f"mesh axis {axis!r} has size {size!r}, which is not a positive number", fix=_EXAMPLE
            )
    return {axis: int(size) for axis, size in sizes.items()}


def as_mesh(mesh: MeshLike) -> Mesh | AbstractMesh:
    """A mesh from anything that spells one; text and mappings give an abstract mesh of Auto axes.

    Raises:
        MeshError: It spells none.
        NoMeshError: It has no axis.
    """
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh) if mesh.strip() else {}
    if isinstance(mesh, Mapping):
        mesh = _abstract(tuple(_check_sizes(mesh).items()))
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise MeshError(f"{mesh!r} is no mesh", fix="give a jax Mesh or AbstractMesh, a mapping, or a text.")
    if not mesh.axis_names:
        raise NoMeshError("the mesh has no axes", fix=_HOW_TO_GIVE_ONE)
    return mesh


@lru_cache(maxsize=1024)
def _abstract(sizes: Sizes) -> AbstractMesh:
    axes, lengths = tuple(a for a, _ in sizes), tuple(n for _, n in sizes)
    return AbstractMesh(lengths, axes, axis_types=(AxisType.Auto,) * len(axes))


_HOW_TO_GIVE_ONE = 'pass mesh=axisrules.make_mesh("data=4,model=2"), or enter `with jax.set_mesh(mesh):`.'


def active_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of ``jax.set_mesh`` (abstract inside a trace), else that of a legacy ``with mesh:``."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.axis_names:
        return _compat.legacy_mesh()
    if abstract.manual_axes or _compat.in_trace():
        return abstract
    return _compat.concrete_mesh() or abstract


def need_mesh(mesh: MeshLike | None) -> Mesh | AbstractMesh:
    """The given mesh, else the active one.

    Raises:
        NoMeshError: There is neither.
        MeshError: What was given is no mesh.
    """
    if mesh is not None:
        return as_mesh(mesh)
    active = active_mesh()
    if active is None:
        raise NoMeshError("no mesh was given, and none is active", fix=_HOW_TO_GIVE_ONE)
    return active


def need_devices(mesh: Mesh | AbstractMesh, purpose: str, instead: str) -> None:
    """Refuses a mesh of sizes alone.

    Args:
        mesh: The mesh.
        purpose: What the devices are for, after "the mesh has no devices to".
        instead: What sizes alone suffice for, as a sentence.

    Raises:
        NoMeshError: The mesh has no devices.
    """
    if isinstance(mesh, AbstractMesh):
        raise NoMeshError(
            f"the mesh has no devices to {purpose}",
            fix=f'pass mesh=axisrules.make_mesh("data=4,model=2"); {instead}',
        )


def axis_sizes(mesh: Mesh | AbstractMesh) -> Sizes:
    """The axes with their sizes, in order."""
    sizes: Sizes = mesh.shape_tuple
    return sizes


_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}


def make_mesh(
    axes: str | Mapping[str, int],
    *,
    axis_types: str | AxisType | Mapping[str, str | AxisType] = AxisType.Auto,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of devices whose axis types are always stated.

    Args:
        axes: Sizes by axis name, or text like ``"data=4,model=2"``. One size may be ``-1``: the rest
            of the devices.
        axis_types: ``"auto"`` (the default), ``"explicit"``, ``"manual"``, or a mapping of them by
            axis, in which axes that are left out are Auto.
        devices: The devices, all by default.

    Raises:
        MeshError: The text does not parse, or the sizes do not fit the number of devices.

    Example:
        >>> import axisrules as ar
        >>> ar.make_mesh("data=-1,model=2").shape_tuple
        (('data', 4), ('model', 2))
    """
    sizes = _check_sizes(parse_mesh(axes) if isinstance(axes, str) else axes, smallest=-1)
    if not sizes:
        raise MeshError("a mesh needs an axis", fix=_EXAMPLE)
    found = list(jax.devices() if devices is None else np.ravel(np.asarray(devices, object)))
    sizes = _fill_in(sizes, len(found))
    types = _axis_types(axis_types, sizes)
    count = math.prod(sizes.values())
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=found[:count])


def _fill_in(sizes: dict[str, int], devices: int) -> dict[str, int]:
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    product = math.prod(size for size in sizes.values() if size != -1)
    if len(open_axes) > 1:
        raise MeshError(
            f"axes {open_axes[0]!r} and {open_axes[1]!r} are both -1", fix="leave one to be filled in."
        )
    if open_axes and (devices % product or devices < product):
        raise MeshError(
            f"{format_mesh(sizes)} does not fill {devices} devices: {product} does not divide {devices}",
            fix="choose sizes whose product divides the number of devices.",
        )
    if product > devices:
        raise MeshError(
            f"{format_mesh(sizes)} needs {product} devices, and there are {devices}",
            fix="to plan without devices pass the text itself as mesh=; to simulate devices on a CPU, "
            f'call jax.config.update("jax_num_cpu_devices", {product}) before anything else.',
        )
    return {axis: devices // product if size == -1 else size for axis, size in sizes.items()}


def _axis_types(types: Any, sizes: Mapping[str, int]) -> tuple[AxisType, ...]:
    by_axis = types if isinstance(types, Mapping) else dict.fromkeys(sizes, types)
    for axis in by_axis:
        if axis not in sizes:
            raise MeshError(f"axis_types names {axis!r}, which is no axis{did_you_mean(axis, sizes)}")
    return tuple(_axis_type(by_axis.get(axis, AxisType.Auto)) for axis in sizes)


def _axis_type(value: Any) -> AxisType:
    found = value if isinstance(value, AxisType) else _TYPES.get(str(value).lower())
    if found is None:
        words = ", ".join(map(repr, _TYPES))
        raise MeshError(
            f"axis type {value!r} is unknown{did_you_mean(str(value), _TYPES)}", fix=f"use {words}."
        )
    return found


def create_named_sharding(mesh: MeshLike, *axes: str | tuple[str, ...] | None) -> NamedSharding:
    """A sharding from one entry per dimension: a mesh axis, a tuple of them, or ``None``.

    Without entries the sharding is fully replicated.

    Raises:
        AbsentAxisError: An entry names an axis that the mesh lacks.
        MeshError: An entry is no mesh axis, or an axis stands twice.

    Example:
        >>> import axisrules as ar
        >>> ar.create_named_sharding("data=4,model=2", "data", None).shard_shape((8, 6))
        (2, 6)
    """
    found = as_mesh(mesh)
    used: list[str] = []
    for dim, entry in enumerate(axes):
        if entry is not None and not isinstance(entry, (str, tuple, list)):
            raise MeshError(f"entry {dim} is {entry!r}, which is no mesh axis")
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if axis not in found.axis_names:
                raise AbsentAxisError(
                    f"the mesh has no axis {axis!r}{did_you_mean(axis, found.axis_names)}",
                    dim=dim,
                    axis=axis,
                    mesh=dict(axis_sizes(found)),
                    fix="use an axis of the mesh.",
                )
            if axis in used:
                raise MeshError(f"mesh axis {axis!r} stands twice in {axes!r}", dim=dim, fix="use it once.")
            used.append(axis)
    return NamedSharding(found, PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in axes)))
