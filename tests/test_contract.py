"""One model in three forms (plain pytree, NNX, Equinox), one set of names, one result."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import axisrules as ar
from axisrules._trees import flatten

pytest.importorskip("axisrules_flax")
pytest.importorskip("axisrules_equinox")
eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")

RULES = [("mlp", "model"), ("embed", ("data", "model")), ("mlp", "data"), ("embed", "data")]
NAMES = {
    "up": {"kernel": "embed mlp", "bias": "mlp"},
    "down": {"kernel": "mlp embed", "bias": "embed"},
    "scale": "embed",
}
TABLE = ar.NameTable({
    "**/up/kernel": "embed mlp",
    "**/up/bias": "mlp",
    "**/down/kernel": "mlp embed",
    "**/down/bias": "embed",
    "**/scale": "embed",
})  # fmt: skip


def values():
    rng = np.random.default_rng(0)
    shapes = {
        "up": {"kernel": (8, 32), "bias": (32,)},
        "down": {"kernel": (32, 8), "bias": (8,)},
        "scale": (8,),
    }
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda node: isinstance(node, tuple))


class EquinoxDense(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


class EquinoxMLP(eqx.Module):
    up: EquinoxDense
    down: EquinoxDense
    scale: jax.Array = eqx.field(metadata={"axis_names": NAMES["scale"]})


class NNXDense(nnx.Module):
    def __init__(self, name, kernel, bias):
        self.kernel = nnx.Param(kernel, axis_names=NAMES[name]["kernel"])
        self.bias = nnx.Param(bias, out_sharding=tuple(NAMES[name]["bias"].split()))


class NNXMLP(nnx.Module):
    def __init__(self, params):
        self.up, self.down = (NNXDense(name, **params[name]) for name in ("up", "down"))
        self.scale = nnx.Param(params["scale"], axis_names=NAMES["scale"])


def plain():
    return values()


def of_equinox():
    import axisrules_equinox

    params = values()
    up, down = (
        axisrules_equinox.named(EquinoxDense(**params[name]), **NAMES[name]) for name in ("up", "down")
    )
    return EquinoxMLP(up, down, params["scale"])


def of_nnx():
    with nnx.use_eager_sharding(False):
        return NNXMLP(values())


MAKERS = [plain, of_equinox, of_nnx]
FORMS = {
    "own": None,
    "tree": NAMES,
    "table": TABLE,
    "callable": lambda path, leaf: TABLE.find(path),
}


def by_path(tree):
    flat = flatten(tree)
    return dict(zip(flat.paths, flat.leaves, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", MAKERS)
def test_the_same_names_and_rules_give_the_same_plan(make, form):
    expected = ar.plan(plain(), NAMES, mesh="data=4,model=2", rules=RULES)
    names = NAMES if make is plain and form == "own" else FORMS[form]
    plan = ar.plan(make(), names, mesh="data=4,model=2", rules=RULES)
    explained = {one.path: plan.explain(one.path) for one in plan.placements}
    assert explained == {one.path: expected.explain(one.path) for one in expected.placements}
    assert plan.bytes_per_device == expected.bytes_per_device
    assert by_path(plan.specs) == by_path(expected.specs)


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_values_lie_on_the_same_devices(make, mesh):
    expected = by_path(ar.plan(plain(), NAMES, mesh=mesh, rules=RULES).specs)
    placed = by_path(ar.shard_tree(make(), TABLE, mesh=mesh, rules=RULES))
    assert {path: array.sharding for path, array in placed.items()} == {
        path: NamedSharding(mesh, spec) for path, spec in expected.items()
    }
    for path, value in by_path(plain()).items():
        np.testing.assert_array_equal(placed[path], value)


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_mistake_gives_the_same_message(make):
    messages = []
    for tree in (plain(), make()):
        with pytest.raises(ar.AxisRulesError) as caught:
            ar.plan(
                {"model": tree},
                ar.NameTable({"**/kernel": "embed", "**/bias": "mlp"}),
                mesh="data=3",
                rules={"mlp": "data"},
            )
        messages.append(caught.value)
    assert {type(one) for one in messages} == {ar.PlanError}
    paths = [{(type(one), path) for one in message.failures for path in one.paths} for message in messages]
    assert paths[0] == paths[1]


def test_one_tree_may_hold_all_three():
    trees = {make.__name__: make() for make in MAKERS}
    plan = ar.plan(trees, TABLE, mesh="data=4,model=2", rules=RULES)
    alone = by_path(ar.plan(plain(), NAMES, mesh="data=4,model=2", rules=RULES).specs)
    assert {one.path: one.spec for one in plan.placements} == {
        f"{make.__name__}/{path}": spec for make in MAKERS for path, spec in alone.items()
    }
