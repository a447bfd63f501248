"""What changes from one plan to another: which arrays, why, and what moving a live tree costs.

Owns the comparison of plans. Resolves nothing and moves nothing; the arithmetic of tiles stands in
``_tiles.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from axisrules._diff_text import diff_lines
from axisrules._errors import PlanError
from axisrules._plan import Placement, Plan
from axisrules._resolution import why
from axisrules._tiles import Moved, Numbers, move


class DimChange(NamedTuple):
    """One dimension that goes elsewhere.

    Attributes:
        dim: Its number.
        name: Its logical name in the later plan.
        before, after: The mesh axes that it is split over.
        rule_before, rule_after: Positions of the rules that decided, each in its own plan.
        why_before, why_after: The reasons as sentences.
    """

    dim: int
    name: str | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    rule_before: int | None
    rule_after: int | None
    why_before: str
    why_after: str


class LeafChange(NamedTuple):
    """One array that lies elsewhere, or is another array.

    Attributes:
        path: Its path.
        before, after: Its placements.
        what: Which of ``shape``, ``dtype``, ``names``, ``spec`` and ``mesh`` differ.
        dims: The dimensions that go elsewhere.
        received: Bytes that all devices together must receive; ``None`` where the shape differs.
        over: The bytes among them that have to cross each mesh axis.
    """

    path: str
    before: Placement
    after: Placement
    what: tuple[str, ...]
    dims: tuple[DimChange, ...]
    received: int | None
    over: dict[str, int]

    @property
    def bytes_per_device(self) -> int:
        """The change in bytes per device."""
        return self.after.bytes_per_device - self.before.bytes_per_device


@dataclass(frozen=True, eq=False)
class PlanDiff:
    """What changes from one plan to another; ``str()`` tells it, ``bool()`` is whether anything does.

    What moving costs is counted in bytes that a device must receive: those of its new tile that it
    does not hold before, in the dtype that they have before. A byte comes from the nearest device
    that holds it, the one that differs in the fewest coordinates; it crosses each mesh axis along
    which the two differ, once. A byte that crosses two axes counts for both, so ``over`` may sum to
    more than ``received``. Tied arrays count once. Devices of two meshes are the same by identity, or
    by position where a mesh has no devices.

    Attributes:
        before, after: The plans.
        changed: The arrays of both plans that differ, in the order of the later plan.
        added, removed: Paths that only the later, or only the earlier plan has.
        received: Bytes that all devices together must receive.
        most: Bytes that any one device must receive at most.
        over: The received bytes that cross each axis of the earlier mesh.
        to_new_devices: The received bytes of devices that the earlier mesh did not have; they cross
            no axis of it.
    """

    before: Plan
    after: Plan
    changed: tuple[LeafChange, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    received: int
    most: int
    over: dict[str, int]
    to_new_devices: int

    @property
    def bytes_per_device(self) -> int:
        """The change in bytes per device of the whole tree."""
        return self.after.bytes_per_device - self.before.bytes_per_device

    @cached_property
    def rules_removed(self) -> tuple[int, ...]:
        """Positions, in the earlier rules, of the rules that the later ones lack."""
        return _lacking(self.before, self.after)

    @cached_property
    def rules_added(self) -> tuple[int, ...]:
        """Positions, in the later rules, of the rules that the earlier ones lack."""
        return _lacking(self.after, self.before)

    def __bool__(self) -> bool:
        same = self.before.rules == self.after.rules and _mesh(self.before) == _mesh(self.after)
        kinds = self.before.memory_kind == self.after.memory_kind
        return bool(self.changed or self.added or self.removed) or not (same and kinds)

    def __str__(self) -> str:
        return "\n".join(diff_lines(self))


def diff(before: Plan, after: Plan) -> PlanDiff:
    """What changes from one plan to another, why, and what moving a live tree costs.

    Args:
        before: The plan by which the arrays lie.
        after: The plan by which they are to lie.

    Returns:
        A ``PlanDiff``: the changed arrays with the reasons, bytes per device, and the bytes to move
        over each mesh axis.

    Raises:
        PlanError: One of them is no plan.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> def plan(rules):
        ...     return ar.plan({"up": np.zeros((8, 32), np.float32)}, {"up": "embed mlp"},
        ...                    mesh="data=4,model=2", rules=rules)
        >>> change = ar.report.diff(plan({"embed": "data", "mlp": "model"}),
        ...                         plan({"embed": None, "mlp": "model"}))
        >>> change.received, change.over  # 8 devices lack 3/4 of their new 512 bytes
        (3072, {'data': 3072, 'model': 0})
    """
    for one in (before, after):
        if not isinstance(one, Plan):
            raise PlanError(f"{one!r} is no plan", fix="give what axisrules.plan or Plan.from_json returned.")
    work = _Work(before, after)
    old, new = _by_path(before), _by_path(after)
    changed = [
        found for key, one in new.items() if key in old and (found := work.compare(old[key], one)) is not None
    ]
    return PlanDiff(
        before,
        after,
        tuple(changed),
        tuple(path for path, number in new if (path, number) not in old),
        tuple(path for path, number in old if (path, number) not in new),
        int(work.received.sum()),
        int(work.received.max(initial=0)),
        work.over,
        work.to_new,
    )


def _by_path(plan: Plan) -> dict[tuple[str, int], Placement]:
    """The placements by path; where several stand at one, they are numbered."""
    seen: Counter[str] = Counter()
    found = {}
    for placement in plan.placements:
        found[placement.path, seen[placement.path]] = placement
        seen[placement.path] += 1
    return found


class _Work:
    """A comparison in the making: the totals, and the moves that were counted before."""

    def __init__(self, before: Plan, after: Plan) -> None:
        self.sizes = _mesh(before), _mesh(after)
        self.homes = _homes(before.mesh, after.mesh)
        devices = len(self.homes)
        self.at_rest = before.mesh.size == devices and bool((self.homes == np.arange(devices)).all())
        self.same_mesh = list(self.sizes[0].items()) == list(self.sizes[1].items())
        self.received: Numbers = np.zeros(devices, np.int64)
        self.over = dict.fromkeys(self.sizes[0], 0)
        self.to_new = 0
        self.known: dict[Any, Moved] = {}

    def compare(self, old: Placement, new: Placement) -> LeafChange | None:
        """What changes for one array, or ``None``; adds what moving it costs to the totals."""
        if self.at_rest and self.same_mesh and _facts(old) == _facts(new):
            return None
        what = [key for key, a, b in zip(_FACTS, _facts(old), _facts(new), strict=True) if a != b]
        received, over = self._cost(old, new)
        if not self.same_mesh and _ways(old) != _ways(new):
            what.append("mesh")
        if not what and not received:
            return None
        return LeafChange(new.path, old, new, tuple(what or ["mesh"]), _dims(old, new), received, over)

    def _cost(self, old: Placement, new: Placement) -> tuple[int | None, dict[str, int]]:
        none = dict.fromkeys(self.over, 0)
        if old.shape != new.shape:
            return None, none
        if new.tied_to is not None:
            return 0, none
        layouts = tuple(tuple(dim.axes for dim in one.resolution.dims) for one in (old, new))
        key = (old.shape, layouts)
        if key not in self.known:
            old_side, new_side = zip(layouts, self.sizes, strict=True)
            self.known[key] = move(old.shape, old_side, new_side, self.homes)
        found, itemsize = self.known[key], int(old.dtype.itemsize)
        over = {axis: found.over.get(axis, 0) * itemsize for axis in self.over}
        for axis, size in over.items():
            self.over[axis] += size
        self.received += found.received * itemsize
        self.to_new += found.to_new * itemsize
        return int(found.received.sum()) * itemsize, over


_FACTS = ("shape", "dtype", "names", "spec")


def _facts(placement: Placement) -> tuple[Any, ...]:
    return placement.shape, placement.dtype, placement.names, placement.spec


def _ways(placement: Placement) -> list[list[tuple[str, int]]]:
    dims = placement.resolution.dims
    return [[(axis, placement.sizes[axis]) for axis in dim.axes if placement.sizes[axis] > 1] for dim in dims]


def _mesh(plan: Plan) -> dict[str, int]:
    return dict(plan.mesh.shape_tuple)


def _homes(before: Mesh | AbstractMesh, after: Mesh | AbstractMesh) -> Numbers:
    """For every device of the later mesh, its position in the earlier one, or -1."""
    if isinstance(before, Mesh) and isinstance(after, Mesh):
        known = {device: position for position, device in enumerate(before.devices.flat)}
        return np.array([known.get(device, -1) for device in after.devices.flat], np.int64)
    positions = np.arange(after.size, dtype=np.int64)
    return np.where(positions < before.size, positions, -1)


def _dims(old: Placement, new: Placement) -> tuple[DimChange, ...]:
    pairs = enumerate(zip(old.resolution.dims, new.resolution.dims, strict=False))
    return tuple(
        DimChange(
            number, b.name, a.axes, b.axes, a.rule, b.rule, why(old.resolution, a), why(new.resolution, b)
        )
        for number, (a, b) in pairs
        if a.axes != b.axes
    )


def _lacking(plan: Plan, other: Plan) -> tuple[int, ...]:
    left = Counter(other.rules.pairs)
    lacking = []
    for index, rule in enumerate(plan.rules.pairs):
        if left[rule] > 0:
            left[rule] -= 1
        else:
            lacking.append(index)
    return tuple(lacking)
