"""``named``: NNX layers with names for the dimensions of their arrays.

Owns which variable of a layer takes which of the names. Where the arrays go is decided by
``axisrules.with_logical_partitioning`` and ``axisrules.shard_tree``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from flax import nnx
from jax.sharding import PartitionSpec

import axisrules
from axisrules._compat import in_trace
from axisrules._errors import NamesError, SpecError
from axisrules._meshes import active_mesh
from axisrules._names import AxisNames, fit_names, parse_names
from axisrules_flax._births import Births
from axisrules_flax._variables import NAMES, SPEC, annotate

_Layer = TypeVar("_Layer")
_Given = tuple[tuple[Any, ...] | None, PartitionSpec | None]  # names win over a spec
_SUFFIX = "_init"


def named(
    layer: Callable[..., _Layer],
    axis_names: AxisNames | None = None,
    partition_spec: PartitionSpec | None = None,
) -> Callable[..., _Layer]:
    """A layer class whose layers carry names for the dimensions of their arrays.

    The arrays that have an ``*_init`` argument, and batch statistics, take the names: the one with
    the most dimensions (kernel, embedding, scale) all of them, one with fewer (bias) as many of the
    last ones as it has dimensions. A layer that is made of several layers with one initializer
    gives the names to each. Under an active mesh the arrays are laid out by the active rules as
    they are made; without one, and inside a trace, they only carry the names.

    The variables show ``axis_names``, which follow ``nnx.vmap`` and ``nnx.scan`` (a stacked axis has
    the name that ``nnx.PARTITION_NAME`` gives it, or none), and ``partition_spec``, which is that of
    the array at any time and ``None`` where it was not placed. An initializer that sees other
    dimensions than the array has, as in ``nnx.LinearGeneral`` with several of them and in
    ``nnx.MultiHeadAttention``, makes it whole before it is laid out; ``axisrules.init`` does not.

    Args:
        layer: A class of layers, such as ``nnx.Linear``.
        axis_names: One logical name or ``None`` per dimension, or the short form. They win over
            ``partition_spec``; a name that no rule mentions stays whole, without a warning.
        partition_spec: The layout itself. Where it is shorter than the kernel has dimensions, the
            smaller arrays are whole.

    Returns:
        What makes the layer: call it with the arguments of ``layer``.

    Raises:
        AxisRulesError: The names are malformed; when called: they do not fit the arrays or the mesh.

    Example:
        >>> import axisrules as ar, axisrules_flax, jax
        >>> from flax import nnx
        >>> Linear = axisrules_flax.named(nnx.Linear, "input output")
        >>> with jax.set_mesh(ar.make_mesh("data=4,model=2")), ar.map_logical_axis_names(
        ...     {"output": "model"}
        ... ):
        ...     layer = Linear(8, 12, rngs=nnx.Rngs(0))
        >>> layer.bias.axis_names, tuple(layer.kernel.partition_spec)
        (('output',), (None, 'model'))
    """
    names = None if axis_names is None else parse_names(axis_names)
    given: _Given = (names, partition_spec if names is None else None)
    fields, signature = _fields(layer), _signature(layer)

    @functools.wraps(layer, updated=())
    def make(*args: Any, **kwargs: Any) -> _Layer:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        placing = given != (None, None) and active_mesh() is not None and not in_trace()
        births = Births(*given)
        if placing and not (names is None and _flattens(layer)):
            for arguments in (bound.arguments, *_keywords(bound)):
                inits = [name for name in arguments if name.endswith(_SUFFIX)]
                arguments.update({name: births.wrap(name, arguments[name]) for name in inits})
        with nnx.use_eager_sharding(False):
            made = layer(*bound.args, **bound.kwargs)
        births.end(made)
        variables = _annotate(made, fields, given)
        if placing:
            _place(variables)
        return made

    return make


def _signature(layer: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a layer; the metaclass of modules hides those of a class."""
    if isinstance(layer, type):
        return inspect.signature(functools.partial(layer.__init__, None))  # type: ignore[misc]
    return inspect.signature(layer)


def _keywords(bound: inspect.BoundArguments) -> list[dict[str, Any]]:
    """What was given beside the arguments that a layer lists."""
    kinds = bound.signature.parameters.items()
    return [bound.arguments[name] for name, one in kinds if one.kind is one.VAR_KEYWORD]


def _fields(layer: Callable[..., Any]) -> set[str]:
    """The arrays with an initializer among the arguments, also those that are passed on to a base."""
    found: set[str] = set()
    for one in layer.__mro__ if isinstance(layer, type) else (layer,):
        if isinstance(one, type) and "__init__" not in vars(one):
            continue
        arguments = _signature(one).parameters.values()
        found |= {each.name.removesuffix(_SUFFIX) for each in arguments if each.name.endswith(_SUFFIX)}
        if not any(each.kind is each.VAR_KEYWORD for each in arguments):
            break
    return found


def _flattens(layer: Callable[..., Any]) -> bool:
    """Whether the initializers of a layer may see other dimensions than its arrays have."""
    return isinstance(layer, type) and issubclass(layer, (nnx.LinearGeneral, nnx.MultiHeadAttention))


def _annotate(made: Any, fields: set[str], given: _Given) -> dict[str, Any]:
    """Writes the names into the variables that take them, and returns those by path."""
    nodes = (("/".join(map(str, path)), node) for path, node in nnx.iter_graph(made))
    found = {path: node for path, node in nodes if _takes(path, node, fields)}
    if given != (None, None) and not found:
        raise NamesError(
            f"a {type(made).__qualname__} has no array with an initializer, so the names have no place",
            fix=f"name layers with arguments like kernel{_SUFFIX}.",
        )
    full = _fit(found, given)
    for variable in found.values():
        ndim = variable.get_raw_value().ndim
        names, spec = (None if some is None else some[len(some) - ndim :] for some in full)
        layout = None if spec is None else PartitionSpec(*spec)
        annotate(variable, names, layout)
    return found


def _takes(path: str, node: Any, fields: set[str]) -> bool:
    if not isinstance(node, nnx.Variable) or not hasattr(node.get_raw_value(), "ndim"):
        return False
    return path.rpartition("/")[2] in fields or isinstance(node, nnx.BatchStat)


def _fit(found: dict[str, Any], given: _Given) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """The names and the spec with one entry per dimension of the largest array."""
    names, spec = given
    if names is None and spec is None:
        return None, None
    path, largest = max(found.items(), key=lambda item: item[1].get_raw_value().ndim)
    shape = largest.get_raw_value().shape
    if names is None:
        entries = tuple(spec or ())
        if len(entries) > len(shape):
            raise SpecError(
                f"{spec} has {len(entries)} entries for {len(shape)} dimensions",
                paths=[path], shape=shape, spec=spec, fix="drop entries.",
            )  # fmt: skip
        return None, entries + (None,) * (len(shape) - len(entries))
    try:
        return fit_names(names, shape), None
    except NamesError as error:
        raise error.at([path]) from None


def _place(variables: dict[str, Any]) -> None:
    """Lays the arrays out in place, so that what the layer shares with others stays shared."""
    entries = {}
    for path, variable in variables.items():
        names = variable.get_metadata(NAMES)
        entries[path] = variable.get_metadata(SPEC) if names is None else names
    arrays = {path: variable.get_raw_value() for path, variable in variables.items()}
    placed = axisrules.shard_tree(
        arrays, entries, mesh=active_mesh(), rules=axisrules.get_logical_axis_rules(), unmapped="replicate"
    )
    for path, variable in variables.items():
        variable.set_raw_value(placed[path])
