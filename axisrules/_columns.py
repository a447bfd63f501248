"""Plain text in columns, and one label for paths that are alike. Knows no class of axisrules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"\d+")


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Rows as aligned text under a header.

    Args:
        header: A title per column.
        rows: As many cells per row.
        right: The columns that are aligned to the right.
    """
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_right = set(right)
    texts = []
    for line in lines:
        cells = [
            cell.rjust(width) if number in to_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def alike(paths: Sequence[str]) -> str:
    """One label for paths: with ``*`` for the numbers in which they differ, if in nothing else."""
    first = _NUMBER.split(paths[0])
    values = [_NUMBER.findall(path) for path in paths]
    if len(paths) == 1:
        return paths[0]
    if any(_NUMBER.split(path) != first for path in paths):
        return f"{paths[0]} (and {len(paths) - 1} more)"
    same = [len(set(column)) == 1 for column in zip(*values, strict=True)]
    marks = [number if fixed else "*" for number, fixed in zip(values[0], same, strict=True)]
    return "".join(text for pair in zip(first, [*marks, ""], strict=True) for text in pair)
