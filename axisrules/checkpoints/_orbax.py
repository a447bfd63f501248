"""Orbax checkpoints, restored onto another mesh, number of devices or rule set.

Owns what Orbax has to be told: its public calls do the reading. Decides no layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jax.sharding import NamedSharding

from axisrules._errors import CheckpointError, LeafError, raise_all
from axisrules._extras import extra_module
from axisrules._leaves import describe
from axisrules._meshes import need_devices
from axisrules._options import PlanOptions, make_options
from axisrules._plan import SLOT, Placement, Plan
from axisrules._planning import make_plan
from axisrules._processes import agree, attempt
from axisrules._text import did_you_mean
from axisrules._trees import flatten
from axisrules.checkpoints._folders import PathLike

_TREE, _STEP = "_METADATA", "_CHECKPOINT_METADATA"  # what Orbax puts beside a tree, and beside a step
_VARIABLE = ("value", "raw_value", "get_raw_value")  # the last segment of what NNX variables are saved as


def restore_orbax(
    path: PathLike,
    names: Any = None,
    *,
    target: Any = None,
    check: bool = True,
    **options: Unpack[PlanOptions],
) -> Any:
    """Restores an Orbax checkpoint onto a mesh, whatever mesh it was saved on.

    Plans from the metadata of the checkpoint first, so that an array that does not fit is an error
    before anything is read; Orbax then reads each shard to where it goes.

    Args:
        path: The directory of a tree, as it was given to Orbax; or that of a step of a
            ``CheckpointManager`` with one item.
        names: Names in any form that ``plan`` takes, for ``target`` if there is one, else for the
            tree that was saved.
        target: A tree or module like the one that was saved, of arrays or ``ShapeDtypeStruct``s: what
            is restored comes back in its structure and its dtypes, and what it lacks is left out. By
            default nested dicts and lists, as Orbax keeps them.
        check: On several processes, whether they first make sure that they do the same.
        **options: The options of ``plan``: ``mesh``, ``rules``, the policies, ``unnamed``, ``fill``,
            ``min_bytes``, ``memory_kind``, and ``dtype``, to which floating-point arrays are cast.

    Returns:
        The restored tree; its arrays carry the planned sharding.

    Raises:
        CheckpointError: There is no such checkpoint, or ``target`` does not fit it.
        ProcessError: Another process failed, or would do something else.
        AxisRulesError: Something does not fit; every failure of the tree is in the one error.

    Example:
        >>> import axisrules as ar, numpy as np, tempfile
        >>> import orbax.checkpoint as ocp
        >>> where = f"{tempfile.mkdtemp()}/params"
        >>> with ocp.StandardCheckpointer() as checkpointer:
        ...     checkpointer.save(where, {"up": np.ones((8, 32), np.float32)})
        >>> params = ar.checkpoints.restore_orbax(where, {"up": "embed mlp"},
        ...     mesh=ar.make_mesh("data=4,model=2"), rules={"embed": "data", "mlp": "model"})
        >>> params["up"].addressable_shards[0].data.shape
        (2, 16)
    """
    outcome = attempt(lambda: _prepare(path, names, target, options))
    if isinstance(outcome, Exception):
        return agree(outcome, mesh=options.get("mesh"), check=check)  # raises
    plan = agree(outcome.plan, check=check)
    return agree(attempt(lambda: _restore(outcome)), mesh=plan.mesh, check=check)


class _Saved(NamedTuple):
    """The tree of a checkpoint: what stands at each leaf, and how to rebuild it."""

    where: Path
    paths: list[str]
    leaves: list[Any]  # `ShapeDtypeStruct`s, and Python scalars in place of those that were saved
    treedef: Any


class _Work(NamedTuple):
    """What is to be restored, and where it goes."""

    saved: _Saved
    plan: Plan
    target: list[tuple[str | None, Any]]  # of every leaf the path in the checkpoint, and what else it is


def is_orbax(path: Path) -> bool:
    """Whether a directory is, or holds, what Orbax saved."""
    return path.is_dir() and ((path / _TREE).exists() or (path / _STEP).exists() or bool(_steps(path)))


def open_orbax(path: PathLike) -> Any:
    """The tree of a checkpoint with ``ShapeDtypeStruct``s for its arrays; reads metadata alone."""
    saved = _saved(path)
    return saved.treedef.unflatten(saved.leaves)


def _steps(path: Path) -> list[str]:
    steps = [child.parent.name for child in path.glob(f"*/{_STEP}")]
    return sorted(steps, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def _item(path: Path) -> Path:
    """The directory that holds a tree."""
    if (path / _TREE).exists():
        return path
    items = sorted(child.parent for child in path.glob(f"*/{_TREE}"))
    steps = _steps(path) if not (path / _STEP).exists() else []
    if len(items) == 1 and not steps:
        return items[0]
    found = steps or [item.name for item in items]
    if not path.is_dir() or not found:
        raise CheckpointError(
            f"{path} holds no Orbax checkpoint of a tree",
            paths=[str(path)],
            fix="pass the directory that was given to save; one that Orbax has not finished has no metadata.",
        )
    raise CheckpointError(
        f"{path} holds {len(found)} {'steps' if steps else 'items'}"
        if len(found) > 1
        else f"{path} holds a step",
        paths=[str(path / name) for name in found],
        listing=found,
        fix=f"pass the path of one, such as {str(path / found[-1])!r}.",
    )


def _orbax() -> Any:
    return extra_module(
        "orbax.checkpoint", package="orbax-checkpoint", extra="orbax", purpose="Orbax checkpoints"
    )


_FAILURES = (ValueError, OSError, KeyError, TypeError, RuntimeError, NotImplementedError)


def _saved(path: PathLike) -> _Saved:
    where = _item(Path(path).absolute())
    orbax = _orbax()
    try:
        with orbax.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(where)
    except _FAILURES as cause:
        raise CheckpointError(
            f"Orbax cannot read the metadata of {where}: {cause}", paths=[str(where)]
        ) from cause
    found = getattr(found, "item_metadata", found)
    tree = getattr(found, "tree", found)
    if tree is None:
        raise CheckpointError(
            f"Orbax finds no metadata of a tree in {where}; is it damaged?", paths=[str(where)]
        )
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    described = [_struct(leaf) for leaf in leaves]
    flat = flatten(treedef.unflatten(described))
    return _Saved(where, flat.paths, described, treedef)


def _struct(leaf: Any) -> Any:
    """What stands for a leaf of the metadata."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return "" if "String" in type(leaf).__name__ else leaf
    if "Scalar" in type(leaf).__name__:
        return 0.0 if np.dtype(dtype).kind == "f" else 0
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _prepare(path: PathLike, names: Any, target: Any, options: Mapping[str, Any]) -> _Work:
    checked = make_options(**options)
    instead = "to plan alone, pass the tree of axisrules.checkpoints.open to axisrules.plan."
    need_devices(checked.mesh, "restore arrays onto", instead)
    saved = _saved(path)
    tree = saved.treedef.unflatten(saved.leaves) if target is None else target
    flat = flatten(tree)
    plan = make_plan(tree, flat, names, checked)
    slots = [leaf is SLOT for leaf in plan.structure.leaves]
    places = _places(saved)
    arrays = [
        (path, places.get(path), leaf)
        for path, leaf, slot in zip(flat.paths, flat.leaves, slots, strict=True)
        if slot
    ]
    raise_all(_unlike(saved, arrays))
    kept = [None if slot else leaf for leaf, slot in zip(flat.leaves, slots, strict=True)]
    return _Work(saved, plan, [(places.get(path), leaf) for path, leaf in zip(flat.paths, kept, strict=True)])


def _places(saved: _Saved) -> dict[str, str]:
    """By the path of a leaf in a target, its path in the checkpoint."""
    places = {path: path for path in saved.paths}
    for path in saved.paths:
        above, _, last = path.rpartition("/")
        if last in _VARIABLE:
            places.setdefault(above, path)
    return places


def _unlike(saved: _Saved, arrays: list[tuple[str, str | None, Any]]) -> Iterator[CheckpointError]:
    """What a target has, and the checkpoint has not or has otherwise."""
    missing = [path for path, place, _ in arrays if place is None]
    if missing:
        hint = did_you_mean(missing[0], saved.paths) if len(missing) == 1 else ""
        yield CheckpointError(
            f"{saved.where} lacks arrays of the target{hint}",
            paths=missing,
            listing=missing,
            fix="restore into a tree like the one that was saved; axisrules.checkpoints.open shows it.",
        )
    stored = dict(zip(saved.paths, saved.leaves, strict=True))
    for path, place, leaf in arrays:
        if place is None:
            continue
        shape, dtype = getattr(stored[place], "shape", ()), getattr(stored[place], "dtype", leaf.dtype)
        if tuple(leaf.shape) != shape:
            yield CheckpointError(
                f"the target has the shape {tuple(leaf.shape)!r}, the checkpoint {shape!r}",
                paths=[path],
                fix="restore into a tree of the saved shapes.",
            )
        elif _is_float(dtype) != _is_float(leaf.dtype):
            yield CheckpointError(
                f"the target is {leaf.dtype}, the checkpoint {dtype}",
                paths=[path],
                fix="restore into a tree of like dtypes.",
            )


def _is_float(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


def _restore(work: _Work) -> Any:
    """The tree, read by Orbax."""
    orbax, saved, plan = _orbax(), work.saved, work.plan
    placed = zip(plan.placements, plan.flat_shardings, strict=True)
    slots = [leaf is SLOT for leaf in plan.structure.leaves]
    aims = {place: next(placed) for (place, _), slot in zip(work.target, slots, strict=True) if slot}
    wanted = {place for place, _ in work.target}
    item = [
        _aim(leaf, aims[path]) if path in aims else leaf if path in wanted else orbax.PLACEHOLDER
        for path, leaf in zip(saved.paths, saved.leaves, strict=True)
    ]
    found = dict(zip(saved.paths, _read(orbax, saved, item), strict=True))
    values = {place: _settle(found[place], *aim) for place, aim in aims.items() if place is not None}
    return plan.structure.rebuild(
        [
            values[place or ""] if place in values else _replaced(found, place, leaf)
            for place, leaf in work.target
        ]
    )


def _replaced(found: Mapping[Any, Any], place: str | None, leaf: Any) -> Any:
    """What stands in the place of a leaf that is no array: a scalar or a text as it was saved."""
    return found[place] if place in found and isinstance(leaf, (int, float, complex, str)) else leaf


def _aim(leaf: Any, aim: tuple[Placement, NamedSharding]) -> Any:
    """What tells Orbax how to restore an array."""
    placement, sharding = aim
    if _may_not_fit(leaf, placement):  # Orbax would cut the values off: look at them first
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(placement.shape, placement.dtype, sharding=sharding)


def _may_not_fit(leaf: Any, placement: Placement) -> bool:
    return leaf.dtype.kind in "iu" and leaf.dtype.itemsize > placement.dtype.itemsize


def _read(orbax: Any, saved: _Saved, item: list[Any]) -> list[Any]:
    tree = saved.treedef.unflatten(item)
    arguments = orbax.checkpoint_utils.construct_restore_args(tree)
    try:
        with orbax.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(
                saved.where, args=orbax.args.PyTreeRestore(item=tree, restore_args=arguments)
            )
    except _FAILURES as cause:
        raise CheckpointError(
            f"Orbax cannot restore {saved.where}: {cause}", paths=[str(saved.where)]
        ) from cause
    return list(saved.treedef.flatten_up_to(found))


def _settle(value: Any, placement: Placement, sharding: NamedSharding) -> jax.Array:
    """An array as planned; one that Orbax left on the host is checked and placed."""
    if isinstance(value, jax.Array):
        return value
    try:
        describe(value)
    except LeafError as error:
        raise error.at([placement.path]) from None
    host = np.array(value, placement.dtype)  # never shares memory with what Orbax holds
    return jax.make_array_from_callback(placement.shape, sharding, lambda index: host[index].copy())
