"""What is refused before it is priced: a batch without arrays, another mesh, a wrong time limit.

Owns these checks. Prices nothing.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from axisrules._errors import MeshError, PolicyError
from axisrules._plan import Plan
from axisrules._text import format_mesh
from axisrules._trees import flatten
from axisrules.cost._rows import is_array


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
    shardings = [getattr(leaf, "sharding", None) for leaf in flatten(given).leaves]
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    for mesh in [given.mesh] if isinstance(given, Plan) else meshes:
        if any(size > 1 and sizes.get(axis) != size for axis, size in mesh.shape_tuple):
            own = dict(mesh.shape_tuple)
            raise MeshError(
                f"the {word} lies on {format_mesh(own)}, and the parameters lie on {format_mesh(sizes)}",
                mesh=sizes,
                fix=f"lay the {word} out on the mesh of the plan.",
            )


def check_time_limit(seconds: Any, *, at_once: bool) -> None:
    """Refuses what is no number of seconds; ``at_once`` allows 0.

    Raises:
        PolicyError: It is none, or negative.
    """
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not (seconds >= 0 if at_once else seconds > 0):
        raise PolicyError(f"time_limit={seconds!r} is no number of seconds", fix="pass a number, like 60.")
