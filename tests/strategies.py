"""Inputs of the property tests: names, rules, meshes and shapes that meet each other often."""

import numpy as np
from hypothesis import strategies as st

import axisrules as ar

NAMES = ("batch", "embed", "mlp", "heads", "vocab", "layers")
AXES = ("x", "y", "z", "w")

policies = st.fixed_dictionaries(
    {
        "taken": st.sampled_from(["next", "partial"]),
        "indivisible": st.sampled_from(["next", "partial"]),
        "absent": st.just("drop"),
        "unmapped": st.just("replicate"),
    }
)

rules = ar.testing.rules(NAMES, AXES)


@st.composite
def meshes(draw, smallest=1):
    """Axis sizes of one to four axes, some of size 1."""
    chosen = draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=4, unique=True))
    return {axis: draw(st.sampled_from([1, 2, 2, 3, 4, 8][smallest - 1 :])) for axis in chosen}


@st.composite
def arrays(draw, max_rank=4):
    """Names and a shape of one array; sizes that often divide."""
    distinct = draw(st.lists(st.sampled_from(NAMES), max_size=max_rank, unique=True))
    names = tuple(draw(st.sampled_from([name, name, name, None])) for name in distinct)
    shape = tuple(draw(st.sampled_from([1, 2, 4, 6, 8, 12, 24, 7, 0])) for _ in names)
    return names, shape


@st.composite
def trees(draw):
    """A nested tree of host arrays with a tree of names like it."""
    kinds = st.sampled_from([np.float32, np.int8, np.int32, np.bool_])
    leaf = arrays(max_rank=3).map(lambda one: ("leaf", *one))
    node = st.recursive(
        leaf,
        lambda below: st.one_of(
            st.lists(below, min_size=1, max_size=3).map(lambda some: ("list", some)),
            st.dictionaries(st.sampled_from("abcd"), below, min_size=1, max_size=3).map(
                lambda d: ("dict", d)
            ),
        ),
        max_leaves=5,
    )
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))

    def build(part):
        kind, *rest = part
        if kind == "leaf":
            names, shape = rest
            return (seed.random(shape) * 200 - 100).astype(draw(kinds)), names
        (below,) = rest
        if kind == "list":
            pairs = [build(one) for one in below]
            return [a for a, _ in pairs], [n for _, n in pairs]
        pairs = {key: build(one) for key, one in below.items()}
        return {k: a for k, (a, _) in pairs.items()}, {k: n for k, (_, n) in pairs.items()}

    return build(draw(node))
