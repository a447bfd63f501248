"""Which arrays of a checkpoint are loaded, under which paths, in which order of dimensions.

Owns ``keep``, ``skip``, ``prefix``, ``transpose``, ``stack`` and ``rename``, in this order; all but
``rename`` speak of the paths that the file has. Reads nothing and knows no mesh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypedDict

import numpy as np

from axisrules._errors import AxisRulesError, CheckpointError, raise_all
from axisrules._text import nearest
from axisrules.checkpoints._folders import Checkpoint, collector_paused
from axisrules.checkpoints._header import Unheld, shown
from axisrules.checkpoints._patterns import (
    Matches,
    Pattern,
    Patterns,
    Renames,
    Renaming,
    Table,
    numbered,
    table,
    unused,
)
from axisrules.checkpoints._sources import Permuted, Source


class SelectOptions(TypedDict, total=False):
    """The options that say what is taken from a checkpoint."""

    keep: Patterns | None
    skip: Patterns | None
    prefix: str
    rename: Renaming | None
    transpose: Patterns | Mapping[Pattern, Sequence[int]] | None
    stack: Patterns | Mapping[Pattern, str] | None


class Part(NamedTuple):
    """One array of the file, as a part of what is loaded.

    Attributes:
        stored: Its path in the file.
        source: The array, its dimensions in the order that is loaded.
        order: Per dimension that is loaded, the dimension in the file.
    """

    stored: str
    source: Source
    order: tuple[int, ...]


class Entry(NamedTuple):
    """One array that is loaded.

    Attributes:
        path: Its path in the result.
        parts: The arrays that it consists of, by their place along the stacked dimensions.
        axes: The names of the stacked dimensions, which come first.
        counts: The sizes of the stacked dimensions.
    """

    path: str
    parts: tuple[Part, ...]
    axes: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = self.parts[0].source.shape
        return (*self.counts, *shape) if self.counts else shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype in the file."""
        return self.parts[0].source.dtype

    def inside(self, index: Sequence[int]) -> Part:
        """The part at a place along the stacked dimensions."""
        at = 0
        for place, count in zip(index, self.counts, strict=True):
            at = at * count + place
        return self.parts[at]


@collector_paused()
def select(
    checkpoint: Checkpoint,
    *,
    keep: Patterns | None = None,
    skip: Patterns | None = None,
    prefix: str = "",
    rename: Renaming | None = None,
    transpose: Patterns | Mapping[Pattern, Sequence[int]] | None = None,
    stack: Patterns | Mapping[Pattern, str] | None = None,
) -> dict[str, Entry]:
    """What is loaded, by its path in the result.

    Raises:
        CheckpointError: A pattern is malformed or matches nothing, or the arrays do not fit what is
            asked for; all failures are in the one error.
    """
    taken = _Taken(checkpoint)
    names = taken.kept(table("keep", keep, True), table("skip", skip, True), prefix)
    entries = taken.ordered(names, prefix, table("transpose", transpose, None))
    raise_all(taken.failures)
    for pattern, axis in _deepest_first(table("stack", stack, "layers")):
        entries = taken.stacked(entries, pattern, axis, prefix)
    raise_all(taken.failures)
    return taken.renamed(entries, rename)


def _strip(path: str, prefix: str) -> str:
    return path[len(prefix) :].lstrip("./") if prefix else path


@dataclass(slots=True)
class _Taken:
    """What is taken from one checkpoint, and what failed."""

    checkpoint: Checkpoint
    failures: list[AxisRulesError] = field(default_factory=list)

    def kept(self, keep: Table, skip: Table, prefix: str) -> list[str]:
        """The names that are kept."""
        known = list(self.checkpoint.arrays)
        names = [name for name in known if _is_below(name, prefix)] if prefix else known
        if prefix and known and not names:
            close = nearest(prefix, {name[: len(prefix)] for name in known})
            raise CheckpointError(
                f"no array of {self.checkpoint.where} has the prefix {prefix!r}",
                paths=known[:1],
                fix=f"leave out prefix={f', or pass {close!r}' if close else ''}.",
            )
        if keep is not None:
            wanted = Matches(keep)
            names = [name for name in names if wanted.find(name)[0]]
            self.failures += unused("keep", wanted.unused(), self.checkpoint.where, known)
        if skip is not None:
            unwanted = Matches(skip)
            names = [name for name in names if not unwanted.find(name)[0]]
        return names

    def ordered(self, names: Iterable[str], prefix: str, transpose: Table) -> dict[str, Entry]:
        """An entry per array, its dimensions in the order that is asked for."""
        orders = Matches(transpose)
        entries: dict[str, Entry] = {}
        unheld: dict[str, list[str]] = {}
        for name in names:
            array = self.checkpoint.arrays[name]
            if isinstance(array, Unheld):
                unheld.setdefault(array.word, []).append(name)
                continue
            order = stored = _as_stored(len(array.shape))
            if orders:
                found, asked = orders.find(name)
                order = self._order(name, array.shape, asked) if found else stored
            source = array if order == stored else Permuted(array, order)
            path = _strip(name, prefix)
            if path in entries:
                self._two(path, entries[path].parts[0].stored, name)
            entries[path] = Entry(path, (Part(name, source, order),))
        self.failures += [_unheld(word, held) for word, held in unheld.items()]
        self.failures += unused("transpose", orders.unused(), self.checkpoint.where, names)
        return entries

    def _two(self, path: str, first: str, second: str) -> None:
        self.failures.append(
            CheckpointError(
                f"two arrays would stand at {path!r}: {first!r} and {second!r}",
                paths=[path],
                fix="rename them apart, or skip one.",
            )
        )

    def _order(self, name: str, shape: tuple[int, ...], asked: Any) -> tuple[int, ...]:
        """The order of the dimensions of one array."""
        rank = len(shape)
        if asked is None and rank <= 2:
            return tuple(reversed(range(rank)))
        good = isinstance(asked, (tuple, list)) and all(type(dim) is int for dim in asked)
        if good and sorted(asked) == list(range(rank)):
            return tuple(asked)
        example = repr(tuple(reversed(range(rank))))
        given = "no order" if asked is None else repr(asked)
        self.failures.append(
            CheckpointError(
                f"transpose= has {given} for an array of {rank} dimensions",
                paths=[name],
                shape=shape,
                fix=f"give the dimensions in their new order, such as {{{name!r}: {example}}}.",
            )
        )
        return _as_stored(rank)

    def stacked(
        self, entries: dict[str, Entry], pattern: Pattern, axis: Any, prefix: str
    ) -> dict[str, Entry]:
        """The entries, in which those that a number under the pattern tells apart are one."""
        match = numbered(pattern, axis)
        groups: dict[str, dict[int, Entry]] = {}
        result: dict[str, Entry] = {}
        for path, entry in entries.items():
            found = match(entry.parts[0].stored if not entry.axes else _joined(prefix, path))
            if found is None:
                result[path] = entry
                continue
            number, stacked = found
            group = groups.setdefault(_strip(stacked, prefix), {})
            if number in group:
                self._two(path, group[number].path, path)
            group[number] = entry
        if not groups:
            self.failures += unused("stack", [pattern], self.checkpoint.where, entries)
        for path, group in groups.items():
            whole = self._stack(path, group, axis)
            if path in result:
                self._two(path, result[path].parts[0].stored, whole.parts[0].stored)
            result[path] = whole
        return result

    def _stack(self, path: str, group: dict[int, Entry], axis: str) -> Entry:
        order = sorted(group)
        first = group[order[0]]
        if order != list(range(len(order))):
            missing = sorted(set(range(order[-1])) - set(order))[:5]
            self._unlike(path, f"lack {', '.join(map(str, missing))}", group[order[-1]])
        for number in order:
            other = group[number]
            if (other.shape, other.dtype, other.axes) != (first.shape, first.dtype, first.axes):
                what = f"are {_kind(first)} at {order[0]} and {_kind(other)} at {number}"
                self._unlike(path, what, other)
                return first
        parts = tuple(part for number in order for part in group[number].parts)
        return Entry(path, parts, (axis, *first.axes), (len(order), *first.counts))

    def _unlike(self, path: str, what: str, entry: Entry) -> None:
        stored = entry.parts[0].stored
        self.failures.append(
            CheckpointError(
                f"the arrays to be stacked to {path!r} {what}",
                paths=[stored],
                fix=f"keep them out of stack= by a narrower pattern, or pass skip={stored!r}.",
            )
        )

    def renamed(self, entries: dict[str, Entry], rename: Renaming | None) -> dict[str, Entry]:
        """The entries by their paths in the result."""
        if rename is None:
            return entries
        change = rename if callable(rename) else Renames(rename)
        result: dict[str, Entry] = {}
        for path, entry in entries.items():
            new = change(path)
            if not isinstance(new, str) or not new:
                self.failures.append(
                    CheckpointError(f"rename= gives {new!r}, which is no path", paths=[path])
                )
            elif new in result:
                self._two(new, result[new].parts[0].stored, entry.parts[0].stored)
            else:
                result[new] = Entry(new, entry.parts, entry.axes, entry.counts)
        if isinstance(change, Renames):
            self.failures += unused("rename", change.unused(), self.checkpoint.where, entries)
        raise_all(self.failures)
        return result


@cache
def _as_stored(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def _is_below(name: str, prefix: str) -> bool:
    rest = name[len(prefix) :]
    ends = not prefix or prefix[-1] in "./" or rest[:1] in (".", "/")
    return name.startswith(prefix) and ends and bool(rest.strip("./"))


def _joined(prefix: str, path: str) -> str:
    return prefix + path if not prefix or prefix[-1] in "./" else f"{prefix}.{path}"


def _kind(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape!r}"


def _unheld(word: str, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"JAX cannot hold arrays of the dtype {word}",
        paths=names,
        listing=[shown(name) for name in names],
        fix=f"leave them out: skip={shown(names[0])!r}.",
    )


def _deepest_first(table: Table) -> list[tuple[Pattern, Any]]:
    def depth(pair: tuple[Pattern, Any]) -> int:
        pattern = pair[0] if isinstance(pair[0], str) else pair[0].pattern
        return -len(re.split(r"[./]", pattern))

    return sorted(table or [], key=depth)
