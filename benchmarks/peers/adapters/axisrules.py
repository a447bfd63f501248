"""axisrules, as its README says: a tree of names, `plan`, `shard_tree`, `constrain` and `init`."""

import jax
from cases import nest
from worker import reported, serve

import axisrules as ar


class Adapter:
    packages = ("axisrules",)
    lacks = {}

    def resolve(self, case):
        if not case.raw.get("explain", True):
            rules = ar.Rules(case.rules)
            return lambda: {p: ar.logical_to_mesh_axes(leaf.names, rules) for p, leaf in case.tree.items()}
        return lambda: self._planned(case, self._names(case))

    def plan(self, case):
        names, rules, mesh, tree = (
            self._names(case),
            ar.Rules(case.rules),
            case.mesh,
            nest(case.arrays),
        )
        return lambda: ar.plan(tree, names, mesh=mesh, rules=rules).shardings

    def shard_tree(self, case):
        names, tree = self._names(case), nest(case.arrays)
        policies = {option: value for option, value in case.options.items() if option != "max_replicated"}

        def run():
            report = self._planned(case, names).report if case.raw.get("explain", True) else []
            made = ar.shard_tree(
                tree,
                names,
                mesh=case.mesh or {},
                rules=ar.Rules(case.rules),
                **policies,
            )
            return reported(made, report)

        return run

    def constraint(self, case):
        names, (path,) = self._names(case), case.arrays
        manual = case.options.get("manual_axes", ())
        policies = {option: value for option, value in case.options.items() if option != "manual_axes"}

        def inside(tree):
            return ar.constrain(tree, names, rules=ar.Rules(case.rules), **policies)

        if manual:
            only = [(name, axes) for name, axes in case.rules if axes in manual]
            spec = ar.logical_to_mesh_axes(case.tree[path].names, only)
            inside = jax.shard_map(inside, in_specs=spec, out_specs=spec, axis_names=set(manual))

        def run():
            with jax.set_mesh(case.mesh):
                return jax.jit(inside)(nest(case.arrays))

        return run

    def init(self, case):
        names, optimizer = self._names(case), case.optimizer()
        rules = ar.Rules(case.rules)

        def make():
            return nest(case.make())

        def run():
            made = ar.init(make, names, mesh=case.mesh, rules=rules, **case.options)
            if optimizer is None:
                return made
            moments = ar.Rules(case.raw["optimizer_rules"]) if "optimizer_rules" in case.raw else rules
            states = ar.state_names(jax.eval_shape(optimizer.init, made), made, names)
            state = ar.init(lambda: optimizer.init(made), states, mesh=case.mesh, rules=moments)
            return {**made, "opt": state}

        return run

    def restore(self, case):
        names, rules = self._names(case), ar.Rules(case.rules)
        return lambda: ar.checkpoints.restore_orbax(case.checkpoint, names, mesh=case.mesh, rules=rules)

    def _names(self, case):
        if "path_rules" in case.raw:
            return ar.NameTable([(pattern, tuple(names)) for pattern, names in case.raw["path_rules"]])
        return nest({path: leaf.names for path, leaf in case.tree.items() if leaf.names is not None})

    def _planned(self, case, names):
        policies = dict(case.options)
        replicated, _ = (
            policies.pop("max_replicated", None),
            policies.pop("donate", None),
        )
        plan = ar.plan(
            nest(case.arrays),
            names,
            mesh=case.mesh or {},
            rules=ar.Rules(case.rules),
            **policies,
        )
        plan.check(max_replicated=replicated)
        leaves = {placement.path: placement.spec for placement in plan.placements}
        return reported(leaves, [_row(row) for row in plan.report])


def _row(row):
    found = {key: getattr(row, key) for key in ("path", "dim", "name", "reason", "axis", "bytes")}
    return {**found, "holder_dim": row.holder}


serve(Adapter())
