"""What the processes of one program have to agree on before any of them acts.

Owns the exchange: failures and digests of plans go to all processes before one raises, so that none
waits for another that has given up. Decides nothing about layouts. In a program of one process, or
for a mesh whose devices are all this process's own, nothing is exchanged.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axisrules import _compat
from axisrules._errors import ProcessError
from axisrules._meshes import MeshLike, need_mesh
from axisrules._plan import Plan
from axisrules._text import format_axes, format_mesh, format_spec

T = TypeVar("T")
Facts: TypeAlias = Mapping[str, str]

_FAILED = "failed"
_DIGEST = 32  # bytes, and 8 more with the length of what can be asked for
_PLURALS = {"array": "arrays", "file": "files", "memory": "memory kind"}
_LINES = 5  # differences that an error shows


def attempt(work: Callable[[], T]) -> T | Exception:
    """What the work gives, or the error that it raises, to be told to others before it is raised.

    Any error, not only those of axisrules: the other processes would wait for one that is gone.
    """
    try:
        return work()
    except Exception as error:
        return error


def agree(
    outcome: T | Exception,
    *,
    mesh: MeshLike | None = None,
    check: bool = True,
    facts: Callable[[], Facts] | None = None,
) -> T:
    """The outcome, once every process of the mesh has one like it.

    Every process whose devices are in the mesh has to call this; one that cannot say what the mesh
    is, exchanges with all processes of the program.

    Args:
        outcome: What a step of the work came to here (see ``attempt``); a ``Plan`` must be the same
            on all processes.
        mesh: The mesh, where the outcome is no plan.
        check: Whether to exchange anything; ``False`` only raises what failed here.
        facts: More that must be the same on all processes: texts by what they are about.

    Raises:
        Exception: The outcome is an error: that error.
        ProcessError: It failed on another process, or came to something else there.
    """
    if check and jax.process_count() > 1 and not _compat.in_trace():
        devices = _one_device_each(outcome, mesh)
        if len(devices) > 1 and jax.process_index() in devices:
            more = attempt(facts) if facts and not isinstance(outcome, Exception) else {}
            outcome = more if isinstance(more, Exception) else outcome
            _exchange(outcome, devices, more)
    if isinstance(outcome, Exception):
        try:
            raise outcome
        finally:
            del outcome  # its traceback holds this frame, and arrays that were placed before it
    return outcome


def plan_facts(plan: Plan) -> dict[str, str]:
    """A plan as texts that are equal on all processes for equal plans."""
    devices = [device.id for device in plan.mesh.devices.flat] if isinstance(plan.mesh, Mesh) else []
    types = ", ".join(kind.name for kind in plan.mesh.axis_types)
    facts = {
        "mesh": f"{format_mesh(dict(plan.mesh.shape_tuple))} ({types}) of devices {devices}",
        "rules": "; ".join(f"{name} -> {format_axes(_axes(axes))}" for name, axes in plan.rules),
        "memory": plan.memory_kind or "default",
    }
    for one in plan.placements:
        facts[f"array {one.path}"] = f"{one.dtype} {one.shape!r} {format_spec(one.spec)}"
    return facts


def _axes(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _one_device_each(outcome: Any, mesh: MeshLike | None) -> dict[int, jax.Device]:
    """The first device of every process that takes part."""
    given = outcome.mesh if isinstance(outcome, Plan) else attempt(lambda: need_mesh(mesh))
    devices = list(given.devices.flat) if isinstance(given, Mesh) else jax.devices()
    first: dict[int, jax.Device] = {}
    for device in sorted(devices, key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    return first


def _exchange(outcome: Any, devices: Mapping[int, jax.Device], more: Any) -> None:
    """Raises where something failed elsewhere or differs; every process comes to that conclusion."""
    failed = isinstance(outcome, Exception)
    if failed:
        facts = {_FAILED: f"{type(outcome).__name__}: {getattr(outcome, 'headline', outcome)}"}
    else:
        facts = {**(plan_facts(outcome) if isinstance(outcome, Plan) else {}), **more}
    text = json.dumps(facts).encode()
    mine = zlib.compress(text, 1)
    digest = bytes([failed]) + hashlib.sha256(text).digest()[1:] + len(mine).to_bytes(8, "little")
    digests = _gather(digest, _DIGEST + 8, devices)
    heads = {process: row[:_DIGEST] for process, row in digests.items()}
    if not any(head[0] for head in heads.values()) and len(set(heads.values())) == 1:
        return
    size = max(int.from_bytes(row[_DIGEST:], "little") for row in digests.values())
    texts = _gather(mine, size, devices)
    told = {process: json.loads(zlib.decompressobj().decompress(texts[process])) for process in sorted(texts)}
    if not failed:  # what failed here is raised as it is
        raise _disagreement(told)


def _gather(mine: bytes, size: int, devices: Mapping[int, jax.Device]) -> dict[int, bytes]:
    """The bytes of every process, padded to one size."""
    processes = sorted(devices)
    row = np.frombuffer(mine.ljust(size, b"\0"), np.uint8)[None]
    mesh = Mesh(np.asarray([devices[process] for process in processes], object), ("process",))
    sharded = NamedSharding(mesh, PartitionSpec("process"))
    with jax.set_mesh(mesh):  # one that is active here has other devices
        rows = jax.make_array_from_callback((len(processes), size), sharded, lambda index: row)
        whole = np.asarray(_copier(mesh)(rows).addressable_shards[0].data)
    return {process: whole[number].tobytes() for number, process in enumerate(processes)}


@lru_cache(maxsize=16)
def _copier(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """What gives every device of the mesh all rows."""
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _disagreement(told: Mapping[int, Facts]) -> ProcessError:
    failed = {process: facts[_FAILED] for process, facts in told.items() if _FAILED in facts}
    if failed:
        return ProcessError(
            f"{_processes(failed)} failed, so that no process goes on",
            listing=[f"process {process}: {text}" for process, text in failed.items()],
            processes=tuple(failed),
            fix="the error there says how to mend it.",
        )
    first, *others = told
    different = [process for process in others if told[process] != told[first]]
    keys = list(dict.fromkeys(key for process in (first, *others) for key in told[process]))
    differ = [key for key in keys if len({told[process].get(key) for process in told}) > 1]
    kinds = list(dict.fromkeys(_PLURALS.get(key.partition(" ")[0], key) for key in differ))
    return ProcessError(
        f"{_processes(different)} would do something else than process {first}: other {_and(kinds)}",
        listing=list(_lines(told, [first, *different], differ)),
        processes=tuple(different),
        fix="call it with the same arguments on all processes, or pass check=False.",
    )


def _lines(told: Mapping[int, Facts], processes: Sequence[int], keys: Sequence[str]) -> Any:
    for key in keys[:_LINES]:
        for process in processes[: _LINES + 1]:
            yield f"process {process}: {key}: {told[process].get(key, 'none')}"
    if len(keys) > _LINES:
        yield f"and {len(keys) - _LINES} more"


def _processes(numbers: Any) -> str:
    listed = [str(number) for number in numbers]
    return f"process {listed[0]}" if len(listed) == 1 else f"processes {_and(listed)}"


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
