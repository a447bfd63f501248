"""``--fill`` on the command line: what rules leave whole is split after them, in every command."""

import json

import checkpoint_files
import numpy as np
import pytest

import axisrules as ar
from axisrules import cost, presets

pytest.importorskip("typer")

from axisrules.cli import main

MESH = "data=4,model=2"
RULES = {"batch": "data", "mlp": "model", "embed": "data", "norm": None}
NAMES = ar.NameTable({"**.up": "embed mlp", "**.odd": "_ _", "**.norm": "norm"})
BASE = ("model.safetensors", "--names", "names.toml", "--mesh", MESH, "--rules", "rules.toml")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A checkpoint half of which has no names, a table and rules."""
    arrays = {
        "a.up": np.zeros((512, 1024), np.float32),
        "a.odd": np.zeros((1024, 512), np.float32),
        "a.norm": np.zeros(512, np.float32),
    }
    checkpoint_files.write(tmp_path / "model.safetensors", arrays)
    NAMES.dump(tmp_path / "names.toml")
    ar.Rules(RULES).dump(tmp_path / "rules.toml")
    monkeypatch.chdir(tmp_path)


def plan(fill, rules=RULES):
    tree = ar.checkpoints.open("model.safetensors")
    return ar.plan(tree, NAMES, mesh=MESH, rules=rules, indivisible="next", absent="drop", fill=fill)


@pytest.mark.parametrize(("word", "fill"), [("data", "data"), ("data,model", ("data", "model")), (" data , model ", ("data", "model"))])  # fmt: skip
def test_a_plan_is_filled(word, fill, capsys):
    assert main(("plan", *BASE, "--json", "--fill", word)) == 0
    found = ar.Plan.from_json(capsys.readouterr().out)
    assert found.specs == plan(fill).specs != plan(None).specs


def test_checks_count_what_is_filled():
    limit = ("--max-waste", "1.1")
    assert main(("plan", *BASE, *limit)) == 1
    assert main(("plan", *BASE, *limit, "--fill", "data,model")) == 0


def test_an_array_is_explained_as_it_is_filled(capsys):
    assert main(("explain", "model.safetensors", "a.odd", *BASE[1:], "--fill", "data", "--json")) == 0
    dims = json.loads(capsys.readouterr().out)["why"]
    assert [dim["reason"] for dim in dims] == ["filled", "unnamed"]


def test_memory_is_that_of_the_filled_plan(capsys):
    assert main(("memory", *BASE, "--fill", "data,model")) == 0
    assert capsys.readouterr().out == f"{cost.memory(plan(('data', 'model')))}\n"


def test_rule_sets_are_compared_as_they_are_filled(capsys):
    words = ("compare", *BASE, "--preset", "fsdp", "--mesh", "data=8", "--fill", "model", "--json")
    assert main(words) == 0
    rows = {(row["name"], len(row["mesh"])): row for row in json.loads(capsys.readouterr().out)["rows"]}
    held = plan("model", presets.fsdp()).bytes_per_device
    assert rows["fsdp", 2]["memory"]["parameters"] == held
    assert "'model' is no axis of the mesh" in rows["fsdp", 1]["problem"]


def test_rules_are_looked_at_with_what_is_filled(capsys):
    assert main(("lint", *BASE, "--json")) in (0, 1)
    before = capsys.readouterr().out
    assert main(("lint", *BASE, "--json", "--fill", "data,model")) in (0, 1)
    assert len(json.loads(capsys.readouterr().out)) < len(json.loads(before))


def test_the_words_that_suggest_prints_can_be_typed(capsys):
    base = ("model.safetensors", "--names", "names.toml", "--mesh", MESH)
    assert main(("suggest", *base, "--time-limit", "5", "-o", "found.toml")) == 0
    word = capsys.readouterr().out.splitlines()[-1].partition("--fill ")[2].partition(", or ")[0]
    assert main(("plan", *base, "--rules", "found.toml", "--fill", word, "--max-waste", "1.01")) == 0


@pytest.mark.parametrize("command", ["plan", "memory", "compare", "lint"])
@pytest.mark.parametrize(("word", "text"), [("dat", "did you mean 'data'?"), ("", "'' is no axis"), ("data;model", "is no axis of the mesh"), ("data,", "'' is no axis")])  # fmt: skip
def test_an_axis_that_the_mesh_lacks_is_bad_usage(command, word, text, capsys):
    assert main((command, *BASE, "--fill", word)) == 2
    out = capsys.readouterr()
    assert text in out.err
    assert "use one or several of data, model, joined by commas" in out.err
    assert out.out == ""
