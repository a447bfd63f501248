"""Answers and verdicts as Markdown: a table per question, and why a cell says n/a."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import judge

QUESTIONS = {
    "resolve": "Names to a spec: one array, two rules",
    "plan": "A plan of Llama 3 8B: 291 arrays, twelve rules, data=2 and model=4",
    "shard_tree": "An existing tree: 32 host arrays, 64 MiB, over 8 devices",
    "init": "Born sharded: 16 arrays over 8 devices, compilation included",
}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def timing(
    question: str, rounds: dict[str, list[dict[str, Any]]], verdicts: dict[str, tuple[str, str]]
) -> str:
    """One row a peer: the median over the rounds of its first and of its later calls."""
    ours = {kind: _seconds(rounds["axisrules"], kind) for kind in ("first", "again")}
    rows = []
    for peer, answers in rounds.items():
        verdict, why = verdicts[peer]
        if verdict != judge.RIGHT:
            rows.append((peer, *[verdict] * 3, _short(why)))
            continue
        times = {kind: _seconds(answers, kind) for kind in ours}
        judged = "again" if ours["again"] is not None else "first"
        rows.append(
            (peer, _duration(times["first"]), _duration(times["again"]), _ratio(times, ours, judged), "right")
        )
    head = ("", "first call", "later calls", "relative to axisrules", "layout")
    return f"**{QUESTIONS[question]}**\n\n{markdown(head, rows)}"


def _seconds(answers: list[dict[str, Any]], kind: str) -> float | None:
    found = [answer[kind] for answer in answers if kind in answer]
    return median(found) if found else None


def _ratio(times: dict[str, Any], ours: dict[str, Any], kind: str) -> str:
    """How many times as long as axisrules; under 1 is faster."""
    if not times[kind] or not ours[kind]:
        return ""
    ratio = times[kind] / ours[kind]
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    unit, size = next(
        ((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if seconds >= s), ("ns", 1e-9)
    )
    return f"{seconds / size:.3g} {unit}"


def _short(why: str) -> str:
    return why.split("\n")[0][:120]


def counts(verdicts: dict[str, list[tuple[str, str]]]) -> str:
    """How many inputs each peer gets right, silently wrong, or refuses."""
    rows = [
        (peer, *[str(Counter(verdict for verdict, _ in found)[one]) for one in judge.VERDICTS])
        for peer, found in verdicts.items()
    ]
    return markdown(("", *judge.VERDICTS), rows)


def inputs(cases: list[dict[str, Any]], verdicts: dict[str, list[tuple[str, str]]]) -> str:
    """One row a report; where it has several runs, their verdicts in their order."""
    at = defaultdict(list)
    for number, case in enumerate(cases):
        at[case["id"], case["from"]].append(number)
    rows = [
        (
            f"{one} {source}",
            *[" / ".join(found[number][0] for number in numbers) for found in verdicts.values()],
        )
        for (one, source), numbers in at.items()
    ]
    return markdown(("input", *verdicts), rows)


def reasons(cases: list[dict[str, Any]], verdicts: dict[str, list[tuple[str, str]]]) -> str:
    """Why a peer is not asked, by peer."""
    lines = []
    for peer, found in verdicts.items():
        why = defaultdict(dict)
        for case, (verdict, text) in zip(cases, found, strict=True):
            if verdict == judge.NOT_APPLICABLE:
                why[text][case["id"]] = None
        said = "; ".join(f"{text} ({', '.join(ids)})" for text, ids in why.items())
        lines.append(f"- {peer}: {said}" if said else f"- {peer}: none")
    return "\n".join(lines)


def everything(cases: list[dict[str, Any]], verdicts: dict[str, list[tuple[str, str]]]) -> str:
    """Every verdict with its reason in full, for who doubts one."""
    return "\n".join(
        f"{peer} {case['id']}: {verdict}: {' '.join(why.split())}"
        for peer, found in verdicts.items()
        for case, (verdict, why) in zip(cases, found, strict=True)
    )
