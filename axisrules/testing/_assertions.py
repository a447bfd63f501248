"""Assertions about plans, for tests of one's own rules.

Owns what a failed one says: an ``AssertionError`` in the layout of every other message, with all
arrays at fault. What is no failed claim, such as an axis that the mesh lacks, raises the error of its
kind. Resolves nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jax.sharding import PartitionSpec

from axisrules._errors import AbsentAxisError, AxisRulesError, LayoutError, PlanError
from axisrules._plan import Placement, Plan
from axisrules._tables import NameTable
from axisrules._text import did_you_mean, format_spec
from axisrules._trees import flatten


def assert_no_axis_twice(layout: Any) -> None:
    """No array is split twice over one mesh axis.

    A plan keeps this promise by itself; specs that are written by hand, or by other tools, may not.

    Args:
        layout: A ``Plan``, or a tree of specs, shardings or arrays.

    Raises:
        AssertionError: An array is; or there is no layout in the tree.

    Example:
        >>> import axisrules as ar
        >>> from jax.sharding import PartitionSpec as P
        >>> ar.testing.assert_no_axis_twice({"up": P("data", ("model", "expert"))})
        >>> ar.testing.assert_no_axis_twice({"up": P("data", ("model", "data"))})
        Traceback (most recent call last):
        AssertionError: mesh axis 'data' stands twice in the layout of an array
          at:    up  P('data', ('model', 'data'))
          fix:   split another dimension of the array over it, or none.
    """
    __tracebackhide__ = True
    specs = list(_specs(layout))
    if not specs and not isinstance(layout, Plan):
        _fail(LayoutError("there is no layout to check", fix="pass a plan, or a tree of specs or shardings."))
    twice = [(path, spec, axis) for path, spec in specs for axis in _repeated(spec)]
    if twice:
        _fail(
            LayoutError(
                f"mesh axis {twice[0][2]!r} stands twice in the layout of an array",
                paths=[path for path, _, _ in twice],
                listing=[f"{path}  {format_spec(spec)}".strip() for path, spec, _ in twice],
                fix="split another dimension of the array over it, or none.",
            )
        )


def _specs(layout: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The specs of a plan, or of what in a tree is a spec or has one."""
    if isinstance(layout, Plan):
        for placement in layout.placements:
            yield placement.path, tuple(placement.spec)
        return
    flat = flatten(layout)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        sharding = getattr(leaf, "sharding", leaf)
        spec = getattr(sharding, "spec", sharding)
        if isinstance(spec, PartitionSpec):
            yield path, tuple(spec)


def _repeated(spec: Sequence[Any]) -> list[str]:
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec]
    used = [axis for entry in entries if isinstance(entry, tuple) for axis in entry]
    return [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]


def assert_split(plan: Plan, pattern: str | re.Pattern[str], *, over: str | tuple[str, ...]) -> None:
    """Every array whose path matches is split over these mesh axes.

    An axis of size 1 splits nothing, and has to stand in the spec all the same.

    Args:
        plan: The plan.
        pattern: A path pattern as in a ``NameTable``: ``*`` matches within one segment, ``**`` any
            number of segments.
        over: A mesh axis, or several, in whatever dimensions.

    Raises:
        AssertionError: An array is not; or no path matches, so that nothing would be claimed.
        AbsentAxisError: The mesh has no such axis.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> tree = {"up": {"kernel": np.zeros((8, 32), np.float32)}}
        >>> plan = ar.plan(tree, {"up": {"kernel": "embed mlp"}}, mesh="data=4,model=2",
        ...                rules={"embed": None, "mlp": "model"})
        >>> ar.testing.assert_split(plan, "*/kernel", over="model")
        >>> ar.testing.assert_split(plan, "*/kernel", over="data")
        Traceback (most recent call last):
        AssertionError: 1 of 1 arrays that match '*/kernel' is not split over data
          at:    up/kernel  P(None, 'model') for ('embed', 'mlp')
          mesh:  data=4, model=2
          fix:   print(plan.explain('up/kernel')) says why; give one of its names a rule with data.
    """
    __tracebackhide__ = True
    wanted = (over,) if isinstance(over, str) else tuple(over)
    sizes = dict(_checked(plan).mesh.shape_tuple)
    for axis in wanted:
        if axis not in sizes:
            raise AbsentAxisError(
                f"the mesh has no axis {axis!r}{did_you_mean(axis, sizes)}",
                axis=axis,
                mesh=sizes,
                fix="use an axis of the mesh.",
            )
    matching = _matching(plan, pattern)
    whole = [one for one in matching if not set(wanted) <= _axes(one)]
    if whole:
        missing = [axis for axis in wanted if axis not in _axes(whole[0])]
        one = "is" if len(whole) == 1 else "are"
        _fail(
            LayoutError(
                f"{len(whole)} of {len(matching)} arrays that match {_text(pattern)!r} {one} not split over "
                f"{', '.join(wanted)}",
                paths=[one.path for one in whole],
                listing=[f"{one.path}  {format_spec(one.spec)} for {one.names!r}" for one in whole],
                mesh=sizes,
                fix=f"print(plan.explain({whole[0].path!r})) says why; give one of its names a rule with "
                f"{' and '.join(missing)}.",
            )
        )


def _matching(plan: Plan, pattern: str | re.Pattern[str]) -> list[Placement]:
    __tracebackhide__ = True
    table = NameTable({pattern: None})
    found = [one for one in plan.placements if table.matches(one.path)]
    if not found:
        some = ", ".join(one.path for one in plan.placements[:3]) or "none"
        fix = f"the paths are {some}{', ...' if len(plan.placements) > 3 else ''}; '**' matches any segments."
        _fail(LayoutError(f"no array of the plan matches {_text(pattern)!r}", fix=fix))
    return found


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _axes(placement: Placement) -> set[str]:
    return {axis for dim in placement.resolution.dims for axis in dim.axes}


def assert_fits(plan: Plan, bytes: int) -> None:
    """No device holds more than so many bytes of the plan's arrays.

    Args:
        plan: The plan.
        bytes: The limit in bytes, such as ``16 * 2**30``.

    Raises:
        AssertionError: A device would; the largest arrays are named first.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> plan = ar.plan({"up": np.zeros((8, 32), np.float32)}, {"up": "embed mlp"}, mesh="data=4",
        ...                rules={"embed": "data", "mlp": None})
        >>> ar.testing.assert_fits(plan, 256)
    """
    __tracebackhide__ = True
    try:
        _checked(plan).check(max_bytes_per_device=bytes)
    except LayoutError as error:
        failed = error
    else:
        return
    _fail(failed)


def assert_matches(plan: Plan, golden: str | os.PathLike[str] | Plan) -> None:
    """The plan is as it was: the same arrays, layouts, mesh and rules.

    Args:
        plan: The plan.
        golden: The plan to compare with, or a file that holds its ``to_json()``.

    Raises:
        AssertionError: They differ, with everything that does; or there is no such file.
        PlanError: The file holds no plan.

    Example:
        >>> import axisrules as ar, numpy as np, pathlib, tempfile
        >>> plan = ar.plan({"up": np.zeros((8, 32), np.float32)}, {"up": "embed mlp"}, mesh="data=4",
        ...                rules={"embed": "data", "mlp": None})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     golden = pathlib.Path(folder, "plan.json")
        ...     _ = golden.write_text(plan.to_json(), encoding="utf-8")
        ...     ar.testing.assert_matches(plan, golden)
    """
    __tracebackhide__ = True
    _checked(plan)
    expected = golden if isinstance(golden, Plan) else _read(golden)
    change = expected.diff(plan)
    if change:
        rewrite = "" if isinstance(golden, Plan) else f" If it is meant: {_how_to_write(golden)}"
        where = "the expected one" if isinstance(golden, Plan) else os.fspath(golden)
        raise AssertionError(
            f"the plan differs from {where}, which stands first here:\n{change}\n{rewrite}".rstrip()
        )


def _read(path: str | os.PathLike[str]) -> Plan:
    __tracebackhide__ = True
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = None
    except (OSError, ValueError, TypeError) as cause:
        raise PlanError(f"cannot read the plan {path!r}: {cause}", fix="pass a file or a plan.") from cause
    if text is None:
        _fail(LayoutError(f"there is no plan at {os.fspath(path)} to compare with", fix=_how_to_write(path)))
    return Plan.from_json(text)


def _how_to_write(path: str | os.PathLike[str]) -> str:
    return f'pathlib.Path({os.fspath(path)!r}).write_text(plan.to_json(), encoding="utf-8")'


def _checked(plan: Any) -> Plan:
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is no plan", fix="pass what axisrules.plan returned.")
    return plan


def _fail(error: AxisRulesError) -> NoReturn:
    __tracebackhide__ = True
    raise AssertionError(str(error))
