"""``shard_map`` with axis names for specs.

Owns the translation of names to the specs that ``jax.shard_map`` takes. Decides no layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from axisrules._constrain import constrain, entry_names, warn_once
from axisrules._entries import find_entries
from axisrules._errors import AxisRulesError, NamesError, raise_all
from axisrules._layout import manual_axes, mesh_here, only_axes, without_axes
from axisrules._meshes import MeshLike, axis_sizes, need_mesh
from axisrules._policies import Policies, policies
from axisrules._resolve import resolve_array
from axisrules._rules import Rules, RulesLike
from axisrules._scope import need_rules
from axisrules._specs import check_spec
from axisrules._trees import NO_ENTRY, flatten


def shard_map(
    f: Callable[..., Any],
    *,
    in_names: Any,
    out_names: Any,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    axis_names: Iterable[str] = (),
    check_vma: bool = True,
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
) -> Callable[..., Any]:
    """``jax.shard_map`` with axis names instead of specs.

    The arguments are laid out where their names say first, as ``constrain`` does; ``f`` then sees
    the local block of every manual axis.

    Args:
        f: The function to run once per device.
        in_names: Names per positional argument, in a tuple; a text in short form stands for the
            only argument. The names of an argument that is a tree may have any form that ``plan``
            takes.
        out_names: Names of the result, in any form that ``plan`` takes. The sizes of results are not
            known beforehand: a name that an argument bears is laid out as there, and where a result
            alone bears a name whose size may not fit, give a ``PartitionSpec``.
        mesh: The mesh; by default the active one when the result is called.
        rules: The rules; by default the active ones when the result is called.
        axis_names: The mesh axes that ``f`` handles itself; all by default.
        check_vma: As in ``jax.shard_map``.
        taken: As in ``resolve``.
        indivisible: As in ``resolve``.
        absent: As in ``resolve``.
        unmapped: As in ``resolve``.

    Returns:
        A function of as many positional arguments.

    Raises:
        AxisRulesError: When called: names do not fit; every failure is in the one error.

    Example:
        >>> import axisrules as ar, jax, jax.numpy as jnp
        >>> from functools import partial
        >>> @partial(ar.shard_map, in_names="batch feature", out_names="",
        ...          mesh=ar.make_mesh("data=4,model=2"), rules={"batch": "data", "feature": None})
        ... def global_mean(block):  # (2, 16) of (8, 16)
        ...     return jax.lax.pmean(block.mean(), axis_name="data")
        >>> float(global_mean(jnp.ones((8, 16))))
        1.0
    """
    chosen = policies(taken, indivisible, absent, unmapped)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        found, known = need_mesh(mesh), need_rules(rules)
        outer = frozenset(manual_axes(mesh_here(found)))
        manual = frozenset(axis_names) or frozenset(found.axis_names) - outer
        job = Job(found, known, chosen, outer, {})
        placed = _specs_of_arguments(args, in_names, job)
        laid = constrain(args, placed, mesh=found, rules=known)
        over = functools.partial(
            jax.shard_map, f, mesh=found, in_specs=_only(placed, manual), axis_names=manual
        )
        result = jax.eval_shape(over(out_specs=PartitionSpec(), check_vma=False), *laid)
        out_specs = _only(_specs(result, out_names, job.for_results()), manual)
        return over(out_specs=out_specs, check_vma=check_vma)(*laid)

    return call


class Job(NamedTuple):
    """What names are resolved with; the shapes of a result are local and say nothing of what divides."""

    mesh: Mesh | AbstractMesh
    rules: Rules
    policy: Policies
    manual: frozenset[str]  # axes that a surrounding shard_map handles
    sized: dict[str, list[Any]]  # by name: what every argument gave it, where its size made the choice
    local: bool = False

    def for_results(self) -> Job:
        """The job for results, whose shapes are local.

        A name to which every argument gave less than its rules say, since a size did not fit, gets
        the same in the results.
        """
        rules = self.rules
        for name, found in self.sized.items():
            if None not in found:
                rules = rules.replace(name, max(found, key=len))
        return self._replace(rules=rules, local=True)


def _specs_of_arguments(args: tuple[Any, ...], names: Any, job: Job) -> tuple[Any, ...]:
    given = tuple(names) if isinstance(names, (tuple, list)) else (names,)
    if len(given) != len(args):
        raise NamesError(
            f"in_names has {len(given)} entries for {len(args)} arguments",
            fix='give one entry per argument, such as in_names=("batch embed", "embed mlp").',
        )
    specs, failures = [], []
    for number, (arg, its) in enumerate(zip(args, given, strict=True)):
        try:
            specs.append(_specs(arg, its, job))
        except AxisRulesError as error:
            failures += [one.at(_below(number, one.paths)) for one in error.failures or [error]]
    raise_all(failures)
    return tuple(specs)


def _below(argument: int, paths: Sequence[str]) -> list[str]:
    return [f"{argument}/{path}".rstrip("/") for path in paths or [""]]


def _specs(tree: Any, names: Any, job: Job) -> Any:
    """The spec of every array of a tree."""
    flat = flatten(tree)
    found = find_entries(tree, flat, names)
    failures: list[AxisRulesError] = list(found.problems)
    specs: list[PartitionSpec] = []
    for path, leaf, entry in zip(flat.paths, flat.leaves, found.entries, strict=True):
        try:
            specs.append(_spec(getattr(leaf, "shape", ()), entry, job))
        except AxisRulesError as error:
            failures += error.singles_at(path)
    raise_all(failures)
    return flat.rebuild(specs)


def _spec(shape: tuple[int, ...], entry: Any, job: Job) -> PartitionSpec:
    if isinstance(entry, PartitionSpec):
        known_shape = tuple(0 for _ in shape) if job.local else shape  # 0 divides over anything
        resolution = check_spec(without_axes(entry, job.manual), job.rules, axis_sizes(job.mesh), known_shape)
        raise_all(resolution.problems)
        return resolution.spec
    whole = not shape and entry is NO_ENTRY
    names = () if whole else entry_names(entry, shape)
    known = None if job.local else shape
    resolution = resolve_array(names, job.rules, axis_sizes(job.mesh), known, job.policy, job.manual)
    raise_all(resolution.problems)
    for dim in () if job.local else resolution.dims:
        sized = any(skip.reason in _SIZED for skip in dim.skips)
        job.sized.setdefault(dim.name, []).append(dim.axes if sized else None)
    if job.policy.unmapped == "warn":
        warn_once(job.rules, [resolution])
    return resolution.spec


_SIZED = {"size_one_dim", "indivisible", "partly_divisible"}


def _only(specs: Any, axes: frozenset[str]) -> Any:
    """The specs of a tree without any other axes."""
    return jax.tree.map(
        lambda spec: only_axes(spec, axes), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )
