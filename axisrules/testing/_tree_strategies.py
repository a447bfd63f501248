"""Strategies for whole trees of arrays, with the names that belong to them.

Owns how trees are nested. Names and shapes stand in ``_strategies.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axisrules._errors import PolicyError
from axisrules._meshes import MeshLike, as_mesh
from axisrules._rules import RulesLike
from axisrules.testing._strategies import axis_names, hypothesis_strategies, shapes, words_of

_DTYPES = (np.float32, jnp.bfloat16, np.int8, np.int32, np.bool_)
_MOST_ELEMENTS = 2**22  # of a host array: more would spend a test's time on filling it


def trees(
    names: RulesLike | Iterable[str] | None = None,
    mesh: MeshLike | None = None,
    *,
    arrays: str = "abstract",
    sizes: Mapping[str, Sequence[int]] | None = None,
    divides: str = "often",
    max_leaves: int = 5,
    max_rank: int = 3,
) -> Any:
    """Trees of arrays in dicts, lists and tuples, each with a tree of names like it.

    Args:
        names: Where the names come from: as in ``axis_names``.
        mesh: The mesh that sizes are to divide over: as in ``shapes``.
        arrays: ``"abstract"`` for ``ShapeDtypeStruct``s, ``"host"`` for numpy arrays of random values.
        sizes: The sizes that a dimension may have, by name: as in ``shapes``.
        divides: As in ``shapes``.
        max_leaves: About the most arrays.
        max_rank: The most dimensions of an array.

    Returns:
        A strategy of pairs: the tree, and the tree of its names.

    Raises:
        PolicyError: ``arrays`` or ``divides`` is another word, or host arrays would get too large.
        MissingExtraError: Hypothesis is not installed.

    Example:
        >>> import axisrules as ar
        >>> from hypothesis import given, settings
        >>> rules = ar.Rules({"embed": "data", "mlp": "model"})
        >>> @settings(max_examples=20, deadline=None, database=None)
        ... @given(tree_and_names=ar.testing.trees(rules, "data=4,model=2", divides="always"))
        ... def every_named_array_is_split(tree_and_names):
        ...     plan = ar.plan(*tree_and_names, mesh="data=4,model=2", rules=rules)
        ...     assert all(one.ways > 1 for one in plan.placements if set(one.names) > {None})
        >>> every_named_array_is_split()
    """
    st = hypothesis_strategies()
    if arrays not in ("abstract", "host"):
        raise PolicyError(f"arrays={arrays!r} is no policy", fix="pass arrays='abstract' or arrays='host'.")
    sized = None if mesh is None else as_mesh(mesh)
    if arrays == "host" and sized is not None and (6 * sized.size) ** max_rank > _MOST_ELEMENTS:
        raise PolicyError(
            f"host arrays of {max_rank} dimensions that divide over {sized.size} devices are too large",
            fix='pass arrays="abstract", a smaller mesh, or a smaller max_rank=.',
        )

    def leaf_of(some: tuple[str | None, ...]) -> Any:
        shape = shapes(some, sized, sizes=sizes, divides=divides)
        return st.tuples(st.just("leaf"), st.just(some), shape, st.sampled_from(_DTYPES))

    leaf = axis_names(words_of(names), max_rank=max_rank).flatmap(leaf_of)
    return st.composite(_draw_tree)(st.recursive(leaf, _nodes, max_leaves=max_leaves), arrays)


def _nodes(below: Any) -> Any:
    st = hypothesis_strategies()
    some = st.lists(below, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("dict"), st.dictionaries(st.sampled_from("abcd"), below, min_size=1, max_size=3)),
        st.tuples(st.just("list"), some),
        st.tuples(st.just("tuple"), some),
    )


def _draw_tree(draw: Callable[[Any], Any], node: Any, arrays: str) -> tuple[Any, Any]:
    seed = draw(hypothesis_strategies().integers(0, 2**32 - 1)) if arrays == "host" else None
    generator = None if seed is None else np.random.default_rng(seed)
    return _build(draw(node), generator)


def _build(part: tuple[Any, ...], generator: np.random.Generator | None) -> tuple[Any, Any]:
    """A tree, and the tree of its names, from their description."""
    kind, below = part[:2]
    if kind == "leaf":
        _, names, shape, dtype = part
        return _array(shape, dtype, generator), names
    if kind == "dict":
        pairs = {key: _build(one, generator) for key, one in below.items()}
        return {key: array for key, (array, _) in pairs.items()}, {key: n for key, (_, n) in pairs.items()}
    made = [_build(one, generator) for one in below]
    container = list if kind == "list" else tuple
    return container(array for array, _ in made), container(names for _, names in made)


def _array(shape: tuple[int, ...], dtype: Any, generator: np.random.Generator | None) -> Any:
    if generator is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    count = math.prod(shape)
    return (generator.random(count).reshape(shape) * 200 - 100).astype(dtype)
