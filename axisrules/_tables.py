"""Name tables: path patterns and the names of the arrays that they match.

Owns the matching of paths. What names may be stands in ``_names.py``.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from axisrules import _files
from axisrules._errors import NamesError, NameTableError, raise_all
from axisrules._marks import Marks, parse_marks
from axisrules._names import parse_names


def split_path(path: str) -> list[str]:
    """The segments of a path or pattern; ``.`` separates as ``/`` does."""
    return path.replace(".", "/").split("/")


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    """A glob over path segments as a regular expression over ``/``-joined segments."""
    segments: list[str] = []
    for segment in split_path(pattern):
        if segment != "**" or segments[-1:] != ["**"]:  # one after another says no more
            segments.append(segment)
    parts = [r"(?:[^/]*/)*" if segment == "**" else _segment_regex(segment) for segment in segments]
    return re.compile("".join(parts))


def _segment_regex(segment: str) -> str:
    """One segment as a regular expression that never tries a way twice."""
    first, *rest = [re.escape(part) for part in re.split(r"\*+", segment)]
    if not rest:
        return first + "/"
    middle = "".join(f"(?>[^/]*?{part})" for part in rest[:-1])
    return f"{first}{middle}[^/]*{rest[-1]}/"


class NameTable:
    """Path patterns and the names of the arrays that they match, in order.

    In a pattern ``*`` matches within one path segment, ``**`` any number of segments, none
    included, and ``.`` separates segments as ``/`` does, so that a pattern fits flat checkpoint
    keys too. A compiled ``re.Pattern`` is matched in full against the path. The first pattern
    that matches wins.

    Args:
        entries: A mapping or pairs: pattern to names (a tuple, a text, or ``None`` for an array
            that is whole on purpose), or to a mapping of ``names`` with ``optional`` and marks
            (``fused``, ``packed``, ``groups``: see the example).
        optional: Patterns of ``entries`` that a tree may lack without a remark in the report.

    Raises:
        NameTableError: An entry is malformed; all of them are named.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> table = ar.NameTable({"**/kernel": "embed mlp", "**/bias": ("mlp",)})
        >>> table.find("layers/0/kernel")
        ('embed', 'mlp')

        Matrices that are fused are marked, so that a plan that cuts across them says so:

        >>> qkv = {"names": "qkv embed", "fused": {"dim": 0, "order": "concat", "parts": ["q", "k", "v"]}}
        >>> plan = ar.plan({"qkv": np.zeros((24, 8), np.float32)}, ar.NameTable({"qkv": qkv}),
        ...                mesh="model=2", rules={"qkv": "model", "embed": None})
        >>> [(row.dim, row.reason) for row in plan.report]
        [(0, 'cuts_fused')]
    """

    __slots__ = ("_entries", "_marks", "_matchers", "_memo", "_numbers", "_optional")

    _memo: dict[str, tuple[int, ...]]

    def __init__(
        self,
        entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        *,
        optional: Iterable[str] = (),
    ) -> None:
        pairs = _pairs(entries)
        failures: list[NameTableError] = []
        read = [_entry(number, pair, failures) for number, pair in enumerate(pairs)]
        self._entries = tuple((one.pattern, one.names) for one in read)
        self._marks = {number: one.marks for number, one in enumerate(read) if one.marks != Marks()}
        self._optional = _patterns(optional) | {one.pattern for one in read if one.optional}
        for pattern in self._optional - {pattern for pattern, _ in self._entries}:
            failures.append(NameTableError(f"optional pattern {pattern!r} is no pattern of the table"))
        raise_all(failures)
        self._matchers: tuple[Callable[[str, str], Any], ...] | None = None  # made when first needed
        self._numbers, self._memo = _spelled_numbers(self._entries), {}

    def matches(self, path: str) -> tuple[int, ...]:
        """The positions of all patterns that match the path, in order."""
        if self._numbers is None:
            return self._match(path)
        key = re.sub("[0-9]+", self._numbers, path)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._match(key)
        return found

    def _match(self, path: str) -> tuple[int, ...]:
        if self._matchers is None:
            self._matchers = tuple(_matcher(pattern) for pattern, _ in self._entries)
        segments = path.replace(".", "/") + "/"
        return tuple(i for i, matches in enumerate(self._matchers) if matches(path, segments))

    def find(self, path: str) -> Any:
        """The names for a path.

        Raises:
            KeyError: No pattern matches.
        """
        found = self.matches(path)
        if not found:
            raise KeyError(path)
        return self._entries[found[0]][1]

    @property
    def optional(self) -> frozenset[Any]:
        """The patterns that a tree may lack."""
        return self._optional

    @property
    def marks(self) -> dict[int, Marks]:
        """The marks of those entries that have any, by position."""
        return dict(self._marks)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NameTable:
        """Reads a table: ``names`` maps patterns to names, ``optional`` lists patterns.

        Names are a text in short form, a list with ``""`` for ``None``, or ``false`` for an
        array that is whole on purpose. With marks they stand in a table of their own::

            "**.qkv" = {names = "qkv embed", fused = {dim = 0, order = "concat", parts = ["q", "k", "v"]}}
            "**.qweight" = {names = "mlp embed", optional = true, groups = {dim = 0, like = "scales"}}
        """
        return read_table(_files.read(path, NameTableError), os.fspath(path))

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes the table in the form that ``load`` reads."""
        regexes = [pattern.pattern for pattern, _ in self._entries if not isinstance(pattern, str)]
        if regexes:
            raise NameTableError(f"a compiled pattern cannot be written to a file: {regexes[0]!r}")
        optional = [pattern for pattern, _ in self._entries if pattern in self._optional]
        given = [(pattern, self._plain(number)) for number, (pattern, _) in enumerate(self._entries)]
        names = dict(reversed(dict(reversed(given)).items()))  # the first of a pattern counts
        _files.write(path, {"optional": optional, "names": names}, NameTableError)

    def _plain(self, number: int) -> Any:
        """What stands in a file for one entry."""
        names = _to_plain(self._entries[number][1])
        return {"names": names, **self._marks[number].plain()} if number in self._marks else names

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NameTable):
            return NotImplemented
        mine = (self._entries, self._optional, self._marks)
        return mine == (other._entries, other._optional, other._marks)

    def __hash__(self) -> int:
        return hash(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        entries = [
            (pattern, {"names": names, **self._marks[number].plain()} if number in self._marks else names)
            for number, (pattern, names) in enumerate(self._entries)
        ]
        return _table_of, (entries, self._optional)

    def __repr__(self) -> str:
        lines = "".join(f"\n    {pattern!r}: {names!r}," for pattern, names in self._entries)
        return f"NameTable({{{lines}\n}})" if lines else "NameTable({})"


def read_table(data: Any, where: str) -> NameTable:
    """The table that the content of a file says.

    Raises:
        NameTableError: It is no table; the file is named.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("names"), Mapping):
        raise NameTableError(
            f"{where} has no table 'names' that maps patterns to names",
            paths=[where],
            fix='write [names] and below it lines like "**/kernel" = "embed mlp".',
        )
    entries = {pattern: _from_plain(names) for pattern, names in data["names"].items()}
    try:
        return NameTable(entries, optional=data.get("optional", ()))
    except NameTableError as error:
        raise NameTableError(
            f"{where}: {error.headline}", paths=[where], failures=error.failures, fix=error.fix
        ) from error


def _patterns(optional: Any) -> frozenset[Any]:
    given = () if isinstance(optional, (str, bytes, Mapping)) else tuple(optional or ())
    if (not given and optional) or not all(isinstance(pattern, (str, re.Pattern)) for pattern in given):
        raise NameTableError(f"optional={optional!r} is no list of patterns", fix='pass ["**/bias"].')
    return frozenset(given)


def _table_of(entries: Any, optional: Any) -> NameTable:
    return NameTable(entries, optional=optional)


def _pairs(entries: Any) -> Iterable[Any]:
    if isinstance(entries, Mapping):
        return entries.items()
    if isinstance(entries, (str, bytes, set, frozenset)) or not isinstance(entries, Iterable):
        raise NameTableError(
            f"{entries!r} is no table of names",
            fix='give a mapping like {"**/kernel": "embed mlp"}, or pairs.',
        )
    return entries


class _Entry(NamedTuple):
    """One entry as it was read."""

    pattern: Any = ""
    names: Any = None
    optional: bool = False
    marks: Marks = Marks()


def _entry(number: int, pair: Any, failures: list[NameTableError]) -> _Entry:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        failures.append(NameTableError(f"entry #{number} is {pair!r}, not a pattern with its names"))
        return _Entry()
    pattern, value = pair
    if not (isinstance(pattern, re.Pattern) or (isinstance(pattern, str) and pattern)):
        failures.append(NameTableError(f"the pattern of entry #{number} is {pattern!r}, not a text"))
        return _Entry()
    try:
        return _entry_of(pattern, value)
    except (NamesError, NameTableError) as error:
        failures.append(
            NameTableError(f"entry #{number} ({_text(pattern)}): {error.headline}", fix=error.fix)
        )
        return _Entry(pattern)


def _entry_of(pattern: Any, value: Any) -> _Entry:
    if not isinstance(value, Mapping):
        return _Entry(pattern, None if value is None else parse_names(value))
    names = None if value.get("names") is None else parse_names(value["names"])
    marks = parse_marks(value, None if names is None or ... in names else len(names))
    return _Entry(pattern, names, value.get("optional", False), marks)


def _spelled_numbers(entries: Iterable[tuple[Any, Any]]) -> Callable[[re.Match[str]], str] | None:
    """What maps paths that match alike to one: a number that no pattern spells is as good as another.

    ``None`` where patterns can look inside of numbers, so that every path has to be matched itself.
    """
    patterns = [pattern for pattern, _ in entries]
    if any(not isinstance(p, str) or re.search(r"[0-9]\*|\*[0-9]", p) for p in patterns):
        return None
    spelled = {number for pattern in patterns for number in re.findall("[0-9]+", pattern)}
    other = next(str(n) for n in itertools.count() if str(n) not in spelled)
    return lambda match: match[0] if match[0] in spelled else other


def _text(pattern: Any) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _matcher(pattern: Any) -> Callable[[str, str], Any]:
    if isinstance(pattern, str):
        match = _compile(pattern).fullmatch
        return lambda path, segments: match(segments)
    return lambda path, segments: pattern.fullmatch(path)


def _from_plain(names: Any) -> Any:
    if isinstance(names, Mapping):
        return {key: _from_plain(value) if key == "names" else value for key, value in names.items()}
    if names is False:
        return None
    return [name or None for name in names] if isinstance(names, list) else names


def _to_plain(names: Any) -> Any:
    if names is None:
        return False
    words = ["_" if name is None else "..." if name is ... else name for name in names]
    text = " ".join(words)
    if parse_names(text, unconstrained=True) == names:
        return text
    if ... in names:
        raise NameTableError(f"names {names!r} cannot be written to a file")
    return [name or "" for name in names]
