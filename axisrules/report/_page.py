"""``page``: one HTML file that shows a plan, or compares several, without any network.

Owns what the page is told; how it looks stands in ``templates/``. A tree of more than 2,000 arrays is
shown by kind, so that the file stays small.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axisrules import _files
from axisrules._columns import alike
from axisrules._errors import PlanError, PolicyError
from axisrules._extras import extra_module
from axisrules._groups import Group, groups
from axisrules._plan import Plan
from axisrules._plan_diff import diff
from axisrules._resolution import why
from axisrules._text import format_mesh, format_spec
from axisrules.cost import Hardware
from axisrules.cost import hardware as known_hardware
from axisrules.report._lint import lint
from axisrules.report._prices import prices
from axisrules.report._sheets import Sheet
from axisrules.report._waste import waste

_TEMPLATES = Path(__file__).parent / "templates"
_SINGLE = 2000  # arrays up to which each is shown by itself


def page(
    plan: Plan | Iterable[Plan] | Mapping[str, Plan],
    path: str | os.PathLike[str],
    *,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    optimizer: Any = None,
    batch: str = "batch",
) -> None:
    """Writes one self-contained HTML file that shows a plan, or compares several.

    It holds a treemap of the arrays by bytes per device, coloured by how they are split; for the
    chosen array the tiles on the mesh and the reasons; a filter, the waste and the findings. It needs
    no network, works by keyboard, on a phone and in dark mode.

    Args:
        plan: A plan, several in order, or several by name. The others are compared with the first.
        path: The file to write, whole or not at all.
        hardware: The accelerator: then memory and traffic are shown too, with their sources.
        optimizer: The optimizer, as for ``cost.memory``; its state is a part of the memory.
        batch: The logical name of the batch, for the traffic.

    Raises:
        PlanError: There is no plan, something is none, or the file cannot be written.
        HardwareError: The hardware is unknown.
        PolicyError: There is an optimizer and no hardware.
        StateError: An array of the optimizer's state belongs to no parameter.
        MissingExtraError: Jinja2 is not installed.

    Example:
        >>> import axisrules as ar, numpy as np, pathlib, tempfile
        >>> plan = ar.plan({"up": np.zeros((8, 32), np.float32)}, {"up": "embed mlp"},
        ...                mesh="data=4,model=2", rules={"embed": "data", "mlp": "model"})
        >>> path = pathlib.Path(tempfile.mkdtemp(), "plan.html")
        >>> ar.report.page(plan, path)
        >>> "</html>" in path.read_text()
        True
    """
    plans = _named(plan)
    if hardware is None and optimizer is not None:
        raise PolicyError(
            "an optimizer is shown with the memory of an accelerator alone",
            fix='pass hardware="TPU v5e", too.',
        )
    chip = None if hardware is None else known_hardware(hardware)
    costs = {} if chip is None else {name: prices(one, chip, optimizer, batch) for name, one in plans.items()}
    text = page_text(plans, costs)
    try:
        _files.write_text(Path(os.path.realpath(path)), text)
    except (OSError, UnicodeEncodeError) as cause:
        where = os.fspath(path)
        raise PlanError(
            f"cannot write {where}: {cause}", paths=[str(where)], fix="give a path in a folder that exists."
        ) from cause


def page_text(plans: dict[str, Plan], costs: Mapping[str, Iterable[Sheet]]) -> str:
    """The HTML of plans by name, and of what they cost."""
    jinja = extra_module("jinja2", package="Jinja2", extra="page", purpose="pages")
    shown = [
        {**_plan_data(name, plan), "costs": [vars(sheet) for sheet in costs.get(name, ())]}
        for name, plan in plans.items()
    ]
    loader = jinja.FileSystemLoader(str(_TEMPLATES))
    environment = jinja.Environment(loader=loader, autoescape=True, trim_blocks=True)
    data = json.dumps({"plans": shown}, separators=(",", ":"))
    for mark in "<>&":  # none of them may end the script that the data stand in
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    template = environment.get_template("page.html")
    text: str = template.render(
        title="axisrules plan" if len(plans) == 1 else f"{len(plans)} axisrules plans",
        plans=[{"name": _printable(name)} for name in plans],
        priced=bool(costs),
        comparisons=_comparisons(plans),
        data=jinja.filters.do_mark_safe(data),
    )
    return text


def _printable(text: str) -> str:
    """The text without halves of surrogate pairs, which have no place in a file."""
    return text.encode("utf-8", "replace").decode()


def _named(plans: Any) -> dict[str, Plan]:
    if isinstance(plans, Plan):
        return {"plan": plans}
    if isinstance(plans, Mapping):
        found = {str(name): plan for name, plan in plans.items()}
    elif isinstance(plans, Iterable) and not isinstance(plans, (str, bytes)):
        found = {f"plan {number}": plan for number, plan in enumerate(plans)}
    else:
        found = {"": plans}
    wrong = [plan for plan in found.values() if not isinstance(plan, Plan)]
    if wrong or not found:
        raise PlanError(
            f"{wrong[0]!r} is no plan" if wrong else "there is no plan to show",
            fix="give what axisrules.plan or Plan.from_json returned, or several of them.",
        )
    return found


def _plan_data(name: str, plan: Plan) -> dict[str, Any]:
    kinds = groups(plan)
    single = len(plan.placements) <= _SINGLE
    described = [_kind(kind) for kind in kinds]
    layouts = dict.fromkeys(" + ".join(one["split"]) or "replicated" for one in described)
    return {
        "name": name,
        "summary": str(plan),
        "mesh": [list(axis) for axis in plan.mesh.shape_tuple],
        "devices": plan.mesh.size,
        "kinds": described,
        "layouts": list(layouts),
        "items": [item for number, kind in enumerate(kinds) for item in _items(number, kind, single=single)],
        "waste": [vars(sheet) for sheet in waste(plan).sheets()],
        "findings": [
            {"severity": one.severity, "code": one.code, "message": one.message, "fix": one.fix}
            for one in lint(plan=plan)
        ],
    }


def _kind(kind: Group) -> dict[str, Any]:
    first, dims = kind.first, kind.resolution.dims
    return {
        "shape": str(first.shape),
        "dtype": str(first.dtype),
        "names": " ".join("_" if name is None else name for name in first.names) or "(none)",
        "spec": format_spec(first.spec),
        "shard": list(first.shard_shape),
        "ways": kind.ways,
        "mark": kind.mark,
        "nbytes": kind.nbytes,
        "held": kind.bytes_per_device,
        "axes": [list(dim.axes) for dim in dims],
        "split": [axis for axis, size in first.sizes.items() if size > 1 and _holds(kind, axis)],
        "why": [f"{dim.name!r} of size {dim.size}: {why(kind.resolution, dim)}" for dim in dims],
    }


def _holds(kind: Group, axis: str) -> bool:
    return any(axis in dim.axes for dim in kind.resolution.dims)


def _items(number: int, kind: Group, *, single: bool) -> list[dict[str, Any]]:
    if single:
        return [{"label": path, "kind": number, "count": 1} for path in kind.paths]
    return [{"label": alike(kind.paths), "kind": number, "count": len(kind.paths)}]


def _comparisons(plans: dict[str, Plan]) -> list[dict[str, str]]:
    """How every plan compares with the first; nothing where there is one alone."""
    (first_name, first), rest = next(iter(plans.items())), list(plans.items())[1:]
    if not rest:
        return []
    rows = [_comparison(first_name, first, None)]
    return [*rows, *(_comparison(name, plan, first) for name, plan in rest)]


def _comparison(name: str, plan: Plan, first: Plan | None) -> dict[str, str]:
    found = None if first is None else diff(first, plan)
    return {
        "name": _printable(name),
        "mesh": format_mesh(dict(plan.mesh.shape_tuple)),
        "held": f"{plan.bytes_per_device:,}",
        "factor": f"{waste(plan).factor:.3g}",
        "moved": "" if found is None else f"{found.received:,}",
        "text": "" if found is None else _printable(str(found)),
    }
