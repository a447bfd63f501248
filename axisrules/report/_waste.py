"""``waste``: bytes per device against the ideal, and which arrays and mesh axes make the difference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from axisrules._columns import alike
from axisrules._groups import Group, groups
from axisrules._plan import Placement, Plan
from axisrules._text import format_mesh
from axisrules.report._sheets import Sheet, Shown

_SHOWN = 20


class FreeAxis(NamedTuple):
    """A mesh axis that an array does not use and that would fit it.

    Attributes:
        axis: The mesh axis.
        size: Its size.
        dims: The dimensions whose part on one device it divides.
    """

    axis: str
    size: int
    dims: tuple[int, ...]


class LeafWaste(NamedTuple):
    """One array that is not split over all devices.

    Attributes:
        path: Its path.
        nbytes: Bytes of the whole array.
        bytes_per_device: Bytes that a device holds.
        excess: Bytes per device beyond the ideal, which is ``nbytes`` over all devices.
        share: Its share of the excess of the whole tree, 0 to 1.
        free: The mesh axes that would fit it.
    """

    path: str
    nbytes: int
    bytes_per_device: int
    excess: float
    share: float
    free: tuple[FreeAxis, ...]


class AxisUse(NamedTuple):
    """How much one mesh axis is used.

    Attributes:
        size: Its size.
        bytes_split: Bytes of the whole arrays that it splits.
        share: Their share of all bytes, 0 to 1.
    """

    size: int
    bytes_split: int
    share: float


@dataclass(frozen=True, eq=False, repr=False)
class Waste(Shown):
    """Bytes per device against the ideal; ``str()`` is plain text, ``show()`` prints.

    Attributes:
        plan: The plan.
        bytes_per_device: Bytes that every device holds.
        ideal: Bytes of the whole tree over the number of devices.
        factor: How many times the ideal a device holds.
        excess: Bytes per device beyond the ideal.
        leaves: The arrays that are not split over all devices, the largest excess first.
        axes: The use of every mesh axis.
    """

    plan: Plan
    bytes_per_device: int
    ideal: float
    factor: float
    excess: float
    leaves: tuple[LeafWaste, ...]
    axes: dict[str, AxisUse]

    @cached_property
    def kinds(self) -> tuple[tuple[LeafWaste, ...], ...]:
        """The leaves of the same size and layout taken together, the largest excess first."""
        found: dict[Any, list[LeafWaste]] = {}
        for leaf in self.leaves:
            found.setdefault((leaf.nbytes, leaf.bytes_per_device, leaf.free), []).append(leaf)
        return tuple(map(tuple, sorted(found.values(), key=lambda some: -some[0].excess * len(some))))

    def sheets(self) -> list[Sheet]:
        """The two tables as text: arrays and mesh axes."""
        shown = self.kinds[:_SHOWN]
        more = len(self.kinds) - len(shown)
        title = (
            f"{self.bytes_per_device:,} bytes per device on {format_mesh(dict(self.plan.mesh.shape_tuple))}: "
            f"{self.factor:.3g} times the ideal of {self.ideal:,.0f}"
        )
        return [
            Sheet(
                title,
                ("count", "excess", "share", "bytes", "per device", "free axes that fit", "path"),
                tuple(map(_cells, shown)),
                right=(0, 1, 2, 3, 4),
                notes=(f"... and {more:,} more",) if more else (),
            ),
            Sheet(
                "mesh axes, by the bytes that they split",
                ("axis", "size", "bytes split", "share"),
                tuple(
                    (axis, str(use.size), f"{use.bytes_split:,}", f"{use.share:.1%}")
                    for axis, use in self.axes.items()
                ),
                right=(1, 2, 3),
            ),
        ]


def _cells(leaves: tuple[LeafWaste, ...]) -> tuple[str, ...]:
    first, count = leaves[0], len(leaves)
    free = ", ".join(f"{one.axis}={one.size} on {' or '.join(map(str, one.dims))}" for one in first.free)
    sizes = [f"{size * count:,.0f}" for size in (first.excess, first.nbytes, first.bytes_per_device)]
    share = f"{first.share * count:.1%}"
    label = alike([leaf.path for leaf in leaves])
    return (str(count), sizes[0], share, *sizes[1:], free or "none", label)


def waste(plan: Plan) -> Waste:
    """Bytes per device against the ideal: where the excess is, and what would fit there.

    The ideal is all bytes over the number of devices; an array that is tied counts once. All
    sizes are bytes.

    Raises:
        PlanError: It is no plan.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> plan = ar.plan({"up": np.zeros((8, 32), np.float32), "down": np.zeros((32, 8), np.float32)},
        ...                {"up": "embed mlp", "down": "mlp _"}, mesh="data=4,model=2",
        ...                rules={"embed": "data", "mlp": "model"})
        >>> found = ar.report.waste(plan)
        >>> found.bytes_per_device, found.ideal, found.factor
        (640, 256.0, 2.5)
        >>> found.leaves
        (LeafWaste(path='down', nbytes=1024, bytes_per_device=512, excess=384.0, share=1.0,
                   free=(FreeAxis(axis='data', size=4, dims=(0, 1)),)),)
    """
    kinds = groups(plan)
    devices, total = plan.mesh.size, plan.nbytes
    ideal, held = total / devices, plan.bytes_per_device
    whole = held * devices - total  # exact, of all devices
    leaves = [
        LeafWaste(path, kind.nbytes, kind.bytes_per_device, over / devices, over / whole, free)
        for kind in kinds
        if (over := kind.bytes_per_device * devices - kind.nbytes) > 0
        for free in [_free(kind.first)]
        for path in kind.paths
    ]
    leaves.sort(key=lambda leaf: -leaf.excess)
    factor = held * devices / total if total else 1.0
    return Waste(plan, held, ideal, factor, whole / devices, tuple(leaves), _axes(plan, kinds))


def _axes(plan: Plan, kinds: list[Group]) -> dict[str, AxisUse]:
    split = dict.fromkeys(dict(plan.mesh.shape_tuple), 0)
    for kind in kinds:
        for dim in kind.resolution.dims:
            for axis in dim.axes:
                split[axis] += kind.nbytes * len(kind.paths)
    total = plan.nbytes or 1
    return {
        axis: AxisUse(size, used := split[axis] if size > 1 else 0, used / total)
        for axis, size in plan.mesh.shape_tuple
    }


def _free(placement: Placement) -> tuple[FreeAxis, ...]:
    used = {axis for dim in placement.resolution.dims for axis in dim.axes}
    shard = placement.shard_shape
    free = []
    for axis, size in placement.sizes.items():
        if size > 1 and axis not in used:
            dims = tuple(dim for dim, part in enumerate(shard) if part and part % size == 0)
            if dims:
                free.append(FreeAxis(axis, size, dims))
    return tuple(free)
