"""Load, interruption and interleaving: what a long run under pressure must not break."""

import asyncio
import gc
import sys
import threading
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from axis_types import in_turn, mesh_of

import axisrules as ar
from axisrules import _place

slow = pytest.mark.slow
NAMES = {"a": "embed mlp", "b": "embed"}


def tree_of(rows=16):
    return {"a": np.arange(rows * 8, dtype=np.float32).reshape(rows, 8), "b": np.ones(rows, np.float32)}


# Threads.


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=slow)])
def test_threads_at_once_see_their_own_rules_and_share_what_they_decided(count):
    """All start together, on the same ``Rules`` objects, whose caches are empty."""
    shared = [ar.Rules([("n", axis), ("other", ("data", "model"))]) for axis in ("data", "model")]
    start, wrong = threading.Barrier(count), []

    def work(number):
        rules, axis = shared[number % 2], ("data", "model")[number % 2]
        tree = {"w": jax.ShapeDtypeStruct((8, 4 + 4 * (number % 7)), np.float32)}
        start.wait()
        for _ in range(10):
            with ar.map_logical_axis_names(rules):
                plan = ar.plan(tree, {"w": ("n", None)}, mesh="data=4,model=2")
                found = ar.resolve(("n", "other"), (8, 8), mesh="data=4,model=2")
                bare = ar.logical_to_mesh_axes(("n", "other"))
            # the other rule wants both axes, of which one is taken
            if [tuple(one) for one in (plan.specs["w"], found.spec, bare)] != [(axis, None)] * 3:
                wrong.append(number)
        if ar.get_logical_axis_rules():
            wrong.append(number)

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            start.abort()
            wrong.append(error)

    workers = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


# Many calls.


class Compilations:
    """Counts what XLA compiles."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event, duration, **kwargs):
        self.count += "backend_compile" in event


COMPILATIONS = Compilations()


def test_compilations_are_counted():
    before = COMPILATIONS.count
    jax.jit(lambda x: x * 3.25 + 1)(np.ones(7))
    assert COMPILATIONS.count > before


def call_with_what_is_the_same(mesh, tree, number):
    return ar.shard_tree(tree, NAMES, mesh=mesh, rules=RULES)


def call_with_new_rules_every_time(mesh, tree, number):
    rules = ar.Rules({"embed": "data", "mlp": "model", f"unused_{number}": None})
    return ar.shard_tree(tree, NAMES, mesh=mesh, rules=rules)


def call_on_arrays_that_lie_elsewhere(mesh, tree, number):
    first = ar.shard_tree(tree, NAMES, mesh=mesh, rules=RULES)
    return ar.shard_tree(first, {"a": "mlp embed", "b": "mlp"}, mesh=mesh, rules=RULES, donate=True)


def call_that_fails(mesh, tree, number):
    with pytest.raises(ar.PlanError):
        ar.shard_tree(
            {**tree, "c": np.ones(3, np.float32), "d": np.ones(5)},
            {**NAMES, "c": "embed"},
            mesh=mesh,
            rules=RULES,
        )


RULES = ar.Rules({"embed": "data", "mlp": "model"})
CALLS = [
    call_with_what_is_the_same,
    call_with_new_rules_every_time,
    call_on_arrays_that_lie_elsewhere,
    call_that_fails,
]


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=slow)])
@pytest.mark.parametrize(("call", "axis_types"), in_turn(CALLS))
def test_calls_grow_neither_memory_nor_compilations_nor_live_arrays(call, count, mesh):
    tree = tree_of()
    for number in range(600):  # fills the caches, which are bounded
        call(mesh, tree, -1 - number)
    gc.collect()
    compiled, alive = COMPILATIONS.count, len(jax.live_arrays())
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        call(mesh, tree, number)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert COMPILATIONS.count == compiled
    assert len(jax.live_arrays()) == alive
    assert grown < 2**20


# Large inputs.


@slow
def test_a_hundred_thousand_leaves_survive_json_and_comparison():
    shapes = {f"layers_{i}": {"w": jax.ShapeDtypeStruct((4096, 16384), np.float32)} for i in range(100_000)}
    plan = ar.plan(shapes, ar.NameTable({"layers_*/w": "embed mlp"}), mesh="data=256,model=256", rules=RULES)
    again = ar.Plan.from_json(plan.to_json())
    assert len(again.placements) == 100_000
    assert not plan.diff(again)
    assert len(jax.tree.leaves(plan.shardings)) == 100_000


@slow
def test_a_hundred_thousand_leaves_are_placed(axis_types):
    tree = {f"w{i}": np.full((2, 2), i, np.int32) for i in range(100_000)}
    mesh = mesh_of(axis_types, "data=2", devices=jax.devices()[:2])
    placed = ar.shard_tree(tree, lambda path, leaf: "embed _", mesh=mesh, rules={"embed": "data"})
    assert len(placed) == 100_000
    for number in (0, 12_345, 99_999):
        array = placed[f"w{number}"]
        assert array.addressable_shards[0].data.shape == (1, 2)
        assert (np.asarray(array) == number).all()


@pytest.mark.parametrize(
    "mesh", ["data=65536", "data=256,model=256", "pod=16,data=64,fsdp=8,model=8", {"d": 65536}]
)
def test_a_mesh_of_65536_devices_is_planned(mesh):
    rules = {"embed": ("pod", "data", "d"), "mlp": ("model", "fsdp")}
    shapes = {f"w{i}": jax.ShapeDtypeStruct((65536, 8192), np.float32) for i in range(100)}
    plan = ar.plan(shapes, lambda path, leaf: "embed mlp", mesh=mesh, rules=rules, absent="drop")
    assert plan.mesh.size == 65536
    assert plan.bytes_per_device == 100 * 8192 * 4
    assert len(plan.flat_shardings) == 100
    assert plan.shardings["w0"].shard_shape((65536, 8192)) == plan.placements[0].shard_shape
    text = plan.to_json()
    assert ar.Plan.from_json(text).to_json() == text
    plan.check(max_waste=1.0)


# Interruption.


def bits_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("when", "axis_types"), in_turn(["before", "between", "after"]))
def test_an_interrupt_while_bytes_move_leaves_the_source_whole(monkeypatch, when, donate, mesh):
    """Of host and device arrays alike; nothing is donated before everything has arrived."""
    source = {"host": tree_of(), "device": jax.tree.map(jax.numpy.asarray, tree_of())}
    names, before, calls = {"host": NAMES, "device": NAMES}, bits_of(source), []
    real = jax.device_put

    def interrupted(arrays, shardings):
        calls.append(arrays)
        if when == "before" or (when == "between" and len(calls) == 2):
            raise KeyboardInterrupt
        made = real(arrays, shardings)
        if when == "after" and len(calls) == 2:
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(_place.jax, "device_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ar.shard_tree(source, names, mesh=mesh, rules=RULES, donate=donate)
    monkeypatch.undo()
    assert bits_of(source) == before
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(source["device"]))
    placed = ar.shard_tree(source, names, mesh=mesh, rules=RULES, donate=donate)
    assert bits_of(placed) == before


class Interrupt:
    """Interrupts at the n-th line of axisrules that is run: the same moment in every run."""

    def __init__(self, at):
        self.at, self.lines = at, 0

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *exception):
        sys.settrace(self.before)


PACKAGE = str(Path(ar.__file__).parent)


@pytest.mark.parametrize(("donate", "axis_types"), in_turn([False, True]))
@pytest.mark.parametrize("moments", [60, pytest.param(10_000, marks=slow)])
def test_an_interrupt_at_any_line_leaves_source_scope_and_later_calls_whole(moments, donate, mesh):
    """With ``donate``: up to when everything has arrived, and the sources are given up."""

    def sources():
        return {"host": tree_of(), "device": jax.tree.map(jax.numpy.asarray, tree_of())}

    def place(source, at):
        rules = ar.Rules({"embed": "data", "mlp": "model"})  # new, so that nothing is known
        with ar.map_logical_axis_names(rules), Interrupt(at) as interrupt:
            placed = ar.shard_tree(source, {"host": NAMES, "device": NAMES}, mesh=mesh, donate=donate)
        return placed, interrupt.lines

    before, lines = bits_of(sources()), max(place(sources(), 0)[1] for _ in range(3))
    interrupted = late = 0
    for at in range(1, lines, max(1, lines // moments)):
        source = sources()
        try:
            place(source, at)
        except KeyboardInterrupt:
            interrupted += 1
            if donate and any(leaf.is_deleted() for leaf in jax.tree.leaves(source["device"])):
                late += 1
            else:
                assert bits_of(source) == before
        assert not ar.get_logical_axis_rules()
    assert interrupted > min(moments, lines) // 2
    assert late < interrupted // 4
    assert bits_of(place(sources(), 0)[0]) == before


# Interleaving.


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=slow)])
def test_interleaved_tasks_with_decorated_coroutines_see_their_own_rules(count):
    async def task(number):
        axis = ("data", "model")[number % 2]

        @ar.map_logical_axis_names({"embed": axis, f"n{number}": None})
        async def work():
            for step in range(5):
                await asyncio.sleep(0 if (number + step) % 3 else 1e-4)
                assert f"n{number}" in ar.get_logical_axis_rules().by_name
                with ar.map_logical_axis_names({"mlp": axis}):
                    await asyncio.sleep(0)
                    rules = ar.get_logical_axis_rules()
                    assert list(rules) == [("mlp", axis), ("embed", axis), (f"n{number}", None)]
                assert tuple(
                    ar.plan({"w": np.zeros(8)}, {"w": "embed"}, mesh="data=4,model=2", dtype="float32").specs[
                        "w"
                    ]
                ) == (axis,)
            return number

        return await work()

    async def main():
        return await asyncio.gather(*map(task, range(count)))

    assert asyncio.run(main()) == list(range(count))
    assert not ar.get_logical_axis_rules()


def test_tasks_in_threads_of_their_own_see_their_own_rules_in_plain_with_blocks():
    def work(number):
        with ar.map_logical_axis_names({f"n{number}": "data"}):
            return list(ar.get_logical_axis_rules())

    async def main():
        with ar.map_logical_axis_names({"outer": "data"}):
            return await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(20)))

    assert asyncio.run(main()) == [[(f"n{number}", "data")] for number in range(20)]


def test_the_limit_of_plain_with_blocks_in_one_thread_is_an_error_not_a_silent_mix():
    """JAX keeps its contexts per thread: a task that awaits in a block shows its rules to others."""
    seen = {}

    async def hold(name, entered, release):
        with ar.map_logical_axis_names({name: "data"}):
            seen[name] = list(ar.get_logical_axis_rules())
            entered.set()
            await release.wait()

    async def main():
        events = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(hold("a", events[0], events[1]))
        await events[0].wait()
        second = asyncio.create_task(hold("b", events[2], events[3]))
        await events[2].wait()
        events[1].set()
        with pytest.raises(ar.ScopeError, match="entered later, are still active"):
            await first
        events[3].set()
        await second

    asyncio.run(main())
    assert seen == {"a": [("a", "data")], "b": [("b", "data"), ("a", "data")]}
    assert not ar.get_logical_axis_rules()
    assert "Tasks of asyncio share their" in ar.map_logical_axis_names.__doc__
