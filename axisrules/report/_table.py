"""``table``: the arrays of a plan, those that are alike on one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from axisrules._columns import alike
from axisrules._errors import PolicyError
from axisrules._groups import Group, groups
from axisrules._plan import Plan
from axisrules._text import did_you_mean, format_spec
from axisrules.report._sheets import Sheet, Shown


@dataclass(frozen=True, slots=True)
class Row:
    """Arrays with the same names, shape, dtype and layout.

    Attributes:
        label: A path that stands for all, with ``*`` for the numbers in which they differ.
        count: How many there are.
        shape: The global shape of each.
        dtype: The dtype of each.
        names: The axis names of each.
        spec: The spec of each.
        shard_shape: The shape of the part that one device holds.
        nbytes: Bytes of all of them, whole.
        bytes_per_device: Bytes of all of them that one device holds.
        wasted: Bytes of them per device beyond the ideal, which is ``nbytes`` over all devices.
        ways: Into how many distinct parts each is split.
        mark: ``replicated``, ``skipped`` (a rule for it was), ``tied``, or nothing.
        paths: The paths, in the order of the tree.
    """

    label: str
    count: int
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...]
    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    nbytes: int
    bytes_per_device: int
    wasted: float
    ways: int
    mark: str
    paths: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Table(Shown):
    """The arrays of a plan by kind; ``str()`` is plain text, ``show()`` prints.

    Attributes:
        plan: The plan.
        rows: A row per kind of arrays.
    """

    plan: Plan
    rows: tuple[Row, ...]

    def sheets(self) -> list[Sheet]:
        """The table as text."""
        header = (
            "count",
            "shape",
            "dtype",
            "names",
            "spec",
            "shard",
            "bytes",
            "per device",
            "ways",
            "mark",
            "path",
        )
        rows = tuple(map(_cells, self.rows))
        plan = self.plan
        total = (
            f"{plan.nbytes:,} bytes, {plan.bytes_per_device:,} bytes per device on {plan.mesh.size:,} devices"
        )
        return [Sheet(str(plan), header, rows, right=(0, 6, 7, 8), notes=(total,))]


def _cells(row: Row) -> tuple[str, ...]:
    names = " ".join("_" if name is None else name for name in row.names)
    sizes = (f"{row.nbytes:,}", f"{row.bytes_per_device:,}", f"{row.ways:,}")
    layout = (format_spec(row.spec), str(row.shard_shape))
    return (str(row.count), str(row.shape), str(row.dtype), names, *layout, *sizes, row.mark, row.label)


_ORDERS: dict[str, Callable[[Row], float]] = {
    "tree": lambda row: 0,
    "bytes": lambda row: -row.nbytes,
    "waste": lambda row: -row.wasted,
}


def table(plan: Plan, *, sort: str = "tree") -> Table:
    """The arrays of a plan, those with the same names, shape and layout on one line.

    Args:
        plan: The plan.
        sort: The order of the lines: that of the ``"tree"``, or by ``"bytes"`` or by bytes of
            ``"waste"``, the largest first.

    Returns:
        A ``Table``: ``.rows``, ``str()`` as plain text, ``.show()`` to print.

    Raises:
        PolicyError: There is no such order.
        PlanError: It is no plan.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> tree = {f"l{i}": {"up": np.zeros((8, 32), np.float32)} for i in range(3)}
        >>> plan = ar.plan(tree, ar.NameTable({"**/up": "embed mlp"}), mesh="data=4,model=2",
        ...                rules={"embed": "data", "mlp": "model"})
        >>> print(ar.report.table(plan))
        plan of 3 arrays on data=4, model=2: 3.0 KiB, 384 bytes per device
        count  shape    dtype    names      spec                shard    bytes  per device  ways  mark  path
            3  (8, 32)  float32  embed mlp  P('data', 'model')  (2, 16)  3,072         384     8        l*/up
        3,072 bytes, 384 bytes per device on 8 devices
    """
    if sort not in _ORDERS:
        words = ", ".join(map(repr, _ORDERS))
        raise PolicyError(
            f"sort={sort!r} is no order{did_you_mean(str(sort), _ORDERS)}", fix=f"pass one of {words}."
        )
    found: dict[Any, list[Group]] = {}
    for group in groups(plan):
        first = group.first
        key = (first.names, first.shape, first.dtype, first.spec, group.mark)
        found.setdefault(key, []).append(group)
    rows = [_row(some, plan.mesh.size) for some in found.values()]
    return Table(plan, tuple(sorted(rows, key=_ORDERS[sort])))


def _row(some: list[Group], devices: int) -> Row:
    first = some[0].first
    paths = tuple(path for group in some for path in group.paths)
    nbytes = sum(group.nbytes * len(group.paths) for group in some)
    held = sum(group.bytes_per_device * len(group.paths) for group in some)
    return Row(
        alike(paths),
        len(paths),
        first.shape,
        first.dtype,
        first.names,
        first.spec,
        first.shard_shape,
        nbytes,
        held,
        held - nbytes / devices,
        some[0].ways,
        some[0].mark,
        paths,
    )
