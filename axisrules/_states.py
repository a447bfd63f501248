"""``state_names``: names for the state of an optimizer, which follows its parameters.

Owns what an array of a state is called, given the parameter that it belongs to. Finds no parameter
itself, and resolves nothing: ``zero`` is the engine's ``fill``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from axisrules._entries import find_entries
from axisrules._errors import AxisRulesError, MissingNamesError, StateError, raise_all
from axisrules._meshes import MeshLike
from axisrules._moments import Shape
from axisrules._names import fit_names, parse_names
from axisrules._options import Options, make_options
from axisrules._owners import Key, Owner, Owners, shape_of
from axisrules._plan import SLOT
from axisrules._planning import make_plan, share_entries
from axisrules._rules import RulesLike
from axisrules._specs import axes_of
from axisrules._trees import NO_ENTRY, Flat, flatten, nested


def state_names(
    state: Any,
    params: Any,
    names: Any = None,
    *,
    zero: str | tuple[str, ...] | None = None,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
) -> Any:
    """Names for every array of an optimizer's state, such as any state of optax.

    An array belongs to the parameter whose path ends its own path (``0/mu/up/kernel`` to
    ``up/kernel``), and its shape has to follow from that of the parameter: the same shape has the
    same names; the factored moments of adafactor and the accumulators of sm3 have the names of the
    dimensions that they keep; a stack of past values (L-BFGS) has one more, unnamed dimension; a
    ``(d, d)`` preconditioner has the name of the dimension of size d once. Where several dimensions
    could be meant, none is named. Scalars, random keys, hyperparameters and arrays of one element
    need no names, and a state that is one vector (``optax.flatten``) has none.

    Args:
        state: The state, or its shapes: ``jax.eval_shape(tx.init, params)``.
        params: The parameters or their shapes: a pytree, or a module or state of a framework.
        names: Names of the parameters in any form that ``plan`` takes.
        zero: A mesh axis (or several) over which arrays that belong to a parameter are split as
            well, where the parameter leaves it free: the largest dimension that is still whole and
            divides. The entries are then partition specs.
        mesh: The mesh; read with ``zero`` alone, and then by default the active one.
        rules: The rules; read with ``zero`` alone, and then by default the active ones.
        taken: As in ``resolve``; read with ``zero`` alone, as are the next three.
        indivisible: As in ``resolve``.
        absent: As in ``resolve``.
        unmapped: As in ``resolve``.

    Returns:
        Names for ``plan``, ``shard_tree`` and ``init`` of the state: a tree with the structure of
        the state, in which a tuple of names stands for every array, or the parameter's own
        ``None`` or ``PartitionSpec``. In the place of objects of a framework, which cannot hold
        names, and then throughout, stand dicts by path segment.

    Raises:
        StateError: An array belongs to no parameter, or its shape does not follow from the
            parameter; all of them are in the one error.
        MissingNamesError: Parameters to which the state has arrays have no names.
        AxisRulesError: The names are malformed, or, with ``zero``, something does not fit.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> params = {"up": np.zeros((8, 32), np.float32)}
        >>> state = {"count": np.zeros((), np.int32), "mu": params, "v_row": {"up": np.zeros(8)}}
        >>> ar.state_names(state, params, {"up": "embed mlp"})
        {'count': (), 'mu': {'up': ('embed', 'mlp')}, 'v_row': {'up': ('embed',)}}
        >>> split = ar.state_names({"mu": params}, params, {"up": "embed mlp"}, zero="data",
        ...                        mesh="data=4,model=2", rules={"embed": None, "mlp": "model"})
        >>> tuple(split["mu"]["up"])
        ('data', 'model')
    """
    flat = flatten(state)
    parameters = _Parameters(params, names)
    owners = _owners(state, flat, parameters)
    if zero is None:
        return _shaped(flat, [parameters.entry(owner) for owner in owners])
    options = make_options(
        mesh=mesh, rules=rules, taken=taken, indivisible=indivisible, absent=absent, unmapped=unmapped,
        fill=zero, min_bytes=0,
    )  # fmt: skip
    entries = [parameters.open_entry(owner) for owner in owners]
    options = options._replace(rules=options.rules.append(parameters.layouts))
    return _shaped(flat, _specs(state, flat, entries, options))


_SCALAR = Owner(None, ())  # and whatever is no array
_COMPARED = 10  # failures for which the nearest parameter is sought: that compares every path


class _Parameters:
    """The parameters by path, with names that have one entry per dimension."""

    def __init__(self, params: Any, names: Any) -> None:
        flat = flatten(params)
        found = find_entries(params, flat, names)
        raise_all(found.problems)
        entries = share_entries(flat.leaves, found.entries)
        self.layouts: dict[str, Any] = {}
        self.shapes: dict[Key, Shape] = {}
        self.names: dict[Key, Any] = {}  # or an error, which is raised where the names are needed
        for key, leaf, entry in zip(flat.keys, flat.leaves, entries, strict=True):
            shape = shape_of(leaf)
            if shape is not None:
                self.shapes[key], self.names[key] = shape, _fitted("/".join(key), entry, shape)
        if {key[:1] for key in self.shapes} == {("fast",), ("slow",)}:  # the parameters of lookahead
            for key in [key for key in self.shapes if key[0] == "fast"]:
                self.shapes[key[1:]], self.names[key[1:]] = self.shapes[key], self.names[key]

    def named(self) -> dict[Key, tuple[bool, ...]]:
        """Per parameter: which of its dimensions have a name or mesh axes."""
        return {
            key: tuple(name is not None for name in _padded(names, len(self.shapes[key])))
            for key, names in self.names.items()
            if isinstance(names, (tuple, PartitionSpec))
        }

    def failures(self, keys: Sequence[Key]) -> list[AxisRulesError]:
        """What is wrong with the names of the given parameters."""
        needed = dict.fromkeys(keys)
        missing = [key for key in needed if self.names[key] is NO_ENTRY]
        bad = [names for key in needed if isinstance(names := self.names[key], AxisRulesError)]
        return [*([_missing(missing, self.shapes)] if missing else []), *bad]

    def entry(self, owner: Owner) -> Any:
        """The entry of an array: names, or what the parameter has instead."""
        kept = owner.kept or ()
        names = None if owner.key is None else self.names[owner.key]
        if owner.key is None:
            return (None,) * len(kept)
        if names is None or kept == tuple(range(len(self.shapes[owner.key]))):
            return names
        own = _padded(names, len(self.shapes[owner.key]))
        picked = [None if dim is None else own[dim] for dim in kept]
        return PartitionSpec(*picked) if isinstance(names, PartitionSpec) else tuple(picked)

    def open_entry(self, owner: Owner) -> Any:
        """The same for ``fill``, which leaves a spec alone: so only what has no parameter is one.

        The spec of a parameter becomes names, each with a rule of its own in ``layouts``.
        """
        entry = self.entry(owner)
        if owner.key is None:
            return PartitionSpec(*entry)
        if not isinstance(entry, PartitionSpec) or not _is_layout(entry, len(owner.kept or ())):
            return entry
        layouts = {f"P({part!r})": part for part in entry if part is not None}
        self.layouts.update(layouts)
        return (*(None if part is None else f"P({part!r})" for part in entry), ...)


def _is_layout(spec: PartitionSpec, rank: int) -> bool:
    """Whether every entry is ``None`` or mesh axes; anything else is for the engine to refuse."""
    axes = [axis for part in spec for axis in axes_of(part)]
    plain = all(part is None or isinstance(part, (str, tuple)) for part in spec)
    return plain and len(set(axes)) == len(axes) and len(spec) <= rank


def _fitted(path: str, entry: Any, shape: Shape) -> Any:
    if entry is None or entry is NO_ENTRY or isinstance(entry, PartitionSpec):
        return () if entry is NO_ENTRY and not shape else entry
    try:
        return fit_names(parse_names(entry), shape)
    except AxisRulesError as error:
        return error.at([path])


def _padded(names: Any, rank: int) -> tuple[Any, ...]:
    return (*names, *[None] * (rank - len(names)))


def _owners(state: Any, flat: Flat, parameters: _Parameters) -> list[Owner]:
    """The parameter of every leaf; raises everything that fails at once."""
    owners = Owners(state, flat, parameters.shapes)
    named = parameters.named()
    found: list[Owner] = []
    failures: list[AxisRulesError] = []
    for key, leaf in zip(flat.keys, flat.leaves, strict=True):
        owner = owners.find(key, leaf, named) if shape_of(leaf) else _SCALAR
        if owner is None:
            close = owners.nearest(key) if len(failures) < _COMPARED else None
            failures.append(_unowned("/".join(key), leaf.shape, close))
        elif owner.kept is None and owner.key is not None:
            failures.append(_unlike(key, leaf.shape, owner.key, parameters.shapes[owner.key]))
        found.append(owner or _SCALAR)
    raise_all([*failures, *parameters.failures([owner.key for owner in found if owner.key is not None])])
    return found


def _unowned(path: str, shape: Shape, close: str | None) -> StateError:
    return StateError(
        "an array of the state belongs to no parameter: none has a path that ends this one"
        + (f"; the nearest is {close!r}" if close is not None else ""),
        paths=[path],
        shape=shape,
        nearest=close,
        fix=_fix(path, shape),
    )


def _unlike(key: Key, shape: Shape, of: Key, expected: Shape) -> StateError:
    path = "/".join(key)
    return StateError(
        f"the shape of an array of the state does not follow from {expected}, "
        f"the shape of its parameter {'/'.join(of)!r}",
        paths=[path],
        shape=shape,
        nearest="/".join(of),
        fix=_fix(path, shape),
    )


def _fix(path: str, shape: Shape) -> str:
    return (
        "pass the parameters that the state was made from, or leave this array out of the state here "
        f'and name it by hand, such as "{" ".join("_" for _ in shape)}" at {path}.'
    )


def _missing(keys: Sequence[Key], shapes: Mapping[Key, Shape]) -> MissingNamesError:
    paths = ["/".join(key) for key in keys]
    count = len(paths)
    names = " ".join("_" for _ in shapes[keys[0]])
    return MissingNamesError(
        f"{count} {'parameter has' if count == 1 else 'parameters have'} no names, "
        "and the state has arrays that follow them",
        paths=paths,
        listing=[f"{path}  {shapes[key]!r}" for path, key in zip(paths, keys, strict=True)],
        fix=f'add names, such as "{names}"' + (f" at {paths[0]}." if paths[0] else "."),
    )


def _specs(state: Any, flat: Flat, entries: Sequence[Any], options: Options) -> list[Any]:
    """The partition specs of the arrays, as the engine lays them out with ``fill``."""
    plan = make_plan(state, flat, _shaped(flat, entries), options)
    specs = iter([placement.spec for placement in plan.placements])
    return [next(specs) if kept is SLOT else () for kept in plan.structure.leaves]


def _shaped(flat: Flat, entries: Sequence[Any]) -> Any:
    """The entries in the structure of the state, or by path segment where objects stand in it."""
    if flat.treedef is not None:
        return flat.rebuild(entries)
    return _filled(nested(flat), entries)


def _filled(positions: Any, entries: Sequence[Any]) -> Any:
    if isinstance(positions, dict):
        return {segment: _filled(below, entries) for segment, below in positions.items()}
    return entries[positions]
