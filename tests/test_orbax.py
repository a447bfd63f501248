"""Orbax checkpoints, restored onto another mesh, number of devices and rule set."""

import jax
import numpy as np
import pytest
from axis_types import AUTO_FIRST, in_turn, mesh_of
from checkpoint_files import bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import checkpoints

ocp = pytest.importorskip("orbax.checkpoint")

RULES = {"embed": "data", "mlp": "model", "vocab": ("data", "model")}
TABLE = ar.NameTable({"wte": "vocab embed", "blocks/*/up": "embed mlp", "blocks/*/bias": "mlp", "ids": None})


@pytest.fixture
def tree():
    random = np.random.default_rng(0)
    return {
        "wte": random.normal(size=(32, 8)).astype(np.float32),
        "blocks": [
            {"up": random.normal(size=(8, 16)).astype(np.float32), "bias": np.ones(16, np.float32)}
            for _ in range(2)
        ],
        "ids": np.arange(4),
        "step": 7,
        "nothing": None,
    }


@pytest.fixture
def saved(tmp_path, tree):
    """A checkpoint that was saved on a mesh of (4, 2)."""
    mesh = ar.make_mesh("data=4,model=2")
    placed = ar.shard_tree(tree, TABLE, mesh=mesh, rules=RULES)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {**placed, "ids": tree["ids"]})
    return tmp_path / "saved"


def restore(path, mesh="data=2,model=4", names=TABLE, rules=RULES, axis_types="auto", **options):
    found = mesh if not isinstance(mesh, str) else mesh_of(axis_types, mesh)
    return checkpoints.restore_orbax(path, names, mesh=found, rules=rules, **options)


def assert_same(found, tree):
    leaves, structure = jax.tree.flatten(tree)
    assert jax.tree.structure(found) == structure
    for one, expected in zip(jax.tree.leaves(found), leaves, strict=True):
        if isinstance(expected, np.ndarray) and expected.dtype == np.int64:
            assert np.array_equal(np.asarray(one), expected)
        elif isinstance(expected, np.ndarray):
            assert bits(one) == bits(expected)
        else:
            assert one == expected


@pytest.mark.parametrize(
    ("sizes", "axis_types"), in_turn(["data=4,model=2", "data=2,model=4", "data=8,model=1"])
)
def test_a_checkpoint_is_restored_onto_another_mesh(saved, tree, sizes, axis_types):
    mesh = mesh_of(axis_types, sizes)
    restored = restore(saved, mesh)
    assert_same(restored, tree)
    plan = ar.plan(checkpoints.open(saved), TABLE, mesh=mesh, rules=RULES)
    for array, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(plan.shardings), strict=True):
        if isinstance(array, jax.Array):
            assert array.sharding == sharding


def test_a_checkpoint_is_restored_onto_one_device_and_under_other_rules(saved, tree):
    one = ar.make_mesh("data=1,model=1", devices=jax.devices()[:1])
    restored = restore(saved, one)
    assert_same(restored, tree)
    assert restored["wte"].devices() == {jax.devices()[0]}
    other = restore(saved, rules={"embed": "model", "mlp": "data", "vocab": None})
    assert_same(other, tree)
    assert tuple(other["blocks"][1]["up"].sharding.spec) == ("model", "data")


def test_metadata_alone_makes_a_plan_and_a_target_for_orbax(saved, tree):
    opened = checkpoints.open(saved)
    assert opened["wte"] == jax.ShapeDtypeStruct((32, 8), np.float32)
    assert opened["step"] == 0
    mesh = ar.make_mesh("data=2,model=4")
    plan = ar.plan({"wte": opened["wte"], "blocks": opened["blocks"]}, TABLE, mesh=mesh, rules=RULES)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(saved.parent / "two", {"wte": tree["wte"], "blocks": tree["blocks"]})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(saved.parent / "two", plan.abstract)
    assert restored["wte"].sharding == plan.shardings["wte"]
    assert bits(restored["wte"]) == bits(tree["wte"])


def test_floats_are_cast_and_integers_that_do_not_fit_are_refused(saved, tree, tmp_path):
    restored = restore(saved, dtype="bfloat16")
    assert bits(restored["wte"]) == bits(tree["wte"].astype(jax.numpy.bfloat16))
    assert restored["ids"].dtype == np.int32
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "big", {"ids": np.array([1, 2**40])})
    with pytest.raises(ar.LeafError, match="does not fit int32") as caught:
        restore(tmp_path / "big")
    assert caught.value.path == "ids"


def test_a_plan_that_fails_reads_nothing_and_names_every_array(saved, monkeypatch):
    monkeypatch.setattr(ocp.PyTreeCheckpointer, "restore", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ar.MissingNamesError) as caught:
        restore(saved, names=ar.NameTable({"wte": "vocab embed", "ids": None}))
    assert len(caught.value.paths) == 4
    with pytest.raises(ar.NoMeshError, match="no devices to restore arrays onto"):
        checkpoints.restore_orbax(saved, TABLE, mesh="data=4,model=2", rules=RULES)


def test_a_target_gives_structure_and_dtypes_and_leaves_out_the_rest(saved, tree):
    target = {"blocks": tree["blocks"][:1], "step": 0, "own": "text"}
    restored = restore(saved, target=target)
    assert_same(restored, {"blocks": tree["blocks"][:1], "step": 7, "own": "text"})
    half = jax.ShapeDtypeStruct((32, 8), jax.numpy.bfloat16)
    assert restore(saved, target={"wte": half})["wte"].dtype == jax.numpy.bfloat16


def test_everything_that_a_target_has_otherwise_is_named(saved):
    target = {
        "wte": jax.ShapeDtypeStruct((8, 32), np.float32),
        "ids": jax.ShapeDtypeStruct((4,), np.float32),
        "head": jax.ShapeDtypeStruct((8, 32), np.float32),
    }
    with pytest.raises(ar.CheckpointError) as caught:
        restore(saved, names={"wte": None, "ids": None, "head": None}, target=target)
    text = str(caught.value)
    assert "lacks arrays of the target" in text
    assert "the target has the shape (8, 32), the checkpoint (32, 8)" in text
    assert "the target is float32, the checkpoint int64" in text
    assert set(caught.value.paths) == {"wte", "ids", "head"}


def test_a_step_of_a_manager_is_found_and_a_folder_of_steps_is_told(tmp_path, tree):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (3, 20):
            manager.save(step, args=ocp.args.StandardSave(tree))
    assert_same(restore(tmp_path / "run" / "20"), tree)
    assert_same(restore(tmp_path / "run" / "3" / "default"), tree)
    with pytest.raises(ar.CheckpointError, match="holds 2 steps") as caught:
        restore(tmp_path / "run")
    assert str(tmp_path / "run" / "20") in caught.value.fix
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ar.CheckpointError, match="holds no Orbax checkpoint"):
            restore(path)


def test_what_was_saved_as_a_pytree_is_restored(tmp_path, tree):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    assert_same(restore(tmp_path / "saved"), tree)


def test_optimizer_states_come_back_as_they_are(tmp_path, axis_types):
    optax = pytest.importorskip("optax")
    params = {"w": np.arange(32, dtype=np.float32).reshape(8, 4)}
    state = optax.adam(1e-3).init(params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
    names = ar.NameTable({"**.w": "embed mlp"})
    restored = restore(
        tmp_path / "saved", names=names, target=jax.eval_shape(lambda: state), axis_types=axis_types
    )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    mesh = mesh_of(axis_types, "data=2,model=4")
    assert restored[0].mu["w"].sharding == NamedSharding(mesh, P("data", "model"))


def test_modules_and_states_of_nnx_are_targets(tmp_path):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, seed):
            self.up = nnx.Linear(8, 4, rngs=nnx.Rngs(seed))

    model, other = Model(0), Model(1)
    names = ar.NameTable({"**.kernel": "embed mlp", "**.bias": "mlp"})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(model))
        checkpointer.save(tmp_path / "pure", nnx.to_pure_dict(nnx.state(model)))
    for saved, axis_types in (("state", "explicit"), ("pure", "mixed")):
        restored = restore(tmp_path / saved, names=names, target=other, axis_types=axis_types)
        assert isinstance(restored, Model)
        assert bits(restored.up.kernel[...]) == bits(model.up.kernel[...])
        mesh = mesh_of(axis_types, "data=2,model=4")
        assert restored.up.kernel[...].sharding == NamedSharding(mesh, P("data", "model"))
        assert bits(other.up.kernel[...]) != bits(model.up.kernel[...])
        state = restore(tmp_path / saved, names=names, target=nnx.state(other))
        assert bits(state["up"]["kernel"][...]) == bits(model.up.kernel[...])
        assert tuple(state["up"]["kernel"][...].sharding.spec) == ("data", "model")


@pytest.mark.parametrize("axis_types", AUTO_FIRST)
def test_equinox_modules_are_targets(tmp_path, axis_types):
    eqx = pytest.importorskip("equinox")
    model, other = (eqx.nn.Linear(8, 4, key=jax.random.key(seed)) for seed in (0, 1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", eqx.filter(model, eqx.is_array))
    names = ar.NameTable({"weight": "mlp embed", "bias": "mlp"})
    restored = restore(tmp_path / "saved", names=names, target=other, axis_types=axis_types)
    assert bits(restored.weight) == bits(model.weight)
    assert restored.weight.sharding == NamedSharding(
        mesh_of(axis_types, "data=2,model=4"), P("model", "data")
    )


def test_a_damaged_checkpoint_is_told(saved):
    (saved / "_METADATA").write_text("{")
    with pytest.raises(ar.CheckpointError, match="Orbax (cannot|finds no metadata)"):
        restore(saved)


def test_options_of_files_are_refused_for_orbax(saved):
    with pytest.raises(ar.CheckpointError, match="takes no stack="):
        checkpoints.open(saved, stack="blocks.*")
