"""Loading checkpoints, against what a user would do by hand."""

import json
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest

import axisrules as ar
from axisrules import checkpoints
from benchmarks.measure import Row, duration, faster, interleaved

RULES = {"rows": "data", "columns": "model"}
TABLE = ar.NameTable({"**": "rows columns"})
COUNT, SIZE = 16, 4096  # 1 GiB of float32
MOST = 1.1  # of the bytes placed, in anonymous memory


def write(path, arrays):
    """A safetensors file, array by array."""
    header, end = {}, 0
    for name, array in arrays.items():
        offsets = [end, end := end + array.nbytes]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(array)
    return str(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    arrays = {f"w{number}": np.full((SIZE, SIZE), number, np.float32) for number in range(COUNT)}
    return write(tmp_path_factory.mktemp("checkpoint") / "model.safetensors", arrays)


def load(file, mesh):
    return checkpoints.load_safetensors(file, TABLE, mesh=mesh, rules=RULES)


def test_a_file_against_loading_and_then_placing(benchmark, table, mesh, file):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    sharding = ar.create_named_sharding(mesh, "data", "model")

    def theirs():
        arrays = load_file(file)
        return jax.block_until_ready(jax.device_put(arrays, dict.fromkeys(arrays, sharding)))

    times = interleaved(benchmark, lambda: load(file, mesh), theirs, rounds=5)
    table.append(
        faster(
            "`load_safetensors` of 1 GiB onto 4x2 devices",
            times,
            "`load_file`, then `jax.device_put`",
            3,
        )
    )


def test_a_file_against_a_strided_copy(benchmark, table, mesh, file):
    whole = np.ones((COUNT, SIZE, SIZE), np.float32)
    rows, columns = SIZE // 4, SIZE // 2

    def copy():
        return [
            whole[n, r : r + rows, c : c + columns].copy()
            for n in range(COUNT)
            for r in range(0, SIZE, rows)
            for c in range(0, SIZE, columns)
        ]

    mine, peer = interleaved(benchmark, lambda: load(file, mesh), copy, rounds=5)
    what = "the same, and the limit of the machine"
    table.append(
        Row(
            what,
            duration(mine),
            f"a strided copy: {duration(peer)}",
            f"{mine / peer:.2f}x",
            "within 2x",
            mine <= 2 * peer,
        )
    )


PEAK = """
import sys, threading, time
sys.path[:0] = {path!r}
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import axisrules as ar
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024
mesh = ar.make_mesh("data=4,model=2")
jax.block_until_ready(jax.device_put(0, ar.create_named_sharding(mesh)))
before = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
table = ar.NameTable({{"**": "rows columns"}})
placed = ar.checkpoints.load_safetensors({file!r}, table, mesh=mesh, rules={rules!r})
done = True
thread.join()
print((peak - before) / sum(array.nbytes for array in placed.values()))
"""


def test_memory_at_the_peak(table, file):
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells how much memory is anonymous")
    script = PEAK.format(path=sys.path, file=file, rules=RULES)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    peak = float(done.stdout)
    what = "anonymous memory at the peak of that"
    table.append(
        Row(what, f"{peak:.3f}", "the bytes placed", f"{peak:.3f}x", f"{MOST}x at most", peak <= MOST)
    )


def header_of(folder, count):
    """A file of many small arrays."""
    arrays = {f"layers.{n // 9}.block.{n % 9}.weight": np.zeros((4, 4), np.float32) for n in range(count)}
    return write(folder / f"{count}.safetensors", arrays)


def test_headers_of_many_arrays(benchmark, table, tmp_path):
    few, many = header_of(tmp_path, 10_000), header_of(tmp_path, 100_000)

    def plan(file):
        return ar.plan(checkpoints.open(file), TABLE, mesh="data=4,model=2", rules=RULES)

    assert len(plan(few).placements) == 10_000
    mine, less = interleaved(benchmark, lambda: plan(many), lambda: plan(few), rounds=5)
    what = "`open` and `plan` of 100,000 arrays"
    reached = mine < 1.0 and mine < 15 * less
    table.append(
        Row(
            what,
            duration(mine),
            f"10,000 arrays: {duration(less)}",
            f"{mine / less:.1f}x",
            "under 1 s, linear",
            reached,
        )
    )


def test_orbax_against_orbax_by_hand(benchmark, table, mesh, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    arrays = {f"w{number}": np.full((1024, 1024), number, np.float32) for number in range(32)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", arrays)
    target = ar.plan(arrays, TABLE, mesh=mesh, rules=RULES).abstract

    def ours():
        restored = checkpoints.restore_orbax(tmp_path / "saved", TABLE, mesh=mesh, rules=RULES)
        return jax.block_until_ready(restored)

    def theirs():
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(tmp_path / "saved", target))

    times = interleaved(benchmark, ours, theirs, rounds=5)
    table.append(faster("`restore_orbax` of 128 MiB", times, "Orbax with the same target", 1))
