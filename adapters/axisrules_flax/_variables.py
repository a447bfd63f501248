"""The variables of ``named``: names that follow stacking, and the spec that the array has now.

Owns the classes that show both, and the hooks that Flax calls when it stacks or takes apart.
Decides no layout.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axisrules._compat import in_trace
from axisrules._errors import NamesError

# Of a variable of `named`: its names, its explicit layout, and the shape that both were given for,
# in which `None` is an axis that was stacked under a name.
NAMES, SPEC, SHAPE = "axis_names", "explicit_spec", "named_shape"


def annotate(variable: Any, names: tuple[Any, ...] | None, spec: PartitionSpec | None) -> None:
    """Writes names into a variable, which shows them from then on.

    The object stays the same, so what shares it still does.
    """
    hooks = {hook.key: _with_hook(variable, hook) for hook in (_ADD, _REMOVE)}
    shape = tuple(variable.get_raw_value().shape)
    variable.set_metadata(**{NAMES: names, SPEC: spec, SHAPE: shape}, **hooks)
    kind: Any = type(variable)
    if issubclass(kind, nnx.Variable):
        variable.__class__ = _showing(kind)
    else:  # a hijax variable has a class that cannot be changed, so it claims nothing
        variable.set_metadata(partition_spec=None)


def entry(metadata: Mapping[str, Any], shape: Sequence[int]) -> Any:
    """The names, or else the layout, with an entry for every dimension of the array."""
    names, spec = metadata.get(NAMES), metadata.get(SPEC)
    if names is not None:
        return _fitted(names, metadata[SHAPE], shape) if isinstance(names, tuple) else names
    return None if spec is None else PartitionSpec(*_fitted(tuple(spec), metadata[SHAPE], shape))


def _fitted(entries: tuple[Any, ...], made: tuple[int | None, ...], shape: Sequence[int]) -> tuple[Any, ...]:
    """Entries for an array that was stacked, or taken out of a stack, without a word to its variable.

    An axis more has no name; where the sizes leave open which it is, it is the first. An axis less is
    the first of those that were stacked under a name. What may as well be a mistake stays as it is.
    """
    if len(entries) != len(made) or len(shape) == len(made):
        return entries
    less, more = len(made) - len(shape), len(shape) - len(made)
    stacked = [at for at, size in enumerate(made) if size is None][: max(less, 0)]
    kept = [at for at in range(len(made)) if at not in stacked]
    found: list[Any] = [None] * len(shape)
    at = len(shape)
    for old in reversed(kept):
        at -= 1
        while at >= 0 and more > 0 and made[old] not in (None, shape[at]):
            at, more = at - 1, more - 1
        if at < 0 or made[old] not in (None, shape[at]):
            return entries
        found[at] = entries[old]
    return tuple(found)


def placed_spec(value: Any) -> PartitionSpec | None:
    """The spec of an array that lies on a mesh, with an entry for every dimension."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    return PartitionSpec(*sharding.spec, *[None] * (value.ndim - len(sharding.spec)))


class _Hook:
    """Keeps names and layout in step with the axes of the array.

    It is false, because Flax warns of every hook that is true when the metadata of a variable is
    given to another one, as its optimizers do.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"axisrules_flax.{self.key}"

    def __reduce__(self) -> str:  # one object in a process, also after a copy
        return "_ADD" if self.key == "on_add_axis" else "_REMOVE"

    def __call__(self, variable: Any, index: int, name: str | None) -> None:
        """Called by Flax while the array is that of one layer, without the stacked axis."""
        metadata = variable.get_metadata()
        if SHAPE not in metadata:
            return
        value = variable.get_raw_value()
        shape = getattr(value, "shape", ())
        given = {key: metadata.get(key) for key in (NAMES, SPEC, SHAPE)}
        found = {key: tuple(one) for key, one in given.items() if isinstance(one, (tuple, PartitionSpec))}
        if in_trace() and len(shape) > len(found[SHAPE]):  # a stack of stacks
            found = {key: _fitted(entries, metadata[SHAPE], shape) for key, entries in found.items()}
        rank = len(found[SHAPE])
        if self.key == "on_remove_axis" and _is_one_layer(found, len(shape), index, name):
            return
        for key, entries in found.items():
            if len(entries) == rank:  # else Flax was told to change them, and did
                changed = self._change(entries, index, name if key == NAMES else None)
                variable.set_metadata(key, PartitionSpec(*changed) if key == SPEC else changed)

    def _change(self, entries: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
        changed = list(entries)
        if self.key == "on_add_axis":
            changed.insert(index % (len(entries) + 1), value)
        else:
            del changed[index]
        return tuple(changed)


def _is_one_layer(found: Mapping[str, Any], ndim: int, index: int, name: str | None) -> bool:
    """Whether the entries lack the axis that Flax takes away: it was stacked without its name.

    Raises:
        NamesError: The axis has another name.
    """
    rank, names = len(found[SHAPE]), found.get(NAMES)
    if names is None or name is None:
        return rank == ndim
    if len(names) != rank or names[index] == name:
        return False
    if rank != ndim:
        raise NamesError(
            f"Flax takes away the axis {name!r} where the array has {names[index]!r}",
            dim=index % rank, names=names,
            fix="give nnx.PARTITION_NAME as it was given when the layers were stacked.",
        )  # fmt: skip
    return True


_ADD, _REMOVE = _Hook("on_add_axis"), _Hook("on_remove_axis")


def _with_hook(variable: Any, hook: _Hook) -> Any:
    """The hooks of a variable with one more."""
    present = variable.get_metadata().get(hook.key, ())
    theirs = present if isinstance(present, tuple) else (present,)
    others = tuple(one for one in theirs if one is not hook)
    return _Hooks((*others, hook)) if others else hook


class _Hooks(tuple[Any, ...]):
    """Several hooks: newer versions of Flax take them apart, older ones call what they find."""

    __slots__ = ()

    def __call__(self, *given: Any) -> None:
        for hook in self:
            hook(*given)


class _Shows:
    """What the classes of variables with names have in common."""

    __slots__ = ()

    @property
    def axis_names(self: Any) -> tuple[str | None, ...] | None:
        """One name or ``None`` per dimension of the array."""
        metadata, value = self.get_metadata(), self.get_raw_value()
        names: tuple[str | None, ...] | None = metadata.get(NAMES)
        rank = getattr(value, "ndim", 0)
        if not isinstance(names, tuple) or rank == 0 or (rank < len(names) and not in_trace()):
            return names
        return tuple(entry(metadata, value.shape))

    @property
    def partition_spec(self: Any) -> PartitionSpec | None:
        """The spec that the array has now; ``None`` where it was not placed."""
        value = self.get_raw_value()
        return placed_spec(value[...] if isinstance(value, jax.Ref) else value)

    def __reduce__(self: Any) -> Any:
        return _bare, (type(self).__bases__[1],), self.__getstate__()


@functools.cache
def _showing(kind: Any) -> Any:
    """A subclass of a class of variables, under the same name, whose variables show names and spec."""
    if issubclass(kind, _Shows):
        return kind
    members = {"__module__": __name__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (_Shows, kind), members)


def _bare(kind: type) -> Any:
    shown = _showing(kind)
    return shown.__new__(shown)
