"""What looks behind JAX's public API says which versions need it, why, and when it can go."""

import ast
import re
from pathlib import Path

import pytest

from axisrules import _compat

SOURCE = Path(_compat.__file__).read_text()
ENTRIES = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)]
CONSTANTS = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.Assign)]


def comment_above(node):
    lines = SOURCE.splitlines()[: node.lineno - 1]
    above = []
    while lines and lines[-1].startswith("#"):
        above.insert(0, lines.pop().lstrip("# "))
    return " ".join(above)


def complete(text):
    """Whether a text names a version of JAX and says when the entry goes."""
    words = " ".join(text.split())
    return bool(re.search(r"jax 0\.\d+", words) and re.search(r"\bGoes (when|with)\b", words))


@pytest.mark.parametrize("node", ENTRIES, ids=[node.name for node in ENTRIES])
def test_every_entry_says_which_versions_need_it_and_when_it_goes(node):
    assert complete(ast.get_docstring(node) or ""), node.name


@pytest.mark.parametrize("node", CONSTANTS, ids=[node.targets[0].id for node in CONSTANTS])
def test_every_constant_says_so_too(node):
    assert complete(comment_above(node))


def test_an_entry_without_a_version_or_an_end_would_be_found():
    assert ENTRIES
    assert CONSTANTS
    assert not complete("Whether JAX is tracing. No public function says so (jax 0.7.2).")
    assert not complete("Goes when it is public.")


def test_every_entry_is_used():
    text = "".join(path.read_text() for path in Path(_compat.__file__).parent.rglob("*.py"))
    for node in [*ENTRIES, *CONSTANTS]:
        name = node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id
        assert len(re.findall(rf"\b{name}\b", text)) > 1, name
