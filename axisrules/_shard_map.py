"""``shard_map`` with axis names for specs.

Owns the translation of names to the specs that ``jax.shard_map`` takes. Decides no layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from axisrules._constrain import constrain
from axisrules._entries import find_entries
from axisrules._errors import AxisRulesError, NamesError, raise_all
from axisrules._meshes import MeshLike, axis_sizes, need_mesh
from axisrules._names import fit_names, parse_names
from axisrules._resolve import policies, resolve_array
from axisrules._rules import RulesLike
from axisrules._scope import need_rules
from axisrules._specs import make_spec
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
        out_names: Names of the result, in any form that ``plan`` takes.
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
        manual = frozenset(axis_names) or frozenset(found.axis_names)
        names = _per_argument(in_names, len(args))
        options = {"mesh": found, "rules": known, **chosen._asdict()}
        laid = constrain(args, names, **options)

        def specs(tree: Any, names: Any, shapes: bool) -> Any:
            return _specs(tree, names, found, known, chosen, manual, shapes=shapes)

        over = functools.partial(
            jax.shard_map, f, mesh=found, in_specs=specs(args, names, shapes=True), axis_names=manual
        )
        result = jax.eval_shape(over(out_specs=PartitionSpec(), check_vma=False), *laid)
        return over(out_specs=specs(result, out_names, shapes=False), check_vma=check_vma)(*laid)

    return call


def _per_argument(names: Any, count: int) -> tuple[Any, ...]:
    given = tuple(names) if isinstance(names, (tuple, list)) else (names,)
    if len(given) != count:
        raise NamesError(
            f"in_names has {len(given)} entries for {count} arguments",
            fix='give one entry per argument, such as in_names=("batch embed", "embed mlp").',
        )
    return given


def _specs(
    tree: Any,
    names: Any,
    mesh: Mesh | AbstractMesh,
    rules: Any,
    policy: Any,
    manual: frozenset[str],
    *,
    shapes: bool,
) -> Any:
    """The specs of a tree, reduced to the manual axes.

    The shapes of a result are local, so only those of arguments say what divides.
    """
    flat = flatten(tree)
    found = find_entries(tree, flat, names)
    failures: list[AxisRulesError] = list(found.problems)
    specs: list[PartitionSpec] = []
    for path, leaf, entry in zip(flat.paths, flat.leaves, found.entries, strict=True):
        if not hasattr(leaf, "shape"):
            specs.append(PartitionSpec())
            continue
        try:
            specs.append(_spec(leaf.shape, entry, mesh, rules, policy, manual, shapes))
        except AxisRulesError as error:
            failures += [one.at([path] if path else []) for one in error.failures or [error]]
    raise_all(failures)
    return flat.rebuild(specs)


def _spec(
    shape: tuple[int, ...],
    entry: Any,
    mesh: Mesh | AbstractMesh,
    rules: Any,
    policy: Any,
    manual: frozenset[str],
    shapes: bool,
) -> PartitionSpec:
    whole = entry is None or (entry is NO_ENTRY and not shape)
    if isinstance(entry, PartitionSpec):
        entries = list(entry)
    else:
        names = (None,) * len(shape) if whole else fit_names(parse_names(entry), shape)
        resolution = resolve_array(names, rules, axis_sizes(mesh), shape if shapes else None, policy)
        raise_all(resolution.problems)
        entries = list(resolution.spec)
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    return make_spec(tuple(tuple(axis for axis in held if axis in manual) for held in axes))
