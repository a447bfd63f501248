"""What moves, and over which mesh axes: the model of data parallelism that a plan allows.

Owns that model: weights that the batch axes split are gathered, gradients are summed over the batch
axes. Where a plan cannot tell, it gives the reason. Activations are not in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from axisrules._errors import UnknownNameError
from axisrules._plan import Placement
from axisrules._resolve import resolve_array
from axisrules._rules import Rules
from axisrules._text import did_you_mean, format_axes
from axisrules.cost._collective import wire_bytes
from axisrules.cost._hardware import Hardware
from axisrules.cost._kinds import Facts, Kind, facts
from axisrules.cost._moves import SOURCE, Move, Traffic

_IDLE = "nothing uses"
_SEQUENCE = re.compile(r"seq|length")


def of_kinds(
    found: Sequence[Kind],
    rules: Rules,
    mesh: Mapping[str, int],
    batch: str,
    chip: Hardware | None,
    known: Facts | None = None,
) -> Traffic:
    """The traffic of arrays by kind."""
    work = _Work(found, rules, mesh, batch, chip, known or facts(found))
    moves = [move for kind in work.kinds for move in work.moves(kind)]
    reasons = work.reasons()
    told = [reasons[axis] for axis in work.batch_axes if axis in reasons]
    displaced = bool(work.idle) and all(reason.startswith(_IDLE) for reason in told)
    return Traffic(tuple(moves), reasons, dict(mesh), chip, SOURCE, work.assumes(moves), displaced)


class _Work:
    """The arrays of a plan by kind, and the parts that the mesh axes play."""

    def __init__(
        self,
        found: Sequence[Kind],
        rules: Rules,
        mesh: Mapping[str, int],
        batch: str,
        chip: Hardware | None,
        known: Facts,
    ) -> None:
        self.kinds, self.rules, self.batch, self.facts = found, rules, batch, known
        self.sizes = {axis: size for axis, size in mesh.items() if size > 1}
        self.batch_axes = self._axes_of_batch(batch)
        self.used = {axis for kind in self.kinds for axis in self._splitting(kind.one)}
        self.idle = self._idle()
        # Beside a matmul the TPU scatters sums around a ring that goes two steps further.
        self.extra_steps = 0 if self.idle or (chip is not None and chip.tile is None) else 2

    def _axes_of_batch(self, batch: str) -> tuple[str, ...]:
        rules = self.rules
        if batch not in rules.by_name:
            raise UnknownNameError(
                f"no rule mentions {batch!r}, the name of the batch{did_you_mean(batch, rules.by_name)}",
                fix="pass batch= with the name that the rules have for it.",
            )
        axes = resolve_array((batch,), rules).dims[0].axes
        return tuple(axis for axis in self.sizes if axis in axes)

    def _splitting(self, one: Placement) -> tuple[str, ...]:
        return tuple(axis for dim in one.resolution.dims for axis in dim.axes if axis in self.sizes)

    def _gathered(self, one: Placement) -> tuple[str, ...]:
        """The batch axes that split an array, in the order of the mesh."""
        held = self._splitting(one)
        return tuple(axis for axis in self.batch_axes if axis in held)

    def _idle(self) -> list[str]:
        """The mesh axes that nothing uses, where that matters."""
        busy = {*self.used, *self.batch_axes, *self._of_activations()}
        if not any(self._gathered(kind.one) for kind in self.kinds):
            return []
        return [axis for axis in self.sizes if axis not in busy]

    def _of_activations(self) -> dict[str, list[str]]:
        """The mesh axes over which rules split names that no parameter bears."""
        borne = {name for kind in self.kinds for name in kind.one.names}
        found: dict[str, list[str]] = {}
        for name, axes in self.rules:
            if name not in borne and name != self.batch:
                for axis in axes if isinstance(axes, tuple) else (axes,):
                    if axis in self.sizes and axis not in self.batch_axes:  # else the batch has it
                        found.setdefault(axis, []).append(name)
        return found

    def moves(self, kind: Kind) -> Iterator[Move]:
        """What the arrays of one kind put on the wires."""
        over = self._gathered(kind.one)
        rest = tuple(axis for axis in self.batch_axes if axis not in over)
        beside = math.prod(self.sizes[axis] for axis in self._splitting(kind.one) if axis not in over)
        size = kind.one.nbytes / beside * kind.copies

        def move(what: str, name: str, axes: tuple[str, ...], sent: float) -> Move:
            return Move(kind.one.path, kind.copies, what, name, axes, sent)

        if over:
            n = self._ways(over)
            times = self._gathers(kind)
            if times:
                yield move("weights", "all-gather", over, times * wire_bytes("all-gather", size, n))
            steps = n - 1 + (self.extra_steps if times else 0)
            yield move("gradients", "reduce-scatter", over, steps / n * size)
            size /= n
        if rest:
            yield move("gradients", "all-reduce", rest, wire_bytes("all-reduce", size, self._ways(rest)))

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def _gathers(self, kind: Kind) -> int:
        """How often a weight is gathered in a step."""
        if kind.repeated:
            return 2  # forward, and again backward
        return 0 if self._is_table(kind.one) else 1

    def _is_table(self, one: Placement) -> bool:
        """Whether rows are looked up in it: its rows move, not the table.

        One that is tied to the head is a kernel too; else the head has the name of its rows last.
        """
        first = one.resolution.dims[0] if len(one.resolution.dims) == 2 else None
        if first is None or first.name not in self.facts.rows:
            return False
        return first.name in self.facts.last and not any(axis in self.batch_axes for axis in first.axes)

    def reasons(self) -> dict[str, str]:
        """Why a plan cannot tell, by mesh axis."""
        found: dict[str, str] = {}
        activations = self._of_activations()
        for axis, names in activations.items():
            found[axis] = (
                f"rules split activations over it ({', '.join(names)}); what these move depends on the step"
            )
        for axis in self.used - set(self.batch_axes):
            found.setdefault(axis, "it splits weights and no batch: what moves over it are activations")
        for axis in activations:
            names = self._beyond_weights(axis, activations[axis])
            if names:
                text = f"rules split activations over {axis} along more than its weights ({', '.join(names)})"
                found |= dict.fromkeys((axis, *self.batch_axes), text)
        idle = self.idle
        for axis in (*idle, *(self.batch_axes if idle else ())):
            found[axis] = f"{_IDLE} {format_axes(idle)}: the compiler moves a part of the traffic onto it"
        for kind in self.kinds:
            for axis, reason in self._fights(kind.one):
                found[axis] = reason
        return {axis: found[axis] for axis in self.sizes if axis in found}

    def _beyond_weights(self, axis: str, names: Sequence[str]) -> list[str]:
        """The activations that an axis splits along more than what its weights yield.

        Told by their words where these follow the custom (``act_mlp``, ``activation_length``), else
        by their number.
        """
        if any(name.startswith("act") for name in names):
            return [name for name in names if _SEQUENCE.search(name)]
        weights = {dim.name for kind in self.kinds for dim in kind.one.resolution.dims if axis in dim.axes}
        return list(names) if len(names) > len(weights) else []

    def _fights(self, one: Placement) -> Iterator[tuple[str, str]]:
        for dim in one.resolution.dims:
            for axis in dim.axes:
                if axis not in self.sizes:
                    continue
                if dim.name in self.facts.stacks:
                    yield axis, f"{dim.name!r}, the axis of stacked layers, is split over it ({one.path})"
                elif axis in self.batch_axes and dim.name in self.facts.experts:
                    yield (
                        axis,
                        f"{dim.name!r}, the axis of experts, is split over it: tokens move ({one.path})",
                    )
                elif axis in self.batch_axes and dim.name in self.facts.rows:
                    yield (
                        axis,
                        f"it splits weights along {dim.name!r}, which no kernel contracts ({one.path})",
                    )

    def assumes(self, moves: Sequence[Move]) -> tuple[str, ...]:
        """What the numbers take for granted."""
        texts = ["gradients have the dtype of their parameters, and are summed in it"]
        if any(move.what == "weights" for move in moves):
            texts.append("weights of repeated layers are gathered forward and again backward, others once")
        return tuple(texts)
