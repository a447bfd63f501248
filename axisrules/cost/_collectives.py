"""Every collective of a compiled program, and what it puts on the wires.

Owns ``collectives`` and the match between a module and a mesh. The walk stands in ``_walk.py``.
"""

from __future__ import annotations

import math
from typing import Any

from axisrules._errors import MeshError, PolicyError
from axisrules._meshes import MeshLike, Sizes, as_mesh, axis_sizes
from axisrules.cost._collective import Collectives
from axisrules.cost._modules import Module, parse
from axisrules.cost._rewrites import Changes
from axisrules.cost._walk import Walk


def collectives(module: Any, mesh: MeshLike) -> Collectives:
    """Every collective of a compiled program: kind, mesh axes, dtype, bytes, executions.

    Reads modules of CPU, GPU and TPU, finished or right after partitioning. Runs and compiles
    nothing.

    Args:
        module: What ``jit(f).lower(...).compile()`` returns, or the text of its module.
        mesh: The mesh that it was compiled for, or a mapping of its axis sizes in order. The numbers
            of a module are positions in ``mesh.devices.flat``.

    Returns:
        The ``Collectives``; bytes are those that one device sends.

    Raises:
        PolicyError: This is no compiled module.
        MeshError: The module was compiled for another number of devices.

    Example:
        >>> from axisrules import cost
        >>> text = '''HloModule jit_f, num_partitions=8
        ... ENTRY %main (p: f32[4,16]) -> f32[16,16] {
        ...   %p = f32[4,16]{1,0} parameter(0)
        ...   ROOT %ag = f32[16,16]{1,0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
        ... }'''
        >>> cost.collectives(text, {"data": 4, "model": 2}).wire_bytes_per_axis
        {'data': 768}
    """
    text = module if isinstance(module, str) else _text_of(module)
    return read(parse(text), axis_sizes(as_mesh(mesh)))


def _text_of(module: Any) -> str:
    as_text = getattr(module, "as_text", None)
    if as_text is None:
        raise PolicyError(
            f"a {type(module).__qualname__} is no compiled module",
            fix="pass lowered.compile(), or its .as_text().",
        )
    text = as_text()
    if not isinstance(text, str):
        raise PolicyError("this compiled program shows no text", fix="compile it for one backend.")
    return text


def read(module: Module, sizes: Sizes, *, changes: Changes | None = None) -> Collectives:
    """The collectives of a module that was parsed.

    Args:
        module: The module.
        sizes: The axes of its mesh.
        changes: All-reduces that a later compiler makes something else of.
    """
    outer, inner = _slices(module, sizes)
    walk = Walk(module, inner, outer, changes or {})
    walk.visit(module.entry, 1, [])
    walk.list_unknown()
    return Collectives(tuple(walk.found), dict(sizes), tuple(dict.fromkeys(walk.unread)))


def _slices(module: Module, sizes: Sizes) -> tuple[Sizes, Sizes]:
    """The axes between slices, which come first, and those of one slice, which a module is made for.

    Raises:
        MeshError: The module was compiled for another number of devices.
    """
    devices = math.prod(size for _, size in sizes)
    if module.devices in (None, devices):
        return (), sizes
    for count in range(1, len(sizes)):
        inside = math.prod(size for _, size in sizes[count:])
        if module.has_slices and inside == module.devices:
            return sizes[:count], sizes[count:]
    raise MeshError(
        f"the mesh has {devices} devices, and the module was compiled for {module.devices}",
        mesh=dict(sizes),
        fix="pass the mesh that it was compiled for; axes between slices come first.",
    )
