"""What is refused before it is priced: a batch without arrays, another mesh, no step.

Owns these checks. Prices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from axisrules._errors import AbsentAxisError, MeshError, PolicyError, raise_all
from axisrules._plan import Plan
from axisrules._text import did_you_mean, format_mesh, nearest
from axisrules._trees import flatten
from axisrules.cost._rows import is_array

Step = Callable[[Plan], tuple[Any, Sequence[Any]]]


def check_tree(given: Any, word: str) -> None:
    """Refuses what holds no array.

    Raises:
        PolicyError: There is none.
    """
    if not isinstance(given, Plan) and not any(map(is_array, flatten(given).leaves)):
        raise PolicyError(
            f"{word} holds no array",
            fix=f"pass a plan of the {word}, or arrays (ShapeDtypeStructs) with shardings.",
        )


def check_mesh(given: Any, plan: Plan, word: str) -> None:
    """Refuses what lies on another mesh than the parameters, of which no part would be known.

    Raises:
        MeshError: An axis has another size, or is not there.
    """
    sizes = dict(plan.mesh.shape_tuple)
    raise_all(
        MeshError(
            f"the {word} lies on {format_mesh(own)}, and the parameters lie on {format_mesh(sizes)}",
            paths=paths,
            mesh=sizes,
            fix=f"lay the {word} out on the mesh of the plan.",
        )
        for paths, own in _meshes(given)
        if any(size > 1 and sizes.get(axis) != size for axis, size in own.items())
    )


def _meshes(given: Any) -> Iterator[tuple[list[str], dict[str, int]]]:
    """The mesh of a plan, or of each array that has one, with the array's path."""
    if isinstance(given, Plan):
        yield [], dict(given.mesh.shape_tuple)
        return
    flat = flatten(given)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield [path], dict(sharding.mesh.shape_tuple)


def check_time_limit(seconds: Any, *, at_once: bool) -> None:
    """Refuses what is no number of seconds; ``at_once`` allows 0.

    Raises:
        PolicyError: It is none, or negative.
    """
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not (seconds >= 0 if at_once else seconds > 0):
        raise PolicyError(f"time_limit={seconds!r} is no number of seconds", fix="pass a number, like 60.")


def made_by(step: Step, plan: Plan) -> tuple[Any, Sequence[Any]]:
    """The function and its arguments that a user's ``step`` makes of a plan.

    Raises:
        PolicyError: It is no function, or makes something else.
    """
    made = step(plan) if callable(step) else None
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], (tuple, list)):
        raise PolicyError(
            "step did not return a pair",
            fix="let step(plan) return (function, arguments), not traced yet; arguments are a tuple.",
        )
    return made


def check_axes(fixed: Iterable[tuple[str, tuple[str, ...]]], sizes: Mapping[str, int]) -> None:
    """Refuses fixed rules with axes that the mesh lacks, since they could not be kept.

    Raises:
        AbsentAxisError: There are some.
    """
    raise_all(
        AbsentAxisError(
            f"{name!r} is fixed to {axis!r}, and the mesh has no such axis{did_you_mean(axis, sizes)}",
            mesh=dict(sizes),
            fix="fix it to an axis of the mesh, or leave it out.",
            axis=axis,
            nearest=nearest(axis, sizes),
        )
        for name, axes in fixed
        for axis in axes
        if axis not in sizes
    )
