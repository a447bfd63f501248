"""Marks of a name table: what a name alone does not say about how an array may be split.

Owns their values and their plain form, as it stands in files. What a plan makes of them stands in
``_marked.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from axisrules._errors import NameTableError
from axisrules._text import did_you_mean

ORDERS = ("concat", "interleaved", "per_head", "per_kv_group")


class Fused(NamedTuple):
    """Several matrices in one dimension.

    Attributes:
        dim: The dimension.
        order: ``"concat"`` (one part after the other), ``"interleaved"`` (element by element),
            ``"per_head"`` or ``"per_kv_group"`` (the parts of a head, then those of the next).
        parts: What the parts are called.
        blocks: How many heads or groups there are, if the table knows.
    """

    dim: int
    order: str
    parts: tuple[str, ...]
    blocks: int | None = None


class Packed(NamedTuple):
    """A dimension each element of which holds several values.

    Attributes:
        dim: The dimension.
    """

    dim: int


class Grouped(NamedTuple):
    """A dimension that consists of groups, none of which may be split.

    Attributes:
        dim: The dimension.
        like: The array beside this one whose first dimension has one element per group.
    """

    dim: int
    like: str


class Marks(NamedTuple):
    """All marks of one entry of a table.

    Example:
        >>> import axisrules as ar
        >>> fused = {"dim": 0, "order": "concat", "parts": ["q", "k", "v"]}
        >>> table = ar.NameTable({"**/qkv": {"names": "qkv embed", "fused": fused}})
        >>> table.marks[0].fused.parts
        ('q', 'k', 'v')
    """

    fused: Fused | None = None
    packed: Packed | None = None
    groups: Grouped | None = None

    def plain(self) -> dict[str, Any]:
        """The marks as they stand in a file."""
        found: dict[str, Any] = {}
        if self.fused is not None:
            fused = self.fused
            found["fused"] = {"dim": fused.dim, "order": fused.order, "parts": list(fused.parts)}
            if fused.blocks is not None:
                found["fused"]["blocks"] = fused.blocks
        if self.packed is not None:
            found["packed"] = {"dim": self.packed.dim}
        if self.groups is not None:
            found["groups"] = {"dim": self.groups.dim, "like": self.groups.like}
        return found


_KEYS = {"fused": ("dim", "order", "parts", "blocks"), "packed": ("dim",), "groups": ("dim", "like")}
_BLOCKS = "blocks"  # the one key that a mark may lack


def parse_marks(entry: Mapping[Any, Any], rank: int | None) -> Marks:
    """The marks of an entry that was given as a mapping, next to its ``names`` and ``optional``.

    Args:
        entry: The mapping.
        rank: How many dimensions the names stand for, if they say.

    Raises:
        NameTableError: A mark is malformed; the first thing that is wrong is named.
    """
    for problem in _problems(entry, rank):
        raise NameTableError(problem, fix=_FORM)
    given = {kind: entry[kind] for kind in _KEYS if kind in entry}
    made: dict[str, Any] = {}
    if "fused" in given:
        fused = given["fused"]
        made["fused"] = Fused(fused["dim"], fused["order"], tuple(fused["parts"]), fused.get(_BLOCKS))
    if "packed" in given:
        made["packed"] = Packed(given["packed"]["dim"])
    if "groups" in given:
        made["groups"] = Grouped(given["groups"]["dim"], given["groups"]["like"])
    return Marks(**made)


_FORM = (
    'write {names = "qkv embed", optional = true, '
    'fused = {dim = 0, order = "concat", parts = ["q", "k", "v"]}}, without what does not apply.'
)


def _problems(entry: Mapping[Any, Any], rank: int | None) -> Iterator[str]:
    known = ("names", "optional", *_KEYS)
    if "names" not in entry:
        yield "it has no 'names'"
    if not isinstance(entry.get("optional", False), bool):
        yield f"optional is {entry['optional']!r}, neither true nor false"
    for kind, mark in entry.items():
        if kind not in known:
            yield f"{kind!r} is no mark{did_you_mean(str(kind), known)}"
        elif kind in _KEYS:
            yield from _problems_of_mark(kind, mark, rank)


def _problems_of_mark(kind: str, mark: Any, rank: int | None) -> Iterator[str]:
    if not isinstance(mark, Mapping):
        yield f"{kind} is {mark!r}, not a table"
        return
    for key in mark:
        if key not in _KEYS[kind]:
            yield f"{kind} has a {key!r}{did_you_mean(str(key), _KEYS[kind])}"
    for key in _KEYS[kind]:
        if key not in mark and key != _BLOCKS:
            yield f"{kind} has no {key!r}"
        elif key in mark and not _CHECKS[key](mark[key]):
            yield f"the {key} of {kind} is {mark[key]!r}, not {_WANTED[key]}"
    if rank is not None and mark["dim"] >= rank:
        yield f"the dim of {kind} is {mark['dim']}, and the names have {rank} dimensions"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_parts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 1 and all(map(_is_word, value))


_CHECKS = {
    "dim": _is_count,
    "order": lambda value: value in ORDERS,
    "parts": _are_parts,
    "blocks": lambda value: _is_count(value) and value > 0,
    "like": _is_word,
}
_WANTED = {
    "dim": "the number of a dimension",
    "order": f"one of {', '.join(ORDERS)}",
    "parts": "a list of two names or more",
    "blocks": "a number of heads",
    "like": "the name of an array beside it",
}
