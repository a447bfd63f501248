"""Equinox modules for axisrules: leaves with their paths and names, and how to put them together.

Owns how Equinox's objects are taken apart. What gives names to layers stands in ``_named.py``, and
to the state of layers in ``_state.py``. Resolves nothing. Found by entry point; only ``named``,
``stacked`` and ``names_of`` are ever imported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax

from axisrules._trees import NO_ENTRY, Flat, children_of_pytree, flatten_pytree
from axisrules_equinox._named import AxisNames, named, names_of_fields, stacked
from axisrules_equinox._state import names_of

__all__ = ["AxisNames", "adapter", "named", "names_of", "stacked"]


class _Adapter:
    """Takes modules, and whatever else Equinox registers with JAX, apart."""

    def flatten(self, node: Any) -> Flat:
        """The leaves at the paths that JAX gives them, with the names of their fields.

        The names of a field go to every leaf below it that has none of its own. Rebuilding runs
        neither ``__init__`` nor ``__check_init__``.
        """
        if _is_placeholder(node):
            return Flat([], [], [], lambda new: node)
        flat = flatten_pytree(node)
        names = names_of_fields(node) if isinstance(node, eqx.Module) else {}
        if not names:
            return flat
        pairs = zip(flat.keys, flat.names, strict=True)
        own = [names.get(key[0], NO_ENTRY) if name is NO_ENTRY else name for key, name in pairs]
        return dataclasses.replace(flat, names=own)

    def children(self, node: Any) -> list[tuple[str, Any]] | None:
        """The children as JAX knows them: a module may hold names in the places of its arrays."""
        below = children_of_pytree(node)
        if below is None:
            return None
        return [(segment, None if _is_placeholder(child) else child) for segment, child in below]


adapter = _Adapter()


def _is_placeholder(node: Any) -> bool:
    """Whether the node stands where ``eqx.nn.Shared`` took an array out, of which there are no more."""
    own = type(node).__module__.partition(".")[0] == eqx.__name__ and not isinstance(node, eqx.Module)
    return own and not callable(node) and jax.tree_util.all_leaves([node])
