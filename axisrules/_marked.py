"""What a plan makes of the marks of a name table: whole groups, and remarks about fused parts.

Owns no decision about an axis. A dimension of groups is resolved by the engine as one of as many
elements as it has groups, so that every policy about divisibility holds for whole groups; this file
counts them and says so in the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from axisrules._errors import AxisRulesError, DivisibilityError
from axisrules._marks import Fused, Marks
from axisrules._plan import Placement, ReportRow
from axisrules._resolution import Dim, Resolution, axes_text

Shape = tuple[int, ...]
_IN_ELEMENTS = {"indivisible", "size_one_dim"}  # reasons that speak of sizes


class Groups(NamedTuple):
    """How many groups a dimension consists of."""

    dim: int
    number: int

    def counted(self, shape: Shape) -> Shape:
        """The shape with groups in place of elements."""
        return (*shape[: self.dim], self.number, *shape[self.dim + 1 :])


class Marked(NamedTuple):
    """What the marks of a table say of the arrays of one tree, by path."""

    fused: dict[str, Fused]
    groups: dict[str, Groups]

    def moved(self, places: Mapping[str, tuple[str, tuple[int, ...], int]]) -> Marked:
        """The same of arrays that are renamed, transposed or stacked.

        Args:
            places: Per new path the old one, per dimension the old one, and how many come before.
        """
        fused, groups = {}, {}
        for path, (old, order, before) in places.items():
            if old in self.fused:
                mark = self.fused[old]
                fused[path] = mark._replace(dim=before + order.index(mark.dim))
            if old in self.groups:
                counted = self.groups[old]
                groups[path] = counted._replace(dim=before + order.index(counted.dim))
        return Marked(fused, groups)


def find_marked(marks: Mapping[str, Marks], paths: Iterable[str], leaves: Iterable[Any]) -> Marked:
    """What marks say of the arrays of a tree, with the number of groups of those that have some.

    An array without the one beside it that tells has none. Groups of unequal size are one group:
    none of their borders is where a shard would end.
    """
    if not marks:
        return Marked({}, {})
    shapes = {path: tuple(getattr(leaf, "shape", ())) for path, leaf in zip(paths, leaves, strict=True)}
    fused, groups = {}, {}
    for path, mark in marks.items():
        own, like = shapes[path], mark.groups
        if mark.fused is not None and mark.fused.dim < len(own):
            fused[path] = mark.fused
        beside = shapes.get(_beside(path, like.like), ()) if like is not None else ()
        if like is not None and like.dim < len(own) and beside and beside[0] > 0:
            groups[path] = Groups(like.dim, beside[0] if own[like.dim] % beside[0] == 0 else 1)
    return Marked(fused, groups)


def _beside(path: str, name: str) -> str:
    """The path of a sibling; ``.`` separates as ``/`` does."""
    return path[: max(path.rfind("/"), path.rfind(".")) + 1] + name


def tell_in_groups(found: Resolution, groups: Groups, shape: Shape) -> Resolution:
    """A resolution of counted groups, told in the elements that the array has."""
    dims = list(found.dims)
    dims[groups.dim] = _tell_dim(dims[groups.dim], shape[groups.dim])
    problems = tuple(_tell_problem(problem, groups, shape) for problem in found.problems)
    return found._replace(dims=tuple(dims), problems=problems)


def _tell_dim(dim: Dim, size: int) -> Dim:
    if size == dim.size:
        return dim
    skips = tuple(
        skip._replace(reason="splits_group") if skip.reason in _IN_ELEMENTS else skip for skip in dim.skips
    )
    reason = "splits_group" if dim.reason in _IN_ELEMENTS else dim.reason
    return dim._replace(size=size, reason=reason, skips=skips)


def _tell_problem(problem: AxisRulesError, groups: Groups, shape: Shape) -> AxisRulesError:
    facts = {**problem.facts, "shape": shape}
    headline = problem.headline
    if isinstance(problem, DivisibilityError) and facts["dim"] == groups.dim:
        size, facts["size"] = facts["size"], shape[groups.dim]
        over = axes_text(facts["axes"], tuple(facts["mesh"].items()))
        headline = (
            f"dimension {groups.dim} ({facts['name']!r}, size {shape[groups.dim]}) consists of "
            f"{size} groups, which do not divide over {over}"
        )
    return type(problem)(headline, paths=problem.paths, fix=problem.fix, failures=problem.failures, **facts)


def fused_notes(fused: Mapping[str, Fused], placements: Iterable[Placement]) -> Iterator[ReportRow]:
    """A row for every split dimension in which several matrices are fused."""
    for placement in placements if fused else ():
        mark = fused.get(placement.path)
        if mark is None:
            continue
        dim = placement.resolution.dims[mark.dim]
        ways = math.prod(placement.sizes[axis] for axis in dim.axes)
        reason = _reason(mark, placement.shape[mark.dim], ways) if ways > 1 else None
        if reason is not None:
            axis = dim.axes[0] if len(dim.axes) == 1 else None
            yield ReportRow(
                placement.path, mark.dim, dim.name, reason, dim.rule, axis, None, placement.nbytes
            )


def _reason(fused: Fused, size: int, ways: int) -> str | None:
    """What a split into equal shards does to the parts."""
    if fused.order == "concat":
        return "cuts_fused"
    if fused.order == "interleaved":
        return "cuts_fused" if (size // ways) % len(fused.parts) else None
    if fused.blocks is None:
        return "splits_heads"
    return "cuts_fused" if fused.blocks % ways else None
