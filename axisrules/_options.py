"""The options of a plan: what they may be, and the active mesh and rules where none are given."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from jax.sharding import AbstractMesh, Mesh

from axisrules import _leaves
from axisrules._errors import AbsentAxisError, PolicyError
from axisrules._meshes import MeshLike, axis_sizes, need_mesh
from axisrules._policies import Policies, policies
from axisrules._rules import Rules, RulesLike
from axisrules._scope import need_rules
from axisrules._text import did_you_mean


class PlanOptions(TypedDict, total=False):
    """The options of ``plan``, which every action takes."""

    mesh: MeshLike | None
    rules: RulesLike | None
    taken: str
    indivisible: str
    absent: str
    unmapped: str
    unnamed: str
    fill: str | tuple[str, ...] | None
    min_bytes: int
    memory_kind: str | None
    dtype: Any


class Options(NamedTuple):
    """The checked options of a plan."""

    mesh: Mesh | AbstractMesh
    rules: Rules
    policy: Policies
    unnamed: str
    fill: tuple[str, ...]
    min_bytes: int
    memory_kind: str | None
    dtype: Any


def make_options(
    *,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
    unnamed: str = "error",
    fill: str | tuple[str, ...] | None = None,
    min_bytes: int = 2**20,
    memory_kind: str | None = None,
    dtype: Any = None,
) -> Options:
    """The options of ``plan``, checked, with the active mesh and rules filled in.

    Raises:
        AxisRulesError: There is no mesh, there are no rules, or an option cannot have its value.
    """
    found = need_mesh(mesh)
    if unnamed not in ("error", "replicate"):
        raise PolicyError(
            f"unnamed={unnamed!r} is no policy{did_you_mean(str(unnamed), ('error', 'replicate'))}",
            fix="pass unnamed='error' or 'replicate'.",
        )
    axes = _fill_axes(fill)
    if not isinstance(min_bytes, int):
        raise PolicyError(f"min_bytes={min_bytes!r} is no number of bytes", fix="pass an int, such as 2**20.")
    for axis in axes:
        if axis not in found.axis_names:
            raise AbsentAxisError(
                f"fill={axis!r} is no axis of the mesh{did_you_mean(axis, found.axis_names)}",
                axis=axis,
                mesh=dict(axis_sizes(found)),
                fix="fill with an axis of the mesh.",
            )
    _check_memory_kind(found, memory_kind)
    policy = policies(taken, indivisible, absent, unmapped)
    cast = _leaves.floating_dtype(dtype)
    return Options(found, need_rules(rules), policy, unnamed, axes, min_bytes, memory_kind, cast)


def _fill_axes(fill: Any) -> tuple[str, ...]:
    axes = (fill,) if isinstance(fill, str) else fill or ()
    good = isinstance(axes, (tuple, list)) and all(isinstance(axis, str) for axis in axes)
    if not good or len(set(axes)) < len(axes):
        raise PolicyError(f"fill={fill!r} is no mesh axis", fix='pass fill="data", or a tuple of axes.')
    return tuple(axes)


_MEMORY_KINDS = ["device", "pinned_host", "unpinned_host"]


def _check_memory_kind(mesh: Mesh | AbstractMesh, kind: str | None) -> None:
    if kind is None:
        return
    known = _MEMORY_KINDS
    if isinstance(mesh, Mesh):
        known = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
    if kind not in known:
        raise PolicyError(
            f"the devices of the mesh have no memory {kind!r}{did_you_mean(str(kind), known)}",
            fix=f"their memories: {', '.join(known)}.",
        )
