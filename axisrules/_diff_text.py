"""How the difference of two plans reads; arrays that change alike are told together.

Owns the sentences alone. Compares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from axisrules._columns import alike
from axisrules._text import format_mesh, format_rule, format_spec

if TYPE_CHECKING:
    from axisrules._plan import Placement
    from axisrules._plan_diff import LeafChange, PlanDiff


_SHOWN = 20  # paths of arrays that came or went


def diff_lines(found: PlanDiff) -> Iterator[str]:
    """The difference, line by line."""
    before, after = found.before, found.after
    meshes = [format_mesh(dict(plan.mesh.shape_tuple)) for plan in (before, after)]
    where = meshes[0] if meshes[0] == meshes[1] else f"{meshes[0]} -> {meshes[1]}"
    yield (
        f"{len(found.changed)} of {len(after.placements)} arrays change on {where}; bytes per device: "
        f"{before.bytes_per_device:,} -> {after.bytes_per_device:,} ({found.bytes_per_device:+,})"
    )
    if found.received:
        crossing = ", ".join(f"{size:,} over {axis}" for axis, size in found.over.items() if size)
        new = f", {found.to_new_devices:,} to new devices" if found.to_new_devices else ""
        yield (
            f"moving a live tree: {found.received:,} bytes received by all devices, {found.most:,} by one "
            f"at most{': ' if crossing else ''}{crossing}{new}"
        )
    yield from _rule_lines(found)
    if before.memory_kind != after.memory_kind:
        yield f"memory: {before.memory_kind or 'the default'} -> {after.memory_kind or 'the default'}"
    for sign, paths in (("-", found.removed), ("+", found.added)):
        yield from (f"{sign} {path}" for path in paths[:_SHOWN])
        if len(paths) > _SHOWN:
            yield f"{sign} ... and {len(paths) - _SHOWN} more"
    yield from _change_lines(found.changed)


def _rule_lines(found: PlanDiff) -> Iterator[str]:
    for sign, plan, indexes in (
        ("-", found.before, found.rules_removed),
        ("+", found.after, found.rules_added),
    ):
        yield from (f"{sign} rule {format_rule(i, *plan.rules.pairs[i])}" for i in indexes)
    reordered = not (found.rules_removed or found.rules_added)
    if reordered and found.before.rules != found.after.rules:
        yield "the rules stand in another order"


def _change_lines(changed: tuple[LeafChange, ...]) -> Iterator[str]:
    groups: dict[Any, list[LeafChange]] = {}
    for one in changed:
        key = (_facts(one.before), _facts(one.after), one.what, one.dims)
        groups.setdefault(key, []).append(one)
    for group in groups.values():
        first = group[0]
        yield f"{len(group)} x {alike([one.path for one in group])}: {_difference(first)}"
        for dim in first.dims:
            yield f"    dimension {dim.dim} {dim.name!r} was {dim.why_before}"
            yield f"    {'now':>{len(f'dimension {dim.dim} {dim.name!r} was')}} {dim.why_after}"


def _facts(placement: Placement) -> tuple[Any, ...]:
    return placement.shape, placement.dtype, placement.names, placement.spec


def _difference(change: LeafChange) -> str:
    values: Mapping[str, tuple[Any, Any]] = {
        "shape": (change.before.shape, change.after.shape),
        "dtype": (change.before.dtype, change.after.dtype),
        "names": (change.before.names, change.after.names),
        "spec": (format_spec(change.before.spec), format_spec(change.after.spec)),
        "mesh": (change.before.ways, change.after.ways),
    }
    words = {"mesh": "ways split"}
    texts = [f"{words.get(key, key)} {values[key][0]} -> {values[key][1]}" for key in change.what]
    return f"{', '.join(texts)}; {change.bytes_per_device:+,} bytes per device each"
