"""The commands of prices: what they print, their exit statuses, and bad usage without a traceback."""

import ast
import json
import os
import sys
from pathlib import Path

import checkpoint_files
import numpy as np
import pytest

import axisrules as ar
from axisrules import cost, presets

pytest.importorskip("typer")

from axisrules.cli import main
from tests.pricing import Adam

MESH = "data=4,model=2"
RULES = {"batch": "data", "embed": "data", "mlp": "model", "norm": None}
WHOLE = {"batch": "data", "embed": None, "mlp": None, "norm": None}
NAMES = ar.NameTable({"**.up": "embed mlp", "**.down": "mlp embed", "**.norm": "norm"})
BASE = ("model.safetensors", "--names", "names.toml", "--mesh", MESH)
SMALL = (
    'name = "small chip"\nmemory_bytes = {}\nlink_bytes_per_s = 1_000_000_000\nsources = ["a data sheet"]\n'
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a checkpoint, a table, rules, accelerators, and a module that makes an optimizer."""
    arrays = {}
    for i in range(3):
        arrays[f"layers.{i}.up"] = np.zeros((128, 512), np.float32)
        arrays[f"layers.{i}.down"] = np.zeros((512, 128), np.float32)
        arrays[f"layers.{i}.norm"] = np.zeros(128, np.float32)
    checkpoint_files.write(tmp_path / "model.safetensors", arrays)
    NAMES.dump(tmp_path / "names.toml")
    ar.Rules(RULES).dump(tmp_path / "rules.toml")
    ar.Rules(WHOLE).dump(tmp_path / "whole.toml")
    ar.Rules(RULES).dump(tmp_path / "sets.toml", set="both")
    ar.Rules(WHOLE).dump(tmp_path / "sets.toml", set="none")
    (tmp_path / "chip.toml").write_text(SMALL.format(1_000_000))
    (tmp_path / "tiny.toml").write_text(SMALL.format(100_000))
    (tmp_path / "made_there.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "class Adam:\n"
        "    def init(self, params):\n"
        "        return {slot: jax.tree.map(jnp.zeros_like, params) for slot in 'mv'}\n"
        "def broken():\n    raise RuntimeError('no optimizer today')\n"
        "def nothing():\n    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("made_there", None)


def tree():
    return ar.checkpoints.open("model.safetensors")


def plan(rules=RULES, mesh=MESH):
    return ar.plan(tree(), NAMES, mesh=mesh, rules=rules, indivisible="next")


def test_memory_prints_what_the_plan_holds(folder, capsys):
    words = ("memory", *BASE, "--rules", "rules.toml", "--optimizer", "made_there:Adam")
    assert main((*words, "--hardware", "TPU v5e")) == 0
    held = cost.memory(plan(), Adam, hardware="TPU v5e")
    assert capsys.readouterr().out == f"{held}\n"
    assert main((*words, "--no-gradients", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    held = cost.memory(plan(), Adam, gradients=False)
    assert (
        found["optimizer"] == held.optimizer == {"m": plan().bytes_per_device, "v": plan().bytes_per_device}
    )
    assert (found["gradients"], found["hardware"], found["fits"]) == (0, None, None)
    assert (found["bytes_per_device"], found["mesh"]) == (held.bytes_per_device, {"data": 4, "model": 2})
    assert found["source"] == held.source


def test_memory_fails_where_it_does_not_fit(folder, capsys):
    words = ("memory", *BASE, "--hardware", "chip.toml")
    assert main((*words, "--rules", "rules.toml")) == 0
    assert main((*words, "--rules", "whole.toml")) == 1
    out = capsys.readouterr()
    assert "does not fit small chip (976.6 KiB): no mesh of these axes is enough" in out.out
    assert out.err == "mesh: data=4, model=2 splits no array\n"
    assert main((*words, "--rules", "whole.toml", "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["limit"], found["smallest_mesh"]) == (False, 1_000_000, None)
    assert found["free"] == 1_000_000 - found["bytes_per_device"]


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_an_optimizer_of_optax_is_known_by_its_name(name, folder, capsys):
    optax = pytest.importorskip("optax")
    assert main(("memory", *BASE, "--rules", "rules.toml", "--optimizer", name)) == 0
    held = cost.memory(plan(), getattr(optax, name)(0.1))
    assert capsys.readouterr().out == f"{held}\n"


def test_without_optax_the_extra_is_named(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optax", None)
    assert main(("memory", *BASE, "--rules", "rules.toml", "--optimizer", "adamw")) == 2
    out = capsys.readouterr()
    assert "optimizers by name need optax, which is not installed" in out.err
    assert "pip install 'axisrules[optax]'" in out.err
    assert out.out == ""
    assert main(("memory", *BASE, "--rules", "rules.toml", "--optimizer", "made_there:Adam")) == 0


def test_presets_and_files_are_compared_the_best_first(folder, capsys):
    words = ("compare", *BASE, "--preset", "tensor_parallel", "--rules", "rules.toml", "--hardware", "v5e")
    assert main((*words, "--mesh", "data=8", "--tokens", "1000", "--optimizer", "made_there:Adam")) == 0
    out = capsys.readouterr()
    table = cost.compare(
        {"tensor_parallel": presets.tensor_parallel(), "rules.toml": RULES}, tree(), NAMES,
        meshes=[MESH, "data=8"], hardware="v5e", tokens=1000, optimizer=Adam, unmapped="error",
    )  # fmt: skip
    assert out.out.startswith(str(table))
    assert "tensor_parallel on data=8" not in out.err
    assert "tensor_parallel: the mesh data=8 lacks model, which is left out" in out.err


def test_the_comparison_for_programs_holds_every_row(folder, capsys):
    words = ("compare", *BASE, "--rules", "sets.toml", "--set", "none", "--set", "both")
    assert main((*words, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["winner"] == {"name": "sets.toml:both", "mesh": {"data": 4, "model": 2}}
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["sets.toml:both", "sets.toml:none"]
    assert rows["sets.toml:none"]["idle"] == ["model"]
    assert rows["sets.toml:none"]["traffic"]["reasons"] == dict(cost.traffic(plan(WHOLE)).reasons)
    moved = cost.traffic(plan())
    assert rows["sets.toml:both"]["traffic"]["wire_bytes_per_axis"] == moved.wire_bytes_per_axis
    assert rows["sets.toml:both"]["memory"]["parameters"] == plan().bytes_per_device
    grown = {one["devices"]: one for one in found["growth"]["sets.toml:both"]}
    wide = plan(mesh="data=32,model=2")
    assert grown[64]["bytes_per_device"] == 2 * wide.bytes_per_device
    assert grown[64]["wire_bytes"] == cost.traffic(wide).wire_bytes


def test_what_would_break_is_told_below_the_table(folder, capsys):
    words = ("compare", "model.safetensors", "--names", "names.toml", "--mesh", "data=3,model=2")
    assert main((*words, "--rules", "rules.toml")) == 0
    assert "on data=3, model=2: 6 arrays do not divide: layers.0.down ..." in capsys.readouterr().out
    assert main((*words, "--rules", "rules.toml", "--strict")) == 1
    assert "no rule set fits the tree" in capsys.readouterr().out


def test_a_rule_set_that_knows_not_every_name_is_a_row_with_the_reason(folder, capsys):
    ar.Rules({"batch": "data", "embed": "data"}).dump("few.toml")
    assert main(("compare", *BASE, "--rules", "few.toml")) == 1
    out = capsys.readouterr().out
    assert "no rule mentions 'mlp', the name of dimension 0 (and 2 more)" in out
    assert main(("compare", *BASE, "--rules", "few.toml", "--rules", "rules.toml")) == 0


def test_without_rules_every_preset_is_compared(folder, capsys):
    assert main(("compare", *BASE)) == 0
    out = capsys.readouterr()
    assert "rules: every preset" in out.err
    assert {line.split()[0] for line in out.out.splitlines()[1:7]} == {
        "data_parallel", "fsdp", "tensor_parallel", "fsdp_tensor_parallel", "sequence_parallel",
        "expert_parallel",
    }  # fmt: skip


def test_a_comparison_in_which_nothing_fits_fails(folder):
    assert main(("compare", *BASE, "--hardware", "tiny.toml")) == 1
    assert main(("compare", *BASE, "--hardware", "chip.toml")) == 0


def test_arrays_without_names_are_told_and_stay_whole(folder, capsys):
    ar.NameTable({"**.up": "embed mlp"}).dump("few.toml")
    base = ("model.safetensors", "--names", "few.toml", "--mesh", MESH)
    for words in (("compare", *base), ("suggest", *base, "--time-limit", "1")):
        assert main(words) == 0
        told = "names: 6 arrays of 787,968 bytes have none and stay whole: layers.0.down ..."
        assert told in capsys.readouterr().err
        assert main((*words, "--strict")) == 1
        assert "layers.0.down" in capsys.readouterr().err


def test_suggest_prints_rules_that_other_commands_take(folder, capsys):
    names = {"**.up": "embed mlp", "**.down": "mlp embed", "**.norm": "strange"}
    ar.NameTable(names).dump("names.toml")
    assert main(("suggest", *BASE, "--rules", "whole.toml", "-o", "found.toml", "--time-limit", "20")) == 0
    out = capsys.readouterr()
    assert "wrote found.toml" in out.err
    assert out.out.startswith("on data=4, model=2, ")
    found = ar.Rules.load("found.toml")
    assert str(found) in out.out
    assert found.by_name["strange"]
    assert main(("plan", *BASE, "--rules", "found.toml", "--max-waste", "1.01")) == 0


def test_the_suggestion_for_programs_says_what_each_change_gained(folder, capsys):
    ar.Rules({"batch": "data", "mlp": None}).dump("fixed.toml")
    words = ("suggest", *BASE, "--fixed", "fixed.toml", "--hardware", "v5e", "--time-limit", "20")
    assert main((*words, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [axes for name, axes in found["rules"] if name == "mlp"] == [[]]
    assert [axes for name, axes in found["rules"] if name == "batch"] == [["data"]]
    again = ar.plan(tree(), NAMES, mesh=MESH, rules=found["rules"], **found["options"])
    assert again.bytes_per_device == found["score"]["bytes_per_device"]
    assert cost.traffic(again, hardware="v5e").wire_bytes == found["score"]["wire_bytes"]
    assert found["exact"] is True
    assert all(set(change) == {"name", "before", "after", "gain"} for change in found["changes"])
    assert found["presets"]["fsdp"]["fits"] is True


def test_what_has_to_be_filled_is_said_in_words_that_paste(folder, capsys):
    names = {"**.up": "_ _", "**.down": "_ _", "**.norm": "norm"}
    ar.NameTable(names).dump("names.toml")
    np.savez("wide.npz", **{"a.up": np.zeros((512, 1024), np.float32), "a.norm": np.zeros(8, np.float32)})
    words = ("suggest", "wide.npz", "--names", "names.toml", "--mesh", MESH, "--time-limit", "20")
    assert main((*words, "--json")) == 0
    fill = json.loads(capsys.readouterr().out)["options"]["fill"]
    assert main(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"and what these leave whole is split by --fill {','.join(fill)}, or axisrules.")
    pasted = ast.literal_eval(last.rpartition("fill=")[2].removesuffix(")"))
    assert ([pasted] if isinstance(pasted, str) else list(pasted)) == fill


def test_suggest_counts_the_state_of_the_optimizer(folder, capsys):
    words = ("suggest", *BASE, "--hardware", "tiny.toml", "--time-limit", "20", "--json")
    Path("tiny.toml").write_text(SMALL.format(plan().bytes_per_device * 2 + 5_000))
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["score"]["fits"] is True
    assert main((*words, "--optimizer", "made_there:Adam")) == 1
    assert json.loads(capsys.readouterr().out)["score"]["fits"] is False


def test_a_page_shows_prices_where_hardware_is_named(folder, capsys):
    pytest.importorskip("jinja2")
    words = ("page", *BASE, "--rules", "rules.toml", "-o", "p.html")
    assert main(words) == 0
    assert 'id="costs"' not in Path("p.html").read_text()
    assert main((*words, "--hardware", "v5e", "--optimizer", "made_there:Adam")) == 0
    text = Path("p.html").read_text()
    assert 'id="costs"' in text
    assert "optimizer/m" in text


BAD = {
    "memory without a mesh": (("memory", "model.safetensors"), "--mesh"),
    "compare without a mesh": (("compare", "model.safetensors"), "--mesh"),
    "suggest without a mesh": (("suggest", "model.safetensors"), "--mesh"),
    "an unknown accelerator": (("memory", *BASE, "--hardware", "v5"), "hardware 'v5' is unknown"),
    "an accelerator to compare for": (("compare", *BASE, "--hardware", "TPU v5f"), "did you mean 'TPU v5"),
    "an accelerator to search for": (("suggest", *BASE, "--hardware", "v9"), "hardware 'v9' is unknown"),
    "an accelerator for a page": (("page", *BASE, "-o", "p.html", "--hardware", "v9"), "hardware 'v9'"),
    "a missing file of hardware": (("memory", *BASE, "--hardware", "no.toml"), "cannot read no.toml"),
    "an unknown preset": (
        ("compare", *BASE, "--preset", "fdsp"),
        "there is no preset 'fdsp'; did you mean 'fsdp'?",
    ),
    "a file as a preset": (("compare", *BASE, "--preset", "rules.toml"), "there is no preset 'rules.toml'"),
    "an unknown set": (("compare", *BASE, "--rules", "sets.toml", "--set", "bot"), "did you mean 'both'?"),
    "a file of several sets": (("compare", *BASE, "--rules", "sets.toml"), "holds 2 sets of rules"),
    "a second mesh that does not parse": (
        ("compare", *BASE, "--mesh", "data=4,model"),
        "cannot read 'model'",
    ),
    "missing fixed rules": (("suggest", *BASE, "--fixed", "no.toml"), "cannot read no.toml"),
    "a negative time limit": (("suggest", *BASE, "--time-limit", "-1"), "--time-limit"),
    "tokens that are no number": (("compare", *BASE, "--tokens", "many"), "--tokens"),
    "a missing checkpoint": (("suggest", "no.npz", "--mesh", MESH), "there is no 'no.npz'"),
    "a table that covers nothing": (
        ("suggest", "model.safetensors", "--mesh", MESH, "--names", "gpt2"),
        "has no names for any of the 9 arrays",
    ),
    "an optimizer on a page without hardware": (
        ("page", *BASE, "-o", "p.html", "--rules", "rules.toml", "--optimizer", "made_there:Adam"),
        "an optimizer is shown with the memory of an accelerator alone",
    ),
    "rules that cannot be written": (
        ("suggest", *BASE, "--time-limit", "0", "-o", "no/found.toml"),
        "no/found.toml",
    ),
    "rules of an unknown form": (("suggest", *BASE, "--time-limit", "0", "-o", "found.txt"), "found.txt"),
    "an optimizer that raises": (
        ("memory", *BASE, "--optimizer", "made_there:broken"),
        "made_there:broken raised RuntimeError: no optimizer today",
    ),
    "a function that gives no optimizer": (
        ("memory", *BASE, "--optimizer", "made_there:nothing"),
        "made_there:nothing is no optimizer",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_usage_is_told_with_status_2_and_no_traceback(kind, folder, capsys):
    words, text = BAD[kind]
    before = sorted(os.listdir())
    assert main(words) == 2
    out = capsys.readouterr()
    assert text in out.err
    assert "Traceback" not in out.err
    assert out.out == ""
    assert sorted(set(os.listdir()) - {"__pycache__"}) == before


@pytest.mark.parametrize(("word", "near"), [("adamww", "adamw"), ("apply_updates", None), ("__doc__", None)])
def test_what_is_no_optimizer_of_optax_is_told(word, near, folder, capsys):
    pytest.importorskip("optax")
    assert main(("memory", *BASE, "--rules", "rules.toml", "--optimizer", word)) == 2
    out = capsys.readouterr()
    assert f"PolicyError: {word} is no optimizer" in out.err
    assert near is None or f"did you mean '{near}'?" in out.err
    assert out.out == ""
