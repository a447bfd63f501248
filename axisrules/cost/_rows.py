"""The arrays of a training step as rows: what they are, their shapes, and where their axes go.

Owns bringing a plan, an optimizer and a batch into one form that can be priced on any mesh with
the same axes. Resolves nothing itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axisrules._errors import PolicyError
from axisrules._plan import SLOT, Placement, Plan
from axisrules._policies import Policies
from axisrules._resolve import resolve_array
from axisrules._specs import axes_of
from axisrules._states import state_names
from axisrules._trees import flatten

_LENIENT = Policies("next", "next", "drop", "replicate")
_MANY = 64  # parameters from which on the state is made of a few of every kind


class Row(NamedTuple):
    """Equal arrays of one kind.

    Attributes:
        kind: ``"parameters"``, ``"gradients"``, ``"batch"``, or a slot of the optimizer.
        names: Their axis names, or the spec itself.
        shape: The shape of one.
        dtype: Its dtype.
        axes: The mesh axes of every dimension.
        copies: How many there are.
        path: The parameter that an array of an optimizer's state belongs to.
    """

    kind: str
    names: Any
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[tuple[str, ...], ...]
    copies: int
    path: str = ""

    def shard(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the part that the fullest device holds."""
        pairs = zip(self.shape, self.axes, strict=True)
        return tuple(-(-size // math.prod(sizes[axis] for axis in axes)) for size, axes in pairs)

    def on(self, plan: Plan, sizes: Mapping[str, int], fill: tuple[str, ...]) -> Row:
        """The row on a mesh of other sizes; what does not divide there is whole."""
        if self.names is None:
            kept = [
                axes if size % math.prod(sizes[axis] for axis in axes) == 0 else ()
                for size, axes in zip(self.shape, self.axes, strict=True)
            ]
            return self._replace(axes=tuple(kept))
        found = resolve_array(self.names, plan.rules, tuple(sizes.items()), self.shape, _LENIENT, fill=fill)
        return self._replace(axes=tuple(dim.axes for dim in found.dims))


def of_plan(plan: Plan, kind: str, dtype: Any = None) -> list[Row]:
    """A row per kind of placement; an array that is tied counts once."""
    counts: dict[Any, int] = {}
    first: dict[Any, Placement] = {}
    for one in plan.distinct:
        key = (id(one.resolution), one.dtype)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, one)
    return [_row(kind, first[key], count) for key, count in counts.items()]


def _row(kind: str, one: Placement, count: int) -> Row:
    dims = one.resolution.dims
    given = any(dim.reason == "explicit_spec" for dim in dims)
    axes = tuple(dim.axes for dim in dims)
    return Row(kind, None if given else one.names, one.shape, one.dtype, axes, count)


def gradients(parameters: Iterable[Row]) -> list[Row]:
    """The gradients: like the parameters, of those that have any."""
    return [row._replace(kind="gradients") for row in parameters if is_inexact(row.dtype)]


def is_inexact(dtype: Any) -> bool:
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and jnp.issubdtype(dtype, jnp.inexact)


def fill_axes(plan: Plan) -> tuple[str, ...]:
    """The axes that ``fill`` used in a plan."""
    found = (dim for one in plan.placements for dim in one.resolution.dims if dim.reason == "filled")
    return tuple(dict.fromkeys(axis for dim in found for axis in dim.axes))


def of_tree(tree: Any, kind: str) -> list[Row]:
    """Rows of anything with arrays: a plan, or arrays that carry shardings; without one, whole."""
    if isinstance(tree, Plan):
        return of_plan(tree, kind)
    return [_carried(leaf, kind) for leaf in flatten(tree).leaves if is_array(leaf)]


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype that can be priced."""
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray))


def _carried(leaf: Any, kind: str) -> Row:
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    axes = [axes_of(entry) for entry in spec]
    return Row(kind, None, shape, leaf.dtype, (*axes, *[()] * (len(shape) - len(axes))), 1)


def of_optimizer(optimizer: Any, plan: Plan) -> list[Row]:
    """Rows of an optimizer's state: a slot per kind.

    Args:
        optimizer: An object with ``init(params)``, such as any of optax; that function; a plan of
            the state; or the state, of which arrays without shardings follow the parameters.
        plan: The plan of the parameters.

    Raises:
        PolicyError: It is none of these.
        StateError: An array of the state belongs to no parameter.
    """
    if isinstance(optimizer, Plan):
        return [row for one in optimizer.distinct for row in [_row(_slot(one.path, plan), one, 1)]]
    init = getattr(optimizer, "init", optimizer)
    if not callable(init):
        return list(_given_rows(optimizer, plan))
    few = _few_rows(init, plan) if len(plan.distinct) > _MANY else None
    return list(_state_rows(init, *_parameters(plan), plan)) if few is None else few


def _few_rows(init: Any, plan: Plan) -> list[Row] | None:
    """The rows of a state from a few parameters of every kind, which takes a fraction of the time.

    Parameters whose paths differ by numbers alone are alike if the first and the last of them are.

    Returns:
        ``None`` where they are not, or where ``init`` asks for the whole tree.
    """
    alike: dict[Any, list[Placement]] = {}
    for one in plan.distinct:
        alike.setdefault((id(one.resolution), one.dtype, re.sub(r"\d+", "#", one.path)), []).append(one)
    counts = {some[0].path: len(some) - (len(some) > 1) for some in alike.values()}
    ends = [
        one for some in alike.values() for one in {some[0].path: some[0], some[-1].path: some[-1]}.values()
    ]
    keys = [tuple(one.path.split("/")) for one in ends]
    try:
        params = _nested(keys, [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in ends])
        rows = list(_state_rows(init, params, _nested(keys, map(_entry, ends)), plan))
    except Exception:  # whatever it was, the whole tree shows it, or does not have it
        return None
    by_path: dict[str, list[Row]] = {}
    for row in rows:
        by_path.setdefault(row.path, []).append(row)
    for some in alike.values():
        first, last = (
            [row._replace(path="") for row in by_path.get(one.path, [])] for one in (some[0], some[-1])
        )
        if first != last:
            return None
    return [row._replace(copies=counts.get(row.path, 1)) for row in rows]


def _nested(keys: Iterable[tuple[str, ...]], leaves: Iterable[Any]) -> dict[str, Any]:
    """A tree of dicts with these leaves."""
    root: dict[str, Any] = {}
    for key, leaf in zip(keys, leaves, strict=True):
        at = root
        for segment in key[:-1]:
            at = at.setdefault(segment, {})
        at[key[-1]] = leaf
    return root


def _parameters(plan: Plan) -> tuple[Any, Any]:
    """The parameters as shapes, and their names: the tree itself where JAX alone can take it apart."""
    placed = plan.structure.leaves
    plain = all(leaf is SLOT for leaf in placed) and len(plan.distinct) == len(plan.placements)
    abstract = plan.structure.fill(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in plan.placements)
    if plain and flatten(abstract).treedef is not None:
        return abstract, plan.structure.fill(_entry(one) for one in plan.placements)
    shapes = {one.path: jax.ShapeDtypeStruct(one.shape, one.dtype) for one in plan.distinct}
    return shapes, {one.path: _entry(one) for one in plan.distinct}


def _entry(one: Placement) -> Any:
    given = any(dim.reason == "explicit_spec" for dim in one.resolution.dims)
    return one.spec if given else one.names


def flatten_entries(entries: Any) -> Iterator[Any]:
    """The entries of a tree of names, in order."""
    leaves = jax.tree.leaves(
        entries, is_leaf=lambda node: node is None or isinstance(node, PartitionSpec) or _is_names(node)
    )
    return iter(leaves)


def _is_names(node: Any) -> bool:
    return type(node) is tuple and all(name is None or isinstance(name, str) for name in node)


def _given_rows(state: Any, plan: Plan) -> Iterator[Row]:
    """The rows of a state that was given: by its shardings, where it has any."""
    flat = flatten(state)
    if flat.leaves and not any(map(is_array, flat.leaves)):
        raise PolicyError(
            f"{str(state)[:80]!r} is no optimizer",
            fix="pass one of optax, its init, or its state: a plan of it, or arrays (ShapeDtypeStructs).",
        )
    if any(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in flat.leaves):
        pairs = zip(flat.paths, flat.leaves, strict=True)
        yield from (_carried(leaf, _slot(path, plan)) for path, leaf in pairs if is_array(leaf))
    else:
        yield from _rows_of_state(state, *_parameters(plan), plan)


def _state_rows(init: Any, params: Any, names: Any, plan: Plan) -> Iterator[Row]:
    """The rows of the state that ``init`` makes of the parameters."""
    return _rows_of_state(jax.eval_shape(init, params), params, names, plan)


def _rows_of_state(state: Any, params: Any, names: Any, plan: Plan) -> Iterator[Row]:
    flat = flatten(state)
    entries = flatten_entries(state_names(state, params, names))
    known = {(one.names, one.shape): one for one in plan.placements}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        entry = next(entries)
        if hasattr(leaf, "shape"):
            slot = _slot(path, plan)
            axes = _axes(entry, tuple(leaf.shape), known, plan)
            of = path.removeprefix(slot).lstrip("/") if slot != path else ""
            names = None if isinstance(entry, PartitionSpec) else entry or (None,) * len(leaf.shape)
            yield Row(slot, names, tuple(leaf.shape), leaf.dtype, axes, 1, of)


def _axes(
    entry: Any, shape: tuple[int, ...], known: Mapping[Any, Placement], plan: Plan
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of an array of a state: those of a parameter that is like it, else by the rules."""
    if isinstance(entry, PartitionSpec):
        axes = [axes_of(part) for part in entry]
        return (*axes, *[()] * (len(shape) - len(axes)))
    names = entry or (None,) * len(shape)
    like = known.get((names, shape))
    if like is not None:
        return tuple(dim.axes for dim in like.resolution.dims)
    found = resolve_array(names, plan.rules, plan.mesh.shape_tuple, shape, _LENIENT)
    return tuple(dim.axes for dim in found.dims)


def _slot(path: str, plan: Plan) -> str:
    """What an array of a state is: the part of its path before that of its parameter."""
    by_path = plan._by_path
    segments = path.split("/")
    for start in range(len(segments)):
        if "/".join(segments[start:]) in by_path:
            return "/".join(segments[:start])
    return path
