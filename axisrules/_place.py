"""``shard_tree``: carries out a plan on arrays that exist.

Owns the moving of bytes, and the promise that a result never shares memory with host arrays.
Decides no layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from axisrules import _compat
from axisrules._errors import LeafError, NoMeshError, raise_all
from axisrules._meshes import MeshLike
from axisrules._plan import SLOT, Placement, Plan
from axisrules._planning import make_options, make_plan
from axisrules._rules import RulesLike
from axisrules._trees import flatten


class PlanOptions(TypedDict, total=False):
    """The options of ``plan``, which every action takes."""

    mesh: MeshLike | None
    rules: RulesLike | None
    taken: str
    indivisible: str
    absent: str
    unmapped: str
    unnamed: str
    fill: str | tuple[str, ...] | None
    min_bytes: int
    memory_kind: str | None
    dtype: Any


def shard_tree(tree: Any, names: Any = None, *, donate: bool = False, **options: Unpack[PlanOptions]) -> Any:
    """Places every array of a tree where the rules say.

    Plans first, so that a leaf that does not fit is an error before a byte has moved. Host arrays
    (numpy, memory maps), ``jax.Array``s and typed PRNG keys are placed; a ``ShapeDtypeStruct`` gets
    its sharding; functions, texts, ``None`` and Python scalars pass through. Tied leaves stay one
    array. An array that lies as planned is returned as it is, and one whose layout is equivalent
    moves no byte. The result never shares memory with a host array.

    Args:
        tree: The tree; it is not changed.
        names: Names in any form that ``plan`` takes.
        donate: Give up the arrays of ``tree`` that have to move, so that their memory is free
            afterwards.
        **options: The options of ``plan``: ``mesh``, ``rules``, the policies, ``unnamed``, ``fill``,
            ``min_bytes``, ``memory_kind``, ``dtype``.

    Returns:
        A tree like the input whose arrays carry the planned sharding.

    Raises:
        AxisRulesError: Something does not fit; every failure of the tree is in the one error, and
            nothing was placed.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> params = {"up": np.zeros((8, 32), np.float32)}
        >>> placed = ar.shard_tree(params, {"up": "embed mlp"}, mesh=ar.make_mesh("data=4,model=2"),
        ...                        rules={"embed": "data", "mlp": "model"})
        >>> tuple(placed["up"].sharding.spec), placed["up"].addressable_shards[0].data.shape
        (('data', 'model'), (2, 16))
    """
    flat = flatten(tree)
    plan = make_plan(tree, flat, names, make_options(**options))
    arrays = [leaf for leaf, kept in zip(flat.leaves, plan.structure.leaves, strict=True) if kept is SLOT]
    _check_sources(plan, arrays)
    return plan.structure.fill(iter(_place(plan, arrays, donate)))


def _check_sources(plan: Plan, arrays: Sequence[Any]) -> None:
    """Refuses what cannot be placed although it can be planned."""
    failures: list[LeafError] = []
    for placement, leaf in zip(plan.placements, arrays, strict=True):
        if isinstance(leaf, jax.core.Tracer):
            failures.append(
                LeafError(
                    "an array that is being traced cannot be placed",
                    paths=[placement.path],
                    fix="inside jit use axisrules.constrain.",
                )
            )
        elif isinstance(leaf, jax.Array) and leaf.is_deleted():
            failures.append(
                LeafError(
                    "the array was deleted or donated before",
                    paths=[placement.path],
                    fix="pass the array that took its place.",
                )
            )
    raise_all(failures)
    concrete = [leaf for leaf in arrays if not isinstance(leaf, jax.ShapeDtypeStruct)]
    if concrete and isinstance(plan.mesh, AbstractMesh):
        raise NoMeshError(
            "the mesh has no devices to place arrays on",
            fix='pass mesh=axisrules.make_mesh("data=4,model=2"); sizes alone suffice for axisrules.plan.',
        )


def _place(plan: Plan, arrays: Sequence[Any], donate: bool) -> list[Any]:
    """The arrays where the plan puts them, each distinct one once."""
    placed: dict[str, Any] = {}
    host: list[tuple[Placement, Any, NamedSharding]] = []
    device: list[tuple[Placement, Any, NamedSharding]] = []
    for placement, leaf, sharding in zip(plan.placements, arrays, plan.flat_shardings, strict=True):
        if placement.tied_to is not None:
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct):
            placed[placement.path] = jax.ShapeDtypeStruct(
                placement.shape, placement.dtype, sharding=sharding, weak_type=leaf.weak_type
            )
        elif not isinstance(leaf, jax.Array):
            host.append((placement, leaf, sharding))
        elif leaf.sharding == sharding and leaf.dtype == placement.dtype:
            placed[placement.path] = leaf
        else:
            device.append((placement, leaf, sharding))
    placed.update(_place_host(host))
    placed.update(_place_device(device, donate))
    return [placed[placement.tied_to or placement.path] for placement in plan.placements]


def _place_host(work: Sequence[tuple[Placement, Any, NamedSharding]]) -> dict[str, Any]:
    if not work:
        return {}
    sources = [_independent(np.asarray(leaf), placement, to) for placement, leaf, to in work]
    shardings = [sharding for _, _, sharding in work]
    if shardings[0].is_fully_addressable:
        made = jax.device_put(sources, shardings)
    else:  # each process builds its own shards; device_put would compare the values across them
        made = [
            jax.make_array_from_callback(source.shape, sharding, source.__getitem__)
            for source, sharding in zip(sources, shardings, strict=True)
        ]
    jax.block_until_ready(made)  # the source may change as soon as the call returns
    return {placement.path: array for (placement, _, _), array in zip(work, made, strict=True)}


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


def _place_device(work: Sequence[tuple[Placement, Any, NamedSharding]], donate: bool) -> dict[str, Any]:
    if not work:
        return {}
    sources = [
        leaf if leaf.dtype == placement.dtype else leaf.astype(placement.dtype) for placement, leaf, _ in work
    ]
    made = jax.device_put(sources, [sharding for _, _, sharding in work])
    if donate:
        jax.block_until_ready(made)
        for (_, leaf, _), array in zip(work, made, strict=True):
            if not _shares_memory(leaf, array):
                leaf.delete()
    return {placement.path: array for (placement, _, _), array in zip(work, made, strict=True)}


def _shares_memory(one: jax.Array, other: jax.Array) -> bool:
    return not _pointers(one).isdisjoint(_pointers(other))


def _pointers(array: jax.Array) -> set[int]:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
