"""Plans as text: one stable, sorted, readable JSON document, made for committing.

Owns the format and its version. Arrays that are laid out alike stand together, each path on a line of
its own, so that a changed rule shows as a few changed lines. Mesh axes and rules keep their order,
which has a meaning; everything else is sorted. Reads and writes no file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from axisrules._errors import REASONS, AxisRulesError, PlanError, raise_all
from axisrules._meshes import as_mesh
from axisrules._plan import SLOT, Placement, Plan, ReportRow, Structure
from axisrules._resolution import Dim, Resolution, Skip
from axisrules._rules import Rules
from axisrules._specs import check_spec
from axisrules._text import did_you_mean

_FORMAT, _VERSION = "axisrules.plan", 1
_KEYS = ("mesh", "axis_types", "memory_kind", "rules", "arrays", "tied", "notes")
_AGAIN = "write the file again with plan.to_json()."


# Writing.


def write_plan(plan: Plan) -> str:
    """The text of a plan; equal plans give equal texts."""
    content = _content(plan)
    head = {"format": _FORMAT, "version": _VERSION, "hash": _hash(content)}
    return _text({**head, **content}) + "\n"


def _content(plan: Plan) -> dict[str, Any]:
    tied = {one.path: one.tied_to for one in plan.placements if one.tied_to is not None}
    return {
        "mesh": [list(axis) for axis in plan.mesh.shape_tuple],
        "axis_types": [kind.name.lower() for kind in plan.mesh.axis_types],
        "memory_kind": plan.memory_kind,
        "rules": [[name, _entry(axes)] for name, axes in plan.rules.pairs],
        "arrays": _groups(plan.placements),
        "tied": dict(sorted(tied.items())),
        "notes": [_sparse(row, ReportRow("")) for row in sorted(plan.notes, key=repr)],
    }


def _groups(placements: Sequence[Placement]) -> list[dict[str, Any]]:
    """The arrays that are laid out alike, each group with its sorted paths, by the first of them."""
    known: dict[Any, list[str]] = {}  # the paths of a group, by what is cheap to compare
    found: dict[str, dict[str, Any]] = {}
    for placement in placements:
        key = (id(placement.resolution), placement.dtype, placement.shape)
        if key not in known:
            group = _group(placement)
            known[key] = found.setdefault(json.dumps(group), {**group, "paths": []})["paths"]
        known[key].append(placement.path)
    for group in found.values():
        group["paths"].sort(key=_segments)
    return sorted(found.values(), key=lambda group: _segments(group["paths"][0]))


def _segments(path: str) -> list[str]:
    return path.split("/")


def _group(placement: Placement) -> dict[str, Any]:
    """All of a placement but its path."""
    dims = placement.resolution.dims
    return {
        "shape": list(placement.shape),
        "dtype": str(placement.dtype),
        "names": list(placement.names),
        "spec": [_entry(dim.axes) for dim in dims],
        "why": [_why(dim) for dim in dims],
    }


def _entry(axes: Sequence[str]) -> str | list[str] | None:
    return list(axes) if len(axes) > 1 else axes[0] if axes else None


def _why(dim: Dim) -> dict[str, Any]:
    why = {"reason": dim.reason, "rule": dim.rule, "holder": dim.holder}
    found: dict[str, Any] = {key: value for key, value in why.items() if value is not None}
    if dim.skips:
        found["skips"] = [{**_sparse(skip, _NO_SKIP), "axes": list(skip.axes)} for skip in dim.skips]
    return found


_NO_SKIP = Skip(-1, (), "")


def _sparse(value: Any, default: Any) -> dict[str, Any]:
    """The fields of a named tuple that are not as in another one."""
    return {k: v for k, v in value._asdict().items() if v != getattr(default, k)}


def _hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


# What is written over several lines, for a person to compare line by line.
_OPEN = {"", "rules", "arrays", "arrays[]", "why", "paths", "tied", "notes"}


def _text(value: Any, name: str = "", depth: int = 0) -> str:
    """JSON in which every rule, group of arrays, reason and path has a line of its own."""
    if name not in _OPEN or not value or not isinstance(value, (dict, list)):
        return _line(value)
    pad = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{_line(key)}: {_text(below, key, depth + 1)}" for key, below in value.items()]
        return f"{{{pad}{f',{pad}'.join(items)}{pad[:-1]}}}"
    items = [_text(below, f"{name}[]", depth + 1) for below in value]
    return f"[{pad}{f',{pad}'.join(items)}{pad[:-1]}]"


def _line(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no place in a file
        return json.dumps(value)
    return text


# Reading.


def read_plan(text: str) -> Plan:
    """The plan that a text holds, on an abstract mesh, in a tree of nested dicts by path.

    Raises:
        PlanError: The text is no plan, is of another version, or was changed since it was written.
    """
    content = _checked(text)
    mesh = _read("mesh", lambda: _mesh(content["mesh"], content["axis_types"]))
    rules = _read("rules", lambda: Rules([(name, axes) for name, axes in content["rules"]]))
    tied = _read("tied", lambda: {path: _text_of(first) for path, first in content["tied"].items()})
    placements: list[Placement] = []
    for number, group in enumerate(_read("arrays", lambda: list(content["arrays"]))):
        placements += _read(f"arrays[{number}]", lambda g=group: _placements(g, mesh, rules, tied))  # type: ignore[misc]
    placements.sort(key=lambda one: _segments(one.path))
    notes = _read("notes", lambda: tuple(ReportRow(**{"path": "", **row}) for row in content["notes"]))
    kind = content["memory_kind"]
    if kind is not None and not isinstance(kind, str):
        raise _malformed("memory_kind", f"{kind!r} is no memory")
    structure = Structure(_rebuilder([one.path for one in placements]), (SLOT,) * len(placements))
    return Plan(tuple(placements), mesh, rules, kind, structure, notes)


def _checked(text: str) -> dict[str, Any]:
    """The content of a text of this format and version whose hash is right."""
    try:
        data = json.loads(text)
    except (TypeError, ValueError, RecursionError) as cause:
        raise PlanError(f"the text of a plan does not parse as JSON: {cause}", fix=_AGAIN) from cause
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PlanError(
            f'the text is no plan: it has no "format": "{_FORMAT}"', fix="give what plan.to_json() returned."
        )
    if data.get("version") != _VERSION:
        raise PlanError(
            f"the plan has version {data.get('version')!r} of the format, and this axisrules reads "
            f"version {_VERSION}",
            fix="write it again with this version of axisrules, or read it with the one that wrote it.",
        )
    missing = [key for key in _KEYS if key not in data]
    extra = [key for key in data if key not in (*_KEYS, "format", "version", "hash")]
    if missing or extra:
        what = f"lacks {', '.join(map(repr, missing))}" if missing else f"has an unknown part {extra[0]!r}"
        raise PlanError(
            f"the text of a plan {what}{did_you_mean(extra[0], _KEYS) if extra else ''}", fix=_AGAIN
        )
    content = {key: data[key] for key in _KEYS}
    if data.get("hash") != _hash(content):
        raise PlanError(
            "the text of a plan was changed: it does not have the hash that it states", fix=_AGAIN
        )
    return content


def _read(where: str, make: Callable[[], Any]) -> Any:
    """What a part of the text says; an error says which part."""
    try:
        return make()
    except AxisRulesError as error:
        raise _malformed(where, error.headline) from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise _malformed(where, f"{type(error).__name__}: {error}") from error


def _malformed(where: str, why: str) -> PlanError:
    return PlanError(f"the text of a plan is malformed at {where}: {why}", fix=_AGAIN, part=where)


def _mesh(axes: Any, types: Any) -> AbstractMesh:
    sizes = dict(axes)
    as_mesh(sizes)  # checks them
    if len(sizes) < len(axes):
        raise ValueError("an axis stands twice")
    kinds = tuple(AxisType[kind.capitalize()] for kind in types)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def _placements(group: Any, mesh: AbstractMesh, rules: Rules, tied: dict[str, str]) -> list[Placement]:
    shape = tuple(_numbers(group["shape"]))
    names = tuple(_optional(name) for name in group["names"])
    sizes = mesh.shape_tuple
    entries = [tuple(e) if isinstance(e, list) else e for e in group["spec"]]
    checked = check_spec(PartitionSpec(*entries), rules, sizes, shape)
    raise_all(checked.problems)
    pairs = zip(checked.dims, names, group["why"], strict=True)
    dims = tuple(_dim(dim, name, why, len(rules), len(shape)) for dim, name, why in pairs)
    found = Resolution(checked.spec, dims, names, rules, sizes)
    dtype, by_axis = _dtype(group["dtype"]), dict(sizes)
    paths = [_text_of(path) for path in group["paths"]]
    return [Placement(path, shape, dtype, found, by_axis, tied.get(path)) for path in paths]


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"{value!r} is no text")


def _numbers(values: Any) -> Iterator[int]:
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no size")
        yield value


def _optional(value: Any) -> str | None:
    return None if value is None else _text_of(value)


def _dim(dim: Dim, name: str | None, why: Any, rules: int, rank: int) -> Dim:
    skips = tuple(
        Skip(
            _number(skip["rule"], rules),
            tuple(map(_text_of, skip["axes"])),
            _reason(skip["reason"]),
            _optional(skip.get("axis")),
            _number(skip.get("holder"), rank),
        )
        for skip in why.get("skips", ())
    )
    rule, holder = _number(why.get("rule"), rules), _number(why.get("holder"), rank)
    return Dim(name, dim.size, dim.axes, _reason(why["reason"]), rule, holder, skips)


def _number(value: Any, limit: int) -> Any:
    if value is not None and not (type(value) is int and 0 <= value < limit):
        raise ValueError(f"{value!r} is no number below {limit}")
    return value


def _reason(value: Any) -> str:
    if value not in REASONS:
        raise ValueError(f"{value!r} is no reason{did_you_mean(str(value), REASONS)}")
    return str(value)


_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@cache
def _dtype(text: str) -> Any:
    if not text.startswith("key<"):
        return np.dtype(text)
    for name in _KEY_IMPLEMENTATIONS:
        found = jax.eval_shape(lambda seed, n=name: jax.random.key(seed, impl=n), 0).dtype
        if str(found) == text:
            return found
    raise ValueError(f"{text!r} is no dtype of PRNG keys")


def _rebuilder(paths: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """Makes nested dicts by path; a flat dict, or a list, where the paths are no such tree."""
    if list(paths) == [""]:
        return lambda new: new[0]
    keys = [tuple(path.split("/")) for path in paths]
    nodes = {key[:n] for key in keys for n in range(1, len(key))}
    if len(set(keys)) < len(keys):
        return list
    if not nodes.isdisjoint(keys):
        return lambda new: dict(zip(paths, new, strict=True))
    return lambda new: _nest(keys, new)


def _nest(keys: Sequence[tuple[str, ...]], new: Sequence[Any]) -> Any:
    root: dict[str, Any] = {}
    for key, value in zip(keys, new, strict=True):
        at = root
        for segment in key[:-1]:
            at = at.setdefault(segment, {})
        at[key[-1]] = value
    return root
