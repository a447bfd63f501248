"""substrax, the mesh code of datarax: `MeshRules` of four names, one mesh axis each."""

import dataclasses

import jax
from cases import NotApplicableError, nest
from substrax.mesh.rules import (
    MeshRules,
    create_named_sharding,
    partition_spec_for_names,
)
from worker import restored, serve

FIELDS = tuple(field.name for field in dataclasses.fields(MeshRules))


class Adapter:
    packages = ("substrax", "flax")
    lacks = {"constraint": "has no constraint by names"}

    def resolve(self, case):
        case.only(unmapped=["error"])
        rules = self._rules(case)
        names = {path: self._known(leaf.names) for path, leaf in case.tree.items()}
        return lambda: {path: partition_spec_for_names(rules, *each) for path, each in names.items()}

    def plan(self, case):
        rules = self._rules(case)
        names = {path: self._known(leaf.names) for path, leaf in case.tree.items()}
        return lambda: {path: create_named_sharding(case.mesh, *rules(*each)) for path, each in names.items()}

    def shard_tree(self, case):
        case.only(unmapped=["error"], unnamed=["replicate"], donate=...)
        case.paths_stand_for_names()
        shardings = self.plan(case)
        donate = case.options.get("donate", False)
        return lambda: jax.device_put(case.arrays, shardings(), donate=donate)

    def init(self, case):
        case.only()
        if "optimizer" in case.raw:
            raise NotApplicableError("has nothing for the layout of an optimizer's state")
        shardings = self.plan(case)
        return lambda: jax.jit(lambda: nest(case.make()), out_shardings=nest(shardings()))()

    def restore(self, case):
        plan = self.plan(case)
        return lambda: restored(case, plan())

    def _rules(self, case):
        rules = case.single_rules()
        unknown = [name for name in rules if name not in FIELDS]
        if unknown:
            raise NotApplicableError(f"its names are {', '.join(FIELDS)} alone")
        if any(isinstance(axes, tuple) for axes in rules.values()):
            raise NotApplicableError("one mesh axis a name")
        return MeshRules(**rules)

    def _known(self, names):
        if names is None:
            return ()  # the spec of a leaf that nobody named
        if not all(isinstance(name, str) for name in names):
            raise NotApplicableError("a dimension without a name cannot be written")
        return names


serve(Adapter())
