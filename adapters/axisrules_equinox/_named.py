"""``named`` and ``stacked``: Equinox layers with names for the dimensions of their arrays.

Owns the subclass that carries names, and how names of a module are read. Resolves nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import PartitionSpec

from axisrules._errors import AxisRulesError, NamesError, SpecError, raise_all
from axisrules._names import parse_names
from axisrules._text import format_spec
from axisrules._trees import children_of_pytree

_ATTRIBUTE = "axis_names"  # of an instance, and the key in the metadata of a field
_Module = TypeVar("_Module", bound=eqx.Module)
_Tree = TypeVar("_Tree")


def names_of_fields(module: eqx.Module) -> Mapping[str, Any]:
    """The names of the fields of a module: its own before those of its class."""
    own = getattr(module, _ATTRIBUTE, None)
    of_class = _names_of_class(type(module))
    return {**of_class, **own} if isinstance(own, Mapping) else of_class


@cache
def _names_of_class(kind: type[eqx.Module]) -> Mapping[str, Any]:
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[_ATTRIBUTE] for field in fields if _ATTRIBUTE in field.metadata}


class AxisNames(Mapping[str, Any]):
    """Names by field: an immutable, hashable mapping, as a static field has to be.

    Example:
        >>> AxisNames({"weight": ("mlp", "embed")})["weight"]
        ('mlp', 'embed')
    """

    __slots__ = ("_pairs",)

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self._pairs = tuple(sorted((names or {}).items()))

    def __getitem__(self, field: str) -> Any:
        return dict(self._pairs)[field]

    def __iter__(self) -> Iterator[str]:
        return (field for field, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return self._pairs == other._pairs if isinstance(other, AxisNames) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"AxisNames({dict(self._pairs)!r})"


def named(layer: _Module, /, **names: Any) -> _Module:
    """The same layer with names for the dimensions of its arrays.

    The result is an instance of a subclass with one static field, ``axis_names``. Paths, calls,
    ``isinstance``, serialisation, copies and pickles are those of the layer.

    Args:
        layer: Any module; it is not changed. Names that it has already stay, unless given anew.
        **names: Names by field. ``None`` is whole on purpose, and a ``PartitionSpec`` the layout
            itself. The names of a field that holds several arrays go to each of them.

    Returns:
        The layer with its names; its arrays are those of ``layer``.

    Raises:
        NamesError: The layer has no such field, or the names are malformed.

    Example:
        >>> import axisrules as ar, axisrules_equinox, equinox as eqx, jax
        >>> up = eqx.nn.Linear(8, 32, key=jax.random.key(0))
        >>> up = axisrules_equinox.named(up, weight="mlp embed", bias="mlp")
        >>> isinstance(up, eqx.nn.Linear), up.axis_names["weight"]
        (True, ('mlp', 'embed'))
        >>> plan = ar.plan(up, mesh="data=4,model=2", rules={"embed": "data", "mlp": "model"})
        >>> {p.path: tuple(p.spec) for p in plan.placements}
        {'weight': ('model', 'data'), 'bias': ('model',)}
    """
    if not isinstance(layer, eqx.Module) or isinstance(layer, type):
        raise NamesError(
            f"{layer!r} is no Equinox module", fix="give the layer itself: named(eqx.nn.Linear(...), ...)."
        )
    kind = type(layer)
    if isinstance(layer, eqx.nn.StateIndex):
        raise NamesError(
            "a StateIndex cannot carry names: Equinox takes no subclass of it",
            fix='name the field that holds it: named(layer, state_index="embed").',
        )
    before = getattr(layer, _ATTRIBUTE, {})
    if not _is_named(kind) and hasattr(layer, _ATTRIBUTE):
        raise NamesError(
            f"{kind.__qualname__} has an attribute {_ATTRIBUTE!r} of its own",
            fix=f'write the names on its fields: eqx.field(metadata={{"{_ATTRIBUTE}": "mlp embed"}}).',
        )
    merged = AxisNames({**before, **_checked(kind, names)})
    return _restore(kind if _is_named(kind) else _subclass(kind), {**vars(layer), _ATTRIBUTE: merged})


def stacked(tree: _Tree, name: str | None) -> _Tree:
    """The same layers, in which the names of every array begin with one more name.

    For what ``eqx.filter_vmap`` makes: its arrays have one dimension more, in front, than the names
    inside know.

    Args:
        tree: A module, or any tree that holds some; it is not changed. Arrays without names stay so.
        name: The name of the new first dimension; ``None`` leaves it whole.

    Returns:
        The tree with its names; its arrays are those of ``tree``.

    Raises:
        NamesError: The name is malformed.
        SpecError: An array inside has a ``PartitionSpec`` in the place of names.

    Example:
        >>> import axisrules as ar, axisrules_equinox, equinox as eqx, jax
        >>> def make(key):
        ...     layer = eqx.nn.Linear(8, 32, key=key)
        ...     return axisrules_equinox.named(layer, weight="mlp embed", bias="mlp")
        >>> layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
        >>> layers = axisrules_equinox.stacked(layers, "layers")
        >>> rules = {"layers": None, "embed": "data", "mlp": "model"}
        >>> plan = ar.plan(layers, mesh="data=4,model=2", rules=rules)
        >>> {p.path: tuple(p.spec) for p in plan.placements}
        {'weight': (None, 'model', 'data'), 'bias': (None, 'model')}
    """
    if name is not None and not isinstance(name, str):
        raise NamesError(
            f"{name!r} is no name for a dimension", fix='give one name: stacked(layers, "layers").'
        )
    (first,) = parse_names((name,))
    failures: list[AxisRulesError] = []
    made: _Tree = _stack(tree, first, (), failures)
    raise_all(failures)
    return made


def _stack(node: Any, name: Any, path: tuple[str, ...], failures: list[AxisRulesError]) -> Any:
    below = children_of_pytree(node)
    if below is None or node is None:
        return node
    rest = iter([_stack(child, name, (*path, segment), failures) for segment, child in below])
    made = jax.tree.map(lambda _: next(rest), node, is_leaf=lambda child: child is not node)
    if not isinstance(node, eqx.Module):
        return made
    names = {}
    for field, given in names_of_fields(node).items():
        try:
            names[field] = _prepended(name, given)
        except AxisRulesError as error:
            failures.append(error.at(["/".join((*path, field))]))
    return named(made, **names) if names else made


def _prepended(name: Any, given: Any) -> Any:
    """The names with one more in front; what was whole on purpose stays whole below it."""
    if isinstance(given, PartitionSpec):
        raise SpecError(
            f"{format_spec(given)} is a layout, which cannot begin with the name {name!r}",
            spec=given,
            fix="give names in its place, or name the stack itself anew.",
        )
    return parse_names((name, *((...,) if given is None else parse_names(given))))


def _checked(kind: type[eqx.Module], names: Mapping[str, Any]) -> dict[str, Any]:
    """The names by field, parsed; raises every failure at once."""
    fields = {field.name: field.metadata.get("static", False) for field in dataclasses.fields(kind)}
    known = [name for name, static in fields.items() if not static]
    parsed: dict[str, Any] = {}
    failures: list[AxisRulesError] = []
    for field, given in names.items():
        if field not in known:
            failures.append(_no_field(kind, field, known, static=field in fields))
            continue
        try:
            whole_or_spec = given is None or isinstance(given, PartitionSpec)
            parsed[field] = given if whole_or_spec else parse_names(given)
        except NamesError as error:
            failures.append(error.at([field]))
    raise_all(failures)
    return parsed


def _no_field(kind: type, field: str, known: Sequence[str], *, static: bool) -> NamesError:
    close = next(iter(difflib.get_close_matches(field, known, n=1)), None)
    what = f"{kind.__qualname__} has no field {field!r}" + (f"; did you mean {close!r}?" if close else "")
    if static:
        what = f"the field {field!r} of {kind.__qualname__} is static, so it has no dimensions"
    fix = f"fields that may have names: {', '.join(known)}."
    return NamesError(what, name=field, nearest=close, fix=fix)


def _is_named(kind: type) -> bool:
    return "_axisrules_base" in vars(kind)


@cache  # one class per class, so that structures are equal and jit compiles once
def _subclass(kind: type[_Module]) -> type[_Module]:
    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(
            __doc__=kind.__doc__,
            __module__=kind.__module__,
            __qualname__=kind.__qualname__,
            __annotations__={_ATTRIBUTE: AxisNames},
            __reduce__=_reduce,
            _axisrules_base=kind,
        )
        namespace[_ATTRIBUTE] = eqx.field(static=True, default=AxisNames())

    made: type[_Module] = types.new_class(kind.__name__, (kind,), exec_body=fill)
    return made


def _restore(kind: type[_Module], state: Mapping[str, Any]) -> _Module:
    """An instance with the given attributes, made without ``__init__``."""
    made: _Module = object.__new__(kind)
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made


def _reduce(self: Any) -> tuple[Any, ...]:
    return _unpickle, (type(self)._axisrules_base, dict(vars(self)))


def _unpickle(base: type[_Module], state: Mapping[str, Any]) -> _Module:
    kind: type[_Module] = _subclass(base)
    return _restore(kind, state)
