"""What a resolution says: values and their text.

Owns ``Resolution`` and its parts, and the sentences that explain them. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from axisrules._errors import REASONS, AxisRulesError
from axisrules._names import UNCONSTRAINED, Names
from axisrules._rules import Rules
from axisrules._text import format_axes, format_rule, format_spec

Sizes = tuple[tuple[str, int], ...]  # the axes of a mesh with their sizes, in order


class Skip(NamedTuple):
    """Why a rule for a dimension was not applied, or not whole.

    Attributes:
        rule: Position of the rule.
        axes: Its mesh axes.
        reason: A key of the table of reasons.
        axis: The mesh axis that it was about, if one.
        holder: The dimension that holds that axis, if one.
    """

    rule: int
    axes: tuple[str, ...]
    reason: str
    axis: str | None = None
    holder: int | None = None


class Dim(NamedTuple):
    """Where one dimension went, and why.

    Attributes:
        name: Its logical name, or ``None``.
        size: Its size, if a shape was given.
        axes: The mesh axes in its spec entry, major to minor.
        reason: A key of the table of reasons; of a dimension that stays whole since every rule
            for it was skipped, the reason of the first skip.
        rule: Position of the rule that decided, if one did (or of the first that was skipped).
        holder: The dimension that holds the axis that the first skipped rule wanted.
        skips: Every rule for its name that was not applied, or not whole.
    """

    name: Any
    size: int | None
    axes: tuple[str, ...]
    reason: str
    rule: int | None = None
    holder: int | None = None
    skips: tuple[Skip, ...] = ()


class Resolution(NamedTuple):
    """The spec of one array with the reason for every dimension; ``str()`` explains it.

    Attributes:
        spec: The partition spec, one entry per dimension.
        dims: A ``Dim`` per dimension.
        names: The axis names, one per dimension.
        rules: The rules that decided.
        sizes: The mesh axes with their sizes, or ``None`` where no mesh was given.
        problems: What the strict policies refuse, as errors without a path.
    """

    spec: PartitionSpec
    dims: tuple[Dim, ...]
    names: Names
    rules: Rules
    sizes: Sizes | None
    problems: tuple[AxisRulesError, ...] = ()

    @property
    def unknown_names(self) -> tuple[str, ...]:
        """The names that no rule mentions."""
        return tuple(n for n in self.names if isinstance(n, str) and n not in self.rules.by_name)

    def __str__(self) -> str:
        lines = [f"{format_spec(self.spec)} for {self.names!r}"]
        for number, dim in enumerate(self.dims):
            lines.append(f"  dimension {number} {_label(dim)}: {why(self, dim)}")
        return "\n".join(lines)


SKIPPED = {"axis_taken", "indivisible", "size_one_dim", "absent_axis", "nothing_left", "splits_group"}


def _label(dim: Dim) -> str:
    name = "*" if dim.name is UNCONSTRAINED else repr(dim.name)
    return name if dim.size is None else f"{name} of size {dim.size}"


def why(resolution: Resolution, dim: Dim) -> str:
    """Why a dimension of a resolution went where it did."""
    texts = [_skip_text(resolution, dim, skip) for skip in dim.skips]
    if dim.reason in SKIPPED:
        return f"whole: {'; '.join(texts)}"
    rule = "" if dim.rule is None else rule_text(resolution.rules, dim.rule)
    axes = axes_text(dim.axes, resolution.sizes)
    template = "split" if dim.reason.startswith("partly") else dim.reason
    main = REASONS[template][0].format(axes=axes, rule=rule)
    if dim.reason == "whole_by_rule" and dim.axes:
        texts.insert(0, f"{axes}, of an earlier rule, has size 1 and splits nothing")
    return "; ".join([main, *texts])


def _skip_text(resolution: Resolution, dim: Dim, skip: Skip) -> str:
    reason = REASONS[skip.reason][0].format(
        axes=axes_text(skip.axes if skip.axis is None else (skip.axis,), resolution.sizes),
        axis=skip.axis,
        holder=skip.holder,
        size=dim.size,
    )
    how = "was taken in part" if skip.reason.startswith("partly") else "was skipped"
    return f"rule {rule_text(resolution.rules, skip.rule)} {how}: {reason}"


def rule_text(rules: Rules, index: int) -> str:
    name, axes = rules.pairs[index]
    return format_rule(index, name, axes)


def axes_text(axes: Sequence[str], sizes: Sizes | None) -> str:
    if sizes is None:
        return format_axes(axes)
    known = dict(sizes)
    return " * ".join(f"{axis}={known[axis]}" if axis in known else axis for axis in axes)
