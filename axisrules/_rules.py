"""Rules, and which of them are active.

Owns the value ``Rules`` and the scope of the active rules. What a rule does to an array is
decided in ``_resolve.py`` alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from axisrules import _files
from axisrules._errors import RulesError, raise_all
from axisrules._text import did_you_mean, format_axes, nearest

MeshAxes: TypeAlias = "str | tuple[str, ...] | None"
RulesLike: TypeAlias = "Rules | Mapping[str, Any] | Iterable[tuple[str, Any]]"


class Rules:
    """An ordered, immutable, hashable sequence of rules.

    A rule maps a logical name to mesh axes: a ``str``, a tuple of ``str`` (major to minor), or
    ``None`` for a dimension that stays whole. The same name may return as a fallback. Iterating
    gives ``(name, axes)`` pairs; a tuple of one axis reads as that axis, and ``()`` as ``None``.

    Args:
        rules: A mapping, or pairs in order.

    Raises:
        RulesError: A rule is malformed; all of them are named with their position.

    Example:
        >>> import axisrules as ar
        >>> rules = ar.Rules({"batch": ("data", "fsdp"), "embed": "fsdp"})
        >>> rules.append({"embed": "data"}).replace("batch", "data")
        Rules([('batch', 'data'), ('embed', 'fsdp'), ('embed', 'data')])
    """

    # `specs` and `resolutions` belong to the engine: what these rules have decided before.
    __slots__ = ("_hash", "by_name", "pairs", "resolutions", "specs")

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    by_name: dict[str, list[tuple[int, tuple[str, ...]]]]
    specs: dict[Any, Any]
    resolutions: dict[Any, Any]

    def __init__(self, rules: RulesLike = ()) -> None:
        self.pairs = rules.pairs if isinstance(rules, Rules) else _check(rules)
        self._hash = hash(self.pairs)
        self.by_name, self.specs, self.resolutions = {}, {}, {}
        for index, (name, axes) in enumerate(self.pairs):
            self.by_name.setdefault(name, []).append((index, axes))

    def prepend(self, rules: RulesLike) -> Rules:
        """New rules with the given ones tried first."""
        return _join(as_rules(rules), self)

    def append(self, rules: RulesLike) -> Rules:
        """New rules with the given ones tried last."""
        return _join(self, as_rules(rules))

    def replace(self, name: str, axes: MeshAxes) -> Rules:
        """New rules with one rule for ``name``, where its first one stood.

        Raises:
            RulesError: No rule mentions ``name``.
        """
        first = self._known(name)[0][0]
        kept = [(i, rule) for i, rule in enumerate(self.pairs) if rule[0] != name or i == first]
        return Rules([(name, axes) if i == first else rule for i, rule in kept])

    def drop(self, name: str) -> Rules:
        """New rules without any for ``name``.

        Raises:
            RulesError: No rule mentions ``name``.
        """
        self._known(name)
        return Rules([rule for rule in self.pairs if rule[0] != name])

    def _known(self, name: str) -> list[tuple[int, tuple[str, ...]]]:
        if name not in self.by_name:
            raise RulesError(
                f"no rule mentions {name!r}{did_you_mean(name, self.by_name)}",
                name=name,
                nearest=nearest(name, self.by_name),
                fix=f"known names: {', '.join(sorted(self.by_name)) or 'none'}.",
            )
        return self.by_name[name]

    @classmethod
    def load(cls, path: str | os.PathLike[str], set: str | None = None) -> Rules:
        """Reads rules from a ``.toml``, ``.json`` or ``.yaml`` file.

        The file holds pairs ``[name, axes]`` (or a mapping) under ``rules`` or, as published
        YAML files do, under ``logical_axis_rules``; a JSON or YAML file may be nothing but the
        pairs. Several named sets are tables that hold ``rules`` each.

        Args:
            path: The file. YAML needs the extra ``yaml``.
            set: Which of several sets, by name.

        Raises:
            RulesError: The file cannot be read, has no such set, or a rule is malformed.
            MissingExtraError: The file is YAML and PyYAML is not installed.
        """
        found = _files.pick_rules(_files.read(path, RulesError), set, os.fspath(path))
        try:
            return cls(found)
        except RulesError as error:
            where = os.fspath(path) + (f" [{set}]" if set else "")
            raise RulesError(
                f"{where}: {error.headline}", paths=[where], failures=error.failures, fix=error.fix
            ) from error

    def dump(self, path: str | os.PathLike[str], set: str | None = None) -> None:
        """Writes the rules in a form that ``load`` reads, whole or not at all.

        Args:
            path: The file; its suffix gives the format.
            set: Write under this name and keep the file's other sets.
        """
        data: dict[str, Any] = {"rules": [[name, list(axes)] for name, axes in self.pairs]}
        if set is not None:
            data = {**_files.kept_beside(path), set: data}
        _files.write(path, data, RulesError)

    def __iter__(self) -> Iterator[tuple[str, MeshAxes]]:
        return ((name, _plain(axes)) for name, axes in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rules):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.pairs == other.pairs)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Rules, (list(self),)

    def __repr__(self) -> str:
        return f"Rules([{', '.join(map(repr, self))}])"

    def __str__(self) -> str:
        width = max((len(name) for name in self.by_name), default=0)
        lines = [f"#{i} {n:<{width}} -> {format_axes(a)}" for i, (n, a) in enumerate(self.pairs)]
        return "\n".join(lines) or "no rules"


@lru_cache(maxsize=256)
def _join(first: Rules, second: Rules) -> Rules:
    """Both in order; the same two give the same object, which keeps what it has decided."""
    if not first or not second:
        return first or second
    return Rules(_Checked(first.pairs + second.pairs))


class _Checked(tuple[Any, ...]):
    """Rules that were checked before."""

    __slots__ = ()


def _plain(axes: tuple[str, ...]) -> MeshAxes:
    return axes if len(axes) > 1 else axes[0] if axes else None


def _check(rules: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every rule as (name, tuple of axes), or one error for all that are malformed."""
    if type(rules) is _Checked:
        return tuple(rules)
    if isinstance(rules, Mapping):
        rules = rules.items()
    if isinstance(rules, (str, bytes, set, frozenset)) or not isinstance(rules, Iterable):
        raise RulesError(
            f"{rules!r} is no sequence of rules",
            fix='give a mapping like {"embed": "fsdp"} or pairs like [("embed", "fsdp")].',
        )
    checked, failures = [], []
    for index, rule in enumerate(rules):
        good = _good(rule)
        if good is None:
            failures.append(_problem(index, rule))
        else:
            checked.append(good)
    raise_all(failures)
    return tuple(checked)


def _good(rule: Any) -> tuple[str, tuple[str, ...]] | None:
    """A rule with its axes in a tuple, or ``None`` where it is malformed."""
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        return None
    name, axes = rule
    if not isinstance(name, str) or not name:
        return None
    if name.__class__ is not str:  # an enum of names is names
        name = str.__str__(name)
    if axes is None:
        return name, ()
    if isinstance(axes, str):
        axes = (axes,)
    if not isinstance(axes, (tuple, list)):
        return None
    if not _TEXTS.issuperset(map(type, axes)):
        if not all(isinstance(axis, str) for axis in axes):
            return None
        axes = map(str.__str__, axes)
    given = tuple(axes)
    return (name, given) if "" not in given and len(set(given)) == len(given) else None


_TEXTS = {str}


def _problem(index: int, rule: Any) -> RulesError:
    """What is wrong with a malformed rule."""
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        return RulesError(
            f"rule #{index} is {rule!r}, not a pair of a name and mesh axes",
            rule=index,
            fix='write pairs like ("embed", "fsdp") or ("batch", ("data", "fsdp")).',
        )
    name, axes = rule
    if not isinstance(name, str) or not name:
        return RulesError(
            f"rule #{index} has the name {name!r}, which is not a non-empty text",
            rule=index,
            fix="a dimension without a name needs no rule; drop this one.",
        )
    if not isinstance(axes, (tuple, list)):
        return RulesError(
            f"rule #{index} maps {name!r} to {axes!r}, which is not a mesh axis",
            rule=index,
            fix="mesh axes are a text, a tuple of texts in order, or None.",
        )
    for axis in axes:
        if not isinstance(axis, str) or not axis:
            return RulesError(
                f"rule #{index} maps {name!r} to {axes!r}, in which {axis!r} is not a mesh axis",
                rule=index,
                fix="every entry of the tuple is a non-empty text.",
            )
    return RulesError(
        f"rule #{index} maps {name!r} to {axes!r}, which has an axis twice",
        rule=index,
        fix=f"write {tuple(dict.fromkeys(axes))!r}.",
    )


@lru_cache(maxsize=256)
def _from_pairs(pairs: tuple[Any, ...]) -> Rules:
    return Rules(pairs)


def as_rules(rules: RulesLike) -> Rules:
    """Rules from anything that spells them; the same tuple of pairs gives the same object."""
    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, tuple):
        try:
            return _from_pairs(rules)
        except TypeError:  # pairs that are lists have no hash
            return Rules(rules)
    return Rules(rules)
