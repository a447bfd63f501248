"""The inputs that every peer gets: the reported ones, and those whose calls are timed.

Plain data, made without jax. The timed inputs keep to what every peer with names can express: one rule
a name, and no two dimensions of an array on one mesh axis.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "tests" / "data"
PAIR = (("embed", "data"), ("mlp", "model"))
MODEL = (
    *(("embed", "data"), ("embed_attn", "data"), ("embed_vocab", "data"), ("norm", None)),
    *(("vocab", "model"), ("mlp", "model"), ("q_heads", "model"), ("kv_heads", "model"), ("heads", "model")),
    *(("kv", None), ("kv_head_dim", None), ("batch", "data")),
)

Input = tuple[dict[str, Any], dict[str, Any]]  # a case, and one of its `expect`


def reported() -> list[Input]:
    """Every run of every report, in the order of the file."""
    cases = json.loads((DATA / "reports.json").read_text())
    return [(case, run) for case in cases for run in case["expect"]]


def devices(case: dict[str, Any]) -> int:
    """How many devices have to be simulated: all those of its meshes, or 8 without one."""
    meshes = [case[mesh] for mesh in ("mesh", "saved_mesh") if case.get(mesh)]
    return max((math.prod(sizes.values()) for sizes in meshes), default=8)


def asked(case: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """What an adapter is told: the input without its answer."""
    told = {
        key: value for key, value in case.items() if key not in ("expect", "right", "from", "kind", "note")
    }
    return {**told, "options": run["options"]}


def timed() -> dict[str, Input]:
    """By question, the input whose call is timed."""
    small = {f"block_{i}/{name}": leaf for i in range(8) for name, leaf in _block(256, 1024).items()}
    large = {f"block_{i}/{name}": leaf for i in range(16) for name, leaf in _block(256, 2048).items()}
    one = {"w": _leaf((512, 2048), ("embed", "mlp"))}
    return {
        "resolve": _timed("resolve", PAIR, one, {"rounds": 9, "number": 300}),
        "plan": _timed("plan", MODEL, _model("llama3-8b"), {"rounds": 5, "number": 1}),
        "shard_tree": _timed("shard_tree", PAIR, large, {"rounds": 5, "number": 1}),
        "init": _timed("init", PAIR, small, None),
    }


def _timed(call: str, rules: Any, tree: dict[str, Any], repeat: dict[str, int] | None) -> Input:
    axes = dict(rules)
    case = {"id": call, "call": call, "mesh": {"data": 2, "model": 4}, "rules": rules, "tree": tree}
    case["explain"] = False
    if repeat is not None:
        case["repeat"] = repeat
    specs = {path: [axes[name] for name in leaf["names"]] for path, leaf in tree.items()}
    return case, {"options": {}, "specs": specs}


def _block(width: int, hidden: int) -> dict[str, Any]:
    return {"up": _leaf((width, hidden), ("embed", "mlp")), "down": _leaf((hidden, width), ("mlp", "embed"))}


def _leaf(shape: Any, names: Any) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "float32", "names": list(names)}


def _model(name: str) -> dict[str, Any]:
    rows = json.loads((DATA / "models" / f"{name}.json").read_text())["params"]
    return {
        row["path"].replace("{i}", str(i)): _leaf(row["shape"], row["names"])
        for row in rows
        for i in range(row["repeat"])
    }
