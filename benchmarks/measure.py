"""What every benchmark shares: interleaved timing, and the rows of the table.

A figure here is never judged alone: it is the best of several rounds, taken in turn with those of
what it is compared to, in one run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import repeat
from time import perf_counter
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One row of the table; a row that falls short says so and fails no test."""

    what: str
    ours: str
    theirs: str
    ratio: str
    reach: str
    reached: bool


def interleaved(
    benchmark: Any,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    rounds: int,
    number: int = 1,
    warmup: int = 1,
) -> tuple[float, float]:
    """The best seconds per call of both, over rounds of ``number`` calls taken in turn.

    ``benchmark`` is the fixture of pytest-benchmark: it runs the rounds, and keeps those of ``ours``
    for its ``--benchmark-json`` and ``--benchmark-compare``.
    """
    found: dict[Callable[[], Any], float] = {}

    def run(function: Callable[[], Any]) -> None:
        gc.collect()
        start = perf_counter()
        for _ in repeat(None, number):
            function()
        elapsed = (perf_counter() - start) / number
        found[function] = min(elapsed, found.get(function, elapsed))

    def peer() -> None:
        run(theirs)

    # The collector stays on, as it is for users. It starts every run alike, and leaves alone what was
    # there before, so that its pauses do not always meet the same one of the two.
    gc.collect()
    gc.freeze()
    benchmark.pedantic(run, args=(ours,), setup=peer, rounds=rounds, warmup_rounds=warmup)
    gc.unfreeze()
    benchmark.extra_info.update(calls=number, ours=found[ours], theirs=found[theirs])
    return found[ours], found[theirs]


def faster(what: str, times: tuple[float, float], peer: str, reach: int) -> Row:
    """A row for what should be ``reach`` times as fast as the peer."""
    ours, theirs = times
    ratio = theirs / ours
    goal = f"{reach}x faster" if reach > 1 else "not slower"
    return Row(what, duration(ours), f"{peer}: {duration(theirs)}", _times(ratio), goal, ratio >= reach)


def _times(ratio: float) -> str:
    if ratio < 1:
        return f"{1 / ratio:.1f}x slower"
    return f"{ratio:.0f}x faster" if ratio >= 10 else f"{ratio:.1f}x faster"


def duration(seconds: float) -> str:
    """Three digits and the fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def markdown(rows: Sequence[Row]) -> list[str]:
    """The lines of the table."""
    head = ("what", "axisrules", "against", "ratio", "to reach", "reached?")
    cells = [(*row[:-1], "yes" if row.reached else "short") for row in rows]
    return ["| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *cells)]
