"""Devices that a CPU stands in for.

Owns when that is possible: before JAX has started. Starts nothing itself.
"""

from __future__ import annotations

from typing import Any

import jax

from axisrules._errors import MeshError


def simulate_devices(count: int) -> None:
    """Makes the CPU stand in for several devices, in the whole process.

    To be called before anything asks JAX for a device, such as at the top of a ``conftest.py``. JAX
    then uses no accelerator. Calling it again with the same number does nothing.

    Args:
        count: How many devices.

    Raises:
        MeshError: JAX has started already, with other devices; or the count is no positive number.

    Example:
        >>> import axisrules as ar, jax
        >>> ar.testing.simulate_devices(8)
        >>> len(jax.devices())
        8
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise MeshError(
            f"{count!r} devices cannot be simulated: it is no positive number", fix="pass a number, like 8."
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as cause:  # JAX's word for: a backend has started
        found = jax.devices()
        if _are_simulated(found, count):
            return
        raise MeshError(
            f"{count} devices cannot be simulated any more: JAX has started, with {_describe(found)}",
            fix=f"call simulate_devices({count}) before anything asks JAX for a device, such as at the top "
            f"of conftest.py, or set JAX_NUM_CPU_DEVICES={count} and JAX_PLATFORMS=cpu in the environment.",
        ) from cause
    jax.config.update("jax_platforms", "cpu")


def _are_simulated(devices: list[Any], count: int) -> bool:
    return len(devices) == count and devices[0].platform == "cpu"


def _describe(devices: list[Any]) -> str:
    return f"{len(devices)} {devices[0].platform} device" + ("s" if len(devices) != 1 else "")
