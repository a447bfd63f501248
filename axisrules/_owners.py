"""To which parameter an array of an optimizer's state belongs.

Owns the search by path, and the fields of optimizers that belong to no parameter. Knows nothing of
names, rules or meshes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from axisrules._entries import empty_places
from axisrules._moments import Kept, Moment, Shape, kept_dims, of_one_dim
from axisrules._text import nearest
from axisrules._trees import Flat

Key: TypeAlias = tuple[str, ...]

# Fields of optax whose arrays belong to no parameter, with fields that stand beside them.
_OWN = {
    "ns_coeffs": {"mu"},  # muon
    "weights_memory": {"diff_params_memory"},  # lbfgs
    **{field: {*"rmvs", "x0"} for field in "rmvs"},  # mechanic
}
_ABOVE = {"hyperparams", "hyperparams_states", "measurement", "measurements", "measure_states"}
_KEYS = {"key", "rng_key"}
_HALVES = {"real", "imaginary"}  # of a complex parameter


class Split(NamedTuple):
    """A path of a state, parted: what is before and behind the path of a parameter."""

    before: Key
    key: Key
    tail: str


class Owner(NamedTuple):
    """The parameter of an array of a state.

    Attributes:
        key: Its path; ``None`` where the array belongs to no parameter and needs no names.
        kept: Which dimensions of it the array keeps; ``None`` where its shape is unexplained.
    """

    key: Key | None
    kept: Kept | None


class Owners:
    """Finds the parameters of the arrays of one state.

    Args:
        state: The state.
        flat: The same, taken apart.
        shapes: The shapes of the parameters by path.
    """

    def __init__(self, state: Any, flat: Flat, shapes: Mapping[Key, Shape]) -> None:
        self._state, self._shapes = state, shapes
        self._of_state = {
            key: shape
            for key, leaf in zip(flat.keys, flat.leaves, strict=True)
            if (shape := shape_of(leaf)) is not None
        }
        self._keys = flat.keys

    @cached_property
    def _fields(self) -> dict[Key, set[str]]:
        """The segments below every prefix."""
        fields: dict[Key, set[str]] = {}
        for key in self._keys:
            for at, segment in enumerate(key):
                fields.setdefault(key[:at], set()).add(segment)
        return fields

    def find(self, path: Key, leaf: Any, named: Mapping[Key, tuple[bool, ...]]) -> Owner | None:
        """The parameter of an array that is no scalar, or ``None`` where there is none.

        Args:
            path: The path of the array in the state.
            leaf: The array.
            named: Which dimensions of a parameter have names.
        """
        shape = self._of_state[path]
        nobody = Owner(None, (None,) * len(shape))
        if self._is_own(path) or _is_prng_key(path, leaf):
            return nobody
        found = self._split(path, shape)
        small = math.prod(shape) <= 1
        apart = not _ABOVE.isdisjoint(path if found is None else found.before)
        if found is None:
            flat = shape == (sum(map(math.prod, self._shapes.values())),)
            return nobody if small or apart or flat else None
        kept = kept_dims(self._moment(found, shape, named))
        at_root = apart and not found.key
        return nobody if at_root or (kept is None and apart) else Owner(found.key, kept)

    def nearest(self, path: Key) -> str | None:
        """The parameter whose path is closest to the end of a path."""
        for rank in sorted({len(key) for key in self._shapes}, reverse=True):
            known = ["/".join(key) for key in self._shapes if len(key) == rank]
            close = nearest("/".join(path[-rank:]), known)
            if close is not None:
                return close
        return None

    def _is_own(self, path: Key) -> bool:
        return path[-1:] != () and path[-1] in _OWN and _OWN[path[-1]] <= self._fields[path[:-1]]

    def _moment(self, found: Split, shape: Shape, named: Mapping[Key, tuple[bool, ...]]) -> Moment:
        of = self._shapes[found.key]
        field = found.before[-1] if found.before else ""
        projector = self._projector(found)
        return Moment(field, found.tail, shape, of, named.get(found.key, (True,) * len(of)), projector)

    def _projector(self, found: Split) -> Shape | None:
        """The shape of GaLore's projector of a parameter, in the state around the array."""
        for at in range(len(found.before)):
            around = found.before[:at]
            inside = found.before[at] in ("base_optimizer_state", "projector")
            if inside and "projector" in self._fields[around]:
                return self._of_state.get((*around, "projector", *found.key))
        return None

    def _split(self, path: Key, shape: Shape) -> Split | None:
        """The parting with the most parameters beside this one, and then with the longest path.

        A parameter may be called like a field: below ``mu`` all parameters stand, whereas only a
        few of their paths begin with ``mu`` by themselves.
        """
        ways = list(self._ways(path, shape))
        if len(ways) < 2:
            return ways[0] if ways else None
        return max(ways, key=lambda way: (self._coverage[way.before], -len(way.before)))

    def _ways(self, path: Key, shape: Shape | None) -> Iterator[Split]:
        for start in range(len(path) + 1):
            if path[start:] in self._shapes:
                yield Split(path[:start], path[start:], "")
        for start in range(len(path)):
            key, tail = path[start:-1], path[-1]
            if key in self._shapes and (key or start) and self._is_tail(key, tail, shape):
                yield Split(path[:start], key, tail)

    def _is_tail(self, key: Key, tail: str, shape: Shape | None) -> bool:
        if shape is None or not tail.isdecimal():
            return tail in _HALVES
        of = self._shapes[key]
        return shape == of or of_one_dim(Moment("", tail, shape, of, ())) is not None

    @cached_property
    def _coverage(self) -> dict[Key, int]:
        """How many parameters, masked ones included, stand below every prefix."""
        below: dict[Key, set[Key]] = {}
        for place in [*self._of_state, *empty_places(self._state)]:
            for way in self._ways(place, self._of_state.get(place)):
                below.setdefault(way.before, set()).add(way.key)
        return {before: len(keys) for before, keys in below.items()}


def shape_of(leaf: Any) -> Shape | None:
    """The shape of an array, or ``None`` for anything else."""
    shape = getattr(leaf, "shape", None)
    return shape if isinstance(shape, tuple) and hasattr(leaf, "dtype") else None


def _is_prng_key(path: Sequence[str], leaf: Any) -> bool:
    """Whether an array is a raw key; a typed one is a scalar."""
    return bool(path) and path[-1] in _KEYS and leaf.dtype == np.uint32 and len(leaf.shape) == 1
