"""Which mesh axes a collective runs over.

Owns the ways in which a module writes groups of devices. The numbers in them are positions in
``mesh.devices.flat``, never device ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from axisrules._meshes import Sizes


class Groups(NamedTuple):
    """Who talks to whom.

    Attributes:
        axes: The mesh axes along which the devices of a group differ, in the order of the mesh.
        size: Devices in a group, the largest where they differ.
        share: The part of all devices that send, of a permute; else 1.
    """

    axes: tuple[str, ...]
    size: int
    share: float = 1.0


def of_groups(text: str, sizes: Sizes) -> Groups | None:
    """The axes of replica groups in any of their spellings, or ``None`` where that is unknown."""
    devices = math.prod(size for _, size in sizes)
    groups = _groups(text.strip(), devices)
    if groups is None or any(not 0 <= one < devices for group in groups for one in group):
        return None
    groups = [group for group in groups if group]
    return Groups(_axes(groups, sizes), max(map(len, groups), default=1))


def of_pairs(text: str, sizes: Sizes) -> Groups | None:
    """The axes that a permute crosses, and the share of the devices that send anything away.

    ``None`` where a pair is no pair of these devices.
    """
    devices = math.prod(size for _, size in sizes)
    pairs = [_numbers(pair) for pair in re.findall(r"\{([^{}]*\d[^{}]*)\}", text)]
    if sum(map(len, pairs)) != len(_numbers(text)) or any(len(pair) != 2 for pair in pairs):
        return None
    if any(one >= devices for pair in pairs for one in pair):
        return None
    moved = [pair for pair in pairs if pair[0] != pair[1]]
    return Groups(_axes(moved, sizes), 2, len(moved) / devices)


def _axes(groups: Sequence[Sequence[int]], sizes: Sizes) -> tuple[str, ...]:
    lengths = tuple(size for _, size in sizes)
    varying = np.zeros(len(sizes), bool)
    for group in groups:
        where = np.array(np.unravel_index(np.asarray(group), lengths))
        varying |= (where != where[:, :1]).any(axis=1)
    return tuple(axis for (axis, _), differs in zip(sizes, varying, strict=True) if differs)


def _groups(text: str, devices: int) -> list[list[int]] | None:
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        return _iota_groups(text)
    if not text.startswith("{"):
        return None
    found = re.findall(r"\{([\d,\s]*)\}", text)
    if not re.search(r"\d", text):
        return [list(range(devices))]  # an empty list means all devices
    return [[int(one) for one in group.split(",") if one.strip()] for group in found]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _iota_groups(text: str) -> list[list[int]] | None:
    """``[4,4]<=[4,4]T(1,0)``: a range, reshaped, transposed, and read off in rows."""
    found = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        return None
    shape, source = _numbers(found.group(1)), _numbers(found.group(2))
    if math.prod(shape) != math.prod(source):
        return None
    return _iota(source, found.group(3)).reshape(-1, shape[-1]).tolist()


def _iota(source: tuple[int, ...], order: str | None) -> np.ndarray:
    numbers = np.arange(math.prod(source)).reshape(source)
    return numbers if order is None else numbers.transpose(_numbers(order))


_AXIS = re.compile(r"""['"]([^'"]+)['"](?::\((\d+)\)(\d+))?""")


def _mesh_groups(text: str) -> list[list[int]] | None:
    """``mesh['a'=4,'b'=4] {'a'}``: all devices that differ in ``a`` alone form a group."""
    head, brace, tail = text.partition("{")
    tail = tail.partition("}")[0]
    if not brace:
        return None
    sizes = {axis: int(size) for axis, size in re.findall(r"""['"]([^'"]+)['"]=(\d+)""", head)}
    if not sizes:
        return None
    ids = _device_ids(head, tuple(sizes.values()))
    if ids is None:
        return None
    pieces: list[tuple[int, bool]] = []  # the mesh with split axes in parts: (size, in the group?)
    wanted = {
        axis: (int(before or 1), int(size or sizes.get(axis, 1)))
        for axis, before, size in _AXIS.findall(tail)
    }
    if not wanted.keys() <= sizes.keys():
        return None
    for axis, size in sizes.items():
        before, length = wanted.get(axis, (1, 1))
        after, left = divmod(size, before * length)
        if left:
            return None
        pieces += [(before, False), (length, True), (after, False)]
    inside = [at for at, (_, member) in enumerate(pieces) if member]
    outside = [at for at, (_, member) in enumerate(pieces) if not member]
    split = ids.reshape([size for size, _ in pieces]).transpose(outside + inside)
    return split.reshape(-1, math.prod(pieces[at][0] for at in inside)).tolist()


def _device_ids(head: str, sizes: tuple[int, ...]) -> np.ndarray | None:
    """The devices of a written mesh: in order, unless it says otherwise."""
    count = math.prod(sizes)
    _, given, rest = head.partition("device_ids=")
    if not given:
        return np.arange(count).reshape(sizes)
    iota = re.match(r"\(?(?:\[[\d,]+\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?\)?", rest)
    source = _numbers(iota.group(1)) if iota else ()
    if iota and math.prod(source) == count and (iota.group(2) or len(source) < count or count == 1):
        return _iota(source, iota.group(2)).reshape(sizes)
    listed = _numbers(rest.partition(")")[0])
    return np.asarray(listed).reshape(sizes) if len(listed) == count else None
