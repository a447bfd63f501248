"""How far one table covers a tree.

Owns the measure. An array is covered where the first pattern that matches its path has names for as many
dimensions as it has. The width of a model is one number (or as many as the table says), the norms have it
too, and a bias is as long as the dimension of its weight that it follows: arrays that contradict this, such
as transposed ones, are not covered either, and a table that many arrays contradict is no answer, however
many paths it matches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axisrules._errors import RankError
from axisrules._names import Names, fit_names
from axisrules._tables import split_path
from axisrules._trees import flatten
from axisrules.catalog._tables import Known

COVERED = 0.75  # of all arrays: below this, a table is no answer
CONTRADICTED = 0.05  # of the arrays that match a pattern: above this, neither

_WIDTH = {"embed", "embed_out"}  # nearly every matrix of a model has it on one side
_NUMBER = re.compile(r"(?<![^/.])[0-9]+(?![^/.])")


@dataclass(frozen=True)
class Kind:
    """Arrays of one shape whose paths differ in whole segments that are numbers alone."""

    path: str
    shape: tuple[int, ...]
    parent: str
    paths: list[str]


def kinds_of(tree: Any) -> list[Kind]:
    """The kinds of arrays in a tree: there are far fewer of them than arrays."""
    found: dict[Any, Kind] = {}
    flat = flatten(tree)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, tuple) and hasattr(leaf, "dtype"):
            alike = _NUMBER.sub("0", path)
            if (alike, shape) not in found:
                found[alike, shape] = Kind(path, shape, "/".join(split_path(alike)[:-1]), [])
            found[alike, shape].paths.append(path)
    return list(found.values())


class Measured:
    """How one table covers a tree."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.used: set[int] = set()
        self.covered = 0
        self.unmatched: list[str] = []
        self.contradicted: list[str] = []
        self.vocabularies: set[int] = set()

    @property
    def coverage(self) -> float:
        """The fraction of the arrays that are covered; of no arrays, none is."""
        total = self.covered + len(self.unmatched) + len(self.contradicted)
        return self.covered / total if total else 0.0

    @property
    def answers(self) -> bool:
        """Whether the table is an answer at all."""
        matched = self.covered + len(self.contradicted)
        return self.coverage >= COVERED and len(self.contradicted) <= CONTRADICTED * matched

    @property
    def merit(self) -> tuple[float, int, int]:
        """What tables are compared by, the greater the better: how well the paths fit, both ways.

        Only among equals do contradictions count: a table whose paths fit and whose shapes do not is
        no reason to take one that fits less.
        """
        matched = self.covered + len(self.contradicted)
        total = matched + len(self.unmatched)
        needed = self.known.required
        used = len(needed & self.used)
        share = used / len(needed) if needed else 1.0
        return (matched / total if total else 0.0) * share, used, -len(self.contradicted)


def measure(known: Known, kinds: Sequence[Kind]) -> Measured:
    """How one table covers a tree of these kinds."""
    found = Measured(known)
    if known.needs is not None and not any(known.needs.matches(kind.path) for kind in kinds):
        found.unmatched = [path for kind in kinds for path in kind.paths]
        return found
    entries = list(known.table)
    named: list[tuple[Kind, int, Names]] = []
    for kind in kinds:
        hits = known.table.matches(kind.path)
        if hits:
            found.used.add(hits[0])
            try:
                named.append((kind, hits[0], _names(entries[hits[0]][1], kind.shape)))
            except RankError:
                found.contradicted += kind.paths
        elif kind.shape:  # a scalar needs no names
            found.unmatched += kind.paths
    _count(found, named)
    return found


def _names(names: Names | None, shape: Sequence[int]) -> Names:
    return (None,) * len(shape) if names is None else fit_names(names, shape)


def _count(found: Measured, named: list[tuple[Kind, int, Names]]) -> None:
    """Counts the arrays that are covered: those whose sizes agree with the others."""
    sizes = [_sizes(found.known, *one) for one in named]
    usual = _usual_widths(found.known, named, sizes)
    vectors: dict[tuple[str, str], set[int]] = {}
    for (kind, _, names), mine in zip(named, sizes, strict=True):
        if len(names) == 1:
            for word, size in mine:
                vectors.setdefault((kind.parent, word), set()).add(size)
    for (kind, _, _), mine in zip(named, sizes, strict=True):
        widths = {size for word, size in mine if word in _WIDTH}
        beside = all(size in vectors.get((kind.parent, word), {size}) for word, size in mine)
        if not beside or not widths.issubset(usual):
            found.contradicted += kind.paths
            continue
        found.covered += len(kind.paths)
        found.vocabularies |= {size for word, size in mine if word == "vocab"}


def _sizes(known: Known, kind: Kind, number: int, names: Names) -> list[tuple[str, int]]:
    """The words of an array with their sizes, but for a dimension that is packed."""
    mark = known.marks.get(number)
    packed = mark.packed.dim if mark is not None and mark.packed is not None else None
    pairs = enumerate(zip(names, kind.shape, strict=True))
    return [(name, size) for dim, (name, size) in pairs if name is not None and dim != packed]


def _usual_widths(
    known: Known, named: list[tuple[Kind, int, Names]], sizes: list[list[tuple[str, int]]]
) -> list[int]:
    """The widths of the model, the most frequent ones; none where no norm has the first of them."""
    votes: Counter[int] = Counter()
    for (kind, _, _), mine in zip(named, sizes, strict=True):
        for width in {size for word, size in mine if word in _WIDTH}:
            votes[width] += len(kind.paths)
    usual = [width for width, _ in votes.most_common(known.sizes.get("embed", 1))]
    norms = {kind.shape[0] for kind, _, names in named if names == ("norm",)}
    return usual if not norms or norms.issuperset(usual[:1]) else []
