"""The adapter protocol, proved by a package of its own for haliax's named arrays.

haliax itself where it is installed, and always a stand-in with the same words; nothing is installed:
the package's entry point is read from its pyproject.toml, for one process.
"""

import importlib.util
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "haliax_adapter"

STAND_IN = """
import dataclasses
import jax

@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int

@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class NamedArray:
    array: object
    axes: tuple

    def __post_init__(self):
        if self.array.shape != tuple(axis.size for axis in self.axes):
            raise ValueError("the shape does not fit")

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        made = object.__new__(cls)
        object.__setattr__(made, "array", children[0])
        object.__setattr__(made, "axes", axes)
        return made

def named(array, axes):
    return NamedArray(array, axes)
"""

HEAD = """
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
import axisrules as ar
import haliax as hax
from jax.sharding import PartitionSpec as P

Embed, Mlp = hax.Axis("embed", 8), hax.Axis("mlp", 4)
MESH, RULES = ar.make_mesh("data=4,model=2"), ar.Rules({"embed": "data", "mlp": "model"})
OPTIONS = {"mesh": MESH, "rules": RULES}
assert "axisrules_haliax" not in sys.modules
"""

ARRAYS = """
up = hax.named(np.arange(32, dtype=np.float32).reshape(8, 4), (Embed, Mlp))
model = {"up": up, "down": [hax.named(jax.numpy.ones((4, 8)), (Mlp, Embed))], "act": len}

plan = ar.plan(model, **OPTIONS)  # by the names that the arrays carry
assert "axisrules_haliax" in sys.modules
assert {p.path: tuple(p.spec) for p in plan.placements} == {
    "up": ("data", "model"), "down/0": ("model", "data")}
assert plan.specs["up"].array == P("data", "model") and plan.specs["up"].axes == (Embed, Mlp)
assert plan.abstract["up"].array.sharding.spec == P("data", "model")

kind = type(up.array)
placed = ar.shard_tree(model, **OPTIONS)
assert type(placed["up"]) is type(up) and placed["up"].axes == (Embed, Mlp)
assert placed["up"].array.sharding.spec == P("data", "model")
assert placed["up"].array.addressable_shards[0].data.shape == (2, 2)
assert np.asarray(placed["up"].array).tobytes() == up.array.tobytes()
assert type(up.array) is kind and placed["act"] is len

other = {"up": "mlp embed", "down": ["_ embed"]}  # given names win; the array stands at its own path
assert ar.plan(model, other, **OPTIONS).placement("up").spec == P("model", "data")
assert ar.plan(model, ar.NameTable({"up": "_ mlp", "down/*": "_ _"}), **OPTIONS).placement("up").spec == P(None, "model")

@jax.jit
def step(tree):
    return jax.tree.map(lambda x: 2 * x, ar.constrain(tree, None, **OPTIONS))

out = step({"up": placed["up"]})
assert out["up"].axes == (Embed, Mlp) and out["up"].array.sharding.spec == P("data", "model")

for types in ("auto", "explicit", {"data": "explicit"}):
    there = {"mesh": ar.make_mesh("data=4,model=2", axis_types=types), "rules": RULES}
    made = ar.init(lambda: {"w": hax.named(jax.numpy.zeros((8, 4)), (Embed, Mlp))}, **there)
    for one in (made["w"], ar.shard_tree(model, **there)["up"]):
        assert one.array.sharding == jax.sharding.NamedSharding(there["mesh"], P("data", "model"))

try:
    ar.plan({"odd": hax.named(np.zeros((6, 4)), (hax.Axis("embed", 6), Mlp))}, dtype="float32", **OPTIONS)
except ar.DivisibilityError as error:
    assert error.paths == ("odd",) and error.names == ("embed", "mlp")
else:
    raise AssertionError("6 divides over 4")

same = {"in": up, "out": up}
assert ar.plan(same, **OPTIONS).placement("out").tied_to == "in"
tied = ar.shard_tree(same, **OPTIONS)
assert tied["in"].array is tied["out"].array
print("ok")
"""

LAYERS = """
import equinox as eqx

class Block(eqx.Module):
    up: hax.nn.Linear
    scale: hax.NamedArray

with_layers = Block(
    hax.nn.Linear.init(Embed, Mlp, key=jax.random.key(0)), hax.ones(Embed))
plan = ar.plan(with_layers, **OPTIONS)
specs = {p.path: dict(zip(p.names, p.spec, strict=True)) for p in plan.placements}
assert specs == {
    "up/weight": {"embed": "data", "mlp": "model"}, "up/bias": {"mlp": "model"}, "scale": {"embed": "data"},
}, specs
placed = ar.shard_tree(with_layers, **OPTIONS)
assert type(placed) is Block and placed.up.In == Embed
x = hax.ones((hax.Axis("batch", 2), Embed))
assert np.allclose(placed.up(x).array, with_layers.up(x).array, rtol=1e-6)
arrays, rest = eqx.partition(with_layers, eqx.is_array)
assert ar.shard_tree(rest, **OPTIONS).up.weight.array is None
assert ar.shard_tree(arrays, **OPTIONS).up.weight.array.sharding.is_equivalent_to(placed.up.weight.array.sharding, 2)

def make(key):
    return Block(hax.nn.Linear.init(Embed, Mlp, key=key), hax.ones(Embed))

born = ar.init(make, args=(jax.random.key(0),), **OPTIONS)
assert born.up.weight.array.sharding.is_equivalent_to(placed.up.weight.array.sharding, 2)
print("ok")
"""


def run(code, *paths):
    head = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    return subprocess.run(
        [sys.executable, "-c", head + HEAD + textwrap.dedent(code)], capture_output=True, text=True
    )


@pytest.fixture
def entry_point(tmp_path):
    """A folder that makes the package's entry points known, as installing it would."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "entry" / f"axisrules_haliax-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info.parent


def test_a_published_adapter_would_serve_every_action(entry_point, tmp_path):
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "haliax.py").write_text(STAND_IN)
    done = run(ARRAYS, entry_point, PACKAGE, tmp_path / "stand_in")
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_without_the_entry_point_the_names_of_the_arrays_are_not_seen(tmp_path):
    (tmp_path / "haliax.py").write_text(STAND_IN)
    done = run(ARRAYS, PACKAGE, tmp_path)
    assert "MissingNamesError" in done.stderr, done.stderr


@pytest.mark.parametrize("code", [ARRAYS, LAYERS], ids=["arrays", "layers"])
def test_haliax_itself_is_served_alike(entry_point, code):
    """haliax 1.3 needs an older JAX than axisrules does; 1.4.dev453 works on jax 0.10.2."""
    if importlib.util.find_spec("haliax") is None:
        pytest.skip("haliax is not installed here")
    probe = subprocess.run([sys.executable, "-c", "import haliax"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"the installed haliax does not import: {probe.stderr.splitlines()[-1]}")
    done = run(code, entry_point, PACKAGE)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["ok"], 0), done.stderr
