"""``init``: trees and modules whose arrays are created on their shards.

Owns the order of the work: trace, plan, make. How a trace is cut into programs stands in
``_slices.py``. Decides no layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from axisrules import _compat, _leaves
from axisrules._errors import AxisRulesError, InitError, LeafError, NoMeshError, raise_all
from axisrules._hidden import hides_tracer
from axisrules._layout import with_auto_axes
from axisrules._meshes import active_mesh
from axisrules._options import PlanOptions, make_options
from axisrules._place import place
from axisrules._plan import Plan
from axisrules._planning import make_plan
from axisrules._processes import agree, attempt
from axisrules._programs import Target, run
from axisrules._slices import cut, dtype_of
from axisrules._trees import Flat, flatten, making


def init(
    make: Callable[..., Any],
    names: Any = None,
    *,
    args: tuple[Any, ...] = (),
    check: bool = True,
    **options: Unpack[PlanOptions],
) -> Any:
    """Makes a tree or a module whose arrays are born where the rules say.

    ``make`` is traced once, and every array is made by a program of its own that holds what this array
    needs and nothing else. Programs that differ in their keys alone are compiled once, so that the
    number of compilations does not grow with the depth of a model, and making the same model again
    compiles nothing. The values are those of ``jax.jit(make)``, bit for bit, but for sums over a
    dimension that lies split, and for what is computed from arrays that ``make`` captures: XLA treats
    those as constants in a program of the whole, and the last bits may differ.

    No array is ever whole on one device, and arrays are made one after another: beyond the result
    itself, at most 3.5 times the largest array is in use (random bits take three times their shard).
    Where XLA cannot partition an initializer, it runs whole on every device: ``orthogonal`` and
    ``delta_orthogonal``, which use QR.

    Args:
        make: A function that returns a tree or a module. It may be jitted; it must have no effects. An
            ``nnx.Rngs`` is built inside, or comes by ``args``: one that ``make`` captures cannot be
            used up while JAX is tracing.
        names: Names in any form that ``plan`` takes; by default those that the result itself carries.
        args: The arguments of ``make``: trees or modules. Their arrays are traced, anything else is
            passed as it is. They are not changed.
        check: Whether several processes compare their plans before any of them acts.
        **options: The options of ``plan``: ``mesh``, ``rules``, the policies, ``unnamed``, ``fill``,
            ``min_bytes``, ``memory_kind``, ``dtype``.

    Returns:
        What ``make`` returns, its arrays with the planned sharding.

    Raises:
        InitError: ``make`` has effects, or cannot be called as it is.
        AxisRulesError: Something does not fit; every failure of the tree is in the one error, and
            nothing was made.
        ProcessError: It failed on another process, or the plan there is another one.

    Example:
        >>> import axisrules as ar, jax
        >>> def make(key):
        ...     up, down = jax.random.split(key)
        ...     normal = jax.nn.initializers.lecun_normal()
        ...     return {"up": normal(up, (8, 32)), "down": normal(down, (32, 8))}
        >>> params = ar.init(make, {"up": "embed mlp", "down": "mlp embed"}, args=(jax.random.key(0),),
        ...                  mesh=ar.make_mesh("data=4,model=2"), rules={"embed": "data", "mlp": "model"})
        >>> tuple(params["up"].sharding.spec), params["up"].addressable_shards[0].data.shape
        (('data', 'model'), (2, 16))
    """
    traced: list[_Traced] = []

    def planned() -> Plan:
        checked = make_options(**options)
        _check_call(make, args, checked.mesh)
        with _tracing_mesh():
            traced.append(_trace(make, args))
        return make_plan(traced[0].tree, traced[0].flat, names, checked)

    plan = agree(attempt(planned), mesh=options.get("mesh"), check=check)
    with _tracing_mesh():
        made = _make(plan, traced[0])
    arrays = [made.get(id(leaf), leaf) for leaf in plan.structure.pick(traced[0].flat.leaves)]
    mesh: Any = plan.mesh
    with jax.set_mesh(mesh):  # with another one active, JAX refuses devices in another order
        placed = place(plan, arrays)
    return plan.structure.fill(iter(placed))


def _check_call(make: Any, args: Any, mesh: Mesh | AbstractMesh) -> None:
    """Refuses what cannot be traced and made here."""
    if not callable(make):
        raise InitError(
            f"a {type(make).__qualname__} is not a function that makes a tree",
            fix="pass the function, as in axisrules.init(lambda: Model(...)); "
            "for arrays that exist there is axisrules.shard_tree.",
        )
    if not isinstance(args, tuple):
        raise InitError(
            f"args is a {type(args).__qualname__}, not a tuple", fix="write args=(key,) with the comma."
        )
    if _compat.in_trace():
        raise InitError(
            "arrays cannot be born on their shards while JAX is tracing",
            fix="call axisrules.init outside of jit, or lay the values out with axisrules.constrain.",
        )
    if isinstance(mesh, AbstractMesh):
        raise NoMeshError(
            "the mesh has no devices to make arrays on",
            fix='pass mesh=axisrules.make_mesh("data=4,model=2"); sizes alone suffice for axisrules.plan '
            "of jax.eval_shape(make).",
        )


@contextmanager
def _tracing_mesh() -> Iterator[None]:
    """The active mesh where its axes are Auto, else none.

    On Explicit axes every value has a layout of its own, whole unless said otherwise, so that each
    device would make the whole array.
    """
    active = active_mesh()
    if active is not None and AxisType.Explicit not in active.axis_types:
        yield
        return
    with jax.set_mesh(Mesh(np.asarray(jax.local_devices()[0], dtype=object), ())):
        yield


class _Traced(NamedTuple):
    """What ``make`` returns, with a `Future` for every array that is still to be made."""

    closed: ClosedJaxpr
    flat: Flat
    tree: Any
    futures: tuple[_leaves.Future, ...]  # one for every output of `closed`
    arguments: tuple[Any, ...]


def _trace(make: Callable[..., Any], args: tuple[Any, ...]) -> _Traced:
    given = flatten(args)
    is_array = _find_arrays(given)
    arguments = tuple(leaf for leaf, chosen in zip(given.leaves, is_array, strict=True) if chosen)
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
            closed = jax.make_jaxpr(outputs)(*arguments)
        except jax.errors.JAXTypeError:
            quick = False  # for the whole message
            closed = jax.make_jaxpr(outputs)(*arguments)
    if closed.effects:
        raise InitError(
            f"make has effects: {', '.join(sorted(map(str, closed.effects)))}",
            fix="take prints, callbacks and the like out of make: its arrays are made one by one.",
        )
    flat, futures = found.pop()
    return _Traced(closed, flat, flat.rebuild(flat.leaves), tuple(futures), arguments)


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
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return LeafError("the array was deleted or donated before", fix="pass the array that took its place.")
    return None


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


def _make(plan: Plan, traced: _Traced) -> dict[int, Any]:
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
