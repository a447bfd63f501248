"""The plan of a whole model, against Flax resolving its names alone, and per leaf as it grows."""

import json
from pathlib import Path

import flax.linen as nn
import jax
import pytest

import axisrules as ar
from benchmarks.measure import Row, duration, faster, interleaved

_PARAMS = json.loads(
    (Path(__file__).parents[1] / "tests" / "data" / "models" / "llama3-405b.json").read_text()
)["params"]
BLOCKS = 126


def model(blocks):
    """The parameters with so many blocks, and their names: nested dicts."""
    tree, names = {}, {}
    for param in _PARAMS:
        for number in range(blocks if param["repeat"] == BLOCKS else 1):
            segments = param["path"].format(i=number).split("/")
            _put(tree, segments, jax.ShapeDtypeStruct(tuple(param["shape"]), "bfloat16"))
            _put(names, segments, tuple(param["names"]))
    return tree, names


def _put(tree, segments, leaf):
    for segment in segments[:-1]:
        tree = tree.setdefault(segment, {})
    tree[segments[-1]] = leaf


def name_table():
    return ar.NameTable({param["path"].format(i="*"): tuple(param["names"]) for param in _PARAMS})


def test_405b(benchmark, table, published):
    tree, names = model(BLOCKS)
    per_leaf = jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, tuple))
    assert len(per_leaf) == 1137

    def ours():  # rules that have decided nothing yet
        rules = ar.Rules(published.pairs)
        return ar.plan(tree, names, mesh=published.mesh, rules=rules, indivisible="next")

    def theirs():
        return [nn.logical_to_mesh_axes(names, published.pairs) for names in per_leaf]

    times = interleaved(benchmark, ours, theirs, rounds=20)
    what = "first plan of a 405B model, 1,137 leaves on 8,192 devices"
    table.append(faster(what, times, "flax.linen, names alone", 2))


@pytest.mark.parametrize("form", ["a tree of names", "a NameTable"])
@pytest.mark.parametrize(("blocks", "size", "rounds"), [(1111, "10,000", 10), (11111, "100,000", 4)])
def test_growth(benchmark, table, published, form, blocks, size, rounds):
    # One large tree, against as many leaves in trees of 1,137: the same work on the same amount of
    # memory, so that what is compared is the growth and not the processor's caches.
    def planning(trees):
        def run():
            options = {"mesh": published.mesh, "rules": published.rules, "indivisible": "next"}
            return [ar.plan(tree, of_names or names, **options) for tree, names in trees]

        return run

    of_names = name_table() if form == "a NameTable" else None
    large, few = [model(blocks)], [model(BLOCKS) for _ in range(blocks // BLOCKS)]
    one, many = interleaved(benchmark, planning(large), planning(few), rounds)
    one, many = one / (3 + 9 * blocks), many / (3 + 9 * BLOCKS) / len(few)
    table.append(
        Row(
            f"plan of {size} leaves, {form}, per leaf",
            duration(one),
            f"plans of 1,137 leaves: {duration(many)}",
            f"{one / many:.2f}x",
            "1.3x at most",
            one <= 1.3 * many,
        )
    )
