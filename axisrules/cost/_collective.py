"""A collective, all collectives of a program, and the formulas for what they send.

Owns plain values. Reads no module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from axisrules._text import format_mesh

_RING = "ring formulas: https://jax-ml.github.io/scaling-book/sharding/"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program, as often as it stands there.

    Attributes:
        kind: ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"``,
            ``"collective-permute"``, ...; ``"send"`` for traffic between slices.
        axes: The mesh axes that it runs over, in the order of the mesh.
        group: Devices in a group.
        dtype: HLO element type; several joined by ``+``.
        shapes: The shape of every array, per device: the results, or a reduce-scatter's operands.
        bytes: Bytes of these arrays.
        wire_bytes: Bytes that a device sends, per execution.
        executions: How often it runs in one step.
        name: The instruction in the module.
        op_name: What the module says it came from: a weak label.
        notes: What else is worth knowing.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: float
    wire_bytes: float
    executions: int
    name: str = ""
    op_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its axes joined by ``+``."""
        return "+".join(self.axes)


@dataclass(frozen=True)
class Collectives:
    """The collectives of one program.

    Attributes:
        items: A ``Collective`` per place in the module.
        mesh: Axis sizes.
        not_understood: What in the module could not be read, one sentence each; then the sums may
            be too low.
        source: Where the numbers come from.
    """

    items: tuple[Collective, ...]
    mesh: Mapping[str, int]
    not_understood: tuple[str, ...] = ()
    source: str = field(default=f"the compiled module; {_RING}", repr=False)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def wire_bytes_per_axis(self) -> dict[str, int]:
        """Bytes that a device sends per step, by axis, or by axes joined by ``+``."""
        return _sums((one.key, one.wire_bytes * one.executions) for one in self.items)

    @cached_property
    def by_kind(self) -> dict[tuple[str, str], int]:
        """Bytes that a device sends per step, by kind and axes."""
        return _sums(((one.kind, one.key), one.wire_bytes * one.executions) for one in self.items)

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes that a device sends per step over all axes."""
        return sum(self.wire_bytes_per_axis.values())

    def __str__(self) -> str:
        rows = [
            f"{kind:<20} {axes:<16} {size:>18,} bytes" for (kind, axes), size in sorted(self.by_kind.items())
        ]
        unread = [f"not understood: {text}" for text in self.not_understood]
        title = f"collectives on {format_mesh(self.mesh)}, bytes sent per device and step"
        return "\n".join([title, *rows, *unread])


def _sums(pairs: Iterable[tuple[Any, float]]) -> dict[Any, int]:
    found: dict[Any, float] = {}
    for key, size in pairs:
        if size:
            found[key] = found.get(key, 0.0) + size
    return {key: round(size) for key, size in found.items()}


def wire_bytes(kind: str, size: float, group: int, share: float = 1.0) -> float:
    """Bytes that one device sends.

    Args:
        kind: The kind of the collective.
        size: Bytes of the result, or of the operand of a reduce-scatter.
        group: Devices in a group.
        share: The part of the devices that send, of a permute.
    """
    if kind == "collective-permute":
        return size * share
    part = (group - 1) / group
    if kind == "all-reduce":
        return 2 * part * size
    return part * size
