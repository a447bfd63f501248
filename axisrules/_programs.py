"""Compiled programs, and the running of a function that was cut into them.

Owns what is compiled once and shared, the order of the runs, and how much is in flight. Decides no
layout of a result; what lies between programs is spread by the engine's ``fill``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axisrules import _compat
from axisrules._forms import Forms
from axisrules._meshes import axis_sizes
from axisrules._place import put_global
from axisrules._policies import Policies
from axisrules._resolve import remember, resolve_array
from axisrules._rules import Rules
from axisrules._slices import Cut, Step, as_function, dtype_of, shape_of

_SPREAD = 2**16  # elements from which on a value between programs is split over the mesh


class Target(NamedTuple):
    """Where an output goes, and the dtype that it takes."""

    sharding: NamedSharding
    dtype: Any


_Program: TypeAlias = Callable[..., Sequence[jax.Array]]

# Every program with its form, which keeps alive what the form compares by identity.
_COMPILED: dict[Any, _Program] = {}


def run(
    parts: Cut, arguments: Sequence[Any], targets: Mapping[Var, Target], mesh: Mesh, like: ClosedJaxpr
) -> dict[Var, Any]:
    """The values of all outputs.

    Args:
        parts: The function.
        arguments: Its arguments.
        targets: Where its outputs go. What is evaluated directly, or is there already, comes as it is.
        mesh: The mesh, with Auto axes.
        like: The function as it was traced.
    """
    values = {**parts.known, **dict(zip(parts.inputs, arguments, strict=True))}
    runner = _Runner(parts.steps, targets, mesh, like)
    given = [values[var] for var in parts.direct.inputs]
    values.update(zip(parts.direct.outputs, runner.evaluate(parts.direct, given), strict=True))
    with jax.set_mesh(mesh):
        runner.run(values)
    return {var: values[var] for var in targets}


class _Runner:
    def __init__(
        self, steps: Sequence[Step], targets: Mapping[Var, Target], mesh: Mesh, like: ClosedJaxpr
    ) -> None:
        self.steps, self.targets, self.mesh, self.like = steps, targets, mesh, like
        self.last_use = {var: number for number, step in enumerate(steps) for var in step.inputs}
        self.forms = Forms()
        self.made: set[Var] = set()

    def evaluate(self, direct: Step, given: Sequence[Any]) -> Sequence[Any]:
        """What is exact however it is computed, away from the mesh where that can be.

        A value that was captured on Explicit axes has their mesh in its type, and so has every nested
        program that it goes into: JAX takes such ones as parts of a program on the mesh alone.
        """
        call = jaxpr_as_fun(as_function(direct, self.like))
        if any(_is_explicit(getattr(var.aval, "sharding", None)) for var in direct.inputs):
            with jax.set_mesh(self.mesh):
                return list(jax.jit(call)(*map(self._on_mesh, given)))
        return list(call(*[_alone(value, self.mesh) for value in given]))

    def run(self, values: dict[Var, Any]) -> None:
        """Runs the steps one after another, and gives up what no later one reads."""
        largest = max((_nbytes(var) for step in self.steps for var in step.outputs), default=0)
        in_flight: list[jax.Array] = []
        size = 0
        for number, step in enumerate(self.steps):
            for var in step.inputs:
                if var not in self.made:
                    values[var] = self._on_mesh(values[var])
            made = self._program(step)(*[values[var] for var in step.inputs])
            values.update(zip(step.outputs, made, strict=True))
            self.made.update(step.outputs)
            for var in step.inputs:
                if self.last_use[var] == number and var not in self.targets:
                    del values[var]
            in_flight += made
            size += sum(map(_nbytes, step.outputs))
            if size >= largest:
                jax.block_until_ready(in_flight)
                in_flight, size = [], 0

    def _program(self, step: Step) -> _Program:
        """The compiled step, which is shared by all that do the same and put it at the same place."""
        targets = tuple([self._target(var) for var in step.outputs])
        form = self.forms.program(step.inputs, step.constants, step.eqns, step.outputs)
        found = _COMPILED.get((form, targets))
        if found is None:
            found = _compile(as_function(step, self.like), targets)
            remember(_COMPILED, (form, targets), found)
        return found

    def _target(self, var: Var) -> Target:
        found = self.targets.get(var)
        if found is None:
            return Target(self._spread(shape_of(var)), dtype_of(var))
        # what a later step reads keeps its dtype
        return found._replace(dtype=dtype_of(var)) if var in self.last_use else found

    def _spread(self, shape: tuple[int, ...]) -> NamedSharding:
        """A layout for what lies between programs: split as far as it divides, if it is large."""
        if math.prod(shape) < _SPREAD:
            return NamedSharding(self.mesh, PartitionSpec())
        sizes = axis_sizes(self.mesh)
        found = resolve_array(
            (None,) * len(shape), Rules(()), sizes, shape, Policies(), fill=tuple(self.mesh.axis_names)
        )
        return NamedSharding(self.mesh, found.spec)

    def _on_mesh(self, value: Any) -> Any:
        """An argument or a captured array where the programs can read it."""
        if isinstance(value, jax.Array):
            sharding = value.sharding
            if _devices(sharding) == list(self.mesh.devices.flat) and not _is_explicit(sharding):
                return value
            if not getattr(value, "committed", True) and value.size < _SPREAD:
                return value
            if isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple == self.mesh.shape_tuple:
                spec = PartitionSpec(*tuple(sharding.spec)[: value.ndim])  # of a key JAX may give more
                return jax.device_put(value, NamedSharding(self.mesh, spec))  # moves no byte
        target = self._spread(value.shape)
        if not target.is_fully_addressable:
            return put_global(jnp.asarray(value), target)
        return jax.device_put(_compat.movable(value, self.mesh), target)


def _alone(value: Any, mesh: Mesh) -> Any:
    """A key or small integers, for evaluation away from the mesh that they lie on."""
    if not isinstance(value, jax.Array):
        return value
    if len(value.sharding.device_set) == 1 and not _is_explicit(value.sharding):
        return value
    if not value.is_fully_replicated:
        value = jax.device_put(_compat.movable(value, mesh), NamedSharding(mesh, PartitionSpec()))
    local = value.addressable_shards[0].data
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jnp.asarray(np.asarray(local))
    data = jnp.asarray(np.asarray(jax.random.key_data(local)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(local))


def _devices(sharding: Any) -> list[Any]:
    """The devices in their order, where there is one."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set) if len(sharding.device_set) == 1 else []


def _is_explicit(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _compile(program: ClosedJaxpr, targets: Sequence[Target]) -> _Program:
    function = jaxpr_as_fun(program)

    def call(*arguments: Any) -> list[Any]:
        made = function(*arguments)
        return [
            value if value.dtype == target.dtype else value.astype(target.dtype)
            for value, target in zip(made, targets, strict=True)
        ]

    return jax.jit(call, out_shardings=[target.sharding for target in targets])


def _nbytes(var: Var) -> int:
    return math.prod(shape_of(var)) * int(dtype_of(var).itemsize)
