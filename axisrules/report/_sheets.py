"""Sheets: rows of text under a header, shown by rich in a terminal and as plain text elsewhere.

Owns how a report is shown. Knows no plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from axisrules._columns import columns
from axisrules._errors import MissingExtraError
from axisrules._extras import extra_module


@dataclass(frozen=True)
class Sheet:
    """One table of text.

    Attributes:
        title: What stands above it.
        header: A title per column.
        rows: As many cells per row.
        right: The columns that are aligned to the right.
        notes: Lines below it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        body = [columns(self.header, self.rows, self.right)] if self.rows else []
        return "\n".join([self.title, *body, *self.notes])


class Shown:
    """What has sheets; ``str()`` is their plain text."""

    def sheets(self) -> Sequence[Sheet]:
        """The tables that it consists of."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.sheets()))

    def __repr__(self) -> str:
        return str(self)

    def show(self, file: TextIO | None = None) -> None:
        """Prints it: by rich (extra ``report``) where ``file`` is a terminal and rich is installed.

        Args:
            file: Where to; the standard output by default.
        """
        out = sys.stdout if file is None else file
        if not (out.isatty() and _show_rich(self.sheets(), out)):
            print(self, file=out)


def _show_rich(sheets: Iterable[Sheet], out: TextIO) -> bool:
    try:
        console_module, table_module, text_module = (
            extra_module(f"rich.{name}", package="rich", extra="report", purpose="tables in a terminal")
            for name in ("console", "table", "text")
        )
    except MissingExtraError:
        return False  # plain text says the same
    console: Any = console_module.Console(file=out)
    for sheet in sheets:
        console.print(text_module.Text(sheet.title, style="bold"))
        if sheet.rows:
            found = table_module.Table(box=None, pad_edge=False, header_style="bold")
            for number, title in enumerate(sheet.header):
                side = "right" if number in sheet.right else "left"
                found.add_column(title, justify=side, overflow="fold")
            for row in sheet.rows:
                found.add_row(*map(text_module.Text, row))
            console.print(found)
        for note in sheet.notes:
            console.print(text_module.Text(note))
    return True
