"""Names of TPU topologies.

Owns the check of a name before it reaches the TPU compiler, which aborts the process at a wrong
one, and how the compiler is told which machine to think of.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any

from axisrules._errors import HardwareError, MissingExtraError
from axisrules._meshes import Sizes
from axisrules._text import did_you_mean, format_mesh

# Per prefix: the chips of a host as the compiler wants them, the name of an accelerator, JAX
# devices per chip, and the largest torus. A slice has power-of-two sides, or multiples of four.
_FAMILIES: dict[str, tuple[int, str, int, tuple[int, ...]]] = {
    "v2": (2, "v2", 2, (16, 16)),
    "v3": (2, "v3", 2, (32, 32)),
    "v4": (3, "v4", 1, (16, 16, 16)),
    "v5e": (2, "v5litepod", 1, (16, 16)),
    "v5p": (3, "v5p", 1, (16, 20, 28)),
    "v6e": (2, "v6e", 1, (16, 16)),
    "tpu7x": (3, "tpu7x", 2, (16, 24, 24)),
}
_UNKNOWN = {"v2"}  # of which `hardware` knows nothing


@dataclass(frozen=True, slots=True)
class Topology:
    """Chips to compile for.

    Attributes:
        name: As the compiler takes it, such as ``"v5e:4x4"``.
        prefix: The family.
        devices: JAX devices.
        options: What else the compiler has to be told.
    """

    name: str
    prefix: str
    devices: int
    options: dict[str, Any]

    @property
    def chip(self) -> str | None:
        """The accelerator, as ``hardware`` knows it, if it does."""
        return None if self.prefix in _UNKNOWN else self.prefix

    @property
    def environment(self) -> dict[str, str]:
        """Variables that keep the compiler quiet and quick on a machine without a TPU."""
        accelerator = f"{_FAMILIES[self.prefix][1]}-{self.devices}"
        return {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": accelerator,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_LOG_DIR": "disabled",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
        }

    def check(self, sizes: Sizes) -> None:
        """Refuses a mesh that the topology cannot hold.

        Raises:
            HardwareError: Its number of devices is another.
        """
        count = math.prod(size for _, size in sizes)
        if count != self.devices:
            raise HardwareError(
                f"topology {self.name} has {self.devices} devices, and the mesh {format_mesh(dict(sizes))} "
                f"has {count}",
                mesh=dict(sizes),
                fix="choose a topology whose chips the mesh fills.",
            )

    def libtpu_version(self) -> str:
        """The version of the TPU compiler.

        Raises:
            MissingExtraError: It is not installed.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise MissingExtraError(
                "the TPU compiler needs libtpu, which is not installed", fix="pip install 'axisrules[tpu]'"
            )
        try:
            return importlib.metadata.version("libtpu")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


def topology(name: Any) -> Topology:
    """A topology by its name, checked.

    Raises:
        HardwareError: There is no such topology, with the nearest family.
    """
    example = 'pass topology= like "v5e:4x4": a family, and the chips along each side of the torus.'
    if name is None:
        raise HardwareError("the TPU compiler needs a topology, and none was given", fix=example)
    if not isinstance(name, str):
        raise HardwareError(f"{name!r} names no topology", fix=example)
    prefix, _, text = name.partition(":")
    family = _FAMILIES.get(prefix)
    if family is None:
        known = ", ".join(_FAMILIES)
        raise HardwareError(
            f"topology {name!r} is unknown{did_you_mean(prefix.strip().casefold(), _FAMILIES)}",
            fix=f"{example} Families: {known}.",
        )
    rank, _, per_chip, largest = family
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise HardwareError(f"topology {name!r} has no sides", fix=example)
    sides = tuple(map(int, text.split("x")))
    if len(sides) != rank:
        raise HardwareError(f"topology {name!r} has {len(sides)} sides, and {prefix} has {rank}", fix=example)
    if not _is_slice(sides, largest):
        whole = "x".join(map(str, largest))
        raise HardwareError(
            f"there is no slice {text} of {prefix}, whose largest is {whole}",
            fix="choose sides that are powers of two or multiples of four, each no larger than that.",
        )
    options = {"chip_config_name": "megacore"} if prefix == "v4" else {}
    return Topology(name, prefix, math.prod(sides) * per_chip, options)


def _is_slice(sides: tuple[int, ...], largest: tuple[int, ...]) -> bool:
    fits = all(side <= most for side, most in zip(sorted(sides), sorted(largest), strict=True))
    return fits and all(side in (1, 2) or (side > 0 and side % 4 == 0) for side in sides)
