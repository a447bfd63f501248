"""Placements that are laid out alike, taken together; what one array wastes.

Owns the grouping that every report starts from, so that a tree of 100,000 arrays is as many
calculations as it has kinds of arrays.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from axisrules._errors import PlanError
from axisrules._plan import Placement, Plan
from axisrules._resolution import SKIPPED, Resolution


class Group(NamedTuple):
    """Placements with one resolution, one dtype, all tied or none.

    Attributes:
        first: One of them, which stands for all.
        paths: Their paths, in the order of the tree.
        nbytes: Bytes of one whole array; 0 where they are tied to arrays that count elsewhere.
        bytes_per_device: Bytes of one array that a device holds; likewise.
        ways: Into how many distinct parts one array is split.
    """

    first: Placement
    paths: list[str]
    nbytes: int
    bytes_per_device: int
    ways: int

    @property
    def resolution(self) -> Resolution:
        """Where the arrays go, and why."""
        return self.first.resolution

    @property
    def mark(self) -> str:
        """What a reader should notice: ``replicated``, ``skipped``, ``tied``."""
        devices = math.prod(self.first.sizes.values())
        dims = self.resolution.dims
        words = {
            "replicated": self.ways == 1 and devices > 1,
            "skipped": any(dim.reason in SKIPPED for dim in dims),
            "tied": self.first.tied_to is not None,
        }
        return ", ".join(word for word, holds in words.items() if holds)


def groups(plan: Plan) -> list[Group]:
    """The placements of a plan by kind, in the order in which the kinds first appear.

    Raises:
        PlanError: It is no plan.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is no plan", fix="give what axisrules.plan or Plan.from_json returned.")
    found: dict[Any, Group] = {}
    for placement in plan.placements:
        tied = placement.tied_to is not None
        key = (id(placement.resolution), placement.dtype, placement.shape, tied)
        group = found.get(key)
        if group is None:
            sizes = (0, 0) if tied else (placement.nbytes, placement.bytes_per_device)
            group = found[key] = Group(placement, [], *sizes, placement.ways)
        group.paths.append(placement.path)
    return list(found.values())
