"""Arrays as files hold them, and the reading of slices of them.

Owns which bytes of a file make up a slice, and their way into memory that the caller brings. Knows no
mesh and no names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from axisrules._leaves import describe
from axisrules.checkpoints._handles import Files, Host

Span: TypeAlias = tuple[tuple[int, int], ...]  # (start, stop) per dimension

_SCRATCH = 2**19  # bytes read at once where they are not read into their place: stays in the cache
_LONG_RUN = 2**16  # bytes from which on a run is worth a read of its own
_SHORT_GAP = 2**14  # bytes between two runs that cost less to read than another call


class Source(Protocol):
    """An array as a file holds it."""

    @property
    def file(self) -> str:
        """The file."""

    @property
    def name(self) -> str:
        """What the file calls the array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""

    def fill(self, files: Files, span: Span, place: Host) -> None:
        """Reads a part into memory of the shape of that part, casting where the dtypes differ."""


class FlatArray(NamedTuple):
    """An array that lies in a file as it is, row-major.

    Attributes:
        file: The file.
        name: What the file calls it.
        shape: Its shape.
        dtype: Its dtype; one of four bits takes half a byte per element in the file.
        offset: Where in the file it begins, in bytes.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    def fill(self, files: Files, span: Span, place: Host) -> None:
        """Reads a part into memory of its shape."""
        if not place.size:
            return
        if self.dtype.name == "float4_e2m1fn":
            _Nibbles(self).fill(files, span, place)
            return
        _fill(_Place(files, self.file, self.dtype), self.offset, self.shape, span, place)


class _Place(NamedTuple):
    """What stays the same while one part is read."""

    files: Files
    file: str
    dtype: np.dtype[Any]

    def direct(self, place: Host) -> bool:
        """Whether the bytes can be read into their place as they are."""
        return place.dtype == self.dtype and place.flags.c_contiguous and self.dtype.kind != "b"

    def scratch(self, offset: int, count: int) -> Host:
        """So many elements from the file."""
        raw = np.empty(count * self.dtype.itemsize, np.uint8)
        self.files.read(self.file, raw, offset)
        if self.dtype.kind == "b":  # any byte but 0 is true; numpy takes bytes over as they are
            true: Host = raw != 0
            return true
        values: Host = raw.view(self.dtype)
        return values


def _fill(at: _Place, offset: int, shape: tuple[int, ...], span: Span, place: Host) -> None:
    """Reads the part ``span`` of an array of ``shape`` that begins at ``offset``."""
    whole = math.prod(shape) == place.size
    if not shape or whole:
        _fill_run(at, offset, place)
        return
    (start, stop), pitch = span[0], math.prod(shape[1:]) * at.dtype.itemsize
    offset += start * pitch
    run = place[0].size * at.dtype.itemsize if place.ndim > 1 else 0
    if place.ndim == 1 or run == pitch:  # rows that follow on each other
        _fill_run(at, offset, place)
    elif stop - start == 1 or pitch > _SCRATCH or _is_worth_reads(shape, place, run, pitch):
        for row in range(stop - start):
            _fill(at, offset + row * pitch, shape[1:], span[1:], place[row])
    else:
        _fill_cut(at, offset, shape, span, place)


def _is_worth_reads(shape: tuple[int, ...], place: Host, run: int, pitch: int) -> bool:
    """Whether every row is better read on its own than with what lies between them."""
    one_run = shape[2:] == place.shape[2:]
    return pitch - run > _SHORT_GAP or (one_run and run >= _LONG_RUN)


def _fill_run(at: _Place, offset: int, place: Host) -> None:
    """Reads what lies in the file in one piece."""
    if at.direct(place):
        at.files.read(at.file, place.reshape(-1).view(np.uint8), offset)
        return
    step = max(1, _SCRATCH // at.dtype.itemsize)
    if place.ndim == 0 or place.size <= step:
        put(place, at.scratch(offset, place.size).reshape(place.shape))
        return
    row = place[0].size
    rows = max(1, step // row)
    for first in range(0, len(place), rows):
        part = place[first : first + rows]
        if row > step:
            _fill_run(at, offset + first * row * at.dtype.itemsize, part[0])
        else:
            values = at.scratch(offset + first * row * at.dtype.itemsize, part.size)
            put(part, values.reshape(part.shape))


def _fill_cut(at: _Place, offset: int, shape: tuple[int, ...], span: Span, place: Host) -> None:
    """Reads whole rows, some at a time, and keeps the part of each."""
    pitch = math.prod(shape[1:])
    rows = max(1, _SCRATCH // (pitch * at.dtype.itemsize))
    cut = (slice(None), *(slice(start, stop) for start, stop in span[1:]))
    for first in range(0, len(place), rows):
        part = place[first : first + rows]
        values = at.scratch(offset + first * pitch * at.dtype.itemsize, len(part) * pitch)
        put(part, values.reshape(len(part), *shape[1:])[cut])


@dataclass(frozen=True, slots=True)
class _Nibbles:
    """An array of four-bit elements, two to a byte, the first in the low half."""

    array: FlatArray

    def fill(self, files: Files, span: Span, place: Host) -> None:
        shape = self.array.shape
        size = shape[-1] if shape else 1
        start, stop = span[-1] if span else (0, 1)
        for row in np.ndindex(place.shape[:-1]):
            whole = 0
            for (begin, _), at, length in zip(span[:-1], row, shape[:-1], strict=True):
                whole = whole * length + begin + at
            first, last = whole * size + start, whole * size + stop
            raw = np.empty((last + 1) // 2 - first // 2, np.uint8)
            files.read(self.array.file, raw, self.array.offset + first // 2)
            halves = np.stack([raw & 15, raw >> 4], -1).reshape(-1)[first % 2 :][: last - first]
            place[row] = halves.view(self.array.dtype).reshape(place.shape[-1:])


@dataclass(frozen=True, slots=True)
class Permuted:
    """An array whose dimensions are taken in another order.

    Attributes:
        source: The array as the file holds it.
        order: Per dimension here, the dimension there.
    """

    source: Source
    order: tuple[int, ...]
    file: str = field(init=False)
    name: str = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: np.dtype[Any] = field(init=False)

    def __post_init__(self) -> None:
        source = self.source
        shape = tuple(source.shape[dim] for dim in self.order)
        for key, value in (
            ("file", source.file),
            ("name", source.name),
            ("shape", shape),
            ("dtype", source.dtype),
        ):
            object.__setattr__(self, key, value)

    def fill(self, files: Files, span: Span, place: Host) -> None:
        """Reads a part into memory of its shape."""
        back = [self.order.index(dim) for dim in range(len(self.order))]
        self.source.fill(files, tuple(span[dim] for dim in back), place.transpose(back))


def put(place: Host, values: Host) -> None:
    """Writes values to their place, casting where the dtypes differ.

    Raises:
        LeafError: An integer does not fit the dtype there.
    """
    if place.dtype.kind in "iu" and place.dtype.itemsize < values.dtype.itemsize:
        describe(values)
    place[...] = values


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int, beyond: int = 0) -> Host:
    """Memory for an array that begins so many bytes beyond a multiple of the alignment."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + beyond + alignment, np.uint8)
    first = -raw.ctypes.data % alignment + beyond
    return raw[first : first + count].view(dtype).reshape(shape)
