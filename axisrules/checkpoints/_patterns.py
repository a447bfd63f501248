"""The patterns of the options that say what is taken from a checkpoint.

Owns what a pattern of paths matches beyond what ``NameTable`` does: which of several is never used,
what a wildcard stands for in a new path, and the number that tells layers apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from axisrules._errors import CheckpointError
from axisrules._tables import NameTable
from axisrules._text import nearest

Pattern: TypeAlias = "str | re.Pattern[str]"
Patterns: TypeAlias = "Pattern | Iterable[Pattern]"
Renaming: TypeAlias = "Mapping[Pattern, str] | Callable[[str], str]"


Table: TypeAlias = "list[tuple[Pattern, Any]] | None"


def table(option: str, given: Any, value: Any) -> Table:
    """Patterns with what each asks for, ``value`` where only patterns are given."""
    if given is None:
        return None
    if isinstance(given, (str, re.Pattern)):
        given = [given]
    pairs = list(given.items()) if isinstance(given, Mapping) else [(one, value) for one in given]
    bad = [one for one, _ in pairs if not (isinstance(one, re.Pattern) or (isinstance(one, str) and one))]
    if bad:
        raise CheckpointError(
            f"{option}= has {bad[0]!r}, which is no pattern of paths", fix=f'pass {option}=["**.weight"].'
        )
    return pairs


class Matches:
    """The patterns of one option, and which of them matched."""

    def __init__(self, table: Table) -> None:
        self._values = [value for _, value in table or ()]
        self._table = NameTable([(pattern, None) for pattern, _ in table or ()])
        self._patterns = [pattern for pattern, _ in table or ()]
        self._used: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._values)

    def find(self, path: str) -> tuple[bool, Any]:
        """Whether a pattern matches, and what the first such one asks for."""
        found = self._table.matches(path)
        self._used.update(found)
        return (True, self._values[found[0]]) if found else (False, None)

    def unused(self) -> list[Pattern]:
        """The patterns that matched nothing."""
        return [one for number, one in enumerate(self._patterns) if number not in self._used]


def unused(
    option: str, patterns: Iterable[Pattern], where: str, known: Iterable[str]
) -> list[CheckpointError]:
    texts = [one if isinstance(one, str) else one.pattern for one in patterns]
    paths = list(known) if texts else []
    return [
        CheckpointError(
            f"{option}= has the pattern {text!r}, which matches nothing in {where}",
            fix=f"correct or remove it{f'; the nearest path is {close!r}.' if close else '.'}",
        )
        for text in texts
        for close in [nearest(text, paths)]
    ]


def numbered(pattern: Pattern, axis: Any) -> Callable[[str], tuple[int, str] | None]:
    """What finds the number in a path that stands where the last ``*`` of the pattern stands."""
    if not isinstance(pattern, str) or not re.search(r"(?:^|[./])\*$", pattern):
        raise CheckpointError(
            f"stack= has {getattr(pattern, 'pattern', pattern)!r}, which does not end with a segment '*'",
            fix='pass stack="model.layers.*".',
        )
    if not isinstance(axis, str) or not axis:
        raise CheckpointError(
            f"stack= gives the new dimension the name {axis!r}", fix=f'pass stack={{{pattern!r}: "layers"}}.'
        )
    compiled = _glob(f"{pattern}.**")

    def match(path: str) -> tuple[int, str] | None:
        found = compiled.fullmatch(path.replace(".", "/") + "/")
        if found is None:
            return None
        start, end = found.span(found.re.groups - 1)
        number = path[start:end]
        if not number.isascii() or not number.isdigit() or str(int(number)) != number:
            return None
        return int(number), (path[:start].rstrip("./") + path[end:]).lstrip("./") or axis

    return match


@lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression over ``/``-joined segments, with a group per wildcard."""
    parts = []
    for segment in re.split(r"[./]", pattern):
        if segment == "**":
            parts.append("((?:[^/]*/)*)")
        else:
            parts.append("([^/]*)".join(map(re.escape, re.split(r"\*+", segment))) + "/")
    return re.compile("".join(parts))


def _wildcards(text: str) -> int:
    return len(re.findall(r"\*+", text))


class Renames:
    """Patterns with new paths, in which a wildcard stands for what it matched in the old one."""

    def __init__(self, rename: Mapping[Pattern, str]) -> None:
        if not isinstance(rename, Mapping):
            raise CheckpointError(
                f"rename={rename!r} is no mapping of patterns to paths",
                fix='pass rename={"model.layers.*.mlp.up_proj.weight": "layers.*.up.kernel"}, or a function.',
            )
        self._rules = table("rename", rename, None) or []
        self._matches = Matches([(pattern, number) for number, (pattern, _) in enumerate(self._rules)])
        for pattern, new in self._rules:
            if not isinstance(new, str) or (
                isinstance(pattern, str) and _wildcards(new) > _wildcards(pattern)
            ):
                raise CheckpointError(
                    f"rename= maps {pattern!r} to {new!r}, which no path can be made of",
                    fix="give a text with as many wildcards as the pattern has, or fewer.",
                )

    def __call__(self, path: str) -> str:
        found, number = self._matches.find(path)
        if not found:
            return path
        pattern, new = self._rules[number]
        if isinstance(pattern, re.Pattern):
            match = pattern.fullmatch(path)
            return match.expand(new) if match else path
        match = _glob(pattern).fullmatch(path.replace(".", "/") + "/")
        if match is None:
            return path
        spans = [match.span(group) for group in range(1, match.re.groups + 1)]
        pieces = iter([path[start:end].rstrip("./") for start, end in spans])

        def fill(wildcard: re.Match[str]) -> str:
            piece = next(pieces)
            return piece + (wildcard[1] or "") if piece else ""

        return re.sub(r"\*\*([./]?)|\*", fill, new).rstrip("./")

    def unused(self) -> list[Pattern]:
        """The patterns that matched nothing."""
        return self._matches.unused()
