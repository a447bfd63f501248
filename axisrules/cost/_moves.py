"""Weights and gradients on the wires, as values, and the least time that they take.

Owns ``Move`` and ``Traffic``. How they come about stands in ``_flows.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from axisrules._text import format_mesh
from axisrules.cost._hardware import Hardware

SOURCE = (
    "the plan; ring formulas: https://jax-ml.github.io/scaling-book/sharding/; how often a weight moves: "
    "as XLA for TPU v5e does it (jax 0.10.2, libtpu 0.0.42)"
)


class Move(NamedTuple):
    """What equal arrays put on the wires.

    Attributes:
        path: The first of them.
        copies: How many there are.
        what: ``"weights"`` or ``"gradients"``.
        kind: The collective.
        axes: The mesh axes.
        wire_bytes: Bytes that a device sends for all of them per step.
    """

    path: str
    copies: int
    what: str
    kind: str
    axes: tuple[str, ...]
    wire_bytes: float


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes of weights and gradients that a device sends per step.

    Attributes:
        moves: What moves, by kind of array; also what is declined below.
        reasons: Per mesh axis, why a plan cannot tell what moves over it. An axis may have a number
            of weights and gradients and no reason, or a reason and no number.
        mesh: Axis sizes.
        hardware: The accelerator, if one was named.
        source: Where the numbers come from.
        assumes: What was taken for granted.
        displaced: Whether the compiler moves a part of it onto an axis that nothing uses.
    """

    moves: tuple[Move, ...]
    reasons: Mapping[str, str]
    mesh: Mapping[str, int]
    hardware: Hardware | None = None
    source: str = SOURCE
    assumes: tuple[str, ...] = ()
    displaced: bool = False

    @cached_property
    def wire_bytes_per_axis(self) -> dict[str, int]:
        """Bytes per axis, or per axes joined by ``+``; without those that have a reason instead."""
        found: dict[str, float] = {}
        for move in self.moves:
            if not any(axis in self.reasons for axis in move.axes):
                key = "+".join(move.axes)
                found[key] = found.get(key, 0.0) + move.wire_bytes
        return {key: round(size) for key, size in found.items()}

    @property
    def wire_bytes(self) -> int | None:
        """Bytes over all axes, or ``None`` where a plan cannot tell.

        Beside an axis that nothing uses, it is known how much moves, though not over which axis.
        """
        if self.declined and not self.displaced:
            return None
        return round(sum(move.wire_bytes for move in self.moves))

    @property
    def declined(self) -> bool:
        """Whether weights or gradients move over an axis for which there is a reason and no number."""
        return any(axis in self.reasons for move in self.moves for axis in move.axes)

    @cached_property
    def seconds_per_axis(self) -> dict[str, float | None]:
        """A lower bound per axis: bytes over bandwidth; ``None`` where the bandwidth is unknown."""
        return {
            key: seconds(size, key.split("+"), self.mesh, self.hardware)
            for key, size in self.wire_bytes_per_axis.items()
        }

    @property
    def seconds(self) -> float | None:
        """A lower bound of all: the slowest axis, since axes may work at the same time.

        Beside an axis that nothing uses: the sum as if it were spread evenly over all axes. ``None``
        where a number or a bandwidth is missing.
        """
        if self.hardware is None or (self.declined and not self.displaced):
            return None
        found = self._spread() if self.declined else list(self.seconds_per_axis.values())
        known = [one for one in found if one is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    def _spread(self) -> list[float | None]:
        """The least time of the sum, where every axis carries a part that fits its bandwidth."""
        axes = [axis for axis, size in self.mesh.items() if size > 1]
        rates = [seconds(1.0, [axis], self.mesh, self.hardware) for axis in axes]
        known = [1 / rate for rate in rates if rate is not None]
        if len(known) < len(axes):
            return [None]
        return [sum(move.wire_bytes for move in self.moves) / sum(known)]

    def __str__(self) -> str:
        lines = [f"weights and gradients on {format_mesh(self.mesh)}, bytes sent per device and step"]
        for key, size in self.wire_bytes_per_axis.items():
            bound = self.seconds_per_axis[key]
            time = "" if bound is None else f"   at least {bound * 1e3:,.2f} ms"
            lines.append(f"  {key:<16} {size:>18,} bytes{time}")
        lines += [f"  {axis:<16} {reason}" for axis, reason in self.reasons.items()]
        return "\n".join([*lines, f"  source: {self.source}"])


def seconds(size: float, axes: Sequence[str], mesh: Mapping[str, int], chip: Hardware | None) -> float | None:
    """The least time in which a device can send so many bytes along axes."""
    if chip is None:
        return None
    order = list(mesh)
    inner = math.prod(mesh[axis] for axis in order[order.index(axes[-1]) + 1 :])
    bandwidth = chip.bandwidth(math.prod(mesh[axis] for axis in axes), inner)
    return None if bandwidth is None else size / bandwidth
