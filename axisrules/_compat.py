"""The only file that looks behind JAX's public API.

Each entry says which versions need it, why, and when it can go.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

# XLA's CPU client takes over a host buffer without copying it when the buffer is contiguous
# and aligned to this many bytes, whatever `may_alias` says (seen on jax 0.7.2 to 0.12.0).
# Goes when `device_put(..., may_alias=False)` is honoured for numpy arrays.
ZERO_COPY_ALIGNMENT = 64


def in_trace() -> bool:
    """Whether JAX is tracing.

    No public function says so (jax 0.7.2 to 0.12.0). Goes when one does.
    """
    from jax._src.core import trace_state_clean

    return not trace_state_clean()


def concrete_mesh() -> Mesh | None:
    """The mesh of ``jax.set_mesh`` with its devices, also inside a trace.

    ``jax.sharding.get_mesh`` is missing before jax 0.8 and raises inside a trace.
    Goes when both are no longer so.
    """
    from jax._src.mesh import get_concrete_mesh

    mesh = get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def legacy_mesh() -> Mesh | None:
    """The mesh of the legacy ``with mesh:``, where JAX still shows it.

    ``jax.set_mesh`` does not see it. Goes with ``jax.interpreters.pxla.thread_resources``,
    which is deprecated since jax 0.8.2.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.interpreters import pxla

            mesh = pxla.thread_resources.env.physical_mesh
        except (ImportError, AttributeError):
            return None
    return None if mesh.empty else mesh


def constraint_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh for a constraint inside ``shard_map``.

    jax 0.7.2 cannot read a sharding whose mesh has Manual axes ("Unhandled OpSharding type") and
    takes one in which they are Auto, which later versions refuse. Goes with jax 0.7.
    """
    if hasattr(jax.sharding, "get_mesh") or AxisType.Manual not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if kind == AxisType.Manual else kind for kind in mesh.axis_types)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)


def movable(array: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A value as ``device_put`` can move it to another mesh: the same shards, on Auto axes where needed.

    ``device_put`` carries the type that Explicit axes give an array over to the new mesh, and fails where
    that one lacks an axis of it (seen on jax 0.7.2 and 0.8.1, not on 0.10.2). Goes with jax 0.8.
    """
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    names = sharding.mesh.axis_names
    if AxisType.Explicit not in sharding.mesh.axis_types or set(names) <= set(mesh.axis_names):
        return array
    automatic = Mesh(sharding.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, NamedSharding(automatic, sharding.spec), shards, dtype=array.dtype
    )


def current_trace() -> object:
    """The trace that JAX is in.

    Rules that were called for inside a trace belong to it, and no public function tells one trace from
    another (jax 0.7.2 to 0.12.0). Goes when one does.
    """
    from jax._src.core import trace_ctx

    return trace_ctx.trace


def coordination_client() -> Any:
    """The client of the key-value store that ``jax.distributed.initialize`` starts, or ``None``.

    What is public (``jax.experimental.multihost_utils``) runs a computation on all devices, which must
    not come from a second thread. Goes when JAX exposes the store (jax 0.7.2 to 0.12.0: not public).
    """
    from jax._src.distributed import global_state

    return global_state.client


def enable_x64(value: bool) -> AbstractContextManager[Any]:
    """Turns x64 on or off for this thread.

    Public as ``jax.enable_x64`` since jax 0.8, before that in ``jax.experimental``. Goes with jax 0.7.
    """
    switch: Any = getattr(jax, "enable_x64", None)
    if switch is None:
        switch = vars(importlib.import_module("jax.experimental"))["enable_x64"]
    context: AbstractContextManager[Any] = switch(value)
    return context


def forget_origins() -> None:
    """Spares the trace that JAX is in the search for the origins of a value.

    Before jax 0.12 even ``hasattr(tracer, "sharding")`` writes the message that names all operations
    that a value comes from, which takes time that grows with the number of operations: modules of
    Flax NNX ask for every random key. Only messages lose by it. Goes with jax 0.11.
    """
    frame = getattr(current_trace(), "frame", None)
    if frame is None or not hasattr(frame, "find_progenitors"):
        return
    kind = type(frame)
    brief = type(
        kind.__name__, (kind,), {"__slots__": (), "find_progenitors": lambda self, tracer: (None, None)}
    )
    frame.__class__ = brief


def without_derivative(exported: Any) -> Any:
    """An exported program without the closure that would differentiate it, so that it can be pickled.

    ``Exported.serialize`` needs the package flatbuffers, which JAX does not bring (jax 0.7.2 to 0.12.0).
    Goes when it does.
    """
    return dataclasses.replace(exported, _get_vjp=None)
