"""The Equinox form of the tiny GPT; see ``gpt.py``."""

import equinox as eqx
import gpt
import jax
import jax.numpy as jnp
from axisrules_equinox import named

PARTS = ("query", "key", "value", "out")


def weight(names):
    return eqx.field(metadata={"axis_names": names})


class Attention(eqx.Module):
    query: jax.Array = weight("embed heads kv")
    key: jax.Array = weight("embed heads kv")
    value: jax.Array = weight("embed heads kv")
    out: jax.Array = weight("heads kv embed")

    def __init__(self, key):
        shapes = [(gpt.WIDTH, gpt.HEADS, gpt.HEAD_DIM)] * 3 + [(gpt.HEADS, gpt.HEAD_DIM, gpt.WIDTH)]
        pairs = zip(jax.random.split(key, 4), shapes, strict=True)
        self.query, self.key, self.value, self.out = (0.1 * jax.random.normal(*pair) for pair in pairs)

    def __call__(self, x):
        parts = (jnp.einsum("te,ehd->thd", x, kernel) for kernel in (self.query, self.key, self.value))
        return jnp.einsum("thd,hde->te", gpt.attend(*parts), self.out)


class Block(eqx.Module):
    norm_1: eqx.nn.LayerNorm
    attention: Attention
    norm_2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x):
        x = x + self.attention(jax.vmap(self.norm_1)(x))
        return x + jax.vmap(self.down)(jax.nn.relu(jax.vmap(self.up)(jax.vmap(self.norm_2)(x))))


class GPT(eqx.Module):
    tokens: eqx.nn.Embedding
    blocks: list
    norm: eqx.nn.LayerNorm
    positions: jax.Array = weight(gpt.NAMES["positions"])

    def __call__(self, inputs):
        x = self.tokens.weight[inputs] + self.positions
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x) @ self.tokens.weight.T


def make(key):
    keys = iter(jax.random.split(key, 1 + 3 * gpt.BLOCKS))
    tokens = named(eqx.nn.Embedding(gpt.VOCAB, gpt.WIDTH, key=next(keys)), weight=gpt.NAMES["tokens"])
    blocks = [_block(keys) for _ in range(gpt.BLOCKS)]
    return GPT(tokens, blocks, _norm(), jnp.zeros((gpt.LENGTH, gpt.WIDTH)))


def _block(keys):
    up, down = (
        eqx.nn.Linear(gpt.WIDTH, gpt.MLP, key=next(keys)),
        eqx.nn.Linear(gpt.MLP, gpt.WIDTH, key=next(keys)),
    )
    up, down = named(up, weight="mlp embed", bias="mlp"), named(down, weight="embed mlp", bias="embed")
    return Block(_norm(), Attention(next(keys)), _norm(), up, down)


def _norm():
    return named(eqx.nn.LayerNorm(gpt.WIDTH, eps=gpt.EPSILON, use_bias=False), weight="norm")


def load(model, params):
    """The model with the weights of the plain form."""
    return eqx.tree_at(_weights, model, _values(params))


def _weights(model):
    found = [model.tokens.weight, model.positions, model.norm.weight]
    for block in model.blocks:
        found += [block.norm_1.weight, block.norm_2.weight]
        found += [getattr(block.attention, part) for part in PARTS]
        found += [block.up.weight, block.up.bias, block.down.weight, block.down.bias]
    return found


def _values(params):
    """The same arrays of the plain form; Equinox has kernels the other way round."""
    found = [params["tokens"], params["positions"], params["norm"]["scale"]]
    for block in params["blocks"]:
        found += [block["norm_1"]["scale"], block["norm_2"]["scale"]]
        found += [block["attention"][part] for part in PARTS]
        for name in ("up", "down"):
            found += [block[name]["kernel"].T, block[name]["bias"]]
    return found
