"""The one engine: names, rules, mesh axis sizes and a shape give a partition spec with reasons.

Pure and cached; touches no device and no tree. Everything else in axisrules that needs to know
where a dimension goes asks this file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from axisrules import _refusals
from axisrules._errors import AxisRulesError
from axisrules._names import UNCONSTRAINED, Names
from axisrules._policies import DEFAULT, Policies
from axisrules._resolution import Dim, Resolution, Sizes, Skip, rule_text
from axisrules._rules import Rules
from axisrules._specs import make_spec

_CACHE_LIMIT = 65536  # entries of one cache before it starts anew
_NONE: frozenset[str] = frozenset()


class _Array:
    """One array while its rules are tried: what each dimension holds, and why."""

    __slots__ = ("axes", "filling", "held", "manual", "names", "open", "policy", "problems", "reasons",
                 "rules", "shape", "sizes", "skips")  # fmt: skip

    def __init__(
        self,
        names: Names,
        rules: Rules,
        sizes: Mapping[str, int] | None,
        shape: Sequence[int] | None,
        policy: Policies,
        manual: frozenset[str],
    ) -> None:
        rank = len(names)
        self.names, self.rules, self.sizes, self.shape = names, rules, sizes, shape
        self.policy, self.manual = policy, manual
        self.axes: list[tuple[str, ...]] = [()] * rank
        self.open = [True] * rank
        self.reasons: list[tuple[str, int | None] | None] = [None] * rank
        self.held: dict[str, int] = {}
        self.skips: dict[int, list[Skip]] = defaultdict(list)
        self.problems: list[AxisRulesError] = []
        self.filling: tuple[str, ...] = ()

    # Sizes. Without a mesh every axis counts as one that splits.

    def trivial(self, axis: str) -> bool:
        return self.sizes is not None and self.sizes[axis] == 1

    def ways(self, axes: Iterable[str]) -> int:
        """Into how many parts the axes split a dimension; manual axes have split it already."""
        if self.sizes is None:
            return 1
        return math.prod(self.sizes[axis] for axis in axes if axis not in self.manual)

    def size(self, dim: int) -> int | None:
        return None if self.shape is None or self.sizes is None else self.shape[dim]

    # Trying one rule.

    def try_rule(self, dim: int, rule: int, axes: tuple[str, ...]) -> None:
        if not axes:
            self.open[dim] = False
            self.reasons[dim] = ("whole_by_rule", rule)
            return
        if self.sizes is not None:
            axes = self._splittable(dim, rule, axes)
        free = self._free(dim, rule, axes)
        if free and self.sizes is not None:
            free = self._divisible(dim, rule, free)
        if free:
            self.claim(dim, free, "split", rule)
        elif self.policy.taken == "partial":  # what was to be taken in part was not taken at all
            self.skips[dim] = [
                skip._replace(reason="axis_taken")
                if skip.reason == "partly_taken" and skip.rule == rule
                else skip
                for skip in self.skips[dim]
            ]

    def _splittable(self, dim: int, rule: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that the mesh has; none where they would split a dimension of size 1."""
        present = self._present(dim, rule, axes)
        if self.size(dim) == 1 and self.ways(present) > 1:
            self.skips[dim].append(Skip(rule, axes, "size_one_dim"))
            return ()
        return present

    def _present(self, dim: int, rule: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that the mesh has."""
        sizes = self.sizes
        if sizes is None or sizes.keys() >= set(axes):
            return axes
        present = tuple(axis for axis in axes if axis in sizes)
        absent = next(axis for axis in axes if axis not in sizes)
        if self.policy.absent == "error":
            self.problems.append(_refusals.absent(self.facts(rule), absent))
        if not present:
            self.skips[dim].append(Skip(rule, axes, "absent_axis", absent))
        return present

    def _free(self, dim: int, rule: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that no other dimension holds; none where the rule is to be skipped.

        An axis of size 1 that stands elsewhere is left out, and blocks nothing.
        """
        if self.held.keys().isdisjoint(axes):
            return axes
        free = tuple(axis for axis in axes if self.held.get(axis, dim) == dim)
        blocked = [a for a in axes if self.held.get(a, dim) != dim and not self.trivial(a)]
        if blocked:
            holder = self.held[blocked[0]]
            partly = self.policy.taken == "partial" and free
            reason = "partly_taken" if partly else "axis_taken"
            self.skips[dim].append(Skip(rule, axes, reason, blocked[0], holder))
            if self.policy.taken == "error":
                self.problems.append(_refusals.taken(self.facts(rule), dim, blocked[0], holder))
            if not partly:
                return ()
        if all(self.held.get(axis) == dim for axis in free):
            self.skips[dim].append(Skip(rule, axes, "nothing_left"))
            return ()
        return free

    def _divisible(self, dim: int, rule: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that the dimension divides over; none where the rule is to be skipped."""
        size = self.size(dim)
        if size is None or size % self.ways(axes) == 0:
            return axes
        if self.policy.indivisible == "error":
            self.problems.append(self._indivisible(dim, rule, axes))
            return axes  # as the rule wants it, so that no second error follows from the first
        leading = self._leading(size, axes) if self.policy.indivisible == "partial" else ()
        reason = "partly_divisible" if leading else "indivisible"
        self.skips[dim].append(Skip(rule, leading or axes, reason))
        return leading

    def _indivisible(self, dim: int, rule: int, axes: tuple[str, ...]) -> AxisRulesError:
        lenient = _Array(
            self.names, self.rules, self.sizes, self.shape,
            self.policy._replace(indivisible="next"), self.manual,
        )  # fmt: skip
        _try_all(lenient)
        lenient.fill(self.filling)
        return _refusals.indivisible(self.facts(rule), dim, axes, self.ways(axes), lenient.spec())

    def _leading(self, size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The longest leading part of the axes that divides the size."""
        lengths = range(len(axes) - 1, 0, -1)
        return next((axes[:n] for n in lengths if size % self.ways(axes[:n]) == 0), ())

    def claim(self, dim: int, axes: tuple[str, ...], reason: str, rule: int | None) -> None:
        """Gives the axes to the dimension; what it held of size 1 stays written before them."""
        kept = tuple(axis for axis in self.axes[dim] if axis not in axes)
        self.axes[dim] = kept + axes
        self.held.update(dict.fromkeys(axes, dim))
        if self.sizes is not None and all(map(self.trivial, axes)):
            self.reasons[dim] = self.reasons[dim] or ("size_one_axis", rule)
            return  # stays open for a rule that splits it
        self.open[dim] = False
        self.reasons[dim] = (reason, rule)

    def fill(self, axes: tuple[str, ...]) -> None:
        """Gives free axes to the largest dimension that is still whole and divides."""
        shape = self.shape
        if shape is None or self.ways(axes) == 1:
            return
        if any(axis in self.held and not self.trivial(axis) for axis in axes):
            return
        free = tuple(axis for axis in axes if axis not in self.held)
        ways = self.ways(free)
        whole = [d for d, held in enumerate(self.axes) if self.ways(held) == 1]
        fitting = [d for d in whole if shape[d] and shape[d] % ways == 0]
        if fitting:
            self.claim(max(fitting, key=lambda d: (shape[d], -d)), free, "filled", None)

    # What came of it.

    def facts(self, rule: int | None = None) -> dict[str, Any]:
        """What every error says of the array, and of the rule that it is about."""
        facts: dict[str, Any] = {"names": self.names, "shape": self.shape, "mesh": self.sizes}
        return facts if rule is None else {**facts, "rule": rule, "rule_text": rule_text(self.rules, rule)}

    def spec(self) -> PartitionSpec:
        """The axes of every dimension but the manual ones, as a spec."""
        if UNCONSTRAINED not in self.names and not self.manual:
            return make_spec(tuple(self.axes))
        return make_spec(tuple(
            UNCONSTRAINED if name is UNCONSTRAINED else self.written(dim)
            for dim, name in enumerate(self.names)
        ))  # fmt: skip

    def written(self, dim: int) -> tuple[str, ...]:
        """The axes of a dimension in the spec."""
        if not self.manual:
            return self.axes[dim]
        return tuple(axis for axis in self.axes[dim] if axis not in self.manual)

    def dims(self) -> tuple[Dim, ...]:
        return tuple(map(self._dim, range(len(self.names))))

    def _dim(self, dim: int) -> Dim:
        name = self.names[dim]
        axes = self.written(dim)
        size = None if self.shape is None else self.shape[dim]
        skips = tuple(self.skips.get(dim, ()))
        decided = self.reasons[dim]
        if decided is not None:
            reason, rule = decided
            partly = [skip for skip in skips if skip.rule == rule and skip.reason.startswith("partly")]
            if partly and reason == "split":
                reason = partly[0].reason
            return Dim(name, size, axes, reason, rule, None, skips)
        if skips:
            first = skips[0]
            return Dim(name, size, axes, first.reason, first.rule, first.holder, skips)
        if name is None or name is UNCONSTRAINED:
            return Dim(name, size, axes, "unnamed" if name is None else "unconstrained")
        return Dim(name, size, axes, "unknown_name")


def _try_all(array: _Array) -> None:
    """Tries the rules for the names of the array in the order of the rules."""
    by_name = array.rules.by_name
    tried = [
        (index, dim, axes)
        for dim, name in enumerate(array.names)
        if name.__class__ is str
        for index, axes in by_name.get(name, ())
    ]
    tried.sort()
    for index, dim, axes in tried:
        if array.open[dim]:
            array.try_rule(dim, index, axes)


def resolve_array(
    names: Names,
    rules: Rules,
    sizes: Sizes | None = None,
    shape: tuple[int, ...] | None = None,
    policy: Policies = DEFAULT,
    manual: frozenset[str] = _NONE,
    fill: tuple[str, ...] = (),
) -> Resolution:
    """Resolves one array; cached.

    Args:
        names: Parsed names, one per dimension of ``shape`` if that is given.
        rules: The rules.
        sizes: The mesh axes with their sizes; ``None`` where there is no mesh.
        shape: The global shape (inside ``shard_map`` the local one).
        policy: What to do where a rule does not fit.
        manual: Mesh axes that hold a dimension but are left out of the spec.
        fill: Axes to give to the largest dimension that is still whole after the rules.

    Returns:
        The resolution; what the policies refuse stands in ``problems``.
    """
    key = (names, sizes, shape, policy, manual, fill)
    found = rules.resolutions.get(key)
    if found is None:
        found = _resolve(names, rules, sizes, shape, policy, manual, fill)
        remember(rules.resolutions, key, found)
    return found


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to a cache, which starts anew where it has grown too large."""
    if len(cache) >= _CACHE_LIMIT:
        cache.clear()
    cache[key] = value


def _resolve(
    names: Names,
    rules: Rules,
    sizes: Sizes | None,
    shape: tuple[int, ...] | None,
    policy: Policies,
    manual: frozenset[str],
    fill: tuple[str, ...],
) -> Resolution:
    array = _Array(names, rules, None if sizes is None else dict(sizes), shape, policy, manual)
    repeated = _refusals.repeated_name(names)
    if repeated is not None:
        array.problems.append(repeated)
    else:
        array.filling = fill
        _try_all(array)
        array.fill(fill)
    dims = array.dims()
    if policy.unmapped == "error" and repeated is None:
        unknown = [d for d, n in enumerate(names) if isinstance(n, str) and n not in rules.by_name]
        array.problems.extend(_refusals.unknown(array.facts(), dim, rules.by_name) for dim in unknown)
    return Resolution(array.spec(), dims, names, rules, sizes, tuple(array.problems))


def mesh_axes(names: Names, rules: Rules) -> PartitionSpec:
    """The spec alone, of names and rules alone.

    Raises:
        RepeatedNameError: One name stands twice.
    """
    repeated = _refusals.repeated_name(names)
    if repeated is not None:
        raise repeated
    array = _Array(names, rules, None, None, DEFAULT, _NONE)
    _try_all(array)
    return array.spec()
