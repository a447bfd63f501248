"""What takes longer: many threads, many calls, large trees. Run by `make check-all`."""

import gc
import threading
import tracemalloc

import jax
import numpy as np
import pytest

import axisrules as ar
from axisrules import _initializers

pytestmark = pytest.mark.slow


def test_a_thousand_threads_resolve_and_plan_under_rules_of_their_own():
    wrong = []

    def work(number):
        axis = ("data", "model")[number % 2]
        rules = ar.Rules({f"n{number % 50}": axis, "shared": "data"})
        tree = {"w": np.zeros((8, 4), np.float32)}
        for _ in range(20):
            with ar.map_logical_axis_names(rules):
                plan = ar.plan(tree, {"w": (f"n{number % 50}", None)}, mesh="data=4,model=2")
            if tuple(plan.specs["w"]) != (axis, None):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(1000)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_ten_thousand_calls_grow_neither_memory_nor_compilations(mesh):
    rules = ar.Rules({"embed": "data", "mlp": "model"})
    tree = {"a": np.ones((16, 8), np.float32), "b": np.ones(8, np.float32)}
    names = {"a": "embed mlp", "b": "embed"}
    init = ar.with_logical_partitioning(jax.nn.initializers.normal(), "embed mlp")

    def once():
        with jax.set_mesh(mesh), ar.map_logical_axis_names(rules):
            ar.constrain(ar.shard_tree(tree, names), names)
            init(jax.random.key(0), (16, 8))

    for _ in range(100):
        once()
    gc.collect()
    tracemalloc.start()
    before, compiled = tracemalloc.get_traced_memory()[0], len(_initializers._COMPILED)
    for _ in range(10_000):
        once()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(_initializers._COMPILED) == compiled
    assert grown < 2**20


def test_a_hundred_thousand_leaves_and_a_mesh_of_65536_devices():
    shapes = {f"layers_{i}": {"w": jax.ShapeDtypeStruct((4096, 16384), np.float32)} for i in range(100_000)}
    plan = ar.plan(
        shapes,
        ar.NameTable({"layers_*/w": "embed mlp"}),
        mesh="data=256,model=256",
        rules={"embed": "data", "mlp": "model"},
    )
    assert len(plan.placements) == 100_000
    assert plan.bytes_per_device == 100_000 * 16 * 64 * 4


def test_ten_thousand_failing_leaves_are_gathered_in_one_error():
    shapes = {f"w{i}": jax.ShapeDtypeStruct((6, i + 1), np.float32) for i in range(10_000)}
    with pytest.raises(ar.DivisibilityError) as caught:
        ar.plan(shapes, dict.fromkeys(shapes, "embed _"), mesh="data=4", rules={"embed": "data"})
    assert len(caught.value.failures) == 10_000
    assert len(str(caught.value)) < 20_000
