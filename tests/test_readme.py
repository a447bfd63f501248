"""Every code block of the README runs, in order, and prints what the README says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)

# In a process of its own, since the first block chooses the number of devices.
RUN = """
import contextlib, io, json, sys
scope, printed = {}, []
for text in json.loads(sys.stdin.read()):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(text, "README.md", "exec"), scope)
    printed.append(shown.getvalue())
print(json.dumps(printed))
"""


def uses_flax(block):
    return "from flax" in block


def printed(blocks):
    command = [sys.executable, "-W", "error", "-c", RUN]
    run = subprocess.run(command, input=json.dumps(blocks), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


PAIRS = [(code, shown) for (_, code), (_, shown) in zip(BLOCKS[::2], BLOCKS[1::2], strict=True)]


def test_the_code_of_the_readme_prints_what_it_says():
    core = [pair for pair in PAIRS if not uses_flax(pair[0])]
    assert printed([code for code, _ in core]) == [shown for _, shown in core]


def test_the_code_with_flax_prints_what_it_says():
    pytest.importorskip("flax")
    first, (flax,) = PAIRS[0], [pair for pair in PAIRS if uses_flax(pair[0])]
    assert printed([first[0], flax[0]]) == [first[1], flax[1]]


def test_what_a_block_prints_stands_right_below_it():
    kinds = [kind for kind, _ in BLOCKS]
    assert kinds == ["python", "text"] * (len(kinds) // 2)


def test_the_first_example_stays_short():
    first = next(text for kind, text in BLOCKS if kind == "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("word", ["make demo", "make test"])
def test_the_two_commands_come_first(word):
    assert word in README.read_text()[:700]
