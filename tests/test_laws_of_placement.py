"""The law of placement, on real arrays that hypothesis makes."""

import jax
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of
from hypothesis import given, settings
from strategies import rules, trees

import axisrules as ar

LENIENT = {"indivisible": "next", "absent": "drop", "unmapped": "replicate"}


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
@given(tree_and_names=trees(), rules=rules)
@settings(max_examples=settings.default.max_examples // 3 + 1)  # of each kind
def test_a_placed_array_reassembles_to_its_source_bit_for_bit(axis_types, tree_and_names, rules):
    tree, names = tree_and_names
    mesh = mesh_of(axis_types, "x=2,y=4,z=1")
    placed = ar.shard_tree(tree, names, mesh=mesh, rules=rules, **LENIENT)
    for source, array in zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True):
        whole = np.full(source.shape, 99).astype(source.dtype)
        for shard in array.addressable_shards:
            whole[shard.index] = np.asarray(shard.data)
        assert whole.tobytes() == source.tobytes()
