"""Placing by several processes at once."""

import sys

from processes import run_processes

SCRIPT = f"""
import sys
sys.path[:0] = {sys.path!r}
import numpy as np
import axisrules as ar
from jax.experimental import multihost_utils

def refuse(*args, **kwargs):
    raise AssertionError("the values of an array were gathered")

multihost_utils.process_allgather = multihost_utils.assert_equal = refuse
own = np.arange(4096 * 64, dtype=np.float32).reshape(4096, 64) * (1 + jax.process_index())
placed = ar.shard_tree({{"w": own}}, {{"w": "embed _"}}, mesh=ar.make_mesh("data=8"), rules={{"embed": "data"}})
assert placed["w"].sharding.spec == ar.plan({{"w": own}}, {{"w": "embed _"}}, mesh="data=8", rules={{"embed": "data"}}).specs["w"]
for shard in placed["w"].addressable_shards:  # of what this process holds, whatever the others hold
    assert np.array_equal(shard.data, own[shard.index])
print("right")
"""


def test_every_process_builds_its_shards_from_what_it_holds():
    assert run_processes(SCRIPT, 2, 4, timeout=120) == ["right\n"] * 2
