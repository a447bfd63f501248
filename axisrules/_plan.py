"""The plan of a whole tree: plain data about where every array goes, and why.

Owns ``Placement`` and ``Plan``. How a plan is made stands in ``_planning.py``; what carries one out
stands in the files of the actions. Touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from axisrules._errors import AxisRulesError, LayoutError, raise_all
from axisrules._resolution import Resolution
from axisrules._rules import Rules
from axisrules._text import did_you_mean, format_bytes, format_mesh

if TYPE_CHECKING:
    from axisrules._plan_diff import PlanDiff


class Placement(NamedTuple):
    """Where one array goes.

    Attributes:
        path: Its path in the tree, segments joined by ``/``.
        shape: Its global shape.
        dtype: The dtype that JAX will hold.
        resolution: The spec with the reason for every dimension.
        sizes: The mesh axes with their sizes.
        tied_to: The path of the first leaf that is the same array, if it is not this one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    resolution: Resolution
    sizes: dict[str, int]
    tied_to: str | None = None

    @property
    def names(self) -> tuple[str | None, ...]:
        """The axis names, one per dimension."""
        return self.resolution.names

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec, one entry per dimension."""
        return self.resolution.spec

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the part that one device holds."""
        dims = zip(self.shape, self.resolution.dims, strict=True)
        return tuple(size // math.prod(self.sizes[axis] for axis in dim.axes) for size, dim in dims)

    @property
    def ways(self) -> int:
        """Into how many distinct parts the array is split."""
        return math.prod(self.sizes[axis] for dim in self.resolution.dims for axis in dim.axes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the part that one device holds."""
        return math.prod(self.shard_shape) * int(self.dtype.itemsize)


class ReportRow(NamedTuple):
    """One thing that a plan's owner may want to know.

    Attributes:
        path: The leaf; ``""`` where it is about the rules or the names as a whole.
        dim: The dimension, if it is about one.
        name: Its logical name, or the pattern.
        reason: A key of the table of reasons.
        rule: Position of the rule that it is about.
        axis: The mesh axis that it is about.
        holder: The dimension that holds that axis.
        bytes: Bytes of the whole array.
    """

    path: str
    dim: int | None = None
    name: str | None = None
    reason: str = ""
    rule: int | None = None
    axis: str | None = None
    holder: int | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of the source tree: how to rebuild it, and what passes through."""

    rebuild: Callable[[Sequence[Any]], Any]
    leaves: tuple[Any, ...]  # an array's place holds `Slot`, anything else itself

    def pick(self, leaves: Sequence[Any]) -> list[Any]:
        """The arrays among the leaves of the source, in the order of the placements."""
        return [leaf for leaf, kept in zip(leaves, self.leaves, strict=True) if kept is SLOT]

    def fill(self, arrays: Iterator[Any]) -> Any:
        """A tree with the given arrays in their places."""
        return self.rebuild([next(arrays) if leaf is SLOT else leaf for leaf in self.leaves])


class _Slot:
    """Stands in a structure where an array stands in the source."""

    def __repr__(self) -> str:
        return "SLOT"


SLOT = _Slot()


@dataclass(frozen=True, eq=False)
class Plan:
    """The placements of a whole tree on one mesh under one rule set.

    Made by ``axisrules.plan``. Plain data: it holds no array and touches no device.

    Attributes:
        placements: A ``Placement`` per array, in the order of the tree.
        mesh: The mesh, abstract where the plan was made for sizes alone.
        rules: The rules.
        memory_kind: The memory that the arrays go to, or ``None`` for the default.
    """

    placements: tuple[Placement, ...]
    mesh: Mesh | AbstractMesh
    rules: Rules
    memory_kind: str | None = None
    structure: Structure = field(repr=False, default=None)  # type: ignore[assignment]
    notes: tuple[ReportRow, ...] = field(repr=False, default=())

    @cached_property
    def specs(self) -> Any:
        """The partition specs, in a tree shaped like the input; non-arrays stand as they are."""
        return self.structure.fill(placement.spec for placement in self.placements)

    @cached_property
    def shardings(self) -> Any:
        """The shardings, in a tree shaped like the input; non-arrays stand as they are."""
        return self.structure.fill(iter(self.flat_shardings))

    @cached_property
    def flat_shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of every placement; equal ones are one object."""
        made: dict[PartitionSpec, NamedSharding] = {}
        specs = [placement.resolution.spec for placement in self.placements]
        for spec in set(specs):
            made[spec] = self._sharding(spec)
        return tuple([made[spec] for spec in specs])

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        if self.memory_kind is None:
            return NamedSharding(self.mesh, spec)
        return NamedSharding(self.mesh, spec, memory_kind=self.memory_kind)

    @cached_property
    def abstract(self) -> Any:
        """``ShapeDtypeStruct``s with shardings, for ``jit(...).lower`` and for restoring."""
        pairs = zip(self.placements, self.flat_shardings, strict=True)
        return self.structure.fill(
            jax.ShapeDtypeStruct(placement.shape, placement.dtype, sharding=sharding)
            for placement, sharding in pairs
        )

    @cached_property
    def distinct(self) -> tuple[Placement, ...]:
        """The placements without those that are tied to an earlier one."""
        return tuple(placement for placement in self.placements if placement.tied_to is None)

    @cached_property
    def bytes_per_device(self) -> int:
        """Bytes that every device holds; an array that is tied counts once."""
        return sum(placement.bytes_per_device for placement in self.distinct)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tree; an array that is tied counts once."""
        return sum(placement.nbytes for placement in self.distinct)

    def placement(self, path: str) -> Placement:
        """The placement of one leaf.

        Raises:
            AxisRulesError: The plan has no array at that path.
        """
        found = self._by_path.get(path)
        if found is None:
            raise AxisRulesError(
                f"the plan has no array at {path!r}{did_you_mean(path, self._by_path)}",
                fix="plan.placements lists the paths.",
            )
        if sum(one.path == path for one in self.placements) > 1:
            raise AxisRulesError(f"several arrays stand at {path!r}", fix="plan.placements has them all.")
        return found

    @cached_property
    def _by_path(self) -> dict[str, Placement]:
        return {placement.path: placement for placement in self.placements}

    def explain(self, path: str) -> str:
        """Why one array lies as it does, one line per dimension.

        Raises:
            AxisRulesError: The plan has no array at that path.
        """
        found = self.placement(path)
        tied = f", tied to {found.tied_to}" if found.tied_to else ""
        size = f"{format_bytes(found.nbytes)}, {format_bytes(found.bytes_per_device)} per device"
        return f"{path}: {found.dtype} {found.shape!r}, {size}{tied}\n{found.resolution}"

    @cached_property
    def report(self) -> tuple[ReportRow, ...]:
        """What an owner may want to know: skipped rules, unknown names, unused ones, overlaps."""
        borne = {name for placement in self.placements for name in placement.names}
        unused = [
            ReportRow("", None, name, "unused_rule", index)
            for index, (name, _) in enumerate(self.rules)
            if name not in borne
        ]
        rows = [row for placement in self.placements for row in _rows(placement)]
        return (*rows, *self.notes, *unused)

    def check(
        self,
        *,
        max_bytes_per_device: int | None = None,
        max_replicated: float | None = None,
        max_waste: float | None = None,
    ) -> None:
        """Raises where the plan breaks a limit, with the offenders, the largest first.

        Args:
            max_bytes_per_device: Bytes that a device may hold.
            max_replicated: Fraction (0 to 1) of all bytes that may lie whole on every device.
            max_waste: How many times the ideal, all bytes over all devices, a device may hold.

        Raises:
            LayoutError: A limit is broken; all that are, are named.
        """
        failures = []
        if max_bytes_per_device is not None and self.bytes_per_device > max_bytes_per_device:
            share = f"{self.bytes_per_device:,} bytes per device"
            failures.append(self._broken("max_bytes_per_device", max_bytes_per_device, share, self.distinct))
        whole = [one for one in self.distinct if one.ways == 1 and self.mesh.size > 1]
        replicated = sum(one.nbytes for one in whole) / self.nbytes if self.nbytes else 0.0
        if max_replicated is not None and replicated > max_replicated:
            text = f"{replicated:.4g} of all bytes are replicated"
            failures.append(self._broken("max_replicated", max_replicated, text, whole))
        waste = self.bytes_per_device * self.mesh.size / self.nbytes if self.nbytes else 1.0
        if max_waste is not None and waste > max_waste:
            partly = [one for one in self.distinct if one.ways < self.mesh.size]
            failures.append(
                self._broken("max_waste", max_waste, f"{waste:.4g} times the ideal per device", partly)
            )
        raise_all(failures)

    def _broken(self, limit: str, value: float, found: str, offenders: Sequence[Placement]) -> LayoutError:
        ordered = sorted(offenders, key=lambda one: -one.bytes_per_device)
        return LayoutError(
            f"{found}, more than {limit}={value}",
            paths=[one.path for one in ordered],
            listing=[f"{one.path}  {one.bytes_per_device:,} bytes per device" for one in ordered],
            limit=limit,
            mesh=dict(self.mesh.shape_tuple),
            fix="give these arrays rules that split them, or raise the limit.",
        )

    def to_json(self) -> str:
        """The plan as text, stable and sorted, made for committing: rules, mesh, names, specs, reasons.

        Example:
            >>> import axisrules as ar, numpy as np
            >>> plan = ar.plan({"w": np.zeros(8, np.int8)}, {"w": "a"}, mesh="x=4", rules={"a": "x"})
            >>> ar.Plan.from_json(plan.to_json()).placements == plan.placements
            True
        """
        from axisrules._plan_json import write_plan

        return write_plan(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that ``to_json`` wrote: its arrays in nested dicts by path, its mesh abstract.

        Raises:
            PlanError: The text is no plan, is of another version, or was changed since.
        """
        from axisrules._plan_json import read_plan

        return read_plan(text)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to another one; see ``axisrules.report.diff``."""
        from axisrules._plan_diff import diff

        return diff(self, other)

    def _repr_html_(self) -> str:
        from axisrules._plan_html import small_html

        return small_html(self)

    def __str__(self) -> str:
        sizes = f"{format_bytes(self.nbytes)}, {format_bytes(self.bytes_per_device)} per device"
        return f"plan of {len(self.placements)} arrays on {format_mesh(dict(self.mesh.shape_tuple))}: {sizes}"

    __repr__ = __str__


def _rows(placement: Placement) -> Iterator[ReportRow]:
    path, size = placement.path, placement.nbytes
    for number, dim in enumerate(placement.resolution.dims):
        for skip in dim.skips:
            yield ReportRow(path, number, dim.name, skip.reason, skip.rule, skip.axis, skip.holder, size)
        if dim.reason == "unknown_name":
            yield ReportRow(path, number, dim.name, dim.reason, bytes=size)
