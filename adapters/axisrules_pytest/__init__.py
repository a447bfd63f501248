"""The pytest plugin: tests that say how many devices they need, and a mesh of them.

Owns the marker ``devices`` and the fixture ``axisrules_mesh``. A package of its own, since pytest
loads it in every run, also of projects that never use it: it imports neither JAX nor axisrules before
a test asks for devices.

Example:
    Eight devices are simulated on the CPU, before the first test runs::

        @pytest.mark.devices(8, mesh="data=4,model=2")
        def test_the_batch_is_split(axisrules_mesh):
            placed = ar.shard_batch(batch, "batch", mesh=axisrules_mesh, rules=rules)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

_MARKER = (
    "devices(count, mesh='data=-1', axis_types='auto'): the test needs so many devices, which are "
    "simulated on the CPU; the fixture axisrules_mesh is that mesh of them."
)


@dataclass(frozen=True)
class _Wanted:
    """What the marker of a test asks for."""

    count: int
    mesh: Any = "data=-1"
    axis_types: Any = "auto"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Simulates as many devices as the tests that will run need at most, if that is possible."""
    counts = [wanted.count for item in session.items if (wanted := _wanted(item)) is not None]
    if not counts or session.config.option.collectonly:
        return
    import jax

    settings: Any = jax.config
    other = settings.jax_platforms not in (None, "", "cpu")
    if other or settings.jax_num_cpu_devices >= max(counts):
        return  # whoever set them knows what the tests need
    import axisrules

    try:
        axisrules.testing.simulate_devices(max(counts))
    except axisrules.MeshError:
        return  # JAX has started: a test that does need more devices says so when it is its turn


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails a test that needs more devices than there are."""
    wanted = _wanted(item)
    if wanted is None:
        return
    import jax

    if len(jax.devices()) < wanted.count:
        import axisrules

        try:
            axisrules.testing.simulate_devices(wanted.count)
        except axisrules.MeshError as error:
            pytest.fail(str(error), pytrace=False)


@pytest.fixture
def axisrules_mesh(request: pytest.FixtureRequest) -> Any:
    """The mesh that the marker ``devices`` of the test describes, of its first devices."""
    wanted = _wanted(request.node)
    if wanted is None:
        pytest.fail(
            "axisrules_mesh needs to know how many devices: mark the test with "
            '@pytest.mark.devices(8, mesh="data=4,model=2").',
            pytrace=False,
        )
    import jax

    import axisrules

    devices = jax.devices()[: wanted.count]
    return axisrules.make_mesh(wanted.mesh, axis_types=wanted.axis_types, devices=devices)


def _wanted(item: pytest.Item) -> _Wanted | None:
    marker = item.get_closest_marker("devices")
    if marker is None:
        return None
    try:
        wanted = _Wanted(*marker.args, **marker.kwargs)
    except TypeError:
        wanted = None
    if wanted is None or type(wanted.count) is not int or wanted.count < 1:
        given = ", ".join([*map(repr, marker.args), *(f"{k}={v!r}" for k, v in marker.kwargs.items())])
        raise pytest.UsageError(f"{item.nodeid}: the marker is devices({given}); use {_MARKER}")
    return wanted
