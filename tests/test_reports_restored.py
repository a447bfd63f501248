"""Inputs after public bug reports that are about restoring, and about several processes."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import run_processes

import axisrules as ar

REPORTS = {one["id"]: one for one in json.loads((Path(__file__).parent / "data/reports.json").read_text())}


def values(one):
    return {
        path: np.arange(np.prod(leaf["shape"], dtype=int), dtype=leaf["dtype"]).reshape(leaf["shape"])
        for path, leaf in one["tree"].items()
    }


@pytest.mark.parametrize("report", ["I11", "I12", "I13"])
def test_a_checkpoint_is_restored_as_the_report_asks(report, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    one = REPORTS[report]
    (run,) = one["expect"]
    truth = values(one)
    saved = {"w": 8} if "saved_mesh" in one else {"w": 1}  # as many devices as this machine has
    before = Mesh(np.array(jax.devices()[: saved["w"]]), ("model",))
    spec = {path: P("model") if array.ndim else P() for path, array in truth.items()}
    placed = {path: jax.device_put(array, NamedSharding(before, spec[path])) for path, array in truth.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", placed)
    names = {path: tuple(leaf["names"]) for path, leaf in one["tree"].items()}
    types = {axis: kind.lower() for axis, kind in one.get("mesh_axis_types", {}).items()}
    devices = jax.devices()[: int(np.prod(list(one["mesh"].values())))]
    mesh = ar.make_mesh(one["mesh"], axis_types=types, devices=devices)
    rules = ar.Rules(one["rules"])
    restored = ar.checkpoints.restore_orbax(tmp_path / "saved", names, mesh=mesh, rules=rules)
    abstract = ar.plan(ar.checkpoints.open(tmp_path / "saved"), names, mesh=mesh, rules=rules).abstract
    for path, entries in run["specs"].items():
        assert restored[path].sharding == abstract[path].sharding == NamedSharding(mesh, P(*entries))
        assert restored[path].sharding.mesh.axis_types == mesh.axis_types
        np.testing.assert_array_equal(restored[path], truth[path])


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
    processes = REPORTS["I04"]["processes"]
    assert run_processes(SCRIPT, processes, 8 // processes, timeout=120) == ["right\n"] * processes
