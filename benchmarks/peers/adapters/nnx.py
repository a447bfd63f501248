"""Flax NNX: variables that carry names, laid out when they are made, under rules and a mesh in context."""

import contextlib

import jax
from cases import NotApplicableError, flat, nest
from flax import nnx
from worker import restored, serve


class Model(nnx.Module):
    def __init__(self, variables):
        for name, value in variables.items():
            setattr(self, name, nnx.data(_module(value)))


def _module(value):
    return Model(value) if isinstance(value, dict) else value


class Adapter:
    packages = ("flax",)
    lacks = {"constraint": "has no constraint by names"}

    @contextlib.contextmanager
    def scope(self, case):
        """The rules and the mesh, which NNX takes from the context alone."""
        mesh = contextlib.nullcontext() if case.mesh is None else jax.set_mesh(case.mesh)
        with mesh, nnx.logical_axis_rules(case.rules):
            yield

    def resolve(self, case):
        case.only(unmapped=["error"])  # an unknown name is taken for a mesh axis, which JAX refuses
        return self.plan(case)

    def plan(self, case):
        with nnx.use_eager_sharding(False):
            variables = nest(self._variables(case, case.arrays))
        return lambda: nnx.get_partition_spec(variables)

    def shard_tree(self, case):
        case.only(unmapped=["error"], unnamed=["replicate"], donate=...)
        case.paths_stand_for_names()
        with nnx.use_eager_sharding(case.mesh is None):  # the arrays exist; without a mesh this says so
            variables = nest(self._variables(case, case.arrays))
        donate = case.options.get("donate", False)

        def run():
            shardings = nnx.get_named_sharding(variables, case.mesh)
            return jax.device_put(variables, shardings, donate=donate)

        return run

    def init(self, case):
        case.only()
        optimizer = case.optimizer()
        if "optimizer_rules" in case.raw:
            raise NotApplicableError("moments take the metadata of the parameters")

        @nnx.jit
        def make():
            model = Model(nest(self._variables(case, case.make())))
            return model if optimizer is None else (model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))

        def run():
            if optimizer is None:
                return nnx.state(make()).to_pure_dict()
            model, state = make()
            moments = nnx.state(state, nnx.optimizer.OptState).to_pure_dict()["opt_state"]
            return {**nnx.state(model).to_pure_dict(), "opt": moments}

        return run

    def restore(self, case):
        def model():
            return Model(nest(self._variables(case, case.make())))

        def run():
            _, target = nnx.get_abstract_model(model, case.mesh)
            return restored(case, self.read(nnx.to_pure_dict(target)))

        return run

    def read(self, tree):
        found = flat(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return {p: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf for p, leaf in found.items()}

    def _variables(self, case, arrays):
        return {
            path: nnx.Param(array)
            if case.tree[path].names is None
            else nnx.Param(array, out_sharding=case.tree[path].names)
            for path, array in arrays.items()
            if case.tree[path].shape is not None  # a module keeps a function out of its state
        }


serve(Adapter())
