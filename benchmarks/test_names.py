"""The names of one array to its spec, against Flax with the same rules and names."""

import itertools
import random
from functools import partial

import flax.linen as nn
import pytest

import axisrules as ar
from benchmarks.measure import faster, interleaved

NAMES, SHAPE = ("embed_attn", "q_heads", "kv"), (16384, 128, 128)
FLAX = "flax.linen"


def test_rules_given(benchmark, table, published):
    ours = partial(ar.logical_to_mesh_axes, NAMES, published.rules)
    theirs = partial(nn.logical_to_mesh_axes, NAMES, published.pairs)
    times = interleaved(benchmark, ours, theirs, rounds=20, number=1000)
    table.append(faster("names to spec, `Rules` given", times, FLAX, 20))


def test_rules_active(benchmark, table, published):
    ours, theirs = partial(ar.logical_to_mesh_axes, NAMES), partial(nn.logical_to_mesh_axes, NAMES)
    with ar.map_logical_axis_names(published.rules), nn.logical_axis_rules(published.pairs):
        times = interleaved(benchmark, ours, theirs, rounds=20, number=1000)
    table.append(faster("names to spec, active rules", times, FLAX, 20))


def test_mesh_and_shape(benchmark, table, published):
    ours = partial(ar.resolve, NAMES, SHAPE, mesh=published.mesh, rules=published.rules)
    theirs = partial(nn.logical_to_mesh_axes, NAMES, published.pairs)
    times = interleaved(benchmark, ours, theirs, rounds=20, number=1000)
    table.append(faster("names, mesh and shape to resolution", times, f"{FLAX}, names alone", 10))


def test_names_never_seen(benchmark, table, published):
    known = dict.fromkeys(name for name, _ in published.pairs)
    every = list(itertools.permutations(known, 3))
    unseen = random.Random(0).sample(every, 21 * 500)
    mine, peers = iter(unseen), iter(unseen)
    times = interleaved(
        benchmark,
        lambda: ar.logical_to_mesh_axes(next(mine), published.rules),
        lambda: nn.logical_to_mesh_axes(next(peers), published.pairs),
        rounds=20, number=500,
    )  # fmt: skip
    table.append(faster("names to spec, names never seen before", times, FLAX, 1))


def test_same_raw_pairs(benchmark, table, published):
    ours = partial(ar.logical_to_mesh_axes, NAMES, published.pairs)
    theirs = partial(nn.logical_to_mesh_axes, NAMES, published.pairs)
    times = interleaved(benchmark, ours, theirs, rounds=20, number=1000)
    table.append(faster("names to spec, the same raw pairs again", times, FLAX, 1))


@pytest.mark.parametrize("form", [tuple, list])
def test_raw_pairs_never_seen(benchmark, table, published, form):
    fresh = [form([*published.pairs[:-1], (f"name_{number}", "tensor")]) for number in range(11 * 100)]
    mine, peers = iter(fresh), iter(fresh)
    times = interleaved(
        benchmark,
        lambda: ar.logical_to_mesh_axes(NAMES, next(mine)),
        lambda: nn.logical_to_mesh_axes(NAMES, next(peers)),
        rounds=10, number=100,
    )  # fmt: skip
    table.append(faster(f"names to spec, a {form.__name__} of raw pairs never seen before", times, FLAX, 1))
