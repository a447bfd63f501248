"""Flax Linen: boxes with logical names, their shardings, and a jit or a device_put with these."""

import jax
from cases import flat, nest
from flax import linen as nn
from flax.core import meta
from worker import restored, serve


class Adapter:
    packages = ("flax",)
    lacks = {}

    def resolve(self, case):
        case.only(unmapped=["replicate"])
        return lambda: {
            path: nn.logical_to_mesh_axes(leaf.names, case.rules) for path, leaf in case.tree.items()
        }

    def plan(self, case):
        boxed = nest(self._boxed(case, case.arrays))
        return lambda: self._shardings(case, boxed)

    def shard_tree(self, case):
        case.only(unmapped=["replicate"], unnamed=["replicate"], donate=...)
        case.paths_stand_for_names()
        boxed = nest(self._boxed(case, case.arrays))

        def run():
            shardings = self._shardings(case, boxed)
            return jax.device_put(meta.unbox(boxed), shardings, donate=case.options.get("donate", False))

        return run

    def constraint(self, case):
        case.only(unmapped=["replicate", "error"], manual_axes=...)
        ((path, leaf),) = case.tree.items()
        refuses = case.options.get("unmapped") == "error"
        fallback = nn.spmd.RulesFallback["RAISE_ERROR" if refuses else "AXIS_IS_UNSHARDED"]
        manual = case.options.get("manual_axes")

        def inside(x):
            return nn.with_logical_constraint(x, leaf.names, rules=case.rules, fallback=fallback)

        if manual:
            only = [(name, axes) for name, axes in case.rules if axes in manual]
            spec = nn.logical_to_mesh_axes(leaf.names, only)
            inside = jax.shard_map(inside, in_specs=spec, out_specs=spec, axis_names=set(manual))

        def run():
            with jax.set_mesh(case.mesh):
                return {path: jax.jit(inside)(case.arrays[path])}

        return run

    def init(self, case):
        case.only()
        optimizer = case.optimizer()

        def make():
            params = nest(self._boxed(case, case.make()))
            return params if optimizer is None else {**params, "opt": optimizer.init(params)}

        def run():
            abstract = jax.eval_shape(make)
            shardings = self._shardings(case, abstract)
            if "optimizer_rules" in case.raw:
                shardings["opt"] = self._shardings(case, abstract["opt"], case.raw["optimizer_rules"])
            return jax.jit(lambda: meta.unbox(make()), out_shardings=shardings)()

        return run

    def restore(self, case):
        plan = self.plan(case)
        return lambda: restored(case, flat(plan()))

    def _boxed(self, case, arrays):
        return {
            path: array
            if case.tree[path].names is None
            else nn.LogicallyPartitioned(array, case.tree[path].names)
            for path, array in arrays.items()
        }

    def _shardings(self, case, boxed, rules=None):
        return nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), case.mesh, rules or case.rules)


serve(Adapter())
