"""Axis names: what may stand as the names of one array.

Knows nothing of rules, meshes or paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from axisrules._errors import NamesError, RankError, UnconstrainedError
from axisrules._text import format_count

AxisNames: TypeAlias = "str | Sequence[str | None]"
Names: TypeAlias = tuple[Any, ...]  # parsed: str, None, UNCONSTRAINED, or one Ellipsis

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
_PLAIN = {str, type(None)}
_SHORT = {"_": None, "...": ..., "*": UNCONSTRAINED}


def parse_names(value: Any, *, unconstrained: bool = False) -> Names:
    """Axis names as a tuple, from any of their spellings.

    Args:
        value: One ``str`` or ``None`` per dimension in a tuple or list, or the short form:
            words separated by spaces, ``_`` for ``None``, one ``...`` for any number of
            unnamed dimensions. ``""`` and ``()`` name the dimensions of a scalar.
        unconstrained: Whether ``PartitionSpec.UNCONSTRAINED`` (short form ``*``) is allowed.

    Returns:
        A tuple of ``str``, ``None``, at most one ``...``, and ``UNCONSTRAINED`` if allowed.

    Raises:
        NamesError: The value, or an entry of it, is something else.
        UnconstrainedError: A dimension is left open where a layout is needed.
    """
    if isinstance(value, str):
        names = tuple(_SHORT.get(word, word) for word in value.split())
    elif isinstance(value, (tuple, list)):
        names = tuple(value)
        if not _PLAIN.issuperset(map(type, names)):  # an enum of names is names
            names = tuple(str.__str__(name) if isinstance(name, str) else name for name in names)
        if _PLAIN.issuperset(map(type, names)) and "" not in names:
            return names
        _check_entries(names)
    else:
        raise NamesError(
            f"{value!r} cannot name the dimensions of an array",
            fix="give a tuple like ('embed', None) or a text like 'embed _'.",
        )
    if names.count(...) > 1:
        raise NamesError(f"names {value!r} have '...' more than once", names=names)
    if not unconstrained and any(name is UNCONSTRAINED for name in names):
        dim = next(dim for dim, name in enumerate(names) if name is UNCONSTRAINED)
        raise UnconstrainedError(
            f"dimension {dim} is unconstrained, which is no layout",
            dim=dim,
            names=names,
            fix="name the dimension or write None; only a constraint may leave it open.",
        )
    return names


def _check_entries(names: Names) -> None:
    for dim, name in enumerate(names):
        allowed = name is None or name is ... or name is UNCONSTRAINED
        if not (allowed or (isinstance(name, str) and name)):
            raise NamesError(
                f"the name of dimension {dim} is {name!r}, which is neither a name nor None",
                dim=dim,
                names=names,
                fix=f"write a name or None for dimension {dim}.",
            )


def fit_names(names: Names, shape: Sequence[int]) -> Names:
    """Names with one entry per dimension of the shape, ``...`` filled with ``None``.

    Raises:
        RankError: There are more or fewer names than dimensions.
    """
    rank = len(shape)
    if ... in names:
        at = names.index(...)
        missing = rank - len(names) + 1
        if missing >= 0:
            return names[:at] + (None,) * missing + names[at + 1 :]
    elif len(names) == rank:
        return names
    named = len(names) - (... in names)
    raise RankError(
        f"{format_count(named, 'name')} for {format_count(rank, 'dimension')}",
        names=names,
        shape=tuple(shape),
        fix=_rank_fix(named, shape),
    )


def _rank_fix(named: int, shape: Sequence[int]) -> str:
    advice = "give one name, or None, per dimension."
    if len(shape) == named + 1:
        return f"{advice} One dimension of size {shape[0]} more than names: a stacked axis?"
    return advice
