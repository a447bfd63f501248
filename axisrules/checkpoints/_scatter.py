"""Several slices of one array that lie side by side in its file, read in one pass.

Where a mesh splits the columns of a matrix, every row of the file goes in turn to several shards.
Owns that case: the rows are read once, straight to where each piece of them goes. Everything else is
read slice by slice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from axisrules.checkpoints._handles import Files, Host
from axisrules.checkpoints._sources import FlatArray, Span

Slices: TypeAlias = Sequence[tuple[Span, Host]]
Job: TypeAlias = Callable[[], None]

_MOST_PIECES = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)  # of one read
_SHORT_RUN = 2**11  # bytes; shorter ones cost more as pieces of a read than as a copy


class _Rows(NamedTuple):
    """Rows of bytes that follow on each other in a file, each in pieces."""

    file: str
    offset: int
    pieces: list[Host]  # per piece of a row: its bytes for all rows, two-dimensional

    def read(self, files: Files, first: int, last: int) -> None:
        """Reads some of the rows."""
        pitch = sum(piece.shape[1] for piece in self.pieces)
        step = max(1, _MOST_PIECES // len(self.pieces))
        for row in range(first, last, step):
            end = min(row + step, last)
            columns = [list(piece[row:end]) for piece in self.pieces]
            rows = [piece for pieces in zip(*columns, strict=True) for piece in pieces]
            files.scatter(self.file, rows, self.offset + row * pitch)


def side_by_side(array: FlatArray, slices: Slices, files: Files, threads: int) -> list[Job] | None:
    """The jobs that read slices which make up whole rows, or ``None`` where they do not."""
    rows = _rows(array, slices)
    if rows is None:
        return None
    return [job for one in rows for job in _jobs(one, files, threads)]


def _jobs(rows: _Rows, files: Files, threads: int) -> Iterator[Job]:
    count = len(rows.pieces[0])
    for first, last in pairwise([count * number // threads for number in range(threads + 1)]):
        yield lambda first=first, last=last: rows.read(files, first, last)  # type: ignore[misc]


def _rows(array: FlatArray, slices: Slices) -> list[_Rows] | None:
    shape, size = array.shape, array.dtype.itemsize
    if array.dtype.kind == "b" or array.dtype.name == "float4_e2m1fn" or len(slices) < 2:
        return None
    if any(place.dtype != array.dtype or not place.size for _, place in slices):
        return None
    cut = [d for d, whole in enumerate(shape) if any(span[d] != (0, whole) for span, _ in slices)]
    if len(cut) not in (1, 2) or cut[-1] == 0 or (len(cut) == 2 and cut[0] != 0):
        return None
    dim, unit = cut[-1], math.prod(shape[cut[-1] + 1 :]) * size
    groups: dict[Span, list[tuple[Span, Host]]] = {}
    for span, place in slices:
        groups.setdefault(span[:dim], []).append((span, place))
    found = []
    for outer, members in groups.items():
        members.sort(key=lambda one: one[0][dim])
        ends = [0, *(span[dim][1] for span, _ in members)]
        starts = [*(span[dim][0] for span, _ in members), shape[dim]]
        runs = [(span[dim][1] - span[dim][0]) * unit for span, _ in members]
        if starts != ends or min(runs) < _SHORT_RUN or not all(p.flags.c_contiguous for _, p in members):
            return None
        above = outer[0][0] * math.prod(shape[1:]) * size if outer else 0
        pieces = [
            place.reshape(-1).view(np.uint8).reshape(-1, run)
            for (_, place), run in zip(members, runs, strict=True)
        ]
        found.append(_Rows(array.file, array.offset + above, pieces))
    return found
