"""``shard_tree``: carries out a plan on arrays that exist.

Owns the moving of bytes, and the promise that a result never shares memory with host arrays.
Decides no layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axisrules import _compat
from axisrules._errors import AxisRulesError, LeafError, raise_all
from axisrules._meshes import need_devices
from axisrules._options import PlanOptions, make_options
from axisrules._plan import Placement, Plan
from axisrules._planning import make_plan
from axisrules._processes import agree, attempt
from axisrules._trees import Flat, flatten


def shard_tree(
    tree: Any,
    names: Any = None,
    *,
    donate: bool = False,
    parts: bool = False,
    check: bool = True,
    **options: Unpack[PlanOptions],
) -> Any:
    """Places every array of a tree where the rules say.

    Plans first, so that a leaf that does not fit is an error before a byte has moved. Host arrays
    (numpy, memory maps), ``jax.Array``s and typed PRNG keys are placed; a ``ShapeDtypeStruct`` gets
    its sharding; functions, texts, ``None`` and Python scalars pass through. Tied leaves stay one
    array. An array that lies as planned is returned as it is, and one whose layout is equivalent
    moves no byte. The result never shares memory with a host array. On several processes each one
    builds its own shards from what it holds, once all of them have the same plan.

    Args:
        tree: The tree; it is not changed.
        names: Names in any form that ``plan`` takes.
        donate: Give up the arrays of ``tree`` that have to move, so that their memory is free
            afterwards.
        parts: Whether the arrays are this process's parts of larger ones: as much of every dimension as
            lies on its devices. The larger ones are then made of what all processes pass.
        check: Whether several processes compare their plans before any of them acts.
        **options: The options of ``plan``: ``mesh``, ``rules``, the policies, ``unnamed``, ``fill``,
            ``min_bytes``, ``memory_kind``, ``dtype``.

    Returns:
        A tree like the input whose arrays carry the planned sharding.

    Raises:
        AxisRulesError: Something does not fit; every failure of the tree is in the one error, and
            nothing was placed.
        ProcessError: It failed on another process, or the plan there is another one.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> params = {"up": np.zeros((8, 32), np.float32)}
        >>> placed = ar.shard_tree(params, {"up": "embed mlp"}, mesh=ar.make_mesh("data=4,model=2"),
        ...                        rules={"embed": "data", "mlp": "model"})
        >>> tuple(placed["up"].sharding.spec), placed["up"].addressable_shards[0].data.shape
        (('data', 'model'), (2, 16))
    """
    plan_tree: Callable[..., Plan] = make_plan
    place_all: Callable[..., list[Any]] = partial(place, donate=donate)
    if parts:  # rare, so that it is imported when it is used
        from axisrules import _parts

        plan_tree, place_all = _parts.plan_parts, _parts.place_parts
    flat: list[Flat] = []

    def planned() -> Plan:
        flat.append(flatten(tree))
        plan = plan_tree(tree, flat[0], names, make_options(**options))
        check_sources(plan, plan.structure.pick(flat[0].leaves))
        return plan

    plan = agree(attempt(planned), mesh=options.get("mesh"), check=check)
    return plan.structure.fill(iter(place_all(plan, plan.structure.pick(flat[0].leaves))))


def _kind_of(cls: type) -> str:
    """What a leaf is to this file, by its class."""
    if issubclass(cls, jax.ShapeDtypeStruct):
        return "abstract"
    if issubclass(cls, jax.core.Tracer):
        return "traced"
    return "device" if issubclass(cls, jax.Array) else "host"


_kind: Callable[[Any], str] = cache(_kind_of)


def check_sources(plan: Plan, arrays: Sequence[Any]) -> None:
    """Refuses what cannot be placed although it can be planned."""
    kinds = {_kind(cls) for cls in set(map(type, arrays))}
    if kinds & {"traced", "device"} or (kinds - {"abstract"} and _compat.in_trace()):
        raise_all(
            problem.at([placement.path])
            for placement, leaf in zip(plan.placements, arrays, strict=True)
            if (problem := _unplaceable(leaf)) is not None
        )
    if kinds - {"abstract"}:
        need_devices(plan.mesh, "place arrays on", "sizes alone suffice for axisrules.plan.")


def _unplaceable(leaf: Any) -> AxisRulesError | None:
    kind = _kind(type(leaf))
    if kind == "traced" or (kind != "abstract" and _compat.in_trace()):
        return LeafError(
            "an array cannot be placed while JAX is tracing", fix="inside jit use axisrules.constrain."
        )
    return deleted(leaf)


def deleted(leaf: Any) -> LeafError | None:
    """The error of an array that is no longer there."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return LeafError("the array was deleted or donated before", fix="pass the array that took its place.")
    return None


class _Move(NamedTuple):
    """One array that has to be placed: where its result goes, what it is, and where it lies then."""

    position: int
    leaf: Any
    placement: Placement
    sharding: NamedSharding


def place(plan: Plan, arrays: Sequence[Any], *, donate: bool = False) -> list[Any]:
    """The arrays where the plan puts them, each distinct one once."""
    placed: list[Any] = [None] * len(arrays)
    moves: dict[str, list[_Move]] = {"host": [], "device": []}
    first: dict[int, int] = {}  # of every distinct array, by id: its position
    tied: list[tuple[int, int]] = []
    for position, (placement, leaf, to) in enumerate(
        zip(plan.placements, arrays, plan.flat_shardings, strict=True)
    ):
        kind = _kind(type(leaf))
        if placement.tied_to is not None:
            tied.append((position, first[id(leaf)]))
            continue
        first[id(leaf)] = position
        if kind == "abstract":
            placed[position] = jax.ShapeDtypeStruct(
                placement.shape, placement.dtype, sharding=to, weak_type=leaf.weak_type
            )
        elif kind == "device" and leaf.sharding == to and leaf.dtype == placement.dtype:
            placed[position] = leaf
        else:
            moves[kind].append(_Move(position, leaf, placement, to))
    for move, array in zip(moves["host"], _place_host(moves["host"]), strict=True):
        placed[move.position] = array
    for move, array in zip(moves["device"], _place_device(moves["device"]), strict=True):
        placed[move.position] = array
    if donate:
        _release([move.leaf for move in moves["device"]], placed)
    for position, other in tied:
        placed[position] = placed[other]
    return placed


def _release(sources: Sequence[jax.Array], results: Sequence[Any]) -> None:
    """Gives up the memory of sources of which no result holds a part."""
    arrays = [result for result in results if isinstance(result, jax.Array)]
    jax.block_until_ready(arrays)
    kept = set().union(*map(_pointers, arrays))
    for source in [source for source in sources if _pointers(source).isdisjoint(kept)]:
        source.delete()


def _place_host(moves: Sequence[_Move]) -> list[Any]:
    if not moves:
        return []
    sources = [_independent(np.asarray(move.leaf), move.placement, move.sharding) for move in moves]
    shardings = [move.sharding for move in moves]
    if shardings[0].is_fully_addressable:
        made: list[Any] = jax.device_put(sources, shardings)
    else:  # each process builds its own shards; device_put would compare the values across them
        made = [
            jax.make_array_from_callback(source.shape, sharding, source.__getitem__)
            for source, sharding in zip(sources, shardings, strict=True)
        ]
    jax.block_until_ready(made)  # the source may change as soon as the call returns
    return made


_ALWAYS_COPIED = 4096  # bytes up to which a copy costs less than looking whether it is needed


def _independent(source: np.ndarray[Any, Any], placement: Placement, sharding: NamedSharding) -> Any:
    """The host array in the planned dtype, copied where JAX would take over its memory."""
    if source.dtype != placement.dtype:
        return source.astype(placement.dtype)
    if source.nbytes <= _ALWAYS_COPIED:
        return source.copy()
    step = _alignment_step(source.shape, source.strides, source.itemsize, sharding)
    if step and source.__array_interface__["data"][0] % step == 0:
        return source.copy()
    return source


@lru_cache(maxsize=4096)
def _alignment_step(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, sharding: NamedSharding
) -> int:
    """What the address must be a multiple of for JAX to take over a shard; 0 if it never does."""
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu" and not sharding.memory_kind:
        return 0
    expected, step = itemsize, _compat.ZERO_COPY_ALIGNMENT
    dims = zip(sharding.shard_shape(shape), shape, strides, strict=True)
    for size, whole, stride in reversed(list(dims)):
        if size != 1 and stride != expected:
            return 0  # the shard is not contiguous
        expected *= size
        if size != whole:
            step = math.gcd(step, size * stride)
    return step


def _place_device(moves: Sequence[_Move]) -> list[Any]:
    if not moves:
        return []
    sources = [_cast(move.leaf, move.placement.dtype) for move in moves]
    if not moves[0].sharding.is_fully_addressable:
        return [put_global(source, move.sharding) for source, move in zip(sources, moves, strict=True)]
    sources = [
        _compat.movable(source, move.sharding.mesh) for source, move in zip(sources, moves, strict=True)
    ]
    made: list[Any] = jax.device_put(sources, [move.sharding for move in moves])
    return made


def _cast(leaf: jax.Array, dtype: Any) -> jax.Array:
    """The values in a dtype, computed where they lie: another active mesh would not do for Explicit axes."""
    if leaf.dtype == dtype:
        return leaf
    mesh = getattr(leaf.sharding, "mesh", None)
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else nullcontext():
        return leaf.astype(dtype)


def put_global(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array on the devices of several processes; each builds its shards if it holds the whole.

    ``device_put`` would compare the values of all processes, or refuse.
    """
    if not value.is_fully_addressable:
        moved: jax.Array = jax.device_put(_compat.movable(value, sharding.mesh), sharding)
        return moved
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        held = np.asarray(value)
        return jax.make_array_from_callback(held.shape, sharding, held.__getitem__)
    spec = (*sharding.spec, *[None] * (value.ndim - len(sharding.spec)), None)
    words = put_global(jax.random.key_data(value), NamedSharding(sharding.mesh, PartitionSpec(*spec)))
    mesh: Any = sharding.mesh
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(value))
    with jax.set_mesh(mesh):
        keys: jax.Array = jax.jit(wrap, out_shardings=sharding)(words)
    return keys


def _pointers(array: jax.Array) -> set[int]:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
