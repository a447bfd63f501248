"""Eight simulated CPU devices, the published rule sets, and the table at the end."""

import json
import platform
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import axisrules as ar
from benchmarks import measure

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

_ROWS = pytest.StashKey[list[measure.Row]]()
_PUBLISHED = Path(__file__).parents[2] / "shared" / "rulesets.json"


def pytest_configure(config):
    config.stash[_ROWS] = []
    config.option.benchmark_quiet = True  # one table, not two


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[_ROWS]
    if rows:
        python = f"Python {platform.python_version()}, jax {jax.__version__}"
        terminalreporter.write_line(f"\nBest of interleaved rounds, in one run, on {python}:\n")
        terminalreporter.write_line("\n".join(measure.markdown(rows)) + "\n")


@pytest.fixture
def table(request):
    """The rows so far."""
    return request.config.stash[_ROWS]


class Published(NamedTuple):
    """A published rule set, and a mesh of 8,192 devices with its axes."""

    pairs: tuple[tuple[str, str | tuple[str, ...]], ...]
    rules: ar.Rules
    mesh: AbstractMesh


@pytest.fixture(scope="session")
def published():
    if not _PUBLISHED.exists():
        pytest.skip(f"the published rule sets, which may not be copied, are not at {_PUBLISHED}")
    found = json.loads(_PUBLISHED.read_text())["maxtext/base"]
    pairs = tuple((name, axes if isinstance(axes, str) else tuple(axes)) for name, axes in found["rules"])
    sizes = {**dict.fromkeys(found["mesh_axes"], 1), "fsdp": 64, "tensor": 128}
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    return Published(pairs, ar.Rules(pairs), mesh)


@pytest.fixture
def mesh():
    return ar.make_mesh("data=4,model=2")
