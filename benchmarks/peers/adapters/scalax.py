"""scalax: patterns of paths to specs, `match_sharding_rule`, shard functions and `sjit`.

It has no names: the user writes the spec of every path. The adapter writes it as a user would who
reads the rules as a table of one axis a name, and leaves out what asks for more than that.
"""

import re

import jax
from cases import NotApplicableError, flat, nest
from scalax.sharding import (
    MeshShardingHelper,
    PartitionSpec,
    TreePathShardingRule,
    with_sharding_constraint,
)
from worker import restored, serve


class Adapter:
    packages = ("scalax",)
    lacks = {"resolve": "has no names: every spec is written by hand"}

    def plan(self, case):
        helper, rule = self._helper(case), self._rule(case)
        tree = nest(case.arrays)
        return lambda: helper.match_sharding_rule(rule, tree)

    def shard_tree(self, case):
        case.only(unnamed=["replicate"])
        helper, rule, tree = self._helper(case), self._rule(case), nest(case.arrays)

        def run():
            shard, _ = helper.make_shard_and_gather_fns(tree, rule)
            return helper.apply_shard_and_gather_fns(shard, tree)

        return run

    def constraint(self, case):
        case.only()
        helper, rule, tree = self._helper(case), self._rule(case), nest(case.arrays)
        return lambda: helper.sjit(lambda x: with_sharding_constraint(x, rule))(tree)

    def init(self, case):
        case.only()
        helper, rule, optimizer = self._helper(case), self._rule(case), case.optimizer()
        if "optimizer_rules" in case.raw:
            rule = TreePathShardingRule(
                *self._patterns(case, dict(case.raw["optimizer_rules"]), "^opt/.*/"),
                *rule.rules,
            )

        def make():
            made = nest(case.make())
            return made if optimizer is None else {**made, "opt": optimizer.init(made)}

        return lambda: helper.sjit(make, out_shardings=rule)()

    def restore(self, case):
        plan = self.plan(case)
        return lambda: restored(case, flat(plan()))

    def _helper(self, case):
        if case.mesh is None:
            raise NotApplicableError("every call is a method of a mesh")
        if jax.sharding.AxisType.Explicit in case.mesh.axis_types:
            raise NotApplicableError("makes its own mesh, of Auto axes")
        if case.mesh.size < jax.device_count():
            raise NotApplicableError("makes its own mesh, of all devices")
        return MeshShardingHelper(case.mesh.devices.shape, case.mesh.axis_names)

    def _rule(self, case):
        strict = case.options.get("unnamed") != "replicate"
        return TreePathShardingRule(*self._patterns(case, case.single_rules(), "(^|/)"), strict=strict)

    def _patterns(self, case, axes, start):
        if "path_rules" in case.raw:
            return [
                (f"^{_regex(pattern)}$", PartitionSpec(*(axes[name] for name in names)))
                for pattern, names in case.raw["path_rules"]
            ]
        found = {  # the layers of a model are one pattern
            f"{start}{re.sub('[0-9]+', '[0-9]+', re.escape(path))}$": self._spec(leaf, axes)
            for path, leaf in case.tree.items()
            if leaf.names is not None
        }
        return list(found.items())

    def _spec(self, leaf, axes):
        if not all(name is None or name in axes for name in leaf.names):
            raise NotApplicableError("has no names: every spec is written by hand")
        return PartitionSpec(*(None if name is None else axes[name] for name in leaf.names))


def _regex(pattern):
    return re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")


serve(Adapter())
