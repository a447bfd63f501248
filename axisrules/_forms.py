"""When two traced programs are the same.

Owns a hashable form of jaxprs that is equal only for programs that compute the same: their equations
are equal in primitive, parameters, literals and structure. What cannot be compared is told apart by
identity. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_SMALL = 1024  # elements up to which constants are compared by content

# What a primitive does not need to compute its values: names for people, and rules for derivatives.
_IRRELEVANT = {
    "jit": {"name"},
    "pjit": {"name"},
    "custom_jvp_call": {"name", "jvp_jaxpr_fun", "jvp_jaxpr_thunk"},
    "custom_vjp_call": {"name", "fwd_jaxpr_thunk", "bwd", "out_trees"},
}


class Forms:
    """The forms of the programs of one trace; a part that occurs again is examined once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Hashable]] = {}  # by id; the object stays alive beside its form

    def program(
        self,
        inputs: Sequence[Var],
        constants: Mapping[Var, Any],
        eqns: Iterable[JaxprEqn],
        outputs: Sequence[Any],
    ) -> Hashable:
        """The form of the equations as a program from ``inputs`` to ``outputs``."""
        names: dict[Any, int] = {}
        for var in (*constants, *inputs):
            names[var] = len(names)
        body = []
        for eqn in eqns:
            read = tuple([self._atom(atom, names) for atom in eqn.invars])
            for var in eqn.outvars:
                names[var] = len(names)
            body.append((self._fixed(eqn), read, tuple([var.aval for var in eqn.outvars])))
        return (
            tuple([self._value(value) for value in constants.values()]),
            tuple([var.aval for var in inputs]),
            tuple(body),
            tuple([self._atom(atom, names) for atom in outputs]),
        )

    def _fixed(self, eqn: JaxprEqn) -> Hashable:
        """What an equation is, apart from its variables."""
        name = eqn.primitive.name
        skipped = _IRRELEVANT.get(name, set())
        params = tuple([(k, self._value(v)) for k, v in sorted(eqn.params.items()) if k not in skipped])
        return eqn.primitive, params, self._once(eqn.ctx, repr)

    def _atom(self, atom: Any, names: Mapping[Any, int]) -> Hashable:
        if isinstance(atom, Literal):
            return "literal", atom.aval, self._value(atom.val)
        return names[atom]

    def _once(self, value: Any, form: Any) -> Hashable:
        found = self._known.get(id(value))
        if found is None:
            found = self._known[id(value)] = value, form(value)
        return found[1]

    def _value(self, value: Any) -> Hashable:
        """A parameter, a literal or a constant."""
        if isinstance(value, ClosedJaxpr):
            return self._once(value, lambda one: self._jaxpr(one.jaxpr, one.consts))
        if isinstance(value, Jaxpr):
            return self._once(value, self._jaxpr)
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(self._value, value))
        if isinstance(value, dict):
            return dict, tuple([(self._value(k), self._value(v)) for k, v in value.items()])
        if isinstance(value, (float, complex)):
            return type(value), repr(value)  # tells -0.0 from 0.0, and finds nan equal to itself
        if not isinstance(value, type) and hasattr(value, "dtype") and hasattr(value, "__array__"):
            return self._array(value)
        try:
            hash(value)
        except TypeError:
            return ById(value)
        return type(value), value

    def _array(self, value: Any) -> Hashable:
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
        if is_key or value.size > _SMALL:
            return ById(value)
        held = np.asarray(value)
        weak = bool(getattr(value, "weak_type", False))
        return "array", str(held.dtype), held.shape, held.tobytes(), weak

    def _jaxpr(self, jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> Hashable:
        known = dict(zip(jaxpr.constvars, consts, strict=False))
        free = [var for var in jaxpr.constvars if var not in known]
        return self.program([*free, *jaxpr.invars], known, jaxpr.eqns, jaxpr.outvars)


class ById:
    """An object that is compared by identity, and kept alive by the form that holds it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
