"""taktiny: names to shardings by `utils.sharding`, initializers that are born sharded."""

import jax
from cases import NotApplicableError, flat, nest
from taktiny.takt.optimizer import Optimizer
from taktiny.utils import sharding, spmd
from worker import restored, serve


class Adapter:
    packages = ("taktiny",)
    lacks = {}

    def resolve(self, case):
        case.only(unmapped=["replicate"])
        return lambda: {
            path: spmd.logical_to_mesh_axes(leaf.names, case.rules) for path, leaf in case.tree.items()
        }

    def plan(self, case):
        names = nest({path: jax.P(*leaf.names) for path, leaf in case.tree.items()})
        return lambda: sharding.logical_to_mesh_sharding(names, case.mesh, case.rules)

    def shard_tree(self, case):
        case.only(unmapped=["replicate"], unnamed=["replicate"], donate=...)
        case.paths_stand_for_names()
        donate = case.options.get("donate", False)

        def run():
            shardings = {path: self._sharding(case, path) for path in case.arrays}
            return jax.device_put(case.arrays, shardings, donate=donate)

        return run

    def constraint(self, case):
        case.only(unmapped=["replicate"])
        (path,) = case.tree
        return lambda: {
            path: jax.jit(lambda x: x, out_shardings=self._sharding(case, path))(case.arrays[path])
        }

    def init(self, case):
        case.only()
        optimizer = case.optimizer()
        if "optimizer_rules" in case.raw:
            raise NotApplicableError("moments inherit the layout of the parameters")
        keys = jax.random.split(jax.random.key(0), len(case.tree))

        def run():
            with jax.set_mesh(case.mesh), spmd.map_logical_axis_names(case.rules):
                made = {
                    path: spmd.with_logical_partitioning(_initializer(leaf), leaf.names)(
                        key, leaf.shape, leaf.dtype
                    )
                    for key, (path, leaf) in zip(keys, case.tree.items(), strict=True)
                }
                if optimizer is None:
                    return made
                return {**made, "opt": Optimizer(nest(made), optimizer).state}

        return run

    def restore(self, case):
        plan = self.plan(case)
        return lambda: restored(case, flat(plan()))

    def _sharding(self, case, path):
        leaf = case.tree[path]
        names = leaf.names
        if names is None and (leaf.shape == () or case.options.get("unnamed") == "replicate"):
            names = ()
        return sharding.create_sharding(case.mesh, names, case.rules)


def _initializer(leaf):
    return jax.nn.initializers.normal() if leaf.dtype.startswith("float") else jax.nn.initializers.zeros


serve(Adapter())
