"""What the strict policies say when they refuse an array.

Owns the sentences and the remedies. Decides nothing: the engine hands in the facts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from axisrules._errors import (
    AbsentAxisError,
    AxisTakenError,
    DivisibilityError,
    RepeatedNameError,
    UnknownNameError,
)
from axisrules._names import Names
from axisrules._resolution import axes_text
from axisrules._text import did_you_mean, format_spec, nearest

Facts = dict[str, Any]  # names, shape, mesh, and where it is about a rule: rule, rule_text


def repeated_name(names: Names) -> RepeatedNameError | None:
    """The error of names in which one name stands twice, else ``None``."""
    if len(set(names)) == len(names):
        return None
    strings = [name for name in names if isinstance(name, str)]
    name = next((name for name in strings if strings.count(name) > 1), None)
    if name is None:
        return None  # only None, or an unconstrained dimension, may stand more than once
    first, second = [dim for dim, other in enumerate(names) if other == name][:2]
    return RepeatedNameError(
        f"dimensions {first} and {second} are both named {name!r}",
        name=name,
        dim=second,
        names=names,
        fix=f"rename one of them, for example {name + '_out'!r}, and give it a rule.",
    )


def absent(facts: Facts, axis: str) -> AbsentAxisError:
    """A rule names an axis that the mesh lacks."""
    return AbsentAxisError(
        f"the mesh has no axis {axis!r}{did_you_mean(axis, facts['mesh'])}",
        fix='correct the rule, or pass absent="drop" to leave out what the mesh lacks.',
        axis=axis,
        nearest=nearest(axis, facts["mesh"]),
        **facts,
    )


def taken(facts: Facts, dim: int, axis: str, holder: int) -> AxisTakenError:
    """Two dimensions want one mesh axis."""
    name, other = facts["names"][dim], facts["names"][holder]
    return AxisTakenError(
        f"dimensions {holder} ({other!r}) and {dim} ({name!r}) both want mesh axis {axis!r}",
        fix=f'pass taken="next", or give {name} a rule with another axis.',
        axis=axis,
        dim=dim,
        holder=holder,
        name=name,
        **facts,
    )


def indivisible(
    facts: Facts, dim: int, axes: tuple[str, ...], ways: int, otherwise: PartitionSpec
) -> DivisibilityError:
    """A dimension does not divide; ``otherwise`` is the spec under ``indivisible="next"``."""
    size, name = facts["shape"][dim], facts["names"][dim]
    product = f" = {ways}" if len(axes) > 1 else ""
    over = axes_text(axes, tuple(facts["mesh"].items()))
    return DivisibilityError(
        f"dimension {dim} ({name!r}, size {size}) does not divide over {over}{product}",
        fix=f'pass indivisible="next" (then: {format_spec(otherwise)}), '
        f"or prepend a rule for {name} whose axes divide {size}.",
        dim=dim,
        name=name,
        size=size,
        axes=axes,
        **facts,
    )


def unknown(facts: Facts, dim: int, known: Iterable[str]) -> UnknownNameError:
    """No rule mentions a name."""
    name = facts["names"][dim]
    return UnknownNameError(
        f"no rule mentions {name!r}, the name of dimension {dim}{did_you_mean(name, known)}",
        fix=f"add a rule for it, ({name!r}, None) where it is whole on purpose, "
        'or pass unmapped="replicate".',
        name=name,
        dim=dim,
        nearest=nearest(name, known),
        **facts,
    )
