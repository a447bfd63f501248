"""What prices cost: memory and traffic of a large plan, a search, and reading a large module."""

import gzip
from pathlib import Path
from time import perf_counter

import pytest

import axisrules as ar
from axisrules import cost
from tests.pricing import MODELS, model

_MODULE = Path(__file__).parents[1] / "tests/data/pricing/hlo/tpu_4x4_fsdp_tp_scan.hlo.gz"

_MESHES = ["data=16,model=16", "data=4,model=4,expert=2", "data=4,fsdp=4,model=2,expert=2"]


def _seconds(call):
    call()
    times = []
    for _ in range(5):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return min(times)


def test_memory_and_traffic_of_405b_take_less_than_50_ms_beyond_the_plan():
    tree, names = model("llama3-405b")
    rules = ar.presets.fsdp_tensor_parallel()
    plan = ar.plan(tree, names, mesh="data=128,model=64", rules=rules, indivisible="next")
    assert _seconds(lambda: (cost.memory(plan, hardware="v5e"), cost.traffic(plan, hardware="v5e"))) < 0.05


@pytest.mark.parametrize(
    "mesh", ["data=16,model=16", "data=4,model=4,expert=2", "data=4,fsdp=4,model=2,expert=2"]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_search_takes_less_than_5_s(name, mesh):
    tree, names = model(name)
    begin = perf_counter()
    cost.suggest(tree, names, mesh, hardware="v5e")
    assert perf_counter() - begin < 5


def test_a_module_of_1_mb_is_read_in_less_than_half_a_second():
    text = gzip.decompress(_MODULE.read_bytes()).decode()
    assert len(text) > 10**6
    assert _seconds(lambda: cost.collectives(text, "data=4,model=4")) < 0.5
