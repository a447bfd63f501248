"""The command line ``axisrules``: look at a layout before it costs anything.

Owns the commands, their options and exit statuses: 1 where a check fails, 2 for bad usage. Results go
to the standard output, what was decided on the way to the standard error. Needs the extra ``cli``.
"""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from axisrules import _cli_json as for_programs
from axisrules._cli_cost import add_commands
from axisrules._cli_inputs import (
    BadUsageError,
    Wanted,
    planned,
    read_golden,
    read_optimizer,
    read_rules,
    usage,
)
from axisrules._errors import AxisRulesError
from axisrules._extras import extra_module
from axisrules._meshes import as_mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: The words after ``axisrules``; those of the process by default.

    Returns:
        The exit status: 0, 1 where a check fails, 2 for bad usage.

    Example:
        >>> from axisrules.cli import main
        >>> main(["lint", "--rules", "tensor_parallel", "--mesh", "data=2,modle=x"])
        2
    """
    try:
        typer = extra_module("typer", package="typer", extra="cli", purpose="the command line")
        command = typer.main.get_command(make_app(typer))
        command.main(args=None if arguments is None else list(arguments), prog_name="axisrules")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 2
    except BadUsageError as bad:
        return _failed(bad.error, 2)
    except AxisRulesError as error:
        return _failed(error, 2 if error.reason == "missing_extra" else 1)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 0
    return 0


def _failed(error: AxisRulesError, status: int) -> int:
    print(f"axisrules: {type(error).__name__}: {error}", file=sys.stderr)
    return status


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def make_app(typer: Any) -> Any:
    """The application with all its commands."""
    app = typer.Typer(
        name="axisrules",
        help="Look at a layout before it costs anything.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    option = _options(typer)
    for add in (_add_plan, _add_explain, _add_lint, _add_diff, _add_page, _add_tables):
        add(app, option, typer)
    add_commands(app, option, typer, _say)
    return app


def _options(typer: Any) -> SimpleNamespace:
    """The arguments and options that commands share."""
    return SimpleNamespace(
        checkpoint=typer.Argument(
            help="A safetensors file, folder or index, an Orbax folder, an .npz, or module:function."
        ),
        mesh=typer.Option(..., "--mesh", help="Axis sizes, such as data=16,model=16."),
        names=typer.Option(None, "--names", help="A name table: a file or a name of `axisrules tables`."),
        rules=typer.Option(None, "--rules", help="A file of rules, or a preset."),
        set=typer.Option(None, "--set", help="Which of several sets in the file of rules."),
        fill=typer.Option(
            None, "--fill", help="Axes over which what the rules leave whole is split, such as data,model."
        ),
        strict=typer.Option(
            False, "--strict", help="Refuse what does not divide, lacks names, or names an absent axis."
        ),
        hardware=typer.Option(None, "--hardware", help='An accelerator, such as "TPU v5e", or a TOML file.'),
        optimizer=typer.Option(None, "--optimizer", help="One of optax, such as adamw, or module:function."),
        json=typer.Option(False, "--json", help="Print JSON for programs."),
    )


def _add_plan(app: Any, o: Any, typer: Any) -> None:
    limit = typer.Option(None, "--max-bytes-per-device", help="Fail where a device holds more bytes.")
    replicated = typer.Option(
        None, "--max-replicated", help="Fail where more of all bytes is replicated (0 to 1)."
    )
    most = typer.Option(
        None, "--max-waste", help="Fail where a device holds more than so many times the ideal."
    )
    order = typer.Option("tree", "--sort", help="The order of the lines: tree, bytes or waste.")

    def plan(
        checkpoint: str = o.checkpoint,
        mesh: str = o.mesh,
        names: str | None = o.names,
        rules: str | None = o.rules,
        set: str | None = o.set,
        fill: str | None = o.fill,
        strict: bool = o.strict,
        sort: str = order,
        max_bytes_per_device: int | None = limit,
        max_replicated: float | None = replicated,
        max_waste: float | None = most,
        json: bool = o.json,
    ) -> None:
        """Where every array of a checkpoint goes; --json is the golden file for `diff`."""
        from axisrules.report import table

        found = planned(checkpoint, Wanted(mesh, names, rules, set, strict, _say, fill))
        with usage():
            shown = table(found, sort=sort)
        if json:
            sys.stdout.write(found.to_json())
        else:
            shown.show()
        found.check(
            max_bytes_per_device=max_bytes_per_device, max_replicated=max_replicated, max_waste=max_waste
        )

    app.command("plan")(plan)


def _add_explain(app: Any, o: Any, typer: Any) -> None:
    where = typer.Argument(help="The path of one array, as `axisrules plan --json` has it.")

    def explain(
        checkpoint: str = o.checkpoint,
        path: str = where,
        mesh: str = o.mesh,
        names: str | None = o.names,
        rules: str | None = o.rules,
        set: str | None = o.set,
        fill: str | None = o.fill,
        strict: bool = o.strict,
        json: bool = o.json,
    ) -> None:
        """Why one array lies as it does, and which device holds which part."""
        from axisrules.report import draw

        plan = planned(checkpoint, Wanted(mesh, names, rules, set, strict, _say, fill))
        with usage():
            placement = plan.placement(path)
        if json:
            for_programs.print_json(for_programs.placement(placement))
        else:
            print(f"{plan.explain(path)}\n\n{draw(placement)}")

    app.command("explain")(explain)


def _add_lint(app: Any, o: Any, typer: Any) -> None:
    source = typer.Argument(
        None, help="A checkpoint as for `plan`; without one the rules alone are looked at."
    )
    anywhere = typer.Option(None, "--mesh", help="Axis sizes; needed with a checkpoint.")
    notes = typer.Option(False, "--strict", help="Fail on notes too.")

    def lint(
        checkpoint: str | None = source,
        mesh: str | None = anywhere,
        names: str | None = o.names,
        rules: str | None = o.rules,
        set: str | None = o.set,
        fill: str | None = o.fill,
        strict: bool = notes,
        json: bool = o.json,
    ) -> None:
        """What is wrong or odd about rules; fails where there is a warning."""
        from axisrules import report

        if checkpoint is not None and mesh is None:
            raise typer.BadParameter("a checkpoint needs --mesh", param_hint="--mesh")
        if checkpoint is None:
            with usage():
                known = read_rules(rules, set, _say)
                found = report.lint(known, None if mesh is None else as_mesh(mesh))
        else:
            plan = planned(checkpoint, Wanted(str(mesh), names, rules, set, False, _say, fill))
            found = report.lint(plan=plan)
        if json:
            for_programs.print_json([vars(one) for one in found])
        else:
            print("\n".join(map(str, found)) or "nothing found")
        if any(strict or one.severity == "warning" for one in found):
            raise typer.Exit(1)

    app.command("lint")(lint)


def _add_diff(app: Any, o: Any, typer: Any) -> None:
    first = typer.Argument(help="The golden file of the earlier plan.")
    second = typer.Argument(help="The golden file of the later plan.")

    def diff(before: str = first, after: str = second, json: bool = o.json) -> None:
        """What changes between two golden files; fails where they differ."""
        with usage():
            found = read_golden(before).diff(read_golden(after))
        if json:
            for_programs.print_json(for_programs.difference(found))
        else:
            print(found)
        if found:
            raise typer.Exit(1)

    app.command("diff")(diff)


def _add_page(app: Any, o: Any, typer: Any) -> None:
    target = typer.Option(..., "-o", "--output", help="The HTML file to write.")

    def page(
        checkpoint: str = o.checkpoint,
        output: str = target,
        mesh: str = o.mesh,
        names: str | None = o.names,
        rules: str | None = o.rules,
        set: str | None = o.set,
        fill: str | None = o.fill,
        strict: bool = o.strict,
        hardware: str | None = o.hardware,
        optimizer: str | None = o.optimizer,
    ) -> None:
        """Write one HTML file that shows the plan, and with --hardware what it costs."""
        from axisrules import cost, report

        with usage():
            chip = None if hardware is None else cost.hardware(hardware)
            made = read_optimizer(optimizer)
        plan = planned(checkpoint, Wanted(mesh, names, rules, set, strict, _say, fill))
        with usage():
            report.page(plan, output, hardware=chip, optimizer=made)
        _say(f"wrote {output}")

    app.command("page")(page)


def _add_tables(app: Any, o: Any, typer: Any) -> None:
    def tables(json: bool = o.json) -> None:
        """The name tables of the catalog."""
        from axisrules import catalog

        names = catalog.names()
        for_programs.print_json(names) if json else print("\n".join(names))

    def demo() -> None:
        """Lay a real checkpoint out over eight simulated devices, three ways."""
        from axisrules import demo as module

        raise typer.Exit(module.main())

    app.command("tables")(tables)
    app.command("demo")(demo)


if __name__ == "__main__":
    sys.exit(main())
