"""What names tell of a tree: which of its arrays are of layers, and which names are of what kind.

Owns the kinds of arrays that prices are counted by, and the facts that hold whatever the names are
called. Knows no rules and no mesh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from axisrules._plan import Placement
from axisrules.cost._rows import is_inexact


class Kind(NamedTuple):
    """Equal arrays: the first, how many, and whether a layer holds one each."""

    one: Placement
    copies: int
    repeated: bool


def kinds(placements: Iterable[Placement]) -> list[Kind]:
    """Placements by kind: alike but for numbers in their paths; only of what has gradients."""
    alike: dict[tuple[int, object, str], list[Placement]] = {}
    for one in placements:
        if is_inexact(one.dtype):
            key = (id(one.resolution), one.dtype, re.sub(r"\d+", "#", one.path))
            alike.setdefault(key, []).append(one)
    single = [Kind(some[0], len(some), len(some) > 1) for some in alike.values()]
    stacks = facts(single).stacks
    return [one._replace(repeated=one.repeated or not stacks.isdisjoint(one.one.names)) for one in single]


class Facts(NamedTuple):
    """What names alone tell of a tree.

    Attributes:
        stacks: The names of axes of stacked layers.
        experts: The names of axes along which kernels stand side by side in one layer.
        rows: The names of the rows of tables, which are looked up and never contracted.
        last: The names that stand last in an array.
    """

    stacks: frozenset[str]
    experts: frozenset[str]
    rows: frozenset[str]
    last: frozenset[str | None]


def facts(found: Sequence[Kind]) -> Facts:
    """What the names of a tree tell.

    A table stands outside the layers and is taller than wide; the name of its rows is borne by
    nothing inside the layers.
    """
    stacks, experts = batched_names(found)
    inside = {name for kind in found if kind.repeated for name in kind.one.names}
    rows = {
        kind.one.names[0]
        for kind in found
        if not kind.repeated and len(kind.one.shape) == 2 and kind.one.shape[0] > kind.one.shape[1]
    }
    last = frozenset(kind.one.names[-1] for kind in found if len(kind.one.names) > 1)
    looked_up = frozenset(name for name in rows - inside if name is not None)
    return Facts(stacks, experts, looked_up, last)


def batched_names(found: Sequence[Kind]) -> tuple[frozenset[str], frozenset[str]]:
    """The names of axes along which kernels stand side by side: of stacked layers, and of experts.

    What stands only in layers that have numbers is no stack of them, nor is what stands in a part of
    the arrays of a stack alone.
    """
    first = _side_by_side(found, frozenset())
    paths = {name: {kind.one.path for kind in own} for name, own in first.items()}
    stacks = frozenset(
        name
        for name, own in first.items()
        if any(kind.copies == 1 for kind in own) and not any(paths[name] < more for more in paths.values())
    )
    experts = (first.keys() | _side_by_side(found, stacks).keys()) - stacks
    return stacks, frozenset(experts)


def _side_by_side(found: Sequence[Kind], apart: frozenset[str]) -> dict[str, list[Kind]]:
    """Names that stand at one place in several kinds of arrays, always with one size, with these kinds.

    Beside such a name stand the names of what a layer holds, two kernels that reverse among them;
    names that are known for stacks are left out.
    """
    at: dict[str, set[tuple[int, int]]] = {}
    bearers: dict[str, list[Kind]] = {}
    for kind in found:
        for place, (name, size) in enumerate(zip(kind.one.names, kind.one.shape, strict=True)):
            if name is not None and name not in apart:
                at.setdefault(name, set()).add((place, size))
                bearers.setdefault(name, []).append(kind)
    return {
        name: some
        for name, some in bearers.items()
        if len(at[name]) == 1 and _is_beside_layers(some, apart | {name})
    }


def _is_beside_layers(bearers: Sequence[Kind], apart: frozenset[str]) -> bool:
    partners = {tuple(name for name in kind.one.names if name not in apart) for kind in bearers}
    pairs = {(rest[0], rest[-1]) for rest in partners if len(rest) > 1}
    reverse = any((last, first) in pairs for first, last in pairs if first != last)
    return len(partners) > 1 and all(partners) and reverse
