"""What the command line is given: trees, names, rules and golden files, from words of a shell.

Owns the reading of those words. Anything that cannot be read is a ``BadUsageError``; what a plan
refuses is not. Reads headers and no array.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from axisrules import catalog, checkpoints, presets
from axisrules._errors import (
    AxisRulesError,
    CatalogError,
    NameTableError,
    PlanError,
    PolicyError,
    RulesError,
)
from axisrules._extras import extra_module
from axisrules._files import SUFFIXES
from axisrules._meshes import as_mesh
from axisrules._plan import Placement, Plan
from axisrules._planning import plan as make_plan
from axisrules._rules import Rules
from axisrules._tables import NameTable
from axisrules._text import did_you_mean, nearest
from axisrules._trees import NO_ENTRY, flatten

Say = Callable[[str], None]

PRESETS = (
    "data_parallel",
    "fsdp",
    "tensor_parallel",
    "fsdp_tensor_parallel",
    "sequence_parallel",
    "expert_parallel",
)
DEFAULT_RULES = "fsdp_tensor_parallel"


class BadUsageError(Exception):
    """What was given cannot be read; ``error`` says why."""

    def __init__(self, error: AxisRulesError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def usage() -> Iterator[None]:
    """Errors inside are about what was given."""
    try:
        yield
    except AxisRulesError as error:
        raise BadUsageError(error) from error


class Wanted(NamedTuple):
    """What the options of a command say about a plan.

    Attributes:
        mesh: The mesh as text.
        names: A name table: a file, a name of the catalog, or ``None`` to guess.
        rules: A file, a preset, or ``None`` for the default preset.
        set: Which of several rule sets of the file.
        strict: Whether what does not fit is an error.
        say: Takes what was decided on the way.
        fill: The mesh axes over which what the rules leave whole is split, joined by commas.
    """

    mesh: str
    names: str | None
    rules: str | None
    set: str | None
    strict: bool
    say: Say
    fill: str | None = None


def planned(source: str, wanted: Wanted) -> Plan:
    """The plan of a tree as the options want it.

    Raises:
        BadUsageError: Something that was given cannot be read.
        AxisRulesError: The plan does not fit.
    """
    with usage():
        mesh = as_mesh(wanted.mesh)
        fill = read_fill(wanted.fill, [mesh])
        rules = read_rules(wanted.rules, wanted.set, wanted.say)
        tree = read_tree(source)
        names = read_names(wanted.names, tree, wanted.say)
    lenient = {"indivisible": "next", "absent": "drop", "unnamed": "replicate"}
    options: Any = {} if wanted.strict else lenient
    plan = make_plan(tree, names, mesh=mesh, rules=rules, unmapped="error", fill=fill, **options)
    _tell(plan, wanted.say)
    return plan


def _tell(plan: Plan, say: Say) -> None:
    """What was let pass, since nothing is left out in silence."""
    sizes = dict(plan.mesh.shape_tuple)
    absent = dict.fromkeys(axis for _, axes in plan.rules.pairs for axis in axes if axis not in sizes)
    if absent:
        say(f"rules: the mesh lacks {', '.join(absent)}, which is left out")
    used = {axis for placement in plan.placements for dim in placement.resolution.dims for axis in dim.axes}
    idle = [f"{axis}={size}" for axis, size in sizes.items() if size > 1 and axis not in used]
    if idle:
        say(f"mesh: {', '.join(idle)} splits no array")
    _tell_unnamed(plan, say)


def _tell_unnamed(plan: Plan, say: Say) -> None:
    unnamed = [row for row in plan.report if row.reason == "names_missing"]
    if unnamed:
        size = sum(row.bytes for row in unnamed)
        which = f"{len(unnamed):,} arrays of {size:,} bytes have none and stay whole: {unnamed[0].path} ..."
        one = f"{unnamed[0].path}, of {size:,} bytes, has none and stays whole"
        say(f"names: {one if len(unnamed) == 1 else which}")


class Given(NamedTuple):
    """What rule sets are tried on.

    Attributes:
        tree: The parameters.
        names: Their names; what has none stays whole.
        meshes: The meshes.
    """

    tree: Any
    names: Any
    meshes: list[Any]


def given(source: str, names: str | None, meshes: Sequence[str], strict: bool, say: Say) -> Given:
    """The tree, names and meshes of a command that brings rules of its own.

    Raises:
        BadUsageError: Something that was given cannot be read.
        AxisRulesError: The names do not fit the tree.
    """
    with usage():
        shapes = [as_mesh(mesh) for mesh in meshes]
        tree = read_tree(source)
        table = read_names(names, tree, say)
    unnamed: Any = "error" if strict else "replicate"
    plan = make_plan(tree, table, mesh=shapes[0], rules=(), unmapped="replicate", unnamed=unnamed)
    _tell_unnamed(plan, say)
    if any(row.reason == "names_missing" for row in plan.report):
        entries = {one.path: _entry(one) for one in plan.placements}
        return Given(tree, lambda path, leaf: entries.get(path), shapes)
    return Given(tree, table, shapes)


def _entry(one: Placement) -> Any:
    whole = all(dim.reason != "explicit_spec" for dim in one.resolution.dims)
    return one.names if whole else one.spec


def read_tree(source: str) -> Any:
    """The tree in a checkpoint, or what ``module:function`` returns."""
    if not os.path.exists(source) and ":" in source:
        return _call(source)
    if not os.path.exists(source):
        raise PlanError(
            f"there is no {source!r}",
            paths=[source],
            fix="give a safetensors file, folder or index, an Orbax folder, an .npz, or module:function.",
        )
    return checkpoints.open(source)


def _call(source: str, returns: str = "a tree") -> Any:
    module, _, name = source.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found()
    except AxisRulesError:
        raise
    except Exception as cause:  # the user's own code may raise anything: it becomes the error, in full
        raise PlanError(
            f"{source} raised {type(cause).__name__}: {cause}",
            fix=f"give module:function of a function without arguments that returns {returns}.",
        ) from cause
    finally:
        sys.path.remove(os.getcwd())


def read_names(given: str | None, tree: Any, say: Say) -> Any:
    """A name table: a file, a name of the catalog; guessed, and said so, where none is given."""
    if given is None:
        return _guessed(tree, say)
    table = NameTable.load(given) if _is_file(given) else _from_catalog(given)
    paths = [path for path, leaf in _arrays(tree) if leaf.shape]
    if paths and not any(table.matches(path) for path in paths):
        raise NameTableError(
            f"the table {given!r} has no names for any of the {len(paths)} arrays, such as {paths[0]}",
            fix="give another table with --names, or leave it out to have it guessed.",
        )
    return table


def _arrays(tree: Any) -> list[tuple[str, Any]]:
    flat = flatten(tree)
    return [
        (path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True) if hasattr(leaf, "shape")
    ]


def _is_file(given: str) -> bool:
    return os.path.exists(given) or given.endswith(SUFFIXES)


def _from_catalog(given: str) -> NameTable:
    try:
        return catalog.load(given)
    except CatalogError as error:
        raise CatalogError(
            error.headline,
            nearest=error.facts.get("nearest"),
            fix="`axisrules tables` lists them; --names also takes the path of a table.",
        ) from error


def _guessed(tree: Any, say: Say) -> NameTable | None:
    flat = flatten(tree)
    if any(entry is not NO_ENTRY for entry in flat.names):
        say("names: those that the tree carries")
        return None
    found = catalog.guess(tree)
    if not found:
        raise CatalogError(str(found), nearest=found.nearest, fix="give a table with --names.")
    say(f"names: guessed; {found}")
    return found.table


def read_rules(given: str | None, set: str | None, say: Say) -> Rules:
    """Rules: a file, or a preset by name."""
    if given is None:
        say(f"rules: the preset {DEFAULT_RULES}")
        given = DEFAULT_RULES
    if _is_file(given):
        return Rules.load(given, set=set)
    found = read_preset(given, ", and no such file")
    if set is not None:
        raise RulesError(f"the preset {given} has no sets", fix="leave out --set.")
    return found


def read_preset(given: str, nor: str = "") -> Rules:
    """The rules of a preset by name; ``nor`` says what else it was looked for as."""
    if given not in PRESETS:
        raise RulesError(
            f"there is no preset {given!r}{nor}{did_you_mean(given, PRESETS)}",
            nearest=nearest(given, PRESETS),
            fix=f"presets: {', '.join(PRESETS)}.",
        )
    preset: Callable[..., Rules] = getattr(presets, given)
    return preset()


def read_fill(given: str | None, meshes: Sequence[Any]) -> tuple[str, ...] | None:
    """The axes of ``--fill``: ``data``, or several joined by commas; some mesh has to have each."""
    if given is None:
        return None
    axes = tuple(word.strip() for word in given.split(","))
    known = dict.fromkeys(axis for mesh in meshes for axis in mesh.axis_names)
    for axis in axes:
        if axis not in known:
            raise PolicyError(
                f"--fill {given}: {axis!r} is no axis of the mesh{did_you_mean(axis, known)}",
                nearest=nearest(axis, known),
                fix=f"use one or several of {', '.join(known)}, joined by commas.",
            )
    return axes


def read_optimizer(given: str | None) -> Any:
    """An optimizer: one of optax by name, or what ``module:function`` returns."""
    if given is None:
        return None
    if ":" in given:
        made = _call(given, "an optimizer")
    else:
        optax = extra_module("optax", package="optax", extra="optax", purpose="optimizers by name")
        made = _of_optax(getattr(optax, given, None))
    if not hasattr(made, "init"):
        known = [] if ":" in given else [name for name in dir(optax) if name.islower() and name[0] != "_"]
        raise PolicyError(
            f"{given} is no optimizer{did_you_mean(given, known)}",
            nearest=nearest(given, known),
            fix="give the name of one of optax, such as adamw, or module:function that returns one.",
        )
    return made


def _of_optax(make: Any) -> Any:
    try:
        return make(1e-3)  # a rate of learning, which no state depends on
    except Exception:  # the word may be that of anything in optax, which then is no optimizer
        return None


def read_golden(path: str) -> Plan:
    """The plan in a file that ``axisrules plan --json`` wrote."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise PlanError(
            f"cannot read {path}: {cause}", paths=[path], fix="give a file of `axisrules plan --json`."
        ) from cause
    try:
        return Plan.from_json(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error.headline}", paths=[path], fix=error.fix) from error
