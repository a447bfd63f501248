"""What an import brings along, the one-way imports, and where JAX's private parts are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import axisrules as ar

PACKAGE = Path(ar.__file__).parent

PROBE = """
import sys
{before}
import axisrules
brought = {{name.partition(".")[0] for name in sys.modules}}
print(sorted(brought & {{"flax", "equinox", "optax", "yaml", "rich", "safetensors", "hypothesis"}}))
import jax._src.xla_bridge as bridge
print(bridge.backends_are_initialized())
{after}
print(bridge.backends_are_initialized())
"""


def probe(before="", after=""):
    code = PROBE.format(before=before, after=after)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split("\n")


def test_the_import_brings_no_framework_and_no_backend():
    assert probe()[:2] == ["[]", "False"]


def test_the_probe_itself_can_fail():
    assert probe(before="import hypothesis", after="import jax; jax.devices()")[:3] == [
        "['hypothesis']",
        "False",
        "True",
    ]


def test_planning_starts_no_backend():
    plan = (
        "import numpy as np;"
        "axisrules.plan({'w': np.zeros((8, 8), np.float32)}, {'w': 'a b'}, mesh='x=64,y=128', rules={'a': 'x', 'b': 'y'},"
        " indivisible='next');"
        "axisrules.Rules.load; axisrules.resolve('a', (8,), mesh='x=4', rules={'a': 'x'})"
    )
    assert probe(after=plan)[:3] == ["[]", "False", "False"]


LAYERS = [
    {"_text", "_compat", "_behaviour", "_tiles", "_columns"},
    {"_messages"},
    {"_errors"},
    {"_extras"},
    {"_files"},
    {"_marks", "_names", "_rules", "_meshes"},
    {"_tables", "_scope", "_resolution", "_specs", "_refusals", "_policies"},
    {"_resolve", "_trees"},
    {
        "_single",
        "_entries",
        "_leaves",
        "_moments",
        "_layout",
        "_plan",
        "_groups",
        "_diff_text",
        "_plan_diff",
        "_plan_html",
        "_plan_json",
        "presets",
    },
    {"_marked", "_options", "_owners", "_fields"},
    {"_planning", "_processes", "_shares"},
    {"_parts"},
    {
        "_constrain",
        "_place",
        "_initializers",
        "_shard_map",
        "_slices",
        "_forms",
        "_hidden",
        "_states",
        "_agreement",
    },
    {"_programs", "_records"},
    {"_traces"},
    {"_init", "_batches", "_prefetch", "adapters", "catalog", "checkpoints", "report", "cost", "testing"},
    {"__init__", "demo", "_cli_inputs", "_cli_json"},
    {"_cli_cost"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports(path):
    """The files of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "axisrules":
            below = node.module.split(".")[1:]
            yield from below[:1] or [alias.name for alias in node.names]


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_point_one_way(path):
    assert path.stem in RANK, "say in which layer the new file belongs"
    upward = [name for name in imports(path) if RANK.get(name, 0) > RANK[path.stem]]
    assert upward == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_private_parts_of_jax_are_used_in_one_file_alone(path):
    assert ("jax._src" in path.read_text()) == (path.name == "_compat.py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_framework_is_named_in_the_core(path):
    if path.name in {"presets.py", "demo.py"}:
        return
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    allowed = {"jax", "numpy", "axisrules", "yaml", *sys.stdlib_module_names}
    assert imported <= allowed


def test_every_public_function_has_a_docstring_with_an_example():
    for name in dir(ar):
        value = getattr(ar, name)
        if name.startswith("_") or not callable(value) or isinstance(value, type):
            continue
        assert ">>>" in (value.__doc__ or ""), name


def test_no_file_and_no_function_is_long():
    adapters = PACKAGE.parent / "adapters"
    for path in [*PACKAGE.rglob("*.py"), *adapters.rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False) or ""
                assert node.end_lineno - node.lineno - doc.count("\n") <= 55, (path.name, node.name)
