"""``lint``: what is wrong or odd about rules, by themselves, on a mesh and in a plan.

Owns the checks that need the rules and the sizes of a mesh. Those that need a plan stand in
``_lint_plan.py``. Resolves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from axisrules._errors import PlanError
from axisrules._meshes import MeshLike, active_mesh, as_mesh, axis_sizes
from axisrules._plan import Plan
from axisrules._rules import Rules, RulesLike, as_rules
from axisrules._scope import need_rules
from axisrules._text import did_you_mean, format_mesh, format_rule, nearest
from axisrules.report._findings import Finding, finding, ordered
from axisrules.report._lint_plan import decided, lint_plan

Sizes = Mapping[str, int] | None


def lint(
    rules: RulesLike | None = None, mesh: MeshLike | None = None, plan: Plan | None = None
) -> tuple[Finding, ...]:
    """What is wrong or odd about rules: findings with a code, the rules and a fix.

    The rules alone tell which of them can never apply and which names can never both be split. A
    mesh tells which axes are missing, idle or of size 1. A plan tells which rules and names it uses,
    what did not divide, which names fought for an axis, and what is wasted. Findings that are alike
    are one, with all their rules.

    Args:
        rules: The rules; by default those of the plan, else the active ones.
        mesh: A mesh, a mapping of axis sizes or a text; by default that of the plan, else the
            active one, if there is one.
        plan: A plan under these rules on this mesh.

    Returns:
        The findings, the gravest first.

    Raises:
        PlanError: The plan was made under other rules or on another mesh.
        AxisRulesError: Rules or mesh are malformed, or there are no rules.

    Example:
        >>> import axisrules as ar
        >>> for one in ar.report.lint([("embed", None), ("mlp", "model"), ("embed", "data")]):
        ...     print(one)
        warning dead_rule: rule #2 embed -> data can never apply: rule #0 embed -> None settles embed
          fix: remove rule #2, or move it before rule #0.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is no plan", fix="pass plan=axisrules.plan(...).")
    found_rules = _rules(rules, plan)
    sizes = _sizes(mesh, plan)
    found = [*_dead(found_rules, sizes, plan)]
    if sizes is not None:
        found += _absent(found_rules, sizes, dropped=plan is not None)
    if plan is not None:
        dead = [one for one in found if one.code == "dead_rule"]
        known = {
            index for one in dead for index in (one.rules[:1] if one.severity == "warning" else one.rules)
        }
        found += lint_plan(plan, dead=frozenset(known))
        return ordered(found)
    found += _rivals(found_rules, sizes)
    if sizes is not None:
        found += [*_idle(found_rules, sizes), *_size_one(found_rules, sizes)]
    return ordered(found)


def _rules(rules: RulesLike | None, plan: Plan | None) -> Rules:
    if rules is None:
        return need_rules(None) if plan is None else plan.rules
    found = as_rules(rules)
    if plan is not None and found != plan.rules:
        raise PlanError(
            "the plan was made under other rules", fix="leave out rules=, or plan under these rules."
        )
    return found


def _sizes(mesh: MeshLike | None, plan: Plan | None) -> Sizes:
    if mesh is None:
        known = active_mesh() if plan is None else plan.mesh
        return None if known is None else dict(axis_sizes(known))
    sizes = dict(axis_sizes(as_mesh(mesh)))
    if plan is not None and sizes != dict(plan.mesh.shape_tuple):
        raise PlanError(
            f"the plan was made on {format_mesh(dict(plan.mesh.shape_tuple))}, not on {format_mesh(sizes)}",
            fix="leave out mesh=, or plan on this mesh.",
        )
    return sizes


def _splitting(axes: tuple[str, ...], sizes: Sizes) -> frozenset[str]:
    """The axes of a rule that split something; all of them without a mesh."""
    return frozenset(axes if sizes is None else [axis for axis in axes if sizes.get(axis, 1) > 1])


def _rule(rules: Rules, index: int) -> str:
    return f"rule {format_rule(index, *rules.pairs[index])}"


# Rules that can never apply.


def _dead(rules: Rules, sizes: Sizes, plan: Plan | None) -> Iterator[Finding]:
    used = frozenset[int]() if plan is None else decided(plan)
    free = _always_free(rules, sizes)
    fallbacks, here = [], []
    for name, own in rules.by_name.items():
        for position, (index, axes) in enumerate(own):
            if position == 0 or index in used:
                continue
            blocker = _blocker(own[:position], axes, None)
            if blocker is not None:
                yield _dead_rule(rules, name, index, blocker)
            elif _blocker(own[:position], axes, sizes) is not None:
                here.append(index)
            elif axes and any(earlier in free for earlier, _ in own[:position]):
                fallbacks.append(index)
    if here and sizes is not None:
        what = f"can never apply on {format_mesh(sizes)}, where an earlier rule for the name wants no more"
        yield _several("dead_rule", rules, here, what, "nothing, if the rules are for other meshes too.")
    if fallbacks and plan is None:  # a plan says which of them it uses
        what = "can only apply where a dimension does not divide: an earlier rule for the name is always free"
        fix = 'plan with indivisible="next" to use what is listed, or remove it.'
        yield _several("fallback_rule", rules, fallbacks, what, fix)


def _blocker(earlier: list[tuple[int, tuple[str, ...]]], axes: tuple[str, ...], sizes: Sizes) -> int | None:
    """The earlier rule for the same name that is skipped only where this one is too, if any."""
    for index, held in earlier:
        if not held or held == axes:
            return index
        splitting = _splitting(held, sizes)
        if splitting and splitting <= _splitting(axes, sizes):
            return index
    return None


def _dead_rule(rules: Rules, name: str, index: int, blocker: int) -> Finding:
    before = rules.pairs[blocker][1]
    why = f"settles {name}" if not before else "is tried first, and skipped only where this one is too"
    return finding(
        "dead_rule",
        "warning",
        f"{_rule(rules, index)} can never apply: {_rule(rules, blocker)} {why}",
        f"remove rule #{index}, or move it before rule #{blocker}.",
        rules=(index, blocker),
        names=(name,),
    )


def _always_free(rules: Rules, sizes: Sizes) -> frozenset[int]:
    """The rules whose axes no earlier rule of another name can claim."""
    claimers: dict[str, set[str]] = {}  # names by axis
    free = []
    for index, (name, axes) in enumerate(rules.pairs):
        splitting = _splitting(axes, sizes)
        if splitting and all(claimers.get(axis, set()) <= {name} for axis in splitting):
            free.append(index)
        for axis in splitting:
            claimers.setdefault(axis, set()).add(name)
    return frozenset(free)


def _several(code: str, rules: Rules, indexes: list[int], what: str, fix: str) -> Finding:
    """One note about several rules."""
    texts = ", ".join(format_rule(index, *rules.pairs[index]) for index in indexes)
    return finding(
        code,
        "note",
        f"{'a rule' if len(indexes) == 1 else f'{len(indexes)} rules'} {what}: {texts}",
        fix,
        rules=indexes,
        names=tuple(dict.fromkeys(rules.pairs[index][0] for index in indexes)),
    )


# Rules and the axes of a mesh.


def _by_axis(rules: Rules) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, (_, axes) in enumerate(rules.pairs):
        for axis in axes:
            found.setdefault(axis, []).append(index)
    return found


def _absent(rules: Rules, sizes: Mapping[str, int], *, dropped: bool) -> Iterator[Finding]:
    """Axes that the mesh lacks; of a plan they were dropped on purpose, but for what looks misspelt."""
    for axis, indexes in _by_axis(rules).items():
        if axis in sizes:
            continue
        count = f"{len(indexes)} rules name" if len(indexes) > 1 else f"{_rule(rules, indexes[0])} names"
        close = nearest(axis, sizes)
        yield finding(
            "absent_axis",
            "note" if dropped and close is None else "warning",
            f"{count} {axis!r}, which is no axis of the mesh {format_mesh(sizes)}{did_you_mean(axis, sizes)}",
            'correct the rules, or plan with absent="drop" to leave out what the mesh lacks.',
            rules=indexes,
            names=tuple(dict.fromkeys(rules.pairs[index][0] for index in indexes)),
            axis=axis,
            nearest=close,
        )


def _idle(rules: Rules, sizes: Mapping[str, int]) -> Iterator[Finding]:
    known = _by_axis(rules)
    for axis, size in sizes.items():
        if size > 1 and axis not in known:
            yield finding(
                "idle_axis",
                "warning",
                f"no rule uses mesh axis {axis}={size}, so that {size} devices hold the same",
                f"add rules that use {axis}, or give its devices to another axis.",
                axis=axis,
            )


def _rivals(rules: Rules, sizes: Sizes) -> Iterator[Finding]:
    """Names whose rules all want one axis, so that no two of them can both be split in one array."""
    wanted: dict[str, list[str]] = {}
    for name, own in rules.by_name.items():
        options = [_splitting(axes, sizes) for _, axes in own]
        for axis in sorted(frozenset.intersection(*options)):
            wanted.setdefault(axis, []).append(name)
    for axis, names in wanted.items():
        if len(names) > 1:
            yield finding(
                "rival_names",
                "note",
                f"every rule for {', '.join(names)} wants mesh axis {axis!r}: where two of them meet in one "
                "array, the rule that stands first wins and the other dimension stays whole",
                "give those that meet in one array a second rule with another axis.",
                rules=sorted(index for name in names for index, _ in rules.by_name[name]),
                names=tuple(names),
                axis=axis,
            )


def _size_one(rules: Rules, sizes: Mapping[str, int]) -> Iterator[Finding]:
    for axis, indexes in _by_axis(rules).items():
        first = rules.pairs[indexes[0]][0]
        freed = [
            index
            for index in indexes[1:]
            if rules.pairs[index][0] != first and _splitting(rules.pairs[index][1], sizes)
        ]
        if sizes.get(axis) == 1 and freed:
            texts = ", ".join(format_rule(index, *rules.pairs[index]) for index in freed)
            yield finding(
                "size_one_axis",
                "note",
                f"mesh axis {axis!r} has size 1 and decides nothing; where it is larger, and in systems that "
                f"let it claim a dimension, {_rule(rules, indexes[0])} can keep these from applying: {texts}",
                f"give these rules without {axis} as fallbacks, if the rules are to be used elsewhere.",
                rules=[*freed, indexes[0]],
                names=tuple(dict.fromkeys(rules.pairs[index][0] for index in freed)),
                axis=axis,
            )
