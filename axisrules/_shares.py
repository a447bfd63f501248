"""Which records of a batch a process holds.

Owns ``process_shard``, and how the batch dimension is shared out among processes. Of a device it
asks only to which process it belongs. Moves no byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from axisrules._errors import BatchError, NamesError, NoMeshError, ProcessError, raise_all
from axisrules._fields import batch_name, is_one_set
from axisrules._meshes import MeshLike, axis_sizes
from axisrules._names import parse_names
from axisrules._options import Options, make_options
from axisrules._resolve import resolve_array
from axisrules._rules import RulesLike
from axisrules._single import warn_unmapped
from axisrules._specs import axes_of
from axisrules._tables import NameTable
from axisrules._text import format_axes


class ProcessShard(NamedTuple):
    """What the data loader of a process has to know.

    Attributes:
        index: Which of the shards of the data this process reads.
        count: Into how many shards the data is divided.
    """

    index: int  # type: ignore[assignment]  # not the method of a tuple
    count: int  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the batch dimension that one process holds.

    Attributes:
        index: Its position among the distinct shares.
        count: How many distinct shares there are.
        parts: Which parts of the dimension it is made of, in order.
        ways: Into how many parts the mesh splits the dimension.
    """

    index: int
    count: int
    parts: tuple[int, ...]
    ways: int

    @property
    def unit(self) -> int:
        """What the number of records of the process has to be a multiple of."""
        return len(self.parts)

    def fine_parts(self, ways: int) -> tuple[int, ...]:
        """The same share where the dimension is split into a multiple of its parts."""
        times = ways // self.ways
        return tuple(part * times + step for part in self.parts for step in range(times))

    def locate(self, rows: slice, records: int) -> slice:
        """Where rows of the global batch are among the records of this process."""
        if rows.start is None or self.count == 1 or not records:
            return rows
        size = records // self.unit  # of one part
        start = self.parts.index(rows.start // size) * size + rows.start % size
        return slice(start, start + rows.stop - rows.start)


def process_shard(
    names: Any,
    *,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
) -> ProcessShard:
    """Which part of the data the loader of this process has to read.

    The batch is the first dimension. Processes whose devices hold the same records, as where a model
    axis spans them, get the same index, so that they read the same records.

    Args:
        names: The names of the records, such as ``"batch length"``, or names per field as
            ``shard_batch`` takes them.
        mesh: The mesh, with devices; by default the active one.
        rules: The rules; by default the active ones.
        taken: As in ``resolve``.
        indivisible: As in ``resolve``; without a size it decides nothing.
        absent: As in ``resolve``.
        unmapped: As in ``resolve``.

    Returns:
        ``(index, count)``: this process reads shard ``index`` of ``count``.

    Raises:
        ProcessError: The devices of the processes hold no equal, separate shares.
        BatchError: The fields of a batch are split differently.
        NoMeshError: The mesh has no devices.

    Example:
        >>> import axisrules as ar
        >>> mesh, rules = ar.make_mesh("data=4,model=2"), {"batch": "data", "length": None}
        >>> index, count = ar.process_shard("batch length", mesh=mesh, rules=rules)
        >>> records = range(1000)[index::count]  # of the one process here: all of them
        >>> index, count, len(records)
        (0, 1, 1000)
    """
    options = make_options(
        mesh=mesh, rules=rules, taken=taken, indivisible=indivisible, absent=absent, unmapped=unmapped
    )
    need_processes(options)
    entries = _named_entries(names)
    name, unclear = batch_name(entries)
    raise_all(unclear)
    unknown: dict[str, None] = {}
    found = {path: _first_axes(entry, options, name, unknown) for path, entry in entries}
    if unknown and options.policy.unmapped == "warn":
        warn_unmapped(list(unknown), options.rules)
    shares = {path: share(options.mesh, axes) for path, axes in found.items() if axes is not None}
    raise_all(differing_shares(shares))
    if not shares:
        return ProcessShard(0, 1)
    first = next(iter(shares.values()))
    return ProcessShard(first.index, first.count)


def need_processes(options: Options) -> None:
    """Refuses a mesh of sizes alone.

    Raises:
        NoMeshError: The mesh has no devices.
    """
    if not isinstance(options.mesh, Mesh):
        raise NoMeshError(
            "the mesh has no devices, so it says nothing of processes or of where to place a batch",
            fix='pass mesh=axisrules.make_mesh("data=4,model=2").',
        )


def _named_entries(names: Any) -> list[tuple[str, Any]]:
    """Every set of names that fields may have."""
    if is_one_set(names):
        return [("", names)]
    if isinstance(names, NameTable):
        return [(str(pattern), entry) for pattern, entry in names]
    found = jax.tree_util.tree_leaves_with_path(names, is_leaf=lambda n: n is None or is_one_set(n))
    readable = all(entry is None or is_one_set(entry) for _, entry in found)
    if names is None or callable(names) or not readable:
        raise NamesError(
            f"{names!r} cannot tell the names of a batch",
            fix='pass the names themselves, such as "batch length".',
        )
    return [(jax.tree_util.keystr(path), entry) for path, entry in found]


def _first_axes(
    entry: Any, options: Options, name: str | None, unknown: dict[str, None]
) -> tuple[str, ...] | None:
    """The axes of the batch dimension, or ``None`` where the entry has none.

    Adds the names that no rule mentions to ``unknown``.

    Raises:
        AxisRulesError: What the policies refuse.
    """
    if isinstance(entry, PartitionSpec):
        return axes_of(next(iter(entry))) if len(tuple(entry)) else None
    names = tuple(one for one in parse_names(() if entry is None else entry) if one is not ...)
    if not names or names[0] != name:
        return None
    found = resolve_array(names, options.rules, axis_sizes(options.mesh), None, options.policy)
    raise_all(found.problems)
    unknown.update(dict.fromkeys(found.unknown_names))
    return found.dims[0].axes


def differing_shares(shares: dict[str, Share]) -> list[BatchError]:
    """The error that fields of one batch need different records on this process, if so."""
    ways = math.lcm(*(one.ways for one in shares.values()))
    if len({(one.index, one.count, one.fine_parts(ways)) for one in shares.values()}) < 2:
        return []
    rows = [f"{path}  shard {one.index} of {one.count}" for path, one in shares.items()]
    return [
        BatchError(
            "the fields of the batch are split over the processes in different ways",
            paths=list(shares),
            listing=rows,
            fix="order the rules so that the batch dimension takes its axes before any other dimension.",
        )
    ]


def share(mesh: Any, axes: Sequence[str]) -> Share:
    """The share of this process in a dimension that is split over axes of a mesh."""
    return _share(mesh, tuple(axes), jax.process_index())


@lru_cache(maxsize=1024)
def _share(mesh: Mesh, axes: tuple[str, ...], process: int) -> Share:
    return share_of(process_grid(mesh.devices), mesh.axis_names, axes, process)


@lru_cache(maxsize=256)
def processes_of(mesh: Any) -> tuple[int, ...]:
    """The processes that a mesh has devices of, in order."""
    return tuple(map(int, np.unique(process_grid(mesh.devices))))


def process_grid(devices: Any) -> np.ndarray[Any, Any]:
    """The process of every device of a mesh, in the mesh's shape."""
    found = np.asarray(devices, object)
    return np.array([device.process_index for device in found.flat], np.int64).reshape(found.shape)


def share_of(processes: Any, axis_names: Sequence[str], axes: Sequence[str], process: int) -> Share:
    """The share of a process, from the process of every device of a mesh.

    Args:
        processes: The process of every device, with one dimension per mesh axis.
        axis_names: The mesh axes.
        axes: The axes that split the batch dimension, major to minor.
        process: The process that asks.

    Raises:
        ProcessError: The process has no device in the mesh, or the processes hold shares of several
            sizes, or shares that overlap without being the same.
    """
    grid = np.asarray(processes)
    split = [list(axis_names).index(axis) for axis in axes]
    rest = [dim for dim in range(grid.ndim) if dim not in split]
    ways = math.prod(grid.shape[dim] for dim in split)
    by_part = grid.transpose(split + rest).reshape(ways, -1)
    held = {
        int(one): tuple(map(int, np.flatnonzero((by_part == one).any(axis=1)))) for one in np.unique(grid)
    }
    if process not in held:
        raise ProcessError(
            f"process {process} has no device in the mesh",
            mesh=dict(zip(axis_names, grid.shape, strict=True)),
            fix="make the mesh of the devices of every process that takes part.",
        )
    shares = sorted(set(held.values()))
    # Together they hold every part, so they are separate if they hold no part twice.
    if sum(map(len, shares)) != ways or len(set(map(len, shares))) > 1:
        raise ProcessError(
            f"the processes hold no equal, separate shares of a dimension over {format_axes(tuple(axes))}",
            listing=[f"process {one}: {_text(parts)} of {ways}" for one, parts in held.items()],
            mesh=dict(zip(axis_names, grid.shape, strict=True)),
            fix="order the devices of the mesh by process, as axisrules.make_mesh does.",
        )
    return Share(shares.index(held[process]), len(shares), held[process], ways)


def _text(parts: Sequence[int]) -> str:
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(map(str, parts))}"
