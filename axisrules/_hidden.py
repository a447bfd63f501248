"""Values of a trace that a function keeps where no tree shows them.

Owns the search, which is shallow: what a result keeps in other ways is found by JAX when it is used.
"""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import jax

_LEVELS = 5  # to which a function is searched: partial, arguments, method, object, list


def hides_tracer(leaf: Any) -> bool:
    """Whether a function, or a method of a plain object, keeps a value of a trace."""
    if not callable(leaf) or isinstance(leaf, type):
        return False
    level = [leaf]
    for _ in range(_LEVELS):
        held = {id(value): value for holder in level for value in _held_by(holder)}
        if any(isinstance(value, jax.core.Tracer) for value in held.values()):
            return True
        level = [value for value in held.values() if not isinstance(value, (type, ModuleType))]
    return False


def _held_by(value: Any) -> list[Any]:
    """What a function was made with, and what stands in the containers and objects of that."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [*cells, value.__defaults__, value.__kwdefaults__, getattr(value, "__wrapped__", None)]
    return list(getattr(value, "__dict__", {}).values())
