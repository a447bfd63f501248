"""One input as an adapter gets it: arrays, mesh and rules as JAX users hold them, made from JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec


class NotApplicableError(Exception):
    """The peer's API cannot express the input; the text says why."""


@dataclass(frozen=True)
class Leaf:
    """One array of the input; names is None where the input says nothing about it."""

    shape: tuple[int, ...] | None
    dtype: str
    names: tuple[Any, ...] | None


@dataclass(frozen=True)
class Case:
    """One input, with its values in the form that JAX users hold them."""

    call: str
    mesh: Mesh | None
    rules: tuple[tuple[str, Any], ...]
    tree: dict[str, Leaf]
    arrays: dict[str, Any]
    options: dict[str, Any]
    raw: dict[str, Any] = field(repr=False)
    checkpoint: Path | None = None  # of Orbax, with the values of `arrays`

    def only(self, **known: Any) -> None:
        """Refuse any option that is neither known nor what the peer does anyway."""
        for option, value in self.options.items():
            if option not in known:
                raise NotApplicableError(f"has nothing like {option}={value!r}")
            if known[option] is not Ellipsis and value not in known[option]:
                raise NotApplicableError(f"cannot be asked for {option}={value!r}")

    def paths_stand_for_names(self) -> None:
        if "path_rules" in self.raw:
            raise NotApplicableError("has no table from paths to names")

    def single_rules(self) -> dict[str, Any]:
        """The rules as a dict, where no name has a second one."""
        if len(dict(self.rules)) < len(self.rules):
            raise NotApplicableError("one mapping a name: no fallback rules")
        return dict(self.rules)

    def make(self) -> dict[str, Any]:
        """Fresh parameters, as an initializer makes them."""
        keys = jax.random.split(jax.random.key(0), len(self.tree))
        return {
            path: jax.random.normal(key, leaf.shape).astype(leaf.dtype)
            for key, (path, leaf) in zip(keys, self.tree.items(), strict=True)
        }

    def optimizer(self) -> Any:
        if "optimizer" not in self.raw:
            return None
        import optax

        return getattr(optax, self.raw["optimizer"])(1e-3)


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """A nested dict from paths."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        at = root
        for segment in above:
            at = at.setdefault(segment, {})
        at[last] = value
    return root


def flat(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """The leaves of a tree by path; a spec or a sharding is a leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec) or (is_leaf is not None and is_leaf(x)),
    )
    return {"/".join(str(_segment(key)) for key in path): leaf for path, leaf in leaves}


def _segment(key: Any) -> Any:
    return next(getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind))


def prepare(raw: dict[str, Any]) -> Case:
    """A `Case` from its JSON."""
    tree = {path: _leaf(leaf, raw.get("op")) for path, leaf in raw["tree"].items()}
    abstract = raw["call"] in ("plan", "resolve")
    arrays = {path: _source(leaf, abstract) for path, leaf in tree.items()}
    for first, *others in raw.get("tied", ()):
        arrays.update(dict.fromkeys(others, arrays[first]))
    rules = tuple((name, _tupled(axes)) for name, axes in raw["rules"])
    return Case(raw["call"], mesh_of(raw), rules, tree, arrays, raw["options"], raw)


def _leaf(leaf: dict[str, Any], op: dict[str, Any] | None) -> Leaf:
    shape, names = leaf["shape"], leaf["names"]
    if op is not None:
        axis, name = op["push_axis"]
        names = [*names[:axis], name, *names[axis:]]
    if names is not None:
        names = tuple(PartitionSpec.UNCONSTRAINED if name == "*" else name for name in names)
    return Leaf(None if shape is None else tuple(shape), leaf["dtype"], names)


def _source(leaf: Leaf, abstract: bool) -> Any:
    if leaf.shape is None:
        return print  # a callable
    if abstract:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    values = np.arange(int(np.prod(leaf.shape))) % 251
    return values.reshape(leaf.shape).astype(leaf.dtype)


def _tupled(axes: Any) -> Any:
    return tuple(axes) if isinstance(axes, list) else axes


def mesh_of(raw: dict[str, Any]) -> Mesh | None:
    sizes = raw["mesh"]
    if not sizes:
        return None
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(tuple(sizes.values()))
    kinds = raw.get("mesh_axis_types", {})
    return Mesh(
        devices,
        tuple(sizes),
        axis_types=tuple(AxisType[kinds.get(axis, "Auto")] for axis in sizes),
    )
