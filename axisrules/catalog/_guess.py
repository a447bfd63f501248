"""Which table of the catalog covers a tree.

Owns the choice among the tables and what is said about it. How far one table covers a tree is measured
in ``_measure.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axisrules._errors import CatalogError
from axisrules._tables import NameTable, split_path
from axisrules.catalog import _tables
from axisrules.catalog._measure import Measured, kinds_of, measure


@dataclass(frozen=True)
class Guess:
    """Which table covers a tree; false where none does.

    Attributes:
        name: The name of the table, or ``None``: no table covers three quarters of the arrays, or the
            best one is contradicted by the shapes of more than one in twenty.
        coverage: The fraction (0 to 1) of the arrays that the best table has names for.
        unmatched: The paths of arrays that no pattern of it matches.
        contradicted: The paths of arrays that match, and have another rank or size than their names say.
        also: Other names that cover the tree as well.
        nearest: Where there is no answer, the table that came nearest.

    Example:
        >>> import jax.numpy as jnp
        >>> from axisrules import catalog
        >>> catalog.guess({"w": jnp.zeros((2, 2))}).name is None
        True
    """

    name: str | None
    coverage: float
    unmatched: tuple[str, ...] = ()
    contradicted: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    nearest: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    @property
    def table(self) -> NameTable:
        """The table itself.

        Raises:
            CatalogError: There is no answer.
        """
        if self.name is None:
            raise CatalogError(
                str(self),
                nearest=self.nearest,
                fix="read a table of your own with NameTable.load(path), or give the names of the tree.",
            )
        return _tables.load(self.name)

    def __str__(self) -> str:
        if self.name is None:
            close = f"; {self.nearest} comes nearest with {self.coverage:.1%}" if self.nearest else ""
            return f"none of the tables covers this tree{close}"
        also = f", as {', '.join(self.also)} would" if self.also else ""
        return f"{self.name} covers {self.coverage:.1%} of the arrays{also}"


def guess(tree: Any) -> Guess:
    """Which table of the catalog covers a tree, and how far.

    Of several that might, the one is taken that matches the most paths of the tree and of whose patterns
    (optional ones aside) the tree uses the most. Families of one spelling, such as Llama and Mistral, are
    told apart by the size of their vocabulary or by a name in the paths, where that is possible; ``also``
    has the others.

    Args:
        tree: Arrays or ``ShapeDtypeStruct``s, nested or flat.

    Returns:
        The ``Guess``; its ``name`` is ``None`` where no table fits.

    Example:
        >>> import jax.numpy as jnp
        >>> from axisrules import catalog
        >>> tree = {
        ...     "h.0.attn.c_attn.weight": jnp.zeros((8, 24)), "h.0.attn.c_proj.weight": jnp.zeros((8, 8)),
        ...     "h.0.mlp.c_fc.weight": jnp.zeros((8, 32)), "h.0.mlp.c_proj.weight": jnp.zeros((32, 8)),
        ...     "value_head.weight": jnp.zeros((1, 8)),
        ... }
        >>> found = catalog.guess(tree)
        >>> found.name, found.coverage, found.unmatched
        ('gpt2', 0.8, ('value_head.weight',))
    """
    kinds = kinds_of(tree)
    measured = [measure(one, kinds) for one in _tables.every()]
    best = max(measured, key=lambda one: one.merit)
    missing = tuple(best.unmatched), tuple(best.contradicted)
    if not best.answers:
        return Guess(None, best.coverage, *missing, nearest=best.known.name if best.coverage else None)
    equal = [one for one in measured if one.merit == best.merit]
    called = [name for one in equal for name in (one.known.name, *one.known.aliases)]
    segments = {_tables.squash(part) for kind in kinds for part in split_path(kind.path)}
    name = _told_apart(equal, segments) or best.known.name
    return Guess(name, best.coverage, *missing, tuple(other for other in called if other != name))


def _told_apart(equal: Sequence[Measured], segments: set[str]) -> str | None:
    """The name, of several for equally good tables, that a vocabulary or a path speaks for."""
    for one in equal:
        for alias, sizes in one.known.aliases.items():
            if not one.vocabularies.isdisjoint(sizes):
                return alias
    for one in equal:
        for name in (one.known.name, *one.known.aliases):
            if _tables.squash(name) in segments:
                return name
    return None
