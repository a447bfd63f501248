"""Prices of many rule sets for one tree on one mesh.

Owns the score by which layouts are compared, and a pricer that looks at every kind of array once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from axisrules._meshes import MeshLike, axis_sizes, need_mesh
from axisrules._plan import Placement, Plan
from axisrules._planning import plan as make_plan
from axisrules._policies import Policies
from axisrules._resolution import Resolution
from axisrules._resolve import resolve_array
from axisrules._rules import Rules
from axisrules.cost._bytes import shard_bytes
from axisrules.cost._flows import of_kinds
from axisrules.cost._hardware import Hardware
from axisrules.cost._kinds import Kind, facts, kinds
from axisrules.cost._measure import Measured
from axisrules.cost._memory import Memory
from axisrules.cost._moves import Traffic
from axisrules.cost._rows import Row, is_inexact, of_optimizer

Pairs = tuple[tuple[str, tuple[str, ...]], ...]
LENIENT = Policies("next", "next", "drop", "replicate")

FILLED = 2**20  # bytes from which on `plan` fills an array, unless it is told otherwise


class Layout(NamedTuple):
    """Rules, and the axes that ``plan`` fills after them."""

    pairs: Pairs
    fill: tuple[str, ...] = ()


CLOSE = 1e-3  # scores within this part of each other are equal


@dataclass(frozen=True, eq=False)
class Score:
    """What decides between two layouts: fits, then traffic, then waste.

    Attributes:
        fits: Whether parameters, gradients and the optimizer fit; ``None`` without hardware.
        seconds: A lower bound of what weights and gradients take on the wires; ``None`` without
            hardware, or where a plan cannot tell.
        waste: How many times the ideal, all bytes over all devices, a device holds.
        bytes_per_device: Bytes of parameters per device.
        traffic: The traffic.
    """

    fits: bool | None
    seconds: float | None
    waste: float
    bytes_per_device: int
    traffic: Traffic

    def beats(self, other: Score) -> bool:
        """Whether it is better: fits, then seconds, then waste, then bytes; what both know counts."""
        if self.excels(other):
            return True
        if other.excels(self):
            return False
        mine, theirs = self.traffic.wire_bytes, other.traffic.wire_bytes
        return mine is not None and theirs is not None and _less(mine, theirs, CLOSE)

    def excels(self, other: Score, close: float = CLOSE) -> bool:
        """Whether it is better in what the objective names, by more than a part ``close``."""
        if self.fits != other.fits:
            return bool(self.fits)
        if self.seconds is not None and other.seconds is not None:
            if _less(self.seconds, other.seconds, close):
                return True
            if _less(other.seconds, self.seconds, close):
                return False
        return _less(self.waste, other.waste, close)

    @property
    def key(self) -> tuple[float, ...]:
        """A total order for a search, the best first: what has no number comes after what has one.

        Without hardware waste decides; then bytes count from where that is nearly equal.
        """
        moved = self.traffic.wire_bytes
        wire = math.inf if moved is None else float(moved)
        if self.traffic.hardware is None:
            return math.floor(math.log(max(self.waste, 1.0)) / CLOSE), wire, self.waste
        seconds = math.inf if self.seconds is None else self.seconds
        return float(self.fits is False), seconds, self.waste, wire

    def __str__(self) -> str:
        fits = "" if self.fits is None else "fits, " if self.fits else "does not fit, "
        moved = self.traffic.wire_bytes
        wire = "traffic unknown" if moved is None else f"{moved:,} bytes sent"
        time = "" if self.seconds is None else f" in at least {self.seconds * 1e3:,.2f} ms"
        return f"{fits}{wire}{time}, {self.waste:,.3f} times the ideal memory"


def _less(a: float, b: float, close: float) -> bool:
    return b - a > close * max(abs(a), abs(b))


class Pricer:
    """Prices rule sets for one tree on one mesh; what it has seen of an array it remembers."""

    def __init__(
        self,
        tree: Any,
        names: Any,
        mesh: MeshLike | None,
        batch: str,
        chip: Hardware | None,
        optimizer: Any = None,
    ) -> None:
        self.mesh = need_mesh(mesh)
        self.sizes = dict(axis_sizes(self.mesh))
        self.batch, self.chip = batch, chip
        self.plan = make_plan(tree, names, mesh=self.mesh, rules=(), unmapped="replicate")
        self.devices = math.prod(self.sizes.values())
        found = kinds(self.plan.distinct)
        self.facts = facts(found)
        self.kinds = _merged(found)
        # What has no gradient moves nothing, and yet takes room.
        self.rest = [Kind(one, 1, False) for one in self.plan.distinct if not is_inexact(one.dtype)]
        self.nbytes = self.plan.nbytes
        self.known: dict[tuple[Any, Pairs, tuple[str, ...]], Resolution] = {}
        self.state = [] if optimizer is None else _merged_rows(of_optimizer(optimizer, self.plan))
        # An array of the state that is like a parameter lies as that does, filled or not.
        self.filled = {(one.names, one.shape): one.nbytes >= FILLED for one in self.plan.distinct}

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the arrays bear, those of the largest first."""
        sizes: dict[str, int] = {}
        for kind in self.kinds:
            for name in kind.one.names:
                if name is not None:
                    sizes[name] = sizes.get(name, 0) + kind.one.nbytes * kind.copies
        return tuple(sorted(sizes, key=lambda name: (-sizes[name], name)))

    def score(self, layout: Layout) -> Score:
        """The score of a rule set and what ``plan`` fills after it."""
        placed = [kind._replace(one=self._placed(kind.one, layout)) for kind in self.kinds]
        still = [kind._replace(one=self._placed(kind.one, layout)) for kind in self.rest]
        moved = of_kinds(placed, Rules(layout.pairs), self.sizes, self.batch, self.chip, self.facts)
        held = sum(kind.one.bytes_per_device * kind.copies for kind in [*placed, *still])
        waste = held * self.devices / self.nbytes if self.nbytes else 1.0
        return Score(self._fits(placed, still, layout), moved.seconds, waste, held, moved)

    def _placed(self, one: Placement, layout: Layout) -> Placement:
        if any(dim.reason == "explicit_spec" for dim in one.resolution.dims):
            return one  # a spec is the layout itself
        own = tuple([pair for pair in layout.pairs if pair[0] in one.names])
        fill = layout.fill if one.nbytes >= FILLED else ()
        key = (id(one.resolution), own, fill)
        found = self.known.get(key)
        if found is None:
            sizes = tuple(self.sizes.items())
            found = resolve_array(one.names, Rules(own), sizes, one.shape, LENIENT, fill=fill)
            self.known[key] = found
        return one._replace(resolution=found)

    def _fits(self, placed: Sequence[Kind], still: Sequence[Kind], layout: Layout) -> bool | None:
        limit = None if self.chip is None else self.chip.limit
        if limit is None:
            return None
        held = sum(2 * _padded(kind.one, self.chip) * kind.copies for kind in placed)
        held += sum(_padded(kind.one, self.chip) * kind.copies for kind in still)
        slots = (
            shard_bytes(self._part(row, layout), row.dtype, self.chip) * row.copies for row in self.state
        )
        return held + sum(slots) <= limit

    def _part(self, row: Row, layout: Layout) -> tuple[int, ...]:
        """The part of an array of the optimizer's state that a device holds."""
        if row.names is None:
            return row.shard(self.sizes)  # a spec is the layout itself
        own = tuple([pair for pair in layout.pairs if pair[0] in row.names])
        fill = layout.fill if self.filled.get((row.names, row.shape), False) else ()
        key = ((row.names, row.shape), own, fill)
        found = self.known.get(key)
        if found is None:
            sizes = tuple(self.sizes.items())
            found = resolve_array(row.names, Rules(own), sizes, row.shape, LENIENT, fill=fill)
            self.known[key] = found
        return row._replace(axes=tuple([dim.axes for dim in found.dims])).shard(self.sizes)


def _merged(found: Sequence[Kind]) -> list[Kind]:
    """Kinds that differ in their paths alone, as one."""
    alike: dict[Any, Kind] = {}
    for kind in found:
        key = (id(kind.one.resolution), kind.one.dtype, kind.repeated)
        before = alike.get(key)
        alike[key] = kind if before is None else before._replace(copies=before.copies + kind.copies)
    return list(alike.values())


def _merged_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows that differ in their slots and paths alone, as one."""
    alike: dict[Any, Row] = {}
    for row in rows:
        key = (row.names, row.shape, row.axes if row.names is None else (), row.dtype)
        before = alike.get(key)
        alike[key] = row if before is None else before._replace(copies=before.copies + row.copies)
    return list(alike.values())


def score_of(plan: Plan, held: Memory, moved: Traffic, measured: Measured | None) -> Score:
    """The score of a plan whose prices are known; a compiled step has the last word."""
    waste = plan.bytes_per_device * plan.mesh.size / plan.nbytes if plan.nbytes else 1.0
    bound = moved.seconds if measured is None else measured.seconds
    return Score(held.fits, bound, waste, plan.bytes_per_device, moved)


def _padded(one: Placement, chip: Hardware | None) -> int:
    return shard_bytes(one.shard_shape, one.dtype, chip)


def as_pairs(rules: Iterable[Any]) -> Pairs:
    """The pairs of rules, with a tuple of axes in each."""
    return tuple((name, tuple(axes)) for name, axes in Rules(rules).pairs)
