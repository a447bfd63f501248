"""Inputs at the edges of prices: odd modules, odd trees, steps of every form, and wrong arguments."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import cost, presets
from tests.pricing import Adam, entry_of, model, plan_of
from tests.test_cost_collectives import LOOP, START, WHILE, module

MESH = "data=4,model=2"
RULES = {"batch": "data", "embed": "data", "mlp": "model"}
SHAPE = jax.ShapeDtypeStruct
TREE = {"up": SHAPE((64, 256), jnp.float32), "scale": SHAPE((256,), jnp.bfloat16)}
NAMES = {"up": "embed mlp", "scale": "mlp"}


def plan(tree=TREE, names=NAMES, mesh=MESH, rules=RULES, **options):
    return ar.plan(tree, names, mesh=mesh, rules=rules, **options)


def read(text, mesh="data=4,model=4"):
    return cost.collectives(text, mesh)


# Modules. Each runs on 16 devices; an f32[16,8] has 512 bytes.


@pytest.mark.parametrize("pairs", ["{{0,4},{4,8}}", "{ {0, 4}, {4, 8} }", "{{0,4},{4,8},{1,1}}"])
def test_pairs_of_a_permute_are_read_with_or_without_spaces(pairs):
    found = read(module(f"f32[16,8]{{1,0}} collective-permute(%p), source_target_pairs={pairs}"))
    assert found.wire_bytes_per_axis == {"data": 512 * 2 / 16}


@pytest.mark.parametrize(
    "pairs", ["", ", source_target_pairs={{0,1,2}}", ", source_target_pairs={{0,99}}", ", source_target_pairs=[[0,1]]"]
)  # fmt: skip
def test_a_permute_without_readable_pairs_is_listed(pairs):
    found = read(module(f"f32[16,8]{{1,0}} collective-permute(%p){pairs}"))
    assert "groups of devices are not readable" in found.not_understood[0]


INNER = """
%inner (a: f32[16,8]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  ROOT %x = f32[16,8]{1,0} all-reduce(%a), channel_id=4, replica_groups=[4,4]<=[16], to_apply=%add
}
%idle (a: f32[16,8]) -> f32[16,8] {
  ROOT %a = f32[16,8]{1,0} parameter(0)
}
"""


@pytest.mark.parametrize(
    "instruction",
    ['custom-call(%p), custom_call_target="x", called_computations={%inner}', "map(%p), to_apply=%inner", "new-loop(%p), body=%inner"],
)  # fmt: skip
def test_collectives_that_nothing_is_known_to_run_are_listed(instruction):
    found = read(module(f"f32[16,8]{{1,0}} {instruction}", INNER))
    assert found.not_understood == ("computation inner: it has collectives, and nothing runs it",)


@pytest.mark.parametrize(
    ("branches", "notes"), [("{%inner, %idle}", 1), ("{%inner, %inner}", 0), ("{%idle, %idle}", 0)]
)
def test_a_branch_is_doubtful_only_where_branches_differ(branches, notes):
    text = module(f"f32[16,8]{{1,0}} conditional(%b, %p, %p), branch_computations={branches}", INNER)
    found = read(text)
    assert len([one for one in found.not_understood if "which branch" in one]) == notes


def test_computations_may_have_any_name_and_no_percent_signs():
    text = module(WHILE, LOOP.format(limit=5, step=1, direction="LT"), START.format(start=0))
    expected = {"model": 5 * 2 * 3 / 4 * 512}
    for old, new in (("body", "region_3.17_spmd.clone"), ("cond", "while_condition__.1")):
        text = text.replace(f"%{old}", f"%{new}")
    assert read(text).wire_bytes_per_axis == expected
    assert read(text.replace("%", "")).wire_bytes_per_axis == expected


ASYNC = """
%wrapped (a: f32[16,8]) -> f32[4,8] {
  %a = f32[16,8]{1,0} parameter(0)
  ROOT %rs = f32[4,8]{1,0} reduce-scatter(%a), channel_id=3, replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}
}
"""


@pytest.mark.parametrize("calls", [", calls=%wrapped", ""])
def test_what_is_wrapped_in_a_start_and_a_done_counts_once(calls):
    start = "  %s = ((f32[16,8]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%p), calls=%wrapped\n"
    start += f"  %u = ((f32[16,8]{{1,0}}), f32[4,8]{{1,0}}, u32[]) async-update(%s){calls}\n"
    found = read(module(f"f32[4,8]{{1,0}} async-done(%u){calls}", ASYNC, start))
    assert (found.wire_bytes_per_axis, found.not_understood) == ({"data": 384}, ())


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s2", 2), ("u4", 4), ("f8e4m3b11fnuz", 8), ("f8e8m0fnu", 8), ("f4e2m1fn", 4), ("c128", 128)],
)  # fmt: skip
def test_every_element_type_has_its_bits(dtype, bits):
    found = read(module(f"{dtype}[16,8]{{1,0:T(8,128)}} all-reduce(%p), replica_groups=[4,4]<=[16]"))
    assert found.wire_bytes_per_axis == {"model": 2 * 3 / 4 * 128 * bits / 8}


@pytest.mark.parametrize("kind", ["collective-broadcast", "ragged-all-to-all", "all-to-all"])
def test_rarer_kinds_count_what_leaves_a_device(kind):
    found = read(module(f"f32[16,8]{{1,0}} {kind}(%p), replica_groups=[4,4]<=[4,4]T(1,0)"))
    assert found.wire_bytes_per_axis == {"data": 384}


@pytest.mark.parametrize(
    "text", ["builtin.module {\n}", '"builtin.module"() ({\n}) : () -> ()', "#map = affine_map<(d0) -> (d0)>"]
)
def test_programs_in_other_forms_are_told_for_what_they_are(text):
    with pytest.raises(ar.PolicyError, match="this is StableHLO"):
        read(text)


@pytest.mark.parametrize("mesh", ["data=4,model=2", {"data": 3}, "data=32", {"a": 2, "b": 2, "c": 2}])
def test_a_mesh_of_another_number_of_devices_is_refused(mesh):
    with pytest.raises(ar.MeshError, match="and the module was compiled for 16"):
        read(module("f32[16,8]{1,0} all-reduce(%p), replica_groups={}"), mesh)


# Plans.


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("layout", ["dp", "tp", "fsdp", "fsdp_tp", "bad", "tp_sp"])
@pytest.mark.parametrize("sizes", [(4, 4), (16, 1), (2, 8)])
def test_axes_of_one_device_and_the_order_of_axes_change_no_traffic(layout, scan, sizes):
    mesh = dict(zip(("data", "model"), sizes, strict=True))
    found = cost.traffic(plan_of(entry_of(layout, mesh, scan)))
    one_more = [{"one": 1, **mesh}, {**mesh, "one": 1}, {"data": sizes[0], "one": 1, "model": sizes[1]}]
    for other in (*one_more, dict(reversed(mesh.items()))):
        again = cost.traffic(plan_of(entry_of(layout, other, scan)))
        assert again.wire_bytes_per_axis == found.wire_bytes_per_axis
        assert (again.wire_bytes, again.declined) == (found.wire_bytes, found.declined)
        assert set(again.reasons) == set(found.reasons)


def test_beside_an_idle_axis_the_least_time_is_that_of_an_even_spread():
    made = plan_of(entry_of("fsdp", {"data": 4, "model": 4}))
    found = cost.traffic(made, hardware="TPU v5e")
    assert found.declined
    assert found.seconds == pytest.approx(found.wire_bytes / 90e9)
    assert cost.traffic(made, hardware="TPU7x").seconds is None


def experts(layers=None):
    """Two kinds of kernels side by side for eight experts, beside attention."""
    shapes = {
        "wi": ((8, 64, 128), "exp embed mlp"),
        "wo": ((8, 128, 64), "exp mlp embed"),
        "q": ((64, 32), "embed heads"),
        "o": ((32, 64), "heads embed"),
        "norm": ((64,), "norm"),
    }
    tree, names = {}, {}
    for key, (shape, words) in shapes.items():
        if layers is None:
            tree[f"layers/{key}"], names[f"layers/{key}"] = SHAPE((4, *shape), jnp.float32), f"layers {words}"
        for at in range(layers or 0):
            tree[f"layer_{at}/{key}"], names[f"layer_{at}/{key}"] = SHAPE(shape, jnp.float32), words
    return tree, names


@pytest.mark.parametrize("layers", [None, 4], ids=["stacked", "unrolled"])
@pytest.mark.parametrize("rename", [str, lambda word: f"z{word[::-1]}"], ids=["", "renamed"])
def test_experts_are_no_stacked_layers(layers, rename):
    tree, names = experts(layers)
    names = {path: " ".join(map(rename, words.split())) for path, words in names.items()}

    def reasons(**axes):
        rules = [(rename(name), axis) for name, axis in axes.items()] + [("batch", "data")]
        return cost.traffic(plan(tree, names, rules=rules, unmapped="replicate"))

    over_batch = reasons(exp="data")
    assert f"{rename('exp')!r}, the axis of experts" in over_batch.reasons["data"]
    assert over_batch.declined
    beside = reasons(exp="model")
    assert not beside.declined
    assert "activations" in beside.reasons["model"]
    if layers is None:
        assert "the axis of stacked layers" in reasons(layers="data").reasons["data"]


def test_no_preset_for_experts_is_better_than_what_is_proposed():
    tree, names = experts(4)
    found = cost.suggest(tree, names, "data=2,model=2,expert=2", hardware="v5e", time_limit=2.0)
    labels = [label for label in found.presets if label.startswith("expert_parallel")]
    assert labels
    assert not any(score.beats(found.score) for score in found.presets.values())


# Memory.


@pytest.mark.parametrize(
    ("dtype", "plain", "padded"),
    [("bool", 2048, 4096), ("int4", 2048, 2048), ("uint2", 2048, 1024), ("complex64", 16384, 16384)],
)
def test_arrays_of_any_dtype_have_a_price(dtype, plain, padded):
    made = plan({"w": SHAPE((64, 256), jnp.dtype(dtype))}, {"w": "embed mlp"})
    assert cost.memory(made, gradients=False).parameters == plain
    shard = cost.array_bytes((16, 128), dtype, "v5e")
    assert cost.memory(made, gradients=False, hardware="v5e").parameters == shard <= padded


def test_a_tree_of_nothing_costs_nothing():
    for tree in ({}, None, {"n": None, "word": "x"}, {"z": SHAPE((0, 8), jnp.float32)}):
        made = ar.plan(tree, lambda path, leaf: "embed mlp", mesh=MESH, rules=RULES)
        assert cost.memory(made, Adam, hardware="v5e").bytes_per_device == 0
        assert cost.traffic(made).wire_bytes == 0


def test_a_batch_may_be_uneven():
    rows = {"x": SHAPE((6, 4), jnp.int32, sharding=NamedSharding(abstract(4, 2), P("data")))}
    assert cost.memory(plan(), batch=rows).batch == 2 * 4 * 4
    assert cost.memory(plan(), batch={"x": SHAPE((6, 4), jnp.int32)}).batch == 6 * 4 * 4


def abstract(*sizes, axes=("data", "model")):
    return AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize("mesh", [abstract(2, 4), abstract(3, axes=("rows",)), abstract(8, axes=("data",))])
def test_what_lies_on_another_mesh_is_refused(mesh):
    rows = {"x": SHAPE((24, 4), jnp.int32, sharding=NamedSharding(mesh, P(mesh.axis_names[0])))}
    with pytest.raises(ar.MeshError, match="the batch lies on"):
        cost.memory(plan(), batch=rows)
    with pytest.raises(ar.MeshError, match="the optimizer's state lies on"):
        cost.memory(plan(), rows)
    other = ar.plan(
        TREE, NAMES, mesh=mesh, rules={"embed": mesh.axis_names[0], "mlp": None}, indivisible="next"
    )
    with pytest.raises(ar.MeshError):
        cost.memory(plan(), other)


def test_a_state_without_shardings_follows_the_parameters():
    state = jax.eval_shape(Adam.init, TREE)
    assert cost.memory(plan(), state).optimizer == cost.memory(plan(), Adam).optimizer
    real = Adam.init({key: jnp.zeros(one.shape, one.dtype) for key, one in TREE.items()})
    assert cost.memory(plan(), real).optimizer == cost.memory(plan(), Adam).optimizer
    with pytest.raises(ar.StateError):
        cost.memory(plan(), {"m": {"other": SHAPE((3, 3), jnp.float32)}})


@pytest.mark.parametrize("given", ["adamw", 3, ["adamw"], {"m": 3}])
def test_what_is_no_optimizer_is_refused(given):
    with pytest.raises(ar.PolicyError, match="is no optimizer"):
        cost.memory(plan(), given)
    assert cost.memory(plan(), {}).optimizer == {}


def test_the_states_of_optax_have_their_bytes():
    optax = pytest.importorskip("optax")
    held = 64 * 256 // 8 * 4 + 128 * 2
    made = optax.MultiSteps(optax.chain(optax.clip(1.0), optax.adam(1e-3)), 4)
    found = cost.memory(plan(), made).optimizer
    assert (found["mu"], found["nu"]) == (held, held)
    assert found["acc_grads"] >= held
    state = jax.eval_shape(made.init, TREE)
    assert cost.memory(plan(), state).optimizer == found


@pytest.mark.parametrize("hardware", ["TPU v5p", "v6e", "v4"])
def test_padding_that_was_read_off_another_chip_is_said_to_be_assumed(hardware):
    chip = cost.hardware(hardware)
    assert f"assumed for {chip.name} too" in cost.memory(plan(), hardware=hardware).source
    assert "assumed" not in cost.memory(plan(), hardware="v5e").source
    assert "tile" not in cost.memory(plan(), hardware="H100").source


@pytest.mark.parametrize("dtype", [None, "", "bf16", "S3", object, "datetime64[s]", jax.dtypes.float0])
def test_what_no_array_can_hold_is_no_dtype(dtype):
    with pytest.raises(ar.LeafError, match="is no dtype of an array"):
        cost.array_bytes((4, 4), dtype, "v5e")


# Steps.


def rows(mesh=MESH):
    return plan({"x": SHAPE((32, 64), jnp.float32)}, {"x": "batch _"}, mesh=mesh).abstract


def step(params, given, *, times=1):
    def loss(params):
        return jnp.mean((given["x"] @ params["up"] * params["scale"]) ** 2) * times

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


BOUND = {
    "keywords": lambda: (functools.partial(step, times=2), plan().abstract, rows()),
    "arrays by keyword": lambda: (functools.partial(step, given=rows()), plan().abstract),
    "arrays in front": lambda: (functools.partial(functools.partial(step, plan().abstract), times=2), rows()),
    "donated": lambda: (jax.jit(step, donate_argnums=0, static_argnames="times"), plan().abstract, rows()),
    "an object": lambda: (type("Step", (), {"__call__": lambda self, *a: step(*a)})(), plan().abstract, rows()),
}  # fmt: skip


@pytest.mark.parametrize("form", BOUND)
def test_a_step_may_have_any_form(form):
    of, *arguments = BOUND[form]()
    found = cost.measure(of, *arguments)
    assert found.wire_bytes_per_axis["data"] > 3 / 4 * 64 * 256 * 4 / 2


@pytest.mark.parametrize("key", [lambda: jax.random.key(0), lambda: SHAPE((), jax.random.key(0).dtype), lambda: jax.random.key(0, impl="rbg")])  # fmt: skip
def test_random_keys_may_be_arguments_and_results(key):
    def of(key, given):
        key, other = jax.random.split(key)
        return key, (given["x"] + jax.random.normal(other, (32, 64))).sum(0)

    found = cost.measure(of, key(), rows())
    assert found.wire_bytes_per_axis == {"data": 2 * 3 / 4 * 64 * 4}


def test_the_mesh_of_the_arguments_is_active_while_a_step_is_traced():
    def of(params, given):
        return ar.constrain(given["x"] @ params["up"], "batch mlp", rules=RULES).sum()

    assert cost.measure(of, plan(mesh="data=32,model=2").abstract, rows("data=32,model=2")).mesh["data"] == 32


def test_a_step_that_returns_nothing_is_refused():
    with pytest.raises(ar.PolicyError, match="returns no array"):
        cost.measure(lambda params: None, plan().abstract)


def test_what_calls_back_is_told():
    def of(params):
        jax.debug.print("{}", params["scale"].sum())
        return params["up"] * 2

    with pytest.raises(Exception, match="callback") as caught:
        cost.measure(of, plan().abstract)
    assert "cannot be measured" in caught.value.__notes__[-1]


@pytest.mark.parametrize("limit", [None, "60", -1, 0, True, math.nan])
def test_a_time_limit_is_a_positive_number(limit):
    with pytest.raises(ar.PolicyError, match="time_limit"):
        cost.measure(step, plan().abstract, rows(), time_limit=limit)


@pytest.mark.parametrize("limit", [None, "60", -1, math.nan])
def test_a_search_may_take_no_time_but_not_less(limit):
    with pytest.raises(ar.PolicyError, match="time_limit"):
        cost.suggest(TREE, NAMES, MESH, time_limit=limit)


@pytest.mark.parametrize(
    ("name", "text"),
    [("V5E:2x4", "did you mean 'v5e'"), (" v6e:2x4", "did you mean 'v6e'"), (3, "3 names no topology"), (None, "none was given")],
)  # fmt: skip
def test_topologies_near_and_far_are_told(name, text):
    with pytest.raises(ar.HardwareError, match=text):
        cost.measure(step, plan().abstract, rows(), via="tpu", topology=name)


# Comparison and search.


SETS = {"dp": presets.data_parallel(), "both": presets.fsdp_tensor_parallel()}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tokens": -3}, ar.PolicyError, "no number of tokens"),
        ({"tokens": "many"}, ar.PolicyError, "no number of tokens"),
        ({"indivisible": "nxt"}, ar.PolicyError, "did you mean 'next'"),
        ({"step": lambda plan: 3}, ar.PolicyError, "did not return a pair"),
        ({"step": 3}, ar.PolicyError, "did not return a pair"),
        ({"optimizer": "adam"}, ar.PolicyError, "is no optimizer"),
        ({"names": {"up": "embed mlp", "scale": "mlp mlp"}}, ar.AxisRulesError, "scale"),
    ],
    ids=["tokens", "words", "policy", "step", "no step", "optimizer", "names"],
)
def test_what_is_wrong_whatever_the_rules_are_is_no_row(options, error, text):
    given = {"names": NAMES, "meshes": MESH, **options}
    with pytest.raises(error, match=text):
        cost.compare(SETS, TREE, **given)


def test_a_mesh_that_the_rules_do_not_fit_is_a_row_with_the_reason():
    tree = {"w": SHAPE((6, 256), jnp.float32)}
    found = cost.compare(
        SETS, tree, {"w": "embed mlp"}, meshes=[MESH, "data=6"], indivisible="error", absent="error"
    )
    problems = {(row.name, len(row.mesh)): row.problem for row in found.rows}
    assert "does not divide over data=4" in problems["both", 2]
    assert "no axis 'model'" in problems["both", 1]
    assert found.winner.name == "dp"


@pytest.mark.parametrize("mesh", ["data=3,model=7", "data=4,model=4", "data=5"])
def test_rule_sets_grow_on_meshes_of_any_sizes(mesh):
    growth = cost.compare(SETS, TREE, NAMES, meshes=mesh).growth["dp"]
    devices = [one.devices for one in growth]
    assert 8 <= devices[0] < 16
    assert 4096 < devices[-1] <= 8192
    assert all(after == 2 * before for before, after in itertools.pairwise(devices))


def test_a_rule_that_cannot_be_kept_is_refused():
    with pytest.raises(ar.AbsentAxisError, match="'embed' is fixed to 'modle', .*did you mean 'model'"):
        cost.suggest(TREE, NAMES, MESH, fixed={"embed": ("data", "modle")})


def test_one_change_is_one_change():
    found = cost.suggest(TREE, {"up": "embed mlp", "scale": "odd"}, MESH, time_limit=5.0)
    assert len(found.changes) == 1
    assert ", 1 change of " in found.why
    none = cost.suggest({}, {}, MESH)
    assert ", 0 changes of " in none.why


@pytest.mark.parametrize("hardware", [None, "v5e"])
def test_no_rival_is_better_by_the_least_bit(hardware):
    tree, names = model("mixtral-8x7b")
    found = cost.suggest(tree, names, "data=4,model=4", hardware=hardware, time_limit=4.0)
    assert not any(score.excels(found.score, 0.0) for score in found.presets.values())
    assert np.isfinite(found.score.waste)
