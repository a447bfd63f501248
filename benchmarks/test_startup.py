"""What ``import axisrules`` costs beside ``import jax``, and what it leaves alone."""

import os
import subprocess
import sys

from benchmarks.measure import Row, duration

_TIMED = """
from time import perf_counter
start = perf_counter()
import jax
between = perf_counter()
import axisrules
print(between - start, perf_counter() - between)
"""
_ALONE = """
import sys, axisrules, jax
found = {"flax", "equinox", "yaml", "optax"} & sys.modules.keys()
assert not found, f"import axisrules imports {found}"
jax.config.update("jax_num_cpu_devices", 3)  # raises once a backend is initialized
assert jax.device_count("cpu") == 3
"""


def _run(code, **env):
    """What a new interpreter prints that runs the code."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, stdout=subprocess.PIPE).stdout


def test_import(benchmark, table, tmp_path):
    # As pip leaves a package: compiled, wherever this environment allows that.
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    found = []
    benchmark.pedantic(
        lambda: found.append([float(word) for word in _run(_TIMED, **env).split()]),
        rounds=7,
        warmup_rounds=1,
    )
    jax_alone, more = (min(times) for times in zip(*found, strict=True))
    benchmark.extra_info.update(jax=jax_alone, more=more)
    table.append(
        Row(
            "`import axisrules` after `import jax`",
            f"+{duration(more)}",
            f"`import jax`: {duration(jax_alone)}",
            f"+{more / jax_alone:.1%}",
            "+20 ms at most",
            more <= 0.020,
        )
    )


def test_import_starts_no_backend_and_pulls_in_no_framework():
    _run(_ALONE)
