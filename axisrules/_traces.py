"""How a function that makes a tree is traced, and how its arrays are made of the trace.

Owns what a trace may return, and what becomes of each of its outputs. How a trace is cut into programs
stands in ``_slices.py``, how they run in ``_programs.py``. Decides no layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import AxisType, NamedSharding

from axisrules import _compat, _leaves
from axisrules._errors import AxisRulesError, InitError, LeafError, raise_all
from axisrules._hidden import hides_tracer
from axisrules._layout import mesh_of, with_auto_axes
from axisrules._place import deleted
from axisrules._plan import Plan
from axisrules._programs import Target, run
from axisrules._slices import cut, dtype_of
from axisrules._trees import Flat, flatten, making


class Traced(NamedTuple):
    """What ``make`` returns, with a `Future` for every array that is still to be made."""

    closed: ClosedJaxpr
    flat: Flat
    tree: Any
    futures: tuple[_leaves.Future, ...]  # one for every output of `closed`
    arguments: tuple[Any, ...]


def trace(make: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """Traces a call of ``make``.

    Raises:
        InitError: It has effects, or hides values of the trace.
        LeafError: An argument cannot be used.
    """
    given = flatten(args)
    is_array = _find_arrays(given)
    arguments = tuple(leaf for leaf, chosen in zip(given.leaves, is_array, strict=True) if chosen)
    untyped = [_without_mesh(argument) for argument in arguments]
    found: list[tuple[Flat, list[_leaves.Future]]] = []
    quick = True

    def outputs(*traced: Any) -> list[Any]:
        if quick:
            _compat.forget_origins()
        rest = iter(traced)
        leaves = [next(rest) if chosen else leaf for leaf, chosen in zip(given.leaves, is_array, strict=True)]
        flat = flatten(make(*given.rebuild(leaves)))
        _check_leaves(flat)
        values = {id(leaf): leaf for leaf in flat.leaves if isinstance(leaf, jax.core.Tracer)}
        futures = {key: _leaves.Future(value.shape, value.dtype) for key, value in values.items()}
        leaves = [futures.get(id(leaf), leaf) for leaf in flat.leaves]
        found.append((dataclasses.replace(flat, leaves=leaves), list(futures.values())))
        return list(values.values())

    with making():
        try:
            closed = jax.make_jaxpr(outputs)(*untyped)
        except jax.errors.JAXTypeError:
            quick = False  # for the whole message
            closed = jax.make_jaxpr(outputs)(*untyped)
    if closed.effects:
        raise InitError(
            f"make has effects: {', '.join(sorted(map(str, closed.effects)))}",
            fix="take prints, callbacks and the like out of make: its arrays are made one by one.",
        )
    flat, futures = found.pop()
    return Traced(closed, flat, flat.rebuild(flat.leaves), tuple(futures), arguments)


def _without_mesh(value: Any) -> Any:
    """An argument as the trace sees it: one on Explicit axes has their mesh in its type.

    What is computed from it would have too, and programs run on Auto axes, some of them on one device.
    """
    if AxisType.Explicit not in getattr(mesh_of(value), "axis_types", ()):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=getattr(value, "weak_type", False))


def _find_arrays(given: Flat) -> list[bool]:
    """Which of the arguments are arrays.

    Raises:
        LeafError: One of them cannot be used.
    """
    describe = _leaves.Describer()
    problems: list[AxisRulesError] = []
    found = []
    for path, leaf in zip(given.paths, given.leaves, strict=True):
        try:
            found.append(describe(leaf) is not None)
            problem = _unusable(leaf)
        except LeafError as cause:
            problem = cause
        if problem is not None:
            problems.append(problem.at([f"args/{path}"]))
    raise_all(problems)
    return found


def _unusable(leaf: Any) -> AxisRulesError | None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return LeafError(
            "a shape has no values to make arrays from",
            fix="pass an array; shapes alone suffice for axisrules.plan of jax.eval_shape(make, *args).",
        )
    return deleted(leaf)


def _check_leaves(flat: Flat) -> None:
    """Refuses values of the trace where no tree shows them, so that none is left in the result."""
    hidden = {key for key, leaf in {id(leaf): leaf for leaf in flat.leaves}.items() if hides_tracer(leaf)}
    raise_all(
        InitError(
            f"a {type(leaf).__qualname__} holds an array that make computes, where no tree shows it",
            paths=[path],
            fix="use jax.tree_util.Partial for functools.partial, or keep the array in a field of a module.",
        )
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if id(leaf) in hidden
    )


def make_arrays(plan: Plan, traced: Traced) -> dict[int, Any]:
    """The arrays, by the id of the future that they take the place of."""
    parts = cut(traced.closed)
    mesh = with_auto_axes(plan.mesh)
    planned = zip(plan.structure.pick(traced.flat.leaves), plan.placements, strict=True)
    targets = {id(leaf): Target(NamedSharding(mesh, p.spec), p.dtype) for leaf, p in planned}
    pairs = list(zip(parts.outputs, traced.futures, strict=True))
    wanted = {var: targets[id(future)] for var, future in pairs if not isinstance(var, Literal)}
    values = run(parts, traced.arguments, wanted, mesh, traced.closed)
    made: dict[int, Any] = {}
    copied: set[Var] = set()
    for atom, future in pairs:
        if isinstance(atom, Literal):
            made[id(future)] = _literal(atom)
            continue
        value = values[atom]
        if atom in copied:  # two outputs are two arrays, as those of a jit are
            value = jax.device_put(value, getattr(value, "sharding", None), may_alias=False)
        made[id(future)] = value
        copied.add(atom)
    return made


def _literal(atom: Literal) -> jax.Array:
    value = jnp.asarray(atom.val, dtype_of(atom))
    if not getattr(atom.aval, "weak_type", False):
        return value
    weak = jnp.asarray(value.item())  # as that of a Python scalar
    return weak if weak.dtype == value.dtype else value
