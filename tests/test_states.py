"""Names for optimizer states: which names an array of a state keeps, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import axisrules as ar

MESH = "data=2,model=4"
RULES = {"embed": "data", "mlp": "model"}
SQUARE = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
SQUARE_NAMES = {"w": "embed mlp", "b": "mlp"}
shapes = st.lists(st.sampled_from([1, 2, 3, 3, 4, 4, 5]), max_size=4).map(tuple)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def adam(params):
    """The state of Adam, without its class."""
    return {"count": struct(dtype=jnp.int32), "mu": params, "nu": params}


def test_raw_keys_are_not_taken_for_parameters_of_their_name():
    params = {"key": struct(2), "rng_key": struct(8, 8)}
    state = {"noise": {"key": struct(2, dtype=jnp.uint32), "rng_key": struct(4, dtype=jnp.uint32)}}
    found = ar.state_names(state, params, {"key": "embed", "rng_key": "embed mlp"})
    assert found == {"noise": {"key": (None,), "rng_key": (None,)}}


def test_typed_keys_are_scalars():
    state = jax.eval_shape(lambda: {"key": jax.random.key(0), "mu": {"w": jnp.zeros(8)}})
    assert ar.state_names(state, {"w": struct(8)}, {"w": "a"}) == {"key": (), "mu": {"w": ("a",)}}


# Preconditioners and reduced moments

W = {"w": struct(8, 12)}


@pytest.mark.parametrize(
    ("param", "names", "shape", "expected"),
    [
        ((8, 12), "embed mlp", (8, 8), ("embed", None)),
        ((8, 12), "embed mlp", (12, 12), ("mlp", None)),
        ((8, 12), "_ mlp", (8, 8), (None, None)),
        ((8, 8, 12), "a _ c", (8, 8), ("a", None)),
        ((8, 8, 12), "a b c", (8, 8), (None, None)),
        ((8, 8, 8), "a b c", (8, 8), (None, None)),
        ((8,), "embed", (8, 8), ("embed", None)),
        ((8, 12), "embed mlp", (8,), ("embed",)),
        ((8, 8), "embed mlp", (8,), (None,)),
        ((8, 8, 12), "a b c", (8, 12), (None, "c")),
        ((8, 12), "embed mlp", (8, 1), ("embed", None)),
        ((8, 12), "embed mlp", (1, 1), (None, None)),
        ((8, 12), "embed mlp", (5, 8, 12), (None, "embed", "mlp")),
        ((8, 12), "embed mlp", (96,), (None,)),
        ((8, 12), "embed mlp", (), ()),
        ((), "", (4,), (None,)),
        ((8, 12), "embed ...", (8, 12), ("embed", None)),
    ],
)
def test_an_array_of_another_shape_keeps_only_names_that_are_sure(param, names, shape, expected):
    found = ar.state_names({"s": {"w": struct(*shape)}}, {"w": struct(*param)}, {"w": names})
    assert found == {"s": {"w": expected}}


def test_preconditioners_in_a_list_have_the_name_of_their_dimension():
    state = {"GG": {"w": [struct(8, 8), struct(8, 8)]}, "mu": {"w": struct(8, 8)}}
    found = ar.state_names(state, {"w": struct(8, 8)}, {"w": "embed mlp"})
    assert found == {"GG": {"w": [("embed", None), ("mlp", None)]}, "mu": {"w": ("embed", "mlp")}}


@given(param=shapes, shape=shapes)
def test_a_state_array_never_has_names_of_another_length_or_size(param, shape):
    names = tuple(f"d{dim}" for dim in range(len(param)))
    try:
        found = ar.state_names({"s": {"w": struct(*shape)}}, {"w": struct(*param)}, {"w": names})["s"]["w"]
    except ar.StateError:
        assert shape not in ((), param)
        return
    assert len(found) == len(shape)
    assert len({*found} - {None}) == len([name for name in found if name is not None])
    for size, name in zip(shape, found, strict=True):
        assert name is None or param[names.index(name)] == size


# Entries of other kinds


def test_whole_on_purpose_and_specs_are_handed_on():
    params = {"w": struct(8, 12), "x": struct(8, 12)}
    names = {"w": None, "x": P(None, "model")}
    state = {
        "mu": params,
        "v_row": {"w": struct(8), "x": struct(8)},
        "v_col": {"w": struct(12), "x": struct(12)},
    }
    assert ar.state_names(state, params, names) == {
        "mu": {"w": None, "x": P(None, "model")},
        "v_row": {"w": None, "x": P(None)},
        "v_col": {"w": None, "x": P("model")},
    }


def test_a_table_and_a_callable_name_the_parameters():
    state = adam(SQUARE)
    expected = ar.state_names(state, SQUARE, SQUARE_NAMES)
    table = ar.NameTable({"w": "embed mlp", "*": "mlp"})
    assert ar.state_names(state, SQUARE, table) == expected
    by_call = ar.state_names(state, SQUARE, lambda path, leaf: "embed mlp" if path == "w" else "mlp")
    assert by_call == expected


def test_a_tied_parameter_has_the_names_of_its_twin():
    table = np.zeros((8, 12), np.float32)
    params = {"decoder": table, "encoder": table}
    found = ar.state_names(
        {"mu": W | params}, W | params, ar.NameTable({"encoder": "vocab embed", "w": "a b"})
    )
    assert found["mu"]["decoder"] == ("vocab", "embed")


def test_a_state_with_none_and_plain_numbers_is_named():
    state = {"mu": {"w": struct(8, 12)}, "cache": None, "step": 3, "label": "adam"}
    found = ar.state_names(state, W, {"w": "a b"})
    assert found == {"mu": {"w": ("a", "b")}, "cache": None, "step": (), "label": ()}
    ar.plan(state, found, mesh=MESH, rules={"a": "data", "b": "model"})


# ZeRO


def zero(params, names, rules, axis="data", mesh=MESH, **options):
    return ar.state_names(adam(params), params, names, zero=axis, mesh=mesh, rules=rules, **options)


def test_zero_splits_the_moments_over_an_axis_that_is_free():
    found = zero({"w": struct(16, 32), "b": struct(6)}, {"w": "embed mlp", "b": "mlp"},
                 {"embed": None, "mlp": None})  # fmt: skip
    assert found["mu"]["w"] == P(None, "data")
    assert found["nu"]["b"] == P("data")
    assert found["count"] == P()


def test_zero_takes_no_axis_that_the_parameter_holds():
    found = zero({"w": struct(16, 32)}, {"w": "embed mlp"}, RULES)
    assert found["mu"]["w"] == P("data", "model")
    found = zero({"w": struct(16, 32)}, {"w": "embed mlp"}, {"embed": None, "mlp": "model"})
    assert found["mu"]["w"] == P("data", "model")


def test_zero_takes_several_axes():
    found = zero({"w": struct(16, 32)}, {"w": "embed mlp"}, {"embed": None, "mlp": None},
                 axis=("data", "model"))  # fmt: skip
    assert found["mu"]["w"] == P(None, ("data", "model"))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(P(None, "model"), P("data", "model")), (P("model"), P("model", "data")), (P(), P(None, "data")),
     (P("data"), P("data", None)), (P(("data", "model")), P(("data", "model"), None))],
)  # fmt: skip
def test_zero_splits_what_a_given_spec_leaves_whole(spec, expected):
    found = zero({"w": struct(16, 32)}, {"w": spec}, {})
    assert found["mu"]["w"] == expected


def test_zero_splits_what_is_whole_on_purpose():
    assert zero({"w": struct(16, 32)}, {"w": None}, {})["mu"]["w"] == P(None, "data")


def test_specs_of_zero_plan_as_they_are():
    params, names = {"w": struct(16, 32)}, {"w": "embed mlp"}
    state = adam(params)
    specs = ar.state_names(
        state, params, names, zero="data", mesh=MESH, rules={"embed": None, "mlp": "model"}
    )
    plan = ar.plan(state, specs, mesh=MESH, rules={"embed": "model"})
    assert plan.specs == specs


def test_zero_uses_the_active_mesh_and_rules():
    params, names = {"w": struct(16, 32)}, {"w": "embed mlp"}
    with jax.set_mesh(ar.make_mesh(MESH)), ar.map_logical_axis_names({"embed": None, "mlp": "model"}):
        found = ar.state_names(adam(params), params, names, zero="data")
    assert found["mu"]["w"] == P("data", "model")


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ar.AbsentAxisError, {"zero": "dta", "mesh": MESH, "rules": RULES}),
        (ar.NoMeshError, {"zero": "data", "rules": RULES}),
        (ar.NoRulesError, {"zero": "data", "mesh": MESH}),
        (ar.PolicyError, {"zero": 3, "mesh": MESH, "rules": RULES}),
        (ar.DivisibilityError, {"zero": "data", "mesh": "data=3", "rules": RULES, "absent": "drop"}),
        (ar.UnknownNameError, {"zero": "data", "mesh": MESH, "rules": {"mlp": None}, "unmapped": "error"}),
    ],
)
def test_zero_refuses_what_a_plan_refuses(error, options):
    with pytest.raises(error):
        ar.state_names(adam({"w": struct(16, 32)}), {"w": struct(16, 32)}, {"w": "embed mlp"}, **options)


@pytest.mark.parametrize("spec", [P("data", "data"), P("dta"), P("data", None, None), P(P.UNCONSTRAINED)])
def test_zero_refuses_a_spec_that_is_no_layout(spec):
    with pytest.raises((ar.SpecError, ar.AbsentAxisError)):
        zero({"w": struct(16, 32)}, {"w": spec}, {})


def test_zero_takes_the_policies_of_a_plan():
    found = zero({"w": struct(6, 32)}, {"w": "mlp embed"}, RULES, indivisible="next")
    assert found["mu"]["w"] == P(None, "data")


# Refusals


def refused(state, params, names, kind=ar.StateError):
    with pytest.raises(kind) as caught:
        ar.state_names(state, params, names)
    return caught.value


def test_an_array_without_a_parameter_is_refused_with_the_nearest():
    error = refused({"mu": {"blocks": {"kernal": struct(8, 12)}}}, {"blocks": {"kernel": W["w"]}}, None)
    assert error.path == "mu/blocks/kernal"
    assert error.shape == (8, 12)
    assert error.nearest == "blocks/kernel"
    assert '"_ _"' in error.fix


@pytest.mark.parametrize("shape", [(12, 8), (5, 7), (5, 5), (8, 12, 4), (2, 3, 8, 12), (7,), (4, 1)])
def test_a_shape_that_does_not_follow_from_the_parameter_is_refused(shape):
    error = refused({"mu": {"w": struct(*shape)}}, W, {"w": "embed mlp"})
    assert (error.path, error.shape, error.nearest) == ("mu/w", shape, "w")


def test_every_array_that_fails_stands_in_one_error():
    params = {"w": struct(8, 12), "b": struct(12), "n": struct(4)}
    state = {"mu": {"w": struct(3, 4), "b": struct(12), "n": struct(4), "q": struct(8, 12)}}
    error = refused(state, params, {"w": "a b", "b": "a b", "n": ("d", "d")}, ar.PlanError)
    assert [type(one) for one in error.failures] == [ar.StateError, ar.StateError, ar.RankError, ar.RankError]
    assert error.paths == ("mu/q", "mu/w", "b", "n")


def test_names_of_the_wrong_rank_are_refused_with_the_stack_hint():
    error = refused({"mu": {"w": struct(3, 8, 12)}}, {"w": struct(3, 8, 12)}, {"w": "a b"}, ar.RankError)
    assert "a stacked axis?" in error.fix
    assert error.path == "w"


def test_names_without_a_parameter_are_refused():
    refused({}, W, {"w": "a b", "x": "a"}, ar.ExtraNamesError)


def test_a_single_array_is_refused_without_a_path():
    error = refused(struct(5, 7), {"w": struct(8, 12)}, {"w": "a b"})
    assert error.nearest is None
