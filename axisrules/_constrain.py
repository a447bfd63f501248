"""``constrain``: the layout of values inside and outside of jit.

Owns which JAX call expresses a constraint on Auto, Explicit, mixed and Manual axes, and the errors
for what JAX cannot express. Decides no layout.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from axisrules import _compat, _leaves
from axisrules._entries import find_entries
from axisrules._errors import (
    AxisRulesError,
    LeafError,
    MissingNamesError,
    raise_all,
)
from axisrules._layout import (
    AnyMesh,
    check_expressible,
    lay_out,
    manual_axes,
    mesh_here,
    mesh_of,
    without_axes,
)
from axisrules._meshes import MeshLike, axis_sizes, need_mesh
from axisrules._names import fit_names, parse_names
from axisrules._policies import Policies, policies
from axisrules._resolution import Resolution
from axisrules._resolve import resolve_array
from axisrules._rules import Rules, RulesLike
from axisrules._scope import need_rules
from axisrules._single import warn_unmapped
from axisrules._specs import check_spec
from axisrules._trees import NO_ENTRY, flatten


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
    found = mesh_here(need_mesh(mesh))
    flat = flatten(tree)
    entries = find_entries(tree, flat, names)
    job = _Job(found, need_rules(rules), policies(taken, indivisible, absent, unmapped))
    works, failures = [], list(entries.problems)
    for path, leaf, entry in zip(flat.paths, flat.leaves, entries.entries, strict=True):
        try:
            works.append(_work(job, leaf, entry))
        except AxisRulesError as error:
            failures += error.singles_at(path)
    raise_all(failures)
    if job.policy.unmapped == "warn":
        warn_once(job.rules, [work.resolution for work in works if work is not None])
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
        kept = entry if not manual else without_axes(entry, manual)
        resolution = check_spec(kept, job.rules, sizes, shape, unconstrained=True)
    else:
        names = entry_names(entry, shape, unconstrained=True)
        resolution = resolve_array(names, job.rules, sizes, shape, job.policy, manual)
    raise_all(resolution.problems)
    check_expressible(job.mesh, resolution.spec, traced=_compat.in_trace(), known=mesh_of(leaf))
    return _Work(job.mesh, resolution, described.dtype)


def entry_names(entry: Any, shape: tuple[int, ...], *, unconstrained: bool = False) -> tuple[Any, ...]:
    """The names of one array from its entry."""
    if entry is None or (entry is NO_ENTRY and not shape):
        return (None,) * len(shape)
    if entry is NO_ENTRY:
        raise MissingNamesError(
            "1 array has no names", shape=shape, fix="add its names; None leaves it whole."
        )
    return fit_names(parse_names(entry, unconstrained=unconstrained), shape)


class _Warned(threading.local):
    def __init__(self) -> None:
        self.names: set[tuple[Rules, str]] = set()


_WARNED = _Warned()


def warn_once(rules: Rules, resolutions: Sequence[Resolution]) -> None:
    unknown = dict.fromkeys(name for one in resolutions for name in one.unknown_names)
    new = [name for name in unknown if (rules, name) not in _WARNED.names]
    if new:
        warn_unmapped(new, rules)
        _WARNED.names.update((rules, name) for name in new)
