"""Files that are read, and what tells that one was changed.

Owns every byte that is read of an array. Bytes are read with ``pread``, not through a memory map: the
two cost the same, and a file that shrinks or a disk that fails ends a process that maps it with
SIGBUS, where a read gives an error.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from axisrules._errors import CheckpointError

Host: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_OPEN_FILES = 32


class Version(NamedTuple):
    """What tells that a file was changed."""

    inode: int
    size: int
    modified: int  # nanoseconds


def version_of(descriptor: int) -> Version:
    """The version of an open file."""
    found = os.fstat(descriptor)
    return Version(found.st_ino, found.st_size, found.st_mtime_ns)


_SAMPLES = 8  # places of a file at which it is compared, and bytes at each
_SAMPLE = 512


def sample(path: str, size: int) -> str:
    """What tells a file from another one with the same header, by a few of its bytes.

    Raises:
        CheckpointError: The file cannot be read.
    """
    found = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb", buffering=0) as file:
            for place in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE) * place // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE))
    except OSError as cause:
        raise unreadable(path, cause) from cause
    return found.hexdigest()


class Files:
    """The open files of one load; holds few at a time, and closes them all at the end."""

    def __init__(self, versions: dict[str, Version]) -> None:
        self._versions = versions
        self._lock = threading.Lock()  # parts of one shard are read in several threads
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: Counter[str] = Counter()

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left, self._open = dict(self._open), OrderedDict()
        changed = [path for path, descriptor in left.items() if self._close(path, descriptor)]
        if changed and error is None:
            raise _changed(changed[0])

    def _close(self, path: str, descriptor: int) -> bool:
        """Whether the file has changed since its header was read."""
        try:
            return version_of(descriptor) != self._versions[path]
        finally:
            os.close(descriptor)

    @contextmanager
    def _descriptor(self, path: str) -> Iterator[int]:
        """An open file, which stays open while it is in use."""
        with self._lock:
            found = self._open.pop(path, None)
            self._open[path] = found = self._opened(path) if found is None else found
            self._users[path] += 1
        try:
            yield found
        finally:
            with self._lock:
                self._users[path] -= 1

    def _opened(self, path: str) -> int:
        idle = [other for other in self._open if not self._users[other]]
        for oldest in idle[: max(0, len(self._open) + 1 - _OPEN_FILES)]:
            if self._close(oldest, self._open.pop(oldest)):
                raise _changed(oldest)
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._open[path] = opened
        if version_of(opened) != self._versions[path]:
            raise _changed(path)
        return opened

    def read(self, path: str, buffer: Host, offset: int) -> None:
        """Fills a buffer of bytes from a file, from an offset on.

        Raises:
            CheckpointError: The file cannot be read, has become shorter, or was changed.
        """
        try:
            with self._descriptor(path) as descriptor:
                raw: Any = buffer  # the stubs of Python 3.11 know no buffers
                rest = memoryview(raw)
                while rest:
                    count = os.preadv(descriptor, [rest], offset)
                    if not count:
                        raise _changed(path)
                    rest, offset = rest[count:], offset + count
        except OSError as cause:
            raise unreadable(path, cause) from cause

    def scatter(self, path: str, buffers: Sequence[Host], offset: int) -> None:
        """Fills buffers one after another with the bytes of a file from an offset on.

        Raises:
            CheckpointError: As ``read``.
        """
        size = sum([buffer.nbytes for buffer in buffers])
        try:
            with self._descriptor(path) as descriptor:
                if os.preadv(descriptor, buffers, offset) == size:  # type: ignore[arg-type]
                    return
        except OSError as cause:
            raise unreadable(path, cause) from cause
        for buffer in buffers:  # the system gave less than was asked for
            self.read(path, buffer, offset)
            offset += buffer.nbytes


def unreadable(path: str, cause: OSError) -> CheckpointError:
    """The error of a file that the system does not let us read."""
    return CheckpointError(
        f"cannot read {path}: {cause.strerror or cause}",
        paths=[path],
        fix="pass the path of a file that can be read.",
    )


def _changed(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} was changed while it was read", paths=[path], fix="load it again when it is whole."
    )
