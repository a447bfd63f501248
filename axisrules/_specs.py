"""Partition specs: made from axes, and checked where a user gives one as the layout itself.

Owns the form of a spec. Applies no rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from jax.sharding import PartitionSpec

from axisrules._errors import SpecError
from axisrules._names import UNCONSTRAINED
from axisrules._resolution import Dim, Resolution, Sizes, axes_text
from axisrules._rules import Rules
from axisrules._text import did_you_mean, format_mesh, format_spec, nearest


@lru_cache(maxsize=65536)
def make_spec(entries: tuple[Any, ...]) -> PartitionSpec:
    """A partition spec of tuples of axes, of which ``()`` is whole."""
    return PartitionSpec(*[
        entry if entry is UNCONSTRAINED else entry[0] if len(entry) == 1 else entry or None
        for entry in entries
    ])  # fmt: skip


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec; none for a dimension that is whole or open."""
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def check_spec(
    spec: PartitionSpec,
    rules: Rules,
    sizes: Sizes,
    shape: tuple[int, ...],
    *,
    unconstrained: bool = False,
) -> Resolution:
    """The resolution of an array whose layout is given as a spec, checked against mesh and shape."""
    axes = list(map(axes_of, spec))
    known = dict(sizes)
    problems = [*_spec_problems(spec, axes, known, shape)]
    if not unconstrained:
        problems += _open_problems(spec, known, shape)
    axes += [()] * (len(shape) - len(axes))
    dims = tuple(Dim(None, size, held, "explicit_spec") for size, held in zip(shape, axes, strict=False))
    entries = [*spec, *[()] * (len(shape) - len(spec))]
    whole = PartitionSpec() if problems else make_spec(tuple(
        entry if entry is UNCONSTRAINED else held for entry, held in zip(entries, axes, strict=True)
    ))  # fmt: skip
    return Resolution(whole, dims, (None,) * len(shape), rules, sizes, tuple(problems))


def _spec_problems(
    spec: PartitionSpec, axes: list[tuple[str, ...]], sizes: dict[str, int], shape: tuple[int, ...]
) -> Iterable[SpecError]:
    odd = [entry for entry in spec if not (entry is None or isinstance(entry, (str, tuple)))]
    odd = [entry for entry in odd if entry is not UNCONSTRAINED]
    facts: dict[str, Any] = {"shape": shape, "mesh": sizes, "spec": spec}
    text = format_spec(spec)
    if len(axes) > len(shape):
        yield SpecError(
            f"{text} has {len(axes)} entries for {len(shape)} dimensions", fix="drop entries.", **facts
        )
        return
    if odd or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        yield SpecError(
            f"{spec} is no layout of mesh axes", fix="use mesh axes, tuples of them, or None.", **facts
        )
        return
    used = [axis for held in axes for axis in held]
    for axis in dict.fromkeys(used):
        if axis not in sizes:
            yield SpecError(
                f"{text} names {axis!r}, which is no mesh axis{did_you_mean(axis, sizes)}",
                axis=axis, nearest=nearest(axis, sizes), fix=f"mesh axes: {format_mesh(sizes)}.", **facts,
            )  # fmt: skip
        if used.count(axis) > 1:
            yield SpecError(f"{text} uses mesh axis {axis!r} twice", axis=axis, fix="use it once.", **facts)
    for dim, held in enumerate(axes):
        ways = math.prod(sizes.get(axis, 1) for axis in held)
        if shape[dim] % ways:
            yield SpecError(
                f"dimension {dim} (size {shape[dim]}) does not divide over "
                f"{axes_text(held, tuple(sizes.items()))}",
                dim=dim, size=shape[dim], axes=held, fix=f"choose axes that divide {shape[dim]}.", **facts,
            )  # fmt: skip


def _open_problems(spec: PartitionSpec, sizes: dict[str, int], shape: tuple[int, ...]) -> Iterable[SpecError]:
    for dim, entry in enumerate(spec):
        if entry is UNCONSTRAINED:
            yield SpecError(
                f"{format_spec(spec)} leaves dimension {dim} unconstrained, which is no layout",
                dim=dim, shape=shape, mesh=sizes, spec=spec, fix="write None or mesh axes.",
            )  # fmt: skip
