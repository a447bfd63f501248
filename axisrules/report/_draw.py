"""``draw``: which device holds which tile of one array, for any rank and any number of devices.

Owns the tiles and their text; the picture stands in ``_svg.py``. Needs neither an array nor devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from axisrules._columns import columns
from axisrules._errors import SpecError
from axisrules._plan import Placement
from axisrules._specs import axes_of
from axisrules._text import format_mesh, format_spec
from axisrules._tiles import coordinates, holders, parts
from axisrules.report._svg import svg

Bounds = tuple[tuple[int, int], ...]  # the first and the last-plus-one position of every part of a dimension

ROWS, COLUMNS = 16, 8  # of tiles that the text shows; more are left out in the middle


@dataclass(frozen=True, slots=True)
class Tile:
    """One part of an array, and who holds it.

    Attributes:
        index: Per dimension, the positions from the first to before the second.
        devices: The numbers of the devices that hold it.
    """

    index: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """Which device holds which tile; ``str()`` is text, ``svg()`` a picture.

    Attributes:
        shape: The global shape.
        names: The axis names, where they are known.
        spec: The spec as text, where there is one.
        mesh: The sizes of the mesh, where there is one.
        bounds: Per dimension, where its parts begin and end.
        holders: The devices of every tile, for all tiles row by row.
        numbered: What the number of a device is: ``"id"``, or ``"position"`` in the mesh, whose last
            axis is the fastest.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    spec: str
    mesh: Mapping[str, int]
    bounds: tuple[Bounds, ...]
    holders: tuple[tuple[int, ...], ...]
    numbered: str

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of parts of every dimension."""
        return tuple(map(len, self.bounds))

    @property
    def tiles(self) -> Iterator[Tile]:
        """The tiles with their devices, row by row."""
        indexes = itertools.product(*self.bounds)
        return (Tile(index, devices) for index, devices in zip(indexes, self.holders, strict=True))

    def tile(self, at: Sequence[int]) -> Tile:
        """The tile at a position along every dimension."""
        number = 0
        for count, position in zip(self.counts, at, strict=True):
            number = number * count + position
        index = tuple(bounds[position] for bounds, position in zip(self.bounds, at, strict=True))
        return Tile(index, self.holders[number])

    @property
    def title(self) -> str:
        """What is drawn, in one line."""
        tiles = len(self.holders)
        copies = len(self.holders[0]) if self.holders else 0
        layout = f" {self.spec}" if self.spec else ""
        where = f" on {format_mesh(self.mesh)}" if self.mesh else ""
        each = f", each on {copies:,} devices" if copies > 1 else ""
        return f"{self.shape}{layout}{where}: {tiles:,} {'tile' if tiles == 1 else 'tiles'}{each}"

    @property
    def across(self) -> int | None:
        """The dimension that is drawn from left to right: the last one that is split."""
        split = [dim for dim, count in enumerate(self.counts) if count > 1]
        return split[-1] if split else len(self.shape) - 1 if self.shape else None

    def __str__(self) -> str:
        grid = Grid(self, ROWS, COLUMNS)
        lines = [self.title, f"cells: the {self.numbered}s of the devices; {grid.sides}"]
        return "\n".join([*lines, columns(["", *grid.header], grid.rows)])

    __repr__ = __str__

    def svg(self) -> str:
        """The picture as one SVG element, readable on a light and on a dark page."""
        return svg(self.title, Grid(self, 16, 16))

    def _repr_svg_(self) -> str:
        return self.svg()


class Grid:
    """A drawing in rows and columns of text, with what is too much left out in the middle.

    Attributes:
        header: A text per column.
        rows: A text for the side, and one per column.
        hues: Per row and column a number from 0 to 1 that tells tiles apart; ``None`` for a gap.
        sides: What the two sides are.
    """

    def __init__(self, drawing: Drawing, most_rows: int, most_columns: int) -> None:
        across = drawing.across
        others = [dim for dim in range(len(drawing.shape)) if dim != across]
        self._drawing, self._across, self._others = drawing, across, others
        down = math.prod(drawing.counts[dim] for dim in others)
        rows = _some(down, most_rows)
        cols = _some(1 if across is None else drawing.counts[across], most_columns)
        self.header = [self._top(position) for position in cols]
        self.rows: list[list[str]] = []
        self.hues: list[list[float | None]] = []
        for row in rows:
            at = None if row is None else self._positions(row)
            cells = [None if at is None or col is None else self._number(at, col) for col in cols]
            texts = ["..." if cell is None else devices_text(drawing.holders[cell]) for cell in cells]
            self.rows.append([self._side(at), *texts])
            total = max(len(drawing.holders), 1)
            self.hues.append([None if cell is None else cell / total for cell in cells])

    def _positions(self, row: int) -> dict[int, int]:
        found = {}
        for dim in reversed(self._others):
            row, found[dim] = divmod(row, self._drawing.counts[dim])
        return found

    def _number(self, at: Mapping[int, int], col: int) -> int:
        number = 0
        for dim, count in enumerate(self._drawing.counts):
            number = number * count + (col if dim == self._across else at[dim])
        return number

    def _top(self, position: int | None) -> str:
        if position is None:
            return "..."
        return "all" if self._across is None else _slice(self._drawing.bounds[self._across], position)

    def _side(self, at: Mapping[int, int] | None) -> str:
        if at is None:
            return "..."
        return ", ".join(_slice(self._drawing.bounds[dim], at[dim]) for dim in self._others)

    @property
    def sides(self) -> str:
        """Which dimensions go down and across."""
        texts = [f"down: {self._label(self._others)}"] if self._others else []
        if self._across is not None:
            texts.append(f"across: {self._label([self._across])}")
        return ", ".join(texts) or "a scalar"

    def _label(self, dims: Sequence[int]) -> str:
        names = self._drawing.names or (None,) * len(self._drawing.shape)
        word = "dimension" if len(dims) == 1 else "dimensions"
        return f"{word} " + ", ".join(f"{dim} {names[dim]!r}" if names[dim] else str(dim) for dim in dims)


def _some(count: int, most: int) -> list[int | None]:
    """All positions, or the first and the last with a gap between."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _slice(bounds: Bounds, position: int) -> str:
    start, stop = bounds[position]
    return ":" if len(bounds) == 1 else f"{start}:{stop}"


def devices_text(devices: Sequence[int]) -> str:
    """Numbers of devices, short: ``0-3``, ``0-12 by 4``, ``0, 3, 5``."""
    if len(devices) < 3:
        return ", ".join(map(str, devices)) or "none"
    steps = {after - before for before, after in itertools.pairwise(devices)}
    if len(steps) == 1:
        step = steps.pop()
        return f"{devices[0]}-{devices[-1]}" + (f" by {step}" if step != 1 else "")
    few = ", ".join(map(str, devices[:3]))
    return few if len(devices) == 3 else f"{few}, ... {devices[-1]} ({len(devices):,} devices)"


def draw(array_or_placement: Any) -> Drawing:
    """Who holds which tile of an array, for any rank and any number of devices.

    Args:
        array_or_placement: A ``Placement`` (``plan.placement(path)``), an array of JAX, or a
            ``ShapeDtypeStruct`` with a sharding. None of them needs devices but an array.

    Returns:
        A ``Drawing``: ``.tiles``, ``str()`` as text, ``.svg()`` as a picture.

    Raises:
        SpecError: It is none of them, has no sharding, or its sharding does not fit its shape.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> plan = ar.plan({"up": np.zeros((8, 32), np.float32)}, {"up": "embed mlp"},
        ...                mesh="replica=2,data=2,model=2", rules={"embed": "data", "mlp": "model"})
        >>> print(ar.report.draw(plan.placement("up")))
        (8, 32) P('data', 'model') on replica=2, data=2, model=2: 4 tiles, each on 2 devices
        cells: the positions of the devices; down: dimension 0 'embed', across: dimension 1 'mlp'
             0:16  16:32
        0:4  0, 4  1, 5
        4:8  2, 6  3, 7
    """
    given = array_or_placement
    if isinstance(given, Placement):
        axes = [dim.axes for dim in given.resolution.dims]
        return _on_mesh(given.shape, axes, given.sizes, given.names, format_spec(given.spec), None)
    shape, sharding = getattr(given, "shape", None), getattr(given, "sharding", None)
    if shape is None or sharding is None:
        raise SpecError(
            f"a {type(given).__name__} has no layout to draw",
            fix="give a Placement, such as plan.placement(path), or an array with a sharding.",
        )
    shape = tuple(shape)
    if not isinstance(sharding, NamedSharding):
        return _by_devices(shape, sharding)
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as cause:
        raise SpecError(
            f"{format_spec(sharding.spec)} does not fit the shape {shape}",
            shape=shape,
            mesh=dict(sharding.mesh.shape_tuple),
            fix="give the array a sharding that divides it.",
        ) from cause
    axes = [*map(axes_of, sharding.spec)]
    axes += [()] * (len(shape) - len(axes))
    sizes = dict(sharding.mesh.shape_tuple)
    mesh = sharding.mesh
    ids = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None
    return _on_mesh(shape, axes, sizes, (), format_spec(sharding.spec), ids)


def _on_mesh(
    shape: tuple[int, ...],
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
    names: tuple[str | None, ...],
    spec: str,
    ids: Sequence[int] | None,
) -> Drawing:
    devices = math.prod(sizes.values())
    coords = coordinates(sizes, np.arange(devices, dtype=np.int64))
    counts = [math.prod(sizes[axis] for axis in held) for held in axes]
    held = holders(counts, [parts(one, sizes, coords, devices) for one in axes], devices)
    if ids is not None:
        held = tuple(tuple(sorted(ids[position] for position in some)) for some in held)
    bounds = tuple(
        tuple((part * (size // count), (part + 1) * (size // count)) for part in range(count))
        for size, count in zip(shape, counts, strict=True)
    )
    return Drawing(shape, names, spec, dict(sizes), bounds, held, "position" if ids is None else "id")


def _by_devices(shape: tuple[int, ...], sharding: Any) -> Drawing:
    """The drawing of a sharding of any other kind, from what it says of every device."""
    where: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ends = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        where.setdefault(ends, []).append(device.id)
    bounds = tuple(tuple(sorted({ends[dim] for ends in where})) for dim in range(len(shape)))
    held = tuple(tuple(sorted(where.get(index, ()))) for index in itertools.product(*bounds))
    return Drawing(shape, (), "", {}, bounds, held, "id")
