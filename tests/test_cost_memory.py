"""Memory per device from the plan, against what compilers gave the arguments of a step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import cost
from tests.pricing import HARDWARE, TRUTH, Adam, batch_of, model, plan_of

MEASURED = [name for name, one in TRUTH.items() if one["argument_bytes"]]
RULES = {"batch": "data", "embed": "data", "mlp": "model"}
TREE = {
    "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "down": jax.ShapeDtypeStruct((256, 64), jnp.bfloat16),
}
NAMES = {"up": "embed mlp", "down": "mlp embed"}


def plan(tree=TREE, names=NAMES, mesh="data=4,model=2", rules=RULES, **options):
    return ar.plan(tree, names, mesh=mesh, rules=rules, **options)


@pytest.mark.parametrize("name", MEASURED)
def test_the_arguments_have_the_bytes_that_the_compiler_gave_them(name):
    entry = TRUTH[name]
    found = cost.memory(plan_of(entry), Adam, batch_of(entry), hardware=HARDWARE[entry["platform"]])
    assert found.arguments == entry["argument_bytes"]


def test_memory_is_told_by_kind():
    found = cost.memory(plan(), Adam, plan({"x": np.zeros((8, 4), np.int32)}, {"x": "batch _"}))
    held = 64 * 256 // 8 * 4 + 64 * 256 // 8 * 2
    assert found.kinds == {
        "parameters": held,
        "gradients": held,
        "optimizer/m": 64 * 256 // 8 * 4 * 2,
        "optimizer/v": 64 * 256 // 8 * 4 * 2,
        "batch": 32,
    }
    assert found.bytes_per_device == sum(found.kinds.values())
    assert cost.memory(plan(), gradients=False).kinds == {"parameters": held}
    assert (found.fits, found.limit, found.free, found.smallest_mesh) == (None, None, None, None)


def test_whole_numbers_have_no_gradients_and_tied_arrays_count_once():
    shared = np.zeros((64, 64), np.float32)
    tree = {"a": shared, "b": shared, "steps": np.zeros(64, np.int32)}
    found = cost.memory(plan(tree, {"a": "embed mlp", "b": "embed mlp", "steps": "embed"}))
    assert found.kinds == {"parameters": 64 * 64 * 4 // 8 + 64, "gradients": 64 * 64 * 4 // 8}


@pytest.mark.parametrize(
    "tree", [{}, {"s": np.float32(3)}, {"n": None, "f": len, "x": np.zeros((), np.float32)}]
)
def test_trees_with_hardly_an_array_have_a_price(tree):
    found = cost.memory(plan(tree, unnamed="replicate", names=lambda path, leaf: None), Adam, hardware="v5e")
    assert found.parameters in (0, 512)


def test_an_optimizer_may_be_given_in_several_forms():
    state = jax.eval_shape(Adam.init, TREE)
    names = ar.state_names(state, TREE, NAMES)
    planned = plan(state, names)
    forms = [Adam, Adam.init, planned, planned.abstract]
    assert len({tuple(cost.memory(plan(), form).optimizer.items()) for form in forms}) == 1


def test_the_slots_of_optax_follow_their_parameters():
    optax = pytest.importorskip("optax")
    found = cost.memory(plan(), optax.adamw(1e-3))
    assert found.optimizer == {"count": 4, "mu": found.parameters, "nu": found.parameters}
    big = {
        f"layer{at}/{key}": jax.ShapeDtypeStruct((512, 256), jnp.float32) for at in range(3) for key in "ab"
    }
    factored = cost.memory(plan(big, lambda path, leaf: "embed mlp"), optax.adafactor(1e-3))
    assert factored.optimizer["v_row"] == 6 * 512 // 4 * 4
    assert factored.optimizer["v_col"] == 6 * 256 // 2 * 4


def layers(count, names="embed mlp"):
    tree = {f"layer_{at}": {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)} for at in range(count)}
    return plan(tree, {path: {"w": names} for path in tree})


def test_many_alike_arrays_are_priced_like_few():
    few, many = (cost.memory(layers(count), Adam).optimizer for count in (10, 100))
    assert many == {slot: size * 10 for slot, size in few.items()}


def test_an_optimizer_that_treats_layers_apart_is_asked_for_all_of_them():
    def init(params):
        return {"m": {key: value for key, value in params.items() if int(key.rpartition("_")[2]) >= 70}}

    assert cost.memory(layers(100), init).optimizer == {"m": 30 * 64 * 64 * 4 // 8}


def test_an_optimizer_that_fails_says_so_itself():
    with pytest.raises(ZeroDivisionError):
        cost.memory(layers(100), lambda params: 1 / 0)


def test_a_state_of_another_tree_is_refused():
    with pytest.raises(ar.StateError):
        cost.memory(plan(), lambda params: {"m": {"other": jnp.zeros((3, 3))}})


def test_a_batch_without_shardings_is_whole():
    mesh = ar.make_mesh("data=4,model=2")
    split = jax.ShapeDtypeStruct((8, 4), jnp.int8, sharding=NamedSharding(mesh, P("data")))
    assert cost.memory(plan(), batch=[split, np.zeros((8, 4), np.int8)]).batch == 8 + 32
    with pytest.raises(ar.PolicyError, match="batch holds no array"):
        cost.memory(plan(), batch="batch")
    with pytest.raises(ar.PolicyError, match="no plan"):
        cost.memory(TREE)


def test_parameters_on_the_host_take_no_device_memory():
    found = cost.memory(plan(memory_kind="pinned_host"))
    assert (found.parameters, found.host) == (0, found.gradients)


def test_what_does_not_fit_names_the_smallest_mesh_that_would():
    tree, names = model("llama3-70b")
    rules = ar.presets.fsdp_tensor_parallel()
    small = ar.plan(tree, names, mesh="data=4,model=4", rules=rules, indivisible="next")
    found = cost.memory(small, gradients=False, hardware="v5e")
    assert found.fits
    held = cost.memory(small, Adam, hardware="v5e")
    assert held.fits is False
    enough = ar.plan(tree, names, mesh=held.smallest_mesh, rules=rules, indivisible="next")
    assert cost.memory(enough, Adam, hardware="v5e").fits
    assert math.prod(held.smallest_mesh.values()) > 16
    assert "would be enough" in str(held)
    half = {axis: size // 2 for axis, size in held.smallest_mesh.items() if size > 1}
    for axis in half:
        less = ar.plan(
            tree, names, mesh={**held.smallest_mesh, axis: half[axis]}, rules=rules, indivisible="next"
        )
        assert not cost.memory(less, Adam, hardware="v5e").fits


def test_replicated_parameters_that_are_too_large_fit_no_mesh():
    tree = {"w": jax.ShapeDtypeStruct((2**17, 2**16), jnp.bfloat16)}
    found = cost.memory(plan(tree, {"w": "_ _"}), hardware="v5e")
    assert (found.fits, found.smallest_mesh) == (False, None)
    assert "no mesh of these axes is enough" in str(found)


sizes = st.sampled_from([1, 2, 4])


@given(sizes, sizes, st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), max_size=4))
def test_devices_never_hold_less_than_the_whole_and_padding_only_adds(data, other, shapes):
    tree = {f"w{at}": np.zeros(shape, np.float32) for at, shape in enumerate(shapes)}
    made = plan(tree, dict.fromkeys(tree, "embed mlp"), {"data": data, "model": other}, indivisible="next")
    plain, padded = cost.memory(made), cost.memory(made, hardware="v5e")
    assert plain.parameters * data * other >= made.nbytes
    assert plain.parameters == made.bytes_per_device
    assert padded.parameters >= plain.parameters
