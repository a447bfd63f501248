"""`shard_batch` and `process_shard` on one process; what several do is in test_batches_processes.py."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules._shares import process_grid, share_of

RULES = {"batch": "data", "length": "model", "embed": None}


def records(count, dtype=np.int32):
    return {
        "tokens": np.arange(count * 6, dtype=dtype).reshape(count, 6),
        "label": np.arange(count, dtype=dtype),
    }


def shard(batch, names="batch length", *, mesh, rules=RULES, **options):
    return ar.shard_batch(batch, names, mesh=mesh, rules=rules, **options)


# Names.


def test_leaves_take_as_many_of_the_names_as_they_have_dimensions(mesh):
    batch = {**records(8), "image": np.zeros((8, 4, 3), np.float32), "scale": np.float32(2)}
    placed = shard(batch, mesh=mesh)
    specs = {
        "tokens": P("data", "model"),
        "label": P("data"),
        "image": P("data", "model", None),
        "scale": P(),
    }
    for name, spec in specs.items():
        assert placed[name].sharding == NamedSharding(mesh, spec)
        np.testing.assert_array_equal(np.asarray(placed[name]), batch[name])


def test_a_mesh_and_rules_that_are_active_serve(mesh):
    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        assert ar.shard_batch(records(8), "batch length")["label"].sharding == NamedSharding(mesh, P("data"))


def test_texts_objects_and_numbers_stay_on_the_host(mesh):
    batch = {
        **records(8),
        "source": "web",
        "texts": np.array(["a"] * 8),
        "ids": ["x", "y"],
        "epoch": 3,
        "objects": np.array([{}, []], object),
        "when": np.array(["2024-01-01"], "datetime64[D]"),
        "nothing": None,
    }
    placed = shard(batch, mesh=mesh)
    for name in ["source", "texts", "epoch", "objects", "when"]:
        assert placed[name] is batch[name]
    assert placed["ids"] == ["x", "y"]
    assert placed["nothing"] is None


def test_leaves_without_an_entry_stay_on_the_host(mesh):
    batch = records(8)
    placed = shard(batch, {"tokens": "batch length"}, mesh=mesh)
    assert placed["label"] is batch["label"]
    assert isinstance(placed["tokens"], jax.Array)


@pytest.mark.parametrize(
    "names",
    [
        {"tokens": "batch length", "label": "batch"},
        {"tokens": ("batch", "length"), "label": ("batch",)},
        ar.NameTable({"tok*": "batch length", "*": "batch"}),
        lambda path, leaf: "batch length" if path == "tokens" else "batch",
        {"tokens": P("data", "model"), "label": P("data")},
    ],
    ids=["texts", "tuples", "table", "callable", "specs"],
)
def test_names_may_be_per_field(mesh, names):
    placed = shard(records(8), names, mesh=mesh)
    assert placed["tokens"].sharding.spec == P("data", "model")
    assert placed["label"].sharding.spec == P("data")


def test_names_per_field_need_every_dimension(mesh):
    with pytest.raises(ar.RankError, match="1 name for 2 dimensions"):
        shard(records(8), {"tokens": "batch", "label": "batch"}, mesh=mesh)


def test_a_tuple_of_names_for_a_tuple_is_per_field(mesh):
    tokens, label = records(8).values()
    placed = shard((tokens, label), ("batch length", "batch"), mesh=mesh)
    assert [one.sharding.spec for one in placed] == [P("data", "model"), P("data")]
    with pytest.raises(ar.AxisRulesError) as caught:
        shard((label, label), ("batch", "length"), mesh=mesh)
    assert "begin with different names" in str(caught.value)


def test_one_array_is_a_batch(mesh):
    for names in ["batch length", ("batch", "length"), ["batch", None], "batch ...", P("data")]:
        placed = shard(records(8)["tokens"], names, mesh=mesh)
        assert placed.sharding.spec[0] == "data"


def test_one_set_may_hold_an_ellipsis(mesh):
    shapes = {"x": (8, 2, 6), "y": (8,), "z": (8, 6)}
    batch = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    placed = shard(batch, "batch ... length", mesh=mesh)
    specs = [placed[name].sharding.spec for name in "xyz"]
    assert specs == [P("data", None, "model"), P("data"), P("data", "model")]


def test_a_field_whose_names_begin_otherwise_has_no_records(mesh):
    batch = {"positions": np.arange(6), "tokens": records(10)["tokens"], "table": np.ones((3, 5), np.float32)}
    names = {"positions": "length", "tokens": "batch length", "table": None}
    placed, mask = shard(batch, names, mesh=mesh, remainder="pad")
    assert placed["positions"].shape == (6,)
    assert placed["table"].sharding.spec == P(None, None)
    assert placed["tokens"].shape == (12, 6)
    assert mask.shape == (12,)


def test_an_array_batch_without_any_names_is_an_error(mesh):
    with pytest.raises(ar.MissingNamesError, match="no array of the batch has names") as caught:
        shard(records(8), ar.NameTable({"image": "batch"}), mesh=mesh)
    assert set(caught.value.paths) == {"tokens", "label"}
    with pytest.raises(ar.MissingNamesError):
        shard(records(8), None, mesh=mesh)


def test_an_empty_batch_passes(mesh):
    assert shard({}, mesh=mesh) == {}
    assert shard({"note": "x", "none": None}, mesh=mesh) == {"note": "x", "none": None}


def test_names_without_a_field_are_an_error(mesh):
    with pytest.raises(ar.ExtraNamesError):
        shard(records(8), {"tokens": "batch length", "labels": "batch"}, mesh=mesh)


def test_unknown_names_warn_once_a_call(mesh):
    with pytest.warns(ar.UnmappedAxisWarning, match="'lenght'.*in tokens") as caught:
        shard(records(8), "batch lenght", mesh=mesh)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.raises(ar.UnknownNameError):
        shard(records(8), "batch lenght", mesh=mesh, unmapped="error")
    shard(records(8), "batch lenght", mesh=mesh, unmapped="replicate")


# Values, dtypes, kinds of leaves.


@pytest.mark.parametrize("names", ["batch", "_", "batch length"])
@pytest.mark.parametrize("size", [8, 64, 4096])
def test_the_buffers_of_the_loader_may_be_used_again_at_once(mesh, names, size):
    raw = np.zeros(8 * size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = (
        raw[start : start + 8 * size * 4].view(np.float32).reshape(8, size)
    )  # what JAX takes over uncopied
    assert buffer.ctypes.data % 64 == 0
    placed = shard({"x": buffer, "cut": buffer}, names, mesh=mesh)
    buffer[:] = 7
    assert not np.asarray(placed["x"]).any()
    placed = shard({"x": buffer}, "batch", mesh=mesh, remainder="drop")
    buffer[:] = 3
    assert (np.asarray(placed["x"]) == 7).all()


@pytest.mark.usefixtures("narrow")
def test_dtypes_are_those_that_jax_holds(mesh):
    batch = {"small": np.arange(8), "half": np.zeros(8, jnp.bfloat16), "flag": np.zeros(8, bool)}
    placed = shard(batch, "batch", mesh=mesh)
    assert [placed[name].dtype for name in batch] == [jnp.int32, jnp.bfloat16, jnp.bool_]


@pytest.mark.usefixtures("narrow")
def test_what_does_not_fit_a_dtype_is_an_error_with_every_path(mesh):
    batch = {"big": np.full(8, 2**40), "wide": np.zeros(8), "fine": np.zeros(8, np.float32)}
    with pytest.raises(ar.LeafError) as caught:
        shard(batch, "batch", mesh=mesh)
    assert caught.value.paths == ("big", "wide")


def test_device_arrays_and_keys_are_placed(mesh):
    batch = {"keys": jax.random.split(jax.random.key(0), 8), "x": jnp.arange(8.0)}
    placed = shard(batch, "batch", mesh=mesh)
    assert placed["keys"].sharding.spec == P("data")
    again = shard(placed, "batch", mesh=mesh)
    assert again["x"] is placed["x"]
    padded, _ = shard({"keys": batch["keys"][:6], "x": batch["x"][:6]}, "batch", mesh=mesh, remainder="pad")
    assert padded["keys"].shape == (8,)
    keys = [np.asarray(jax.random.key_data(one["keys"])) for one in (batch, padded)]
    np.testing.assert_array_equal(keys[1][6], keys[0][5])


def test_a_memory_map_and_a_view_are_placed(mesh, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(16, dtype=np.int32))
    batch = {
        "map": np.load(tmp_path / "x.npy", mmap_mode="r")[:8],
        "view": np.arange(16, dtype=np.int32)[::2],
    }
    placed = shard(batch, "batch", mesh=mesh)
    np.testing.assert_array_equal(np.asarray(placed["view"]), np.arange(0, 16, 2))
    np.testing.assert_array_equal(np.asarray(placed["map"]), np.arange(8))


def test_one_array_in_two_fields_may_have_two_layouts(mesh):
    shared = np.zeros((8, 8), np.float32)
    placed = shard({"x": shared, "y": shared}, {"x": "batch length", "y": "batch embed"}, mesh=mesh)
    assert placed["x"].sharding.spec == P("data", "model")
    assert placed["y"].sharding.spec == P("data", None)


def test_the_batch_is_left_as_it_was(mesh):
    batch = records(10)
    before = {name: array.copy() for name, array in batch.items()}
    shard(batch, mesh=mesh, remainder="pad")
    assert batch.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(batch[name], array)


def test_placing_inside_a_trace_is_refused(mesh):
    with pytest.raises(ar.LeafError, match="tracing"):
        jax.jit(lambda x: shard({"x": x}, "batch", mesh=mesh))(np.zeros(8, np.float32))


def test_a_mesh_without_devices_is_refused():
    with pytest.raises(ar.NoMeshError, match="no devices"):
        shard(records(8), mesh="data=4,model=2")


@pytest.mark.parametrize("leaf", [jax.ShapeDtypeStruct((8,), np.float32), np.ma.ones(8)])
def test_leaves_without_plain_values_are_refused(mesh, leaf):
    with pytest.raises(ar.LeafError):
        shard({"x": leaf}, "batch", mesh=mesh)


# Records that do not divide.


def test_a_remainder_is_an_error_that_names_the_ways_out(mesh):
    with pytest.raises(ar.BatchError) as caught:
        shard(records(10), mesh=mesh)
    error = caught.value
    assert error.headline == "the 10 records do not divide over data=4"
    assert set(error.paths) == {"tokens", "label"}
    assert 'remainder="drop" (then: 8 records)' in error.fix
    assert "then: 12" in error.fix


def test_a_remainder_can_be_dropped(mesh):
    placed = shard(records(10), mesh=mesh, remainder="drop")
    for name, array in records(8).items():
        np.testing.assert_array_equal(np.asarray(placed[name]), array)
    assert placed["tokens"].sharding == NamedSharding(mesh, P("data", "model"))


def test_a_remainder_can_be_padded_with_the_last_record_and_a_mask(mesh):
    placed, mask = shard(records(10), mesh=mesh, remainder="pad")
    source = records(10)
    assert placed["label"].shape == (12,)
    np.testing.assert_array_equal(np.asarray(placed["label"]), [*source["label"], 9, 9])
    np.testing.assert_array_equal(np.asarray(placed["tokens"])[10:], source["tokens"][[9, 9]])
    np.testing.assert_array_equal(np.asarray(mask), [True] * 10 + [False] * 2)
    assert mask.dtype == jnp.bool_
    assert mask.sharding == NamedSharding(mesh, P("data"))


def test_padding_always_returns_a_mask(mesh):
    placed, mask = shard(records(8), mesh=mesh, remainder="pad")
    assert placed["label"].shape == (8,)
    assert np.asarray(mask).all()


@pytest.mark.parametrize("count", range(17))
def test_every_number_of_records_has_its_remainder(mesh, count):
    placed, mask = shard(records(count), mesh=mesh, remainder="pad")
    assert placed["label"].shape == mask.shape == (-(-count // 4) * 4,)
    assert int(mask.sum()) == count
    np.testing.assert_array_equal(np.asarray(placed["tokens"])[:count], records(count)["tokens"])
    if count >= 4:
        assert shard(records(count), mesh=mesh, remainder="drop")["label"].shape == (count // 4 * 4,)
        return
    with pytest.raises(ar.BatchError, match="nothing is left"):
        shard(records(count), mesh=mesh, remainder="drop")


def test_a_batch_of_one_is_whole_and_one_of_none_is_empty(mesh):
    assert shard(records(1), mesh=mesh)["tokens"].sharding.spec == P(None, "model")
    assert shard(records(0), mesh=mesh)["tokens"].shape == (0, 6)


def test_a_batch_over_several_axes_divides_over_their_product(mesh):
    rules = {"batch": ("data", "model")}
    with pytest.raises(ar.BatchError, match=r"do not divide over data=4 \* model=2 = 8"):
        shard(records(12), "batch", mesh=mesh, rules=rules)
    assert shard(records(12), "batch", mesh=mesh, rules=rules, remainder="drop")["label"].shape == (8,)


def test_fields_that_split_the_batch_differently_divide_over_all_of_its_ways(mesh):
    names = {"tokens": "batch length", "label": "batch"}
    rules = [("length", "model"), ("batch", ("data", "model")), ("batch", "data")]
    placed, mask = shard(records(10), names, mesh=mesh, rules=rules, remainder="pad")
    assert placed["tokens"].shape == (16, 6)
    assert placed["tokens"].sharding.spec == P("data", "model")
    assert placed["label"].sharding.spec == P(("data", "model"))
    assert int(mask.sum()) == 10


def test_the_policy_for_what_does_not_divide_still_holds(mesh):
    assert shard(records(10), "batch", mesh=mesh, indivisible="next")["label"].sharding.spec == P(None)


def test_a_further_dimension_that_does_not_divide_is_reported_beside_the_records(mesh):
    batch = {"tokens": np.zeros((10, 5), np.int32), "label": np.zeros(10, np.int32)}
    with pytest.raises(ar.PlanError) as caught:
        shard(batch, mesh=mesh)
    assert {type(one) for one in caught.value.failures} == {ar.BatchError, ar.DivisibilityError}


def test_fields_need_as_many_records(mesh):
    batch = {**records(8), "weight": np.zeros(7, np.float32)}
    with pytest.raises(ar.BatchError, match="different numbers of records") as caught:
        shard(batch, mesh=mesh, remainder="drop")
    assert "weight  7" in str(caught.value)


def test_an_unknown_remainder_is_refused(mesh):
    with pytest.raises(ar.PolicyError, match="did you mean 'drop'"):
        shard(records(8), mesh=mesh, remainder="dorp")


def test_there_has_to_be_something_to_pad(mesh):
    with pytest.raises(ar.BatchError, match="nothing to pad"):
        shard(records(8), {"tokens": None, "label": None}, mesh=mesh, remainder="pad")


# The share of a process, on meshes of devices that are only numbers.


@dataclass(frozen=True)
class Device:
    process_index: int


AXES = ("data", "model")


def shares(grid, axes):
    processes = process_grid(np.vectorize(Device)(np.array(grid)))
    found = {process: share_of(processes, AXES, axes, process) for process in np.unique(processes).tolist()}
    return {process: (one.index, one.count, one.unit) for process, one in found.items()}


@pytest.mark.parametrize(
    ("grid", "axes", "expected"),
    [
        ([[0, 0], [0, 0], [1, 1], [1, 1]], ("data",), {0: (0, 2, 2), 1: (1, 2, 2)}),
        (
            [[0, 0], [1, 1], [2, 2], [3, 3]],
            ("data",),
            {0: (0, 4, 1), 1: (1, 4, 1), 2: (2, 4, 1), 3: (3, 4, 1)},
        ),
        # A model axis over processes: they read the same records.
        ([[0, 1], [0, 1], [0, 1], [0, 1]], ("data",), {0: (0, 1, 4), 1: (0, 1, 4)}),
        (
            [[0, 1], [0, 1], [2, 3], [2, 3]],
            ("data",),
            {0: (0, 2, 2), 1: (0, 2, 2), 2: (1, 2, 2), 3: (1, 2, 2)},
        ),
        ([[0, 0], [0, 0], [1, 1], [1, 1]], (), {0: (0, 1, 1), 1: (0, 1, 1)}),
        ([[0, 0], [0, 0], [1, 1], [1, 1]], ("data", "model"), {0: (0, 2, 4), 1: (1, 2, 4)}),
        ([[0, 0], [0, 0], [1, 1], [1, 1]], ("model",), {0: (0, 1, 2), 1: (0, 1, 2)}),
        # Not next to each other, yet equal and separate.
        ([[0, 0], [0, 0], [1, 1], [1, 1]], ("model", "data"), {0: (0, 2, 4), 1: (1, 2, 4)}),
        ([[0, 0], [1, 1], [0, 0], [1, 1]], ("data",), {0: (0, 2, 2), 1: (1, 2, 2)}),
        ([[5, 5], [3, 3]], ("data",), {5: (0, 2, 1), 3: (1, 2, 1)}),
    ],
)
def test_processes_share_out_the_batch(grid, axes, expected):
    assert shares(grid, axes) == expected


@pytest.mark.parametrize(
    "grid",
    [
        [[0, 0], [0, 1], [1, 1]],  # both hold the part in the middle
        [[0, 0], [0, 0], [0, 0], [1, 1]],  # three parts and one
        [[0, 1], [1, 2], [2, 0], [0, 1]],
    ],
)
def test_shares_that_are_unequal_or_overlap_are_an_error(grid):
    with pytest.raises(ar.ProcessError, match="no equal, separate shares"):
        shares(grid, ("data",))


def test_a_process_without_a_device_is_an_error():
    with pytest.raises(ar.ProcessError, match="process 7 has no device"):
        share_of([[0, 0], [1, 1]], AXES, ("data",), 7)


@pytest.mark.parametrize(
    ("grid", "axes"),
    [
        ([[0, 0], [1, 1], [0, 0], [1, 1]], ("data",)),
        ([[0, 0], [0, 0], [1, 1], [1, 1]], ("model", "data")),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], ("data",)),
    ],
)
def test_the_rows_of_all_processes_are_every_row_once(grid, axes):
    found = {}
    ways = {("data",): 4, ("model", "data"): 8}[axes]
    for process in range(np.max(grid) + 1):
        mine = share_of(grid, AXES, axes, process)
        size, local = 3, 3 * mine.unit
        rows = [mine.locate(slice(part * size, (part + 1) * size), local) for part in mine.parts]
        assert [row.start for row in rows] == list(range(0, local, size))
        found.setdefault(mine.index, mine.parts)
    assert sorted(part for parts in found.values() for part in parts) == list(range(ways))


@pytest.mark.parametrize(
    "names",
    [
        "batch length",
        ("batch", "length"),
        {"tokens": "batch length", "label": "batch", "rest": None},
        ("batch length", "batch"),
        P("data"),
        ar.NameTable({"tokens": "batch length", "*": "batch"}),
        "_ length",
    ],
)
def test_one_process_reads_everything(mesh, names):
    assert ar.process_shard(names, mesh=mesh, rules=RULES) == (0, 1)


def test_the_share_needs_names_and_devices(mesh):
    with pytest.raises(ar.NamesError, match="cannot tell the names"):
        ar.process_shard(lambda path, leaf: "batch", mesh=mesh, rules=RULES)
    with pytest.raises(ar.NamesError):
        ar.process_shard(None, mesh=mesh, rules=RULES)
    with pytest.raises(ar.NoMeshError):
        ar.process_shard("batch", mesh="data=4", rules=RULES)
    with pytest.raises(ar.AbsentAxisError):
        ar.process_shard("batch", mesh=mesh, rules={"batch": "dtaa"})
    with pytest.warns(ar.UnmappedAxisWarning, match="'bacth'"):
        ar.process_shard("bacth", mesh=mesh, rules=RULES)
