"""A plan in a notebook: a bar of its arrays by bytes per device, and a table of their kinds.

Owns the small form, which needs no script and no package; the whole page is ``axisrules.report.page``.
"""

from __future__ import annotations

from html import escape

from axisrules._columns import alike
from axisrules._groups import Group, groups
from axisrules._plan import Plan
from axisrules._text import format_spec

_ROWS = 30  # kinds of arrays that are listed


def small_html(plan: Plan) -> str:
    """The small form of a plan as HTML."""
    kinds = sorted(groups(plan), key=lambda kind: -_held(kind))
    layouts = list(dict.fromkeys(map(_layout, kinds)))
    colours = {
        layout: f"hsl({(n * 137.5 + 200) % 360:.0f} 65% 50% / 45%)" for n, layout in enumerate(layouts)
    }
    colours["replicated"] = "hsl(0 0% 60% / 45%)"
    bar = "".join(
        f'<div style="flex:{_held(kind)} 0 0;background:{colours[_layout(kind)]};min-width:0" '
        f'title="{escape(_told(kind))}"></div>'
        for kind in kinds[:200]
        if _held(kind)
    )
    key = " ".join(
        f'<span style="background:{colours[layout]};padding:0 .5em">{escape(layout)}</span>'
        for layout in layouts
    )
    more = f"<tr><td colspan=6>and {len(kinds) - _ROWS:,} more kinds</td></tr>" if len(kinds) > _ROWS else ""
    rows = "".join(map(_row, kinds[:_ROWS]))
    head = "".join(f"<th>{word}</th>" for word in ("arrays", "shape", "names", "spec", "per device", ""))
    return (
        f"<div><b>{escape(str(plan))}</b>"
        f'<div style="display:flex;gap:1px;height:2em;margin:.4em 0">{bar}</div>'
        f"<div>{key}</div><details><summary>{len(plan.placements):,} arrays</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}{more}</tbody></table></details></div>"
    )


def _held(kind: Group) -> int:
    return kind.bytes_per_device * len(kind.paths)


def _layout(kind: Group) -> str:
    used = {axis for dim in kind.resolution.dims for axis in dim.axes}
    split = [axis for axis, size in kind.first.sizes.items() if size > 1 and axis in used]
    return " + ".join(split) or "replicated"


def _told(kind: Group) -> str:
    return f"{len(kind.paths)} x {alike(kind.paths)}: {_held(kind):,} bytes per device, {_layout(kind)}"


def _row(kind: Group) -> str:
    names = " ".join("_" if name is None else name for name in kind.first.names)
    label = f"{len(kind.paths)} x {alike(kind.paths)}" if len(kind.paths) > 1 else kind.paths[0]
    spec, held = format_spec(kind.first.spec), f"{_held(kind):,}"
    cells = (label, str(kind.first.shape), names, spec, held, kind.mark)
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
