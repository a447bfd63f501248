"""What a compiler gives one array.

Owns the rule by which TPUs pad arrays to tiles. Knows no plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axisrules._errors import LeafError
from axisrules.cost._hardware import Hardware, HardwareLike, as_hardware

_GRAIN = 512  # bytes to which every buffer of a TPU is rounded
_READ_OFF = "v5e"  # the TPU whose compiler was asked what it gives an array
_PADDED = "tile padding as found in what the compiler of TPU v5e gives arrays (libtpu 0.0.42)"
_ASSUMED = "tile padding as the compiler of TPU v5e gives arrays (libtpu 0.0.42), assumed for {} too"
_PLAIN = "elements times bytes of an element, as CPU and GPU hold arrays"


def array_bytes(shape: Sequence[int], dtype: Any, hardware: HardwareLike = None) -> int:
    """Bytes that the compiler gives one array on one device.

    Args:
        shape: The shape of what the device holds, in elements.
        dtype: Its dtype.
        hardware: On TPUs, arrays are padded to tiles. Without hardware, and on others, the size is
            that of the elements.

    Raises:
        HardwareError: The hardware is unknown.
        LeafError: The shape or the dtype is none.

    Example:
        >>> from axisrules import cost
        >>> cost.array_bytes((1024, 12), "bfloat16"), cost.array_bytes((1024, 12), "bfloat16", "TPU v5e")
        (24576, 32768)
    """
    return shard_bytes(_shape(shape), _dtype(dtype), as_hardware(hardware))


def source_of(chip: Hardware | None) -> str:
    """Where the bytes of an array come from."""
    if chip is None or chip.tile is None:
        return _PLAIN
    return _PADDED if chip.topology == _READ_OFF else _ASSUMED.format(chip.name)


@lru_cache(maxsize=65_536)
def shard_bytes(shape: tuple[int, ...], dtype: Any, chip: Hardware | None) -> int:
    """``array_bytes`` of checked values; a typed PRNG key counts as the words that it is made of."""
    shape, dtype = words(shape, dtype)
    if chip is None or chip.tile is None:
        return math.prod(shape) * int(dtype.itemsize)
    if 0 in shape:
        return 0
    bits = _bits(dtype)
    return _up(math.ceil(_padded(shape, bits, chip.tile) * bits / 8), _GRAIN)


def words(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """A typed PRNG key as the array of numbers that it is; anything else as it is."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return shape, dtype
    inner = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return inner.shape, inner.dtype


def _padded(shape: tuple[int, ...], bits: int, tile: tuple[int, int]) -> int:
    """Elements of the smallest padded form."""
    rows, lanes = tile
    if len(shape) < 2:
        count = shape[0] if shape else 1
        tall = rows * lanes
        return _up(count, tall) if count > tall // 2 else lanes * _power(-(-count // lanes))
    whole = math.prod(shape)
    sizes = []
    for second, height in enumerate(shape):
        block = max(32 // bits, min(rows, _power(height)))
        for minor, width in enumerate(shape):
            if minor != second:
                sizes.append(whole // (height * width) * _up(height, block) * _up(width, lanes))
    return min(sizes)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _bits(dtype: Any) -> int:
    if dtype == np.bool_:
        return 8
    kind = np.dtype(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        return int(jnp.iinfo(kind).bits)
    if jnp.issubdtype(kind, jnp.floating):
        return int(jnp.finfo(kind).bits)
    return int(kind.itemsize) * 8


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (int, np.integer)):
        shape = (shape,)
    sizes = tuple(shape) if isinstance(shape, Sequence) else (None,)
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 0 for n in sizes):
        raise LeafError(f"{shape!r} is no shape", fix="give whole numbers, one per dimension.")
    return tuple(int(size) for size in sizes)


def _dtype(dtype: Any) -> Any:
    if dtype is not None and not isinstance(dtype, str) and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not (found == np.bool_ or jnp.issubdtype(found, jnp.number)):
        raise LeafError(f"{dtype!r} is no dtype of an array", fix='give one like "bfloat16".')
    return found
