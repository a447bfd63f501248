"""What a finding of ``lint`` is, and the codes that there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Every code with what it is about; the order is that in which findings of one severity are listed.
CODES = {
    "waste": "the layout holds much more per device than it would if every array were split",
    "absent_axis": "rules name an axis that the mesh lacks",
    "unknown_name": "arrays bear a name that no rule mentions",
    "dead_rule": "a rule can never apply",
    "idle_axis": "a mesh axis splits no array",
    "indivisible": "dimensions do not divide over the axes that a rule gives them",
    "cuts_fused": "a split goes through matrices that are fused in one array",
    "splits_heads": "a split may go through heads that are fused in one array",
    "rival_names": "two names always fight for one mesh axis",
    "size_one_axis": "an axis of size 1 decides nothing here, and would block a rule elsewhere",
    "fallback_rule": "a rule applies only where a dimension does not divide",
    "unused_rule": "rules that this plan does not use",
}
SEVERITIES = ("warning", "note")


@dataclass(frozen=True)
class Finding:
    """Something that the owner of rules may want to change; ``str()`` tells it.

    Attributes:
        code: A key of the table of codes.
        severity: ``"warning"``, or ``"note"`` for what may well be on purpose.
        message: What was found, in a sentence.
        fix: What to do about it.
        rule: Position of the rule that it is about, or of the first of them; ``None`` where it is
            about no rule.
        rules: Positions of all rules that it is about.
        names: The logical names that it is about.
        axis: The mesh axis that it is about.
        nearest: The known word that is nearest to one that is not.
        paths: The arrays where it happens, in a plan.
        bytes: Bytes of these arrays, whole.
    """

    code: str
    severity: str
    message: str
    fix: str
    rule: int | None = None
    rules: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    axis: str | None = None
    nearest: str | None = None
    paths: tuple[str, ...] = ()
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.severity} {self.code}: {self.message}\n  fix: {self.fix}"


def finding(
    code: str, severity: str, message: str, fix: str, *, rules: Iterable[int] = (), **facts: Any
) -> Finding:
    """A finding; the first of several rules stands as ``rule`` too."""
    known = tuple(rules)
    return Finding(code, severity, message, fix, known[0] if known else None, known, **facts)


def ordered(found: list[Finding]) -> tuple[Finding, ...]:
    """Findings, the gravest first."""
    codes = list(CODES)
    return tuple(sorted(found, key=lambda one: (SEVERITIES.index(one.severity), codes.index(one.code))))
