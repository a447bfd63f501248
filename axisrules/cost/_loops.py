"""How often a loop runs.

Owns the small evaluator that finds it out where a module prints no trip count: the limit from the
condition, the step from the body, the start from the operand. Guesses nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from axisrules.cost._modules import Computation, Instruction, Module

_MOST = 10_000  # a loop that runs longer is not followed
_SAME = {"copy", "convert", "bitcast", "bitcast-convert", "reshape", "broadcast", "optimization-barrier"}
_TWO: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_Values = dict[int, Any]  # what is known of the members of a loop's tuple, by position


def trip_count(
    module: Module, computation: Computation, loop: Instruction, given: list[Any]
) -> tuple[int | None, str]:
    """How often a loop runs, and how that is known.

    Args:
        module: The module.
        computation: The computation that the loop stands in.
        loop: The loop.
        given: What is known of the parameters of that computation.

    Returns:
        The count, or ``None`` where it cannot be told, and ``"known"``, ``"condition"`` or
        ``"unknown"``.
    """
    printed = re.search(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)"?', loop.attributes)
    if printed:
        return int(printed.group(1)), "known"
    condition = module.computations.get(loop.attribute("condition") or "")
    body = module.computations.get(loop.attribute("body") or "")
    if condition is None or body is None:
        return None, "unknown"
    count = _follow(module, condition, body, _start(module, computation, loop, given))
    return (None, "unknown") if count is None else (count, "condition")


def invariants(
    module: Module, computation: Computation, loop: Instruction, body: Computation, given: list[Any]
) -> _Values:
    """What is known of the members of a loop's tuple that the loop does not change."""
    if body.root is None or body.root.opcode != "tuple":
        return {}
    handed_on = (body.instruction(name) for name in body.root.operands)
    same = {
        at
        for at, member in enumerate(handed_on)
        if member is not None
        and member.opcode == "get-tuple-element"
        and member.attribute("index") == str(at)
    }
    known = _start(module, computation, loop, given)
    return {at: value for at, value in known.items() if at in same}


def _start(module: Module, computation: Computation, loop: Instruction, given: list[Any]) -> _Values:
    """What is known of the tuple that a loop starts with."""
    whole = _Reader(module, computation, given).value(loop.operands[0]) if loop.operands else None
    return whole if isinstance(whole, dict) else {}


def _follow(module: Module, condition: Computation, body: Computation, values: _Values) -> int | None:
    """Runs the loop on the numbers that decide when it ends."""
    if condition.root is None or body.root is None or body.root.opcode != "tuple":
        return None
    used = _used(condition, condition.root)
    names = body.root.operands
    for count in range(_MOST):
        goes_on = _Reader(module, condition, [values]).value(condition.root.name)
        if not isinstance(goes_on, int):
            return None
        if not goes_on:
            return count
        inside = _Reader(module, body, [values])
        values = {**values, **{at: inside.value(names[at]) for at in used}}
    return None


def _used(computation: Computation, at: Instruction) -> set[int]:
    """The members of the tuple that a condition looks at."""
    found: set[int] = set()
    seen: set[str] = set()
    stack = [at]
    while stack:
        one = stack.pop()
        if one.opcode == "get-tuple-element":
            found.add(int(one.attribute("index") or 0))
            continue
        new = [
            name for name in one.operands if name not in seen and one.opcode not in ("constant", "parameter")
        ]
        seen.update(new)
        stack += [below for below in map(computation.instruction, new) if below is not None]
    return found


class _Reader:
    """Reads whole numbers off a computation whose parameters are known in part.

    A value is a number, a tuple's known members as a dict by position, or ``None`` for unknown.
    """

    def __init__(self, module: Module, computation: Computation, given: list[Any]) -> None:
        self.module, self.computation, self.given = module, computation, given
        self.known: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """What an instruction yields, if that is known."""
        if name not in self.known:
            self.known[name] = None
            at = self.computation.instruction(name)
            self.known[name] = None if at is None else self._read(at)
        return self.known[name]

    def _read(self, at: Instruction) -> Any:
        if at.opcode == "parameter":
            number = int(at.literal)
            return self.given[number] if number < len(self.given) else None
        if at.opcode == "tuple":
            found = {i: self.value(name) for i, name in enumerate(at.operands)}
            return {i: value for i, value in found.items() if value is not None}
        if "[]" not in at.type_text:
            return None  # only whole numbers decide how often a loop runs
        if at.opcode == "get-tuple-element":
            whole = self.value(at.operands[0])
            return whole.get(int(at.attribute("index") or 0)) if isinstance(whole, dict) else None
        if at.opcode == "constant":
            return _literal(at.literal)
        values = [self.value(name) for name in at.operands]
        if at.opcode in ("fusion", "call"):
            return self._called(at, values)
        return _result(at, values)

    def _called(self, at: Instruction, values: list[Any]) -> Any:
        called = self.module.computations.get(at.attribute("calls") or at.attribute("to_apply") or "")
        if called is None or called.root is None:
            return None
        return _Reader(self.module, called, values).value(called.root.name)


def _result(at: Instruction, values: list[Any]) -> int | None:
    if not values or not all(isinstance(value, int) for value in values):
        return None
    if at.opcode in _SAME and len(values) == 1:
        return int(values[0])
    if at.opcode in _TWO and len(values) == 2:
        return _TWO[at.opcode](*values)
    compare = _COMPARE.get(at.attribute("direction") or "") if at.opcode == "compare" else None
    return int(compare(*values)) if compare and len(values) == 2 else None


def _literal(text: str) -> int | None:
    word = text.strip()
    if word in ("true", "false"):
        return int(word == "true")
    return int(word) if re.fullmatch(r"-?\d+", word) else None
