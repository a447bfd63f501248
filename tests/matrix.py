"""The table of what was tested where: each run of the tests leaves a line, and this prints them.

    python tests/matrix.py          # prints the table, and puts it in the README

A run leaves its line when AXISRULES_CELL names its place in the matrix.
"""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
LINES = ROOT / ".matrix"
COLUMNS = ("what is tested", "Python", "jax", "flax", "equinox", "x64", "passed", "skipped")
BEGIN, END = "<!-- matrix -->\n", "<!-- end -->"


def record(outcomes):
    """Adds a run, given as how often each outcome came up, to the lines of its cell."""
    cell = os.environ.get("AXISRULES_CELL")
    if cell and not outcomes.get("failed") and not outcomes.get("error"):
        place = [platform.python_version(), *map(_version, ("jax", "flax", "equinox"))]
        place.append("on" if jax.config.jax_enable_x64 else "off")
        LINES.mkdir(exist_ok=True)
        with (LINES / f"{cell}.jsonl").open("a") as lines:
            print(json.dumps([place, outcomes.get("passed", 0), outcomes.get("skipped", 0)]), file=lines)


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def row(path):
    """The row of one cell: its runs are in one environment, and their counts add up."""
    places, passed, skipped = zip(*map(json.loads, path.read_text().splitlines()), strict=True)
    assert all(place == places[0] for place in places), f"{path.name} has lines of several environments"
    return (
        path.stem.partition("-")[2].replace("_", " "),
        *places[0],
        f"{sum(passed):,}",
        f"{sum(skipped):,}",
    )


def table():
    """The table in Markdown, cells in the order of their names."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, sorted(LINES.glob("*.jsonl")))]
    return "".join(f"| {' | '.join(one)} |\n" for one in rows)


def main():
    readme = ROOT / "README.md"
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "the README has no place for the table"
    shown = table()
    readme.write_text(f"{before}{begin}{shown}{end}{after}")
    print(shown, end="")


if __name__ == "__main__":
    main()
