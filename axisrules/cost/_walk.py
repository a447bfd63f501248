"""A walk through a module, from its entry through loops, branches and fusions.

Owns what is counted, and how often. Nothing is dropped in silence: what is not understood is listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from axisrules._meshes import Sizes
from axisrules.cost._collective import Collective, Collectives, wire_bytes
from axisrules.cost._groups import Groups, of_groups, of_pairs
from axisrules.cost._loops import invariants, trip_count
from axisrules.cost._modules import Array, Computation, Instruction, Module, arrays
from axisrules.cost._rewrites import Changes

_KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "ragged-all-to-all", "all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_COLLECTIVE = re.compile(rf" ({'|'.join(_KINDS)})(-start)?\(")
_VISITED = re.compile(
    rf" (?:(?:{'|'.join(_KINDS)})(?:-start)?|send|while|fusion|call|conditional|async-start|custom-call)\("
)
_ALIKE = re.compile(r"^(?:all-|reduce-scatter|collective-|ragged-|send|recv|async-)")
_QUIET = re.compile(r"^(?:recv|send-done|async-update|async-done)|-done$|-update$")
_FOREIGN = re.compile(r"(?i)all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective")


class Walk:
    """A walk through a module, in the order in which it runs."""

    def __init__(self, module: Module, sizes: Sizes, slices: Sizes, changes: Changes) -> None:
        self.module, self.sizes, self.slices, self.changes = module, sizes, slices, changes
        self.found: list[Collective] = []
        self.unread: list[str] = []
        self.carrying: dict[str, bool] = {}
        self.visited: set[str] = set()
        self.started = {
            _identity(one)
            for computation in module.computations.values()
            if computation.starts_asynchronously
            for one in computation.matching(_COLLECTIVE)
        }

    def visit(self, computation: Computation, times: int, given: list[Any], *, fused: bool = False) -> None:
        """Counts what a computation does, run so many times with what is known of its parameters."""
        self.visited.add(computation.name)
        for at in computation.matching(_VISITED):
            kind = at.opcode.removesuffix("-start")
            if kind in _KINDS:
                clone = fused and not computation.starts_asynchronously and _identity(at) in self.started
                changed = self.changes.get((computation.name, at.name), kind)
                if not clone and changed is not None:
                    self._count(at, kind, times, changed)
            elif at.opcode == "send":
                self._send(at, times)
            elif at.opcode == "while":
                self._loop(computation, at, times, given)
            elif at.opcode == "conditional":
                self._branches(at, times)
            elif at.opcode == "custom-call":
                self._custom(at)
            else:
                self._called(at, times)

    def _called(self, at: Instruction, times: int) -> None:
        name = at.attribute("calls") or at.attribute("to_apply") or ""
        called = self.module.computations.get(name)
        if called is None:
            if at.opcode != "fusion":
                self.unread.append(f"{at.opcode} {at.name}: what it calls is not in the module")
        elif self._carries(called):
            if name.startswith("all-reduce-scatter"):
                self._hidden_scatter(called, at, times)
            else:
                self.visit(called, times, [], fused=at.opcode == "fusion")

    def _carries(self, computation: Computation) -> bool:
        """Whether there is anything to visit in it, or below it."""
        known = self.carrying.get(computation.name)
        if known is None:
            self.carrying[computation.name] = False  # a computation never calls itself
            known = self.carrying[computation.name] = any(
                at.opcode not in ("fusion", "call", "custom-call") or self._leads_on(at)
                for at in computation.matching(_VISITED)
            )
        return known

    def _leads_on(self, at: Instruction) -> bool:
        if at.opcode == "custom-call":
            return _is_foreign(at)
        called = self.module.computations.get(at.attribute("calls") or at.attribute("to_apply") or "")
        return called is not None and self._carries(called)

    def _loop(self, computation: Computation, at: Instruction, times: int, given: list[Any]) -> None:
        count, how = trip_count(self.module, computation, at, given)
        body = self.module.computations.get(at.attribute("body") or "")
        if body is None:
            self.unread.append(f"loop {at.name}: its body is not in the module")
            return
        before = len(self.found)
        inside = invariants(self.module, computation, at, body, given)
        self.visit(body, times * (1 if count is None else count), [inside])
        if how == "unknown" and len(self.found) > before:
            self.unread.append(f"loop {at.name}: how often it runs is unknown; counted once")

    def _branches(self, at: Instruction, times: int) -> None:
        """Counts the dearest branch of a conditional."""
        text = at.text_of("branch_computations") or ""
        names = re.findall(r"%?([\w.\-]+)", text)
        names += [at.attribute(f"{word}_computation") or "" for word in ("true", "false")]
        branches = [self.module.computations[name] for name in names if name in self.module.computations]
        if not branches:
            self.unread.append(f"conditional {at.name}: its branches are not in the module")
        before = self.found
        results: list[list[Collective]] = []
        for branch in branches:
            self.found = []
            self.visit(branch, times, [])
            results.append(self.found)
        self.found = before
        self.found += max(results, key=_total, default=[])
        if len({_by_key(result) for result in results}) > 1:
            self.unread.append(f"conditional {at.name}: which branch runs is unknown; the dearest is counted")

    def _groups(self, at: Instruction) -> Groups | None:
        if at.opcode.startswith("collective-permute"):
            pairs = at.text_of("source_target_pairs")
            return None if pairs is None else of_pairs(pairs, self.sizes)
        _, given, text = at.attributes.partition("replica_groups=")
        return of_groups(text if given else "{}", self.sizes)

    def _count(self, at: Instruction, kind: str, times: int, becomes: str) -> None:
        groups = self._groups(at)
        if groups is None:
            self.unread.append(f"{at.opcode} {at.name}: its groups of devices are not readable")
            return
        moved = _moved(at, kind, groups.size)
        if not moved:
            self.unread.append(f"{at.opcode} {at.name}: its type {at.type_text!r} is not readable")
        self._add(at, becomes, groups, moved, times)

    def _hidden_scatter(self, called: Computation, at: Instruction, times: int) -> None:
        """A reduce-scatter that the TPU writes as a fusion of an all-reduce and a slice."""
        self.visited.add(called.name)
        inner = next(called.matching(_COLLECTIVE), None)
        groups = None if inner is None else self._groups(inner)
        if groups is None:
            self.unread.append(f"fusion {at.name}: the groups of its reduce-scatter are not readable")
            return
        moved = [
            Array(one.dtype, (one.shape[0] * groups.size, *one.shape[1:])) for one in arrays(at.type_text)
        ]
        self._add(at, "reduce-scatter", groups, moved, times, ("a fusion of an all-reduce and a slice",))

    def _send(self, at: Instruction, times: int) -> None:
        """Traffic between slices: a part of a collective that the runtime of the host carries out."""
        sent = list(arrays(at.parts[0]))
        size = sum(one.nbytes for one in sent)
        word = re.search(r'_xla_megascale_transfer_type="(\w+)"', at.attributes)
        kind = word.group(1).lower().replace("_", "-") if word else ""
        if kind not in _KINDS or not self.slices:
            self.unread.append(f"send {at.name}: {size:,.0f} bytes, by a way that is not readable")
            return
        count = math.prod(length for _, length in self.slices)
        if kind == "all-gather":
            size *= count  # what is sent is the operand
        groups = Groups(tuple(axis for axis, length in self.slices if length > 1), count)
        wire = wire_bytes(kind, size, count)
        self.found.append(_collective(at, kind, groups, sent, wire, times, ("between slices",)))

    def _custom(self, at: Instruction) -> None:
        if _is_foreign(at):
            self.unread.append(f"custom call {at.name}: it may be a collective of another library")

    def _add(
        self,
        at: Instruction,
        kind: str,
        groups: Groups,
        moved: list[Array],
        times: int,
        notes: tuple[str, ...] = (),
    ) -> None:
        wire = wire_bytes(kind, sum(one.nbytes for one in moved), groups.size, groups.share)
        self.found.append(_collective(at, kind, groups, moved, wire, times, notes))

    def list_unknown(self) -> None:
        """Lists what looks like a collective and has no formula here, or was not come across."""
        known = {*_KINDS, "send", "async-start"}
        for computation in self.module.computations.values():
            if computation.name not in self.visited and any(computation.matching(_COLLECTIVE)):
                self.unread.append(f"computation {computation.name}: it has collectives, and nothing runs it")
            for line in computation.lines:
                found = re.search(
                    r" ((?:all|reduce-scatter|collective|ragged|send|recv|async)[a-z-]*)\(", line
                )
                if found is None or _QUIET.search(found.group(1)) or not _ALIKE.match(found.group(1)):
                    continue
                if found.group(1).removesuffix("-start") not in known and found.group(1) not in known:
                    self.unread.append(f"{found.group(1)} in {computation.name}: unknown kind of collective")


def _total(found: Iterable[Collective]) -> float:
    return sum(one.wire_bytes * one.executions for one in found)


def _by_key(found: Iterable[Collective]) -> frozenset[tuple[tuple[str, str], int]]:
    return frozenset(Collectives(tuple(found), {}).by_kind.items())


def _is_foreign(at: Instruction) -> bool:
    found = re.search(r'custom_call_target="([^"]*)"', at.attributes)
    target = found.group(1) if found else ""
    return bool(_FOREIGN.search(target)) and not target.startswith("AsyncCollective")


def _identity(at: Instruction) -> tuple[str, ...]:
    """What the clones of one asynchronous collective share; a channel alone does not tell them."""
    _, _, groups = at.attributes.partition("replica_groups=")
    shapes = str([one.shape for one in arrays(at.type_text)])
    return at.opcode, at.attribute("channel_id") or "", groups.partition(", ")[0], shapes


def _moved(at: Instruction, kind: str, group: int) -> list[Array]:
    """The arrays by which the bytes of a collective are counted."""
    parts = at.parts
    nested = parts[0].startswith("(")
    if at.opcode.endswith("-start") and (nested or kind in ("all-gather", "collective-permute")):
        whole = parts[1:2]  # operands, then results
        if kind == "reduce-scatter":
            return list(arrays(parts[0]))
    else:
        whole = parts
    results = [one for part in whole for one in arrays(part)]
    if kind != "reduce-scatter":
        return results
    found = re.search(r"dimensions=\{(\d+)", at.attributes)
    dimension = int(found.group(1)) if found else 0
    return [_grown(one, dimension, group) for one in results]


def _grown(one: Array, dimension: int, times: int) -> Array:
    return Array(one.dtype, tuple(n * times if at == dimension else n for at, n in enumerate(one.shape)))


def _collective(
    at: Instruction,
    kind: str,
    groups: Groups,
    moved: list[Array],
    wire: float,
    times: int,
    notes: tuple[str, ...],
) -> Collective:
    label = re.search(r'op_name="([^"]*)"', at.attributes)
    return Collective(
        kind,
        groups.axes,
        groups.size,
        "+".join(dict.fromkeys(one.dtype for one in moved)),
        tuple(one.shape for one in moved),
        sum(one.nbytes for one in moved),
        wire,
        times,
        at.name,
        label.group(1) if label else "",
        notes,
    )
