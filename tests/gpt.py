"""A tiny GPT in three forms (plain pytree, NNX, Equinox) with one set of axis names, and batches for it.

Owns the plain form and what the forms share; the other two stand in files of their own, as they need
their frameworks. With the weights of ``init_params`` all three give the same logits. Lays nothing out.
"""

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, LENGTH, WIDTH, HEADS, HEAD_DIM, MLP, BLOCKS = 64, 8, 32, 2, 16, 64, 2
EPSILON = 1e-5

_BLOCK = {
    "norm_1": {"scale": "norm"},
    "attention": {
        "query": "embed heads kv",
        "key": "embed heads kv",
        "value": "embed heads kv",
        "out": "heads kv embed",
    },
    "norm_2": {"scale": "norm"},
    "up": {"kernel": "embed mlp", "bias": "mlp"},
    "down": {"kernel": "mlp embed", "bias": "embed"},
}
NAMES = {
    "tokens": "vocab embed",
    "positions": "position embed",
    "blocks": [_BLOCK] * BLOCKS,
    "norm": {"scale": "norm"},
}


def batches(count, size=16):
    """Deterministic batches: every token follows from the one before it."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = [rng.integers(0, VOCAB, size)]
        for _ in range(LENGTH):
            tokens.append((5 * tokens[-1] + 3) % VOCAB)
        text = np.stack(tokens, 1).astype(np.int32)
        yield {"inputs": text[:, :-1], "targets": text[:, 1:]}


def attend(query, key, value):
    """Causal attention over ``(..., length, heads, head_dim)``."""
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / HEAD_DIM**0.5
    length = query.shape[-3]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), value)


def cross_entropy(logits, targets):
    """The mean over all tokens."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean()


# The plain pytree.


def init_params(key):
    """The weights as dicts and lists."""
    keys = iter(jax.random.split(key, 2 + 6 * BLOCKS))

    def normal(*shape):
        return 0.1 * jax.random.normal(next(keys), shape)

    def norm():
        return {"scale": jnp.ones(WIDTH)}

    def block():
        heads = WIDTH, HEADS, HEAD_DIM
        return {
            "norm_1": norm(),
            "attention": {name: normal(*heads) for name in ("query", "key", "value")}
            | {"out": normal(HEADS, HEAD_DIM, WIDTH)},
            "norm_2": norm(),
            "up": {"kernel": normal(WIDTH, MLP), "bias": jnp.zeros(MLP)},
            "down": {"kernel": normal(MLP, WIDTH), "bias": jnp.zeros(WIDTH)},
        }

    tokens, positions = normal(VOCAB, WIDTH), normal(LENGTH, WIDTH)
    blocks = [block() for _ in range(BLOCKS)]
    return {"tokens": tokens, "positions": positions, "blocks": blocks, "norm": norm()}


def logits(params, inputs):
    """``(batch, length)`` tokens to ``(batch, length, vocab)``; the head is the embedding."""
    x = params["tokens"][inputs] + params["positions"]
    for block in params["blocks"]:
        h, attention = _norm(block["norm_1"], x), block["attention"]
        parts = (jnp.einsum("...te,ehd->...thd", h, attention[name]) for name in ("query", "key", "value"))
        x = x + jnp.einsum("...thd,hde->...te", attend(*parts), attention["out"])
        h = _dense(block["up"], _norm(block["norm_2"], x))
        x = x + _dense(block["down"], jax.nn.relu(h))
    return _norm(params["norm"], x) @ params["tokens"].T


def loss(params, batch):
    """The loss of the plain form."""
    return cross_entropy(logits(params, batch["inputs"]), batch["targets"])


def _norm(params, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + EPSILON) * params["scale"]


def _dense(params, x):
    return x @ params["kernel"] + params["bias"]


# The other forms.


def nnx_model(rngs):
    """An NNX module with weights of its own."""
    from gpt_nnx import GPT

    return GPT(rngs)


def load_nnx(model, params):
    """The same NNX module with the weights of the plain form, set in place."""
    from gpt_nnx import load

    return load(model, params)


def equinox_model(key):
    """An Equinox module with weights of its own."""
    from gpt_equinox import make

    return make(key)


def load_equinox(model, params):
    """An Equinox module like the given one, with the weights of the plain form."""
    from gpt_equinox import load

    return load(model, params)


def nnx_loss(model, batch):
    """The loss of an NNX module."""
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def equinox_loss(model, batch):
    """The loss of an Equinox module, which takes one text at a time."""
    return cross_entropy(jax.vmap(model)(batch["inputs"]), batch["targets"])
