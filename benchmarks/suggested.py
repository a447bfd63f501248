"""What ``suggest`` proposes, beside every preset and every published rule set of a model's convention.

``python -m benchmarks.suggested`` prints the table of the README, and fails where a proposal is worse.
Owns how published rule sets are read on a mesh of ``data`` and ``model``; prices nothing itself. The
published sets may not be copied, so they are read where they lie.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from axisrules import cost
from axisrules.cost._search import Layout, Pricer, Score
from benchmarks.measure import duration
from tests.pricing import DATA, MODELS, model

PUBLISHED = Path(__file__).parents[2] / "shared" / "rulesets.json"
MESHES = tuple({"data": data, "model": other} for data, other in ((4, 4), (8, 8), (16, 16), (64, 4)))
HARDWARE = "TPU v5e"

Pairs = tuple[tuple[str, tuple[str, ...]], ...]

# Other words for the axes over which weights are gathered, and over which a layer is split.
_AXES = {"fsdp": "data", "tensor": "model"}


class Compared(NamedTuple):
    """A proposal and everything that it is compared with, on one mesh."""

    found: cost.Suggestion
    others: Mapping[str, Score]

    @property
    def best(self) -> Score:
        """The best of the others."""
        best, *rest = sorted(self.others.values(), key=lambda score: score.key)
        for score in rest:
            best = score if score.beats(best) and not best.beats(score) else best
        return best

    @property
    def worse_than(self) -> list[str]:
        """The others that beat the proposal, which should be none."""
        return [name for name, score in self.others.items() if score.beats(self.found.score)]

    @property
    def by_waste(self) -> list[str]:
        """The others of which a plan cannot tell the traffic, so that waste decides."""
        mine = self.found.score.seconds
        return [name for name, score in self.others.items() if mine is None or score.seconds is None]


def rule_sets(name: str) -> Iterator[tuple[str, Pairs]]:
    """The published rule sets of a model's convention: as they are, and with the axes of the mesh.

    As they are, axes that the mesh lacks are left out, as by ``absent="drop"``.
    """
    convention = json.loads((DATA / f"models/{name}.json").read_text())["rules"].replace(".", "/")
    for label, one in json.loads(PUBLISHED.read_text()).items():
        if label == convention or (convention.endswith("*") and label.startswith(convention[:-1])):
            given = [(word, _several(axes)) for word, axes in one["rules"]]
            yield label, tuple(given)
            renamed = [
                (word, tuple(dict.fromkeys(_AXES.get(axis, axis) for axis in axes))) for word, axes in given
            ]
            if renamed != given:
                yield f"{label} over data and model", tuple(renamed)


def _several(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def compared(
    name: str, mesh: Mapping[str, int], hardware: str | None = HARDWARE, time_limit: float = 4.0
) -> Compared:
    """The proposal for a known model on a mesh, and the others."""
    tree, names = model(name)
    chip = None if hardware is None else cost.hardware(hardware)
    found = cost.suggest(tree, names, mesh, hardware=chip, time_limit=time_limit)
    others = dict(found.presets)
    for label, pairs in rule_sets(name):
        words = {word for word, _ in pairs}
        batch = "batch" if "batch" in words else "activation_batch"
        others[label] = Pricer(tree, names, mesh, batch, chip).score(Layout(pairs))
    return Compared(found, others)


def _cell(one: Compared) -> str:
    mark = "**worse**: " if one.worse_than else ""
    return f"{mark}{_text(one.found.score)}; {_text(one.best)}"


def _text(score: Score) -> str:
    time = "?" if score.seconds is None else duration(score.seconds)
    return f"{time} {score.waste:.1f}x{'' if score.fits else ' too large'}"


def main() -> int:
    """Prints the table, and in how many comparisons waste decided."""
    table = {name: [compared(name, mesh) for mesh in MESHES] for name in MODELS}
    head = ["proposed; best other", *("x".join(map(str, mesh.values())) for mesh in MESHES)]
    rows = [head, ["---"] * len(head), *([name, *map(_cell, cells)] for name, cells in table.items())]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    cells = [cell for row in table.values() for cell in row]
    count = sum(len(cell.others) for cell in cells)
    unknown = [name for cell in cells for name in cell.by_waste]
    worse = sum(len(cell.worse_than) for cell in cells)
    text = f"\nworse in {worse} of {count} comparisons; by waste in {len(unknown)}, where traffic declines:"
    print(text, ", ".join(f"{name} ({unknown.count(name)})" for name in dict.fromkeys(unknown)) or "none")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
