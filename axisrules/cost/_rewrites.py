"""What every later compiler does to a module right after partitioning.

Owns two rewrites, as facts about a module: an all-reduce whose result is only sliced is a
reduce-scatter, and all-reduces that meet in a sum are one. Changes no module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property

from axisrules.cost._modules import Computation, Instruction, Module

Changes = Mapping[tuple[str, str], str | None]  # (computation, all-reduce) → new kind, or dropped

_ANY = re.compile(" = ")
_SAME = {"bitcast", "reshape", "copy", "transpose"}


def rewrites(module: Module) -> dict[tuple[str, str], str | None]:
    """What becomes of the all-reduces of a module: another kind, or nothing."""
    found: dict[tuple[str, str], str | None] = {}
    for computation in module.computations.values():
        if any(" all-reduce(" in line for line in computation.lines):
            for name, kind in _Sums(computation).changes():
                found[computation.name, name] = kind
    return found


class _Sums:
    """The all-reduces of one computation, and what is done with their results."""

    def __init__(self, computation: Computation) -> None:
        self.instructions = {at.name: at for at in computation.matching(_ANY)}
        self.root = computation.root.name if computation.root else ""

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for at in self.instructions.values():
            for name in dict.fromkeys(at.operands):
                found.setdefault(name, []).append(at)
        return found

    def changes(self) -> Iterator[tuple[str, str | None]]:
        """Every all-reduce that changes, with its new kind or ``None`` for dropped."""
        meetings: dict[str, list[str]] = {}
        for at in self.instructions.values():
            if at.opcode == "all-reduce":
                meetings.setdefault(self._meets_in(at), []).append(at.name)
        for end, (first, *others) in meetings.items():
            for name in others:
                yield name, None
            if self._only_sliced(end):
                yield first, "reduce-scatter"

    def _meets_in(self, at: Instruction) -> str:
        """The sum up to which an all-reduce can wait, or itself."""
        groups = _groups(at)
        end = at.name
        while True:
            above = self._only_user(end)
            if above is None or above.opcode != "add" or not self._all_reduced(above, groups):
                return end
            end = above.name

    def _only_user(self, name: str) -> Instruction | None:
        """What uses a value, through changes of its form, if it is one thing alone."""
        while name != self.root:
            users = self.users.get(name, [])
            if len(users) != 1:
                return None
            if users[0].opcode not in _SAME:
                return users[0]
            name = users[0].name
        return None

    def _all_reduced(self, at: Instruction, groups: str, depth: int = 64) -> bool:
        """Whether a value is a sum of all-reduces over the same groups, which nothing else uses."""
        if at.opcode == "all-reduce":
            return _groups(at) == groups and "(" not in at.type_text.partition("[")[0]
        if at.opcode in _SAME or at.opcode == "add":
            below = [self.instructions.get(name) for name in at.operands]
            return depth > 0 and all(
                one is not None
                and len(self.users[one.name]) == 1
                and self._all_reduced(one, groups, depth - 1)
                for one in below
            )
        return False

    def _only_sliced(self, name: str) -> bool:
        if name == self.root:
            return False
        users = self.users.get(name, [])
        return bool(users) and all(
            at.opcode == "dynamic-slice" or (at.opcode in _SAME and self._only_sliced(at.name))
            for at in users
        )


def _groups(at: Instruction) -> str:
    _, _, text = at.attributes.partition("replica_groups=")
    return text.partition(", ")[0] if not text.startswith("mesh") else text.partition("}")[0]
