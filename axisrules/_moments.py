"""Which dimensions of a parameter an array of an optimizer's state keeps.

Owns the rules by which optimizers shape their arrays after a parameter. The array and its parameter
are given; how they are found, and what the dimensions are called, is decided elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

Shape: TypeAlias = tuple[int, ...]
Kept: TypeAlias = tuple[int | None, ...]  # per dimension: that of the parameter, or None


class Moment(NamedTuple):
    """An array of a state beside the parameter that it belongs to.

    Attributes:
        field: The last segment of the path before that of the parameter, such as ``"mu"``.
        tail: The segment after the path of the parameter, such as an index; ``""`` if there is none.
        shape: The shape of the array.
        of: The shape of the parameter.
        named: Whether a dimension of the parameter has a name.
        projector: The shape of the low-rank projector that the state holds for the parameter.
    """

    field: str
    tail: str
    shape: Shape
    of: Shape
    named: tuple[bool, ...]
    projector: Shape | None = None


@lru_cache(maxsize=4096)  # a model repeats its shapes
def kept_dims(moment: Moment) -> Kept | None:
    """The dimensions of the parameter that the array keeps, or ``None`` where no rule explains it."""
    found = (rule(moment) for rule in _RULES)
    return next((kept for kept in found if kept is not None), None)


def of_one_dim(moment: Moment) -> Kept | None:
    """Accumulators or preconditioners in a list, one for each dimension of the parameter."""
    if not moment.tail.isdecimal() or int(moment.tail) >= len(moment.of):
        return None
    dim = int(moment.tail)
    size = moment.of[dim]
    return {(size,): (dim,), (size, size): (dim, None)}.get(moment.shape)


def _factored(moment: Moment) -> Kept | None:
    """Adafactor: the rows lack the largest dimension, the columns the second largest."""
    if moment.field not in ("v_row", "v_col") or len(moment.of) < 2:
        return None
    second, largest = np.argsort(moment.of)[-2:]  # as optax sorts, for ties decide which is which
    gone = largest if moment.field == "v_row" else second
    kept = tuple(dim for dim in range(len(moment.of)) if dim != gone)
    return kept if moment.shape == _sizes(moment.of, kept) else None


def _projected(moment: Moment) -> Kept | None:
    """GaLore: one dimension of a matrix is replaced by the rank; the projector has the other one."""
    if moment.projector is None or math.prod(moment.projector) == 0:
        return None
    if len(moment.of) == 2:
        for rows, columns in ((0, 1), (1, 0)):  # the second where the user transposes the matrix
            tall = moment.of[rows] >= moment.of[columns]
            projected, other = (rows, columns) if tall else (columns, rows)
            rank = moment.projector[-1]
            if moment.projector[0] != moment.of[projected]:
                continue
            if moment.field == "projector":
                return projected, None
            if moment.shape == ((rank, moment.of[other]) if tall else (moment.of[other], rank)):
                return (None, other) if tall else (other, None)
    return (None,) * len(moment.shape)  # several dimensions were made one


def _same(moment: Moment) -> Kept | None:
    return tuple(range(len(moment.of))) if moment.shape == moment.of else None


def _placeholder(moment: Moment) -> Kept | None:
    """An array of at most one element; it cannot be split."""
    return (None,) * len(moment.shape) if math.prod(moment.shape) <= 1 else None


def _memory(moment: Moment) -> Kept | None:
    """Several past values of a moment, stacked as L-BFGS does."""
    return (None, *range(len(moment.of))) if moment.shape[1:] == moment.of else None


def _square(moment: Moment) -> Kept | None:
    """A preconditioner of one dimension: the name stands once, and only where it is the only one."""
    size = moment.shape[0]
    if moment.shape != (size, size) or size not in moment.of or moment.field.endswith("_memory"):
        return None
    dims = [dim for dim, other in enumerate(moment.of) if other == size and moment.named[dim]]
    return (dims[0] if len(dims) == 1 else None, None)


def _reduced_to_one(moment: Moment) -> Kept | None:
    """Reduced over some dimensions, of which size 1 is left."""
    if len(moment.shape) != len(moment.of):
        return None
    pairs = list(zip(moment.shape, moment.of, strict=True))
    if not all(size in (1, other) for size, other in pairs):
        return None
    return tuple(dim if size == other else None for dim, (size, other) in enumerate(pairs))


def _reduced(moment: Moment) -> Kept | None:
    """Reduced over some dimensions; where several may be those, none is named."""
    rank = len(moment.of)
    ways = [
        kept
        for kept in itertools.combinations(range(rank), len(moment.shape))
        if _sizes(moment.of, kept) == moment.shape
    ]
    if not ways or len(moment.shape) >= rank:
        return None
    return tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*ways, strict=True))


def _flat(moment: Moment) -> Kept | None:
    """The parameter as one vector."""
    return (None,) if moment.shape == (math.prod(moment.of),) else None


_RULES: tuple[Callable[[Moment], Kept | None], ...] = (
    of_one_dim, _factored, _projected, _same, _placeholder,
    _square, _memory, _reduced_to_one, _reduced, _flat,
)  # fmt: skip


def _sizes(shape: Shape, dims: Sequence[int]) -> Shape:
    return tuple(shape[dim] for dim in dims)
