"""Flax for axisrules: NNX modules, states and variables, and the boxes of Linen.

Owns where Flax keeps the names of an array, and how its objects are put together again without its
own sharding logic. Resolves nothing. Found by entry point; a user imports ``named`` and
``rules_from_flax`` alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core.meta import AxisMetadata
from jax.sharding import PartitionSpec

from axisrules._trees import NO_ENTRY, Flat, flatten, flatten_pytree, join
from axisrules_flax import _variables
from axisrules_flax._making import making
from axisrules_flax._named import named
from axisrules_flax._scope import rules_from_flax

__all__ = ["adapter", "named", "rules_from_flax"]


class _Adapter:
    """Takes objects of NNX and Linen, and whatever else Flax registers with JAX, apart."""

    def flatten(self, node: Any) -> Flat:
        """The leaves of one object of Flax.

        A module has the paths of its ``nnx.State``, where what is shared stands once; a variable
        or a box is one leaf if it holds one array. The names of a variable that holds several
        arrays go to each of them.
        """
        if isinstance(node, nnx.Variable):
            return _flatten_variable(node)
        if isinstance(node, nnx.Pytree):
            return _flatten_module(node)
        if isinstance(node, AxisMetadata) and hasattr(node, "value"):
            return _flatten_box(node)
        return flatten_pytree(node)

    making = staticmethod(making)


adapter = _Adapter()

# Tree mode, which newer versions may be set to, refuses shared variables.
_GRAPH = {"graph": True} if "graph" in inspect.signature(nnx.split).parameters else {}


def _flatten_module(module: Any) -> Flat:
    graphdef, state = nnx.split(module, **_GRAPH)
    found = list(nnx.to_flat_state(state))
    paths = [path for path, _ in found]

    def unflatten(leaves: Sequence[Any]) -> Any:
        return nnx.merge(graphdef, nnx.from_flat_state(zip(paths, leaves, strict=True)))

    keys = [tuple(map(str, path)) for path in paths]
    return join(keys, [flatten(leaf) for _, leaf in found], unflatten)


def _flatten_variable(variable: Any) -> Flat:
    kind, metadata = getattr(variable, "var_type", type(variable)), variable.get_metadata()
    value = variable.get_raw_value()  # no hook runs
    is_ref = isinstance(value, jax.Ref)
    below = flatten(value[...] if is_ref else value)
    entry = _names(metadata, getattr(value, "shape", ()))
    return _wrap(below, entry, lambda value: _variable(kind, metadata, value, is_ref))


def _variable(kind: Any, metadata: Mapping[str, Any], value: Any, is_ref: bool) -> Any:
    """A variable that is made as Flax makes copies: no hook runs, and nothing is laid out."""
    kept = dict(metadata)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        kept |= {key: False for key in ("hijax", "is_hijax") if key in kept}  # it could hold arrays alone
    elif is_ref:
        value = jax.new_ref(value)
    return kind.from_metadata(value, kept)


def _flatten_box(box: Any) -> Flat:
    names = getattr(box, "names", None)
    entry = _names(getattr(box, "metadata", {})) if names is None else _entry(names)
    return _wrap(flatten(box.value), entry, box.replace_boxed(None).replace_boxed)


def _wrap(below: Flat, entry: Any, wrap: Callable[[Any], Any]) -> Flat:
    """A value inside of one object, which names every leaf that has no names of its own."""
    names, build = [entry if own is NO_ENTRY else own for own in below.names], below.rebuild
    return Flat(below.keys, below.leaves, names, lambda new: wrap(build(new)))


# Where the names stand: ours, Flax's, and those of older versions of Flax.
_KEYS = ("axis_names", "out_sharding", "sharding", "sharding_names")


def _names(metadata: Mapping[str, Any], shape: Sequence[int] = ()) -> Any:
    """The entry for a variable; for Flax, an empty annotation is none."""
    if _variables.SHAPE in metadata and (named := _variables.entry(metadata, shape)) is not None:
        return named
    ours, *others = (metadata.get(key) for key in _KEYS)
    if ours is not None:
        return _entry(ours)
    return next((_entry(given) for given in others if given), NO_ENTRY)


def _entry(given: Any) -> Any:
    """An annotation as names, or as a ``PartitionSpec`` where it can only be a layout.

    A layout is what belongs to a mesh (``NamedSharding``, ``Format``) or gives several axes to one
    dimension.
    """
    of_mesh = getattr(getattr(given, "sharding", given), "spec", None)
    if of_mesh is not None:
        return of_mesh
    if not isinstance(given, (tuple, list, PartitionSpec)):
        return given
    entries = tuple(given)
    is_layout = any(isinstance(entry, (tuple, list)) for entry in entries)
    return PartitionSpec(*map(_axes, entries)) if is_layout else entries


def _axes(entry: Any) -> Any:
    return tuple(entry) if isinstance(entry, list) else entry
