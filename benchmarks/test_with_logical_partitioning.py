"""Parameters made one by one, against a fresh jit with ``out_shardings`` for each of them."""

import jax
import pytest
from jax.nn import initializers
from jax.sharding import NamedSharding

import axisrules as ar
from axisrules import _initializers
from benchmarks.measure import faster, interleaved

LAYERS = 100
RULES = {"embed": "data", "mlp": "model"}
COMPILATION = "/jax/core/compile/backend_compile_duration"


def parameters():
    """Of every layer what it makes its parameter from: an initializer of its own, a shape, names."""
    for _ in range(LAYERS // 4):
        yield initializers.lecun_normal(), (256, 1024), ("embed", "mlp")
        yield initializers.lecun_normal(), (1024, 256), ("mlp", "embed")
        yield initializers.normal(0.02), (1024,), ("mlp",)
        yield initializers.lecun_normal(), (256, 1024), ("embed", "mlp")


@pytest.fixture
def compilations():
    """The events of compilations so far."""
    events = []

    def listen(event, duration, **details):
        if event == COMPILATION:
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_layers(benchmark, table, mesh, compilations):
    key = jax.random.key(0)
    counts = {}

    def counted(make):
        def run():
            jax.clear_caches()
            _initializers._COMPILED.clear()
            compilations.clear()
            made = [make(*parameter) for parameter in parameters()]
            jax.block_until_ready(made)
            counts[make] = len(compilations)

        return run

    def ours(initializer, shape, names):
        return ar.with_logical_partitioning(initializer, names)(key, shape)

    def theirs(initializer, shape, names):
        sharding = NamedSharding(mesh, ar.logical_to_mesh_axes(names))
        return jax.jit(initializer, static_argnums=1, out_shardings=sharding)(key, shape)

    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES):
        # One round, since the peer's takes a minute, which no disturbance turns into seconds.
        times = interleaved(benchmark, counted(ours), counted(theirs), rounds=1, warmup=0)
    what = f"the parameter of each of {LAYERS} layers, one by one ({counts[ours]} compilations)"
    table.append(faster(what, times, f"a `jax.jit` each ({counts[theirs]} compilations)", 15))
