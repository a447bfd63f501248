"""Names for the states of optax: every moment is called as its parameter is."""

import inspect
import itertools
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar

optax = pytest.importorskip("optax")
contrib = pytest.importorskip("optax.contrib")

MESH = "data=2,model=4"
RULES = {"embed": "data", "mlp": "model"}


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flat(tree, is_leaf=None):
    """The leaves by path."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def is_entry(node):
    """Whether a node of names is the entry of one leaf; the states themselves are named tuples."""
    if node is None or isinstance(node, P):
        return True
    return type(node) is tuple and all(part is None or isinstance(part, str) for part in node)


def named(tx, params, names, **options):
    """Shape and names of every array of the state by path."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="optax")
        state = jax.eval_shape(tx.init, params)
    return together(state, ar.state_names(state, params, names, **options))


def together(state, found):
    entries = jax.tree.structure(state).flatten_up_to(found)
    assert all(map(is_entry, entries))
    shapes = {path: leaf.shape for path, leaf in flat(state).items()}
    pairs = dict(zip(shapes, zip(shapes.values(), entries, strict=True), strict=True))
    assert all(entry is None or len(entry) == len(shape) for shape, entry in pairs.values())
    return pairs


# Every public optimizer

ARGUMENTS = {
    "clipping": 0.1, "decay": 0.9, "delta": 0.1, "eta": 0.1, "gamma": 0.1, "learning_rate": 0.1,
    "max_backtracking_steps": 3, "max_consecutive_errors": 3, "max_delta": 0.1, "max_linesearch_steps": 3,
    "max_norm": 1.0, "noise_multiplier": 0.1, "l2_norm_clip": 1.0, "step_size": 0.1, "threshold": 1.0,
    "sync_period": 2, "slow_step_size": 0.5, "seed": 0, "key": 0,
    "f": lambda *a: a[0], "step_size_fn": lambda step: 0.1, "measure": optax.tree.norm, "measure_name": "norm",
    "should_transform_fn": lambda step, **_: True, "mask": True, "freeze_mask": True,
    "param_labels": lambda tree: jax.tree.map(lambda leaf: "even" if leaf.ndim % 2 == 0 else "odd", tree),
    "measures": {"norm": optax.tree.norm, "ema": optax.ema(0.9)}, "momentum": 0.9,
}  # fmt: skip
NESTED = {
    "inner": lambda: optax.adam(0.1), "optimizer": lambda: optax.adam(0.1), "tx": lambda: optax.adam(0.1),
    "base_optimizer": lambda: optax.adam(0.1), "adv_optimizer": lambda: optax.sgd(0.1, momentum=0.9),
    "fast_optimizer": lambda: optax.adam(0.1), "opt": lambda: optax.adam(0.1),
    "transforms": lambda: {"even": optax.adam(0.1), "odd": optax.adafactor(min_dim_size_to_factor=1)},
}  # fmt: skip
OPTIONAL = ("momentum", "centered", "store_grad", "key", "seed")
NO_TRANSFORMATION = {  # public, and made by other means below, or no transformation
    "chain", "named_chain", "inject_hyperparams", "inject_stateful_hyperparams", "microbatch",
    "value_and_grad_from_state", "GradientTransformationExtraArgs", "GradientTransformation", "MultiSteps",
}  # fmt: skip


def factories():
    for module in (optax, contrib):
        for name, make in sorted(vars(module).items()):
            if name.startswith("_") or not inspect.isfunction(make) or name.endswith("_schedule"):
                continue
            returns = str(inspect.signature(make).return_annotation)
            known = "GradientTransformation" in returns and "Callable" not in returns
            if (known or name in ("monitor", "scale_by_factored_rms")) and name not in NO_TRANSFORMATION:
                yield name, make


FACTORIES = dict(factories())


def make(name):
    """The optimizer with as much state as it can have."""
    factory = FACTORIES[name]
    arguments = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.name == "momentum" and "muon" in name:
            continue
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if required and parameter.name in NESTED:
            arguments[parameter.name] = NESTED[parameter.name]()
        elif required or (parameter.name in OPTIONAL and parameter.name in ARGUMENTS):
            arguments[parameter.name] = ARGUMENTS[parameter.name]
    if "seed" in arguments and "key" in arguments:
        del arguments["seed"]  # the older spelling
    if "min_dim_size_to_factor" in inspect.signature(factory).parameters:
        arguments["min_dim_size_to_factor"] = 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return factory(**arguments)


def unique_sizes(params):
    """Names of which each stands for one size of one parameter, so that a size tells its name."""
    return {size: f"d{size}" for leaf in jax.tree.leaves(params) for size in leaf.shape}


DISTINCT = {
    "block": [{"w": struct(16, 24), "b": struct(28)}, {"w": struct(32, 36, 40)}],
    "v": {"mu": struct(44, 48, 52, 56)},
    "key": struct(60, 64),
    "s": struct(),
}


def by_size(params):
    sizes = unique_sizes(params)
    return jax.tree.map(lambda leaf: tuple(sizes[n] for n in leaf.shape), params)


UNNAMED = {
    10: "past values of L-BFGS",
    3: "coefficients",
    6: "guesses of mechanic",
    2: "a raw key",
    0: "",
    1: "",
}


@pytest.mark.parametrize("name", FACTORIES)
def test_every_optimizer_names_its_moments_as_the_parameters(name):
    sizes = unique_sizes(DISTINCT)
    for path, (shape, entry) in named(make(name), DISTINCT, by_size(DISTINCT)).items():
        if name == "flatten" and len(shape) == 1:
            assert entry == (None,)
        elif "galore" in name:
            continue  # what it projects has sizes of others; see below
        else:
            assert entry == tuple(sizes.get(n) for n in shape), path
            assert all(n in sizes or n in UNNAMED for n in shape), path


def test_enough_optimizers_are_found_and_have_a_state():
    with_moments = [
        name
        for name in FACTORIES
        if any(shape for shape, _ in named(make(name), DISTINCT, by_size(DISTINCT)).values())
    ]
    assert len(with_moments) >= 70
    assert {"adam", "adafactor", "sm3", "lbfgs", "muon", "sgd", "lion", "sophia", "mechanize"} <= {
        *with_moments
    }


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("size", [1, 8])
def test_equal_sizes_change_no_name(name, size):
    """Parameters of one size everywhere have the names that distinct sizes give."""
    factored = {"adafactor", "scale_by_factored_rms", "multi_transform", "partition"}
    if name in factored or "galore" in name:  # sizes decide there which dimension is gone; see below
        return
    same = jax.tree.map(lambda leaf: struct(*[size] * len(leaf.shape)), DISTINCT)
    names = by_size(DISTINCT)
    expected, found = (named(make(name), params, names) for params in (DISTINCT, same))
    assert expected.keys() == found.keys()
    for path, (shape, entry) in found.items():
        assert len(entry) == len(shape)
        assert entry == expected[path][1] or np.prod(shape) <= 1, path


# Adafactor

shapes = st.lists(st.sampled_from([1, 2, 3, 3, 4, 4, 5]), max_size=4).map(tuple)
AXES = AbstractMesh((1, 1, 1, 1), tuple("abcd"), axis_types=(AxisType.Explicit,) * 4)


@given(shape=shapes, smallest=st.sampled_from([1, 3, 4]), factored=st.booleans())
def test_factored_moments_keep_the_names_of_the_dimensions_that_optax_keeps(shape, smallest, factored):
    """JAX itself says which dimensions are kept: on Explicit axes a type carries its layout."""
    tx = optax.scale_by_factored_rms(factored=factored, min_dim_size_to_factor=smallest)
    names = tuple("abcd"[: len(shape)])
    layout = NamedSharding(AXES, P(*names))
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout)}
    with jax.sharding.use_abstract_mesh(AXES):
        state = jax.eval_shape(tx.init, params)
    found = ar.state_names(state, params, {"w": names})
    for field in ("v_row", "v_col", "v"):
        moment, entry = getattr(state, field)["w"], getattr(found, field)["w"]
        if moment.size > 1:
            assert entry == tuple(moment.sharding.spec)
        assert len(entry) == moment.ndim


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (4, 4, 4), (4, 3, 4), (4, 4, 3), (2, 3, 3, 2)])
def test_factored_moments_average_the_dimensions_whose_names_they_lack(shape):
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    params = {"w": jnp.zeros(shape)}
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}
    state = tx.update(grads, tx.init(params), params)[1]
    names = tuple("abcd"[: len(shape)])
    found = ar.state_names(state, params, {"w": names})
    for field in ("v_row", "v_col"):
        gone = tuple(dim for dim, name in enumerate(names) if name not in getattr(found, field)["w"])
        averages = (np.asarray(grads["w"]) ** 2).mean(gone)
        np.testing.assert_allclose(getattr(state, field)["w"], averages, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((16, 24), ("a",), ("b",)),
        ((24, 16), ("b",), ("a",)),
        ((16, 16), ("a",), ("b",)),
        ((16, 16, 16), ("a", "b"), ("a", "c")),
        ((4, 16, 16), ("a", "b"), ("a", "c")),
        ((16, 4, 16), ("a", "b"), ("b", "c")),
        ((16, 16, 4), ("a", "c"), ("b", "c")),
        ((16, 8, 8, 32), ("a", "b", "c"), ("b", "c", "d")),
    ],
)
def test_square_and_cubic_parameters_are_told_apart_by_the_field(shape, rows, columns):
    params, names = {"w": struct(*shape)}, {"w": tuple("abcd"[: len(shape)])}
    found = named(optax.adafactor(0.1, min_dim_size_to_factor=1), params, names)
    assert found["0/v_row/w"][1], found["0/v_col/w"][1] == (rows, columns)
    assert (found["0/v_row/w"][1], found["0/v_col/w"][1]) == (rows, columns)
    assert found["0/v/w"] == ((1,), (None,))


def test_a_parameter_that_is_too_small_to_factor_keeps_its_whole_moment():
    found = named(optax.adafactor(0.1), {"w": struct(16, 24)}, {"w": "embed mlp"})
    assert found["0/v/w"] == ((16, 24), ("embed", "mlp"))
    assert found["0/v_row/w"] == ((1,), (None,))


# Wrappers, and parameters that are called like the fields of a state

keys = st.sampled_from(["w", "b", "mu", "nu", "v", "0", "key", "inner_state", "count"])


@st.composite
def param_trees(draw):
    """Parameters of which no two dimensions have one size."""
    sizes = itertools.count(11)
    leaf = st.integers(0, 3).map(lambda rank: ("leaf", rank))
    node = st.recursive(
        leaf,
        lambda below: (
            st.dictionaries(keys, below, min_size=1, max_size=3) | st.lists(below, min_size=1, max_size=3)
        ),
        max_leaves=6,
    )

    def build(part):
        if isinstance(part, tuple):
            return struct(*[next(sizes) for _ in range(part[1])])
        if isinstance(part, list):
            return [build(below) for below in part]
        return {key: build(below) for key, below in part.items()}

    return build(draw(node))


@st.composite
def optimizers(draw, params):
    base = st.sampled_from([
        lambda: optax.adam(0.1), lambda: optax.sgd(0.1, momentum=0.9), lambda: optax.ema(0.9),
        lambda: optax.amsgrad(0.1), lambda: optax.sm3(0.1), lambda: optax.novograd(0.1),
        lambda: optax.adan(0.1), lambda: optax.lbfgs(memory_size=4), lambda: optax.add_noise(0.1, 0.1, 0),
        lambda: optax.inject_hyperparams(optax.adamw)(0.1, b1=lambda step: 0.9),
    ])  # fmt: skip
    leaves, treedef = jax.tree.flatten(params)

    def masked(tx):
        kept = draw(st.lists(st.booleans(), min_size=len(leaves), max_size=len(leaves)))
        return optax.masked(tx, treedef.unflatten(kept))

    def parted(tx):
        labels = draw(st.lists(st.sampled_from("ab"), min_size=len(leaves), max_size=len(leaves)))
        return optax.multi_transform({"a": tx, "b": optax.rmsprop(0.1)}, treedef.unflatten(labels))

    tx = draw(base)()
    for wrap in draw(st.lists(st.sampled_from(["chain", "masked", "parted", "steps", "finite"]), max_size=3)):
        if wrap == "chain":
            tx = optax.chain(optax.clip(1.0), tx, optax.trace(0.9))
        elif wrap == "masked":
            tx = masked(tx)
        elif wrap == "parted":
            tx = parted(tx)
        elif wrap == "steps":
            tx = optax.MultiSteps(tx, 2).gradient_transformation()
        else:
            tx = optax.apply_if_finite(tx, 3)
    return tx


@hypothesis.settings(max_examples=min(200, hypothesis.settings.default.max_examples))
@given(st.data())
def test_wrapped_moments_follow_their_parameter_whatever_it_is_called(data):
    params = data.draw(param_trees())
    tx = data.draw(optimizers(params))
    names, sizes = by_size(params), unique_sizes(params)
    try:
        expected = named(tx, params, names)
    except IndexError:  # optax's L-BFGS needs a parameter that is not masked
        hypothesis.assume(False)
    for path, (shape, entry) in expected.items():
        assert entry == tuple(sizes.get(n) for n in shape), path
    same = jax.tree.map(lambda leaf: struct(*[8] * len(leaf.shape)), params)
    found = named(tx, same, names)  # now the paths alone tell the parameters apart
    assert {path: entry for path, (_, entry) in found.items()} == {p: e for p, (_, e) in expected.items()}


def test_a_parameter_that_is_called_like_a_field_takes_nothing_from_others():
    params = {"v": {"w": struct(8, 8)}, "w": struct(8, 8), "mu": {"mu": {"w": struct(8, 8)}}}
    names = {"v": {"w": "a b"}, "w": "c d", "mu": {"mu": {"w": "e f"}}}
    found = named(optax.adan(0.1), params, names)
    assert found["0/v/w"][1] == ("c", "d")
    assert found["0/v/v/w"][1] == ("a", "b")
    found = named(optax.adam(0.1), params, names)
    assert (found["0/mu/w"][1], found["0/mu/mu/mu/w"][1]) == (("c", "d"), ("e", "f"))


def test_a_mask_hides_no_parameter_from_the_search():
    params = {"mu": {"w": struct(8, 8)}, "w": struct(8, 8)}
    tx = optax.masked(optax.adam(0.1), {"mu": {"w": False}, "w": True})
    found = named(tx, params, {"mu": {"w": "a b"}, "w": "c d"})
    assert found["inner_state/0/mu/w"][1] == ("c", "d")


def test_the_longest_path_wins():
    params = {"w": struct(8, 8), "a": {"w": struct(8, 8)}}
    found = named(optax.adam(0.1), params, {"w": "a b", "a": {"w": "c d"}})
    assert (found["0/mu/w"][1], found["0/mu/a/w"][1]) == (("a", "b"), ("c", "d"))


# Single optimizers

SQUARE = {"w": struct(8, 8), "b": struct(8)}
SQUARE_NAMES = {"w": "embed mlp", "b": "mlp"}


def test_sm3_accumulators_have_the_name_of_their_dimension():
    found = named(optax.sm3(0.1), SQUARE, SQUARE_NAMES)
    assert [found[f"0/mu/w/{dim}"][1] for dim in (0, 1)] == [("embed",), ("mlp",)]
    assert found["0/mu/b/0"][1] == ("mlp",)


@pytest.mark.parametrize("params", [[struct(8, 8), struct(8)], struct(8, 8), (struct(8, 8),)])
def test_lists_and_single_arrays_are_parameters_too(params):
    names = jax.tree.map(lambda leaf: ("embed", "mlp")[-len(leaf.shape) :], params)
    for tx in (optax.adam(0.1), optax.sm3(0.1), optax.lbfgs(memory_size=3), optax.adafactor(0.1)):
        for shape, entry in named(tx, params, names).values():
            expected = {(): {()}, (1,): {(None,)}, (3,): {(None,)}, (8, 8): {("embed", "mlp")}}
            expected |= {(8,): {("embed",), ("mlp",)}, (3, 8): {(None, "mlp")}}
            expected |= {(3, 8, 8): {(None, "embed", "mlp")}}
            assert entry in expected[shape]
    found = named(optax.sm3(0.1), params, names)
    mu = [entry for path, (_, entry) in found.items() if "mu" in path]
    assert mu[:2] == [("embed",), ("mlp",)]


def test_memories_of_lbfgs_have_one_more_dimension():
    found = named(optax.lbfgs(memory_size=8), SQUARE, SQUARE_NAMES)
    assert found["0/diff_params_memory/w"] == ((8, 8, 8), (None, "embed", "mlp"))
    assert found["0/diff_updates_memory/b"] == ((8, 8), (None, "mlp"))
    assert found["0/weights_memory"] == ((8,), (None,))


def test_muon_parts_its_parameters():
    found = named(contrib.muon(0.1), SQUARE, SQUARE_NAMES)
    assert found["inner_states/muon/inner_state/0/mu/w"][1] == ("embed", "mlp")
    assert found["inner_states/adam/inner_state/0/nu/b"][1] == ("mlp",)
    assert found["inner_states/muon/inner_state/0/ns_coeffs"][1] == (None,)


def test_guesses_of_mechanic_are_not_taken_for_parameters_of_their_name():
    params = {"v": struct(6), "m": struct(6, 6)}
    found = named(contrib.mechanize(optax.sgd(0.1, momentum=0.9)), params, {"v": "a", "m": "b c"})
    assert found["v"] == ((6,), (None,))
    assert found["x0/v"][1] == ("a",)
    assert found["base_optimizer_state/0/trace/m"][1] == ("b", "c")


@pytest.mark.parametrize(
    ("shape", "moment", "projector"),
    [
        ((12, 8), (None, "mlp"), ("embed", None)),
        ((8, 12), ("embed", None), ("mlp", None)),
        ((8, 8), (None, "mlp"), ("embed", None)),
    ],
)
@pytest.mark.parametrize("rank", [4, 128])
def test_galore_keeps_the_dimension_that_it_does_not_project(shape, moment, projector, rank):
    tx = contrib.galore(0.1, rank=rank)
    found = named(tx, {"w": struct(*shape), "b": struct(8)}, {"w": "embed mlp", "b": "mlp"})
    assert found["0/base_optimizer_state/mu/w"][1] == moment
    assert found["0/projector/w"][1] == projector
    assert found["0/base_optimizer_state/nu/b"][1] == ("mlp",)
    assert found["0/projector/b"] == ((0, 0), (None, None))


def test_galore_on_made_up_matrices_leaves_the_moments_unnamed():
    numbers = (
        contrib.GaLoreDimensionNumbers(0, (1, 2)) if hasattr(contrib, "GaLoreDimensionNumbers") else None
    )
    if numbers is None:
        pytest.skip("this optax has no dimension numbers of GaLore")
    tx = contrib.galore(0.1, rank=4, weight_dimension_numbers=numbers)
    found = named(tx, {"w": struct(8, 4, 6)}, {"w": "embed heads head_dim"})
    assert found["0/base_optimizer_state/mu/w"] == ((8, 4), (None, None))


def test_complex_parameters_name_both_halves():
    tx = contrib.split_real_and_imaginary(optax.adam(0.1))
    found = named(tx, {"w": struct(8, 8, dtype=jnp.complex64)}, {"w": "embed mlp"})
    assert found["inner_state/0/mu/w/real"][1] == found["inner_state/0/nu/w/imaginary"][1] == ("embed", "mlp")


def test_lookahead_takes_its_pair_of_parameters():
    params = optax.LookaheadParams.init_synced(SQUARE)
    state = jax.eval_shape(optax.lookahead(optax.adam(0.1), 2, 0.5).init, params)
    found = ar.state_names(state, params, optax.LookaheadParams.init_synced(SQUARE_NAMES))
    assert found.fast_state[0].mu == {"w": ("embed", "mlp"), "b": ("mlp",)}


def test_hyperparameters_and_measurements_need_no_names():
    tx = optax.chain(
        optax.inject_hyperparams(contrib.scale_by_muon)(ns_coeffs=jnp.ones(3)),
        optax.snapshot("rows", lambda tree: tree["w"].sum(0)),
        optax.snapshot("all", lambda tree: tree),
    )
    found = named(tx, SQUARE, SQUARE_NAMES)
    assert found["0/hyperparams/ns_coeffs"] == ((3,), (None,))
    assert found["1/measurement/rows"] == ((8,), (None,))
    assert found["2/measurement/all/w"][1] == ("embed", "mlp")


def test_a_flat_state_is_unnamed():
    found = named(optax.flatten(optax.adam(0.1)), SQUARE, SQUARE_NAMES)
    assert found["0/mu"] == ((72,), (None,))


def test_empty_states_have_no_names():
    for tx in (optax.sgd(0.1), optax.identity(), optax.chain(optax.clip(1.0), optax.scale(0.1))):
        state = tx.init({"w": jnp.zeros((8, 8))})
        assert ar.state_names(state, SQUARE, SQUARE_NAMES) == state
    assert ar.state_names((), {}, {}) == ()
    assert ar.state_names(optax.adam(0.1).init({}), {}, {})[0].count == ()


# Plans


def planned(tx, params, names, rules=RULES, mesh=MESH, **options):
    state = jax.eval_shape(tx.init, params)
    found = ar.state_names(state, params, names)
    plan = ar.plan(state, found, mesh=mesh, rules=rules, **options)
    return {placement.path: placement.spec for placement in plan.placements}


def test_a_plan_of_the_state_lies_as_the_parameters():
    found = planned(optax.adam(0.1), {"w": struct(16, 32)}, {"w": "embed mlp"})
    assert found == {"0/count": P(), "0/mu/w": P("data", "model"), "0/nu/w": P("data", "model")}


def test_stacked_parameters_stack_their_moments():
    rules = {"layers": None, **RULES}
    params = {"blocks": {"kernel": struct(3, 8, 8)}}
    found = planned(optax.adam(0.1), params, {"blocks": {"kernel": "layers embed mlp"}}, rules)
    assert found["0/mu/blocks/kernel"] == found["0/nu/blocks/kernel"] == P(None, "data", "model")


def test_the_optimizer_may_have_rules_of_its_own():
    found = planned(optax.adam(0.1), {"w": struct(8, 8)}, {"w": "embed mlp"}, RULES)
    whole = planned(optax.adam(0.1), {"w": struct(8, 8)}, {"w": "embed mlp"}, {"embed": None, "mlp": None})
    assert (found["0/mu/w"], whole["0/mu/w"]) == (P("data", "model"), P(None, None))


def test_a_state_is_placed_as_its_names_say(axis_types):
    params = {"w": np.ones((16, 32), np.float32)}
    state = optax.adafactor(0.1, min_dim_size_to_factor=8, momentum=0.9).init(params)
    names = ar.state_names(state, params, {"w": "embed mlp"})
    placed = flat(ar.shard_tree(state, names, mesh=mesh_of(axis_types, MESH), rules=RULES))
    assert placed["0/v_row/w"].sharding.spec == P("data")
    assert placed["0/v_col/w"].sharding.spec == P("model")
    assert {s.data.shape for s in placed["4/ema/w"].addressable_shards} == {(8, 8)}


# ZeRO


def zero(tx, params, names, rules):
    return named(tx, params, names, zero="data", mesh=MESH, rules=rules)


def test_zero_leaves_what_cannot_be_split_and_what_has_no_parameter():
    params = {"odd": struct(7, 5), "w": struct(2, 2), "s": struct(), "b": struct(2)}
    names = {"odd": "_ _", "w": "_ _", "s": "", "b": "_"}
    tx = optax.chain(contrib.scale_by_muon(ns_coeffs=((1.0, 1.0, 1.0),) * 2), optax.add_noise(0.1, 0.1, 0))
    found = zero(tx, params, names, {})
    assert found["0/mu/odd"][1] == P(None, None)
    assert found["0/mu/w"][1] == P("data", None)
    assert found["0/mu/b"][1] == P("data")
    assert found["0/ns_coeffs"] == ((2, 3), P(None, None))
    raw = ar.state_names({"rng_key": struct(2, dtype=jnp.uint32)}, {}, {}, zero="data", mesh=MESH, rules={})
    assert raw == {"rng_key": P(None)}


def test_zero_splits_factored_moments_and_memories():
    found = zero(optax.adafactor(0.1, min_dim_size_to_factor=8), {"w": struct(16, 32)}, {"w": "embed mlp"},
                 {"embed": None, "mlp": "model"})  # fmt: skip
    assert (found["0/v_row/w"][1], found["0/v_col/w"][1]) == (P("data"), P("model"))
    assert found["0/v/w"][1] == P(None)
    found = zero(optax.lbfgs(memory_size=4), {"w": struct(3)}, {"w": "_"}, {})
    assert found["0/diff_params_memory/w"][1] == P("data", None)
    assert found["0/weights_memory"][1] == P(None)


# Frameworks


def refused(state, params, names, kind):
    with pytest.raises(kind) as caught:
        ar.state_names(state, params, names)
    return caught.value


def test_parameters_without_names_are_listed_where_the_state_needs_them():
    params = {"w": struct(8, 12), "b": struct(12), "frozen": struct(4)}
    tx = optax.masked(optax.adam(0.1), {"w": True, "b": True, "frozen": False})
    state = jax.eval_shape(tx.init, params)
    error = refused(state, params, None, ar.MissingNamesError)
    assert error.paths == ("b", "w")
    table = ar.NameTable({"w": "embed mlp", "b": "mlp"})
    assert ar.state_names(state, params, table).inner_state[0].mu["w"] == ("embed", "mlp")


@pytest.fixture
def nnx_model():
    nnx = pytest.importorskip("flax.nnx")
    axisrules_flax = pytest.importorskip("axisrules_flax")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = axisrules_flax.named(nnx.Linear, "embed mlp")(8, 16, rngs=rngs)
            self.layers = nnx.List([axisrules_flax.named(nnx.Linear, "mlp embed")(16, 16, rngs=rngs)])
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    return Model(nnx.Rngs(0))


NNX_SPECS = {"up/kernel": P("data", "model"), "up/bias": P("model"), "layers/0/kernel": P("model", "data"),
             "layers/0/bias": P("data"), "norm/scale": P(None), "norm/bias": P(None)}  # fmt: skip
NNX_NAMES = ar.NameTable({
    "up/kernel": "embed mlp", "up/bias": "mlp", "layers/*/kernel": "mlp embed", "layers/*/bias": "embed",
    "norm/*": "_",
}, optional=["norm/*"])  # fmt: skip


@pytest.mark.parametrize("form", ["optimizer", "state of it", "tuple of states"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_moments_of_an_nnx_model_follow_it(nnx_model, form, whole):
    from flax import nnx

    tx = optax.adam(0.1)
    optimizer = nnx.Optimizer(nnx_model, tx, wrt=nnx.Param)
    states = {"optimizer": optimizer, "state of it": nnx.state(optimizer)}
    state = states.get(form) or tx.init(nnx.state(nnx_model, nnx.Param))
    params = nnx_model if whole else nnx.state(nnx_model, nnx.Param)
    names = ar.state_names(state, params, NNX_NAMES)
    plan = ar.plan(state, names, mesh=MESH, rules=RULES)
    found = {placement.path: placement.spec for placement in plan.placements}
    prefix = "0" if form == "tuple of states" else "opt_state/0"
    for path, spec in NNX_SPECS.items():
        assert found[f"{prefix}/mu/{path}"] == found[f"{prefix}/nu/{path}"] == spec
    for mesh in (mesh_of(axis_types, MESH) for axis_types in AXIS_TYPES):
        placed = ar.shard_tree(state, names, mesh=mesh, rules=RULES)
        assert type(placed) is type(state)
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(placed))
    split = ar.state_names(
        state, params, NNX_NAMES, zero="data", mesh=MESH, rules={"embed": None, "mlp": "model"}
    )
    specs = {p.path: p.spec for p in ar.plan(state, split, mesh=MESH, rules={}).placements}
    assert specs[f"{prefix}/mu/up/kernel"] == P("data", "model")
    assert specs[f"{prefix}/mu/norm/scale"] == P("data")


def test_a_model_that_carries_its_names_needs_no_others(nnx_model):
    from flax import nnx

    params = nnx.state(nnx_model, nnx.Param)
    del params["norm"]
    names = ar.state_names(optax.adam(0.1).init(params), nnx_model)
    assert names["0"]["mu"]["up"] == {"kernel": ("embed", "mlp"), "bias": ("mlp",)}


@pytest.mark.parametrize("whole", [True, False])
def test_the_moments_of_an_equinox_model_follow_it(whole):
    eqx = pytest.importorskip("equinox")
    axisrules_equinox = pytest.importorskip("axisrules_equinox")
    model = eqx.nn.MLP(8, 8, 16, 1, use_final_bias=False, key=jax.random.key(0))
    arrays = eqx.filter(model, eqx.is_array)
    state = optax.adam(0.1).init(arrays)
    params = model if whole else arrays
    table = ar.NameTable(
        {"layers/0/weight": "mlp embed", "layers/1/weight": "embed mlp", "layers/0/bias": "mlp"}
    )
    names = ar.state_names(state, params, table)
    plan = ar.plan(state, names, mesh=MESH, rules=RULES)
    found = {placement.path: placement.spec for placement in plan.placements}
    assert found["0/mu/layers/0/weight"] == P("model", "data")
    assert found["0/nu/layers/1/weight"] == P("data", "model")
    assert found["0/nu/layers/0/bias"] == P("model")
    for mesh in (mesh_of(axis_types, MESH) for axis_types in AXIS_TYPES):
        placed = ar.shard_tree(state, names, mesh=mesh, rules=RULES)
        assert jax.tree.structure(placed) == jax.tree.structure(state)
        assert placed[0].mu.layers[0].weight.sharding == NamedSharding(mesh, P("model", "data"))
    linear = axisrules_equinox.named(
        eqx.nn.Linear(8, 16, key=jax.random.key(0)), weight="mlp embed", bias="mlp"
    )
    own = ar.state_names(optax.sgd(0.1, momentum=0.9).init(eqx.filter(linear, eqx.is_array)), linear)
    assert own == {"0": {"trace": {"weight": ("mlp", "embed"), "bias": ("mlp",)}}}
