"""A traced function, cut into programs that make one array each.

Owns the cutting: the backward slice of every output, what is evaluated once for several of them, and
what is evaluated directly. Runs nothing, and decides no layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom: TypeAlias = Any  # a variable, or a literal

_DIRECT = 2**16  # elements up to which keys and integers are evaluated one by one
_EMBEDDED = 1024  # elements up to which a captured array is a constant of the programs that use it
_CHEAP = 2**16  # elements up to which several programs make the same intermediate each for itself
_COSTLY = frozenset({
    "while", "scan", "cond", "dot_general", "conv_general_dilated", "sort", "fft", "cholesky", "eig", "eigh",
    "geqrf", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve",
    "pure_callback", "ffi_call",
})  # fmt: skip


_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


class Step(NamedTuple):
    """One program: equations that make ``outputs`` from ``inputs`` and ``constants``."""

    inputs: tuple[Var, ...]
    constants: dict[Var, Any]
    eqns: tuple[JaxprEqn, ...]
    outputs: tuple[Var, ...]


class Cut(NamedTuple):
    """A function in parts.

    Attributes:
        inputs: The variables of its arguments.
        known: The values of what it captured.
        outputs: What it returns, as variables or literals.
        direct: Keys and small integers, which are exact however they are computed.
        steps: The programs for everything else, in the order in which they can run.
    """

    inputs: tuple[Var, ...]
    known: dict[Var, Any]
    outputs: tuple[Atom, ...]
    direct: Step
    steps: tuple[Step, ...]


def cut(closed: ClosedJaxpr) -> Cut:
    """Cuts a traced function.

    A step makes one output. What is large or costly and goes into several outputs is a step of its
    own. Small integers and keys that depend on a key or an argument become arguments of the steps, so
    that arrays that differ in their keys alone are made by one program.
    """
    return _Cutter(closed).cut()


class _Cutter:
    def __init__(self, closed: ClosedJaxpr) -> None:
        self.eqns: list[JaxprEqn] = []
        self.known: dict[Var, Any] = {}
        self.inputs = tuple(closed.jaxpr.invars)
        self.outputs = tuple(self._inline(closed, {}))
        self.producer = {var: number for number, eqn in enumerate(self.eqns) for var in eqn.outvars}
        self.embedded = {var for var, value in self.known.items() if _is_embedded(value)}
        # Variables whose value is there before any step runs, and is not a constant of a step.
        self.given = {*self.inputs, *self.known} - self.embedded
        self.exact, self.direct = self._find_exact()

    def _inline(self, closed: ClosedJaxpr, names: dict[Var, Atom]) -> list[Atom]:
        """Adds the equations of a function; most functions that it calls are dissolved."""
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            names[var] = fresh = Var(var.aval)
            self.known[fresh] = value

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else names.get(atom, atom)

        for eqn in closed.jaxpr.eqns:
            arguments = [read(atom) for atom in eqn.invars]
            inner = _dissolved(eqn)
            if inner is not None:
                results = self._inline(inner, dict(zip(inner.jaxpr.invars, arguments, strict=True)))
            else:
                results = [Var(var.aval) for var in eqn.outvars]  # a function may be called twice
                self.eqns.append(_movable(eqn.replace(invars=arguments, outvars=results)))
            names.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def _find_exact(self) -> tuple[set[Var], set[Var]]:
        """The variables whose value is the same however it is computed, and which are arguments.

        Arguments of the programs are those that depend on a key or on an argument. The others are
        constants in a program of the whole, so they stay constants in its parts.
        """
        exact = {var for var in (*self.inputs, *self.known) if _is_exact(var)}
        varying, computed, arguments = exact & self.given, set[Var](), set[Var]()
        for eqn in self.eqns:
            reads = _variables(eqn.invars)
            if not exact.issuperset(reads) or not _is_exact_throughout(eqn):
                continue
            exact.update(eqn.outvars)
            computed.update(eqn.outvars)
            if eqn.primitive.name.startswith("random_") or not varying.isdisjoint(reads):
                varying.update(eqn.outvars)
                arguments.update(eqn.outvars)
        return computed, arguments

    def cut(self) -> Cut:
        there = {*self.inputs, *self.known}
        roots = [var for var in dict.fromkeys(_variables(self.outputs)) if var not in there]
        made = [var for var in roots if var not in self.exact]
        shared = self._find_shared(made)
        groups = [tuple(var for var in self.eqns[n].outvars if var in used) for n, used in shared]
        borders = {var for group in groups for var in group}
        groups += [(var,) for var in made if var not in borders]
        steps = [self._step(group, borders | self.direct) for group in groups]
        needed = [var for step in steps for var in step.inputs if var in self.direct]
        ends = [var for var in roots if var in self.exact]
        direct = self._step(tuple(dict.fromkeys([*needed, *ends])), ())
        return Cut(self.inputs, self.known, self.outputs, direct, tuple(steps))

    def _find_shared(self, roots: Sequence[Var]) -> list[tuple[int, set[Var]]]:
        """The equations whose results are worth being made once, with the results that are used."""
        heavy = self._find_heavy()
        owners: dict[Var, int] = {var: 1 << bit for bit, var in enumerate(roots)}
        ends, readers = set(roots), dict[Var, set[int]]()
        shared = []
        for number in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[number]
            used = {var for var in eqn.outvars if var in owners and var not in self.direct}
            mask = 0
            for var in used:
                mask |= owners[var]
            splits = any(var in ends or readers[var] != {mask} for var in used)
            if mask & (mask - 1) and splits and heavy[number]:
                shared.append((number, used))
            for var in _variables(eqn.invars) if mask else ():
                owners[var] = owners.get(var, 0) | mask
                readers.setdefault(var, set()).add(mask)
        return shared[::-1]

    def _find_heavy(self) -> list[bool]:
        """Whether the results of an equation are large, or anything costly went into them."""
        costly = [False] * len(self.eqns)
        for number, eqn in enumerate(self.eqns):
            sources = [self.producer[var] for var in _variables(eqn.invars) if var in self.producer]
            costly[number] = _is_costly(eqn) or any(costly[source] for source in sources)
        sizes = [max((math.prod(shape_of(var)) for var in eqn.outvars), default=0) for eqn in self.eqns]
        return [cost or size > _CHEAP for cost, size in zip(costly, sizes, strict=True)]

    def _step(self, outputs: tuple[Var, ...], borders: Collection[Var]) -> Step:
        """The backward slice of some variables, which ends at what is there and at the borders."""
        numbers: set[int] = set()
        constants: dict[Var, Any] = {}
        waiting = list(outputs)
        while waiting:
            var = waiting.pop()
            if var in self.embedded:
                constants[var] = np.asarray(self.known[var])  # wherever it lies
                continue
            if (number := self.producer[var]) in numbers:
                continue
            numbers.add(number)
            below = _variables(self.eqns[number].invars)
            waiting += [read for read in below if read not in self.given and read not in borders]
        eqns = tuple(self.eqns[number] for number in sorted(numbers))
        made = {var for eqn in eqns for var in eqn.outvars}
        reads = dict.fromkeys(var for eqn in eqns for var in _variables(eqn.invars))
        inputs = tuple(var for var in reads if var not in made and var not in constants)
        return Step(inputs, {var: constants[var] for var in reads if var in constants}, eqns, outputs)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or a literal; that of a token is ``()``."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """The dtype of a variable or a literal; a token has none."""
    return getattr(atom.aval, "dtype", None)


def _variables(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _is_exact(var: Var) -> bool:
    """Whether a value is a key, or small and made of integers."""
    dtype = dtype_of(var)
    if dtype is None or math.prod(shape_of(var)) > _DIRECT:
        return False
    kinds: tuple[Any, ...] = (jax.dtypes.prng_key, np.integer, np.bool_)
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in kinds)


def _is_exact_throughout(eqn: JaxprEqn) -> bool:
    """Whether the results are exact, and nothing large is made on the way."""
    return all(map(_is_exact, eqn.outvars)) and (not _is_jit(eqn) or _is_small_inside(eqn))


def _is_small_inside(jit: JaxprEqn) -> bool:
    return all(
        all(math.prod(shape_of(var)) <= _DIRECT for var in eqn.outvars)
        and (not _is_jit(eqn) or _is_small_inside(eqn))
        for eqn in jit.params["jaxpr"].jaxpr.eqns
    )


def _is_embedded(value: Any) -> bool:
    """Whether a captured array stays a constant; keys and what lies on a mesh become arguments."""
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:  # such as a parameter
        return False
    may_be_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended) or value.dtype == np.uint32
    return not may_be_key and math.prod(value.shape) <= _EMBEDDED


def _movable(eqn: JaxprEqn) -> JaxprEqn:
    """A slice of keys or small integers with its start as an operand: unpacking compiles once.

    Evaluated on its own, a slice is compiled for every start.
    """
    if eqn.primitive.name != "slice" or not all(map(_is_exact, [*_variables(eqn.invars), *eqn.outvars])):
        return eqn
    if any(stride != 1 for stride in eqn.params["strides"] or ()):
        return eqn
    index = jax.core.ShapedArray((), np.dtype(np.int32))
    starts = [Literal(np.int32(start), index) for start in eqn.params["start_indices"]]
    sizes = {"slice_sizes": shape_of(eqn.outvars[0])}
    made: JaxprEqn = eqn.replace(
        primitive=jax.lax.dynamic_slice_p, invars=[*eqn.invars, *starts], params=sizes
    )
    return made


def _dissolved(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation calls, where its own equations take the place of the call.

    Rules for derivatives would be kept alive by a program, with all that they capture.
    """
    inner = eqn.params.get("call_jaxpr" if eqn.primitive.name in _WITH_RULES else "jaxpr")
    if not isinstance(inner, ClosedJaxpr):
        return None
    dissolves = _is_jit(eqn) and (len(eqn.outvars) > 1 or _donates_or_captures(eqn))
    return inner if dissolves or eqn.primitive.name in _WITH_RULES else None


def _is_jit(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("jit", "pjit")


def _donates_or_captures(jit: JaxprEqn) -> bool:
    """Whether a program would give up its arguments, or keep an array alive, by a jit inside of it."""
    inner = jit.params["jaxpr"]
    nested = any(_is_jit(eqn) and _donates_or_captures(eqn) for eqn in inner.jaxpr.eqns)
    return nested or bool(inner.consts) or any(jit.params["donated_invars"])


def _is_costly(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _COSTLY or any(map(_is_costly_inside, eqn.params.values()))


def _is_costly_inside(value: Any) -> bool:
    if isinstance(value, ClosedJaxpr):
        value = value.jaxpr
    if isinstance(value, (tuple, list)):
        return any(map(_is_costly_inside, value))
    return isinstance(value, Jaxpr) and any(map(_is_costly, value.eqns))


def as_function(step: Step, like: ClosedJaxpr) -> ClosedJaxpr:
    """A step as a program of JAX."""
    jaxpr = like.jaxpr.replace(
        constvars=list(step.constants),
        invars=list(step.inputs),
        outvars=list(step.outputs),
        eqns=list(step.eqns),
    )
    return ClosedJaxpr(jaxpr, list(step.constants.values()))
