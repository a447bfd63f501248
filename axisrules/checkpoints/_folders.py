"""Checkpoints of one file, of a folder of files, or of files that an index lists.

Owns which file holds which array. What stands in a file is for the readers of headers to say.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from axisrules._errors import AxisRulesError, CheckpointError, raise_all
from axisrules._text import did_you_mean
from axisrules.checkpoints._handles import Version, unreadable
from axisrules.checkpoints._header import Header, Unheld, parse_json, problem, read_header
from axisrules.checkpoints._sources import Source

PathLike: TypeAlias = "str | os.PathLike[str]"

_INDEX = ".index.json"


class Checkpoint(NamedTuple):
    """The arrays of a checkpoint, by the names that it has for them.

    Attributes:
        where: What was opened.
        arrays: The arrays, in the order of the files.
        versions: The files, with what tells that one was changed.
        digests: Of every file, what tells its header from another one.
    """

    where: str
    arrays: Mapping[str, Source | Unheld]
    versions: dict[str, Version]
    digests: dict[str, str]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Headers make a million small objects that all stay: looking for garbage takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def open_safetensors(path: PathLike) -> Checkpoint:
    """The headers of a safetensors checkpoint.

    Raises:
        CheckpointError: A file is missing or malformed, or the index does not fit the files; all
            failures are in the one error.
    """
    found = Path(path)
    if found.is_dir():
        return _open_folder(found)
    if found.name.endswith(".json"):
        return _open_index(found)
    return _merge(found, {found: None})


def _open_folder(folder: Path) -> Checkpoint:
    indices = sorted(folder.glob(f"*.safetensors{_INDEX}"))
    if len(indices) == 1:
        return _open_index(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if folder / "model.safetensors" in files:
        files = [folder / "model.safetensors"]
    elif indices:
        raise CheckpointError(
            f"{folder} holds {len(indices)} indices",
            paths=[str(index) for index in indices],
            listing=[index.name for index in indices],
            fix=f"pass the path of one, such as {str(indices[0])!r}.",
        )
    if not files:
        raise CheckpointError(
            f"{folder} holds no safetensors file", paths=[str(folder)], fix="pass the folder that has them."
        )
    return _merge(folder, dict.fromkeys(files))


def _open_index(index: Path) -> Checkpoint:
    by_file: dict[Path, list[str]] = {}
    outside: list[str] = []
    for name, file in _weight_map(index).items():
        if file in ("", ".", "..") or Path(file).name != file:
            outside.append(f"{name}  {file!r}")
        by_file.setdefault(index.parent / file, []).append(name)
    if outside:
        raise CheckpointError(
            f"{index} names files outside of its folder",
            paths=[str(index)],
            listing=outside,
            fix="put the files beside the index.",
        )
    return _merge(index, by_file)


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = parse_json(index.read_bytes())
    except OSError as cause:
        raise unreadable(str(index), cause) from cause
    except ValueError as cause:
        raise CheckpointError(f"{index} is no index: {cause}", paths=[str(index)]) from cause
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(
            f"{index} has no 'weight_map' that says which file holds which array",
            paths=[str(index)],
            fix="pass a .safetensors file, or the index of several.",
        )
    return names


def _merge(where: Path, files: Mapping[Path, list[str] | None]) -> Checkpoint:
    """The arrays of all files, of which an index may say what each holds."""
    headers, failures = _read_all(files)
    arrays: dict[str, Any] = {}
    for file, header in headers.items():
        expected = files[file]
        for name, array in header.arrays.items():
            if name not in arrays or name in (expected or ()):
                if name in arrays and expected is None:
                    failures.append(_twice(name, arrays[name].file, str(file)))
                arrays[name] = array
            elif expected is None:
                failures.append(_twice(name, arrays[name].file, str(file)))
    failures += _absent(headers, files)
    raise_all(failures)
    return Checkpoint(
        str(where),
        arrays,
        {str(file): header.version for file, header in headers.items()},
        {str(file): header.digest for file, header in headers.items()},
    )


def _read_all(files: Iterable[Path]) -> tuple[dict[Path, Header], list[AxisRulesError]]:
    headers: dict[Path, Header] = {}
    failures: list[AxisRulesError] = []
    for file in files:
        try:
            headers[file] = read_header(str(file))
        except CheckpointError as error:
            failures += error.failures or [error]
    return headers, failures


def _twice(name: str, first: str, second: str) -> CheckpointError:
    return CheckpointError(
        f"two files hold {name!r}: {first} and {second}",
        paths=[name],
        fix="pass the path of one file, or of an index.",
    )


def _absent(
    headers: Mapping[Path, Header], files: Mapping[Path, list[str] | None]
) -> Iterable[CheckpointError]:
    """What an index names and its file does not hold."""
    for file, header in headers.items():
        missing = [name for name in files[file] or () if name not in header.arrays]
        if missing:
            hint = did_you_mean(missing[0], header.arrays) if len(missing) == 1 else ""
            yield problem(
                str(file), f"lacks arrays that the index says it holds{hint}", [(n, "") for n in missing]
            )
