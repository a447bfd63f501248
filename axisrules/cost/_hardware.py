"""Accelerators as data: memory, bandwidth, links and peak rates, each with its source.

Owns the data file and its form, in JSON and in a user's TOML. A figure that is unknown is ``None``,
never zero. Touches no device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from axisrules._errors import HardwareError, raise_all
from axisrules._files import SUFFIXES, read
from axisrules._text import did_you_mean

HardwareLike: TypeAlias = "Hardware | str | os.PathLike[str] | None"

_DATA = Path(__file__).with_name("hardware.json")
_EXAMPLE = 'write [[chips]], name = "My chip", memory_bytes = 16_000_000_000, and what else is known.'


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of accelerator. ``None`` is unknown.

    Attributes:
        name: What it is called.
        vendor: ``"google"``, ``"nvidia"``, ...
        device_kind: ``jax.Device.device_kind``.
        topology: What the names of its topologies begin with, such as ``"v5e"``.
        compute_capability: Of a GPU.
        chip_memory_bytes: Memory of a chip, as sold.
        memory_bytes: Memory that the compiler grants one JAX device.
        devices_per_chip: JAX devices of a chip.
        memory_bytes_per_s: Memory bandwidth of a chip.
        bf16_flops_per_s: Peak rate of a chip in bfloat16.
        int8_ops_per_s: Peak rate of a chip in int8.
        fp8_flops_per_s: Peak rate of a chip in 8-bit floating point.
        link_bytes_per_s: Bandwidth of one fast link (ICI, NVLink) in one direction.
        network_bytes_per_s: Bandwidth per chip beyond the fast links, in one direction.
        node_size: Chips that share a switch of fast links.
        torus_dims: Dimensions of the torus of links.
        links_per_chip: Fast links of a chip.
        pod: The largest torus.
        ring_multiple: A mesh axis closes a ring where its size is a multiple of this.
        tile: The tile, in elements, that the last two dimensions of an array are padded to;
            ``None`` where arrays are not padded.
        notes: What else is worth knowing.
        source: Where the figures come from.
    """

    name: str
    vendor: str | None = None
    device_kind: str | None = None
    topology: str | None = None
    compute_capability: str | None = None
    chip_memory_bytes: int | None = None
    memory_bytes: int | None = None
    devices_per_chip: int | None = None
    memory_bytes_per_s: int | None = None
    bf16_flops_per_s: int | None = None
    int8_ops_per_s: int | None = None
    fp8_flops_per_s: int | None = None
    link_bytes_per_s: int | None = None
    network_bytes_per_s: int | None = None
    node_size: int | None = None
    torus_dims: int | None = None
    links_per_chip: int | None = None
    pod: str | None = None
    ring_multiple: int | None = None
    tile: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    @property
    def limit(self) -> int | None:
        """Bytes that one JAX device may hold: what the compiler grants, else its part of the chip."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        if self.chip_memory_bytes is None or self.devices_per_chip is None:
            return None
        return self.chip_memory_bytes // self.devices_per_chip

    @property
    def flops_per_device(self) -> float | None:
        """Peak bfloat16 operations per second of one JAX device."""
        if self.bf16_flops_per_s is None or self.devices_per_chip is None:
            return None
        return self.bf16_flops_per_s / self.devices_per_chip

    def bandwidth(self, size: int, inner: int = 1) -> float | None:
        """Bytes per second that a device can send along a mesh axis, or ``None`` if unknown.

        Args:
            size: Devices along the axis.
            inner: Devices along the axes that are more minor than it.
        """
        if self.node_size is not None and size * inner > self.node_size:
            return self._across_nodes(size, inner)
        if self.link_bytes_per_s is None:
            return None
        closes = self.ring_multiple is not None and size % self.ring_multiple == 0
        return float(self.link_bytes_per_s) * (2 if closes else 1)

    def _across_nodes(self, size: int, inner: int) -> float | None:
        """A ring over several nodes: the slower of the switch inside and the network between."""
        if self.network_bytes_per_s is None or self.node_size is None:
            return None
        inside = max(1, self.node_size // inner)
        nodes = math.ceil(size / inside)
        per_wire_byte = (nodes - 1) / nodes / inside * size / (size - 1)
        network = self.network_bytes_per_s / per_wire_byte
        return network if self.link_bytes_per_s is None else min(network, float(self.link_bytes_per_s))


_TYPES = {field.name: str(field.type) for field in fields(Hardware)}
_KEYS = {**_TYPES, "sources": _TYPES["source"]}
del _KEYS["source"]


def hardware(name: HardwareLike, file: str | os.PathLike[str] | None = None) -> Hardware:
    """What is known of an accelerator.

    Args:
        name: Its name, the ``device_kind`` that JAX gives it, or the beginning of its topologies'
            names, in any case: ``"TPU v5e"``, ``"TPU v5 lite"``, ``"v5e"``. Or a file that holds one
            accelerator. A ``Hardware`` is returned as it is.
        file: A TOML file (or JSON, YAML) with a table ``[[chips]]`` per accelerator, whose keys are
            the attributes of ``Hardware`` and ``sources``; it is searched before what comes along.

    Raises:
        HardwareError: It is unknown, with the nearest name, or its file is malformed.

    Example:
        >>> from axisrules import cost
        >>> chip = cost.hardware("TPU v5e")
        >>> chip.memory_bytes, chip.link_bytes_per_s
        (16911433728, 45000000000)
        >>> print(cost.hardware("TPU7x").memory_bytes_per_s)
        None
    """
    if isinstance(name, Hardware):
        return name
    if isinstance(name, os.PathLike) or (isinstance(name, str) and name.endswith(SUFFIXES)):
        return _only(load_hardware(name), name)
    known = (*(() if file is None else load_hardware(file)), *shipped())
    if not isinstance(name, str):
        raise HardwareError(f"{name!r} names no hardware", fix=f"use one of: {_names(known)}.")
    for fits in (_is_called, _begins):
        found = [chip for chip in known if fits(chip, name)]
        if len({chip.name for chip in found}) == 1:
            return found[0]
    words = [word for chip in known for word in _words(chip)]
    raise HardwareError(
        f"hardware {name!r} is unknown{did_you_mean(name, words)}",
        fix=f"use one of: {_names(known)}; or describe yours in a TOML file: {_EXAMPLE}",
    )


def as_hardware(given: HardwareLike) -> Hardware | None:
    """The hardware that was asked for, or ``None`` where none was."""
    return None if given is None else hardware(given)


def load_hardware(path: str | os.PathLike[str]) -> tuple[Hardware, ...]:
    """The accelerators in a file.

    Raises:
        HardwareError: The file is malformed; everything that is wrong is in the one error.
    """
    where = os.fspath(path)
    data = read(path, HardwareError)
    chips = data.get("chips") if isinstance(data, Mapping) else None
    if isinstance(data, Mapping) and chips is None and "name" in data:
        chips = [data]
    if not isinstance(chips, list) or not chips:
        raise HardwareError(f"{where} describes no hardware", paths=[where], fix=_EXAMPLE)
    problems: list[HardwareError] = []
    found = [_chip(chip, f"{where}[{at}]", problems) for at, chip in enumerate(chips)]
    raise_all(problems)
    return tuple(chip for chip in found if chip is not None)


@cache
def shipped() -> tuple[Hardware, ...]:
    """The accelerators that come along."""
    data = json.loads(_DATA.read_text(encoding="utf-8"))
    problems: list[HardwareError] = []
    found = [_chip(chip, chip["name"], problems) for chip in data["chips"]]
    raise_all(problems)
    return tuple(chip for chip in found if chip is not None)


def _chip(data: Any, where: str, problems: list[HardwareError]) -> Hardware | None:
    """One accelerator from plain data; what is wrong with it is added to the problems."""
    before = len(problems)
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str) or not data["name"]:
        problems.append(HardwareError(f"{where} has no name", paths=[where], fix=_EXAMPLE))
        return None
    made: dict[str, Any] = {}
    for key, value in data.items():
        if key not in _KEYS:
            text = f"{where} has the unknown key {key!r}{did_you_mean(key, _KEYS)}"
            problems.append(HardwareError(text, paths=[where], fix=f"use one of: {', '.join(_KEYS)}."))
        elif value is not None:
            read_value = _read(value, _KEYS[key])
            made["source" if key == "sources" else key] = read_value
            if read_value is None:
                text = f"{key} of {data['name']} is {value!r}, which is no {_WORDS[_KEYS[key]]}"
                problems.append(HardwareError(text, paths=[where], fix="leave out what is unknown."))
    return Hardware(**made) if len(problems) == before else None


_WORDS = {
    "str": "text",
    "str | None": "text",
    "int | None": "positive number",
    "tuple[int, int] | None": "pair of positive numbers",
    "tuple[str, ...]": "list of texts",
}


def _read(value: Any, kind: str) -> Any:
    if kind.startswith("str"):
        return value if isinstance(value, str) else None
    if kind.startswith("int"):
        return _number(value)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    if kind.startswith("tuple[str"):
        return tuple(value) if all(isinstance(one, str) for one in value) else None
    pair = tuple(map(_number, value))
    return pair if len(pair) == 2 and None not in pair else None


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value > 0 and value == int(value) else None


def _words(chip: Hardware) -> list[str]:
    return [word for word in (chip.name, chip.device_kind, chip.topology) if word]


def _is_called(chip: Hardware, name: str) -> bool:
    return name.casefold() in (word.casefold() for word in _words(chip))


def _begins(chip: Hardware, name: str) -> bool:
    return bool(name) and chip.name.casefold().startswith(name.casefold())


def _names(known: Sequence[Hardware]) -> str:
    return ", ".join(dict.fromkeys(chip.name for chip in known))


def _only(found: Sequence[Hardware], path: Any) -> Hardware:
    if len(found) > 1:
        raise HardwareError(
            f"{os.fspath(path)} describes {len(found)} kinds of hardware",
            paths=[os.fspath(path)],
            fix=f"pass file= and one of their names: {_names(found)}.",
        )
    return found[0]
