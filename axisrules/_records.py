"""The batch dimension: how many records it has on every process, and how many of them are placed.

Owns what happens to records that do not divide, and what the processes have to agree on. Places
nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from axisrules._agreement import Word
from axisrules._errors import AxisRulesError, BatchError, PolicyError, ProcessError
from axisrules._fields import Field, Fields
from axisrules._meshes import axis_sizes
from axisrules._names import fit_names, parse_names
from axisrules._options import Options
from axisrules._resolution import axes_text
from axisrules._resolve import resolve_array
from axisrules._shares import Share, differing_shares, need_processes, processes_of, share
from axisrules._specs import axes_of
from axisrules._text import did_you_mean

REMAINDERS = ("error", "drop", "pad")


class Job(NamedTuple):
    """How batches are placed, checked once."""

    names: Any
    options: Options
    remainder: str
    processes: tuple[int, ...]  # that the mesh has devices of


def make_job(names: Any, options: Options, remainder: str) -> Job:
    """A job, checked as far as it can be without a batch.

    Raises:
        AxisRulesError: Something is no names, no policy, or no mesh with devices.
    """
    if remainder not in REMAINDERS:
        raise PolicyError(
            f"remainder={remainder!r} is no policy{did_you_mean(str(remainder), REMAINDERS)}",
            fix="pass remainder='error', 'drop' or 'pad'.",
        )
    need_processes(options)
    if isinstance(names, str):
        parse_names(names)
    return Job(names, options, remainder, processes_of(options.mesh))


@dataclass(frozen=True, slots=True)
class Dimension:
    """The batch dimension: its records on this process, and how it is split."""

    records: int
    unit: int  # what the number of records of a process has to be a multiple of
    axes: dict[int, tuple[str, ...]]  # by position of the field
    shares: dict[int, Share]  # the same

    @property
    def count(self) -> int:
        return next(iter(self.shares.values())).count


def find_dimension(fields: Fields, job: Job) -> tuple[Dimension | None, list[AxisRulesError]]:
    """The batch dimension of the fields that have one, and where they contradict each other."""
    found = fields.with_records
    if not found:
        return None, []
    axes = {field.position: _first_axes(field, job.options) for field in found}
    shares = {field.position: share(job.options.mesh, axes[field.position]) for field in found}
    paths = {field.position: field.path for field in found}
    failures: list[AxisRulesError] = []
    if len(job.processes) > 1:
        failures += differing_shares({paths[position]: one for position, one in shares.items()})
    sizes = {field.path: field.shape[0] for field in found}
    if len(set(sizes.values())) > 1:
        failures.append(
            BatchError(
                "the fields have different numbers of records",
                paths=list(sizes),
                listing=[f"{path or 'the batch'}  {size}" for path, size in sizes.items()],
                fix="give all fields as many records; names that do not begin with the batch's name are for "
                "a field that has none.",
            )
        )
    unit = math.lcm(*(one.unit for one in shares.values()))
    return Dimension(found[0].shape[0], unit, axes, shares), failures


def _first_axes(field: Field, options: Options) -> tuple[str, ...]:
    """The axes of the batch dimension at a size that divides."""
    if isinstance(field.entry, PartitionSpec):
        known = set(options.mesh.axis_names)
        return tuple(axis for axis in axes_of(next(iter(field.entry))) if axis in known)
    try:
        names = fit_names(parse_names(field.entry), field.shape)
    except AxisRulesError:
        return ()  # the plan says why
    shape = (options.mesh.size, *field.shape[1:])
    found = resolve_array(names, options.rules, axis_sizes(options.mesh), shape, options.policy)
    return found.dims[0].axes


def word_of(fields: Fields, dimension: Dimension | None) -> Word:
    """What the other processes have to know of this batch."""
    rows = [
        (field.path, field.shape[field.has_records :], str(field.dtype), repr(field.entry))
        for field in fields.fields
    ]
    mark = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    return {"records": None if dimension is None else dimension.records, "fields": mark}


def disagreements(words: Mapping[int, Word]) -> list[AxisRulesError]:
    """Why the batches of the processes are not parts of one batch, if so."""
    failed = {one: word["failed"] for one, word in words.items() if "failed" in word}
    if failed:
        rows = [f"process {one}: {text}" for one, text in failed.items()]
        return [ProcessError("another process cannot bring its batch", listing=rows, fix="see its error.")]
    ended = [one for one, word in words.items() if "end" in word]
    if ended and len(ended) < len(words):
        who = ", ".join(map(str, ended))
        return [
            ProcessError(
                f"the batches of some processes have ended, and those of others have not: {who}",
                fix='give every process as many batches, or pass remainder="drop" to end with the first.',
            )
        ]
    if len({word.get("fields") for word in words.values()}) > 1:
        return [
            ProcessError(
                "the processes pass batches whose fields differ in path, shape, dtype or names",
                fix="pass the same fields on every process, whole in every dimension but the first.",
            )
        ]
    return []


def keep(dimension: Dimension, records: Sequence[int], job: Job) -> tuple[int, list[AxisRulesError]]:
    """How many records every process places, given how many each has."""
    unit = dimension.unit
    if job.remainder == "drop":
        return min(records) // unit * unit, []
    if job.remainder == "pad":
        return -(-max(records) // unit) * unit, []
    if len(set(records)) > 1:
        rows = [f"process {one}: {size}" for one, size in zip(job.processes, records, strict=True)]
        return dimension.unit, [
            BatchError(
                f"the processes have different numbers of records: {'; '.join(rows)}",
                fix='pass as many on each, or remainder="drop" or "pad" (which then returns a mask).',
            )
        ]
    whole = dimension.records * dimension.count
    if dimension.records % unit == 0 or whole == 1 or job.options.policy.indivisible != "error":
        return dimension.records, []
    return unit, [_indivisible(dimension, job)]


def _indivisible(dimension: Dimension, job: Job) -> BatchError:
    records, unit, sizes = dimension.records, dimension.unit, axis_sizes(job.options.mesh)
    used = max(dimension.axes.values(), key=len)
    each = "" if dimension.count == 1 else f" of this process, one of {dimension.count},"
    down, up = records // unit * unit, -(-records // unit) * unit
    ways = math.prod(dict(sizes)[axis] for axis in used)
    over = axes_text(used, sizes) + (f" = {ways}" if len(used) > 1 else "")
    drop = f'"drop" (then: {down} records)' if down else '"drop" (then: none is left)'
    return BatchError(
        f"the {records} records{each} do not divide over {over}",
        size=records,
        axes=used,
        mesh=dict(sizes),
        fix=f'pass remainder={drop} or "pad" (then: {up}, and a mask).',
    )
