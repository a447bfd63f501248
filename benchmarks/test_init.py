"""Models that are born sharded: each construction in a process of its own, without any cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.nn import initializers
from jax.sharding import NamedSharding

import axisrules as ar
from axisrules import _programs
from benchmarks.measure import Row, duration, faster, interleaved

WAYS = ("with_axisrules", "one_jit", "eager")
DEPTHS = {32: 8, 80: 20}  # blocks: how many times as fast as one jit


def run(module, *arguments):
    """What a script of this folder prints."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if module == "peak_init":  # what is freed goes back at once: the memory of the process is what is in use
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    folder = Path(__file__).parents[1]
    shown = subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(shown)


@pytest.fixture(scope="module")
def compilations():
    """The compilations by framework and depth."""
    return {}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_transformer(benchmark, table, framework, depth, compilations):
    # One round: the peers take a minute, which no disturbance turns into seconds.
    found = {}
    benchmark.pedantic(
        lambda: found.update({way: run("cold_init", framework, depth, way) for way in WAYS}), rounds=1
    )
    ours, jitted, eager = (found[way] for way in WAYS)
    compilations[framework, depth] = ours["compilations"]
    what = f"`init` of {depth} blocks of {framework}, {ours['arrays']} arrays"
    seconds = (ours["seconds"], jitted["seconds"])
    table.append(faster(f"{what} ({ours['compilations']} compilations)", seconds, "one jit", DEPTHS[depth]))
    ratio = ours["seconds"] / eager["seconds"]
    table.append(
        Row(what, duration(ours["seconds"]), f"eager, one device: {duration(eager['seconds'])}",
            f"{ratio:.2f}x", "1.5x at most", ratio <= 1.5)
    )  # fmt: skip
    assert ours["compilations_again"] == 0


def test_compilations_do_not_grow(compilations):
    for framework in ("nnx", "equinox"):
        few = run("cold_init", framework, 8, "with_axisrules")["compilations"]
        assert {few} == {compilations[framework, depth] for depth in DEPTHS}


def test_initializers_made_per_layer(benchmark, table, mesh):
    def make():
        keys = jax.random.split(jax.random.key(0), 100)
        return [initializers.lecun_normal()(key, (256, 1024)) for key in keys]

    names, rules = [("embed", "mlp")] * 100, {"embed": "data", "mlp": "model"}

    def ours():
        jax.clear_caches()
        _programs._COMPILED.clear()
        jax.block_until_ready(ar.init(make, names, mesh=mesh, rules=rules))

    def theirs():
        jax.clear_caches()
        with jax.set_mesh(mesh):
            sharding = NamedSharding(mesh, ar.logical_to_mesh_axes(names[0], rules))
            keys = jax.random.split(jax.random.key(0), 100)
            fresh = [
                jax.jit(initializers.lecun_normal(), static_argnums=1, out_shardings=sharding) for _ in keys
            ]
            jax.block_until_ready([one(key, (256, 1024)) for one, key in zip(fresh, keys, strict=True)])

    times = interleaved(benchmark, ours, theirs, rounds=1, warmup=0)
    table.append(faster("`init` of 100 layers, an initializer each", times, "a `jax.jit` each", 15))


def test_memory(benchmark, table):
    found = benchmark.pedantic(run, args=("peak_init", 64, 16), rounds=1)
    beyond = (found["peak"] - found["final"]) / found["largest"]
    table.append(
        Row(
            f"memory of `init` of {found['final'] / 2**30:.2g} GiB in 16 arrays",
            f"{found['peak'] / 2**20:.0f} MiB at the peak",
            f"the result: {found['final'] / 2**20:.0f} MiB",
            f"+{beyond:.2f}x the largest array",
            "+3.5x at most",
            beyond <= 3.5,
        )
    )
