"""The command line: what it prints, its exit statuses, and bad usage without a traceback."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import checkpoint_files
import numpy as np
import pytest

import axisrules as ar

pytest.importorskip("typer")

from axisrules.cli import main

DATA = Path(__file__).parent / "data"
MESH = ("--mesh", "data=4,model=2")
RULES = {"embed": "data", "mlp": "model", "norm": None}
NAMES = ar.NameTable({"**.up": "embed mlp", "**.down": "mlp embed", "**.norm": "norm"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a checkpoint, a table, rules, and a module that makes a tree."""
    arrays = {}
    for i in range(3):
        arrays[f"layers.{i}.up"] = np.zeros((8, 32), np.float32)
        arrays[f"layers.{i}.down"] = np.zeros((32, 8), np.float32)
        arrays[f"layers.{i}.norm"] = np.zeros(8, np.float32)
    checkpoint_files.write(tmp_path / "model.safetensors", arrays)
    np.savez(tmp_path / "model.npz", **arrays)
    NAMES.dump(tmp_path / "names.toml")
    ar.Rules(RULES).dump(tmp_path / "rules.toml")
    (tmp_path / "made_here.py").write_text(
        "import jax\n"
        "def tree():\n    return {'layers.0.up': jax.ShapeDtypeStruct((8, 32), 'float32')}\n"
        "def broken():\n    raise RuntimeError('no tree today')\n"
        "def nothing():\n    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("made_here", None)


def planned(*words):
    return ("plan", "model.safetensors", *MESH, "--names", "names.toml", "--rules", "rules.toml", *words)


def expected(rules=RULES, **options):
    tree = ar.checkpoints.open("model.safetensors")
    return ar.plan(tree, NAMES, mesh=MESH[1], rules=rules, indivisible="next", **options)


def test_plan_prints_the_table(folder, capsys):
    assert main(planned()) == 0
    out = capsys.readouterr()
    assert out.out == f"{ar.report.table(expected())}\n"
    assert out.err == ""


def test_plan_prints_json_that_is_the_golden_file(folder, capsys):
    assert main(planned("--json")) == 0
    assert capsys.readouterr().out == expected().to_json()


@pytest.mark.parametrize("source", ["model.npz", ".", "made_here:tree"])
def test_a_tree_comes_from_any_source(folder, capsys, source):
    (folder / "model.npz").rename(folder / "held.npz")
    source = "held.npz" if source == "model.npz" else source
    words = ("plan", source, *MESH, "--names", "names.toml", "--rules", "rules.toml")
    assert main(words) == 0
    assert "(8, 32)" in capsys.readouterr().out


def test_limits_are_checked_after_the_table(folder, capsys):
    assert main(planned("--max-bytes-per-device", "10")) == 1
    out = capsys.readouterr()
    assert "layers.*.up" in out.out
    assert out.err.startswith("axisrules: LayoutError: ")
    assert main(planned("--max-waste", "100", "--max-replicated", "0.5")) == 0


def test_strict_refuses_what_does_not_divide(folder, capsys):
    words = (
        "plan",
        "model.safetensors",
        "--mesh",
        "data=3,model=2",
        "--names",
        "names.toml",
        "--rules",
        "rules.toml",
    )
    assert main(words) == 0
    assert main((*words, "--strict")) == 1
    assert "does not divide over data=3" in capsys.readouterr().err


def test_what_is_let_pass_is_told(folder, capsys):
    ar.NameTable({"**.up": "embed mlp"}).dump("few.toml")
    words = (
        "plan",
        "model.safetensors",
        "--mesh",
        "data=4,extra=2",
        "--names",
        "few.toml",
        "--rules",
        "rules.toml",
    )
    assert main(words) == 0
    assert capsys.readouterr().err.splitlines() == [
        "rules: the mesh lacks model, which is left out",
        "mesh: extra=2 splits no array",
        "names: 6 arrays of 3,168 bytes have none and stay whole: layers.0.down ...",
    ]
    assert main((*words, "--strict")) == 1


def test_without_a_command_the_help_is_shown(capsys):
    assert main(()) == 2
    out = capsys.readouterr()
    assert "lint" in out.out + out.err


def test_explain_tells_why_and_who_holds_what(folder, capsys):
    words = ("explain", "model.safetensors", "layers.1.up", *planned()[2:])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith(expected().explain("layers.1.up"))
    assert str(ar.report.draw(expected().placement("layers.1.up"))) in out
    assert main((*words, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shard_shape"], found["spec"]) == ([2, 16], [["data"], ["model"]])
    assert main(("explain", "model.safetensors", "layers.1.upp", *planned()[2:])) == 2
    assert "did you mean 'layers.1.up'?" in capsys.readouterr().err


def test_lint_looks_at_rules_and_at_plans(folder, capsys):
    ar.Rules([("a", None), ("a", "data")]).dump("dead.toml")
    assert main(("lint", "--rules", "dead.toml")) == 1
    assert "warning dead_rule" in capsys.readouterr().out
    assert main(("lint", "model.safetensors", *planned()[2:])) == 0
    assert main(("lint", "model.safetensors", *planned()[2:], "--json")) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2]) == []
    assert main(("lint", "--rules", "tensor_parallel")) == 0  # notes alone
    assert main(("lint", "--rules", "tensor_parallel", "--strict")) == 1
    assert main(("lint", "model.safetensors")) == 2
    assert "a checkpoint needs --mesh" in capsys.readouterr().err


def test_diff_fails_where_golden_files_differ(folder, capsys):
    main(planned("--json"))
    Path("a.json").write_text(capsys.readouterr().out)
    Path("b.json").write_text(expected({**RULES, "embed": None}).to_json())
    assert main(("diff", "a.json", "a.json")) == 0
    capsys.readouterr()
    assert main(("diff", "a.json", "b.json")) == 1
    assert "was split over data=4 by rule #0 embed -> data" in capsys.readouterr().out
    assert main(("diff", "a.json", "b.json", "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["changed"]) == 6
    assert found["over"] == {"data": found["received"], "model": 0}


def test_page_is_written(folder, capsys):
    pytest.importorskip("jinja2")
    assert main(("page", "model.safetensors", "-o", "p.html", *planned()[2:])) == 0
    assert Path("p.html").read_text().endswith("</html>")
    before = sorted(os.listdir())
    assert main(("page", "model.safetensors", "-o", "no/p.html", *planned()[2:])) == 2
    assert "cannot write no/p.html" in capsys.readouterr().err
    assert sorted(os.listdir()) == before


def test_tables_lists_the_catalog(capsys):
    assert main(("tables",)) == 0
    assert capsys.readouterr().out.split() == list(ar.catalog.names())
    assert main(("tables", "--json")) == 0
    assert json.loads(capsys.readouterr().out) == list(ar.catalog.names())


BAD = {
    "a missing file": (("plan", "no.safetensors", *MESH), "there is no 'no.safetensors'"),
    "a folder without a checkpoint": (("plan", "empty", *MESH), "CheckpointError"),
    "a table that covers nothing": (
        ("plan", "model.safetensors", *MESH, "--names", "gpt2"),
        "the table 'gpt2' has no names for any of the 9 arrays, such as layers.0.down",
    ),
    "an unknown table": (("plan", "model.safetensors", *MESH, "--names", "lama"), "did you mean 'llama'?"),
    "no table that fits": (("plan", "model.safetensors", *MESH), "none of the tables covers this tree"),
    "a mesh that does not parse": (
        ("plan", "model.safetensors", "--mesh", "data=4,model"),
        "cannot read 'model' at position 7",
    ),
    "an unknown preset": (
        ("plan", "model.safetensors", *MESH, "--rules", "fdsp"),
        "there is no preset 'fdsp', and no such file; did you mean 'fsdp'?",
    ),
    "a missing file of rules": (
        ("plan", "model.safetensors", *MESH, "--rules", "no.toml"),
        "cannot read no.toml",
    ),
    "a set of a preset": (
        ("plan", "model.safetensors", *MESH, "--rules", "fsdp", "--set", "a"),
        "has no sets",
    ),
    "an unknown order": (planned("--sort", "size"), "is no order"),
    "a missing golden file": (("diff", "no.json", "no.json"), "cannot read no.json"),
    "a golden file of another version": (
        ("diff", "old.json", "old.json"),
        "old.json: the plan has version 0 of the format, and this axisrules reads version 1",
    ),
    "a module that is not there": (("plan", "no_module:tree", *MESH), "raised ModuleNotFoundError"),
    "a function that is not there": (("plan", "made_here:no", *MESH), "raised AttributeError"),
    "a function that raises": (("plan", "made_here:broken", *MESH), "raised RuntimeError: no tree today"),
    "a function that gives no tree": (("plan", "made_here:nothing", *MESH), "none of the tables"),
    "an unknown command": (("plam",), "plam"),
    "an unknown option": (("plan", "model.safetensors", *MESH, "--mash"), "--mash"),
    "a missing option": (("plan", "model.safetensors"), "--mesh"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_usage_is_told_with_status_2_and_no_traceback(kind, folder, capsys):
    words, text = BAD[kind]
    Path("empty").mkdir()
    Path("old.json").write_text(expected().to_json().replace('"version": 1', '"version": 0'))
    before = sorted(os.listdir())
    assert main(words) == 2
    out = capsys.readouterr()
    assert text in out.err
    assert "Traceback" not in out.err
    assert out.out == ""
    assert sorted(set(os.listdir()) - {"__pycache__"}) == before


def test_without_typer_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(("tables",)) == 2
    assert "pip install 'axisrules[cli]'" in capsys.readouterr().err


def test_the_module_runs_in_a_process_of_its_own_and_starts_no_backend(folder):
    code = (
        "import sys; from axisrules.cli import main; status = main(sys.argv[1:]);"
        "import jax; jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count('cpu') == 3;"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *planned()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ar.report.table(expected())}\n"
    bad = subprocess.run(
        [sys.executable, "-m", "axisrules.cli", "plan", "no", *MESH], capture_output=True, text=True
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr


def test_a_checkpoint_of_812_gb_is_planned_from_its_header(tmp_path, capsys):
    header, end = {}, 0
    for row in json.loads((DATA / "hf/llama-3.1-405b.json").read_text())["params"]:
        for i in range(row["repeat"]) if "{i}" in row["path"] else [0]:
            size = 2 * int(np.prod(row["shape"], dtype=np.int64))
            header[row["path"].replace("{i}", str(i))] = {
                "dtype": row["dtype"], "shape": row["shape"], "data_offsets": [end, end + size]
            }  # fmt: skip
            end += size
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + end)
        except OSError:
            pytest.skip("this file system has no sparse files of that size")
    assert main(("plan", str(path), "--mesh", "data=64,model=128")) == 0
    out = capsys.readouterr()
    assert "811,706,777,600 bytes" in out.out
    assert len(out.out.splitlines()) < 20
    assert "names: guessed; llama covers 100.0%" in out.err
    assert "rules: the preset fsdp_tensor_parallel" in out.err
