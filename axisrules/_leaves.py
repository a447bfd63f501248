"""What a leaf is to a plan: shape, dtype as JAX will hold it, or nothing to place.

Owns the kinds of leaves and the rules for dtypes. Reads values only where a 64-bit integer may
not fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from axisrules._errors import LeafError, PolicyError


class Describer:
    """Describes the leaves of one tree; leaves of one kind and dtype are examined once.

    Args:
        dtype: What floating-point arrays are cast to; ``None`` keeps them.
    """

    def __init__(self, dtype: Any = None) -> None:
        self._dtype = dtype
        self._held: dict[Any, Any] = {}

    def __call__(self, leaf: Any) -> Described | None:
        """Shape and dtype of an array, or ``None`` for what passes through.

        Raises:
            LeafError: JAX cannot hold the array as it is.
        """
        try:
            return Described(leaf.shape, self._held[type(leaf), leaf.dtype])
        except (AttributeError, KeyError, TypeError):
            pass
        found = describe(leaf, self._dtype)
        on_device = isinstance(leaf, jax.Array)
        plain = type(leaf) in _EXACT and getattr(leaf.dtype, "isnative", True)
        if found is not None and (on_device or (plain and leaf.dtype not in _WIDE)):
            self._held[type(leaf), leaf.dtype] = found.dtype
        return found


class Described(NamedTuple):
    """Shape and dtype of an array as JAX will hold it."""

    shape: tuple[int, ...]
    dtype: Any


class Future(jax.ShapeDtypeStruct):
    """An array that is still to be made: like an array, one object is one array."""


_ENABLE_X64 = 'jax.config.update("jax_enable_x64", True)'
_NARROW = {"int64": np.dtype(np.int32), "uint64": np.dtype(np.uint32)}
_ARRAYS = (np.ndarray, jax.ShapeDtypeStruct, jax.Array)
_EXACT = {np.ndarray, jax.ShapeDtypeStruct}
_NOT_ARRAYS = (str, bytes, bool, int, float, complex, type(None), PartitionSpec)


def describe(leaf: Any, dtype: Any = None) -> Described | None:
    """Shape and dtype of an array, or ``None`` for what passes through.

    Args:
        leaf: Anything that stands at a leaf.
        dtype: What floating-point arrays are cast to; ``None`` keeps them.

    Raises:
        LeafError: JAX cannot hold the array as it is.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        held = np.dtype(object)  # its mask would be lost
    elif isinstance(leaf, _ARRAYS):
        held = leaf.dtype
    elif isinstance(leaf, _NOT_ARRAYS) or not _looks_like_an_array(leaf):
        return None
    else:
        held = leaf.dtype
    on_device = isinstance(leaf, jax.Array)
    if held == jax.dtypes.float0:  # the gradient of an integer: nothing to place
        return None
    if not on_device and not _is_jax_dtype(held):
        held = _host_dtype(leaf, held)
    if dtype is not None:
        held = cast_dtype(held, dtype)
    if not on_device and held in _WIDE and not _x64_is_on():
        held = _narrow(leaf, held)
    return Described(tuple(leaf.shape), held)


def may_be_tied(leaf: Any) -> bool:
    """Whether one object at two paths means one array; equal numpy scalars may be one object."""
    return isinstance(leaf, (np.ndarray, jax.Array, Future))


def is_opaque(leaf: Any) -> bool:
    """Whether a leaf is an object of which nobody knows whether it holds arrays."""
    return not (isinstance(leaf, _NOT_ARRAYS) or callable(leaf))


def opaque(leaf: Any) -> LeafError:
    """The error of names for an object that JAX takes for a leaf."""
    return LeafError(
        f"names are given for a {type(leaf).__qualname__}, which JAX does not know how to take apart",
        fix="register its class as a pytree, for example with jax.tree_util.register_dataclass.",
    )


def _looks_like_an_array(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    return hasattr(leaf, "dtype") and isinstance(shape, tuple) and all(isinstance(n, int) for n in shape)


_WIDE = frozenset(map(np.dtype, (np.int64, np.uint64, np.float64, np.complex128)))
_KNOWN: dict[Any, bool] = {}


def _is_jax_dtype(dtype: Any) -> bool:
    """Whether JAX can hold arrays of the dtype, width aside; typed PRNG keys count."""
    try:
        return _KNOWN[dtype]
    except KeyError:
        pass
    except TypeError:
        return False
    known = (
        isinstance(dtype, np.dtype)
        and dtype.isnative
        and not (dtype.char in "gG" and dtype.kind in "fc")  # long doubles; ml_dtypes has letters of its own
        and (dtype.kind in "biufc" or _is_extended_float(dtype))
    )
    known = known or (not isinstance(dtype, np.dtype) and jax.dtypes.issubdtype(dtype, jax.dtypes.extended))
    _KNOWN[dtype] = known
    return known


def _is_extended_float(dtype: np.dtype[Any]) -> bool:
    numeric = (jax.numpy.floating, jax.numpy.integer)
    return dtype.names is None and any(jax.numpy.issubdtype(dtype, kind) for kind in numeric)


def _host_dtype(leaf: Any, dtype: Any) -> np.dtype[Any]:
    """The numpy dtype of an array-like that is neither numpy's nor JAX's."""
    try:
        found: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        found = np.dtype(object)
    if _is_jax_dtype(found):
        return found
    raise LeafError(
        f"JAX cannot hold a {type(leaf).__module__}.{type(leaf).__qualname__} of dtype {dtype}",
        shape=tuple(leaf.shape),
        fix="convert it to a numeric numpy array, or take it out of the tree.",
    )


def cast_dtype(held: Any, dtype: Any) -> Any:
    """The dtype after a cast that concerns floating-point arrays alone."""
    if jax.dtypes.issubdtype(held, np.floating):
        return dtype
    if jax.dtypes.issubdtype(held, np.complexfloating):
        return np.dtype(np.complex128 if dtype.itemsize == 8 else np.complex64)
    return held


def floating_dtype(dtype: Any) -> Any:
    """A checked ``dtype=`` argument.

    Raises:
        PolicyError: It is no floating-point dtype, or one that JAX cannot hold now.
    """
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if not _is_jax_dtype(found) or not jax.dtypes.issubdtype(found, np.floating):
        raise PolicyError(
            f"dtype={dtype!r} is no floating-point dtype", fix='pass dtype="bfloat16" or "float32".'
        )
    if found in _WIDE and not _x64_is_on():
        raise PolicyError(f"dtype={dtype!r} needs x64", fix=f'pass dtype="float32", or call {_ENABLE_X64}.')
    return found


def _x64_is_on() -> bool:
    return bool(jax.config.read("jax_enable_x64"))


def _narrow(leaf: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The 32-bit dtype that holds the values, with x64 off."""
    narrow = _NARROW.get(dtype.name)
    if narrow is None:
        raise LeafError(
            f"a {dtype.name} array would lose precision: x64 is off",
            shape=tuple(leaf.shape),
            fix=f'cast it, x.astype("float32"), or pass dtype="float32" to plan and shard_tree, '
            f"or call {_ENABLE_X64}.",
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return narrow
    values = np.asarray(leaf)
    limits = np.iinfo(narrow)
    if values.size and not (limits.min <= values.min() and values.max() <= limits.max):
        worst = values.max() if values.max() > limits.max else values.min()
        raise LeafError(
            f"the value {worst} of an {dtype.name} array does not fit {narrow.name}: x64 is off",
            shape=tuple(leaf.shape),
            fix=f"call {_ENABLE_X64}, or take the array out of the tree.",
        )
    return narrow
