"""Batches on several real processes, every shard compared with the truth."""

import pytest
from processes import run_processes

TIMEOUT = 120
LAYOUTS = pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])

START = """
import numpy as np, axisrules as ar
ME, COUNT = jax.process_index(), jax.process_count()
TRUTH = np.arange(16 * 8, dtype=np.int32).reshape(16, 8)


def check(array, truth):
    assert array.shape == truth.shape, (array.shape, truth.shape)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), truth[shard.index])


def error_of(call):
    try:
        call()
    except ar.AxisRulesError as error:
        return f"{type(error).__name__}: {error.headline}"
    return "no error"
"""


def run(script, processes, devices):
    return run_processes(START + script, processes, devices, TIMEOUT)


EVERY_MESH = """
CASES = [
    # mesh, rules, how many distinct shards there are with 2 and with 4 processes
    ("data=8", {"batch": "data", "length": None}, {2: 2, 4: 4}),
    ("data=4,model=2", {"batch": "data", "length": "model"}, {2: 2, 4: 4}),
    ("data=2,model=4", {"batch": "data", "length": "model"}, {2: 2, 4: 2}),  # mixed with 4 processes
    ("model=4,data=2", {"batch": "data", "length": "model"}, {2: 1, 4: 1}),  # a model axis spans them all
    ("seq=8", {"batch": None, "length": "seq"}, {2: 1, 4: 1}),
    ("seq=2,data=4", {"batch": "data", "length": "seq"}, {2: 1, 4: 2}),
    ("data=4,model=2", {"batch": ("data", "model"), "length": None}, {2: 2, 4: 4}),
    ("one=1,data=8", {"batch": ("one", "data"), "length": None}, {2: 2, 4: 4}),
]
for kind in ["auto", "mixed", "explicit"]:
    for text, rules, counts in CASES:
        types = {text.partition("=")[0]: "explicit"} if kind == "mixed" else kind
        mesh = ar.make_mesh(text, axis_types=types)
        index, count = ar.process_shard("batch length", mesh=mesh, rules=rules)
        assert count == counts[COUNT], (text, count)
        n = 16 // count
        mine = TRUTH[index * n : (index + 1) * n].copy()
        batch = {"x": mine, "label": mine[:, 0].copy(), "wide": np.repeat(mine[..., None], 3, 2), "note": ME}
        placed = ar.shard_batch(batch, "batch length", mesh=mesh, rules=rules)
        mine[:], batch["label"][:] = -1, -1  # the loader uses its buffers again
        check(placed["x"], TRUTH)
        check(placed["label"], TRUTH[:, 0])
        check(placed["wide"], np.repeat(TRUTH[..., None], 3, 2))
        assert placed["note"] == ME
        spec = ar.resolve("batch length", (16, 8), mesh=mesh, rules=rules).spec
        assert placed["x"].sharding == jax.sharding.NamedSharding(mesh, spec)
total = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
assert int(total(placed["x"])) == TRUTH.sum()
print("done")
"""


@LAYOUTS
def test_every_shard_holds_its_records(processes, devices):
    assert run(EVERY_MESH, processes, devices) == ["done\n"] * processes


ODD_ORDERS = """
rules = {"batch": ("model", "data"), "length": None}
mesh = ar.make_mesh("data=4,model=2")  # the batch goes over the axes the other way round
index, count = ar.process_shard("batch length", mesh=mesh, rules=rules)
assert (index, count) == (ME, COUNT)
n = 16 // COUNT
mine = TRUTH[index * n : (index + 1) * n]
placed = ar.shard_batch(mine, "batch length", mesh=mesh, rules=rules)
shards = {shard.index[0].start: np.asarray(shard.data) for shard in placed.addressable_shards}
np.testing.assert_array_equal(np.concatenate([shards[start] for start in sorted(shards)]), mine)
assert sorted(shards) != list(range(index * n, index * n + n, 2))

devices = np.array(jax.devices())
rules = {"batch": "data"}
uneven = jax.sharding.Mesh(np.roll(devices, 1).reshape(4, 2), ("data", "model"))
print(error_of(lambda: ar.process_shard("batch", mesh=uneven, rules=rules)))
print(error_of(lambda: ar.shard_batch(TRUTH[:4, 0], "batch", mesh=uneven, rules=rules)))
alone = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))  # a mesh of each process's own
assert ar.process_shard("batch", mesh=alone, rules=rules) == (0, 1)
check(ar.shard_batch(TRUTH[:, ME], "batch", mesh=alone, rules=rules), TRUTH[:, ME])
first = jax.sharding.Mesh(np.array(jax.local_devices(process_index=0)), ("data",))
print(error_of(lambda: ar.process_shard("batch", mesh=first, rules=rules)) if ME else "no error")
"""


def test_shares_need_not_be_neighbours_but_equal_and_separate():
    outputs = run(ODD_ORDERS, 2, 4)
    uneven = "ProcessError: the processes hold no equal, separate shares of a dimension over data\n"
    assert outputs == [
        uneven + uneven + "no error\n",
        uneven + uneven + "ProcessError: process 1 has no device in the mesh\n",
    ]


REMAINDERS = """
mesh, rules = ar.make_mesh("data=4,model=2"), {"batch": "data", "length": None}
shard = lambda batch, **options: ar.shard_batch(batch, "batch length", mesh=mesh, rules=rules, **options)
index, count = ar.process_shard("batch length", mesh=mesh, rules=rules)
mine = TRUTH[index * 8 : index * 8 + (7 if ME == 0 else 3)]  # 7 records here, 3 there
placed = shard(mine, remainder="drop")
check(placed, TRUTH[[0, 1, 8, 9]])
placed, mask = shard(mine, remainder="pad")
check(placed, TRUTH[[*range(7), 6, 8, 9, 10, 10, 10, 10, 10, 10]])
check(mask, np.array([True] * 7 + [False] + [True] * 3 + [False] * 5))
placed, mask = shard(mine[: 0 if ME else 3], remainder="pad")  # one process has no record at all
check(placed, np.concatenate([TRUTH[[0, 1, 2, 2]], np.zeros((4, 8), np.int32)]))
check(mask, np.array([True] * 3 + [False] * 5))
print(error_of(lambda: shard(mine)))
print(error_of(lambda: shard(TRUTH[:3])))
print(error_of(lambda: shard(mine[:1], remainder="drop")))
print(error_of(lambda: shard(TRUTH[:4].astype(np.int16 if ME else np.int32))))
print(error_of(lambda: shard(TRUTH[:4] if ME else np.full((4, 8), 2**40))))
check(shard(TRUTH[index * 8 : index * 8 + 8]), TRUTH)  # the next call is in step again
check(shard(TRUTH[:0]), TRUTH[:0])
keys = jax.random.split(jax.random.key(ME), 4)
placed = shard(keys)
assert placed.shape == (8,)
np.testing.assert_array_equal(
    np.concatenate([jax.random.key_data(s.data) for s in placed.addressable_shards[::2]]), jax.random.key_data(keys)
)
print(error_of(lambda: shard(placed)))
"""


def test_processes_agree_on_the_last_batch():
    first, second = run(REMAINDERS, 2, 4)
    common = [
        "BatchError: the processes have different numbers of records: process 0: 7; process 1: 3",
        "BatchError: the 3 records of this process, one of 2, do not divide over data=4",
        "BatchError: nothing is left of a batch of 1 records, which would have to be 2",
        "ProcessError: the processes pass batches whose fields differ in path, shape, dtype or names",
    ]
    last = "BatchError: the array lies on several processes already"
    lines = first.splitlines()
    assert lines[:4] == common
    assert lines[4].startswith("LeafError: the value 1099511627776 of an int64 array does not fit int32")
    assert lines[5:] == [last]
    assert second.splitlines() == [*common, "ProcessError: another process cannot bring its batch", last]


PREFETCH = """
mesh, rules = ar.make_mesh("data=4,model=2"), {"batch": "data", "length": "model"}
index, count = ar.process_shard("batch length", mesh=mesh, rules=rules)
fetch = lambda batches, **options: ar.prefetch(batches, "batch length", mesh=mesh, rules=rules, **options)
n = 16 // count
mine = TRUTH[index * n : (index + 1) * n]


def loader(steps, fails=False):
    buffer = np.empty_like(mine)
    for step in range(steps):
        buffer[:] = mine + step
        yield buffer
    if fails:
        raise OSError("disk")


whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
step = jax.jit(lambda total, x: total + x.sum(), out_shardings=whole)
total, both = 0, zip(fetch(loader(20)), fetch(loader(20), size=4), strict=True)
for number, (one, two) in enumerate(both):  # two threads, and collectives in this one
    check(one, TRUTH + number)
    check(two, TRUTH + number)
    total = step(total, one)
assert int(total) == sum((TRUTH + number).sum() for number in range(20))
print(len(list(fetch(loader(3 if ME else 5), remainder="drop"))))


def ending(batches):
    found = 0
    try:
        for _ in batches:
            found += 1
    except (ar.AxisRulesError, OSError) as error:
        return found, type(error).__name__
    return found, None


print(*ending(fetch(loader(3 if ME else 5))))
print(*ending(fetch(loader(2, fails=ME == 1))))
with fetch(loader(100)) as batches:
    next(batches)
print("closed")
"""


@pytest.mark.parametrize(("processes", "devices"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_prefetch_keeps_processes_in_step(processes, devices):
    outputs = run(PREFETCH, processes, devices)
    assert outputs[0] == "3\n3 ProcessError\n2 ProcessError\nclosed\n"
    assert outputs[1] == "3\n3 ProcessError\n2 OSError\nclosed\n"
    assert outputs[2:] == [outputs[0]] * (processes - 2)


def test_a_process_that_fails_ends_the_others():
    with pytest.raises(AssertionError, match="RuntimeError: on purpose"):
        run_processes(
            """
if jax.process_index():
    raise RuntimeError("on purpose")
import time; time.sleep(1000)
""",
            2,
            1,
            60,
        )
