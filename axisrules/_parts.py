"""Arrays of which every process holds its part.

Owns the global shapes that the parts make up, and their assembly. Decides no layout: a plan does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from axisrules import _leaves
from axisrules._entries import find_entries
from axisrules._errors import AxisRulesError, LeafError, PolicyError, raise_all
from axisrules._meshes import axis_sizes
from axisrules._names import fit_names, parse_names
from axisrules._options import Options
from axisrules._plan import Placement, Plan
from axisrules._planning import make_plan, share_entries
from axisrules._resolve import resolve_array
from axisrules._shares import need_processes, share
from axisrules._specs import axes_of
from axisrules._trees import NO_ENTRY, Flat

Shape = tuple[int, ...]


def plan_parts(tree: Any, flat: Flat, names: Any, options: Options) -> Plan:
    """The plan of the global arrays of which the leaves are this process's parts.

    Raises:
        AxisRulesError: Something does not fit; all failures are in the one error.
    """
    need_processes(options)
    if options.fill:
        raise PolicyError(
            "fill needs the shapes of the whole arrays, and parts= gives their parts",
            fix="leave out fill=, or name the dimensions that are to be split.",
        )
    describe = _leaves.Describer(options.dtype)
    entries = share_entries(flat.leaves, find_entries(tree, flat, names).entries)
    leaves: list[Any] = []
    failures: list[AxisRulesError] = []
    for path, leaf, entry in zip(flat.paths, flat.leaves, entries, strict=True):
        try:
            leaves.append(_whole(leaf, entry, describe(leaf), options))
        except AxisRulesError as error:  # the plan below finds it as well, if it is not about the part
            leaves.append(leaf)
            failures += [one for one in error.singles_at(path) if isinstance(one, LeafError)]
    raise_all(failures)
    plan = make_plan(tree, dataclasses.replace(flat, leaves=leaves), names, options)
    arrays = plan.structure.pick(flat.leaves)
    raise_all(_unlike(one, leaf.shape, plan) for one, leaf in zip(plan.placements, arrays, strict=True)
              if tuple(leaf.shape) != _part(one, plan))  # fmt: skip
    return plan


def _whole(leaf: Any, entry: Any, described: _leaves.Described | None, options: Options) -> Any:
    """A leaf with the shape of the whole array, as the names alone lay it out."""
    if described is None:
        return leaf
    shape, dtype = described
    if not isinstance(leaf, jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise LeafError(
            "an array of random keys cannot be given in parts", fix="pass it whole, without parts=."
        )
    axes = _axes(entry, shape, options)
    whole = tuple(size * share(options.mesh, one).count for size, one in zip(shape, axes, strict=True))
    return jax.ShapeDtypeStruct(whole, dtype)


def _axes(entry: Any, shape: Shape, options: Options) -> Sequence[tuple[str, ...]]:
    """The mesh axes of every dimension, by the names alone."""
    if entry is None or entry is NO_ENTRY:
        return [()] * len(shape)
    if isinstance(entry, PartitionSpec):
        return [*map(axes_of, entry), *[()] * (len(shape) - len(entry))]
    names = fit_names(parse_names(entry), shape)
    found = resolve_array(names, options.rules, axis_sizes(options.mesh), None, options.policy)
    raise_all(found.problems)
    return [dim.axes for dim in found.dims]


def _part(placement: Placement, plan: Plan) -> Shape:
    """The shape of this process's part of an array."""
    dims = zip(placement.shape, placement.resolution.dims, strict=True)
    return tuple(size // share(plan.mesh, dim.axes).count for size, dim in dims)


def _unlike(placement: Placement, shape: Shape, plan: Plan) -> LeafError:
    return LeafError(
        f"the part of this process has the shape {tuple(shape)!r}, "
        f"and would have {_part(placement, plan)!r} of {placement.shape!r} as it is planned",
        paths=[placement.path],
        shape=tuple(shape),
        mesh=dict(plan.mesh.shape_tuple),
        fix='pass indivisible="error" to see why, or pass the array whole, without parts=.',
    )


def place_parts(plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    """The global arrays, made of the parts that the processes hold."""
    made = []
    for leaf, one, sharding in zip(arrays, plan.placements, plan.flat_shardings, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            made.append(jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding))
            continue
        part = np.array(leaf, dtype=one.dtype)  # a copy: JAX may take over host memory
        made.append(jax.make_array_from_process_local_data(sharding, part, one.shape))
    return made
