"""What a plan costs, as tables for a page: memory and traffic, with their sources.

Owns the words alone; the numbers are those of ``axisrules.cost``.
"""

from __future__ import annotations

from typing import Any

from axisrules._errors import UnknownNameError
from axisrules._plan import Plan
from axisrules.cost import Hardware, Memory, Traffic, memory, traffic
from axisrules.report._sheets import Sheet


def prices(plan: Plan, chip: Hardware, optimizer: Any, batch: str) -> tuple[Sheet, ...]:
    """The tables of one plan.

    Raises:
        StateError: An array of the optimizer's state belongs to no parameter.
    """
    held = memory(plan, optimizer, hardware=chip)
    sheets = [_memory(held), *_traffic(plan, chip, batch)]
    known = [Sheet(f"Figures of {chip.name}: {one}", (), ()) for one in chip.source]
    return (*sheets, *known)


def _memory(held: Memory) -> Sheet:
    rows = [(kind, f"{size:,}") for kind, size in (*held.kinds.items(), ("all", held.bytes_per_device))]
    if held.host:
        rows.append(("on the host", f"{held.host:,}"))
    return Sheet(
        f"Memory per device: {held.verdict}",
        ("kind", "bytes"),
        tuple(rows),
        (1,),
        (f"Source: {held.source}",),
    )


def _traffic(plan: Plan, chip: Hardware, batch: str) -> list[Sheet]:
    title = "Weights and gradients that a device sends per step"
    try:
        moved = traffic(plan, batch, chip)
    except UnknownNameError as error:  # rules that name no batch still have a page
        return [Sheet(f"{title}: unknown", (), (), (), (error.headline,))]
    return [_sent(title, moved)]


def _sent(title: str, moved: Traffic) -> Sheet:
    rows = [
        (axis, f"{size:,}", _least(moved.seconds_per_axis[axis]))
        for axis, size in moved.wire_bytes_per_axis.items()
    ]
    reasons = [f"No number for {axis}: {reason}." for axis, reason in moved.reasons.items()]
    notes = (*reasons, *(f"Assumes {one}." for one in moved.assumes), f"Source: {moved.source}")
    nothing = "" if rows or reasons else ": nothing"
    return Sheet(f"{title}{nothing}", ("mesh axis", "bytes", "at least"), tuple(rows), (1, 2), notes)


def _least(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.2f} ms"
