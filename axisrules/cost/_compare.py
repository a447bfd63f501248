"""Rule sets side by side, on one mesh or several.

Owns the table and its order. Prices nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from axisrules._errors import AxisRulesError, PolicyError, RulesError
from axisrules._meshes import MeshLike, as_mesh, axis_sizes, need_mesh
from axisrules._plan import Plan
from axisrules._planning import plan as make_plan
from axisrules._rules import RulesLike
from axisrules._text import format_bytes, format_mesh
from axisrules.cost._given import Step, made_by
from axisrules.cost._hardware import Hardware, HardwareLike, as_hardware
from axisrules.cost._measure import Measured, measure
from axisrules.cost._memory import Memory, memory
from axisrules.cost._moves import Traffic
from axisrules.cost._search import Score, score_of
from axisrules.cost._traffic import traffic

_FEWEST, _MOST = 8, 8192  # devices of a mesh that grows


@dataclass(frozen=True, eq=False)
class Row:
    """One rule set on one mesh.

    Attributes:
        name: The name of the rule set.
        mesh: Axis sizes.
        memory: Bytes per device by kind; ``None`` where the rules do not fit.
        traffic: Weights and gradients on the wires; ``None`` where the rules do not fit.
        score: What the order goes by.
        compute_seconds: The least time of the arithmetic, or ``None`` if unknown.
        flops_source: What the arithmetic was counted by.
        indivisible: Leaves with a dimension that stays whole since it does not divide.
        idle: Mesh axes that split neither weights nor the batch.
        measured: What the compiler says of the step.
        problem: Why there is no plan, in a line.
    """

    name: str
    mesh: Mapping[str, int]
    memory: Memory | None = None
    traffic: Traffic | None = None
    score: Score | None = None
    compute_seconds: float | None = None
    flops_source: str = ""
    indivisible: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    measured: Measured | None = None
    problem: str = ""

    @property
    def seconds(self) -> float | None:
        """The lower bound of communication: of the compiled step, else of weights and gradients."""
        if self.measured is not None:
            return self.measured.seconds
        return None if self.traffic is None else self.traffic.seconds

    @property
    def bound(self) -> str:
        """What takes longer, by these lower bounds: ``"compute"``, ``"communication"`` or ``"unknown"``."""
        if self.seconds is None or self.compute_seconds is None:
            return "unknown"
        return "communication" if self.seconds > self.compute_seconds else "compute"

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        if self.memory is None or self.score is None or self.traffic is None:
            return (self.name, format_mesh(self.mesh), self.problem, "", "", "", "", "")
        fits = {None: "?", True: "yes", False: "no"}[self.memory.fits]
        wire = self.measured.wire_bytes if self.measured is not None else self.traffic.wire_bytes
        return (
            self.name,
            format_mesh(self.mesh),
            fits,
            format_bytes(self.memory.bytes_per_device),
            "unknown" if wire is None else format_bytes(wire),
            _time(self.seconds),
            _time(self.compute_seconds),
            f"{self.score.waste:.2f}x",
        )


_HEAD = ("rules", "mesh", "fits", "memory", "sent", "at least", "compute", "waste")


def _time(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:,.2f} ms"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Rule sets side by side, the best first.

    Attributes:
        rows: A row per rule set and mesh, in order.
        why: The winner and the reason in a sentence.
        growth: By rule set: bytes per device and bytes sent, on 8 to 8,192 devices; the first axis
            of the first mesh grows.
        source: Where the numbers come from.
    """

    rows: tuple[Row, ...]
    why: str
    growth: Mapping[str, tuple[Growth, ...]]
    source: str

    @property
    def winner(self) -> Row | None:
        """The best row, or ``None`` where no rule set fits the tree."""
        return self.rows[0] if self.rows and self.rows[0].memory is not None else None

    def __str__(self) -> str:
        table = [_HEAD, *(row.cells() for row in self.rows)]
        widths = [max(len(row[at]) for row in table) for at in range(len(_HEAD))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, self.why, f"source: {self.source}"])


@dataclass(frozen=True, slots=True)
class Growth:
    """One size of a mesh that grows.

    Attributes:
        devices: Devices.
        bytes_per_device: Bytes of parameters, gradients, optimizer and batch per device.
        wire_bytes: Bytes of weights and gradients that a device sends, or ``None`` if unknown.
    """

    devices: int
    bytes_per_device: int
    wire_bytes: int | None


def compare(
    rule_sets: Mapping[str, RulesLike],
    tree: Any,
    names: Any = None,
    *,
    meshes: MeshLike | Iterable[MeshLike] | None = None,
    step: Step | None = None,
    batch: str = "batch",
    hardware: HardwareLike = None,
    optimizer: Any = None,
    tokens: int | None = None,
    **options: Any,
) -> Comparison:
    """One table over rule sets and meshes: fits, memory, traffic, times, waste, and what would break.

    Args:
        rule_sets: Rule sets by name.
        tree: The parameters, as for ``plan``.
        names: Their names, as for ``plan``.
        meshes: A mesh or several; by default the active one.
        step: A function that makes of a plan the step and its arguments, ``(function, arguments)``;
            it is then compiled, as by ``measure``.
        batch: The logical name of the batch.
        hardware: The accelerator.
        optimizer: The optimizer, as for ``memory``.
        tokens: Tokens of a batch: without a step, the arithmetic is 6 · parameters · tokens.
        **options: Options of ``plan``; by default what does not divide stays whole.

    Raises:
        HardwareError: The hardware is unknown.
        PolicyError: There is no rule set, or no mesh; ``tokens`` is no number; or ``step`` returns no
            pair.
        AxisRulesError: The names do not fit the tree, or an option is wrong. Rules that do not fit
            are a row with the reason.

    Example:
        >>> import numpy as np
        >>> from axisrules import cost, presets
        >>> params = {"up": np.zeros((64, 256), np.float32)}
        >>> table = cost.compare({"dp": presets.data_parallel(), "fsdp": presets.fsdp()}, params,
        ...                      {"up": "embed mlp"}, meshes="data=8")
        >>> table.winner.name
        'fsdp'
    """
    if not isinstance(rule_sets, Mapping) or not rule_sets:
        raise PolicyError("there is no rule set to compare", fix='pass a mapping like {"fsdp": rules}.')
    chip = as_hardware(hardware)
    shapes = [need_mesh(None)] if meshes is None else [as_mesh(mesh) for mesh in _several(meshes)]
    if not shapes:
        raise PolicyError("there is no mesh to compare on", fix='pass meshes="data=4,model=2", or several.')
    if tokens is not None and not (isinstance(tokens, int) and tokens > 0):
        raise PolicyError(f"tokens={tokens!r} is no number of tokens", fix="pass a positive whole number.")
    work = _Work(tree, names, batch, chip, optimizer, tokens, step, options)
    work.check(shapes[0])
    rows = [work.row(name, rules, mesh) for name, rules in rule_sets.items() for mesh in shapes]
    rows.sort(key=_order)
    first = dict(axis_sizes(shapes[0]))
    growth = {name: tuple(work.growth(rules, first)) for name, rules in rule_sets.items()}
    source = "plans" if step is None else "plans, and compiled steps"
    return Comparison(tuple(rows), _why(rows), growth, source)


def _several(meshes: Any) -> list[Any]:
    single = isinstance(meshes, (str, Mapping)) or hasattr(meshes, "axis_names")
    return [meshes] if single else list(meshes)


class _Work:
    """What is the same for all rows."""

    def __init__(
        self,
        tree: Any,
        names: Any,
        batch: str,
        chip: Hardware | None,
        optimizer: Any,
        tokens: int | None,
        step: Step | None,
        options: dict[str, Any],
    ) -> None:
        self.tree, self.names, self.batch, self.chip = tree, names, batch, chip
        self.optimizer, self.tokens, self.step = optimizer, tokens, step
        self.options = {"indivisible": "next", "absent": "drop", "unmapped": "replicate", **options}

    def plan(self, rules: RulesLike, mesh: Any) -> Plan:
        return make_plan(self.tree, self.names, mesh=mesh, rules=rules, **self.options)

    def check(self, mesh: Any) -> None:
        """Refuses what is wrong whatever the rules are: the names, the options."""
        options = {**self.options, "fill": None, "unmapped": "replicate"}
        make_plan(self.tree, self.names, mesh=mesh, rules=(), **options)

    def row(self, name: str, rules: RulesLike, mesh: Any) -> Row:
        """One row; what cannot be planned is a row with the reason."""
        sizes = dict(axis_sizes(mesh))
        try:
            plan = self.plan(rules, mesh)
            moved = traffic(plan, self.batch, self.chip)
        except RulesError:
            raise
        except AxisRulesError as error:
            return Row(name, sizes, problem=_problem(error))
        held = memory(plan, self.optimizer, hardware=self.chip)
        measured = None
        if self.step is not None:
            function, arguments = made_by(self.step, plan)
            measured = measure(function, *arguments, hardware=self.chip)
        seconds, source = self._compute(plan, measured)
        broken = {row.path: None for row in plan.report if row.reason in ("indivisible", "partly_divisible")}
        score = score_of(plan, held, moved, measured)
        return Row(
            name,
            sizes,
            held,
            moved,
            score,
            seconds,
            source,
            tuple(broken),
            _idle(plan, moved, self.batch),
            measured,
        )

    def _compute(self, plan: Plan, measured: Measured | None) -> tuple[float | None, str]:
        """The least time of the arithmetic, and what it was counted by."""
        rate = None if self.chip is None else self.chip.flops_per_device
        devices = math.prod(dict(plan.mesh.shape_tuple).values())
        if measured is not None and measured.flops is not None:
            flops, source = measured.flops, "the lowered module, in which the body of a loop counts once"
        elif self.tokens is not None:
            count = sum(math.prod(one.shape) for one in plan.distinct)
            flops, source = 6.0 * count * self.tokens, "6 * parameters * tokens"
        else:
            return None, ""
        return (None if rate is None else flops / devices / rate), source

    def growth(self, rules: RulesLike, sizes: Mapping[str, int]) -> Iterable[Growth]:
        """The numbers of a rule set as the first axis of a mesh grows."""
        first, *others = sizes
        beside = math.prod(sizes[axis] for axis in others)
        for length in (2**power for power in range(_MOST.bit_length())):
            devices = length * beside
            if not _FEWEST <= devices <= _MOST:
                continue
            mesh = {first: length, **{axis: sizes[axis] for axis in others}}
            try:
                plan = self.plan(rules, as_mesh(mesh))
                moved = traffic(plan, self.batch, self.chip)
            except AxisRulesError:
                continue  # its row says why
            held = memory(plan, self.optimizer, hardware=self.chip)
            yield Growth(devices, held.bytes_per_device, moved.wire_bytes)


def _problem(error: AxisRulesError) -> str:
    """The first of what is wrong, in a line."""
    first, *more = error.failures or [error]
    return first.headline + (f" (and {len(more)} more)" if more else "")


def _idle(plan: Plan, moved: Traffic, batch: str) -> tuple[str, ...]:
    used = {axis for one in plan.placements for dim in one.resolution.dims for axis in dim.axes}
    used |= {
        axis
        for name, axes in plan.rules
        if name == batch
        for axis in ((axes,) if isinstance(axes, str) else axes or ())
    }
    return tuple(axis for axis, size in moved.mesh.items() if size > 1 and axis not in used)


def _order(row: Row) -> tuple[Any, ...]:
    return (row.score is None, row.score.key if row.score is not None else (), row.name)


def _why(rows: list[Row]) -> str:
    if not rows or rows[0].score is None:
        return "no rule set fits the tree"
    best = rows[0]
    text = f"{best.name} on {format_mesh(best.mesh)} is the best: {best.score}"
    rival = next((row for row in rows[1:] if row.score is not None), None)
    return (
        text
        if rival is None
        else f"{text}; the next, {rival.name} on {format_mesh(rival.mesh)}: {rival.score}"
    )
