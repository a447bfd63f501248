"""``names_of``: the names that a tree carries as a tree of names, the state of layers included.

Owns which field of which layer an entry of ``eqx.nn.State`` belongs to. Resolves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax

from axisrules._trees import NO_ENTRY, children_of_pytree, flatten
from axisrules_equinox._named import names_of_fields


class _Mark:
    """Stands for an array of a state, and knows by which marker it is found."""

    def __init__(self, marker: Any) -> None:
        self.marker = marker


def names_of(tree: Any) -> Any:
    """The names that a tree carries, in a tree of its structure.

    A state does not know whose it is, so on its own it carries no names. Beside its model it has
    those of the fields that hold the ``eqx.nn.StateIndex``es.

    Args:
        tree: Any tree, such as ``(model, state)`` of ``eqx.nn.make_with_state`` or what
            ``eqx.filter_eval_shape`` makes of it.

    Returns:
        What ``plan``, ``shard_tree`` and ``init`` take for ``names``. Arrays without names have no
        entry, which those functions report.

    Example:
        >>> import axisrules as ar, axisrules_equinox, equinox as eqx
        >>> def make():
        ...     norm = eqx.nn.BatchNorm(8, "batch", mode="ema")
        ...     return axisrules_equinox.named(norm, weight="embed", bias="embed", ema_state_index="embed")
        >>> pair = eqx.nn.make_with_state(make)()
        >>> plan = ar.plan(
        ...     pair, axisrules_equinox.names_of(pair), mesh="data=4", rules={"embed": "data"}
        ... )
        >>> {p.path: tuple(p.spec) for p in plan.placements}
        {'0/weight': ('data',), '0/bias': ('data',), '1/0': (), '1/1/0': ('data',), '1/1/1': ('data',)}
    """
    names = dict(_by_marker(tree, NO_ENTRY))
    flat = flatten(jax.tree.map(_marked, tree, is_leaf=_is_state))
    pairs = zip(flat.leaves, flat.names, strict=True)
    return flat.rebuild([
        names.get(leaf.marker, NO_ENTRY) if isinstance(leaf, _Mark) else own for leaf, own in pairs
    ])  # fmt: skip


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.State)


def _marked(node: Any) -> Any:
    """A state with marks for its arrays; anything else as it is."""
    if not _is_state(node):
        return node
    values, markers = node.tree_flatten()
    marks = [
        jax.tree.map(lambda _, marker=marker: _Mark(marker), value)
        for value, marker in zip(values, markers, strict=True)
    ]
    return type(node).tree_unflatten(markers, marks)


def _by_marker(node: Any, entry: Any) -> Iterator[tuple[Any, Any]]:
    """The markers below a node, each with the names of the innermost field that has any."""
    if isinstance(node, eqx.nn.StateIndex):
        yield node.marker, entry
        return
    own = names_of_fields(node) if isinstance(node, eqx.Module) else {}
    for segment, child in children_of_pytree(node) or ():
        yield from _by_marker(child, own.get(segment, entry))
