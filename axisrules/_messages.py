"""The layout of messages: the base of every error, and one error for all failures of a call.

Knows nothing of rules, meshes or trees: facts come in as plain values.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axisrules._text import format_count, format_mesh

_LABELS = ("at", "names", "shape", "mesh", "rule", "fix")  # the order in which a message shows them
_LISTED = 100  # leaves that an error lists one by one
_SHOWN = 20  # single errors that the text of a gathered error spells out


class AxisRulesError(ValueError):
    """Base of every error that axisrules raises.

    Attributes:
        headline: The first line, which stands alone.
        path, paths: Where it happened: the first leaf, and all of them.
        fix: A remedy that can be pasted.
        reason: The reason code, as it also appears in ``plan.report``.
        failures: The single errors that a gathered error consists of (``()`` for a single one).

    The other facts of an error (``dim``, ``name``, ``size``, ``names``, ``shape``, ``mesh``,
    ``rule``, ``axes``, ``axis``, ``holder``, ``nearest``) are attributes where they apply.

    Example:
        >>> import axisrules as ar
        >>> try:
        ...     ar.Rules([("embed", 3)])
        ... except ar.AxisRulesError as error:
        ...     print(error.headline)
        rule #0 maps 'embed' to 3, which is not a mesh axis
    """

    reason = "error"

    def __init__(
        self,
        headline: str,
        *,
        paths: Sequence[str] = (),
        fix: str = "",
        failures: Sequence[AxisRulesError] = (),
        **facts: Any,
    ) -> None:
        self.headline = headline
        self.paths = tuple(paths)
        self.path = self.paths[0] if self.paths else ""
        self.fix = fix
        self.failures = tuple(failures)
        self.facts = facts
        for key, value in facts.items():
            setattr(self, key, value)
        super().__init__(self._text())

    def at(self, paths: Sequence[str]) -> AxisRulesError:
        """The same error with the paths of the leaves where it happened."""
        return type(self)(self.headline, paths=paths, fix=self.fix, failures=self.failures, **self.facts)

    def singles_at(self, path: str) -> list[AxisRulesError]:
        """The single errors that this one consists of, at the leaf where it happened."""
        return [one.at([path] if path else []) for one in self.failures or [self]]

    def _text(self) -> str:
        if self.failures:
            return _gathered_text(self.headline, self.failures)
        lines = {
            "at": _at(self.paths, "names" in self.facts, self.facts.get("listing", ())),
            **_names_and_shape(self.facts),
            "mesh": format_mesh(self.facts.get("mesh")),
            "rule": self.facts.get("rule_text", ""),
            "fix": self.fix,
        }
        shown = [f"  {label + ':':<7}{lines[label]}" for label in _LABELS if lines.get(label)]
        return "\n".join([self.headline, *shown])

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.facts, paths=self.paths, fix=self.fix, failures=self.failures)
        return _rebuild, (type(self), self.headline, state)


def _rebuild(cls: type[AxisRulesError], headline: str, state: dict[str, Any]) -> AxisRulesError:
    return cls(headline, **state)


def _at(paths: Sequence[str], same_shape: bool, listing: Sequence[str]) -> str:
    if listing:
        more = [f"... and {len(listing) - _LISTED} more, in .paths"] if len(listing) > _LISTED else []
        return "\n         ".join([*listing[:_LISTED], *more])
    if len(paths) < 2:
        return paths[0] if paths else ""
    alike = " with the same names and shape" if same_shape else ""
    return f"{paths[0]}      (and {len(paths) - 1} more{alike})"


def _names_and_shape(facts: Mapping[str, Any]) -> dict[str, str]:
    shape = "" if facts.get("shape") is None else repr(tuple(facts["shape"]))
    if "names" not in facts:
        return {"shape": shape}
    return {"names": f"{facts['names']!r}" + (f"    shape: {shape}" if shape else "")}


def _gathered_text(headline: str, failures: Sequence[AxisRulesError]) -> str:
    blocks = [f"{type(one).__name__}: {one}" for one in failures[:_SHOWN]]
    if len(failures) > _SHOWN:
        blocks.append(f"... and {len(failures) - _SHOWN} more, in .failures")
    return "\n".join([headline, *(textwrap.indent(block, "  ") for block in blocks)])


class PlanError(AxisRulesError):
    """Failures of several kinds, gathered from one call."""

    reason = "several"


def gather(failures: Iterable[AxisRulesError]) -> AxisRulesError | None:
    """One error for all failures of a call, or ``None`` where there are none.

    Failures that differ in nothing but their path become one with all paths. One kind of
    failure keeps its class; several kinds become a ``PlanError``.
    """
    merged: dict[str, list[AxisRulesError]] = {}
    for one in failures:
        key = repr((type(one), one.headline, one.fix, sorted(one.facts.items(), key=lambda kv: kv[0])))
        merged.setdefault(key, []).append(one)
    singles = [_merge(group) for group in merged.values()]
    if len(singles) < 2:
        return singles[0] if singles else None
    classes = {type(one) for one in singles}
    cls = classes.pop() if len(classes) == 1 else PlanError
    leaves = len({path for one in singles for path in one.paths})
    headline = f"{len(singles)} problems" + (
        f" in {format_count(leaves, 'leaf', 'leaves')}" if leaves else ""
    )
    paths = dict.fromkeys(path for one in singles for path in one.paths)
    return cls(headline, paths=tuple(paths), failures=singles)


def _merge(group: Sequence[AxisRulesError]) -> AxisRulesError:
    first = group[0]  # never raised itself: a resolution may keep it, and a traceback keeps arrays
    paths = tuple(dict.fromkeys(path for one in group for path in one.paths))
    return first.at(paths)


def raise_all(failures: Iterable[AxisRulesError]) -> None:
    """Raises the gathered error of a call, if anything failed."""
    error = gather(failures)
    if error is not None:
        raise error
