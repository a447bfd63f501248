"""One array: ``logical_to_mesh_axes`` and ``resolve``.

Owns the two public functions that need no tree: it fills in the active rules and the active
mesh, asks the engine, and raises what the policies refuse.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from jax.sharding import PartitionSpec

from axisrules._errors import RankError, UnmappedAxisWarning, raise_all
from axisrules._meshes import MeshLike, active_mesh, as_mesh, axis_sizes
from axisrules._names import AxisNames, fit_names, parse_names
from axisrules._policies import policies
from axisrules._resolution import Resolution
from axisrules._resolve import mesh_axes, remember, resolve_array
from axisrules._rules import Rules, RulesLike, as_rules
from axisrules._scope import ACTIVE, THREAD, get_logical_axis_rules
from axisrules._text import nearest


def logical_to_mesh_axes(names: AxisNames, rules: RulesLike | None = None) -> PartitionSpec:
    """The partition spec of an array with the given axis names.

    Rules are tried in order; the first available one claims its mesh axes. Names that no rule
    mentions stay whole, and no warning is given: this is the bare engine, without mesh and shape.

    Args:
        names: One logical name or ``None`` per dimension, or the short form ``"batch embed"``.
        rules: The rules, by default the active ones (none where none are active).

    Returns:
        A spec with one entry per dimension.

    Raises:
        NamesError: The names are malformed, or one stands twice.
        RulesError: The rules are malformed.

    Example:
        >>> import axisrules as ar
        >>> tuple(ar.logical_to_mesh_axes(("input", "output"), {"output": "model", "input": "model"}))
        (None, 'model')
    """
    known: Any = rules
    if rules is None:
        known = ACTIVE.value if THREAD.unentered is None else get_logical_axis_rules()
    try:
        spec: PartitionSpec = known.specs[names]
    except (AttributeError, KeyError, TypeError):
        return _spec_anew(names, as_rules(known))
    return spec


def _spec_anew(names: AxisNames, rules: Rules) -> PartitionSpec:
    parsed = parse_names(names)
    if ... in parsed:
        parsed = tuple(name for name in parsed if name is not ...)
    spec = rules.specs.get(parsed)
    if spec is None:
        spec = mesh_axes(parsed, rules)
        remember(rules.specs, parsed, spec)
        if isinstance(names, str):
            remember(rules.specs, names, spec)
    return spec


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def resolve(
    names: AxisNames,
    shape: Sequence[int] | None = None,
    *,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
) -> Resolution:
    """The spec of one array with the reason for every dimension.

    Without a mesh, given or active, the rules alone decide. With one, axes of size 1 decide
    nothing and axes that the mesh lacks are noticed; with a shape too, so is divisibility.

    Args:
        names: One logical name or ``None`` per dimension, or the short form.
        shape: The global shape.
        mesh: A mesh, a mapping of axis sizes, or a text like ``"data=4,model=2"``.
        rules: The rules, by default the active ones (none where none are active).
        taken: What to do when a rule wants an axis that another dimension holds: try the
            ``"next"`` rule, take the free axes of a tuple (``"partial"``), or ``"error"``.
        indivisible: What to do when a dimension does not divide: ``"error"``, try the ``"next"``
            rule, or take the longest leading part of a tuple that divides (``"partial"``).
        absent: What to do when the mesh lacks an axis: ``"error"``, or ``"drop"`` it.
        unmapped: What to do with a name that no rule mentions: ``"warn"`` (where there is a
            mesh), ``"error"``, or ``"replicate"`` in silence.

    Returns:
        A ``Resolution``: ``.spec``, ``.dims``, and ``str()`` explains.

    Raises:
        AxisRulesError: What the policies refuse, all of it at once.

    Example:
        >>> import axisrules as ar
        >>> print(ar.resolve("embed mlp", (8, 6), mesh="data=4,model=2",
        ...                  rules={"mlp": "model", "embed": "model"}))
        P(None, 'model') for ('embed', 'mlp')
          dimension 0 'embed' of size 8: whole: rule #1 embed -> model was skipped: dimension 1 holds model
          dimension 1 'mlp' of size 6: split over model=2 by rule #0 mlp -> model
    """
    known: Any = rules
    if rules is None:
        known = ACTIVE.value if THREAD.unentered is None else get_logical_axis_rules()
    found = active_mesh() if mesh is None else mesh
    key = (names, shape, found, taken, indivisible, absent, unmapped)
    try:
        resolution: Resolution = known.resolutions[key]
    except (AttributeError, KeyError, TypeError):
        policy = policies(taken, indivisible, absent, unmapped)
        return _resolve_anew(names, shape, found, as_rules(known), policy, key)
    return resolution


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(size) for size in shape)
    except TypeError:
        raise RankError(f"{shape!r} is no shape", fix="give a tuple of numbers, such as (8, 128).") from None


def _resolve_anew(
    names: Any, shape: Any, mesh: Any, rules: Rules, policy: Any, key: tuple[Any, ...]
) -> Resolution:
    parsed = parse_names(names)
    size = None if shape is None else _shape(shape)
    if size is not None:
        parsed = fit_names(parsed, size)
    parsed = tuple(name for name in parsed if name is not ...)
    sizes = None if mesh is None else axis_sizes(as_mesh(mesh))
    resolution = resolve_array(parsed, rules, sizes, size, policy)
    raise_all(resolution.problems)
    if sizes is not None and policy.unmapped == "warn" and resolution.unknown_names:
        warn_unmapped(resolution.unknown_names, rules)
    elif _hashable(key):
        remember(rules.resolutions, key, resolution)
    return resolution


def warn_unmapped(names: Sequence[str], rules: Rules, *, where: str = "") -> None:
    """Warns, at the first line outside axisrules, that no rule mentions the names."""
    close = {name: nearest(name, rules.by_name) for name in names}
    texts = [f"{name!r} (did you mean {near!r}?)" if near else repr(name) for name, near in close.items()]
    warnings.warn(
        f"no rule mentions {', '.join(texts)}: the dimension stays whole{where}. Add a rule, "
        '(name, None) where that is on purpose, or pass unmapped="replicate".',
        UnmappedAxisWarning,
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The ``stacklevel`` of the caller's first frame outside axisrules."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__package__") == "axisrules":
        level, frame = level + 1, frame.f_back
    return level
