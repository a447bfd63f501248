"""haliax: named arrays, a mapping from their axes to mesh axes, `shard` and `named_jit`."""

import contextlib

import haliax as hax
import jax
from cases import NotApplicableError, flat
from haliax.partitioning import infer_resource_partitions, pspec_for_axis
from worker import restored, serve


class Adapter:
    packages = ("haliax",)
    lacks = {}

    def resolve(self, case):
        case.only(unmapped=["replicate"])
        mapping = self._mapping(case)
        axes = {path: array.axes for path, array in self._named(case, case.arrays).items()}
        return lambda: {path: pspec_for_axis(each, mapping) for path, each in axes.items()}

    def plan(self, case):
        mapping, tree = self._mapping(case), self._named(case, case.arrays)

        def run():
            with jax.set_mesh(case.mesh):
                return infer_resource_partitions(tree, mapping, preserve_existing_shardings=False)

        return run

    def shard_tree(self, case):
        case.only(unmapped=["replicate"])
        case.paths_stand_for_names()
        mapping, named = self._mapping(case), self._named(case, case.arrays)

        def run():
            with self._mesh(case):
                return hax.shard(named, mapping)

        return run

    def constraint(self, case):
        case.only(unmapped=["replicate"], manual_axes=...)
        mapping, named = self._mapping(case), self._named(case, case.arrays)
        manual = case.options.get("manual_axes")

        def inside(tree):
            return hax.shard(tree, mapping)

        if manual:
            axes = self._axes(next(iter(case.tree.values())))
            spec = pspec_for_axis(axes, {name: axis for name, axis in mapping.items() if axis in manual})
            inside = jax.shard_map(inside, in_specs=spec, out_specs=spec, axis_names=set(manual))

        def run():
            with self._mesh(case):
                return jax.jit(inside)(named)

        return run

    def init(self, case):
        case.only()
        mapping, optimizer = self._mapping(case), case.optimizer()

        def run():
            with self._mesh(case):
                made = hax.named_jit(lambda: self._named(case, case.make()), axis_resources=mapping)()
                if optimizer is None:
                    return made
                moments = dict(case.raw.get("optimizer_rules", mapping))
                state = hax.named_jit(optimizer.init, out_axis_resources=moments)(made)
                return {**made, "opt": state}

        return run

    def restore(self, case):
        plan = self.plan(case)
        return lambda: restored(case, self.read(plan()))

    def read(self, tree):
        found = flat(tree, is_leaf=lambda x: isinstance(x, hax.NamedArray))
        return {path: getattr(leaf, "array", leaf) for path, leaf in found.items()}

    def _mapping(self, case):
        return {name: axes for name, axes in case.single_rules().items() if axes is not None}

    def _mesh(self, case):
        return contextlib.nullcontext() if case.mesh is None else hax.set_mesh(case.mesh)

    def _axes(self, leaf):
        """Every axis has a name in haliax; one that no rule knows stands for none."""
        if jax.P.UNCONSTRAINED in leaf.names:
            raise NotApplicableError("a dimension cannot be left unconstrained")
        return tuple(f"unnamed_{dim}" if name is None else name for dim, name in enumerate(leaf.names))

    def _named(self, case, arrays):
        return {
            path: array if case.tree[path].names is None else _named(array, self._axes(case.tree[path]))
            for path, array in arrays.items()
        }


def _named(array, names):
    if isinstance(array, jax.ShapeDtypeStruct):
        return hax.NamedArray(array, tuple(map(hax.Axis, names, array.shape)))
    return hax.named(array, names)


serve(Adapter())
