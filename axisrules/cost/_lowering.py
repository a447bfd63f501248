"""A user's step as a program of arrays alone, so that another process can compile it.

Owns taking a step's arguments apart, through the adapters, and lowering it without a device. What
the step does is not changed; what it changes in its arguments is among its results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axisrules import _compat
from axisrules._errors import AxisRulesError, MeshError, PolicyError
from axisrules._meshes import Sizes
from axisrules._text import format_mesh, format_spec
from axisrules._trees import flatten
from axisrules.cost._bytes import words
from axisrules.cost._rows import is_array


class Lowered(NamedTuple):
    """A step that was lowered.

    Attributes:
        program: What ``jax.export`` makes of it.
        sizes: The axes of its mesh.
        arguments: Shape, dtype and spec of every array.
        donated: The positions of the arrays that it may overwrite.
        flops: Operations of the whole step, by the lowered module, or ``None``.
    """

    program: Any
    sizes: Sizes
    arguments: tuple[tuple[tuple[int, ...], str, tuple[Any, ...]], ...]
    donated: tuple[int, ...]
    flops: float | None

    @property
    def version(self) -> str:
        """The version of JAX that lowered it."""
        return str(jax.__version__)

    def order(self) -> dict[str, Any]:
        """What a compiling process has to know."""
        return {
            "program": self.program,
            "mesh": self.sizes,
            "arguments": self.arguments,
            "donated": self.donated,
            "x64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
            "versions": (self.version,),
        }


def lower(step: Any, arguments: Sequence[Any], platform: str) -> Lowered:
    """Lowers a step for a platform, without a device of it.

    Raises:
        PolicyError: The step is no function, an argument holds no array, or the arguments carry no
            sharding.
        MeshError: The arguments lie on different meshes.
        Exception: The step's own error, with a note of the arguments' shapes and shardings.
    """
    if not callable(step):
        raise PolicyError(f"a {type(step).__qualname__} is no step", fix="pass the function itself.")
    step, arguments, keywords = _bound(step, arguments)
    flats = [flatten(argument) for argument in [*arguments, keywords]]
    arrays = [leaf for flat in flats for leaf in flat.leaves if is_array(leaf)]
    mesh = _mesh(arrays)
    abstract = [_abstract(leaf, mesh) for leaf in arrays]
    program = jax.jit(_of_arrays(step, flats, arrays, abstract))
    with _active(mesh):
        try:
            exported = export.export(program, platforms=[platform])(*abstract)
        except AxisRulesError:
            raise
        except Exception as error:
            error.add_note(_note(flats, abstract))
            if re.search("callback|require devices", str(error)):
                error.add_note("axisrules: what calls back, such as jax.debug.print, cannot be measured")
            raise
        if not exported.out_avals:
            raise PolicyError(
                "the step returns no array, so that a compiler leaves out all that it does",
                fix="return what it computes, such as the new parameters.",
            )
        described = tuple((one.shape, str(one.dtype), tuple(one.sharding.spec)) for one in abstract)
        donated = _donated(step, arguments, keywords, arrays)
        return Lowered(_portable(exported), mesh.shape_tuple, described, donated, _flops(program, abstract))


def _bound(step: Any, arguments: Sequence[Any]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """A step without what ``functools.partial`` binds, which stands among its arguments then."""
    keywords: dict[str, Any] = {}
    while isinstance(step, functools.partial):
        arguments, keywords, step = [*step.args, *arguments], {**step.keywords, **keywords}, step.func
    return step, arguments, keywords


def _active(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
    """The mesh of the arguments as the active one, for a step that asks for it."""
    if _compat.in_trace() or not jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)


def _portable(exported: export.Exported) -> export.Exported:
    """A program that another process can read: without the closure that would differentiate it.

    ``Exported.serialize`` needs a package that JAX does not bring, so programs are pickled. Before
    jax 0.8 their shardings cannot be; they are those of the arguments, which travel beside them.
    """
    bare: export.Exported = _compat.without_derivative(exported)
    try:
        pickle.dumps((bare.in_shardings_hlo, bare.out_shardings_hlo))
    except TypeError:
        ins, outs = len(bare.in_shardings_hlo), len(bare.out_shardings_hlo)
        return dataclasses.replace(bare, in_shardings_hlo=(None,) * ins, out_shardings_hlo=(None,) * outs)
    return bare


def _flops(program: Any, abstract: Sequence[Any]) -> float | None:
    """Operations of the whole step, before it is split; a loop's body counts once."""
    found = program.trace(*abstract).lower(lowering_platforms=("cpu",)).cost_analysis()
    flops = found.get("flops") if isinstance(found, dict) else None
    return float(flops) if flops is not None and flops > 0 else None


def _of_arrays(
    step: Callable[..., Any],
    flats: Sequence[Any],
    arrays: Sequence[Any],
    abstract: Sequence[jax.ShapeDtypeStruct],
) -> Callable[..., Any]:
    """The step as a function of arrays, which returns arrays; random keys are numbers on both sides."""

    def of_arrays(*given: Any) -> Any:
        rest = iter([_as(one, leaf) for one, leaf in zip(given, arrays, strict=True)])
        parts = [[next(rest) if is_array(leaf) else leaf for leaf in flat.leaves] for flat in flats]
        rebuilt = [flat.rebuild(leaves) for flat, leaves in zip(flats, parts, strict=True)]
        *arguments, keywords = rebuilt
        returned = flatten(step(*arguments, **keywords)).leaves
        after = [leaf for argument in rebuilt for leaf in flatten(argument).leaves]
        before = [leaf for leaves in parts for leaf in leaves]
        kept = iter(abstract)
        like = [next(kept) if is_array(leaf) else None for flat in flats for leaf in flat.leaves]
        changed = [
            new if one is None else _back(_numbers(new), one)
            for new, old, one in zip(after, before, like, strict=True)
            if new is not old
        ]
        return [_numbers(leaf) for leaf in [*returned, *changed] if isinstance(leaf, jax.Array)]

    return of_arrays


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array)) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _numbers(leaf: Any) -> Any:
    """Random keys as the numbers that they are made of; anything else as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as(numbers: Any, leaf: Any) -> Any:
    """Numbers as random keys of the kind of a leaf, if it is one."""
    if not _is_key(leaf):
        return numbers
    kinds: list[Any] = []
    jax.eval_shape(lambda keys: kinds.append(jax.random.key_impl(keys)), leaf)
    return jax.random.wrap_key_data(numbers, impl=kinds[0])


def _back(new: Any, old: jax.ShapeDtypeStruct) -> Any:
    """What a step wrote into an argument, laid out as the argument is."""
    auto = all(kind == AxisType.Auto for kind in old.sharding.mesh.axis_types)
    if not auto or not isinstance(new, jax.Array) or new.shape != old.shape:
        return new
    return jax.lax.with_sharding_constraint(new, old.sharding)


def _mesh(arrays: Sequence[Any]) -> Mesh | AbstractMesh:
    found: list[Mesh | AbstractMesh] = []
    for leaf in arrays:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple not in [
            m.shape_tuple for m in found
        ]:
            found.append(sharding.mesh)
    if not found:
        raise PolicyError(
            "no argument carries a sharding on a mesh",
            fix="pass plan.abstract, or ShapeDtypeStructs with sharding=NamedSharding(mesh, spec).",
        )
    if len(found) > 1:
        texts = " and ".join(format_mesh(dict(mesh.shape_tuple)) for mesh in found)
        raise MeshError(f"the arguments lie on different meshes: {texts}", fix="use one mesh for all.")
    return found[0]


def _abstract(leaf: Any, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        sharding = NamedSharding(mesh, PartitionSpec())
    shape, dtype = words(tuple(leaf.shape), leaf.dtype)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, sharding.spec))


def _note(flats: Sequence[Any], abstract: Sequence[Any]) -> str:
    rest = iter(abstract)
    lines = ["axisrules: the step was called with"]
    for number, flat in enumerate(flats):
        what = f"argument {number}" if number < len(flats) - 1 else "keyword"
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            if is_array(leaf):
                one = next(rest)
                where = what + (f", {path}" if path else "")
                lines.append(f"  {where}: {one.dtype} {one.shape!r} {format_spec(one.sharding.spec)}")
    more = len(lines) - 41
    return "\n".join([*lines[:41], *([f"  and {more} more"] if more > 0 else [])])


def _donated(
    step: Any, arguments: Sequence[Any], keywords: dict[str, Any], arrays: Sequence[Any]
) -> tuple[int, ...]:
    """The arrays that a jitted step donates, where it tells."""
    trace = getattr(step, "trace", None)
    if trace is None:
        return ()
    try:
        told = jax.tree.leaves(trace(*arguments, **keywords).lower(lowering_platforms=("cpu",)).args_info)
    except (TypeError, ValueError, AttributeError):
        return ()  # such as the jit of a framework, whose arguments are no trees of arrays
    if len(told) != len(arrays):
        return ()
    return tuple(at for at, one in enumerate(told) if one.donated)


def total_devices(sizes: Sizes) -> int:
    """Devices of a mesh."""
    return math.prod(size for _, size in sizes)
