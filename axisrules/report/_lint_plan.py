"""The findings that need a plan: what its arrays show about the rules.

Owns the checks; each reads the resolutions that the plan holds, and resolves nothing again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from axisrules._columns import alike
from axisrules._errors import REASONS
from axisrules._groups import Group, groups
from axisrules._plan import Plan, ReportRow
from axisrules._resolution import SKIPPED, Dim, Skip, axes_text
from axisrules._text import did_you_mean, format_rule, nearest
from axisrules.report._findings import Finding, finding
from axisrules.report._waste import waste

WASTE_FACTOR = 1.5  # how many times the ideal a device may hold before that is a finding

_Skipped = tuple[Group, int, Dim, Skip]


def decided(plan: Plan) -> frozenset[int]:
    """The rules that decided a dimension of the plan."""
    resolutions = {id(one.resolution): one.resolution for one in plan.placements}.values()
    dims = (dim for resolution in resolutions for dim in resolution.dims)
    return frozenset(dim.rule for dim in dims if dim.rule is not None and dim.reason not in SKIPPED)


def lint_plan(plan: Plan, dead: frozenset[int]) -> list[Finding]:
    """The findings about a plan; ``dead`` are the rules that were found to be so."""
    kinds = groups(plan)
    skipped = [
        (kind, number, dim, skip)
        for kind in kinds
        for number, dim in enumerate(kind.resolution.dims)
        for skip in dim.skips
    ]
    return [
        *_waste(plan),
        *_unknown(plan, kinds),
        *_idle(plan, kinds),
        *_indivisible(plan, skipped),
        *_fused(plan),
        *_rivals(plan, kinds, skipped),
        *_size_one(plan, kinds),
        *_unused(plan, dead),
    ]


def _where(kinds: Iterable[Group]) -> tuple[tuple[str, ...], int]:
    """The paths and the bytes of arrays, each kind once."""
    once = {id(kind): kind for kind in kinds}.values()
    paths = tuple(path for kind in once for path in kind.paths)
    return paths, sum(kind.nbytes * len(kind.paths) for kind in once)


def _in_arrays(paths: tuple[str, ...], size: int) -> str:
    few = ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")
    return f"in {len(paths)} {'array' if len(paths) == 1 else 'arrays'} of {size:,} bytes: {few}"


def _waste(plan: Plan) -> Iterator[Finding]:
    found = waste(plan)
    if found.factor <= WASTE_FACTOR:
        return
    worst = found.kinds[0]
    share = sum(one.share for one in worst)
    makes = "makes" if len(worst) == 1 else "make"
    fits: Counter[str] = Counter()
    for leaf in found.leaves:
        fits.update({one.axis: leaf.nbytes for one in leaf.free})
    advice = f', or pass fill="{fits.most_common(1)[0][0]}" to plan' if fits else ""
    yield finding(
        "waste",
        "warning",
        f"a device holds {found.bytes_per_device:,} bytes, {found.factor:.3g} times the ideal of "
        f"{found.ideal:,.0f}; {alike([one.path for one in worst])} {makes} {share:.1%} of the excess",
        f"give the arrays of axisrules.report.waste(plan) rules that split them{advice}.",
        paths=tuple(one.path for one in found.leaves),
        bytes=sum(one.nbytes for one in found.leaves),
    )


def _unknown(plan: Plan, kinds: list[Group]) -> Iterator[Finding]:
    by_name: dict[str, list[Group]] = {}
    for kind in kinds:
        for name in kind.resolution.unknown_names:
            by_name.setdefault(name, []).append(kind)
    for name, some in by_name.items():
        paths, size = _where(some)
        yield finding(
            "unknown_name",
            "warning",
            f"no rule mentions {name!r}, which stays whole {_in_arrays(paths, size)}"
            f"{did_you_mean(name, plan.rules.by_name)}",
            f"add a rule for it, ({name!r}, None) where it is whole on purpose, or correct the name.",
            names=(name,),
            nearest=nearest(name, plan.rules.by_name),
            paths=paths,
            bytes=size,
        )


def _idle(plan: Plan, kinds: list[Group]) -> Iterator[Finding]:
    used = {axis for kind in kinds for dim in kind.resolution.dims for axis in dim.axes}
    for axis, size in plan.mesh.shape_tuple:
        if size == 1 or axis in used or not kinds:
            continue
        indexes = [index for index, (_, axes) in enumerate(plan.rules.pairs) if axis in axes]
        yield finding(
            "idle_axis",
            "warning",
            f"no array uses mesh axis {axis}={size}, so that {size} devices hold the same",
            f'add a rule with {axis} for a name that the arrays bear, or pass fill="{axis}" to plan.',
            rules=indexes,
            axis=axis,
            bytes=plan.nbytes,
        )


def _indivisible(plan: Plan, skipped: list[_Skipped]) -> Iterator[Finding]:
    found: dict[tuple[int, int | None], list[_Skipped]] = {}
    for one in skipped:
        _, _, dim, skip = one
        if skip.reason in ("indivisible", "partly_divisible", "splits_group"):
            found.setdefault((skip.rule, dim.size), []).append(one)
    sizes = dict(plan.mesh.shape_tuple)
    for (rule, size), some in found.items():
        axes = [axis for axis in plan.rules.pairs[rule][1] if axis in sizes]
        ways = math.prod(sizes[axis] for axis in axes)
        paths, nbytes = _where(kind for kind, _, _, _ in some)
        whole = any(not dim.axes for _, _, dim, _ in some)
        name = plan.rules.pairs[rule][0]
        grouped = any(skip.reason == "splits_group" for _, _, _, skip in some)
        pad = "" if grouped else f"pad {name} to {-(-(size or 0) // ways) * ways}, or "
        parts = "the number of its groups" if grouped else str(size)
        yield finding(
            "indivisible",
            "warning" if whole else "note",
            f"{name!r} of size {size} does not divide{' in whole groups' if grouped else ''} over "
            f"{axes_text(axes, plan.mesh.shape_tuple)}: rule "
            f"{format_rule(rule, *plan.rules.pairs[rule])} was skipped or taken in part "
            f"{_in_arrays(paths, nbytes)}",
            f"{pad}give it a later rule whose axes divide {parts}.",
            rules=(rule,),
            names=(name,),
            paths=paths,
            bytes=nbytes,
        )


def _rivals(plan: Plan, kinds: list[Group], skipped: list[_Skipped]) -> Iterator[Finding]:
    """Pairs of names of which one always keeps the other from an axis, wherever both stand."""
    fights: dict[tuple[str, str, str], list[_Skipped]] = {}
    for one in skipped:
        kind, _, dim, skip = one
        if skip.reason in ("axis_taken", "partly_taken") and skip.holder is not None:
            holder = kind.resolution.names[skip.holder]
            if isinstance(holder, str) and skip.axis is not None:
                fights.setdefault((holder, dim.name, skip.axis), []).append(one)
    for (holder, loser, axis), some in fights.items():
        fought = {id(kind) for kind, _, _, _ in some}
        both = [kind for kind in kinds if {holder, loser} <= set(kind.first.names)]
        if any(id(kind) not in fought for kind in both):
            continue
        paths, size = _where(kind for kind, _, _, _ in some)
        whole = [dim for _, _, dim, _ in some if not dim.axes]
        free = _free_axes(plan, [kind for kind, _, _, _ in some])
        yield finding(
            "rival_names",
            "warning" if whole else "note",
            f"{holder!r} and {loser!r} always fight for mesh axis {axis!r}, and {holder!r} gets it "
            f"{_in_arrays(paths, size)}" + (f"; {loser!r} stays whole" if whole else ""),
            f"give {loser} a rule with another axis"
            + (f", such as ({loser!r}, {free[0]!r})." if free else "."),
            rules=tuple(dict.fromkeys(skip.rule for _, _, _, skip in some)),
            names=(holder, loser),
            axis=axis,
            paths=paths,
            bytes=size,
        )


def _fused(plan: Plan) -> Iterator[Finding]:
    """Splits through what is fused in one array, by rule."""
    found: dict[tuple[str, int | None], list[ReportRow]] = {}
    for row in plan.notes:
        if row.reason in ("cuts_fused", "splits_heads"):
            found.setdefault((row.reason, row.rule), []).append(row)
    for (reason, rule), rows in found.items():
        paths = tuple(row.path for row in rows)
        size = sum(row.bytes for row in rows)
        name = rows[0].name or "a dimension"
        yield finding(
            reason,
            "warning" if reason == "cuts_fused" else "note",
            f"{name!r} is {REASONS[reason][0]} {_in_arrays(paths, size)}",
            f"give {name} a rule of None, or take the parts apart when the arrays are loaded.",
            rules=() if rule is None else (rule,),
            names=() if rows[0].name is None else (rows[0].name,),
            paths=paths,
            bytes=size,
        )


def _free_axes(plan: Plan, kinds: list[Group]) -> list[str]:
    used = {axis for kind in kinds for dim in kind.resolution.dims for axis in dim.axes}
    return [axis for axis, size in plan.mesh.shape_tuple if size > 1 and axis not in used]


def _size_one(plan: Plan, kinds: list[Group]) -> Iterator[Finding]:
    """Rules that applied although an axis of size 1 of theirs stands elsewhere, or before them."""
    sizes = dict(plan.mesh.shape_tuple)
    freed: dict[str, list[tuple[Group, int]]] = {}
    for kind in kinds:
        dims = kind.resolution.dims
        for number, dim in enumerate(dims):
            if dim.rule is None or dim.reason in SKIPPED or not any(sizes[axis] > 1 for axis in dim.axes):
                continue
            wanted = plan.rules.pairs[dim.rule][1]
            elsewhere = {axis for n, other in enumerate(dims) if n != number for axis in other.axes}
            blocked = [a for a in wanted if a in elsewhere and a not in dim.axes]
            before = [a for a in dim.axes if a not in wanted]
            for axis in (*blocked, *before):
                if sizes[axis] == 1:
                    freed.setdefault(axis, []).append((kind, dim.rule))
    for axis, some in freed.items():
        rules = tuple(dict.fromkeys(rule for _, rule in some))
        paths, size = _where(kind for kind, _ in some)
        texts = ", ".join(format_rule(rule, *plan.rules.pairs[rule]) for rule in rules)
        yield finding(
            "size_one_axis",
            "note",
            f"mesh axis {axis!r} has size 1 and decides nothing; where it is larger, and in systems that let "
            f"it claim a dimension, these rules would not apply: {texts} {_in_arrays(paths, size)}",
            f"give these names rules without {axis} as fallbacks, if the rules are to be used elsewhere.",
            rules=rules,
            names=tuple(dict.fromkeys(plan.rules.pairs[rule][0] for rule in rules)),
            axis=axis,
            paths=paths,
            bytes=size,
        )


def _unused(plan: Plan, dead: frozenset[int]) -> Iterator[Finding]:
    """Rules that decided nothing: for names that no array bears, and for names that it bears."""
    used = decided(plan)
    borne = {name for placement in plan.placements for name in placement.names}
    idle = [index for index in range(len(plan.rules)) if index not in used and index not in dead]
    for bears, what, fix in (
        (False, "for names that no array bears", "keep them for other trees, or check the names' spelling."),
        (True, "for names that arrays bear, and never decided", "keep them as fallbacks, or remove them."),
    ):
        some = [index for index in idle if (plan.rules.pairs[index][0] in borne) == bears]
        if some:
            names = tuple(dict.fromkeys(plan.rules.pairs[index][0] for index in some))
            count = "1 rule is" if len(some) == 1 else f"{len(some)} rules are"
            message = f"{count} {what}: {', '.join(names)}"
            yield finding("unused_rule", "note", message, fix, rules=some, names=names)
