"""Pictures of tiles as SVG. Owns the drawing alone; what is drawn comes in as rows of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Protocol

_CELL, _LINE, _SIDE, _TOP = 34, 7.2, 12, 58  # heights, width of a letter, margins


class Rows(Protocol):
    """What a picture shows: a grid of texts with a header and a side."""

    header: list[str]
    rows: list[list[str]]
    hues: list[list[float | None]]

    @property
    def sides(self) -> str:
        """What the two sides are."""


def svg(title: str, grid: Rows) -> str:
    """One SVG element: a cell per tile, coloured by tile, with the devices that hold it."""
    side = max(len(row[0]) for row in grid.rows) * _LINE + 2 * _SIDE if grid.rows else _SIDE
    texts = [*grid.header, *(cell for row in grid.rows for cell in row[1:])]
    cell = max(map(len, texts), default=1) * _LINE + 16
    width = max(side + cell * len(grid.header), len(title) * _LINE) + _SIDE
    height = _TOP + 20 + _CELL * len(grid.rows) + _SIDE
    body = "".join(_body(grid, side, cell))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="ui-monospace, monospace" font-size="12" '
        f'fill="currentColor"><title>{escape(title)}</title>'
        f"{_text(_SIDE, 20, title, 'start')}{_text(_SIDE, 40, grid.sides, 'start')}{body}</svg>"
    )


def _body(grid: Rows, side: float, cell: float) -> Iterator[str]:
    for col, text in enumerate(grid.header):
        yield _text(side + (col + 0.5) * cell, _TOP + 12, text)
    for row, (texts, hues) in enumerate(zip(grid.rows, grid.hues, strict=True)):
        top = _TOP + 20 + row * _CELL
        yield _text(side - _SIDE, top + _CELL / 2 + 4, texts[0], "end")
        yield from _row(texts[1:], hues, side, top, cell)


def _row(
    texts: Sequence[str], hues: Sequence[float | None], side: float, top: float, cell: float
) -> Iterator[str]:
    for col, (text, hue) in enumerate(zip(texts, hues, strict=True)):
        left = side + col * cell
        if hue is not None:
            yield (
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{cell - 2:.1f}" height="{_CELL - 2}" rx="3" '
                f'fill="hsl({hue * 300:.0f} 70% 50%)" fill-opacity="0.3" stroke="currentColor" '
                f'stroke-opacity="0.4"/>'
            )
        yield _text(left + cell / 2, top + _CELL / 2 + 4, text)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
