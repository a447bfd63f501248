"""What compilers said of one transformer step, and that step, for the tests of prices."""

import json
import sys
import types
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

import axisrules as ar

DATA = Path(__file__).parent / "data"
TRUTH = {one["name"]: one for one in json.loads((DATA / "pricing/truth.json").read_text())}
HARDWARE = {"tpu": "TPU v5e", "gpu": "H100", "cpu": None}


@cache
def step_module():
    """The step that was compiled."""
    module = types.ModuleType("pricing_step")
    sys.modules[module.__name__] = module
    exec((DATA / "pricing/step.txt").read_text(), module.__dict__)
    return module


def plan_of(entry, rename=str, rename_axis=str):
    """The plan of the parameters of an entry, under any other names."""
    params = {
        path: jax.ShapeDtypeStruct(tuple(one["shape"]), jnp.dtype(one["dtype"]))
        for path, one in entry["params"].items()
    }
    names = {path: tuple(map(rename, one["logical"])) for path, one in entry["params"].items()}
    return ar.plan(params, names, mesh=mesh_of(entry, rename_axis), **rules_of(entry, rename, rename_axis))


def mesh_of(entry, rename_axis=str):
    return {rename_axis(axis): size for axis, size in entry["mesh"].items()}


def rules_of(entry, rename=str, rename_axis=str):
    def axes(given):
        return rename_axis(given) if isinstance(given, str) else tuple(map(rename_axis, given))

    rules = [(rename(name), axes(given)) for name, given in entry["rules"].items()]
    return {"rules": rules, "unmapped": "replicate", "indivisible": "next"}


def batch_of(entry):
    """The plan of the batch of an entry."""
    shape = (entry["config"]["B"], entry["config"]["S"])
    leaves = [jax.ShapeDtypeStruct(shape, jnp.int32)] * 2
    return ar.plan(leaves, ["batch seq"] * 2, mesh=entry["mesh"], **rules_of(entry))


def entry_of(layout, mesh, scan=True):
    """What an entry would hold of any layout and mesh."""
    step = step_module()
    table = step.table(step.Cfg(scan=scan))
    params = {
        path: {"shape": shape, "dtype": "bfloat16", "logical": names}
        for path, (shape, names) in table.items()
    }
    return {"params": params, "mesh": mesh, "rules": step.LAYOUTS[layout]}


def lowered(layout, mesh, **config):
    """The step with its arguments on an abstract mesh, as ``measure`` takes them."""
    step = step_module()
    on = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    cfg = step.Cfg(**config)
    arguments, _ = step.abstract(cfg, on, step.LAYOUTS[layout])
    return step.make_step(cfg, on, step.LAYOUTS[layout]), arguments


class Adam:
    """The optimizer of the step: two moments in float32."""

    @staticmethod
    def init(params):
        def zeros():
            return jax.tree.map(lambda one: jnp.zeros(one.shape, jnp.float32), params)

        return {"m": zeros(), "v": zeros()}


def model(name):
    """The arrays and names of a known model."""
    tree, names = {}, {}
    for one in json.loads((DATA / f"models/{name}.json").read_text())["params"]:
        words = []
        for word in one["names"]:
            words.append(f"{word}_out" if word is not None and word in words else word)
        for number in range(one["repeat"]):
            path = one["path"].replace("{i}", str(number))
            tree[path] = jax.ShapeDtypeStruct(tuple(one["shape"]), jnp.bfloat16)
            names[path] = tuple(words)
    return tree, names


MODELS = sorted(path.stem for path in (DATA / "models").glob("*.json"))
