"""Memory of a training step per device, from the plan alone.

Owns the sum and its kinds. What a program needs while it runs is not in it: a plan cannot tell
temporaries, so "fits" means what stays, and only "does not fit" is the last word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from axisrules._errors import PolicyError
from axisrules._plan import Plan
from axisrules._text import format_bytes, format_mesh
from axisrules.cost import _rows
from axisrules.cost._bytes import shard_bytes, source_of
from axisrules.cost._given import check_mesh, check_tree
from axisrules.cost._hardware import Hardware, HardwareLike, as_hardware
from axisrules.cost._rows import Row

_MOST_DEVICES = 2**20


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes that the fullest device holds, by kind.

    Attributes:
        parameters: The parameters.
        gradients: Their gradients, of the same dtype and layout; 0 where they were left out.
        optimizer: Every slot of the optimizer's state.
        batch: The batch; 0 where none was given.
        host: What lies in the memory of the host.
        mesh: Axis sizes.
        hardware: The accelerator, if one was named.
        source: Where the numbers come from.
    """

    parameters: int
    gradients: int
    optimizer: Mapping[str, int]
    batch: int
    host: int
    mesh: Mapping[str, int]
    hardware: Hardware | None = None
    source: str = ""
    _larger: Callable[[int], Mapping[str, int] | None] = field(default=lambda _: None, repr=False)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind; a slot of the optimizer is ``"optimizer/<slot>"``."""
        slots = {f"optimizer/{slot}": size for slot, size in self.optimizer.items()}
        rest = {"parameters": self.parameters, "gradients": self.gradients, **slots, "batch": self.batch}
        return {kind: size for kind, size in rest.items() if size}

    @property
    def arguments(self) -> int:
        """Bytes of a step's arguments: parameters, optimizer and batch, without gradients."""
        return self.parameters + sum(self.optimizer.values()) + self.batch

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all kinds."""
        return self.arguments + self.gradients

    @property
    def limit(self) -> int | None:
        """Bytes that the compiler grants a device, or ``None`` if unknown."""
        return None if self.hardware is None else self.hardware.limit

    @property
    def fits(self) -> bool | None:
        """Whether it fits, as far as a plan can tell; ``None`` where the limit is unknown.

        Temporaries are not in it: ``False`` is certain, ``True`` leaves ``free`` for them.
        """
        return None if self.limit is None else self.bytes_per_device <= self.limit

    @property
    def free(self) -> int | None:
        """Bytes that are left for activations and other temporaries."""
        return None if self.limit is None else self.limit - self.bytes_per_device

    @property
    def verdict(self) -> str:
        """Whether it fits, in words; without hardware nothing."""
        return "" if self.hardware is None else _verdict(self)

    @cached_property
    def smallest_mesh(self) -> dict[str, int] | None:
        """The fewest devices on which it fits, of a mesh with the same axes.

        Every axis of more than one device may be halved or doubled. ``None`` where the limit is
        unknown or no mesh of up to 2**20 devices is enough. The batch does not grow with the mesh.
        """
        found = None if self.limit is None else self._larger(self.limit)
        return None if found is None else dict(found)

    def __str__(self) -> str:
        lines = [f"memory per device on {format_mesh(self.mesh)}"]
        lines += [f"  {kind:<24} {size:>18,} bytes" for kind, size in self.kinds.items()]
        lines.append(f"  {'all':<24} {self.bytes_per_device:>18,} bytes")
        if self.host:
            lines.append(f"  {'on the host':<24} {self.host:>18,} bytes")
        if self.hardware is not None:
            lines.append(f"  {_verdict(self)}")
        return "\n".join([*lines, f"  source: {self.source}"])


def _verdict(memory: Memory) -> str:
    name = memory.hardware.name if memory.hardware else ""
    if memory.limit is None or memory.free is None:
        return f"whether it fits is unknown: so is the memory of {name}"
    if memory.fits:
        return f"fits {name} ({format_bytes(memory.limit)}), with {format_bytes(memory.free)} for temporaries"
    needed = memory.smallest_mesh
    advice = "no mesh of these axes is enough" if needed is None else f"{format_mesh(needed)} would be enough"
    return f"does not fit {name} ({format_bytes(memory.limit)}): {advice}"


def memory(
    plan: Plan,
    optimizer: Any = None,
    batch: Any = None,
    gradients: bool = True,
    hardware: HardwareLike = None,
) -> Memory:
    """Bytes per device of everything that stays during a training step, by kind.

    Args:
        plan: The plan of the parameters.
        optimizer: An object with ``init(params)``, such as any of optax; or that function; or a plan
            of the state, or the state's arrays. What has no sharding follows the parameters.
        batch: A plan of the batch, or its arrays (``ShapeDtypeStruct``s) with shardings; an array
            without one counts as whole.
        gradients: Whether gradients are held beside the parameters.
        hardware: The accelerator: its padding to tiles and its limit count.

    Raises:
        HardwareError: The hardware is unknown.
        StateError: An array of the optimizer's state belongs to no parameter.
        MeshError: The batch or the state lies on another mesh.
        PolicyError: ``plan`` is no plan, ``optimizer`` is none, or ``batch`` holds no array.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> from axisrules import cost
        >>> plan = ar.plan({"up": np.zeros((1024, 64), np.float32)}, {"up": "embed mlp"},
        ...                mesh="data=4,model=2", rules={"embed": "data", "mlp": "model"})
        >>> held = cost.memory(plan, hardware="TPU v5e")
        >>> held.parameters, held.gradients, held.fits
        (32768, 32768, True)
    """
    if not isinstance(plan, Plan):
        raise PolicyError(f"a {type(plan).__qualname__} is no plan", fix="pass what axisrules.plan returns.")
    chip = as_hardware(hardware)
    parameters = _rows.of_plan(plan, "parameters")
    rows = [*parameters, *(_rows.gradients(parameters) if gradients else [])]
    if optimizer is not None:
        check_mesh(optimizer, plan, "optimizer's state")
        rows += [row._replace(kind=f"optimizer/{row.kind}") for row in _rows.of_optimizer(optimizer, plan)]
    if batch is not None:
        check_tree(batch, "batch")
        check_mesh(batch, plan, "batch")
        rows += _rows.of_tree(batch, "batch")
    sizes = dict(plan.mesh.shape_tuple)
    sums = _sums(rows, sizes, chip)
    on_host = plan.memory_kind in ("pinned_host", "unpinned_host")
    slots = {kind: size for kind, size in sums.items() if kind.startswith("optimizer/")}
    return Memory(
        0 if on_host else sums.get("parameters", 0),
        sums.get("gradients", 0),
        _short(slots),
        sums.get("batch", 0),
        sums.get("parameters", 0) if on_host else 0,
        sizes,
        chip,
        source_of(chip),
        lambda limit: _smallest(
            plan, [row for row in rows if not on_host or row.kind != "parameters"], chip, limit
        ),
    )


def _sums(rows: Iterable[Row], sizes: Mapping[str, int], chip: Hardware | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        size = shard_bytes(row.shard(sizes), row.dtype, chip) * row.copies
        found[row.kind] = found.get(row.kind, 0) + size
    return found


def _short(slots: Mapping[str, int]) -> dict[str, int]:
    """Slots by the last part of their path where that tells them apart: ``mu`` for ``0/mu``."""
    whole = [slot.removeprefix("optimizer/") for slot in slots]
    last = [slot.rpartition("/")[2] for slot in whole]
    names = [short if last.count(short) == 1 else slot for short, slot in zip(last, whole, strict=True)]
    return dict(zip(names, slots.values(), strict=True))


def _smallest(plan: Plan, rows: Sequence[Row], chip: Hardware | None, limit: int) -> Mapping[str, int] | None:
    """The first mesh, by number of devices, on which the rows fit."""
    fill = _rows.fill_axes(plan)
    total = sum(math.prod(row.shape) * int(row.dtype.itemsize) * row.copies for row in rows)
    for sizes in _meshes(dict(plan.mesh.shape_tuple)):
        if total > limit * math.prod(sizes.values()):
            continue  # not even if everything were split
        if sum(_sums([row.on(plan, sizes, fill) for row in rows], sizes, chip).values()) <= limit:
            return sizes
    return None


def _meshes(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Meshes with the same axes, by number of devices, then by likeness to the given one."""
    choices = [_powers(size) for size in sizes.values()]

    def order(chosen: tuple[int, ...]) -> tuple[int, float, tuple[int, ...]]:
        stretch = [math.log2(new / old) for new, old in zip(chosen, sizes.values(), strict=True) if old > 1]
        return math.prod(chosen), max(stretch, default=0.0) - min(stretch, default=0.0), chosen

    found = (one for one in itertools.product(*choices) if math.prod(one) <= _MOST_DEVICES)
    for chosen in sorted(found, key=order):
        yield dict(zip(sizes, chosen, strict=True))


def _powers(size: int) -> list[int]:
    """A size halved and doubled, as often as that goes."""
    if size == 1:
        return [1]
    odd = size
    while odd % 2 == 0:
        odd //= 2
    found = []
    while odd <= _MOST_DEVICES:
        found.append(odd)
        odd *= 2
    return found
