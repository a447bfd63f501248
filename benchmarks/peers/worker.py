"""Serves one adapter: inputs as JSON on stdin, what the peer made of them as JSON on stdout.

It times every call and writes results down in the same way for every peer, and
it refuses to judge: `judge.py` does that, in another process, for all of them.

An adapter has any of ``resolve``, ``plan``, ``shard_tree``, ``constraint``, ``init`` and ``restore``. Each
takes a `Case` and returns a function without arguments, which is what is timed. Its result is a tree of
whatever the peer makes: ``read(result)`` turns it into leaves by path, a ``PartitionSpec``, a sharding or
an array each, and is not timed; without one, the tree is flattened. ``scope(case)`` may enter a context.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from cases import Case, NotApplicableError, flat, mesh_of, nest, prepare
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def perform(adapter: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """What came of one input: leaves, an error, or the reason why the peer cannot take it."""
    try:
        case = prepare(raw)
        if not hasattr(adapter, case.call):
            raise NotApplicableError(adapter.lacks[case.call])
        with (
            _checkpoint(case) as case,
            warnings.catch_warnings(record=True) as caught,
            _scope(adapter, case),
            _gathers() as gathered,
        ):
            warnings.simplefilter("always")
            outcome = _called(adapter, case)
        outcome["gathered"] = gathered
        outcome["warned"] = [str(one.message) for one in caught if one.category is not DeprecationWarning]
    except NotApplicableError as reason:
        return {"na": str(reason)}
    except Exception as error:  # whatever a peer refuses an input with is its answer
        return {"error": type(error).__name__, "message": str(error)}
    return outcome


def _scope(adapter: Any, case: Case) -> Any:
    return adapter.scope(case) if hasattr(adapter, "scope") else contextlib.nullcontext()


@contextlib.contextmanager
def _checkpoint(case: Case) -> Any:
    """The case, for a restore with its values saved from the mesh that it names, or from one device."""
    if case.call != "restore":
        yield case
        return
    sizes = case.raw.get("saved_mesh", {})
    mesh = mesh_of({"mesh": sizes})
    with tempfile.TemporaryDirectory() as folder, _orbax() as checkpointer:
        saved = Path(folder) / "saved"
        placed = {
            path: jax.device_put(
                array, mesh and NamedSharding(mesh, PartitionSpec(*list(sizes)[: array.ndim]))
            )
            for path, array in case.arrays.items()
        }
        checkpointer.save(saved, nest(placed))
        checkpointer.wait_until_finished()
        yield replace(case, checkpoint=saved)


def _orbax() -> Any:
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


def restored(case: Case, layout: dict[str, Any]) -> Any:
    """What Orbax restores under the layout of a peer, which leaves the call to its user."""
    targets = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(layout[path], case.mesh))
        for path, leaf in case.tree.items()
    }
    with _orbax() as checkpointer:
        return checkpointer.restore(case.checkpoint, nest(targets))


@contextlib.contextmanager
def _gathers() -> Any:
    """Note the bytes of every value that goes through the host to all other processes."""
    names, noted = ("process_allgather", "broadcast_one_to_all"), []

    def noting(function: Any) -> Any:
        def noted_call(tree: Any, *args: Any, **options: Any) -> Any:
            noted.extend(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))
            return function(tree, *args, **options)

        return noted_call

    before = {name: getattr(multihost_utils, name) for name in names}
    for name, function in before.items():
        setattr(multihost_utils, name, noting(function))
    try:
        yield noted
    finally:
        for name, function in before.items():
            setattr(multihost_utils, name, function)


def _called(adapter: Any, case: Case) -> dict[str, Any]:
    run = getattr(adapter, case.call)(case)
    start = perf_counter()
    result = _elsewhere(run) if case.raw.get("thread") else _done(run())
    outcome: dict[str, Any] = {"first": perf_counter() - start}
    if "repeat" in case.raw:
        outcome["again"] = _again(run, **case.raw["repeat"])
    outcome["report"] = getattr(result, "report", [])
    result = _read(adapter, result)
    outcome["leaves"] = {path: written(leaf, path, case) for path, leaf in result.items()}
    if case.call == "shard_tree" and not case.options.get("donate"):
        second = _read(adapter, getattr(adapter, case.call)(replace(case, arrays=result))())
        outcome["moved"] = [path for path in result if _buffers(result[path]) != _buffers(second[path])]
    return outcome


def _elsewhere(run: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def _done(result: Any) -> Any:
    jax.block_until_ready(getattr(result, "leaves", result))
    return result


def _read(adapter: Any, result: Any) -> dict[str, Any]:
    tree = getattr(result, "leaves", result)
    return adapter.read(tree) if hasattr(adapter, "read") else flat(tree)


def _again(run: Any, rounds: int, number: int) -> float:
    """Seconds of a later call: the median of rounds of so many calls each."""
    times = []
    for _ in range(rounds):
        start = perf_counter()
        for _ in range(number):
            result = run()
        _done(result)
        times.append((perf_counter() - start) / number)
    return median(times)


def _buffers(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return None
    return sorted((shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards)


def written(leaf: Any, path: str, case: Case) -> dict[str, Any]:
    """One leaf of a result as plain data.

    A spec alone has not met the array yet: JAX's own check of both on the mesh is part of the answer.
    """
    if isinstance(leaf, jax.Array):
        return _array(
            leaf,
            case.arrays.get(path) if case.call in ("shard_tree", "constraint", "restore") else None,
        )
    sharding = _sharding(leaf, case.mesh)
    if not isinstance(sharding, NamedSharding):
        return {"other": type(leaf).__name__}
    shape = case.tree[path].shape if path in case.tree else leaf.shape
    if len(sharding.spec) > len(shape):
        raise ValueError(f"{sharding.spec} for an array of {len(shape)} dimensions")
    sharding.shard_shape(shape)
    return {"tiles": _tiles(sharding, shape) if isinstance(sharding.mesh, Mesh) else None}


def _sharding(leaf: Any, mesh: Mesh | None) -> Any:
    """That of a leaf, which is a spec, a sharding, or has one."""
    found = getattr(leaf, "sharding", leaf)
    return NamedSharding(mesh, found) if isinstance(found, PartitionSpec) and mesh is not None else found


def _array(array: jax.Array, source: Any) -> dict[str, Any]:
    kept = source is None or all(
        np.array_equal(shard.data, np.asarray(source)[shard.index]) for shard in array.addressable_shards
    )
    axes = getattr(array.sharding, "mesh", None)
    types = {} if axes is None else {a: t.name for a, t in zip(axes.axis_names, axes.axis_types, strict=True)}
    tiles = _tiles(array.sharding, array.shape)
    return {"tiles": tiles, "kept": kept, "types": types, "object": id(array)}


def _tiles(sharding: Any, shape: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """By the place of a device among all, the half-open range of every dimension that it holds."""
    found = sharding.devices_indices_map(tuple(shape))
    place = {device: number for number, device in enumerate(jax.devices())}  # ids have gaps between processes
    return {
        str(place[device]): [list(part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]
        for device, index in found.items()
    }


def reported(leaves: dict[str, Any], report: list[dict[str, Any]]) -> SimpleNamespace:
    """Leaves together with what the peer has to say about them."""
    return SimpleNamespace(leaves=leaves, report=report)


def serve(adapter: Any) -> None:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:  # which is all that stdout holds
        os.dup2(2, 1)
        _start(request)
        versions = {
            name: importlib.metadata.version(name) for name in dict.fromkeys(("jax", *adapter.packages))
        }
        answers = [perform(adapter, raw) for raw in request["inputs"]]
        json.dump({"versions": versions, "answers": answers}, answer)


def _start(request: dict[str, Any]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", request["devices"])
    if "process" in request:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            request["address"], num_processes=request["processes"], process_id=request["process"]
        )
