"""What looking at a plan costs: the reports per leaf as a tree grows, and the whole command."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import jax
import pytest

import axisrules as ar
from benchmarks.measure import Row, duration, interleaved

_HEADER = Path(__file__).parents[1] / "tests" / "data" / "hf" / "llama-3.1-405b.json"


def _plan(leaves):
    shapes = [(1024, 4096), (4096, 1024), (1024,), (1000, 1024)]
    names = ["embed mlp", "mlp embed", "embed", "vocab embed"]
    tree = {f"layer_{i}/w{i % 4}": jax.ShapeDtypeStruct(shapes[i % 4], "bfloat16") for i in range(leaves)}
    given = {path: names[int(path[-1])] for path in tree}
    rules = ar.presets.fsdp_tensor_parallel()
    return ar.plan(tree, given, mesh="data=64,model=128", rules=rules, indivisible="next")


def _reports(plan, path):
    str(ar.report.table(plan))
    str(ar.report.waste(plan))
    ar.report.lint(plan=plan)
    ar.report.page(plan, path)


@pytest.mark.parametrize("leaves", [10_000, 100_000])
def test_reports(benchmark, table, tmp_path, leaves):
    pytest.importorskip("jinja2")
    large, few = _plan(leaves), [_plan(5000)] * (leaves // 5000)
    path = tmp_path / "plan.html"

    def peers():
        for plan in few:
            _reports(plan, path)

    one, many = interleaved(benchmark, lambda: _reports(large, path), peers, rounds=4)
    quick = one < 2 if leaves == 10_000 else one <= 1.3 * many
    table.append(
        Row(
            f"table, waste, lint and page of {leaves:,} leaves together",
            duration(one),
            f"plans of 5,000 leaves: {duration(many)}",
            f"{one / many:.2f}x",
            "2 s at most" if leaves == 10_000 else "1.3x at most",
            quick,
        )
    )


def _sparse_checkpoint(path):
    """A file with the real header of Llama-3.1-405B, and nothing but a hole behind it."""
    header, end = {}, 0
    for row in json.loads(_HEADER.read_text())["params"]:
        ranges = row.get("i", [[0, row["repeat"]]])
        for i in [n for first, last in ranges for n in range(first, last)] if "{i}" in row["path"] else [0]:
            size = 2
            for length in row["shape"]:
                size *= length
            entry = {"dtype": row["dtype"], "shape": row["shape"], "data_offsets": [end, end + size]}
            header[row["path"].replace("{i}", str(i))] = entry
            end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_plan_command(benchmark, table, tmp_path):
    pytest.importorskip("typer")
    path = tmp_path / "model.safetensors"
    try:
        _sparse_checkpoint(path)
    except OSError:
        pytest.skip("this file system has no sparse files of 812 GB")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    command = (
        [shutil.which("axisrules")] if shutil.which("axisrules") else [sys.executable, "-m", "axisrules.cli"]
    )
    words = {
        "ours": [*command, "plan", str(path), "--mesh", "data=64,model=128", "--names", "llama"],
        "jax": [sys.executable, "-c", "import jax"],
    }
    best = dict.fromkeys(words, float("inf"))

    def run():
        for name, arguments in words.items():
            start = perf_counter()
            subprocess.run(arguments, env=env, check=True, capture_output=True)
            best[name] = min(best[name], perf_counter() - start)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    more = best["ours"] - best["jax"]
    table.append(
        Row(
            "`axisrules plan` of a 405B checkpoint, 1,137 tensors, the whole process",
            f"+{duration(more)}",
            f"`import jax`: {duration(best['jax'])}",
            f"+{more / best['jax']:.0%}",
            "+500 ms at most",
            more <= 0.5,
        )
    )
