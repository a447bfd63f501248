"""The text of a compiled module as computations and instructions.

Owns the grammar of HLO text, as far as prices need it: lines, types, opcodes, operands and
attributes. Knows nothing of meshes, and does not judge what an instruction costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from axisrules._errors import PolicyError

_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d\w*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{\s*$|^(ENTRY )?%?([^\s({=]+) \{\s*$")
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class Array:
    """An array in a type: its element type and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> float:
        """Bytes without padding; a type without bits, such as a token, has none."""
        return math.prod(self.shape) * bits_of(self.dtype) / 8


def bits_of(dtype: str) -> int:
    """Bits of one element of an HLO element type: ``bf16`` has 16, ``f8e4m3fn`` 8, ``pred`` 8."""
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    return int(found.group()) if found else 0


def arrays(type_text: str) -> tuple[Array, ...]:
    """Every array in a type, however nested."""
    return tuple(
        Array(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(type_text)
    )


def members(text: str) -> list[str]:
    """The parts of a list between its outermost brackets: of a tuple type, or of operands."""
    parts, depth, begin = [], 0, 1
    for at, letter in enumerate(text):
        if letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        if (letter == "," and depth == 1) or (depth == 0 and letter in _CLOSE):
            parts.append(text[begin:at].strip())
            begin = at + 1
            if depth == 0:
                break
    return [part for part in parts if part]


def _close(text: str, begin: int) -> int:
    """The position after the bracket that closes the one at ``begin``."""
    depth = 0
    for at in range(begin, len(text)):
        if text[at] in _OPEN:
            depth += 1
        elif text[at] in _CLOSE:
            depth -= 1
            if depth == 0:
                return at + 1
    return len(text)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, read further only when asked."""

    name: str
    opcode: str
    type_text: str
    rest: str  # from the bracket that opens the operands on

    @cached_property
    def _end(self) -> int:
        return _close(self.rest, 0)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        inside = members(_COMMENT.sub("", self.rest[: self._end]))
        return tuple(part.rpartition(" ")[2].removeprefix("%") for part in inside)

    @property
    def literal(self) -> str:
        """What stands between the brackets of a constant or a parameter."""
        return self.rest[1 : self._end - 1]

    @property
    def attributes(self) -> str:
        """What follows the operands."""
        return self.rest[self._end :]

    def attribute(self, name: str) -> str | None:
        """A word-like attribute, such as ``body=%region`` or ``index=4``."""
        found = re.search(rf"[ ,]{name}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    def text_of(self, name: str) -> str | None:
        """The text of a bracketed attribute, brackets included."""
        found = re.search(rf"[ ,]{name}=", self.attributes)
        if found is None:
            return None
        return self.attributes[found.end() : _close(self.attributes, found.end())]

    @property
    def parts(self) -> list[str]:
        """The members of a tuple type; of any other type, itself alone."""
        text = _COMMENT.sub("", self.type_text)
        return members(text) if text.startswith("(") else [text]


def _instruction(line: str) -> Instruction | None:
    """An instruction from its line, or ``None`` where the line is something else."""
    name, equals, value = line.strip().removeprefix("ROOT ").partition(" = ")
    found = _OPCODE.search(value)
    if not equals or found is None or " " in name:
        return None
    return Instruction(
        name.removeprefix("%"), found.group(1), value[: found.start()], value[found.end() - 1 :]
    )


@dataclass(frozen=True)
class Computation:
    """The lines of one computation; an instruction is read when it is asked for."""

    name: str
    lines: list[str] = field(repr=False)

    @cached_property
    def _line_of(self) -> dict[str, str]:
        named = (line.strip().removeprefix("ROOT ").partition(" = ")[0] for line in self.lines)
        return {name.removeprefix("%"): line for name, line in zip(named, self.lines, strict=True)}

    @cached_property
    def _known(self) -> dict[str, Instruction | None]:
        return {}

    def instruction(self, name: str) -> Instruction | None:
        """The instruction of that name, if there is one."""
        if name not in self._known:
            line = self._line_of.get(name)
            self._known[name] = None if line is None else _instruction(line)
        return self._known[name]

    @cached_property
    def root(self) -> Instruction | None:
        """The instruction whose value the computation returns."""
        line = next((line for line in self.lines if line.lstrip().startswith("ROOT ")), None)
        return None if line is None else _instruction(line)

    def matching(self, pattern: re.Pattern[str]) -> Iterator[Instruction]:
        """The instructions on lines that a pattern finds something in."""
        for line in self.lines:
            if pattern.search(line):
                found = _instruction(line)
                if found is not None:
                    yield found

    @cached_property
    def starts_asynchronously(self) -> bool:
        """Whether it is the one of many clones that starts a collective."""
        return any('"AsyncCollectiveStart"' in line for line in self.lines)


@dataclass(frozen=True)
class Module:
    """A module: its computations, where it begins, and for how many devices it was made.

    A module for several slices was made for the devices of one.
    """

    computations: dict[str, Computation] = field(repr=False)
    entry: Computation
    devices: int | None
    has_slices: bool


def parse(text: str) -> Module:
    """A module from its text.

    Raises:
        PolicyError: The text is no HLO module.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    lines: list[str] | None = None
    for line in text.splitlines():
        if lines is not None and line[:1] in (" ", "\t"):
            lines.append(line)
            continue
        head = _COMPUTATION.match(line) if line.endswith("{") else None
        if head is None:
            lines = None if line.startswith("}") else lines
            continue
        lines = []
        found = Computation(head.group(2) or head.group(4), lines)
        computations[found.name] = found
        if head.group(1) or head.group(3):
            entry = found
    if entry is None:
        raise PolicyError(_what_it_is(text), fix="pass lowered.compile(), or its .as_text().")
    return Module(computations, entry, _devices(text), "_xla_megascale_" in text)


def _what_it_is(text: str) -> str:
    if re.search(r"^\s*(\"?(builtin\.)?module\b|func\.func|#loc|#map)", text):
        return "this is StableHLO, a program that is not compiled yet, and no compiled module"
    start = text.lstrip()[:40]
    return f"this text is no compiled module: {start!r}" if start else "this text is empty"


def _devices(text: str) -> int | None:
    header = text[text.find("HloModule") :].partition("\n")[0]
    counts = [int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)]
    return math.prod(counts) if counts else None
