"""What the command line prints for programs: results as JSON.

Owns the form of that JSON. Computes nothing; bytes are bytes, what is unknown is ``null``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from axisrules._plan import Placement
from axisrules._plan_diff import LeafChange, PlanDiff
from axisrules.cost import Change, Comparison, Memory, Score, Suggestion, Traffic


def print_json(value: Any) -> None:
    """Prints a value for programs."""
    print(json.dumps(value, indent=1, default=_plain))


def _plain(value: Any) -> Any:
    """What JSON has no word for: named tuples, specs, dtypes."""
    slots: Callable[[], dict[str, Any]] | None = getattr(value, "_asdict", None)
    return slots() if slots is not None else str(value)


def placement(one: Placement) -> dict[str, Any]:
    """One array of a plan."""
    return {
        "path": one.path,
        "shape": one.shape,
        "dtype": str(one.dtype),
        "names": one.names,
        "spec": [list(dim.axes) for dim in one.resolution.dims],
        "why": [dim._asdict() | {"skips": [s._asdict() for s in dim.skips]} for dim in one.resolution.dims],
        "shard_shape": one.shard_shape,
        "bytes": one.nbytes,
        "bytes_per_device": one.bytes_per_device,
    }


def difference(found: PlanDiff) -> dict[str, Any]:
    """What changes between two plans."""
    return {
        "bytes_per_device": [found.before.bytes_per_device, found.after.bytes_per_device],
        "received": found.received,
        "most": found.most,
        "over": found.over,
        "to_new_devices": found.to_new_devices,
        "added": found.added,
        "removed": found.removed,
        "changed": [_leaf_change(one) for one in found.changed],
    }


def _leaf_change(one: LeafChange) -> dict[str, Any]:
    return {
        "path": one.path,
        "what": one.what,
        "bytes_per_device": one.bytes_per_device,
        "received": one.received,
        "over": one.over,
        "dims": [dim._asdict() for dim in one.dims],
    }


def memory(held: Memory) -> dict[str, Any]:
    """Bytes per device by kind, and whether they fit."""
    return {
        "mesh": dict(held.mesh),
        "hardware": None if held.hardware is None else held.hardware.name,
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": dict(held.optimizer),
        "batch": held.batch,
        "host": held.host,
        "bytes_per_device": held.bytes_per_device,
        "limit": held.limit,
        "fits": held.fits,
        "free": held.free,
        "smallest_mesh": held.smallest_mesh,
        "source": held.source,
    }


def traffic(moved: Traffic) -> dict[str, Any]:
    """Bytes on the wires by mesh axis, and reasons where there is no number."""
    return {
        "wire_bytes": moved.wire_bytes,
        "wire_bytes_per_axis": moved.wire_bytes_per_axis,
        "seconds": moved.seconds,
        "seconds_per_axis": moved.seconds_per_axis,
        "reasons": dict(moved.reasons),
        "assumes": moved.assumes,
        "source": moved.source,
    }


def score(found: Score) -> dict[str, Any]:
    """What decides between two rule sets."""
    return {
        "fits": found.fits,
        "wire_bytes": found.traffic.wire_bytes,
        "seconds": found.seconds,
        "waste": found.waste,
        "bytes_per_device": found.bytes_per_device,
    }


def comparison(table: Comparison) -> dict[str, Any]:
    """Rule sets side by side, the best first."""
    rows = [
        {
            "name": row.name,
            "mesh": dict(row.mesh),
            "problem": row.problem or None,
            "memory": None if row.memory is None else _without(memory(row.memory), "mesh", "smallest_mesh"),
            "traffic": None if row.traffic is None else traffic(row.traffic),
            "waste": None if row.score is None else row.score.waste,
            "seconds": row.seconds,
            "compute_seconds": row.compute_seconds,
            "flops_source": row.flops_source or None,
            "bound": row.bound,
            "indivisible": row.indivisible,
            "idle": row.idle,
        }
        for row in table.rows
    ]
    growth = {
        name: [
            {"devices": one.devices, "bytes_per_device": one.bytes_per_device, "wire_bytes": one.wire_bytes}
            for one in sizes
        ]
        for name, sizes in table.growth.items()
    }
    winner = None if table.winner is None else {"name": table.winner.name, "mesh": dict(table.winner.mesh)}
    return {"winner": winner, "why": table.why, "rows": rows, "growth": growth, "source": table.source}


def _without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def suggestion(found: Suggestion, rules: Any) -> dict[str, Any]:
    """Rules that a search proposes, and what each change gained."""
    return {
        "rules": [[name, list(axes)] for name, axes in rules.pairs],
        "options": found.options,
        "score": score(found.score),
        "start": found.start,
        "start_score": score(found.start_score),
        "changes": [_change(one) for one in found.changes],
        "presets": {name: score(one) for name, one in found.presets.items()},
        "exact": found.exact,
        "why": found.why,
        "source": found.score.traffic.source,
    }


def _change(one: Change) -> dict[str, Any]:
    return {"name": one.name, "before": one.before, "after": one.after, "gain": one.gain}
