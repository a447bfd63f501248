"""One transformer made in a process of its own, without any cache: ``python -m benchmarks.cold_init``.

Prints the seconds, the compilations of XLA, and how many of those making the model again takes.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

import axisrules as ar

WIDTH, HEADS, VOCABULARY = 256, 4, 1024
RULES = {"embed": "data", "mlp": "model", "heads": "model", "vocab": "model"}
COMPILATION = "/jax/core/compile/backend_compile_duration"


def nnx_transformer(depth):
    """A function that makes the model, its names as annotations of Flax: 14 arrays a block, and 3."""
    from flax import nnx

    def annotated(initializer, *names):
        return nnx.with_partitioning(initializer, names)

    normal = nnx.initializers.normal(0.02)
    ones_init, zeros_init = nnx.initializers.ones_init(), nnx.initializers.zeros_init()

    class Block(nnx.Module):
        def __init__(self, rngs):
            norm = {
                "scale_init": annotated(ones_init, "embed"),
                "bias_init": annotated(zeros_init, "embed"),
                "rngs": rngs,
            }
            self.before, self.between = nnx.LayerNorm(WIDTH, **norm), nnx.LayerNorm(WIDTH, **norm)
            self.attention = nnx.MultiHeadAttention(
                HEADS,
                WIDTH,
                decode=False,
                kernel_init=annotated(normal, "embed", "heads", None),
                out_kernel_init=annotated(normal, "heads", None, "embed"),
                bias_init=annotated(zeros_init, "heads", None),
                out_bias_init=annotated(zeros_init, "embed"),
                rngs=rngs,
            )
            linear = {"use_bias": False, "rngs": rngs}
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=annotated(normal, "embed", "mlp"), **linear)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=annotated(normal, "mlp", "embed"), **linear)

    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(
                VOCABULARY, WIDTH, embedding_init=annotated(normal, "vocab", "embed"), rngs=rngs
            )
            self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
            self.norm = nnx.LayerNorm(
                WIDTH,
                scale_init=annotated(ones_init, "embed"),
                bias_init=annotated(zeros_init, "embed"),
                rngs=rngs,
            )

    return lambda: Transformer(nnx.Rngs(0))


def equinox_transformer(depth):
    """A function that makes the model; its names come by a table."""
    import equinox as eqx

    class Block(eqx.Module):
        before: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        between: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            first, second, third = jax.random.split(key, 3)
            self.before, self.between = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
            self.attention = eqx.nn.MultiheadAttention(
                HEADS, WIDTH, use_query_bias=True, use_key_bias=True, use_value_bias=True,
                use_output_bias=True, key=first,
            )  # fmt: skip
            self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, use_bias=False, key=second)
            self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, use_bias=False, key=third)

    class Transformer(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list[Block]
        norm: eqx.nn.LayerNorm

        def __init__(self, key):
            first, *rest = jax.random.split(key, depth + 1)
            self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=first)
            self.blocks = [Block(one) for one in rest]
            self.norm = eqx.nn.LayerNorm(WIDTH)

    return lambda: Transformer(jax.random.key(0))


EQUINOX_NAMES = ar.NameTable({
    "embed/weight": "vocab embed",
    "**/output_proj/weight": "embed heads",
    "**/output_proj/bias": "embed",
    "**/attention/*/weight": "heads embed",
    "**/attention/*/bias": "heads",
    "**/up/weight": "mlp embed",
    "**/down/weight": "embed mlp",
    "**/weight": "embed",
    "**/bias": "embed",
})  # fmt: skip


def arrays(model):
    return [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]


def with_axisrules(framework, make, mesh):
    return ar.init(make, EQUINOX_NAMES if framework == "equinox" else None, mesh=mesh, rules=RULES)


def one_jit(framework, make, mesh):
    """The construction in one jit, with its constraints inside."""
    if framework == "nnx":
        from flax import nnx

        @nnx.jit
        def create():
            model = make()
            state = nnx.state(model)
            specs = ar.plan(state, mesh=mesh, rules=RULES).shardings
            nnx.update(model, jax.tree.map(jax.lax.with_sharding_constraint, state, specs))
            return model

        with nnx.use_eager_sharding(False):
            return create()
    import equinox as eqx

    @eqx.filter_jit
    def build():
        model = make()
        dynamic, static = eqx.partition(model, eqx.is_array)
        specs = ar.plan(dynamic, EQUINOX_NAMES, mesh=mesh, rules=RULES).shardings
        return eqx.combine(jax.tree.map(jax.lax.with_sharding_constraint, dynamic, specs), static)

    return build()


def eager(framework, make, mesh):
    """On one device, as the framework does it."""
    if framework == "nnx":
        from flax import nnx

        with nnx.use_eager_sharding(False):
            return make()
    return make()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=["nnx", "equinox"])
    parser.add_argument("depth", type=int)
    parser.add_argument("way", choices=["with_axisrules", "one_jit", "eager"])
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    mesh = ar.make_mesh("data=4,model=2")
    jnp.zeros(()).block_until_ready()  # the backend has started
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    run = globals()[given.way]
    make = globals()[f"{given.framework}_transformer"](given.depth)
    start = time.perf_counter()
    made = jax.block_until_ready(arrays(run(given.framework, make, mesh)))
    seconds, first = time.perf_counter() - start, events.count(COMPILATION)
    start = time.perf_counter()
    if given.way == "with_axisrules":
        run(given.framework, globals()[f"{given.framework}_transformer"](given.depth), mesh)
    print(json.dumps({
        "seconds": seconds,
        "again": time.perf_counter() - start,
        "arrays": len(made),
        "bytes": int(sum(np.prod(one.shape) * one.dtype.itemsize for one in made)),
        "compilations": first,
        "compilations_again": events.count(COMPILATION) - first,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
