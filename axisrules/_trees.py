"""Leaves with paths, and the adapter protocol.

Owns taking a tree apart and putting it together again. An adapter does so for the objects of one
framework; raw pytrees go through the same protocol. Knows nothing of names' meaning, rules or
meshes.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import jax
import numpy as np

from axisrules._errors import LeafError

ENTRY_POINTS = "axisrules.adapters"  # name: the framework's top-level package; value: an Adapter


class NoEntry:
    """Stands for the names of a leaf for which there is no entry."""

    def __repr__(self) -> str:
        return "NO_ENTRY"


NO_ENTRY = NoEntry()


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree taken apart.

    Attributes:
        keys: The path of every leaf as segments.
        leaves: Arrays and whatever else stands at a leaf.
        names: The names that the tree itself carries per leaf; ``NO_ENTRY`` where it carries none.
        rebuild: Makes a tree like the source from as many new leaves; the source is not changed. It
            must not hold the leaves: a plan keeps it.
        treedef: The structure as JAX knows it, of trees without any object of a framework.
    """

    keys: list[tuple[str, ...]]
    leaves: list[Any]
    names: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    treedef: Any = None

    @property
    def paths(self) -> list[str]:
        """The path of every leaf as text."""
        return list(map("/".join, self.keys))


class Adapter(Protocol):
    """Takes the objects of one framework apart and rebuilds them. It never resolves.

    It may have a method ``making() -> context manager``, which surrounds the call of a function that
    makes objects inside a trace.
    """

    def flatten(self, node: Any) -> Flat:
        """The leaves of one object of the framework, with everything below it."""


# An adapter may also have `children(node)`, as the function of that name here: where its objects
# may hold names, which are tuples, or `None`, that flattening would take apart or lose.


@contextmanager
def making() -> Iterator[None]:
    """Surrounds a call that may make objects of any framework that is loaded."""
    with ExitStack() as stack:
        for framework in _entry_points():
            if framework in sys.modules:
                surround = getattr(_load(framework), "making", nullcontext)
                stack.enter_context(surround())
        yield


@cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


@cache
def _load(framework: str) -> Adapter:
    adapter: Adapter = _entry_points()[framework].load()
    return adapter


_PLAIN_PACKAGES = {"builtins", "collections", "jax", "jaxlib", "ml_dtypes", "numpy"}
_BY_TYPE: dict[type, Adapter | None] = {}


def adapter_of(kind: type) -> Adapter | None:
    """The adapter for objects of a class: that of the framework of the class or of a base of it."""
    try:
        return _BY_TYPE[kind]
    except KeyError:
        packages = [(base.__module__ or "").partition(".")[0] for base in kind.__mro__]
        foreign = [package for package in packages if package not in _PLAIN_PACKAGES]
        framework = next((package for package in foreign if package in _entry_points()), None)
        adapter = _BY_TYPE[kind] = None if framework is None else _load(framework)
        return adapter


def _is_foreign(node: Any) -> bool:
    try:  # asked of every node of a tree, so the common case stays short
        return _BY_TYPE[type(node)] is not None
    except KeyError:
        return adapter_of(type(node)) is not None


class _RawPytrees:
    """Pytrees as JAX knows them; objects of frameworks inside go through their adapters."""

    def flatten(self, node: Any) -> Flat:
        keys: list[tuple[str, ...]] = []
        leaves: list[Any] = []
        if _flatten_plain(node, (), keys, leaves):
            treedef: Any = jax.tree_util.tree_structure(node)
            return Flat(keys, leaves, [NO_ENTRY] * len(leaves), treedef.unflatten, treedef)
        return self._flatten_any(node)

    def _flatten_any(self, node: Any) -> Flat:
        treedef: Any
        try:
            found, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_foreign)
        except (ValueError, TypeError) as cause:
            raise LeafError(f"JAX cannot take this tree apart: {cause}") from cause
        segments = _Segments()
        keys = [tuple([segments[key] for key in path]) for path, _ in found]
        leaves = [leaf for _, leaf in found]
        if not any(map(_is_foreign, leaves)):
            return Flat(keys, leaves, [NO_ENTRY] * len(leaves), treedef.unflatten, treedef)
        return join(keys, [_flatten_leaf(leaf) for leaf in leaves], treedef.unflatten)


_PLAIN_LEAVES = {np.ndarray, jax.ShapeDtypeStruct, str, int, float, bool}


def _flatten_plain(node: Any, key: tuple[str, ...], keys: list[tuple[str, ...]], leaves: list[Any]) -> bool:
    """Takes apart dicts, lists and tuples of arrays, twice as fast as with JAX's key paths.

    Returns:
        ``False`` where anything else stands in the tree, so that JAX has to be asked.
    """
    kind = type(node)
    if kind in _PLAIN_LEAVES:
        keys.append(key)
        leaves.append(node)
        return True
    if kind is dict:
        try:
            order = sorted(node)
        except TypeError:
            return False
        for k in order:  # noqa: SIM110  a loop is faster than all(...)
            if not _flatten_plain(node[k], (*key, str(k)), keys, leaves):
                return False
        return True
    if kind is list or kind is tuple:
        for i, child in enumerate(node):  # noqa: SIM110
            if not _flatten_plain(child, (*key, str(i)), keys, leaves):
                return False
        return True
    if isinstance(node, jax.Array):
        _PLAIN_LEAVES.add(kind)
        return _flatten_plain(node, key, keys, leaves)
    return node is None


def join(
    keys: Sequence[tuple[str, ...]], parts: Sequence[Flat], unflatten: Callable[[list[Any]], Any]
) -> Flat:
    """A node from its children, each taken apart on its own.

    Args:
        keys: The path of every child below the node.
        parts: The children.
        unflatten: Makes the node from as many new children.
    """
    # What rebuilds must hold no array: a plan keeps it.
    builders = [(len(part.leaves), part.rebuild) for part in parts]

    def rebuild(new: Sequence[Any]) -> Any:
        rest = iter(new)
        return unflatten([build([next(rest) for _ in range(size)]) for size, build in builders])

    return Flat(
        [key + below for key, part in zip(keys, parts, strict=True) for below in part.keys],
        [leaf for part in parts for leaf in part.leaves],
        [names for part in parts for names in part.names],
        rebuild,
    )


def flatten_pytree(node: Any) -> Flat:
    """A node as JAX takes it apart, with what stands below it through any adapter.

    For adapters whose framework registers its objects with JAX.
    """
    treedef: Any
    try:
        found, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda below: below is not node)
    except (ValueError, TypeError) as cause:
        raise LeafError(f"JAX cannot take this {type(node).__qualname__} apart: {cause}") from cause
    if len(found) == 1 and found[0][1] is node:
        return Flat([()], [node], [NO_ENTRY], lambda new: new[0])
    return join(
        [(_segment(path[0]),) for path, _ in found], [flatten(child) for _, child in found], treedef.unflatten
    )


def _flatten_leaf(leaf: Any) -> Flat:
    adapter = adapter_of(type(leaf))
    if adapter is None:
        return Flat([()], [leaf], [NO_ENTRY], lambda new: new[0])
    return adapter.flatten(leaf)


_RAW = _RawPytrees()


def flatten(tree: Any) -> Flat:
    """Takes any tree apart: through the adapter of its class, else as JAX knows it."""
    return (adapter_of(type(tree)) or _RAW).flatten(tree)


class _Segments(dict[Any, str]):
    """Segments by key, since a tree repeats its keys many times."""

    def __missing__(self, key: Any) -> str:
        segment = self[key] = _segment(key)
        return segment


def _segment(key: Any) -> str:
    """A key of a JAX key path as a path segment."""
    for attribute in ("key", "idx", "name"):
        value = getattr(key, attribute, None)
        if value is not None:
            return str(value)
    return str(key)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """The children of a node with their segments, or ``None`` for a leaf."""
    adapter = adapter_of(type(node))
    if adapter is None:
        return children_of_pytree(node)
    own = getattr(adapter, "children", None)
    if own is not None:
        found: list[tuple[str, Any]] | None = own(node)
        return found
    flat = adapter.flatten(node)
    if flat.keys == [()]:
        return None  # such as a variable: one leaf in the place of its object
    return list(_nested(flat.keys, flat.leaves).items())


def children_of_pytree(node: Any) -> list[tuple[str, Any]] | None:
    """The children of a node as JAX knows them, ``None`` among them, or ``None`` for a leaf."""
    found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda below: below is not node)
    if len(found) == 1 and found[0][0] == ():
        return None
    return [(_segment(path[0]), child) for path, child in found]


def nested(flat: Flat) -> Any:
    """The positions of the leaves as nested dicts of segments; a single leaf stands alone."""
    return _nested(flat.keys, range(len(flat.leaves)))


def _nested(keys: Sequence[tuple[str, ...]], leaves: Iterable[Any]) -> Any:
    root: dict[str, Any] = {}
    for key, leaf in zip(keys, leaves, strict=True):
        if not key:
            return leaf
        at = root
        for segment in key[:-1]:
            at = at.setdefault(segment, {})
            if not isinstance(at, dict):
                raise LeafError("two leaves stand at one path", paths=["/".join(key)], fix="rename a key.")
        at[key[-1]] = leaf
    return root
