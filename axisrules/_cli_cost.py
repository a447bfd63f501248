"""The commands of prices: ``memory``, ``compare`` and ``suggest``.

Owns their options and exit statuses, which are those of ``cli.py``: 1 where nothing fits. Prices
nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axisrules import _cli_json as for_programs
from axisrules import cost
from axisrules._cli_inputs import (
    PRESETS,
    Say,
    Wanted,
    given,
    planned,
    read_fill,
    read_optimizer,
    read_preset,
    read_rules,
    usage,
)
from axisrules._columns import columns
from axisrules._rules import Rules
from axisrules._text import format_bytes, format_mesh


def add_commands(app: Any, o: Any, typer: Any, say: Say) -> None:
    """Adds the commands; ``o`` holds the options that all commands share."""
    o.batch = typer.Option("batch", "--batch", help="The logical name of the batch in the rules.")
    _add_memory(app, o, typer, say)
    _add_compare(app, o, typer, say)
    _add_suggest(app, o, typer, say)


def _add_memory(app: Any, o: Any, typer: Any, say: Say) -> None:
    kept = typer.Option(True, help="Whether gradients are held beside the parameters.")

    def memory(
        checkpoint: str = o.checkpoint,
        mesh: str = o.mesh,
        names: str | None = o.names,
        rules: str | None = o.rules,
        set: str | None = o.set,
        fill: str | None = o.fill,
        hardware: str | None = o.hardware,
        optimizer: str | None = o.optimizer,
        gradients: bool = kept,
        strict: bool = o.strict,
        json: bool = o.json,
    ) -> None:
        """Bytes per device by kind; fails where they do not fit --hardware."""
        with usage():
            chip = None if hardware is None else cost.hardware(hardware)
            made = read_optimizer(optimizer)
        plan = planned(checkpoint, Wanted(mesh, names, rules, set, strict, say, fill))
        held = cost.memory(plan, made, gradients=gradients, hardware=chip)
        for_programs.print_json(for_programs.memory(held)) if json else print(held)
        if held.fits is False:
            raise typer.Exit(1)

    app.command("memory")(memory)


def _add_compare(app: Any, o: Any, typer: Any, say: Say) -> None:
    several = typer.Option(..., "--mesh", help="Axis sizes, such as data=16,model=16; may be repeated.")
    named = typer.Option(None, "--preset", help="A preset; may be repeated. Without rules: every preset.")
    files = typer.Option(None, "--rules", help="A file of rules, or a preset; may be repeated.")
    sets = typer.Option(None, "--set", help="Which of several sets in a file of rules; may be repeated.")
    count = typer.Option(None, "--tokens", help="Tokens of a batch, for the time of the arithmetic.")

    def compare(
        checkpoint: str = o.checkpoint,
        mesh: list[str] = several,
        preset: list[str] | None = named,
        rules: list[str] | None = files,
        set: list[str] | None = sets,
        names: str | None = o.names,
        fill: str | None = o.fill,
        hardware: str | None = o.hardware,
        optimizer: str | None = o.optimizer,
        batch: str = o.batch,
        tokens: int | None = count,
        strict: bool = o.strict,
        json: bool = o.json,
    ) -> None:
        """Rule sets side by side, the best first; fails where none fits."""
        with usage():
            chip = None if hardware is None else cost.hardware(hardware)
            made = read_optimizer(optimizer)
            rule_sets = _rule_sets(preset or [], rules or [], set or [], say)
        work = given(checkpoint, names, mesh, strict, say)
        with usage():
            filled = read_fill(fill, work.meshes)
        for label, one in rule_sets.items():
            _tell_absent(label, one, work.meshes, say)
        options: Any = {
            "unmapped": "error",
            "fill": filled,
            **({"indivisible": "error", "absent": "error"} if strict else {}),
        }
        table = cost.compare(
            rule_sets, work.tree, work.names, meshes=work.meshes, batch=batch, hardware=chip,
            optimizer=made, tokens=tokens, **options,
        )  # fmt: skip
        for_programs.print_json(for_programs.comparison(table)) if json else print(_compared(table))
        if table.winner is None or table.winner.memory is None or table.winner.memory.fits is False:
            raise typer.Exit(1)

    app.command("compare")(compare)


def _rule_sets(named: list[str], files: list[str], sets: list[str], say: Say) -> dict[str, Rules]:
    """The rule sets by name; every preset where none is given."""
    if not named and not files:
        say("rules: every preset")
        named = list(PRESETS)
    found = {name: read_preset(name) for name in named}
    which: list[str | None] = [*sets] or [None]
    for file in files:
        for one in which:
            found[file if one is None else f"{file}:{one}"] = read_rules(file, one, say)
    return found


def _tell_absent(label: str, rules: Rules, meshes: list[Any], say: Say) -> None:
    for mesh in meshes:
        sizes = dict(mesh.shape_tuple)
        absent = dict.fromkeys(axis for _, axes in rules.pairs for axis in axes if axis not in sizes)
        if absent:
            say(f"{label}: the mesh {format_mesh(sizes)} lacks {', '.join(absent)}, which is left out")


def _compared(table: cost.Comparison) -> str:
    """The table, what would break, and how each rule set grows."""
    lines = [str(table)]
    for row in table.rows:
        where = f"{row.name} on {format_mesh(row.mesh)}"
        if row.indivisible:
            lines.append(f"{where}: {_broken(row.indivisible)}")
        if row.idle:
            lines.append(f"{where}: {', '.join(row.idle)} splits nothing")
    grown = {name: {one.devices: one for one in sizes} for name, sizes in table.growth.items()}
    devices = sorted({count for sizes in grown.values() for count in sizes})
    rows = [(f"{count:,}", *(_grown(sizes.get(count)) for sizes in grown.values())) for count in devices]
    if rows:
        lines += ["", "per device, and sent by a device, as the first mesh grows along its first axis"]
        lines.append(columns(("devices", *grown), rows, range(len(grown) + 1)))
    return "\n".join(lines)


def _broken(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return f"1 array does not divide: {paths[0]}"
    return f"{len(paths):,} arrays do not divide: {paths[0]} ..."


def _grown(one: Any) -> str:
    if one is None:
        return "-"
    sent = "?" if one.wire_bytes is None else format_bytes(one.wire_bytes)
    return f"{format_bytes(one.bytes_per_device)}, {sent}"


def _add_suggest(app: Any, o: Any, typer: Any, say: Say) -> None:
    start = typer.Option(None, "--rules", help="A file of rules, or a preset, to begin with too.")
    pinned = typer.Option(None, "--fixed", help="A file of rules that stay as they are.")
    target = typer.Option(None, "-o", "--output", help="A file for the rules: .toml, .json or .yaml.")
    limit = typer.Option(4.0, "--time-limit", min=0.0, help="Seconds after which the best so far is taken.")

    def suggest(
        checkpoint: str = o.checkpoint,
        mesh: str = o.mesh,
        names: str | None = o.names,
        rules: str | None = start,
        set: str | None = o.set,
        fixed: str | None = pinned,
        hardware: str | None = o.hardware,
        optimizer: str | None = o.optimizer,
        batch: str = o.batch,
        time_limit: float = limit,
        output: str | None = target,
        strict: bool = o.strict,
        json: bool = o.json,
    ) -> None:
        """Better rules, and what each change gains; fails where they do not fit --hardware."""
        with usage():
            chip = None if hardware is None else cost.hardware(hardware)
            made = read_optimizer(optimizer)
            begun = None if rules is None else read_rules(rules, set, say)
            kept = None if fixed is None else Rules.load(fixed)
        work = given(checkpoint, names, [mesh], strict, say)
        found = cost.suggest(
            work.tree, work.names, work.meshes[0], batch, chip, fixed=kept, rules=begun, optimizer=made,
            time_limit=time_limit,
        )  # fmt: skip
        proposed = _complete(found)
        if output is not None:
            with usage():
                proposed.dump(output)
            say(f"wrote {output}")
        if json:
            for_programs.print_json(for_programs.suggestion(found, proposed))
        else:
            print(f"{found}\n\n{proposed}{_filled(found)}")
        if found.score.fits is False:
            raise typer.Exit(1)

    app.command("suggest")(suggest)


def _complete(found: cost.Suggestion) -> Rules:
    """The rules, with one for every name that the arrays bear, so that other commands take them."""
    borne = {name: None for one in found.plan.placements for name in one.names if name is not None}
    return found.rules.append([(name, None) for name in borne if name not in found.rules.by_name])


def _filled(found: cost.Suggestion) -> str:
    if not found.fill:
        return ""
    fill = found.fill if len(found.fill) > 1 else found.fill[0]
    words = ",".join(found.fill)
    return f"\nand what these leave whole is split by --fill {words}, or axisrules.plan(..., fill={fill!r})"
