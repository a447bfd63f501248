"""The NNX form of the tiny GPT; see ``gpt.py``."""

import gpt
import jax
import jax.numpy as jnp
from axisrules_flax import named
from flax import nnx

Norm = named(nnx.LayerNorm, "norm")
Split = named(nnx.LinearGeneral, "embed heads kv")
Merge = named(nnx.LinearGeneral, "heads kv embed")
Up = named(nnx.Linear, "embed mlp")
Down = named(nnx.Linear, "mlp embed")
Embed = named(nnx.Embed, gpt.NAMES["tokens"])


class Attention(nnx.Module):
    def __init__(self, rngs):
        heads, options = (gpt.HEADS, gpt.HEAD_DIM), {"use_bias": False, "rngs": rngs}
        self.query, self.key, self.value = (Split(gpt.WIDTH, heads, **options) for _ in range(3))
        self.out = Merge(heads, gpt.WIDTH, axis=(-2, -1), **options)

    def __call__(self, x):
        return self.out(gpt.attend(self.query(x), self.key(x), self.value(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_1, self.norm_2 = norm(rngs), norm(rngs)
        self.attention = Attention(rngs)
        self.up = Up(gpt.WIDTH, gpt.MLP, rngs=rngs)
        self.down = Down(gpt.MLP, gpt.WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.relu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.tokens = Embed(gpt.VOCAB, gpt.WIDTH, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((gpt.LENGTH, gpt.WIDTH)), axis_names=gpt.NAMES["positions"])
        self.blocks = nnx.List([Block(rngs) for _ in range(gpt.BLOCKS)])
        self.norm = norm(rngs)

    def __call__(self, inputs):
        x = self.tokens(inputs) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def norm(rngs):
    return Norm(gpt.WIDTH, epsilon=gpt.EPSILON, use_bias=False, rngs=rngs)


def load(model, params):
    """Sets the weights of the plain form in place."""
    model.tokens.embedding[...] = params["tokens"]
    model.positions[...] = params["positions"]
    _load_layer(model.norm, params["norm"])
    for block, given in zip(model.blocks, params["blocks"], strict=True):
        for name in ("norm_1", "norm_2", "up", "down"):
            _load_layer(getattr(block, name), given[name])
        for name, kernel in given["attention"].items():
            getattr(block.attention, name).kernel[...] = kernel
    return model


def _load_layer(layer, given):
    for name, array in given.items():
        getattr(layer, name)[...] = array
