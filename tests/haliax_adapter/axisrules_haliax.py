"""haliax for axisrules: a named array is one leaf, and the names of its axes are its axis names.

Owns how haliax's objects are taken apart. Resolves nothing. Written as a third party would write it:
against the public protocol alone, found by entry point, and without an import of haliax.
"""

from __future__ import annotations

from typing import Any

from axisrules.adapters import Flat, children_of_pytree, flatten_pytree


class _Adapter:
    """Takes named arrays apart, and whatever of haliax JAX knows as a pytree, such as its layers."""

    def flatten(self, node: Any) -> Flat:
        """A named array as the leaf at its own path; the leaves of anything else."""
        if not _is_named_array(node):
            return flatten_pytree(node)
        kind, axes = type(node), node.axes
        if node.array is None:  # such as the other part of a partitioned tree
            return Flat([], [], [], lambda new: kind.tree_unflatten(axes, (None,)))
        names = tuple(axis.name for axis in axes)
        # Not the constructor: it refuses what a plan puts in place of the array, such as its spec.
        return Flat([()], [node.array], [names], lambda new: kind.tree_unflatten(axes, (new[0],)))

    def children(self, node: Any) -> list[tuple[str, Any]] | None:
        """The children as JAX knows them: a layer may hold names in the places of its arrays."""
        return None if _is_named_array(node) else children_of_pytree(node)


adapter = _Adapter()


def _is_named_array(node: Any) -> bool:
    return any(base.__name__ == "NamedArray" for base in type(node).__mro__)
