"""Which names belong to which leaf.

Owns the four forms that the names of a tree may have, and coverage in both directions. Knows
nothing of rules or meshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axisrules._errors import AxisRulesError, ExtraNamesError
from axisrules._marks import Marks
from axisrules._tables import NameTable
from axisrules._text import nearest
from axisrules._trees import NO_ENTRY, Flat, children, nested


@dataclass(slots=True)
class Entries:
    """The entry of every leaf, and what was noticed on the way.

    Attributes:
        entries: Per leaf: names, a ``PartitionSpec``, ``None`` (whole on purpose), or ``NO_ENTRY``.
        overlaps: (path, first pattern, later pattern) where several patterns match.
        unused: Patterns that match no leaf.
        problems: Names without a leaf, or names for a node.
        marks: The marks that a table gives, by path.
    """

    entries: list[Any]
    overlaps: list[tuple[str, str, str]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    problems: list[AxisRulesError] = field(default_factory=list)
    marks: dict[str, Marks] = field(default_factory=dict)


def find_entries(tree: Any, flat: Flat, names: Any) -> Entries:
    """The entries for a tree from any form of names."""
    if names is None:
        return Entries(flat.names)
    if isinstance(names, NameTable):
        return _from_table(flat.paths, names)
    if callable(names) and children(names) is None:
        pairs = zip(flat.paths, flat.leaves, strict=True)
        return Entries([names(path, leaf) if hasattr(leaf, "shape") else NO_ENTRY for path, leaf in pairs])
    return _from_tree(tree, flat, names)


def _from_table(paths: Sequence[str], table: NameTable) -> Entries:
    rules, marks = list(table), table.marks
    found = Entries([])
    matched: set[int] = set()
    for path in paths:
        hits = table.matches(path)
        found.entries.append(rules[hits[0]][1] if hits else NO_ENTRY)
        matched.update(hits)
        if marks and hits and hits[0] in marks:
            found.marks[path] = marks[hits[0]]
        found.overlaps += [(path, _text(rules[hits[0]][0]), _text(rules[hit][0])) for hit in hits[1:]]
    found.unused = [
        _text(pattern)
        for number, (pattern, _) in enumerate(rules)
        if number not in matched and pattern not in table.optional
    ]
    return found


def _text(pattern: Any) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _from_tree(tree: Any, flat: Flat, names: Any) -> Entries:
    """The names that stand where the leaves stand; the structure of the parameters drives."""
    if flat.treedef is not None:
        try:
            return Entries(flat.treedef.flatten_up_to(names))
        except (ValueError, TypeError):
            pass  # the structures differ: the walk below says where
    found = Entries([NO_ENTRY] * len(flat.leaves))
    extra: list[str] = []
    shallow: list[str] = []
    _walk(nested(flat), names, (), found.entries, extra, shallow, empty_places(tree))
    if shallow:
        found.problems.append(
            ExtraNamesError(
                "names stand where the tree has a node, not a leaf",
                paths=shallow,
                fix="write the names of every leaf below it; a prefix does not stand for them.",
            )
        )
    if extra:
        close = nearest(extra[0], [path for path in flat.paths if path not in extra])
        found.problems.append(
            ExtraNamesError(
                f"names are given for {len(extra)} "
                + ("path" if len(extra) == 1 else "paths")
                + " without a leaf",
                paths=extra,
                listing=extra,
                nearest=close,
                fix=f"remove them, or correct the path{f': did you mean {close!r}?' if close else '.'}",
            )
        )
    return found


def _walk(
    node: Any,
    names: Any,
    key: tuple[str, ...],
    entries: list[Any],
    extra: list[str],
    shallow: list[str],
    empty: Mapping[tuple[str, ...], Any],
) -> None:
    if not isinstance(node, dict):
        entries[node] = names
        return
    given = children(names)
    if given is None:
        shallow.append("/".join(key))
        return
    below = dict(given)
    for segment, child in node.items():
        if segment in below:
            _walk(child, below.pop(segment), (*key, segment), entries, extra, shallow, empty)
    for segment, rest in below.items():
        for place, value in _leaves_of_names(rest, (*key, segment)):
            if not _stands_for_nothing(place, value, empty):
                extra.append("/".join(place))


def _stands_for_nothing(place: tuple[str, ...], value: Any, empty: Mapping[tuple[str, ...], Any]) -> bool:
    """Whether the tree has ``None`` here or above, or an empty container where the names have one."""
    prefixes = (place[:n] for n in range(1, len(place) + 1))
    if any(prefix in empty and empty[prefix] is None for prefix in prefixes):
        return True
    return place in empty and children(value) == []


def _leaves_of_names(names: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a stray part of the names with their paths; names in a tuple count as one leaf."""
    given = None if names is None or _reads_as_names(names) else children(names)
    if given is None:
        yield key, names
    for segment, child in given or ():
        yield from _leaves_of_names(child, (*key, segment))


def _reads_as_names(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(v is None or isinstance(v, str) for v in value)


def empty_places(tree: Any) -> dict[tuple[str, ...], Any]:
    """Where the tree has ``None`` or an empty container.

    Names in place of ``None`` are for an array that this tree does without; in place of an empty
    container there may be another one.
    """
    return dict(_empty_nodes(tree, ()))


def _empty_nodes(node: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = None if node is None else children(node)
    if node is None or below == []:
        yield key, node
    for segment, child in below or ():
        yield from _empty_nodes(child, (*key, segment))
