"""Arrays of files, read slice by slice onto their shards.

Owns the way from an opened checkpoint to placed arrays: names moved along with the dimensions, a
plan before a byte is read, and one buffer per shard that JAX takes over. Decides no layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axisrules import _compat, catalog
from axisrules._entries import find_entries
from axisrules._errors import AxisRulesError, CheckpointError, LeafError, NamesError, raise_all
from axisrules._marked import Marked, find_marked
from axisrules._meshes import need_devices
from axisrules._names import fit_names, parse_names
from axisrules._options import PlanOptions, make_options
from axisrules._plan import Placement, Plan
from axisrules._planning import make_plan
from axisrules._processes import agree, attempt
from axisrules._trees import NO_ENTRY, flatten
from axisrules.checkpoints._folders import Checkpoint
from axisrules.checkpoints._handles import Files, Host, Version, sample
from axisrules.checkpoints._progress import Progress, advancing
from axisrules.checkpoints._scatter import Job, Slices, side_by_side
from axisrules.checkpoints._select import Entry, Part, SelectOptions, select
from axisrules.checkpoints._sources import FlatArray, Span, aligned

_THREADS = min(4, os.cpu_count() or 1)
_PIECE = 2**21  # bytes of a shard that are worth a thread


class LoadOptions(PlanOptions, SelectOptions, total=False):
    """The options of ``plan``, and those that say what is taken."""


class Work(NamedTuple):
    """What is to be loaded, and where it goes."""

    entries: list[Entry]  # one per placement
    plan: Plan
    versions: dict[str, Version]
    digests: dict[str, str]


def structs(entries: Mapping[str, Entry]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of what is taken, by path."""
    made = _Structs()
    return {path: made[one.shape, one.dtype] for path, one in entries.items()}


class _Structs(dict[tuple[tuple[int, ...], np.dtype[Any]], jax.ShapeDtypeStruct]):
    """Structs by shape and dtype, since a checkpoint repeats them many times."""

    def __missing__(self, key: tuple[tuple[int, ...], np.dtype[Any]]) -> jax.ShapeDtypeStruct:
        made = self[key] = jax.ShapeDtypeStruct(*key)
        return made


def load(
    open_checkpoint: Callable[[], Checkpoint],
    names: Any,
    options: Mapping[str, Any],
    progress: Progress,
    check: bool,
) -> dict[str, jax.Array]:
    """The arrays of a checkpoint, placed; every process reads its own slices."""
    mesh = options.get("mesh")
    outcome = attempt(lambda: prepare(open_checkpoint(), names, options))
    if isinstance(outcome, Exception):
        return agree(outcome, mesh=mesh, check=check)  # raises
    plan = agree(outcome.plan, check=check, facts=lambda: _file_facts(outcome))
    done = agree(attempt(lambda: read(outcome, progress)), mesh=plan.mesh, check=check)
    placed: dict[str, jax.Array] = plan.structure.fill(iter(done))
    return placed


def _file_facts(work: Work) -> dict[str, str]:
    """What must be equal of the files on all processes."""
    return {
        f"file {os.path.basename(path)}": f"{digest} {sample(path, work.versions[path].size)}"
        for path, digest in work.digests.items()
    }


def prepare(checkpoint: Checkpoint, names: Any, options: Mapping[str, Any]) -> Work:
    """Selects and plans; reads nothing.

    Raises:
        AxisRulesError: Something does not fit.
    """
    selecting = {key: value for key, value in options.items() if key in SelectOptions.__annotations__}
    planning = {key: value for key, value in options.items() if key not in selecting}
    checked = make_options(**planning)
    instead = "to plan alone, pass the tree of axisrules.checkpoints.open to axisrules.plan."
    need_devices(checked.mesh, "load arrays onto", instead)
    if isinstance(names, str):
        names = catalog.load(names)
    entries = select(checkpoint, **selecting)
    tree = structs(entries)
    moved, marked, failures = _moved_names(checkpoint, entries, names)
    try:
        plan = make_plan(tree, flatten(tree), moved, checked, marked)
    except AxisRulesError as error:
        raise_all([*failures, *(error.failures or [error])])
        raise
    raise_all(failures)
    ordered = [entries[placement.path] for placement in plan.placements]
    return Work(ordered, plan, checkpoint.versions, checkpoint.digests)


def _moved_names(
    checkpoint: Checkpoint, entries: Mapping[str, Entry], names: Any
) -> tuple[Mapping[str, Any], Marked, list[AxisRulesError]]:
    """The names by path in the result, and their marks, from names that speak of the arrays in the file."""
    parts = [part for entry in entries.values() for part in entry.parts]
    arrays = checkpoint.arrays
    stored: dict[str, Any] = {
        part.stored: jax.ShapeDtypeStruct(arrays[part.stored].shape, part.source.dtype) for part in parts
    }
    flat = flatten(stored)
    found = find_entries(stored, flat, names)
    given = dict(zip(flat.paths, found.entries, strict=True))
    failures, moved = list(found.problems), {}
    for path, entry in entries.items():
        try:
            moved[path] = _names_of(entry, given)
        except AxisRulesError as error:
            moved[path] = None
            failures.append(error.at([path]))
    marked = find_marked(found.marks, flat.paths, flat.leaves)
    places = {path: (e.parts[0].stored, e.parts[0].order, len(e.axes)) for path, e in entries.items()}
    return moved, marked.moved(places), failures


def _names_of(entry: Entry, given: Mapping[str, Any]) -> Any:
    first = _in_order(entry.parts[0], given)
    for part in entry.parts[1:]:
        other = _in_order(part, given)
        if other != first:
            raise NamesError(
                f"arrays to be stacked have the names {first!r} and {other!r}",
                fix="name them alike, or keep them out of stack=.",
            )
    if not entry.axes or first is None or first is NO_ENTRY:
        return first
    if isinstance(first, PartitionSpec):
        return PartitionSpec(*(None for _ in entry.axes), *first)
    return (*entry.axes, *first)


def _in_order(part: Part, given: Mapping[str, Any]) -> Any:
    """The names of one array in the order of its dimensions here."""
    names, rank = given[part.stored], len(part.order)
    if names is None or names is NO_ENTRY:
        return names
    back = [part.order.index(dim) for dim in range(rank)]
    shape = [part.source.shape[dim] for dim in back]
    if not isinstance(names, PartitionSpec):
        fitted = fit_names(parse_names(names), shape)
        return tuple(fitted[dim] for dim in part.order)
    if len(names) > rank or part.order == tuple(range(rank)):
        return names
    entries = [*names, *(None for _ in range(rank - len(names)))]
    return PartitionSpec(*(entries[dim] for dim in part.order))


def read(work: Work, progress: Progress) -> list[jax.Array]:
    """The placed arrays in the order of the plan.

    Raises:
        AxisRulesError: A file cannot be read, was changed, or holds a value that does not fit.
    """
    triples = list(zip(work.entries, work.plan.placements, work.plan.flat_shardings, strict=True))
    order = sorted(range(len(triples)), key=lambda i: _where(triples[i][0]))
    placed: list[Any] = [None] * len(triples)
    with (
        Files(work.versions) as files,
        ThreadPoolExecutor(_THREADS) as pool,
        advancing(work.plan.nbytes, progress) as advance,
    ):
        raise_all(_misfits(files, triples))
        for position in order:
            entry, placement, sharding = triples[position]
            placed[position] = _place(_Reader(files, pool), entry, placement, sharding)
            advance(placement.nbytes)
    return placed


def _where(entry: Entry) -> tuple[str, int]:
    """The order in which arrays are read: as they lie in the files."""
    source = entry.parts[0].source
    return source.file, getattr(getattr(source, "source", source), "offset", 0)


def _misfits(
    files: Files, triples: Iterable[tuple[Entry, Placement, NamedSharding]]
) -> Iterable[AxisRulesError]:
    """The 64-bit integers that JAX cannot hold, found before anything is placed."""
    for entry, placement, sharding in triples:
        if entry.dtype.kind not in "iu" or entry.dtype.itemsize <= placement.dtype.itemsize:
            continue
        spans = {_span(index, entry.shape) for index in _indices(sharding, entry.shape)}
        for span in spans:
            try:
                _fill(files, entry, span, np.empty(_sizes(span), placement.dtype))
            except LeafError as error:
                yield LeafError(error.headline, paths=[entry.path], shape=entry.shape, fix=error.fix)
                break


def _indices(sharding: NamedSharding, shape: tuple[int, ...]) -> Iterable[Any]:
    return sharding.addressable_devices_indices_map(shape).values()


def _span(index: Iterable[slice], shape: tuple[int, ...]) -> Span:
    pairs = zip(index, shape, strict=True)
    return tuple([(part.start or 0, size if part.stop is None else part.stop) for part, size in pairs])


def _sizes(span: Span) -> tuple[int, ...]:
    return tuple([stop - start for start, stop in span])


def _place(reader: _Reader, entry: Entry, placement: Placement, sharding: NamedSharding) -> jax.Array:
    """One array. JAX takes over the memory of an aligned shard, so each device gets its own."""
    # JAX hands one buffer to all devices of a replicated array: what it copies must not be aligned.
    shared = sharding.is_fully_replicated and len(sharding.addressable_devices) > 1
    beyond = placement.dtype.itemsize if shared else 0
    spans = {_span(index, placement.shape) for index in _indices(sharding, placement.shape)}
    buffers = {span: _memory(placement, _sizes(span), beyond) for span in spans}
    reader.fill(entry, list(buffers.items()))
    used: set[Span] = set()

    def shard(index: Any) -> Host:
        span = _span(index, placement.shape)
        buffer = buffers[span]
        if span in used:
            buffer = _memory(placement, _sizes(span), beyond)
            buffer[...] = buffers[span]
        used.add(span)
        return buffer

    array = jax.make_array_from_callback(placement.shape, sharding, shard, dtype=placement.dtype)
    array.block_until_ready()
    return array


def _memory(placement: Placement, shape: tuple[int, ...], beyond: int) -> Host:
    try:
        return aligned(shape, placement.dtype, _compat.ZERO_COPY_ALIGNMENT, beyond)
    except MemoryError as cause:
        raise CheckpointError(
            f"there is no memory for a shard of the shape {shape!r}",
            paths=[placement.path],
            shape=placement.shape,
            fix="split it over more devices, or load it as another dtype.",
        ) from cause


class _Reader(NamedTuple):
    """Reads the shards of arrays in several threads."""

    files: Files
    pool: ThreadPoolExecutor

    def fill(self, entry: Entry, slices: Slices) -> None:
        """Reads parts of what is loaded, each into memory of its shape."""
        source, jobs = entry.parts[0].source, None
        if isinstance(source, FlatArray) and not entry.counts:
            jobs = side_by_side(source, slices, self.files, _THREADS)
        if jobs is None:
            jobs = [job for span, place in slices for job in self._pieces(entry, span, place)]
        if len(jobs) == 1 or sum(place.nbytes for _, place in slices) < _PIECE:
            for job in jobs:
                job()
        else:
            list(self.pool.map(lambda job: job(), jobs))

    def _pieces(self, entry: Entry, span: Span, place: Host) -> Iterable[Job]:
        """The jobs that read one part."""
        dim = 0 if entry.counts or not span else entry.parts[0].order.index(0)  # the slowest in the file
        count = max(1, min(_THREADS, place.nbytes // _PIECE))
        if not span or count == 1:
            return [lambda: _fill(self.files, entry, span, place)]
        start, stop = span[dim]
        ends = [start + (stop - start) * number // count for number in range(count + 1)]
        before = (slice(None),) * dim
        return [
            partial(
                _fill,
                self.files,
                entry,
                (*span[:dim], (first, last), *span[dim + 1 :]),
                place[(*before, slice(first - start, last - start))],
            )
            for first, last in pairwise(ends)
        ]


def _fill(files: Files, entry: Entry, span: Span, place: Host) -> None:
    """Reads a part of what is loaded, array by array where it is stacked."""
    stacked = len(entry.counts)
    for at in np.ndindex(place.shape[:stacked]):
        index = [start + offset for (start, _), offset in zip(span[:stacked], at, strict=True)]
        entry.inside(index).source.fill(files, span[stacked:], place[(*at, ...)])
