"""``with_logical_partitioning``: initializers whose arrays are born sharded.

Owns the sharing of compiled initializers. Decides no layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axisrules import _compat
from axisrules._behaviour import behaviour
from axisrules._errors import raise_all
from axisrules._layout import check_expressible, lay_out, manual_axes, with_auto_axes, without_axes
from axisrules._meshes import active_mesh, axis_sizes
from axisrules._names import AxisNames, fit_names, parse_names
from axisrules._policies import Policies
from axisrules._resolution import Resolution
from axisrules._resolve import remember, resolve_array
from axisrules._scope import get_logical_axis_rules
from axisrules._specs import check_spec

Initializer: TypeAlias = Callable[..., jax.Array]

_POLICY = Policies(unmapped="replicate")  # as in the guides: a name without a rule is whole


def with_logical_partitioning(
    initializer: Initializer,
    axis_names: AxisNames | None = None,
    partition_spec: PartitionSpec | None = None,
) -> Initializer:
    """An initializer whose arrays are born where the active rules say.

    The rules and the mesh are those that are active when the initializer is called. Under a mesh
    the array is created on its shards; without one it is an ordinary array. Inside a trace the
    layout is a constraint. Initializers that do the same, such as two made by
    ``jax.nn.initializers.normal()``, share one compilation per shape, dtype and sharding.

    Args:
        initializer: ``(key, shape, dtype) -> array``, as in ``jax.nn.initializers``.
        axis_names: One logical name or ``None`` per dimension, or the short form. They win over
            ``partition_spec``; a name that no rule mentions stays whole, without a warning.
        partition_spec: The layout itself.

    Returns:
        An initializer ``(key, shape, dtype=float32)`` with the bits of ``jax.jit(initializer)``.

    Raises:
        AxisRulesError: When called: the names or the spec do not fit the shape or the mesh.

    Example:
        >>> import axisrules as ar, jax
        >>> init = ar.with_logical_partitioning(jax.nn.initializers.normal(), "input output")
        >>> with jax.set_mesh(ar.make_mesh("data=4,model=2")), ar.map_logical_axis_names(
        ...     {"output": "model"}
        ... ):
        ...     tuple(init(jax.random.key(0), (8, 12)).sharding.spec)
        (None, 'model')
    """
    names = None if axis_names is None else parse_names(axis_names)

    @functools.wraps(initializer)
    def init(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        size, dtype = tuple(shape), jnp.float32 if dtype is None else dtype
        fitted = None if names is None else fit_names(names, size)
        mesh = None if fitted is None and partition_spec is None else active_mesh()
        if mesh is None:
            made: jax.Array = initializer(key, size, dtype)
            return made
        resolution = _resolve(fitted, partition_spec, mesh, size)
        raise_all(resolution.problems)
        return _born_sharded(initializer, key, size, dtype, mesh, resolution.spec)

    return init


def _resolve(
    names: Any, spec: PartitionSpec | None, mesh: Mesh | AbstractMesh, shape: tuple[int, ...]
) -> Resolution:
    rules, sizes = get_logical_axis_rules(), axis_sizes(mesh)
    if names is None:
        kept = without_axes(spec or PartitionSpec(), manual_axes(mesh))
        return check_spec(kept, rules, sizes, shape)
    return resolve_array(names, rules, sizes, shape, _POLICY, frozenset(manual_axes(mesh)))


def _born_sharded(
    initializer: Initializer,
    key: Any,
    shape: tuple[int, ...],
    dtype: Any,
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
) -> jax.Array:
    if isinstance(mesh, AbstractMesh) or _compat.in_trace():
        check_expressible(mesh, spec, traced=True)
        inside: jax.Array = lay_out(initializer(key, shape, dtype), mesh, spec)
        return inside
    kept: list[Any] = []
    does = behaviour(initializer, kept)
    within = mesh if any(map(_has_explicit_axes, kept)) else with_auto_axes(mesh)
    compiled = _compiled((does, shape, jnp.dtype(dtype), type(dtype), NamedSharding(within, spec)), kept)
    same = _Same(does, initializer, dtype)
    if getattr(key, "committed", False) or _has_explicit_axes(key):
        key = jax.device_put(_compat.movable(key, within), NamedSharding(within, PartitionSpec()))
    with jax.set_mesh(within):
        made = compiled(key, same)
    wanted = NamedSharding(mesh, spec)
    return made if made.sharding == wanted else jax.device_put(made, wanted)  # moves no byte


def _has_explicit_axes(value: Any) -> bool:
    mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


class _Same:
    """An initializer that equals those that do the same: jit compares it, and traces the one at hand."""

    def __init__(self, does: Any, initializer: Initializer, dtype: Any) -> None:
        self.does, self.initializer, self.dtype = does, initializer, dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and bool(self.does == other.does)

    def __hash__(self) -> int:
        return hash(self.does)


_Compiled: TypeAlias = Callable[[Any, _Same], jax.Array]

# With every compiled initializer stand the objects whose identity is part of its key.
_COMPILED: dict[Any, tuple[_Compiled, list[Any]]] = {}


def _compiled(key: Any, kept: list[Any]) -> _Compiled:
    """The jitted initializer, one per behaviour, shape, dtype and sharding."""
    found = _COMPILED.get(key)
    if found is None:
        _, shape, _, _, sharding = key

        def make(key: Any, same: _Same) -> jax.Array:
            return same.initializer(key, shape, same.dtype)

        found = jax.jit(make, static_argnums=1, out_shardings=sharding), kept
        remember(_COMPILED, key, found)
    return found[0]
