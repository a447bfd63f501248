"""What prices cost: memory and traffic of a large plan, searches, and reading a large module."""

import gzip
from pathlib import Path
from time import perf_counter

import axisrules as ar
from axisrules import cost
from benchmarks.measure import Row, duration, interleaved
from tests.pricing import MODELS, model

_MODULE = Path(__file__).parents[1] / "tests/data/pricing/hlo/tpu_4x4_fsdp_tp_scan.hlo.gz"
_MESHES = ("data=16,model=16", "data=4,model=4,expert=2", "data=4,fsdp=4,model=2,expert=2")


def test_prices_of_405b(benchmark, table):
    tree, names = model("llama3-405b")
    rules = ar.presets.fsdp_tensor_parallel()

    def plan():
        return ar.plan(tree, names, mesh="data=128,model=64", rules=rules, indivisible="next")

    made = plan()

    def ours():
        return cost.memory(made, hardware="TPU v5e"), cost.traffic(made, hardware="TPU v5e")

    prices, peer = interleaved(benchmark, ours, plan, rounds=10)
    table.append(
        Row(
            "`memory` and `traffic` of a 405B plan on 8,192 devices",
            f"+{duration(prices)}",
            f"the plan: {duration(peer)}",
            f"+{prices / peer:.0%}",
            "+50 ms at most",
            prices <= 0.05,
        )
    )


def test_a_module(benchmark, table):
    text = gzip.decompress(_MODULE.read_bytes()).decode()
    size = len(text.encode())

    def ours():
        return cost.collectives(text, "data=4,model=4")

    one, lines = interleaved(benchmark, ours, text.splitlines, rounds=10)
    table.append(
        Row(
            f"`collectives` of a module of {size / 1e6:.1f} MB",
            duration(one),
            f"`str.splitlines`: {duration(lines)}",
            f"{one / lines:.0f}x",
            "0.5 s at most per MB",
            one <= 0.5 * size / 1e6,
        )
    )


def test_searches(table):
    trees = {name: model(name) for name in MODELS}
    times = {}
    for name, (tree, names) in trees.items():
        for mesh in _MESHES:
            begin = perf_counter()
            cost.suggest(tree, names, mesh, hardware="TPU v5e")
            times[name, mesh] = perf_counter() - begin
    (name, mesh), slowest = max(times.items(), key=lambda one: one[1])
    median = sorted(times.values())[len(times) // 2]
    table.append(
        Row(
            f"`suggest` for {len(trees)} models on meshes of 2, 3 and 4 axes, the slowest",
            duration(slowest),
            f"the median: {duration(median)}",
            f"{slowest / median:.1f}x, {name} on {mesh}",
            "5 s at most",
            slowest < 5,
        )
    )
