"""Mutation testing of the engine and of the rules: puts every small bug in, and counts which the tests find.

    python tests/mutation/run.py

Runs mutmut in a copy of the tree, so that no mutant ever stands in the tree itself. Fails where fewer than
95 % of the mutants are found, or where one survives that survivors.toml does not judge. mutmut leaves out
functions with a decorator; tests/test_deliberate_bugs.py has bugs of those.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
JUDGED = Path(__file__).with_name("survivors.toml")
LEAST = 0.95
FOUND = {"killed", "timeout"}


def main():
    judged = {
        (one["where"], one["before"], one["after"]): one["why"]
        for one in tomllib.loads(JUDGED.read_text())["survivor"]
    }
    with tempfile.TemporaryDirectory() as scratch:
        tree = copy_to(Path(scratch) / "tree")
        subprocess.run([*mutmut("run"), "--max-children", str(os.cpu_count())], cwd=tree, check=True)
        outcomes = outcomes_in(tree)
        survivors = [change_of(tree, name) for name, how in outcomes.items() if how not in FOUND]
    return report(Counter(outcomes.values()), survivors, judged)


def mutmut(command):
    return [sys.executable, "-m", "mutmut", command]


def copy_to(tree):
    """A copy of what the mutated package and its tests need."""
    for folder in ("axisrules", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def outcomes_in(tree):
    """How each mutant ended, by its name."""
    listed = subprocess.run(
        [*mutmut("results"), "--all", "true"], cwd=tree, check=True, capture_output=True, text=True
    ).stdout
    return dict(line.strip().split(": ") for line in listed.splitlines())


def change_of(tree, name):
    """What a mutant changes: the function, the code before and the code after."""
    shown = subprocess.run(
        [*mutmut("show"), name], cwd=tree, check=True, capture_output=True, text=True
    ).stdout
    changed = [
        line for line in shown.splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
    ]
    before, after = ("\n".join(line[1:].strip() for line in changed if line[0] == sign) for sign in "-+")
    return function_of(name), before, after


def function_of(mutant):
    """``_Array.claim`` or ``mesh_axes``, as mutmut writes these in the name of a mutant."""
    name = mutant.rpartition(".")[2].partition("__mutmut_")[0]
    return name.removeprefix("xǁ").replace("ǁ", ".") if "ǁ" in name else name.removeprefix("x_")


def report(counts, survivors, judged):
    """Prints what came of the mutants; 0 where it is good enough."""
    found, total = sum(counts[how] for how in FOUND), counts.total()
    print(f"\nkilled {found} of {total} ({found / total:.1%}), {counts['timeout']} of them by time-out")
    for change in survivors:
        where, before, after = change
        print(f"  {where}: {before}  ->  {after}\n    {judged.get(change, 'NOT JUDGED: a test is missing')}")
    for where, before, after in judged.keys() - set(survivors):
        print(f"  judged, and found now: {where}: {before}  ->  {after}")
    return int(found < LEAST * total or not judged.keys() >= set(survivors))


if __name__ == "__main__":
    sys.exit(main())
