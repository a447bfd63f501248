"""Rules and name tables as files: TOML, JSON and (with the extra ``yaml``) YAML.

Owns reading and writing of the plain data. What the data mean is for ``Rules`` and
``NameTable`` to say; they hand in their own error class.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from axisrules._errors import AxisRulesError, RulesError
from axisrules._extras import extra_module
from axisrules._text import did_you_mean

SUFFIXES = (".toml", ".json", ".yaml", ".yml")


def read(path: str | os.PathLike[str], error: type[AxisRulesError]) -> Any:
    """The content of a file as plain data.

    Raises:
        error: The file is missing, has another suffix, or does not parse.
        MissingExtraError: The file is YAML and PyYAML is not installed.
    """
    import tomllib  # here, since an import of the package should not pay for it

    path = Path(path)
    suffix = _suffix(path, error)
    try:
        text = path.read_text(encoding="utf-8")
        if suffix == ".toml":
            return tomllib.loads(text)
        if suffix == ".json":
            return json.loads(text)
        return _read_yaml(text)
    except AxisRulesError:
        raise
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"cannot read {path}: {cause}", paths=[str(path)]) from cause


def write(path: str | os.PathLike[str], data: dict[str, Any], error: type[AxisRulesError]) -> None:
    """Writes plain data whole or not at all."""
    path = Path(path)
    suffix = _suffix(path, error)
    if suffix == ".toml":
        text = _toml(data)
    elif suffix == ".json":
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    else:
        text = _yaml().safe_dump(data, sort_keys=False)
    _check_round_trip(path, suffix, text, data, error)
    try:
        write_text(Path(os.path.realpath(path)), text)
    except (OSError, UnicodeEncodeError) as cause:
        raise error(f"cannot write {path}: {cause}", paths=[str(path)]) from cause


def _suffix(path: Path, error: type[AxisRulesError]) -> str:
    if path.suffix not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise error(
            f"cannot tell the format of {path} from its suffix {path.suffix!r}",
            paths=[str(path)],
            fix=f"name the file with one of {known}.",
        )
    return path.suffix


def _read_yaml(text: str) -> Any:
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as cause:
        raise ValueError(cause) from cause


def _yaml() -> Any:
    return extra_module("yaml", package="PyYAML", extra="yaml", purpose="YAML files")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, _mode(path))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _mode(path: Path) -> int:
    """The mode of the file, or what a new one gets."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _check_round_trip(
    path: Path, suffix: str, text: str, data: dict[str, Any], error: type[AxisRulesError]
) -> None:
    """Refuses to write what would read back as something else, such as the rest of a larger file."""
    import tomllib

    try:
        same = suffix != ".toml" or tomllib.loads(text) == data
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        raise error(
            f"cannot write {path} without losing other things that it holds",
            paths=[str(path)],
            fix="write to a file of its own.",
        )


def _toml(data: dict[str, Any]) -> str:
    """TOML of one level of tables; what stands deeper is written in one line."""
    plain = [_toml_line(k, v) for k, v in data.items() if not isinstance(v, dict)]
    tables = [
        "\n".join([f"[{_toml_value(name)}]", *(_toml_line(k, v) for k, v in table.items())]) + "\n"
        for name, table in data.items()
        if isinstance(table, dict)
    ]
    return "\n".join([*plain, *tables]) + "\n"


def _toml_line(key: str, value: Any) -> str:
    return f"{_toml_value(key)} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return "[\n" + "".join(f"  {_toml_value(item)},\n" for item in value) + "]"
    if isinstance(value, dict):
        return f"{{{', '.join(_toml_line(k, v) for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # A JSON string is a TOML string but for DEL, which JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def pick_rules(data: Any, wanted: str | None, where: str) -> Any:
    """The pairs of one set of rules in the content of a file.

    Raises:
        RulesError: There is no such set, or several and none was asked for.
    """
    if isinstance(data, list) and wanted is None:
        return data
    if wanted is None and isinstance(data, dict):
        for key in ("logical_axis_rules", "rules"):
            if key in data:
                return data[key]
    sets = rule_sets(data)
    if wanted is None and len(sets) == 1:
        return next(iter(sets.values()))["rules"]
    if wanted in sets:
        return sets[wanted]["rules"]
    if not sets and isinstance(data, dict) and not {"rules", "logical_axis_rules"}.isdisjoint(data):
        raise RulesError(f"{where} holds rules without a name", paths=[where], fix="leave out set=.")
    if not sets:
        raise RulesError(f"{where} holds no set of rules", paths=[where], fix=_RULES_FORM)
    problem = (
        f"{where} holds {len(sets)} sets of rules"
        if wanted is None
        else f"{where} has no set {wanted!r}{did_you_mean(wanted, sets)}"
    )
    raise RulesError(problem, paths=[where], fix=f"pass set= with one of: {', '.join(map(str, sets))}.")


_RULES_FORM = 'write rules = [["embed", "fsdp"]], and for several sets a table [name] above each.'


def kept_beside(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file holds, to be kept when a set of rules is added.

    Raises:
        RulesError: It is no table, so that a set has no place in it.
    """
    if not os.path.exists(path):
        return {}
    data = read(path, RulesError)
    if not isinstance(data, dict):
        raise RulesError(
            f"{os.fspath(path)} holds no table that a named set could be added to",
            paths=[os.fspath(path)],
            fix="write to another file, or leave out set= to replace this one.",
        )
    return data


def rule_sets(data: Any) -> dict[str, Any]:
    """The named sets of rules in the content of a file."""
    items = data.items() if isinstance(data, dict) else ()
    return {key: value for key, value in items if isinstance(value, dict) and "rules" in value}
