"""What a compiler says of a user's own step.

Owns ``measure`` and its two ways: the partitioner that comes with JAX, which takes seconds, and the
TPU compiler, which has the last word. Runs nothing on any device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axisrules._errors import HardwareError, PolicyError
from axisrules._text import did_you_mean, format_bytes, format_mesh
from axisrules.cost._bytes import shard_bytes
from axisrules.cost._collective import Collectives
from axisrules.cost._collectives import read
from axisrules.cost._compiling import Progress, compiled, partitioned
from axisrules.cost._given import check_time_limit
from axisrules.cost._hardware import Hardware, HardwareLike, as_hardware
from axisrules.cost._lowering import Lowered, lower
from axisrules.cost._modules import parse
from axisrules.cost._moves import seconds
from axisrules.cost._rewrites import rewrites
from axisrules.cost._topologies import Topology
from axisrules.cost._topologies import topology as find_topology

_WAYS = ("partition", "tpu")


@dataclass(frozen=True, eq=False)
class Measured:
    """What a compiler says of a step.

    Attributes:
        collectives: Every collective; ``None`` of a program that does not fit.
        argument_bytes: Bytes of the arguments per device.
        output_bytes: Bytes of the results per device, or ``None`` where the way does not tell.
        temp_bytes: Bytes of temporaries per device, or ``None``: only the TPU compiler knows them.
        alias_bytes: Bytes of results that overwrite arguments, or ``None``.
        fits: Whether the compiler found room; ``None`` where the way does not tell.
        flops: Operations of the whole step by the lowered module, in which the body of a loop
            counts once; or ``None``.
        mesh: Axis sizes.
        hardware: The accelerator, if one was named.
        verdict: The compiler's own words where it does not fit.
        source: Where the numbers come from.
    """

    collectives: Collectives | None
    argument_bytes: int
    output_bytes: int | None
    temp_bytes: int | None
    alias_bytes: int | None
    fits: bool | None
    flops: float | None
    mesh: Mapping[str, int]
    hardware: Hardware | None
    verdict: str
    source: str

    @property
    def wire_bytes_per_axis(self) -> dict[str, int]:
        """Bytes that a device sends per step, by axis, or by axes joined by ``+``."""
        return {} if self.collectives is None else self.collectives.wire_bytes_per_axis

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends per step over all axes."""
        return sum(self.wire_bytes_per_axis.values())

    @property
    def seconds_per_axis(self) -> dict[str, float | None]:
        """A lower bound per axis: bytes over bandwidth; ``None`` where the bandwidth is unknown."""
        return {
            key: seconds(size, key.split("+"), self.mesh, self.hardware) if key else None
            for key, size in self.wire_bytes_per_axis.items()
        }

    @property
    def seconds(self) -> float | None:
        """A lower bound of all communication: the slowest axis; ``None`` where one is unknown."""
        found = list(self.seconds_per_axis.values())
        if self.hardware is None or self.collectives is None or None in found:
            return None
        return max((one for one in found if one is not None), default=0.0)

    @property
    def peak_bytes(self) -> int | None:
        """Arguments, temporaries and results that overwrite nothing, or ``None`` if unknown."""
        if self.temp_bytes is None or self.output_bytes is None:
            return None
        return self.argument_bytes + self.temp_bytes + self.output_bytes - (self.alias_bytes or 0)

    def __str__(self) -> str:
        lines = [
            f"step on {format_mesh(self.mesh)}: {format_bytes(self.argument_bytes)} of arguments per device"
        ]
        if self.peak_bytes is not None:
            lines.append(f"  at most {format_bytes(self.peak_bytes)} with temporaries")
        if self.fits is False:
            lines.append(f"  does not fit: {self.verdict}")
        lines += [f"  {key:<16} {size:>18,} bytes" for key, size in self.wire_bytes_per_axis.items()]
        return "\n".join([*lines, f"  source: {self.source}"])


def measure(
    step: Any,
    *arguments: Any,
    via: str = "partition",
    topology: str | None = None,
    hardware: HardwareLike = None,
    time_limit: float = 600.0,
    progress: Progress | None = None,
) -> Measured:
    """Compiles a step for the shardings of its arguments, and returns memory and collectives.

    Args:
        step: The step: any function, jitted or not; one that takes keywords as ``functools.partial``.
            Its arguments may be modules of a framework, which it may change in place.
        *arguments: Arrays or ``ShapeDtypeStruct``s with shardings on one mesh, in any trees, such as
            ``plan.abstract``; an array without a sharding is whole on every device.
        via: ``"partition"``: the module right after partitioning, by JAX alone, in seconds; its bytes
            were within 15 % of the TPU's for the usual layouts. ``"tpu"``: the TPU compiler, in a
            minute or so, without a TPU.
        topology: With ``via="tpu"``, the chips to compile for, such as ``"v5e:4x4"``.
        hardware: The accelerator, for padding to tiles and lower bounds in seconds; with a topology,
            that of the topology.
        time_limit: Seconds after which the compiler is stopped.
        progress: Called with a line of text every few seconds.

    Raises:
        PolicyError: The step is no function, or returns no array; no argument carries a sharding;
            ``via`` is unknown; or ``time_limit`` is no positive number.
        HardwareError: The topology or the hardware is unknown, the mesh does not fill the topology,
            or the compiler ended without an answer or took too long.
        MissingExtraError: ``via="tpu"`` without libtpu.
        Exception: The step's own error, with a note of the arguments' shapes and shardings.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> from axisrules import cost
        >>> plan = ar.plan({"x": np.zeros((8, 16), np.float32)}, {"x": "batch embed"},
        ...                mesh="data=4", rules={"batch": "data", "embed": None})
        >>> cost.measure(lambda tree: tree["x"].sum(0), plan.abstract).wire_bytes_per_axis
        {'data': 96}
    """
    if via not in _WAYS:
        words = " or ".join(map(repr, _WAYS))
        raise PolicyError(
            f"via={via!r} is no way to measure{did_you_mean(str(via), _WAYS)}", fix=f"use {words}."
        )
    check_time_limit(time_limit, at_once=False)
    if via == "partition":
        return _by_partition(lower(step, arguments, "cpu"), as_hardware(hardware), time_limit, progress)
    where = find_topology(topology)
    lowered = lower(step, arguments, "tpu")
    where.check(lowered.sizes)
    return _by_tpu(lowered, where, time_limit, progress)


def _by_partition(
    lowered: Lowered, chip: Hardware | None, time_limit: float, progress: Progress | None
) -> Measured:
    text = partitioned(lowered.order(), time_limit, progress)
    module = parse(text)
    found = read(module, lowered.sizes, changes=rewrites(module))
    return Measured(
        found,
        _argument_bytes(lowered, chip),
        None,
        None,
        None,
        None,
        lowered.flops,
        dict(lowered.sizes),
        chip,
        "",
        f"the module after partitioning, jax {lowered.version}; arguments from their shardings",
    )


def _argument_bytes(lowered: Lowered, chip: Hardware | None) -> int:
    from axisrules.cost._bytes import _dtype

    sizes = dict(lowered.sizes)
    total = 0
    for shape, dtype, spec in lowered.arguments:
        parts = list(shape)
        for at, entry in enumerate(spec):
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                parts[at] = -(-parts[at] // sizes[axis])
        total += shard_bytes(tuple(parts), _dtype(dtype), chip)
    return total


def _by_tpu(lowered: Lowered, where: Topology, time_limit: float, progress: Progress | None) -> Measured:
    order = {**lowered.order(), "topology": where.name, "topology_options": where.options}
    order["versions"] = (*order["versions"], where.libtpu_version())
    answer = compiled(order, where.environment, time_limit, progress)
    chip = as_hardware(where.chip)
    source = f"the TPU compiler for {where.name}, jax {order['versions'][0]}, libtpu {order['versions'][1]}"
    sizes = dict(lowered.sizes)
    if "error" in answer:
        if not re.search(r"RESOURCE_EXHAUSTED|out of memory|exceed", answer["error"], re.IGNORECASE):
            raise HardwareError(f"the TPU compiler refused the step: {answer['error'][:2000]}")
        held = _argument_bytes(lowered, chip)
        return Measured(
            None, held, None, None, None, False, lowered.flops, sizes, chip, answer["error"][:2000], source
        )
    memory = answer["memory"]
    return Measured(
        read(parse(answer["text"]), lowered.sizes),
        memory["argument"],
        memory["output"],
        memory["temp"],
        memory["alias"],
        True,
        lowered.flops,
        sizes,
        chip,
        "",
        source,
    )
