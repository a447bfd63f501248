"""When two functions do the same.

Owns a comparison of functions by what they do, as far as that can be told, so that initializers made
one by one can share what was compiled.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np


def behaviour(value: Any, kept: list[Any], seen: dict[int, int] | None = None) -> Any:
    """A hashable that is equal for functions that do the same.

    Functions are compared by their code, defaults, attributes, captured values and the globals that
    they use, down to plain data by content; what cannot be compared is told apart by identity, which
    costs a compilation. Only an object that changes in place, and a class, go unnoticed.

    Args:
        value: A function, or a value that one captures.
        kept: Gets the objects whose identity is part of the result, which have to stay alive.
        seen: The containers that are being compared, in order: a function may refer to itself.
    """
    seen = {} if seen is None else seen
    kind = type(value)
    if kind in (types.FunctionType, functools.partial, list, dict, tuple):
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
    inside = functools.partial(behaviour, kept=kept, seen=seen)
    if kind is types.FunctionType:
        cells = tuple(_cell(cell, inside) for cell in value.__closure__ or ())
        defaults = inside(value.__defaults__), inside(value.__kwdefaults__), inside(vars(value) or None)
        used = [(n, value.__globals__[n]) for n in _global_names(value.__code__) if n in value.__globals__]
        outer = tuple((n, _same(v, kept) if callable(v) else inside(v)) for n, v in used)
        return value.__code__, id(value.__globals__), cells, defaults, outer
    if kind is types.MethodType:
        return kind, inside(value.__func__), inside(value.__self__)
    if kind is functools.partial:
        return (
            kind,
            inside(value.func),
            inside(value.args),
            inside(value.keywords),
            inside(vars(value) or None),
        )
    if kind is tuple or kind is list:
        return kind, tuple(map(inside, value))
    if kind is dict:
        return kind, tuple((inside(k), inside(v)) for k, v in value.items())
    if kind in _PLAIN or isinstance(value, (np.generic, np.dtype)):
        return kind, repr(value) if isinstance(value, (float, complex, np.generic)) else value
    if kind is np.ndarray and value.nbytes <= 4096 and value.dtype != object:
        return kind, value.dtype, value.shape, value.tobytes()
    return _same(value, kept)


_PLAIN = {str, bytes, int, bool, float, complex, type(None)}


def _same(value: Any, kept: list[Any]) -> Any:
    """Compared by identity."""
    kept.append(value)
    return type(value), id(value)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function may use, nested functions included."""
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _global_names(c)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _cell(cell: Any, inside: Callable[[Any], Any]) -> Any:
    try:
        return inside(cell.cell_contents)
    except ValueError:  # not assigned yet
        return None
