"""The fields of a batch: which have names, and along which dimension they hold their records.

Owns how one set of names is read for leaves of several ranks. Resolves nothing, and moves no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from axisrules import _leaves
from axisrules._entries import find_entries
from axisrules._errors import AxisRulesError, BatchError, LeafError, MissingNamesError
from axisrules._names import parse_names
from axisrules._trees import NO_ENTRY, Flat, flatten


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a batch that has names.

    Attributes:
        position: Its position among the leaves.
        path: Its path.
        leaf: The array of this process.
        entry: Its names, a ``PartitionSpec``, or ``None``.
        dtype: The dtype that JAX will hold.
        has_records: Whether its first dimension is the batch.
    """

    position: int
    path: str
    leaf: Any
    entry: Any
    dtype: Any
    has_records: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that this process has."""
        return tuple(self.leaf.shape)


@dataclass(frozen=True, slots=True)
class Fields:
    """A batch taken apart; leaves that are no ``Field`` stay on the host.

    Attributes:
        flat: The batch as any tree.
        fields: The leaves with names.
        problems: What cannot be placed.
    """

    flat: Flat
    fields: list[Field]
    problems: list[AxisRulesError]

    @property
    def with_records(self) -> list[Field]:
        """The fields whose first dimension is the batch."""
        return [field for field in self.fields if field.has_records]


def is_one_set(names: Any) -> bool:
    """Whether names are those of one array, however they are spelled."""
    if isinstance(names, (str, PartitionSpec)):
        return True
    return type(names) in (tuple, list) and all(
        name is None or name is ... or (isinstance(name, str) and " " not in name) for name in names
    )


def read_fields(batch: Any, names: Any) -> Fields:
    """Takes a batch apart, and finds the names of every leaf.

    Raises:
        NamesError: Names that are to serve all leaves are malformed.
    """
    flat = flatten(batch)
    # A tuple of names for a batch that is a tuple could be either; the structure of the batch drives.
    one_set = is_one_set(names) and (
        isinstance(names, (str, PartitionSpec)) or not isinstance(batch, (tuple, list))
    )
    if one_set:
        parsed = names if isinstance(names, PartitionSpec) else parse_names(names)
        entries = [_first_names(parsed, leaf) for leaf in flat.leaves]
        problems: list[AxisRulesError] = []
    else:
        found = find_entries(batch, flat, names)
        entries, problems = found.entries, list(found.problems)
    fields, more = _describe(flat, entries)
    problems += more
    if not fields and not problems and any(map(_is_array, flat.leaves)):
        problems.append(_nothing_named(flat))
    return Fields(flat, fields, problems)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array)) and bool(leaf.shape) and not _is_text(leaf)


def _is_text(leaf: Any) -> bool:
    """Whether a numpy array holds texts, objects, times or records, which no device can hold."""
    dtype = getattr(leaf, "dtype", None)
    return isinstance(dtype, np.dtype) and (dtype.kind in "OSUMm" or dtype.names is not None)


def _first_names(names: Any, leaf: Any) -> Any:
    """Of one set of names, as many as a leaf has dimensions; its further dimensions are whole."""
    shape = getattr(leaf, "shape", None)
    if not isinstance(shape, tuple) or not hasattr(leaf, "dtype") or _is_text(leaf):
        return NO_ENTRY
    rank = len(shape)
    if isinstance(names, PartitionSpec):
        return PartitionSpec(*tuple(names)[:rank])
    named = tuple(name for name in names if name is not ...)
    if len(named) > rank:
        return named[:rank]
    return names if ... in names else named + (None,) * (rank - len(named))


def _describe(flat: Flat, entries: Sequence[Any]) -> tuple[list[Field], list[AxisRulesError]]:
    """The leaves with names as fields, and those that JAX cannot hold."""
    paths, fields, problems = flat.paths, [], []
    name, unclear = batch_name(zip(paths, entries, strict=True))
    describe = _leaves.Describer()
    for position, (path, leaf, entry) in enumerate(zip(paths, flat.leaves, entries, strict=True)):
        if entry is NO_ENTRY:
            continue
        try:
            described = describe(leaf)
            problem = _unusable(leaf, described, entry)
        except AxisRulesError as error:
            described, problem = None, error
        if problem is not None:
            problems.append(problem.at([path]))
        elif described is not None:
            records = bool(described.shape) and _starts_with(entry, name)
            fields.append(Field(position, path, leaf, entry, described.dtype, records))
    return fields, [*problems, *unclear]


def _unusable(leaf: Any, described: Any, entry: Any) -> AxisRulesError | None:
    """Why a leaf with names cannot be part of a batch, if so."""
    if described is None:
        named = entry not in (None, (), "")
        return _leaves.opaque(leaf) if named and _leaves.is_opaque(leaf) else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return LeafError(
            "a ShapeDtypeStruct has no values to place",
            shape=leaf.shape,
            fix="axisrules.plan(...).abstract gives it a sharding.",
        )
    if (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and not leaf.is_fully_addressable
    ):
        return BatchError(
            "the array lies on several processes already",
            shape=leaf.shape,
            fix="pass the records of this process; axisrules.shard_tree moves arrays that are global.",
        )
    return None


def _starts_with(entry: Any, name: str | None) -> bool:
    if isinstance(entry, PartitionSpec):
        return len(tuple(entry)) > 0 and next(iter(entry)) is not None
    names = _parsed(entry)
    return name is not None and bool(names) and names[0] == name


def _parsed(entry: Any) -> tuple[Any, ...]:
    """The names of an entry; none where it is malformed, which the plan reports."""
    try:
        return () if entry is None or entry is NO_ENTRY else parse_names(entry)
    except AxisRulesError:
        return ()


def batch_name(entries: Iterable[tuple[str, Any]]) -> tuple[str | None, list[AxisRulesError]]:
    """The name of the batch dimension: the one that the names of the fields begin with.

    Returns:
        The name, and the error that there are several. A name that also stands behind another one is
        that of a further dimension: a field may begin with it and hold no records.
    """
    first: dict[str, str] = {}
    later: set[Any] = set()
    for path, entry in entries:
        names = () if isinstance(entry, PartitionSpec) else _parsed(entry)
        if names and isinstance(names[0], str):
            first.setdefault(names[0], path)
        later.update(names[1:])
    found = [name for name in first if name not in later] or list(first)
    if len(found) < 2:
        return (found[0] if found else None), []
    return found[0], [
        BatchError(
            "the fields begin with different names: " + " and ".join(map(repr, found)),
            paths=[first[name] for name in found],
            listing=[f"{first[name]}  {name!r}" for name in found],
            fix="begin the names of every field that holds records with one name, and give None for a "
            'field without. One set of names for all fields is a text: "batch length".',
        )
    ]


def _nothing_named(flat: Flat) -> AxisRulesError:
    paths = [path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if _is_array(leaf)]
    return MissingNamesError(
        "no array of the batch has names",
        paths=paths,
        listing=paths,
        fix='pass one set of names for all, such as "batch length", or names per field.',
    )
