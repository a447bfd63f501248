"""``prefetch``: batches are loaded and placed by a second thread while the first one computes.

Owns that thread and its ends: exhaustion, errors, closing, garbage collection, interpreter exit.
Places nothing itself.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np

from axisrules import _compat
from axisrules._agreement import Agreement
from axisrules._batches import Placed, place_batch, warn_of_names
from axisrules._errors import PolicyError, raise_all
from axisrules._meshes import MeshLike
from axisrules._options import make_options
from axisrules._records import Job, disagreements, make_job
from axisrules._rules import RulesLike
from axisrules._scope import get_logical_axis_rules, set_logical_axis_rules

_STREAMS = count()  # the same on every process of a program
_PATIENCE = 5.0  # seconds that closing waits for a loader that is at work


def prefetch(
    batches: Iterable[Any],
    names: Any,
    size: int = 2,
    *,
    mesh: MeshLike | None = None,
    rules: RulesLike | None = None,
    remainder: str = "error",
    taken: str = "next",
    indivisible: str = "error",
    absent: str = "error",
    unmapped: str = "warn",
) -> Prefetch:
    """Batches as ``shard_batch`` places them, loaded and placed ahead by a thread.

    While a step computes, the thread takes the next batches from the loader and copies them to the
    devices, so that they lie there when the step is done. Order is kept. An error of the loader, or of
    placing, is raised where its batch would have come, and ends the iteration. The mesh, the rules and
    x64 are those that are active where ``prefetch`` is called, for the loader too.

    Args:
        batches: Any iterable of batches, infinite ones included. No other thread may use it meanwhile.
        names: As in ``shard_batch``.
        size: How many batches are taken ahead, at least 1; each needs memory on the devices.
        mesh: As in ``shard_batch``.
        rules: As in ``shard_batch``.
        remainder: As in ``shard_batch``. With ``"drop"`` a batch of which nothing is left is left out,
            and on several processes the iteration ends where that of the first one does.
        taken: As in ``resolve``.
        indivisible: As in ``resolve``.
        absent: As in ``resolve``.
        unmapped: As in ``resolve``; a warning comes once per name.

    Returns:
        An iterator of batches, of ``(batch, mask)`` with ``remainder="pad"``. It is closed by
        ``close()``, by leaving a ``with`` block, and when nothing refers to it any more; so is
        ``batches``, if it is a generator.

    Raises:
        AxisRulesError: An option cannot have its value, or there is no mesh or no rules.
        TypeError: ``batches`` cannot be iterated over.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> loader = ({"x": np.full((8, 2), step, np.float32)} for step in range(3))
        >>> with ar.prefetch(loader, "batch _", mesh=ar.make_mesh("data=4,model=2"),
        ...                  rules={"batch": "data"}) as batches:
        ...     [float(batch["x"].sum()) for batch in batches]
        [0.0, 16.0, 32.0]
    """
    if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
        raise PolicyError(
            f"size={size!r} is no number of batches", fix="pass size=2, or any other from 1 on."
        )
    options = make_options(
        mesh=mesh, rules=rules, taken=taken, indivisible=indivisible, absent=absent, unmapped=unmapped
    )
    job = make_job(names, options, remainder)
    return Prefetch(iter(batches), job, int(size))


class Prefetch(Iterator[Any]):
    """An iterator of placed batches with a thread behind it; made by ``prefetch``."""

    def __init__(self, batches: Iterator[Any], job: Job, size: int) -> None:
        self._options, self._warned = job.options, set[str]()
        self._channel = _Channel(size)
        channel = self._channel
        agreement = Agreement(f"prefetch/{next(_STREAMS)}", wanted=lambda: not channel.stopped)
        work = partial(_run, channel, batches, job, agreement, _setting())
        # The thread knows the channel alone, so that a forgotten iterator can be collected.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name="axisrules.prefetch", daemon=True
        )
        weakref.finalize(self, channel.forget)
        _stop_at_exit()
        _RUNNING[self._thread] = channel
        self._thread.start()

    def __next__(self) -> Any:
        item = self._channel.take()
        if item.error is not None:
            raise item.error
        if item.placed is None:
            raise StopIteration
        self._warn(item.placed)
        return item.placed.result

    def _warn(self, placed: Placed) -> None:
        new = {name: paths for name, paths in placed.unknown_names.items() if name not in self._warned}
        self._warned.update(new)
        warn_of_names(placed._replace(unknown_names=new), self._options)

    def close(self) -> None:
        """Ends the thread, drops what it has placed, and closes the loader if it is a generator.

        Waits some seconds for a loader that is at work; one that takes longer ends by itself.

        Raises:
            BaseException: What the loader raises when it is closed.
        """
        self._channel.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)
        error, self._channel.closing_error = self._channel.closing_error, None
        if error is not None:
            raise error

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Item(NamedTuple):
    """What the thread hands over: a batch, an error, or neither at the end."""

    placed: Placed | None = None
    error: BaseException | None = None


_END = _Item()


class _Channel:
    """A bounded line of items from the thread to the iterator."""

    def __init__(self, size: int) -> None:
        self._size, self._items = size, deque[_Item]()
        self._changed = threading.Condition()  # re-entrant: `stop` may run in a collection of garbage
        self.stopped = self.forgotten = False
        self.closing_error: BaseException | None = None

    def wait_for_room(self) -> bool:
        """Waits until a batch may be taken from the loader; ``False`` where none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or len(self._items) < self._size)
            return not self.stopped

    def put(self, item: _Item) -> None:
        with self._changed:
            if not self.stopped:
                self._items.append(item)
                self._changed.notify_all()

    def take(self) -> _Item:
        """The next item, once there is one; after an end or an error there is only the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self._items)
            if self.stopped or not self._items:
                return _END
            item = self._items.popleft()
            self.stopped = item.placed is None
            self._changed.notify_all()
            return item

    def forget(self) -> None:
        """Stops for an iterator that nobody can ask any more."""
        self.forgotten = True
        self.stop()

    def stop(self) -> None:
        """Drops the items, and wakes who waits."""
        with self._changed:
            self.stopped = True
            self._items.clear()
            self._changed.notify_all()


def _run(
    channel: _Channel,
    batches: Iterator[Any],
    job: Job,
    agreement: Agreement,
    setting: Callable[[], contextlib.ExitStack],
) -> None:
    """The thread: takes batches and places them until there are no more, or none are wanted."""
    last = _END
    try:
        with setting():
            _feed(channel, batches, job, agreement)
    except BaseException as error:  # handed to the thread that asked, which raises it
        last = _Item(error=error)
    try:
        _close(batches)
    except BaseException as error:
        if channel.forgotten:
            raise  # for threading.excepthook to show
        if channel.stopped:
            channel.closing_error = error  # raised by `close`
        elif last.error is None:
            last = _Item(error=error)
        else:
            last.error.add_note(f"closing the loader failed as well: {error!r}")
    channel.put(last)


def _feed(channel: _Channel, batches: Iterator[Any], job: Job, agreement: Agreement) -> None:
    while channel.wait_for_room():
        try:
            batch = next(batches)
        except StopIteration:
            return _end(job, agreement)
        except BaseException:
            agreement.fail("its loader raised an error", job.processes)
            raise
        placed = place_batch(batch, job, agreement)
        if placed is None:
            return None
        if placed.left != 0 or job.remainder != "drop":
            channel.put(_Item(placed._replace(result=_keep_host_arrays(placed.result))))
        del batch, placed  # the thread holds no batch while it waits
    return None


def _end(job: Job, agreement: Agreement) -> None:
    words = agreement.exchange({"end": True}, job.processes)
    if job.remainder != "drop":
        raise_all(disagreements(words))


def _keep_host_arrays(result: Any) -> Any:
    """Copies what stayed on the host, whose memory the loader may use again."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, result)


def _close(batches: Iterator[Any]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()


def _setting() -> Callable[[], contextlib.ExitStack]:
    """What is active in this thread, to be entered in another one."""
    rules, mesh, x64 = get_logical_axis_rules(), _compat.concrete_mesh(), jax.config.read("jax_enable_x64")

    def enter() -> contextlib.ExitStack:
        with contextlib.ExitStack() as stack:
            set_logical_axis_rules(rules)
            if mesh is not None:
                stack.enter_context(jax.set_mesh(mesh))
            if x64 != jax.config.read("jax_enable_x64"):
                stack.enter_context(_compat.enable_x64(x64))
            return stack.pop_all()

    return enter


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, _Channel] = weakref.WeakKeyDictionary()


@cache
def _stop_at_exit() -> None:
    # Registered late, so that it runs before JAX takes its backends down under the thread.
    atexit.register(_stop_all)


def _stop_all() -> None:
    running = list(_RUNNING.items())
    for _, channel in running:
        channel.stop()
    for thread, _ in running:
        thread.join(1.5)
