"""The header of one safetensors file.

Owns the format: eight bytes with the length of a JSON header, the header, then the arrays without a
gap. Everything that a header may lie about is checked against the file before it is believed. Reads
no array.

The package ``safetensors`` is not used: through numpy it gives no slices of bfloat16 and none of the
8-bit floats, which many checkpoints consist of, and it stops at the first failure.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from axisrules._errors import CheckpointError, raise_all
from axisrules._text import did_you_mean
from axisrules.checkpoints._handles import Version, unreadable, version_of
from axisrules.checkpoints._sources import FlatArray

LONGEST_HEADER = 100_000_000  # bytes; the limit of the reference implementation
_NAMES = {
    "BOOL": "bool_", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn",
}  # fmt: skip
# By the word of the format: the dtype, if JAX has one, and the bits of an element in the file.
_HELD = {word: np.dtype(getattr(jax.numpy, name)) for word, name in _NAMES.items()}
DTYPES: dict[str, tuple[np.dtype[Any] | None, int]] = {
    **{word: (dtype, dtype.itemsize * 8) for word, dtype in _HELD.items()},
    "F4": (_HELD["F4"], 4),
    "F6_E2M3": (None, 6),
    "F6_E3M2": (None, 6),
}


class Unheld(NamedTuple):
    """An array of a dtype that JAX cannot hold: known, so that it can be skipped."""

    file: str
    name: str
    shape: tuple[int, ...]
    word: str


class Header(NamedTuple):
    """What a file says about itself."""

    arrays: dict[str, FlatArray | Unheld]
    version: Version
    digest: str


class _Tensor(NamedTuple):
    """An entry of a header that has the right form."""

    name: str
    word: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: str) -> Header:
    """The arrays of a safetensors file.

    Raises:
        CheckpointError: The file is not what its header says; all failures are in the one error.
    """
    text, start, version = _read_text(file)
    entries = _parse(file, text)
    entries.pop("__metadata__", None)
    failures: list[CheckpointError] = []
    tensors = _tensors(file, entries, failures)
    failures += _misplaced(file, tensors, version.size - start, complete=not failures)
    raise_all(failures)
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return Header({one.name: _array(file, one, start) for one in tensors}, version, digest)


def _array(file: str, one: _Tensor, start: int) -> FlatArray | Unheld:
    dtype = DTYPES[one.word][0]
    if dtype is None:
        return Unheld(file, one.name, one.shape, one.word)
    return FlatArray(file, one.name, one.shape, dtype, start + one.begin)


def _read_text(file: str) -> tuple[bytes, int, Version]:
    """The header as bytes, where the arrays start, and the version of the file."""
    try:
        with open(file, "rb") as opened:
            version = version_of(opened.fileno())
            prefix = opened.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) == 8 and 2 <= length <= min(version.size - 8, LONGEST_HEADER):
                text = opened.read(length)
                if len(text) == length:
                    return text, 8 + length, version
    except OSError as cause:
        raise unreadable(file, cause) from cause
    if len(prefix) < 8:
        raise _not_safetensors(file, f"it has {version.size} bytes, and the length of a header takes 8")
    if length < 2:
        raise _not_safetensors(file, f"its header would have {length} bytes")
    if length > LONGEST_HEADER:
        raise _not_safetensors(
            file, f"its header would have {length:,} bytes; {LONGEST_HEADER:,} are allowed"
        )
    raise CheckpointError(
        f"{file} is truncated: its header has {length:,} bytes, and the file ends after {version.size - 8:,}",
        paths=[file],
        fix="fetch the file again.",
    )


def _not_safetensors(file: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a safetensors file: {why}", paths=[file], fix="pass a .safetensors file."
    )


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in it")
    return found


class _TwiceError(ValueError):
    """A key stands twice in an object of the header."""


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def parse_json(text: bytes) -> Any:
    """JSON in UTF-8, in which no key stands twice in an object.

    Raises:
        ValueError: It is something else; the message says what, as half a sentence.
    """
    try:
        decoded = text.decode("utf-8")
        found = json.loads(decoded, parse_constant=_no_constant)
        # Every key has a colon. Where there are no more of them than keys, none stands twice; else
        # a string may have one, and the slow way tells.
        if isinstance(found, dict) and text.count(b":") == _keys(found):
            return found
        return json.loads(decoded, object_pairs_hook=_no_twins)
    except _TwiceError:
        raise
    except UnicodeDecodeError as cause:
        raise ValueError(f"it is not UTF-8 at byte {cause.start}") from cause
    except (ValueError, RecursionError) as cause:
        raise ValueError(f"it is not JSON ({cause})") from cause


def _keys(found: dict[str, Any]) -> int:
    """The keys of a dict and of the dicts in it."""
    return len(found) + sum([len(one) for one in found.values() if isinstance(one, dict)])


def _parse(file: str, text: bytes) -> dict[str, Any]:
    try:
        entries = parse_json(text)
    except ValueError as cause:
        raise _not_safetensors(file, f"{cause} in its header") from cause
    metadata = entries.get("__metadata__", {}) if isinstance(entries, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _not_safetensors(file, "its header is no table of arrays")
    return entries  # type: ignore[no-any-return]


def _tensors(file: str, entries: Mapping[str, Any], failures: list[CheckpointError]) -> list[_Tensor]:
    """The entries of the right form; notes the failures of the others."""
    found: list[_Tensor] = []
    malformed: list[tuple[str, str]] = []
    words: dict[str, list[str]] = {}
    for name, entry in entries.items():
        tensor = _tensor(name, entry)
        if isinstance(tensor, str):
            malformed.append((name, tensor))
        elif tensor.word not in DTYPES:
            words.setdefault(tensor.word, []).append(name)
        else:
            found.append(tensor)
    if malformed:
        failures.append(problem(file, "entries of the header are malformed", malformed))
    for word, names in words.items():
        hint = did_you_mean(word, DTYPES)
        failures.append(problem(file, f"the dtype {word!r} does not exist{hint}", [(n, "") for n in names]))
    return found


_NUMBERS = {int}


def _tensor(name: str, entry: Any) -> _Tensor | str:
    """The entry of one array, or what is wrong with it."""
    if not name.isascii() and any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        return "its name is no text"
    if type(entry) is not dict:
        return "it is no table"
    word, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(word) is not str:
        return f"its dtype is {_short(word)}"
    if type(offsets) is not list or len(offsets) != 2 or not _are_sizes(offsets):
        return f"its data_offsets are {_short(offsets)}"
    if type(shape) is not list or (shape and not _are_sizes(shape)):
        return f"its shape is {_short(shape)}"
    return _Tensor(name, word, tuple(shape), *offsets)


def _are_sizes(values: list[Any]) -> bool:
    return set(map(type, values)) == _NUMBERS and min(values) >= 0


def _short(value: Any) -> str:
    """A value of the header as text of a bearable length."""
    if value is None:
        return "missing"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "huge"
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):
        return "no such thing"
    return text if len(text) <= 40 else f"{text[:40]}..."


def _misplaced(file: str, tensors: list[_Tensor], size: int, *, complete: bool) -> Iterator[CheckpointError]:
    """Everything that does not fit: byte counts, ends, and, of a complete list, overlaps and holes."""
    wrong = [(one.name, why) for one in tensors if (why := _wrong_count(one))]
    if wrong:
        yield problem(file, "arrays have another number of bytes than their shape and dtype need", wrong)
    late = [(one.name, f"ends at byte {one.end:,} of {size:,}") for one in tensors if one.end > size]
    if late:
        yield problem(file, "arrays end after the end of the file; is it truncated?", late)
    if wrong or late:  # neighbours do not fit either then
        return
    rows = _gaps(tensors, size) if complete else []
    if rows:
        yield problem(file, "arrays do not lie one after another", rows)


def _gaps(tensors: list[_Tensor], size: int) -> list[tuple[str, str]]:
    """Where an array does not begin where the one before it ends."""
    rows, end, before = [], 0, "the header"
    for one in sorted(tensors, key=attrgetter("begin", "end")):
        if one.begin != end:
            what = "overlaps" if one.begin < end else "does not follow on"
            rows.append(
                (one.name, f"begins at byte {one.begin:,}: {what} {shown(before)}, which ends at {end:,}")
            )
        end, before = one.end, one.name
    if end != size:
        rows.append((before, f"ends at byte {end:,}, and the file has {size:,} bytes of arrays"))
    return rows


def _wrong_count(one: _Tensor) -> str:
    need = math.prod(one.shape) * DTYPES[one.word][1]
    if (one.end - one.begin) * 8 == need:
        return ""
    return (
        f"{one.word} {_short(list(one.shape))} needs {need / 8:,g} bytes; {one.begin} to {one.end} are given"
    )


def shown(name: str) -> str:
    """The name of an array on one line."""
    return name if name.isprintable() else ascii(name)


def problem(file: str, headline: str, rows: list[tuple[str, str]], fix: str = "") -> CheckpointError:
    """One failure of a file that concerns some of its arrays."""
    return CheckpointError(
        f"{file}: {headline}",
        paths=[f"{file}: {shown(name)}" for name, _ in rows],
        listing=[f"{shown(name)}  {detail}".rstrip() for name, detail in rows],
        file=file,
        tensors=tuple(name for name, _ in rows),
        fix=fix,
    )
