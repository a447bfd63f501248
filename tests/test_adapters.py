"""The adapter protocol: a framework that is found by entry point, and raw pytrees through the same."""

import subprocess
import sys
import textwrap

import numpy as np

from axisrules._trees import NO_ENTRY, flatten

FRAMEWORK = """
class Box:  # no pytree: JAX takes it for a leaf
    def __init__(self, **fields):
        self.fields = fields

class Named:
    def __init__(self, value, names):
        self.value, self.names = value, names
"""

ADAPTER = """
from axisrules._trees import NO_ENTRY, Flat, flatten, join
import toyframe

class Adapter:
    def flatten(self, node):
        if isinstance(node, toyframe.Named):
            names = node.names
            return Flat([()], [node.value], [names], lambda new: toyframe.Named(new[0], names))
        parts = {name: flatten(value) for name, value in node.fields.items()}
        kind, names = type(node), list(parts)
        return join([(n,) for n in names], list(parts.values()), lambda new: kind(**dict(zip(names, new))))

adapter = Adapter()
"""

USE = """
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import axisrules as ar
import toyframe
from jax.sharding import PartitionSpec as P

class Mine(toyframe.Box):  # a user's class, by a base of the framework
    pass

def model():
    return {
        "net": Mine(up=toyframe.Named(np.ones((8, 4), np.float32), "embed mlp"), act=len, below=[toyframe.Box(b=np.ones(4, np.float32))]),
        "plain": np.ones(8, np.float32),
    }

assert "toyadapter" not in sys.modules
mesh, rules = ar.make_mesh("data=4,model=2"), {"embed": "data", "mlp": "model"}
try:
    ar.plan(model(), mesh=mesh, rules=rules)
except ar.MissingNamesError as error:
    assert error.paths == ("net/below/0/b", "plain"), error.paths
assert "toyadapter" in sys.modules

by_metadata = ar.plan(model(), mesh=mesh, rules=rules, unnamed="replicate")
assert {p.path: tuple(p.spec) for p in by_metadata.placements} == {
    "net/up": ("data", "model"), "net/below/0/b": (None,), "plain": (None,)}

names = {"net": {"up": "mlp embed", "below": [{"b": "mlp"}]}, "plain": "embed"}
table = ar.NameTable({"net/up": "mlp embed", "**/b": "mlp", "plain": "embed"})
functional = lambda path, leaf: table.find(path) if table.matches(path) else None
for given, types in ((names, {"data": "explicit"}), (table, "explicit"), (functional, "auto")):
    source, mesh = model(), ar.make_mesh("data=4,model=2", axis_types=types)
    placed = ar.shard_tree(source, given, mesh=mesh, rules=rules)
    assert placed["plain"].sharding.mesh == mesh
    assert type(placed["net"]) is Mine and placed["net"] is not source["net"]
    assert placed["net"].fields["act"] is len
    assert placed["net"].fields["up"].value.sharding.spec == P("model", "data")
    assert placed["net"].fields["below"][0].fields["b"].sharding.spec == P("model")
    assert isinstance(source["net"].fields["up"].value, np.ndarray)

try:
    ar.plan(model(), {"net": {"up": "mlp embed", "bellow": "mlp"}, "plain": "embed"}, mesh=mesh, rules=rules)
except ar.PlanError as error:
    assert [one.paths for one in error.failures] == [("net/bellow",), ("net/below/0/b",)], error
laid = ar.constrain(model(), names, mesh=mesh, rules=rules)
assert laid["net"].fields["up"].value.sharding.spec == P("model", "data")

import gc, weakref
source = model()
gone, made = weakref.ref(source["net"].fields["up"].value), ar.plan(source, names, mesh=mesh, rules=rules)
del source
gc.collect()
assert gone() is None, "a plan holds an array"
print("ok")
"""


def test_a_third_party_adapter_is_found_by_entry_point_and_loaded_when_needed(tmp_path):
    info = tmp_path / "toyadapter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyadapter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[axisrules.adapters]\ntoyframe = toyadapter:adapter\n")
    (tmp_path / "toyframe.py").write_text(FRAMEWORK)
    (tmp_path / "toyadapter.py").write_text(ADAPTER)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + textwrap.dedent(USE)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("ok\n", 0), run.stderr


def test_raw_pytrees_go_through_the_same_protocol():
    tree = {"a": [np.zeros(2), None], "b": ({"c": np.ones(1)},), "f": len}
    flat = flatten(tree)
    assert flat.paths == ["a/0", "b/0/c", "f"]
    assert flat.names == [NO_ENTRY] * 3
    assert flat.rebuild(["x", "y", "z"]) == {"a": ["x", None], "b": ({"c": "y"},), "f": "z"}
