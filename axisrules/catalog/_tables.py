"""The tables as files: which there are, under which names, and what they hold.

Owns reading ``tables/*.toml``. What the names of a table mean is for ``NameTable`` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from axisrules import _files
from axisrules._errors import CatalogError, NameTableError
from axisrules._marks import Marks
from axisrules._tables import NameTable, read_table
from axisrules._text import nearest

_FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True, eq=False)
class Known:
    """One table of the catalog.

    Attributes:
        name: Its name, that of its file.
        table: Its patterns and names.
        aliases: Other names of it, with the vocabulary sizes by which they are told apart.
        sizes: How many sizes a word may have in one model, where that is not one.
        needs: Patterns of which a tree of this table matches one; ``None`` where any tree may be of it.
    """

    name: str
    table: NameTable
    aliases: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    needs: NameTable | None = None

    @cached_property
    def marks(self) -> Mapping[int, Marks]:
        """The marks of the table."""
        return self.table.marks

    @cached_property
    def required(self) -> frozenset[int]:
        """The positions of the patterns that are not optional."""
        optional = self.table.optional
        return frozenset(n for n, (pattern, _) in enumerate(self.table) if pattern not in optional)


@cache
def _files_by_name() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


@cache
def _content(name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = _files.read(_files_by_name()[name], NameTableError)
    return content


def _aliases(name: str) -> dict[str, tuple[int, ...]]:
    return {alias: tuple(sizes) for alias, sizes in _content(name).get("aliases", {}).items()}


@cache
def known(name: str) -> Known:
    """The table of one file."""
    data = _content(name)
    needs = NameTable(dict.fromkeys(data["needs"])) if "needs" in data else None
    table = read_table(data, str(_files_by_name()[name]))
    return Known(name, table, _aliases(name), data.get("sizes", {}), needs)


@cache
def every() -> tuple[Known, ...]:
    """All tables, by name."""
    return tuple(map(known, _files_by_name()))


def squash(name: object) -> str:
    """A name without what its spellings differ in."""
    return re.sub("[-_. ]", "", str(name).lower())


def names() -> tuple[str, ...]:
    """The names that ``load`` knows, sorted; several may stand for one table.

    Example:
        >>> from axisrules import catalog
        >>> {"llama", "mistral", "gpt2", "bert", "whisper"} <= set(catalog.names())
        True
    """
    return tuple(sorted({name for file in _files_by_name() for name in (file, *_aliases(file))}))


def load(name: str, *, heads: int | None = None) -> NameTable:
    """The name table of a family of checkpoints.

    Args:
        name: One of ``names()``; case, ``-``, ``_`` and ``.`` do not count.
        heads: How many heads the model has (for Falcon: key-value heads), which no shape tells. With it
            ``plan.report`` says exactly which splits of q, k and v that are fused head by head cut
            through a head.

    Returns:
        The table, which takes the paths of the family's files with or without their prefixes.

    Raises:
        CatalogError: There is no such table; the nearest name is told.

    Example:
        >>> from axisrules import catalog
        >>> catalog.load("llama").find("model.layers.0.self_attn.k_proj.weight")
        ('kv_heads', 'embed')
        >>> catalog.load("gpt2").find("transformer.h.0.mlp.c_fc.weight")  # Conv1D is (in, out)
        ('embed', 'mlp')
    """
    file = _file_of(name)
    if file is not None:
        return known(file).table if heads is None else _with_heads(known(file).table, heads)
    close = nearest(str(name).lower(), names())
    raise CatalogError(
        f"the catalog has no table {name!r}" + (f"; did you mean {close!r}?" if close else ""),
        nearest=close,
        fix="catalog.names() lists them; catalog.guess(tree) finds one; "
        "NameTable.load(path) reads a table of your own.",
    )


def _file_of(name: str) -> str | None:
    if isinstance(name, str) and name in _files_by_name():  # without a look into the others
        return name
    wanted = squash(name)
    for file in _files_by_name():
        if wanted in map(squash, (file, *_aliases(file))):
            return file
    return None


def _with_heads(table: NameTable, heads: int) -> NameTable:
    """The table with a number of heads in every mark of what is fused head by head."""
    entries: list[tuple[Any, Any]] = []
    marks = table.marks
    for number, (pattern, names) in enumerate(table):
        plain = marks[number].plain() if number in marks else {}
        if plain.get("fused", {}).get("order") in ("per_head", "per_kv_group"):
            plain["fused"]["blocks"] = heads
        entries.append((pattern, {"names": names, **plain}))
    return NameTable(entries, optional=table.optional)
