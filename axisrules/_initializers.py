"""``with_logical_partitioning``: initializers whose arrays are born sharded.

Owns the sharing of compiled initializers. Decides no layout.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axisrules._constrain import check_expressible, lay_out, manual_axes
from axisrules._errors import raise_all
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
        size = tuple(shape)
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
        return check_spec(spec or PartitionSpec(), rules, sizes, shape)
    return resolve_array(names, rules, sizes, shape, _POLICY, frozenset(manual_axes(mesh)))


def _born_sharded(
    initializer: Initializer,
    key: Any,
    shape: tuple[int, ...],
    dtype: Any,
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
) -> jax.Array:
    if isinstance(mesh, AbstractMesh):  # inside a trace
        check_expressible(mesh, spec, traced=True)
        inside: jax.Array = lay_out(initializer(key, shape, dtype), mesh, spec)
        return inside
    kept: list[Any] = []
    does = behaviour(initializer, kept)
    within = mesh if any(map(_has_explicit_axes, kept)) else _with_auto_axes(mesh)
    compiled = _compiled(initializer, (does, shape, jnp.dtype(dtype), NamedSharding(within, spec)), kept)
    if getattr(key, "committed", False) or _has_explicit_axes(key):
        key = jax.device_put(key, NamedSharding(within, PartitionSpec()))
    with jax.set_mesh(within):
        made = compiled(key)
    return made if within is mesh else jax.device_put(made, NamedSharding(mesh, spec))  # moves no byte


def _has_explicit_axes(value: Any) -> bool:
    mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes alone.

    On Explicit axes every value of an initializer has a layout of its own, whole unless said
    otherwise: each device would make the whole array, with other bits than on Auto axes.
    """
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


# With every compiled initializer stand the objects whose identity is part of its key.
_COMPILED: dict[Any, tuple[Callable[[Any], jax.Array], list[Any]]] = {}


def _compiled(initializer: Initializer, key: Any, kept: list[Any]) -> Callable[[Any], jax.Array]:
    """The jitted initializer, one per behaviour, shape, dtype and sharding."""
    found = _COMPILED.get(key)
    if found is None:
        _, shape, dtype, sharding = key
        found = jax.jit(lambda k: initializer(k, shape, dtype), out_shardings=sharding), kept
        remember(_COMPILED, key, found)
    return found[0]


def behaviour(value: Any, kept: list[Any]) -> Any:
    """A hashable that is equal for functions that do the same.

    Functions are compared by their code, defaults and captured values, down to plain data; what
    cannot be compared is told apart by identity, which costs a compilation and never a wrong one.

    Args:
        value: A function, or a value that one captures.
        kept: Gets the objects whose identity is part of the result, which have to stay alive.
    """
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell, kept) for cell in value.__closure__ or ()]
        defaults = behaviour(value.__defaults__, kept), behaviour(_items(value.__kwdefaults__), kept)
        return value.__code__, id(value.__globals__), tuple(cells), defaults
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, _items(value.keywords))
        return functools.partial, tuple(behaviour(part, kept) for part in parts)
    if isinstance(value, tuple):
        return type(value), tuple(behaviour(part, kept) for part in value)
    if isinstance(value, (str, bytes, int, float, complex, type(None), jnp.dtype, type)):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    kept.append(value)
    return type(value), id(value)


def _items(mapping: dict[str, Any] | None) -> tuple[Any, ...]:
    return tuple(sorted((mapping or {}).items()))


def _cell(cell: Any, kept: list[Any]) -> Any:
    try:
        return behaviour(cell.cell_contents, kept)
    except ValueError:  # not assigned yet
        return None
