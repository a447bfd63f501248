"""Placing a tree, against one ``jax.device_put`` of it with ready shardings."""

import jax
import numpy as np
import pytest

import axisrules as ar
from benchmarks.measure import Row, duration, interleaved

RULES = {"rows": "data", "columns": "model"}
TREES = pytest.mark.parametrize(("count", "size"), [(2000, 64), (200, 1024)])


@pytest.fixture
def work(mesh, count, size):
    """Host arrays, and both ways to place such a tree."""
    arrays = {f"layer_{number}": np.full((size, size), number, np.float32) for number in range(count)}
    names = dict.fromkeys(arrays, ("rows", "columns"))
    shardings = dict.fromkeys(arrays, ar.create_named_sharding(mesh, "data", "model"))

    def ours(tree):
        return jax.block_until_ready(ar.shard_tree(tree, names, mesh=mesh, rules=RULES))

    def theirs(tree):
        return jax.block_until_ready(jax.device_put(tree, shardings))

    return arrays, ours, theirs


@TREES
def test_host_arrays(benchmark, table, work, count, size):
    arrays, ours, theirs = work
    mine, peers = interleaved(benchmark, lambda: ours(arrays), lambda: theirs(arrays), rounds=10)
    within = mine <= max(1.05 * peers, peers + 0.010)
    what = f"`shard_tree` of {count:,} host arrays of {size}x{size} over 8 devices"
    table.append(_row(what, mine, peers, "within 5 % or 10 ms", within))


@TREES
def test_its_own_result(benchmark, table, work, count, size):
    arrays, ours, theirs = work
    placed = ours(arrays)
    mine, peers = interleaved(benchmark, lambda: ours(placed), lambda: theirs(placed), rounds=10)
    assert ours(placed)["layer_0"] is placed["layer_0"]
    table.append(_row(f"the same of its own {count:,} results", mine, peers, "not slower", mine <= peers))


def _row(what, mine, peers, reach, reached):
    ratio = f"{mine / peers:.2f}x, {(mine - peers) * 1e3:+.1f} ms"
    return Row(what, duration(mine), f"`jax.device_put`: {duration(peers)}", ratio, reach, reached)
