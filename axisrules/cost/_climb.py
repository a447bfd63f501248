"""The search behind ``suggest``: names by mesh axes, from the presets and from what is given.

Owns the candidates and the order in which they are tried. Its one objective is that of ``Score``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from axisrules import presets
from axisrules._rules import MeshAxes, Rules
from axisrules._text import format_axes
from axisrules.cost._search import CLOSE, Layout, Pairs, Pricer, Score, as_pairs

# Splitting these moves activations that no plan shows: every score would be a sum.
_WHOLE = {"layers", "kv", "kv_head_dim"}
_ALL = 4_000  # assignments up to which every one is tried
_DATA = ("data", "fsdp", "batch", "replica")


class Change(NamedTuple):
    """One rule that was changed, and what that gained.

    Attributes:
        name: The logical name.
        before: The axes of its rules before, first to last.
        after: The axes of its rules after.
        score: The score with it.
        gain: In words.
    """

    name: str
    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    score: Score
    gain: str

    def __str__(self) -> str:
        return f"{self.name}: {_text(self.before)} -> {_text(self.after)}: {self.gain}"


def _text(axes: Sequence[tuple[str, ...]]) -> str:
    return ", else ".join(map(format_axes, axes)) or "no rule"


class Search:
    """A search for the best rule set; remembers every score."""

    def __init__(self, pricer: Pricer, fixed: Pairs, time_limit: float) -> None:
        self.pricer, self.fixed = pricer, fixed
        self.scores: dict[Layout, Score] = {}
        self.deadline = time.monotonic() + time_limit
        self.split = [axis for axis, size in pricer.sizes.items() if size > 1]
        self.subsets = [
            axes for count in range(len(self.split) + 1) for axes in itertools.combinations(self.split, count)
        ]
        self.bearing = {*pricer.names, pricer.batch}
        pinned = {name for name, _ in fixed}
        self.free = [name for name in pricer.names if name not in pinned]
        self.of_data = [axis for axis in self.split if axis in _DATA] or self.split[:1]
        # What no name splits is gathered over the batch axes; without these, what it moves is unknown.
        of_batch = [axes for axes in self.subsets if set(self.of_data) <= set(axes)]
        self.fills = [(), *filter(None, of_batch)]
        kept = _WHOLE | pricer.facts.stacks
        self.options = {name: self._options(name) for name in self.free if name not in kept}
        if pricer.batch not in pinned:
            self.options[pricer.batch] = of_batch

    def _options(self, name: str) -> list[tuple[str, ...]]:
        """The axes that could split a dimension of that name."""
        lengths = {
            size
            for kind in self.pricer.kinds
            for own, size in zip(kind.one.names, kind.one.shape, strict=True)
            if own == name
        }
        ways = {axes: math.prod(self.pricer.sizes[axis] for axis in axes) for axes in self.subsets}
        return [axes for axes, n in ways.items() if not axes or any(size % n == 0 for size in lengths)]

    def score(self, layout: Layout) -> Score:
        """The score of a layout."""
        if layout not in self.scores:
            self.scores[layout] = self.pricer.score(layout)
        return self.scores[layout]

    def pinned(self, pairs: Pairs) -> Pairs:
        """A rule set in which the fixed rules, and a rule for the batch, stand first."""
        names = {name for name, _ in self.fixed}
        rest = tuple((name, self._present(axes)) for name, axes in pairs if name not in names)
        found = (*self.fixed, *rest)
        batch = self.pricer.batch
        if any(name == batch for name, _ in found):
            return found
        return ((batch, tuple(self.of_data)), *found)

    def _present(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in self.pricer.sizes)

    def presets(self) -> dict[str, Rules]:
        """The presets, with the axes of the mesh in their parts."""
        data: MeshAxes = tuple(self.of_data) or None
        others = tuple(axis for axis in self.split if axis not in self.of_data)
        every: MeshAxes = tuple(self.split) or None
        found = {
            "data_parallel": presets.data_parallel(data),
            "data_parallel over all": presets.data_parallel(every),
            "fsdp": presets.fsdp(data),
            "fsdp over all": presets.fsdp(every),
        }
        for model in dict.fromkeys([others, *((axis,) for axis in others)]) if others else ():
            label = format_axes(model)
            found[f"tensor_parallel over {label}"] = presets.tensor_parallel(model, data=data)
            found[f"fsdp_tensor_parallel over {label}"] = presets.fsdp_tensor_parallel(data, model)
            found[f"sequence_parallel over {label}"] = presets.sequence_parallel(data, model)
        for expert in dict.fromkeys([*((axis,) for axis in others), tuple(self.of_data)]) if data else ():
            rest = tuple(axis for axis in others if axis not in expert) or None
            label = f"expert_parallel over {format_axes(expert)}"
            found[label] = presets.expert_parallel(data, rest, expert)
        if self.pricer.batch != "batch":
            found = {label: self._renamed(rules) for label, rules in found.items()}
        return found

    def _renamed(self, rules: Rules) -> Rules:
        return Rules([(self.pricer.batch if name == "batch" else name, axes) for name, axes in rules])

    def borne(self, layout: Layout) -> Layout:
        """A layout without the rules for names that no array bears."""
        return Layout(tuple([pair for pair in layout.pairs if pair[0] in self.bearing]), layout.fill)

    def activations(self, layout: Layout) -> Pairs:
        """Rules for activations, by their customary names, that suit rules for weights."""
        batch = next(axes for name, axes in layout.pairs if name == self.pricer.batch)
        used = {axis for name, axes in layout.pairs if name in self.bearing for axis in axes}
        model = tuple(axis for axis in self.split if axis in used and axis not in batch)
        if not model:
            return ()
        pairs = as_pairs(presets.tensor_parallel(model, data=batch or None))
        taken = {name for name, _ in layout.pairs}
        return tuple(pair for pair in pairs if pair[0].startswith("activation_") and pair[0] not in taken)

    def try_all(self) -> bool:
        """Tries every assignment of one rule per name, if there are not too many."""
        names = list(self.options)
        if math.prod(len(self.options[name]) for name in names) > _ALL:
            return False
        for chosen in itertools.product(*(self.options[name] for name in names)):
            if time.monotonic() > self.deadline:
                return False
            self.score(Layout((*self.fixed, *zip(names, chosen, strict=True))))
        return True

    def neighbours(self, layout: Layout) -> Iterator[Layout]:
        """Layouts in which the rules of one name, or what is filled, are others."""
        pairs = layout.pairs
        for axes in self.fills:
            if axes != layout.fill:
                yield Layout(pairs, axes)
        for name, options in self.options.items():
            at = next((i for i, pair in enumerate(pairs) if pair[0] == name), len(pairs))
            before = tuple([pair for pair in pairs[:at] if pair[0] != name])
            after = tuple([pair for pair in pairs[at:] if pair[0] != name])
            for axes in options:
                yield Layout((*before, (name, axes), *after), layout.fill)
                if axes and name != self.pricer.batch:
                    rest = [pair for pair in (*before, *after) if pair not in self.fixed]
                    yield Layout((*self.fixed, (name, axes), *rest), layout.fill)
                    if (name, axes) not in pairs:
                        yield Layout((*pairs, (name, axes)), layout.fill)

    def explore(self, starts: Sequence[Layout], rivals: Sequence[Score]) -> None:
        """Climbs from every start, the best of which comes first.

        A rival of which no plan can tell the traffic is beaten by waste alone, so that more of it helps
        nothing: a climb that begins with as little keeps to it.
        """
        fits = self.score(starts[0]).fits
        unknown = [rival.waste for rival in rivals if rival.seconds is None and rival.fits == fits]
        most = min(unknown, default=math.inf) * (1 + CLOSE) if self.pricer.chip is not None else math.inf
        for start in starts:
            self.climb(start, most if self.score(start).waste <= most else math.inf)

    def climb(self, layout: Layout, most: float = math.inf) -> Layout:
        """Changes one rule after another, as long as that helps and there is time.

        Args:
            layout: Where it begins.
            most: The waste that no change may exceed.
        """
        better = True
        while better:
            better = False
            for candidate in self.neighbours(layout):
                if time.monotonic() > self.deadline:
                    return layout
                then = self.score(candidate)
                if then.key < self.score(layout).key and then.waste <= most:
                    layout, better = candidate, True
                    break
        return layout

    def winner(self, rivals: Sequence[Score]) -> Layout:
        """The best of all that was tried, which no rival beats, if possible not by the least bit.

        Where a plan cannot tell the traffic, waste decides, so that "better" may run in circles:
        then no rival is to beat it in what the objective names, at least.
        """
        order = sorted(self.scores, key=lambda one: self.scores[one].key)

        def level(own: Score, close: float = CLOSE) -> bool:
            return not any(rival.excels(own, close) for rival in rivals)

        def unbeaten(own: Score) -> bool:
            return not any(rival.beats(own) for rival in rivals)

        for holds in (lambda own: level(own, 0.0) and unbeaten(own), unbeaten, level):
            found = next((one for one in order if holds(self.scores[one])), None)
            if found is not None:
                return found
        return order[0]

    def ranked(self, count: int) -> list[Layout]:
        """The best few of all that was tried, no two with the same score."""
        by_key = {score.key: layout for layout, score in self.scores.items()}
        return [by_key[key] for key in sorted(by_key)[:count]]

    def changes(self, before: Layout, after: Layout) -> Iterator[Change]:
        """The steps from one layout to another, a name at a time, with what each gains."""
        now = before
        for name in self.options:
            old, new = _axes(now.pairs, name), _axes(after.pairs, name)
            if old != new:
                rest = [pair for pair in now.pairs if pair[0] != name]
                at = next((i for i, pair in enumerate(now.pairs) if pair[0] == name), len(rest))
                mine = [(name, axes) for axes in new]
                then = Layout((*rest[:at], *mine, *rest[at:]), now.fill)
                yield Change(name, old, new, self.score(then), _gain(self.score(now), self.score(then)))
                now = then
        if now.fill != after.fill:
            then = Layout(now.pairs, after.fill)
            gain = _gain(self.score(now), self.score(then))
            yield Change("fill", (now.fill,), (after.fill,), self.score(then), gain)


def _axes(pairs: Pairs, name: str) -> tuple[tuple[str, ...], ...]:
    return tuple(axes for own, axes in pairs if own == name)


def _gain(before: Score, after: Score) -> str:
    parts = []
    if before.fits != after.fits:
        parts.append("fits" if after.fits else "does not fit any more")
    old, new = before.traffic.wire_bytes, after.traffic.wire_bytes
    if old != new:
        parts.append(f"{_bytes(new)} instead of {_bytes(old)} sent")
    if abs(before.waste - after.waste) > 1e-9:
        parts.append(f"{after.waste:,.3f} instead of {before.waste:,.3f} times the ideal memory")
    return ", ".join(parts) or "nothing by itself"


def _bytes(size: int | None) -> str:
    return "an unknown number of bytes" if size is None else f"{size:,} bytes"
