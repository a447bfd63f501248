"""How a plan is made: leaves, their names and the engine brought together.

Owns the order of the work and the gathering of every failure. Resolves nothing itself, and
touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axisrules import _leaves
from axisrules._entries import Entries, find_entries
from axisrules._errors import (
    AxisRulesError,
    MissingNamesError,
    TiedError,
    raise_all,
)
from axisrules._marked import Groups, Marked, find_marked, fused_notes, tell_in_groups
from axisrules._meshes import MeshLike, axis_sizes
from axisrules._names import fit_names, parse_names
from axisrules._options import Options, make_options
from axisrules._plan import SLOT, Placement, Plan, ReportRow, Structure
from axisrules._resolution import Resolution, Sizes
from axisrules._resolve import resolve_array
from axisrules._rules import RulesLike
from axisrules._single import warn_unmapped
from axisrules._specs import check_spec
from axisrules._tables import NameTable
from axisrules._text import format_bytes, format_count
from axisrules._trees import NO_ENTRY, Flat, flatten


def plan(
    tree: Any,
    names: Any = None,
    *,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
    unnamed: str = "error",
    fill: str | tuple[str, ...] | None = None,
    min_bytes: int = 2**20,
    memory_kind: str | None = None,
    dtype: Any = None,
) -> Plan:
    """Where every array of a tree goes, and why; touches no device.

    Args:
        tree: Any tree of arrays or ``ShapeDtypeStruct``s. Functions, texts, ``None`` and Python
            scalars pass through.
        names: A tree of names with the structure of ``tree``, a ``NameTable``, a callable
            ``(path, leaf) -> names``, or ``None`` for the names that the tree itself carries. For a
            leaf, ``None`` means whole on purpose, and a ``PartitionSpec`` is the layout itself.
        mesh: A mesh, a mapping of axis sizes or a text like ``"data=16,model=16"``; by default the
            active mesh.
        rules: The rules; by default the active ones.
        taken: As in ``resolve``.
        indivisible: As in ``resolve``.
        absent: As in ``resolve``.
        unmapped: As in ``resolve``.
        unnamed: What to do with arrays that have no entry: ``"error"``, or ``"replicate"`` them.
        fill: A mesh axis (or several) over which the largest dimension that is still whole after
            the rules is split, in every array of at least ``min_bytes``; only a ``PartitionSpec``
            as names is left as it is.
        min_bytes: The size in bytes from which on ``fill`` applies.
        memory_kind: The memory that the arrays go to, such as ``"pinned_host"``.
        dtype: A floating-point dtype to which floating-point arrays are cast.

    Returns:
        The ``Plan``.

    Raises:
        AxisRulesError: Something does not fit; every failure of the tree is in the one error.

    Warns:
        UnmappedAxisWarning: Once, where ``unmapped="warn"`` and no rule mentions some names.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> params = {"up": np.zeros((8, 32), np.float32), "scale": np.zeros(8, np.float32)}
        >>> plan = ar.plan(params, {"up": "embed mlp", "scale": "embed"},
        ...                mesh="data=4,model=2", rules={"embed": "data", "mlp": "model"})
        >>> print(plan.explain("up"))
        up: float32 (8, 32), 1.0 KiB, 128 bytes per device
        P('data', 'model') for ('embed', 'mlp')
          dimension 0 'embed' of size 8: split over data=4 by rule #0 embed -> data
          dimension 1 'mlp' of size 32: split over model=2 by rule #1 mlp -> model
        >>> plan.bytes_per_device
        136
    """
    options = make_options(
        mesh=mesh, rules=rules, taken=taken, indivisible=indivisible, absent=absent,
        unmapped=unmapped, unnamed=unnamed, fill=fill, min_bytes=min_bytes,
        memory_kind=memory_kind, dtype=dtype,
    )  # fmt: skip
    return make_plan(tree, flatten(tree), names, options)


def make_plan(tree: Any, flat: Flat, names: Any, options: Options, marked: Marked | None = None) -> Plan:
    """The plan of a tree that was taken apart; raises every failure at once.

    Where the names are no table, ``marked`` has what the marks of one say.
    """
    found, paths = find_entries(tree, flat, names), flat.paths
    if marked is None:
        marked = find_marked(found.marks, paths, flat.leaves)
    work = _Work(options, in_table=isinstance(names, NameTable), groups=marked.groups)
    entries = share_entries(flat.leaves, found.entries)
    for path, leaf, entry in zip(paths, flat.leaves, entries, strict=True):
        work.add(path, leaf, entry)
    raise_all([*found.problems, *work.failures()])
    if options.policy.unmapped == "warn":
        work.warn()
    return Plan(
        tuple(work.placements),
        options.mesh,
        options.rules,
        options.memory_kind,
        Structure(flat.rebuild, tuple(work.kept)),
        (*work.notes(), *_notes(found), *fused_notes(marked.fused, work.placements)),
    )


def share_entries(leaves: Sequence[Any], entries: list[Any]) -> list[Any]:
    """The entries, in which a tied leaf without names has those of its twin."""
    if NO_ENTRY not in entries:
        return entries
    pairs = zip(leaves, entries, strict=True)
    known = {id(leaf): entry for leaf, entry in pairs if entry is not NO_ENTRY and _leaves.may_be_tied(leaf)}
    return [
        known.get(id(leaf), entry) if entry is NO_ENTRY and _leaves.may_be_tied(leaf) else entry
        for leaf, entry in zip(leaves, entries, strict=True)
    ]


class _Work:
    """A plan in the making: what was placed, and what failed."""

    def __init__(self, options: Options, *, in_table: bool, groups: dict[str, Groups]) -> None:
        self.options, self.in_table, self.groups = options, in_table, groups
        self.sizes: Sizes = axis_sizes(options.mesh)
        self.by_axis = dict(self.sizes)
        self.describe = _leaves.Describer(options.dtype)
        self.placements: list[Placement] = []
        self.kept: list[Any] = []  # the leaves, with `SLOT` for every array
        self.known: dict[Any, Resolution | AxisRulesError] = {}
        self.refused: dict[int, tuple[Sequence[AxisRulesError], list[str]]] = {}
        self.missing: list[tuple[str, _leaves.Described]] = []
        self.first: dict[int, Placement] = {}  # by id: the arrays that were seen
        self.tied_apart: list[TiedError] = []

    def add(self, path: str, leaf: Any, entry: Any) -> None:
        """Places one leaf, or notes why that fails."""
        try:
            described = self.describe(leaf)
        except AxisRulesError as error:
            self.kept.append(leaf)
            self._refuse(path, (error,), id(error))
            return
        if described is None:
            self.kept.append(leaf)
            if _leaves.is_opaque(leaf) and entry is not NO_ENTRY and entry not in (None, (), ""):
                self._refuse(path, (_leaves.opaque(leaf),), id(leaf))
            return
        self.kept.append(SLOT)
        shape, dtype = described
        if entry is NO_ENTRY and shape:
            self.missing.append((path, described))
        found = self._resolution(entry, shape, dtype, self.groups.get(path))
        if isinstance(found, AxisRulesError):
            self._refuse(path, (found,), id(found))
            return
        if found.problems:
            self._refuse(path, found.problems, id(found))
        placement = Placement(path, shape, dtype, found, self.by_axis)
        if type(leaf) is not jax.ShapeDtypeStruct and _leaves.may_be_tied(leaf):  # the cheap test first
            placement = self._tie(leaf, placement)
        self.placements.append(placement)

    def _tie(self, leaf: Any, placement: Placement) -> Placement:
        first = self.first.setdefault(id(leaf), placement)
        if first is placement:
            return placement
        if first.names != placement.names or first.spec != placement.spec:
            self.tied_apart.append(
                TiedError(
                    f"one array has the names {first.names!r} and {placement.names!r}",
                    paths=(first.path, placement.path),
                    listing=(first.path, placement.path),
                    shape=placement.shape,
                    fix="give both paths the same names, or copy the array to untie them.",
                )
            )
        return placement._replace(tied_to=first.path)

    def _resolution(
        self, entry: Any, shape: tuple[int, ...], dtype: Any, groups: Groups | None
    ) -> Resolution | AxisRulesError:
        if isinstance(entry, list):
            entry = tuple(entry)
        key = (type(entry), entry, shape, dtype, groups)  # the type: a spec may equal a tuple of names
        try:
            return self.known[key]
        except KeyError:
            found = self.known[key] = self._resolve(entry, shape, dtype, groups)
            return found
        except TypeError:  # malformed names without a hash
            return self._resolve(entry, shape, dtype, groups)

    def _resolve(
        self, entry: Any, shape: tuple[int, ...], dtype: Any, groups: Groups | None
    ) -> Resolution | AxisRulesError:
        options = self.options
        if isinstance(entry, PartitionSpec):
            return check_spec(entry, options.rules, self.sizes, shape)
        whole = entry is None or entry is NO_ENTRY
        try:
            names = (None,) * len(shape) if whole else fit_names(parse_names(entry), shape)
        except AxisRulesError as error:
            return error
        big = math.prod(shape) * int(dtype.itemsize) >= options.min_bytes
        fill = options.fill if big else ()
        counted = shape if groups is None else groups.counted(shape)
        found = resolve_array(names, options.rules, self.sizes, counted, options.policy, fill=fill)
        if groups is not None:
            found = tell_in_groups(found, groups, shape)
        if not whole:
            return found
        reason = "names_missing" if entry is NO_ENTRY else "whole_on_purpose"
        dims = [dim._replace(reason=reason) if dim.reason == "unnamed" else dim for dim in found.dims]
        return found._replace(dims=tuple(dims))

    def _refuse(self, path: str, problems: Sequence[AxisRulesError], key: int) -> None:
        self.refused.setdefault(key, (problems, []))[1].append(path)

    def failures(self) -> list[AxisRulesError]:
        """Everything that failed, with the paths where it did."""
        refused = [problem.at(paths) for problems, paths in self.refused.values() for problem in problems]
        missing = [self._missing_error()] if self.missing and self.options.unnamed == "error" else []
        return [*missing, *refused, *self.tied_apart]

    def _missing_error(self) -> MissingNamesError:
        sizes = [math.prod(shape) * int(dtype.itemsize) for _, (shape, dtype) in self.missing]
        total = sum(placement.nbytes for placement in self.placements) or 1
        rows = [
            f"{path}  {shape!r}  {size:,} bytes, {size / total:.1%} of all"
            for (path, (shape, _)), size in zip(self.missing, sizes, strict=True)
        ]
        path, (shape, _) = self.missing[0]
        count = len(rows)
        return MissingNamesError(
            f"{count} {'array has' if count == 1 else 'arrays have'} no names",
            paths=[path for path, _ in self.missing],
            listing=rows,
            bytes=sum(sizes),
            fix=f'{self._how_to_name(path, shape)}, or pass unnamed="replicate".',
        )

    def _how_to_name(self, path: str, shape: tuple[int, ...]) -> str:
        names = " ".join("_" for _ in shape)
        if self.in_table:
            return f'add an entry, such as "{path or "*"}": "{names}"'
        return f'add names, such as "{names}"' + (f" at {path}" if path else "")

    def notes(self) -> list[ReportRow]:
        """Report rows about arrays without names."""
        return [
            ReportRow(path, reason="names_missing", bytes=math.prod(shape) * int(dtype.itemsize))
            for path, (shape, dtype) in self.missing
        ]

    def warn(self) -> None:
        """One warning for all names that no rule mentions."""
        if not any(isinstance(one, Resolution) and one.unknown_names for one in self.known.values()):
            return
        by_name: dict[str, list[Placement]] = {}
        for placement in self.placements:
            for name in placement.resolution.unknown_names:
                by_name.setdefault(name, []).append(placement)
        if by_name:
            leaves = {one.path: one for some in by_name.values() for one in some}
            size = format_bytes(sum(one.nbytes for one in leaves.values()))
            few = list(leaves)[:3]
            more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
            where = f" in {format_count(len(leaves), 'leaf', 'leaves')} of {size}: {', '.join(few)}{more}"
            warn_unmapped(list(by_name), self.options.rules, where=where)


def _notes(found: Entries) -> list[ReportRow]:
    overlaps = [
        ReportRow(path, name=f"{first} | {later}", reason="pattern_overlap")
        for path, first, later in found.overlaps
    ]
    return [*overlaps, *(ReportRow("", name=pattern, reason="unused_pattern") for pattern in found.unused)]
