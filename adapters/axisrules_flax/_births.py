"""The initializers of a layer of ``named`` while it is made under a mesh.

Owns which of them make their arrays on the shards. The layouts are those of
``axisrules.with_logical_partitioning``; what is made whole here is placed afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

import axisrules
from axisrules import AxisRulesError

Initializer = Callable[..., Any]


class Births:
    """Wraps the initializers of one layer for as long as it is made.

    An array is made on its shards if its names are certain: that of as many dimensions as there are
    names, and after it a bias, which has some of the last of those dimensions.
    """

    def __init__(self, names: tuple[Any, ...] | None, spec: PartitionSpec | None) -> None:
        self._names, self._spec = names, spec
        self._kernel: tuple[Any, ...] | None = None  # the entries of the largest array, once made
        self._given: dict[int, tuple[Initializer, Initializer]] = {}  # by id: wrapped and as given
        self._over = False

    def wrap(self, name: str, initializer: Any) -> Any:
        """The initializer for an argument of the layer."""
        if not callable(initializer) or hasattr(initializer, "__wrapped__"):  # such as nnx.with_partitioning
            return initializer

        @functools.wraps(initializer, updated=())
        def init(key: Any, shape: Any, *rest: Any, **options: Any) -> Any:
            entries = None if self._over else self._entries(tuple(shape), name.endswith("bias_init"))
            if entries is not None:
                pair = (entries, None) if self._names is not None else (None, PartitionSpec(*entries))
                sharded = axisrules.with_logical_partitioning(initializer, *pair)
                try:
                    return sharded(key, shape, *rest, **options)
                except AxisRulesError:
                    pass  # placing it says so with the path, beside whatever else is wrong
            return initializer(key, shape, *rest, **options)

        self._given[id(init)] = init, initializer
        return init

    def _entries(self, shape: tuple[int, ...], is_bias: bool) -> tuple[Any, ...] | None:
        rank, kernel = len(shape), self._kernel
        if is_bias:
            return None if kernel is None or rank > len(kernel) else kernel[len(kernel) - rank :]
        given = self._names if self._names is not None else tuple(self._spec or ())
        if len(given) != rank or ... in given:
            return None
        self._kernel = given
        return given

    def end(self, made: Any) -> None:
        """Gives the layer the initializers that it was made with, where it keeps them."""
        self._over = True
        nodes = [node for _, node in nnx.iter_graph(made) if hasattr(node, "__dict__")]
        for node in nodes if self._given else ():
            for attribute, value in list(vars(node).items()):
                if id(value) in self._given:
                    setattr(node, attribute, self._given[id(value)][1])
