"""Tile arithmetic: how a layout cuts an array over a mesh, and what moving to another one costs.

Owns the numbers alone: which tile the device at a position of a mesh holds, and how many elements it
lacks of another one. Knows no plan, no spec and no device; everything is exact integer arithmetic.

A layout is a tuple of mesh axes per dimension, major to minor. A mesh is its axis sizes in order; the
devices stand in it row by row, the last axis fastest, and a device is its position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Layout: TypeAlias = tuple[tuple[str, ...], ...]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def splitting(layout: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Layout:
    """The layout without the axes of size 1, which split nothing."""
    return tuple(tuple(axis for axis in axes if sizes[axis] != 1) for axes in layout)


def coordinates(sizes: Mapping[str, int], positions: Numbers) -> dict[str, Numbers]:
    """The coordinate along every axis of the devices at the given positions."""
    found: dict[str, Numbers] = {}
    rest = positions
    for axis, size in reversed(list(sizes.items())):
        rest, found[axis] = np.divmod(rest, size)
    return found


def parts(
    axes: Sequence[str], sizes: Mapping[str, int], coords: Mapping[str, Numbers], devices: int
) -> Numbers:
    """Which part of one dimension every device holds."""
    part = np.zeros(devices, np.int64)
    for axis in axes:
        part = part * sizes[axis] + coords[axis]
    return part


def holders(counts: Sequence[int], index: Sequence[Numbers], devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices that hold each tile, for all tiles row by row.

    Args:
        counts: The number of parts of every dimension.
        index: Per dimension, the part that every device holds.
        devices: The number of devices.
    """
    tile = np.zeros(devices, np.int64)
    for count, part in zip(counts, index, strict=True):
        tile = tile * count + part
    order = np.argsort(tile, kind="stable")
    ends = np.cumsum(np.bincount(tile, minlength=math.prod(counts)))
    return tuple(tuple(some.tolist()) for some in np.split(order, ends[:-1]))


class Moved(NamedTuple):
    """What devices lack when an array goes from one layout to another, in elements.

    Attributes:
        received: Per device of the new mesh, the elements of its new tile that it does not hold yet.
        over: Per axis of the old mesh, how many of them have to cross it, of all devices together.
        to_new: How many of them go to devices that were not in the old mesh, and so cross none.
    """

    received: Numbers
    over: dict[str, int]
    to_new: int


def move(
    shape: Sequence[int],
    old: tuple[Layout, Mapping[str, int]],
    new: tuple[Layout, Mapping[str, int]],
    homes: Numbers,
) -> Moved:
    """What moving one array between two layouts costs.

    Every element stands, under the old layout, on the devices whose coordinates along the old
    layout's axes are those of its tile. A device that lacks it gets it from the nearest of them,
    which differs in as few axes as can be: the element crosses exactly those axes of the old layout
    along which the device's own coordinate is another one, once each.

    Args:
        shape: The global shape.
        old: The layout where the array lies, and the sizes of its mesh.
        new: The layout where it goes, and the sizes of its mesh.
        homes: Per device of the new mesh, its position in the old mesh, or -1 where it has none.
    """
    devices = len(homes)
    (held, old_sizes), (wanted, new_sizes) = (splitting(*old), old[1]), (splitting(*new), new[1])
    at_home = homes >= 0
    before = coordinates(old_sizes, np.where(at_home, homes, 0))
    after = coordinates(new_sizes, np.arange(devices, dtype=np.int64))
    whole = np.full(devices, math.prod(shape), np.int64)
    for axes in wanted:
        whole //= math.prod(new_sizes[axis] for axis in axes)
    per_axis = {axis: whole.copy() for axes in held for axis in axes}
    both = np.ones(devices, np.int64)  # elements that the device holds and wants
    for size, have, want in zip(shape, held, wanted, strict=True):
        length = size // math.prod(new_sizes[axis] for axis in want)
        start = parts(want, new_sizes, after, devices) * length
        ends = (start, start + length)
        both *= _overlap(ends, size, have, old_sizes, before, set(have))
        for axis in have if length else ():
            per_axis[axis] = whole // length * _overlap(ends, size, have, old_sizes, before, {axis})
    received = whole - np.where(at_home, both, 0)
    over = {axis: int(np.sum((whole - near)[at_home])) for axis, near in per_axis.items()}
    return Moved(received, over, int(np.sum(whole[~at_home])))


def _overlap(
    ends: tuple[Numbers, Numbers],
    size: int,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    coords: Mapping[str, Numbers],
    fixed: set[str],
) -> Numbers:
    """How many of each device's elements lie in tiles with the device's own coordinates along ``fixed``."""
    first, last = (_below(end, size, axes, sizes, coords, fixed) for end in ends)
    return last - first


def _below(
    limit: Numbers,
    size: int,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    coords: Mapping[str, Numbers],
    fixed: set[str],
) -> Numbers:
    """The same of the elements before a limit: the digits of its position, the major one first."""
    total = np.zeros_like(limit)
    alive = np.ones(limit.shape, bool)  # the digits before are those of the device
    rest, block = limit, size
    for number, axis in enumerate(axes):
        block //= sizes[axis]
        if not block:
            return total
        matching = block // math.prod(sizes[below] for below in axes[number + 1 :] if below in fixed)
        digit, rest = np.divmod(rest, block)
        if axis in fixed:
            total += np.where(alive & (coords[axis] < digit), matching, 0)
            alive &= coords[axis] == digit
        else:
            total += np.where(alive, digit * matching, 0)
    return total + np.where(alive, rest, 0)
