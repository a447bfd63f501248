"""Every code block of the README runs, in order, and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def test_the_code_of_the_readme_prints_what_it_says():
    scope, printed = {}, []
    for kind, text in BLOCKS:
        if kind == "text":
            assert printed.pop() == text
            continue
        assert not printed, "a block printed something that the README does not show"
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(compile(text, README.name, "exec"), scope)
        printed = [shown.getvalue()] if shown.getvalue() else []
    assert not printed


def test_the_first_example_stays_short():
    first = next(text for kind, text in BLOCKS if kind == "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("word", ["make demo", "make test"])
def test_the_two_commands_come_first(word):
    assert word in README.read_text()[:700]
