"""Models of NNX, Linen and Equinox whose arrays are born sharded, and what surrounds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AXIS_TYPES, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import _programs

RULES = {"embed": "data", "mlp": "model", "batch": "data"}


@pytest.fixture(params=["auto", "explicit", pytest.param("mixed", marks=pytest.mark.slow)])
def axis_types(request):
    """Where a test does not ask for every kind, as it compiles much."""
    return request.param


every_mesh = pytest.mark.parametrize("axis_types", AXIS_TYPES)


def data(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


class TestNNX:
    nnx = pytest.importorskip("flax.nnx")

    def net(self):
        axisrules_flax = pytest.importorskip("axisrules_flax")
        nnx = self.nnx

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.up = axisrules_flax.named(nnx.Linear, "embed mlp")(8, 32, rngs=rngs)
                self.norm = axisrules_flax.named(nnx.BatchNorm, "mlp")(32, rngs=rngs)
                self.drop = nnx.Dropout(0.5, rngs=rngs)
                self.down = nnx.Linear(
                    32, 8, kernel_init=nnx.with_partitioning(nnx.initializers.normal(), ("mlp", "embed")),
                    use_bias=False, rngs=rngs,
                )  # fmt: skip
                self.tied = self.down
                self.activation = jax.nn.gelu

            def __call__(self, x):
                return self.down(self.drop(self.activation(self.norm(self.up(x)))))

        return Net

    def assert_born(self, model, expected, mesh):
        nnx = self.nnx
        ours, theirs = (dict(nnx.to_flat_state(nnx.state(one))) for one in (model, expected))
        assert ours.keys() == theirs.keys()
        for path, variable in ours.items():
            np.testing.assert_array_equal(
                data(variable.get_raw_value()), data(theirs[path].get_raw_value()), err_msg=str(path)
            )
            assert variable.get_raw_value().sharding.mesh == mesh
        assert model.up.kernel.get_raw_value().sharding == NamedSharding(mesh, P("data", "model"))
        assert model.norm.scale.get_raw_value().sharding == NamedSharding(mesh, P("model"))
        assert model.down.kernel.get_raw_value().sharding == NamedSharding(mesh, P("model", "data"))
        assert model.tied is model.down

    def test_a_module_is_whole_and_its_bits_are_those_of_a_jit(self, mesh):
        nnx, net = self.nnx, self.net()
        with nnx.use_eager_sharding(False):
            expected = nnx.jit(lambda: net(nnx.Rngs(0)))()
        model = ar.init(lambda: net(nnx.Rngs(0)), mesh=mesh, rules=RULES, unnamed="replicate")
        self.assert_born(model, expected, mesh)
        assert model.up.kernel.axis_names == ("embed", "mlp")
        assert model.up.kernel.partition_spec == P("data", "model")
        model.extra = nnx.Param(jnp.zeros(3))  # it may be changed, so nothing of the trace is left
        model.drop.rngs.count[...] += 1

    @every_mesh
    def test_generators_may_come_as_arguments_and_stay_as_they_are(self, mesh):
        nnx, net = self.nnx, self.net()
        rngs = nnx.Rngs(params=1, dropout=2)
        with nnx.use_eager_sharding(False):
            expected = nnx.jit(lambda: net(nnx.Rngs(params=1, dropout=2)))()
        model = ar.init(net, args=(rngs,), mesh=mesh, rules=RULES, unnamed="replicate")
        self.assert_born(model, expected, mesh)
        assert int(rngs.params.count[...]) == 0

    def test_a_captured_generator_is_an_error_that_shows_both_spellings(self):
        nnx, net = self.nnx, self.net()
        rngs = nnx.Rngs(0)
        with pytest.raises(ar.InitError) as caught:
            ar.init(lambda: net(rngs), mesh=ar.make_mesh("data=4,model=2"), rules=RULES)
        assert str(caught.value) == (
            "make changes a variable that it captures, which JAX cannot trace: "
            "Cannot mutate RngCount from a different trace level\n"
            "  fix:   build the generator inside, axisrules.init(lambda: Model(nnx.Rngs(0))), "
            "or hand it in, axisrules.init(Model, args=(rngs,))."
        )
        assert int(rngs.params.count[...]) == 0

    def test_layers_of_one_shape_share_their_programs(self, mesh):
        nnx = self.nnx
        linear = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))

        def deep(depth):
            return lambda: nnx.List([
                nnx.Linear(16, 24, kernel_init=linear, use_bias=False, rngs=rngs)
                for rngs in [nnx.Rngs(3)] for _ in range(depth)
            ])  # fmt: skip

        ar.init(deep(2), mesh=mesh, rules=RULES)
        before = len(_programs._COMPILED)
        ar.init(deep(9), mesh=mesh, rules=RULES)
        assert len(_programs._COMPILED) == before

    @every_mesh
    def test_the_state_of_an_optimizer(self, mesh):
        nnx, net, optax = self.nnx, self.net(), pytest.importorskip("optax")
        model = ar.init(lambda: net(nnx.Rngs(0)), mesh=mesh, rules=RULES, unnamed="replicate")

        def make():
            return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        names = ar.state_names(nnx.eval_shape(make), nnx.state(model, nnx.Param))
        optimizer = ar.init(make, names, mesh=mesh, rules=RULES)
        assert optimizer.opt_state[0].mu["up"]["kernel"][...].sharding == NamedSharding(
            mesh, P("data", "model")
        )
        assert optimizer.opt_state[0].nu["down"]["kernel"][...].sharding == NamedSharding(
            mesh, P("model", "data")
        )


class TestLinen:
    @every_mesh
    def test_boxes_come_out_filled(self, mesh):
        nn = pytest.importorskip("flax.linen")
        model = nn.Dense(
            32, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), ("mlp",)),
        )  # fmt: skip
        args = (jax.random.key(0), jnp.ones((4, 8)))
        made = ar.init(model.init, args=args, mesh=mesh, rules=RULES)
        kernel = made["params"]["kernel"]
        assert isinstance(kernel, nn.Partitioned)
        assert kernel.value.sharding == NamedSharding(mesh, P("data", "model"))
        assert isinstance(made["params"]["bias"], nn.LogicallyPartitioned)
        assert made["params"]["bias"].value.sharding == NamedSharding(mesh, P("model"))
        expected = jax.jit(lambda *args: nn.meta.unbox(model.init(*args)))(*args)
        np.testing.assert_array_equal(kernel.value, expected["params"]["kernel"])


class TestEquinox:
    eqx = pytest.importorskip("equinox")

    def test_a_module_is_whole_and_its_bits_are_those_of_a_jit(self, mesh):
        eqx = self.eqx

        def make(key):
            return eqx.nn.MLP(8, 4, 32, 2, activation=jax.nn.silu, key=key)

        names = ar.NameTable({"layers/0/weight": "mlp embed", "layers/1/weight": "_ mlp",
                              "layers/2/weight": "_ mlp", "layers/*/bias": "_"})  # fmt: skip
        key = jax.random.key(0)
        model = ar.init(make, names, args=(key,), mesh=mesh, rules=RULES)
        expected = eqx.filter_jit(make)(key)
        assert isinstance(model, eqx.nn.MLP)
        assert jax.tree.structure(model) == jax.tree.structure(expected)
        for ours, theirs in zip(
            jax.tree.leaves(eqx.filter(model, eqx.is_array)),
            jax.tree.leaves(eqx.filter(expected, eqx.is_array)),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, theirs)
        assert model.layers[0].weight.sharding == NamedSharding(mesh, P("model", "data"))
        if jax.sharding.AxisType.Explicit not in mesh.axis_types:  # there the model says how to contract
            run = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
            assert run(model, jnp.ones((4, 8))).shape == (4, 4)

    @every_mesh
    def test_named_layers_need_no_other_names(self, mesh):
        axisrules_equinox = pytest.importorskip("axisrules_equinox")

        def make():
            layer = self.eqx.nn.Linear(8, 32, key=jax.random.key(0))
            return axisrules_equinox.named(layer, weight="mlp embed", bias="mlp")

        model = ar.init(make, mesh=mesh, rules=RULES)
        assert model.weight.sharding == NamedSharding(mesh, P("model", "data"))
        assert model.bias.sharding == NamedSharding(mesh, P("model"))


# A model that this machine cannot hold, compiled ahead of time.


def test_a_step_is_lowered_for_a_model_that_does_not_fit_here():
    mesh = ar.make_mesh("data=4,model=2")  # on Explicit axes the step would say how its products lie
    shapes = {"up": (131_072, 524_288), "down": (524_288, 131_072)}  # 512 GiB
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    plan = ar.plan(params, {"up": "embed mlp", "down": "mlp embed"}, mesh=mesh, rules=RULES)
    batch = ar.plan(jax.ShapeDtypeStruct((8, 131_072), jnp.float32), "batch embed", mesh=mesh,
                    rules={"batch": "data", "embed": None})  # fmt: skip

    def step(params, x):
        loss = lambda params: jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))

    lowered = jax.jit(step, in_shardings=(plan.shardings, batch.shardings)).lower(
        plan.abstract, batch.abstract
    )
    assert plan.nbytes == 2**39
    assert plan.bytes_per_device == 2**36
    assert "sdy.mesh" in lowered.as_text() or "mhlo.sharding" in lowered.as_text()


# Another mesh.


@every_mesh
@pytest.mark.parametrize("other", AXIS_TYPES)
@pytest.mark.parametrize("sizes", ["data=2,model=2", "data=1,model=3", "data=8,model=1", "data=2,model=1"])
def test_a_live_tree_moves_to_other_and_fewer_devices(sizes, other, mesh):
    def make():
        keys = jax.random.split(jax.random.key(0), 3)
        return {
            "w": jax.random.normal(keys[0], (24, 48)),
            "b": jax.random.normal(keys[1], (48,)),
            "k": keys[2],
        }

    names = {"w": "embed mlp", "b": "mlp", "k": ()}
    here = ar.init(make, names, mesh=mesh, rules=RULES)
    before = {key: data(value) for key, value in here.items()}
    devices = np.array(jax.devices()[-int(np.prod([int(s[-1]) for s in sizes.split(",")])) :])
    there = mesh_of(other, sizes, devices=devices)
    moved = ar.shard_tree(here, names, mesh=there, rules=RULES)
    for key, value in moved.items():
        np.testing.assert_array_equal(data(value), before[key])
        assert value.sharding.mesh == there
    back = ar.shard_tree(moved, names, mesh=mesh, rules=RULES)
    for key, value in back.items():
        np.testing.assert_array_equal(data(value), before[key])
        assert value.sharding == here[key].sharding
