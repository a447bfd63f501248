"""Rules that a search proposes.

Owns ``suggest`` and ``best_change``. The search stands in ``_climb.py``. Resolves nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axisrules._meshes import MeshLike
from axisrules._plan import Plan
from axisrules._planning import plan as make_plan
from axisrules._rules import Rules, RulesLike
from axisrules._text import format_count, format_mesh
from axisrules.cost._climb import Change, Search
from axisrules.cost._given import Step, check_axes, check_time_limit, made_by
from axisrules.cost._hardware import HardwareLike, as_hardware
from axisrules.cost._measure import Measured, measure
from axisrules.cost._search import Layout, Pricer, Score, as_pairs


@dataclass(frozen=True, eq=False)
class Suggestion:
    """Rules that a search proposes, and why.

    Attributes:
        rules: The rules.
        fill: The axes that ``plan`` fills after them, over what no rule can split; or none.
        plan: The plan that they give.
        score: Their score.
        start: Where the search began: the name of the best preset, or ``"given rules"``.
        start_score: The score of that.
        changes: What was changed from there, one rule at a time, and what each change gained.
        presets: The score of every preset, by name.
        exact: Whether every assignment of one rule per name was tried; else the search may have
            missed a better one.
        measured: What the compiler says of the best few, best first; empty without a step.
        why: In a sentence.
    """

    rules: Rules
    fill: tuple[str, ...]
    plan: Plan
    score: Score
    start: str
    start_score: Score
    changes: tuple[Change, ...]
    presets: Mapping[str, Score]
    exact: bool
    measured: tuple[Measured, ...]
    why: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``plan`` that the rules are meant for."""
        filled = {"fill": self.fill} if self.fill else {}
        return {"indivisible": "next", "absent": "drop", "unmapped": "replicate", **filled}

    def __str__(self) -> str:
        rows = [f"  {change}" for change in self.changes]
        how = "every assignment was tried" if self.exact else "not every assignment was tried"
        return "\n".join([self.why, *rows, f"  ({how})"])


def suggest(
    tree: Any,
    names: Any,
    mesh: MeshLike | None,
    batch: str = "batch",
    hardware: HardwareLike = None,
    step: Step | None = None,
    fixed: RulesLike | None = None,
    *,
    rules: RulesLike | None = None,
    optimizer: Any = None,
    time_limit: float = 4.0,
) -> Suggestion:
    """Rules for a tree on a mesh: those that fit, then move the least, then waste the least.

    Args:
        tree: The parameters, as for ``plan``.
        names: Their names, as for ``plan``.
        mesh: The mesh; only its sizes count.
        batch: The logical name of the batch.
        hardware: The accelerator. Without it nothing is known of memory and bandwidth: then waste
            decides, and bytes on the wires where it is equal.
        step: A function that makes of a plan the step and its arguments, ``(function, arguments)``.
            The best few rule sets are then compiled, and ranked by the compiler's bytes.
        fixed: Rules that stay as they are.
        rules: Rules to begin with, beside the presets.
        optimizer: The optimizer, as for ``memory``: its state has to fit too.
        time_limit: Seconds after which the search returns the best that it has found.

    Raises:
        HardwareError: The hardware is unknown.
        StateError: An array of the optimizer's state belongs to no parameter.
        AbsentAxisError: A fixed rule names an axis that the mesh lacks.
        PolicyError: ``time_limit`` is no number, or ``step`` returns no pair.
        AxisRulesError: The names do not fit the tree.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> from axisrules import cost
        >>> params = {"up": np.zeros((64, 256), np.float32), "down": np.zeros((256, 64), np.float32)}
        >>> found = cost.suggest(params, {"up": "embed mlp", "down": "mlp embed"}, "data=4,model=2")
        >>> round(found.score.waste, 2)
        1.0
    """
    check_time_limit(time_limit, at_once=True)
    pricer = Pricer(tree, names, mesh, batch, as_hardware(hardware), optimizer)
    pinned = as_pairs(fixed or ())
    check_axes(pinned, pricer.sizes)
    search = Search(pricer, pinned, time_limit)
    whole = {name: Layout(search.pinned(as_pairs(preset))) for name, preset in search.presets().items()}
    if rules is not None:
        whole["given rules"] = Layout(search.pinned(as_pairs(rules)))
    scores = {name: pricer.score(layout) for name, layout in whole.items()}
    named = {name: search.borne(layout) for name, layout in whole.items()}
    order = sorted(named, key=lambda name: search.score(named[name]).key)
    start = order[0]
    apart = {search.score(named[name]).key: named[name] for name in reversed(order)}
    search.explore([apart[key] for key in sorted(apart)], list(scores.values()))
    exact = search.try_all()
    found = search.winner(list(scores.values()))
    measured: tuple[Measured, ...] = ()
    if step is not None:
        found, measured = _compiled(search, found, step, tree, names)
    changes = tuple(search.changes(named[start], found))
    score, first = search.score(found), search.score(named[start])
    gained = f"from {first} to {score}" if score.beats(first) else f"nothing was gained: {score}"
    why = f"on {format_mesh(pricer.sizes)}, {format_count(len(changes), 'change')} of {start}: {gained}"
    plan = _plan(tree, names, pricer, found)
    return Suggestion(
        Rules((*found.pairs, *search.activations(found))),
        found.fill,
        plan,
        score,
        start,
        first,
        changes,
        scores,
        exact,
        measured,
        why,
    )


def _plan(tree: Any, names: Any, pricer: Pricer, layout: Layout) -> Plan:
    return make_plan(
        tree, names, mesh=pricer.mesh, rules=layout.pairs, indivisible="next", absent="drop",
        unmapped="replicate", fill=layout.fill or None,
    )  # fmt: skip


def best_change(
    rules: RulesLike,
    tree: Any,
    names: Any,
    mesh: MeshLike | None,
    batch: str = "batch",
    hardware: HardwareLike = None,
) -> Change | None:
    """The one rule whose change helps a rule set most, or ``None`` where none helps.

    Args:
        rules: The rule set.
        tree: The parameters, as for ``plan``.
        names: Their names, as for ``plan``.
        mesh: The mesh; only its sizes count.
        batch: The logical name of the batch.
        hardware: The accelerator, as for ``suggest``.

    Example:
        >>> import numpy as np
        >>> from axisrules import cost
        >>> rules = {"batch": "data", "embed": None, "mlp": "model"}
        >>> params = {"up": np.zeros((64, 256), np.float32)}
        >>> print(cost.best_change(rules, params, {"up": "embed mlp"}, "data=4,model=2"))
        embed: None -> data: 65,536 bytes instead of 49,152 bytes sent,
        1.000 instead of 4.000 times the ideal memory
    """
    pricer = Pricer(tree, names, mesh, batch, as_hardware(hardware))
    search = Search(pricer, (), math.inf)
    before = Layout(as_pairs(rules))
    best = before
    for candidate in search.neighbours(before):
        if search.score(candidate).key < search.score(best).key:
            best = candidate
    return next(search.changes(before, best), None)


def _compiled(
    search: Search, found: Layout, step: Step, tree: Any, names: Any
) -> tuple[Layout, tuple[Measured, ...]]:
    """The best few by the compiler's bytes."""
    tried: list[tuple[Layout, Measured]] = []
    for layout in dict.fromkeys([found, *search.ranked(3)]):
        function, arguments = made_by(step, _plan(tree, names, search.pricer, layout))
        tried.append((layout, measure(function, *arguments, hardware=search.pricer.chip)))
    tried.sort(key=lambda one: (search.score(one[0]).fits is False, one[1].seconds or 0.0, one[1].wire_bytes))
    return tried[0][0], tuple(measured for _, measured in tried)
