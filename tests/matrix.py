"""The table of what was tested where: each run of the tests leaves a line, and this prints them.

    python tests/matrix.py          # prints the table, and puts the environments in the README

A run leaves its line when AXISRULES_CELL names its place in the matrix. The README has no counts, so that it
changes with the environments alone.
"""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
LINES = ROOT / ".matrix"
COUNTS = ("passed", "skipped")
COLUMNS = ("what is tested", "Python", "jax", "flax", "equinox", "x64", *COUNTS)
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


def table(rows):
    """Rows in Markdown."""
    head, *rest = rows
    lines = [head, ("---",) * len(head), *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main():
    rows = [COLUMNS, *map(row, sorted(LINES.glob("*.jsonl")))]
    readme = ROOT / "README.md"
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "the README has no place for the table"
    environments = table([one[: -len(COUNTS)] for one in rows])
    readme.write_text(f"{before}{begin}{environments}{end}{after}")
    print(table(rows), end="")


if __name__ == "__main__":
    main()
