"""``shard_batch``: records of this process become parts of global arrays.

Owns what happens to a batch that does not divide, and which rows of a global array come from which
process. Decides no layout: a plan does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axisrules._agreement import Agreement
from axisrules._errors import AxisRulesError, BatchError, gather, raise_all
from axisrules._fields import Fields, read_fields
from axisrules._meshes import MeshLike
from axisrules._options import Options, make_options
from axisrules._place import check_sources, place
from axisrules._plan import Plan
from axisrules._planning import make_plan
from axisrules._records import Dimension, Job, disagreements, find_dimension, keep, make_job, word_of
from axisrules._rules import RulesLike
from axisrules._shares import Share, share
from axisrules._single import warn_unmapped
from axisrules._specs import make_spec
from axisrules._trees import Flat


def shard_batch(
    batch: Any,
    names: Any,
    *,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    remainder: str = "error",
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
) -> Any:
    """Places a batch where the rules say; on several processes each passes its own records.

    The batch is the first dimension. On several processes the result is global: a process passes the
    records of its ``process_shard``, whole in every other dimension, and gets arrays of ``count`` times
    as many records; processes of one shard pass the same records. There every process has to call this
    function equally often, in the same order. The result never shares memory with a host array, so a
    loader may use its buffers again at once.

    Args:
        batch: Any tree of arrays. What has no names stays as it is: texts, objects, Python numbers, and
            leaves without an entry.
        names: One set of names for all leaves, such as ``"batch length"``, of which a leaf with fewer
            dimensions takes the first, and a leaf with more leaves the rest whole. Or names per field in
            any form that ``plan`` takes; a tuple of names for a batch that is a tuple is per field. A
            field whose names do not begin with the batch's name is the same on every process.
        mesh: The mesh, with devices; by default the active one.
        rules: The rules; by default the active ones.
        remainder: What to do when the records do not divide over the devices: ``"error"``; ``"drop"``
            those that are left over; or ``"pad"`` with copies of the last record, and return a mask.
        taken: As in ``resolve``.
        indivisible: As in ``resolve``.
        absent: As in ``resolve``.
        unmapped: As in ``resolve``.

    Returns:
        A tree like ``batch``. With ``remainder="pad"`` always ``(tree, mask)``: the mask is bool, has
        one entry per record, lies like the batch dimension, and is ``False`` for padding.

    Raises:
        BatchError: The records do not divide, nothing would be left of them, or fields have different
            numbers of records.
        ProcessError: The processes pass batches that do not fit together.
        AxisRulesError: Something else does not fit; every failure is in the one error, and nothing was
            placed.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> batch = {"tokens": np.zeros((10, 6), np.int32), "label": np.zeros(10, np.int32), "source": "web"}
        >>> placed, mask = ar.shard_batch(batch, "batch length", mesh=ar.make_mesh("data=4,model=2"),
        ...                               rules={"batch": "data", "length": None}, remainder="pad")
        >>> placed["tokens"].shape, placed["label"].sharding.spec == ar.resolve(
        ...     "batch", mesh="data=4", rules={"batch": "data"}).spec, placed["source"], int(mask.sum())
        ((12, 6), True, 'web', 10)
    """
    options = make_options(
        mesh=mesh, rules=rules, taken=taken, indivisible=indivisible, absent=absent, unmapped=unmapped
    )
    placed = place_batch(batch, make_job(names, options, remainder), _CALLS)
    assert placed is not None  # single calls never end
    warn_of_names(placed, options)
    if placed.left == 0 and remainder == "drop":
        raise _nothing_left(placed)
    return placed.result


_CALLS = Agreement("shard_batch")


class Placed(NamedTuple):
    """A batch that was placed.

    Attributes:
        result: What ``shard_batch`` returns; ``None`` where nothing is left.
        left: Records of this process that are left, ``None`` where no field has records.
        unknown_names: Names that no rule mentions, with the paths that bear them.
        records: Records that this process passed.
        unit: What their number has to be a multiple of.
    """

    result: Any
    left: int | None
    unknown_names: Mapping[str, list[str]]
    records: int | None = None
    unit: int = 1


def place_batch(batch: Any, job: Job, agreement: Agreement) -> Placed | None:
    """Places one batch; the work of ``shard_batch``.

    Returns:
        What was placed; ``None`` where the batches of another process have ended and
        ``remainder="drop"``.

    Raises:
        AxisRulesError: As ``shard_batch`` does.
    """
    try:
        fields = read_fields(batch, job.names)
        dimension, failures = find_dimension(fields, job)
        if len(job.processes) > 1:
            raise_all([*fields.problems, *failures])
    except BaseException as error:
        reason = error.headline if isinstance(error, AxisRulesError) else repr(error)
        agreement.fail(reason, job.processes)
        raise
    words = agreement.exchange(word_of(fields, dimension), job.processes)
    if job.remainder == "drop" and any("end" in word for word in words.values()):
        return None
    raise_all(disagreements(words))
    kept = None
    if dimension is not None:
        kept, unfit = keep(dimension, [word["records"] for word in words.values()], job)
        failures += [problem.at([one.path for one in fields.with_records]) for problem in unfit]
    elif job.remainder == "pad":
        failures.append(
            BatchError(
                "no field of the batch has records, so there is nothing to pad",
                fix='name the first dimension of a field, such as "batch length".',
            )
        )
    plan = _make_plan(fields, dimension, kept, job, failures)
    none_left = kept == 0 and job.remainder == "drop"
    result = None if none_left else _carry_out(plan, fields, kept, job)
    known = (None, 1) if dimension is None else (dimension.records, dimension.unit)
    return Placed(result, kept, _unknown(plan), *known)


def _make_plan(
    fields: Fields, dimension: Dimension | None, kept: int | None, job: Job, failures: list[AxisRulesError]
) -> Plan:
    """The plan of the global arrays, with the mask as the last one where there is one.

    Raises:
        AxisRulesError: All that does not fit, with what was found before.
    """
    keys = list(fields.flat.keys)
    leaves: list[Any] = [None] * len(keys)
    entries: list[Any] = [None] * len(keys)
    for field in fields.fields:
        shape = field.shape
        if field.has_records and dimension is not None and kept is not None:
            shape = (kept * dimension.count, *shape[1:])
        leaves[field.position] = jax.ShapeDtypeStruct(shape, field.dtype)
        entries[field.position] = field.entry
    if job.remainder == "pad" and dimension is not None and kept is not None:
        keys.append(("mask",))
        leaves.append(jax.ShapeDtypeStruct((kept * dimension.count,), np.dtype(bool)))
        entries.append(make_spec((next(iter(dimension.axes.values())),)))
    options = job.options
    if options.policy.unmapped == "warn":  # the caller warns
        options = options._replace(policy=options.policy._replace(unmapped="replicate"))
    problems = [*fields.problems, *failures]
    try:
        plan = make_plan(None, Flat(keys, leaves, entries, list), None, options)
    except AxisRulesError as error:
        found = gather([*problems, *(error.failures or [error])])
        raise found or error from None
    raise_all(problems)
    raise_all(_moved(plan, fields, dimension, job))
    return plan


def _moved(plan: Plan, fields: Fields, dimension: Dimension | None, job: Job) -> list[AxisRulesError]:
    """Where the size made a field lie otherwise than the records were divided for."""
    if dimension is None or len(job.processes) < 2:
        return []
    return [
        BatchError(
            "at this number of records the field is not split over the processes as its records are",
            paths=[field.path],
            shape=placement.shape,
            fix='pass indivisible="error" with a remainder, or a number of records that divides.',
        )
        for field, placement in zip(fields.fields, plan.placements, strict=False)
        if field.has_records
        and share(job.options.mesh, placement.resolution.dims[0].axes) != dimension.shares[field.position]
    ]


def _unknown(plan: Plan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in plan.placements:
        for name in one.resolution.unknown_names:
            found.setdefault(name, []).append(one.path)
    return found


def warn_of_names(placed: Placed, options: Options) -> None:
    """The one warning of a batch, for the names that no rule mentions."""
    if options.policy.unmapped == "warn" and placed.unknown_names:
        paths = list(dict.fromkeys(path for some in placed.unknown_names.values() for path in some if path))
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        where = f" in {', '.join(paths[:3])}{more}" if paths else ""
        warn_unmapped(list(placed.unknown_names), options.rules, where=where)


def _carry_out(plan: Plan, fields: Fields, kept: int | None, job: Job) -> Any:
    """The batch on its devices; with the mask where there is one."""
    records = [field.shape[0] if field.has_records else None for field in fields.fields]
    arrays = [field.leaf for field in fields.fields]
    if job.remainder == "pad" and kept is not None:
        present = next(size for size in records if size is not None)
        arrays.append(np.arange(kept) < present)
        records.append(kept)
    check_sources(plan, arrays)
    sources = [
        leaf if size is None or kept is None or size == kept else _cut_or_padded(leaf, size, kept)
        for leaf, size in zip(arrays, records, strict=True)
    ]
    local = all(sharding.is_fully_addressable for sharding in plan.flat_shardings)
    placed = place(plan, sources) if local else _place_shares(plan, sources, records)
    jax.block_until_ready(placed)
    leaves = list(fields.flat.leaves)
    for field, array in zip(fields.fields, placed, strict=False):
        leaves[field.position] = array
    tree = fields.flat.rebuild(leaves)
    return (tree, placed[-1]) if job.remainder == "pad" else tree


def _cut_or_padded(leaf: Any, size: int, kept: int) -> Any:
    """The first records, or all of them and copies of the last one (zeros where there is none)."""
    keys = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    xp: Any = jnp if keys else np
    array = leaf if keys else np.asarray(leaf)
    if kept < size:
        return array[:kept]
    if not size and keys:
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(leaf)), (kept, *leaf.shape[1:]))
    if not size:
        return xp.zeros((kept, *array.shape[1:]), array.dtype)
    return xp.concatenate([array, xp.repeat(array[-1:], kept - size, axis=0)])


def _place_shares(plan: Plan, sources: Sequence[Any], records: Sequence[int | None]) -> list[Any]:
    """Global arrays of which this process builds the shards of its own devices."""
    made = []
    for source, size, placement, sharding in zip(
        sources, records, plan.placements, plan.flat_shardings, strict=True
    ):
        axes = placement.resolution.dims[0].axes if size is not None else ()
        part: Any = _Rows(source, placement.dtype, share(plan.mesh, axes))
        made.append(jax.make_array_from_callback(placement.shape, sharding, part))
    return made


class _Rows:
    """The parts of a global array that this process has, by global index.

    A part is a copy: JAX takes over the memory of a host array where it can.
    """

    def __init__(self, source: Any, dtype: Any, mine: Share) -> None:
        keys = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        self._source = source if keys else np.asarray(source)
        self._dtype, self._share = None if keys else dtype, mine

    def __call__(self, index: tuple[slice, ...]) -> Any:
        if index:
            index = (self._share.locate(index[0], self._source.shape[0]), *index[1:])
        part = self._source[index]
        return part if self._dtype is None else np.array(part, self._dtype)


def _nothing_left(placed: Placed) -> BatchError:
    return BatchError(
        f"nothing is left of a batch of {placed.records} records, which would have to be {placed.unit}",
        size=placed.records,
        fix='skip the batch, or pass remainder="pad", which returns a mask. prefetch skips it.',
    )
