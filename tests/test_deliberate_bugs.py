"""Bugs put into a copy of the package on purpose, each of which the tests have to find."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import axisrules

pytestmark = pytest.mark.slow
PACKAGE, TESTS = Path(axisrules.__file__).parent, Path(__file__).parent
CORNERS = "test_engine_corners.py"
NO_KEY = """type("Ambient", (), {
    "value": Rules(), "__call__": lambda self, rules: setattr(type(self), "value", rules) or self,
    "__enter__": lambda self: self,
})()"""


class Bug(NamedTuple):
    """What goes wrong, the text that is to be replaced and what by, and the tests that find it."""

    what: str
    file: str
    before: str
    after: str
    tests: str = "test_resolve.py"


BUGS = [
    Bug("a claim is forgotten", "_resolve.py", "self.held.update(dict.fromkeys(axes, dim))", "pass"),
    Bug("a tuple is partly taken under taken='next'", "_resolve.py", "if not partly:", "if not free:"),
    Bug("rules are tried last to first", "_resolve.py", "tried.sort()", "tried.sort(reverse=True)"),
    Bug("dimensions decide, not rules", "_resolve.py", "tried.sort()", "tried.sort(key=lambda one: one[1])"),
    Bug(
        "prepended rules are tried last",
        "_rules.py",
        "first.pairs + second.pairs",
        "second.pairs + first.pairs",
        "test_scope.py",
    ),
    Bug("an axis of size 1 blocks", "_resolve.py", " and not self.trivial(a)]", "]"),
    Bug("a dimension of size 1 is split", "_resolve.py", "if self.size(dim) == 1 and", "if False and"),
    Bug("a None rule does not settle", "_resolve.py", 'False\n            self.reasons', "True\n            self.reasons"),
    Bug("a cache forgets the mesh", "_single.py", "key = (names, shape, found, ", "key = (names, shape, ", CORNERS),
    Bug("a cache forgets a policy", "_single.py", "found, taken, ind", "found, ind", CORNERS),
    Bug("the engine's cache forgets the mesh", "_resolve.py", "key = (names, sizes, ", "key = (names, ", CORNERS),
    Bug("a cache forgets the rules", "_rules.py", "= {}, {}, {}", '= {}, {}, globals().setdefault("_", {})', CORNERS),
    Bug(
        "jit's cache forgets the active rules",
        "_scope.py",
        "jax.make_user_context(default_value=Rules())",
        NO_KEY,
        "test_scope.py",
    ),
    Bug("a tie is lost", "_planning.py", "return placement._replace(tied_to=first.path)", "return placement", "test_plan.py"),
    Bug("an indivisible dimension passes", "_resolve.py", "self.problems.append(self._indivisible(dim, rule, axes))", "pass"),
    Bug("an absent axis is dropped under absent='error'", "_resolve.py", 'absent == "error"', 'absent == "drop"'),
    Bug("fill takes small arrays too", "_planning.py", "options.fill if big else ()", "options.fill", "test_plan.py"),
    Bug("the explanation names another rule", "_resolve.py", '"split", rule)', '"split", rule - 1)'),
]  # fmt: skip


def copy_to(folder):
    """A copy of the package, for the tests to import."""
    shutil.copytree(PACKAGE, folder / "axisrules")
    return folder / "axisrules"


def run(folder, *tests):
    """Runs tests on the package in a folder; 0 says that they passed and 1 that one failed."""
    ours = {name: value for name, value in os.environ.items() if name != "AXISRULES_CELL"}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *(TESTS / test for test in tests),
        ],
        env={**ours, "PYTHONPATH": str(folder), "AXISRULES_INSTALLED": "1", "HYPOTHESIS_PROFILE": "brief"},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_tests_pass_where_no_bug_was_put(tmp_path):
    copy_to(tmp_path)
    done = run(tmp_path, *sorted({bug.tests for bug in BUGS}))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_the_tests_find_it_where(bug, tmp_path):
    file = copy_to(tmp_path) / bug.file
    text = file.read_text()
    assert text.count(bug.before) == 1
    file.write_text(text.replace(bug.before, bug.after))
    done = run(tmp_path, bug.tests)
    assert done.returncode == 1, done.stdout + done.stderr
