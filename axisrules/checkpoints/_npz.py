"""Arrays in ``.npz`` files.

Owns where in the file each array lies. Arrays that are stored as they are can be read in slices; one
that is compressed is taken out whole, one at a time. Loads no pickles.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import zipfile
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from axisrules._errors import CheckpointError, raise_all
from axisrules.checkpoints._folders import Checkpoint, PathLike
from axisrules.checkpoints._handles import Files, Host, version_of
from axisrules.checkpoints._header import problem
from axisrules.checkpoints._sources import FlatArray, Permuted, Source, Span, put

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then the lengths of the name and of the extra field
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(slots=True)
class _Kept:
    """The one array that was taken out last, for all threads that read a part of it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    name: str = ""
    array: Any = None


class Compressed(NamedTuple):
    """An array that has to be taken out of the file whole; kept until another one is asked for."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kept: _Kept

    def fill(self, files: Files, span: Span, place: Host) -> None:
        """Reads a part into memory of its shape."""
        kept = self.kept
        with kept.lock:
            if kept.array is None or kept.name != self.name:
                kept.array = None  # frees it before the next one is taken out
                files.read(self.file, np.empty(1, np.uint8), 0)  # says whether the file was changed
                kept.name, kept.array = self.name, self._take_out()
            array = kept.array
        put(place, array[tuple(slice(start, stop) for start, stop in span)])

    def _take_out(self) -> Any:
        try:
            with np.load(self.file, allow_pickle=False) as opened:
                return opened[self.name]
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.zlib.error) as cause:  # type: ignore[attr-defined]
            raise problem(self.file, f"an array cannot be taken out: {cause}", [(self.name, "")]) from cause


def open_npz(path: PathLike) -> Checkpoint:
    """The headers of the arrays of an ``.npz`` file.

    Raises:
        CheckpointError: The file is malformed, or holds objects or raw bytes; all failures are in
            the one error.
    """
    file = os.fspath(path)
    arrays: dict[str, Source] = {}
    failures: list[CheckpointError] = []
    kept = _Kept()
    try:
        with open(file, "rb") as raw, zipfile.ZipFile(raw) as archive:
            version = version_of(raw.fileno())
            members = archive.infolist()
            for member in members:
                try:
                    array = _array(file, raw, archive, member, kept)
                except CheckpointError as error:
                    failures.append(error)
                    continue
                if array.name in arrays:
                    failures.append(
                        problem(file, "the file holds two arrays of one name", [(array.name, "")])
                    )
                arrays[array.name] = array
    except (OSError, zipfile.BadZipFile, NotImplementedError) as cause:
        raise CheckpointError(
            f"cannot read {file} as an .npz file: {cause}", paths=[file], fix="pass a file of np.savez."
        ) from cause
    raise_all(failures)
    sums = repr([(member.filename, member.CRC, member.file_size) for member in members])
    digest = hashlib.blake2b(sums.encode(), digest_size=16).hexdigest()
    return Checkpoint(file, arrays, {file: version}, {file: digest})


def _array(file: str, raw: Any, archive: zipfile.ZipFile, member: zipfile.ZipInfo, kept: _Kept) -> Source:
    name = member.filename.removesuffix(".npy")
    if member.flag_bits & 1:
        raise problem(file, "arrays are encrypted", [(name, "")])
    try:
        with archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            shape, fortran, dtype = _READERS[version](stream)
            start = stream.tell()
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, RuntimeError, zipfile.zlib.error) as cause:  # type: ignore[attr-defined]
        raise problem(file, "members are no arrays", [(name, str(cause))]) from cause
    _check(file, name, shape, dtype, member.file_size - start)
    if member.compress_type != zipfile.ZIP_STORED:
        return Compressed(file, name, shape, dtype, kept)
    offset = _data_offset(file, name, raw, member) + start
    if not fortran:
        return FlatArray(file, name, shape, dtype, offset)
    flat = FlatArray(file, name, shape[::-1], dtype, offset)
    return Permuted(flat, tuple(reversed(range(len(shape)))))


def _check(file: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> None:
    if dtype.hasobject:
        raise problem(file, "arrays hold Python objects, which are not loaded", [(name, "")])
    if dtype.kind == "V" and dtype.names is None:
        raise problem(
            file,
            "arrays hold raw bytes: numpy does not keep dtypes like bfloat16 in a file",
            [(name, str(dtype))],
            fix="save such arrays in a safetensors file.",
        )
    need = dtype.itemsize * int(np.prod(shape, dtype=object))
    if need != size:
        raise problem(
            file, "arrays have another number of bytes than their shape needs", [(name, f"{size} of {need}")]
        )


def _data_offset(file: str, name: str, raw: Any, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin; only the header beside them says so."""
    raw.seek(member.header_offset)
    signature, length, extra = _LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise problem(file, "members lie elsewhere than the file says", [(name, "")])
    offset = member.header_offset + _LOCAL_HEADER.size + int(length) + int(extra)
    if offset + member.file_size > os.fstat(raw.fileno()).st_size:
        raise problem(file, "arrays end after the end of the file; is it truncated?", [(name, "")])
    return offset
