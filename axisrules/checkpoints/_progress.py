"""The bar that long loads show."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import jax

from axisrules._extras import extra_module

Progress: TypeAlias = "bool | Callable[[int, int], object] | None"

_LONG = 2**30  # bytes


@contextmanager
def advancing(total: int, wanted: Progress) -> Iterator[Callable[[int], None]]:
    """What is told of every array how many bytes it has.

    Args:
        total: Bytes of all arrays.
        wanted: Whether to show a bar; a function gets the bytes so far and all bytes instead.
            ``None`` shows one for a gibibyte and more, on a terminal, where rich is installed.
    """
    done = 0
    if callable(wanted):

        def tell(size: int) -> None:
            nonlocal done
            done += size
            wanted(done, total)

        yield tell
    elif wanted or (wanted is None and _fits(total)):
        rich = extra_module("rich.progress", package="rich", extra="report", purpose="progress bars")
        columns = (rich.BarColumn(), rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn())
        console = rich.Console(stderr=True)
        with rich.Progress(*columns, rich.TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("loading", total=total)
            yield lambda size: bar.advance(task, size)
    else:
        yield lambda size: None


def _fits(total: int) -> bool:
    shown = total >= _LONG and sys.stderr.isatty() and jax.process_index() == 0
    return shown and importlib.util.find_spec("rich") is not None
