"""A training loop over `prefetch`, against the same loop that places each batch when it needs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axisrules as ar
from benchmarks.measure import Row, duration, interleaved

RULES = {"batch": "data"}
STEPS, RECORDS, WIDTH = 10, 256, 192
REACH = 1.3


def loader(seed=0):
    """Batches as a host makes them: decoded, normalised, jittered; numpy lets other threads run."""
    source = np.random.default_rng(seed)
    stored = source.integers(0, 256, (RECORDS, 32, 32, 3), dtype=np.uint8)
    for _ in range(STEPS):
        images = stored.astype(np.float32) / 255
        images = (images - images.mean((1, 2), keepdims=True)) / (images.std((1, 2), keepdims=True) + 1e-5)
        images = np.sqrt(np.abs(np.fft.irfft2(np.fft.rfft2(images, axes=(1, 2)), axes=(1, 2))) + 1e-3)
        images += source.standard_normal(images.shape, np.float32) / 50
        yield {"images": images.reshape(RECORDS, -1).astype(np.float32)}


@pytest.fixture
def step():
    """A real step: forward, backward and update of a small network on one device's thread pool."""

    def loss(params, images):
        hidden = jnp.tanh(images @ params["in"])
        for _ in range(4):
            hidden = jnp.tanh(hidden @ params["hidden"])
        return jnp.mean((hidden @ params["out"]) ** 2)

    @jax.jit
    def update(params, images):
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params, images))

    return update


@pytest.fixture
def work(mesh, step):
    def start():
        shapes = {"in": (32 * 32 * 3, WIDTH), "hidden": (WIDTH, WIDTH), "out": (WIDTH, 8)}
        names = dict.fromkeys(shapes)
        host = {name: np.full(shape, 1e-3, np.float32) for name, shape in shapes.items()}
        return ar.shard_tree(host, names, mesh=mesh, rules=RULES)

    def run(batches):
        params = start()
        for batch in batches:
            params = jax.block_until_ready(step(params, batch["images"]))
        return params

    def ours():
        with ar.prefetch(loader(), "batch _", mesh=mesh, rules=RULES) as batches:
            return run(batches)

    def theirs():
        return run(ar.shard_batch(batch, "batch _", mesh=mesh, rules=RULES) for batch in loader())

    return ours, theirs


def test_prefetch(benchmark, table, work):
    ours, theirs = work
    for mine, peers in zip(jax.tree.leaves(ours()), jax.tree.leaves(theirs()), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(peers))
    mine, peers = interleaved(benchmark, ours, theirs, rounds=5)
    ratio = peers / mine
    what = f"{STEPS} training steps over `prefetch`, with numpy preparing the batches"
    against = f"the same without: {duration(peers)}"
    reached = ratio >= REACH
    table.append(Row(what, duration(mine), against, f"{ratio:.2f}x faster", f"{REACH}x faster", reached))
