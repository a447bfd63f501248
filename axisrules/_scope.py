"""The active rules of a thread: set, read, and entered for a while.

Owns the one piece of ambient state that axisrules has. It lives in a JAX user context, so its
value is part of jit's cache key: a function traced under other rules is traced again. JAX keeps
that context per thread, not per asyncio task; see ``map_logical_axis_names``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator
from dis import opmap
from typing import Any, TypeVar

import jax

from axisrules import _compat
from axisrules._errors import NoRulesError, ScopeError
from axisrules._rules import Rules, RulesLike, as_rules

ACTIVE = jax.make_user_context(default_value=Rules())

F = TypeVar("F", bound=Callable[..., Any])


def _activate(rules: Rules) -> None:
    """Makes the rules the active ones of this thread until the next call."""
    ACTIVE(rules).__enter__()


def get_logical_axis_rules() -> Rules:
    """The active rules of this thread; empty where none are.

    Example:
        >>> import axisrules as ar
        >>> with ar.map_logical_axis_names({"embed": "fsdp"}):
        ...     ar.get_logical_axis_rules()
        Rules([('embed', 'fsdp')])
    """
    if THREAD.unentered is not None:
        _check_waiting()
    rules: Rules = ACTIVE.value
    return rules


def _check_waiting() -> None:
    waiting = {key: trace for key, trace in (THREAD.unentered or {}).items() if trace() is not None}
    THREAD.unentered = None
    if waiting and _compat.in_trace():
        raise _bare_call()


def set_logical_axis_rules(rules: RulesLike) -> None:
    """Replaces the active rules of this thread; ``()`` leaves none active.

    Raises:
        RulesError: The rules are malformed.
        ScopeError: JAX is tracing, so the change would outlive the trace.

    Example:
        >>> import axisrules as ar
        >>> ar.set_logical_axis_rules({"embed": "fsdp"})
        >>> len(ar.get_logical_axis_rules())
        1
        >>> ar.set_logical_axis_rules(())
    """
    new = as_rules(rules)
    if _compat.in_trace():
        raise ScopeError(
            "the active rules cannot be replaced inside a trace",
            fix="call it before jit, or use `with axisrules.map_logical_axis_names(...):`.",
        )
    _activate(new)


def need_rules(rules: RulesLike | None) -> Rules:
    """The given rules, else the active ones.

    Raises:
        NoRulesError: There are neither.
    """
    if rules is not None:
        return as_rules(rules)
    active = get_logical_axis_rules()
    if not active:
        raise NoRulesError(
            "no rules were given, and none are active",
            fix='pass rules={"embed": "fsdp"}, or enter `with axisrules.map_logical_axis_names(...):`.',
        )
    return active


class _Thread(threading.local):
    """Of one thread: the entered scopes, innermost last, and traced calls that wait for their ``with``."""

    def __init__(self) -> None:
        self.token = object()  # an ident returns when a thread has ended
        self.frames: list[_Frame] = []
        # Calls inside a trace that wait for their `with`, and in which trace each was made.
        self.unentered: dict[map_logical_axis_names, weakref.ref[Any]] | None = None


THREAD = _Thread()


class _Frame:
    """One entered scope: what to restore, and whether it was left out of order."""

    __slots__ = ("before", "left", "owner")

    def __init__(self, owner: map_logical_axis_names, before: Rules) -> None:
        self.owner, self.before, self.left = owner, before, False


class map_logical_axis_names:  # noqa: N801  reads as a function, and is used as one
    """Prepends rules to the active ones: at once, for a ``with`` block, or for a function.

    Calling it prepends immediately. In ``with``, the exit restores what was active before the
    call. As a decorator, the effect of the call is taken back, and every call of the function
    enters and leaves; of a generator or coroutine function, the rules are active while its own
    code runs and not while it is suspended. Entering the same object again prepends again.

    The active rules belong to a thread, as JAX's own contexts do. Tasks of asyncio share their
    thread: a ``with`` block that awaits is seen by other tasks, and blocks of two tasks that
    overlap without nesting are left out of order, which is an error. Decorate the coroutine
    function instead, or pass ``rules=``.

    Args:
        rules: Rules, a mapping, or pairs.

    Raises:
        RulesError: The rules are malformed.
        ScopeError: A ``with`` block is left that is not the innermost, or a call inside a trace
            has no ``with``.

    Example:
        >>> import axisrules as ar
        >>> with ar.map_logical_axis_names({"output": "model"}):
        ...     tuple(ar.logical_to_mesh_axes("input output"))
        (None, 'model')
    """

    def __init__(self, rules: RulesLike) -> None:
        self._rules, self._token = as_rules(rules), THREAD.token
        self._before: Rules | None = None  # what the call found, until it is entered
        if _compat.in_trace():
            if _result_is_dropped(sys._getframe(1)):
                raise _bare_call()
            THREAD.unentered = {**(THREAD.unentered or {}), self: weakref.ref(_compat.current_trace())}
            return  # takes effect when entered
        self._before = get_logical_axis_rules()
        self._mine = self._before.prepend(self._rules)
        _activate(self._mine)

    def _take_call(self) -> Rules | None:
        """What the call found active, if its effect still waits for a ``with`` in this thread."""
        if THREAD.unentered is not None:
            THREAD.unentered.pop(self, None)
            THREAD.unentered = THREAD.unentered or None
        if self._before is None or self._token is not THREAD.token:
            return None
        before, self._before = self._before, None
        return before

    def __enter__(self) -> Rules:
        before = self._take_call()
        if before is None:
            before = ACTIVE.value
            _activate(before.prepend(self._rules))
        THREAD.frames.append(_Frame(self, before))
        rules: Rules = ACTIVE.value
        return rules

    def __exit__(self, *exception: object) -> None:
        frames = THREAD.frames
        mine = [frame for frame in frames if frame.owner is self and not frame.left]
        if not mine:
            raise ScopeError(
                "these rules are left in a thread that has not entered them",
                fix="enter and leave a `with` block in one thread.",
            )
        mine[-1].left = True
        if frames[-1] is not mine[-1]:
            raise ScopeError(
                "these rules are left while others, entered later, are still active",
                fix="leave the inner `with` first; of overlapping generators or asyncio tasks, decorate "
                "the function with map_logical_axis_names, or pass rules=.",
            )
        while frames and frames[-1].left:
            _activate(frames.pop().before)

    def __call__(self, function: F) -> F:
        """Decorates a function: its calls run under the rules."""
        before = self._take_call()
        if before is not None and ACTIVE.value is self._mine:
            _activate(before)
        decorated: F = _under(self, function)
        return decorated


def _under(rules: map_logical_axis_names, function: Any) -> Any:
    if inspect.isasyncgenfunction(function):
        raise ScopeError(
            f"{function.__qualname__} is an asynchronous generator, which cannot be decorated",
            fix="pass rules= where they are needed.",
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with rules:
            return function(*args, **kwargs)

    @functools.wraps(function)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return (yield from _step_by_step(rules, function(*args, **kwargs)))

    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await _awaitable(rules, function(*args, **kwargs))

    if inspect.iscoroutinefunction(function):
        return coroutine
    return generator if inspect.isgeneratorfunction(function) else call


def _step_by_step(rules: map_logical_axis_names, steps: Any) -> Generator[Any, Any, Any]:
    """Runs a generator or coroutine so that the rules are active only while its code runs."""
    step, value = steps.send, None
    held: list[map_logical_axis_names] = []  # the blocks that its own code is in
    try:
        while True:
            try:
                out = _step(rules, held, step, value)
            except StopIteration as stop:
                return stop.value
            try:
                step, value = steps.send, (yield out)
            except GeneratorExit:
                raise
            except BaseException as error:
                step, value = steps.throw, error
    finally:
        _step(rules, held, lambda _: steps.close(), None)


def _step(rules: map_logical_axis_names, held: list[map_logical_axis_names], step: Any, value: Any) -> Any:
    """One step: its own blocks are entered again before it and left after it."""
    with rules:
        depth = len(THREAD.frames)
        for owner in held:
            owner.__enter__()
        try:
            return step(value)
        finally:
            held[:] = [frame.owner for frame in THREAD.frames[depth:]]
            del THREAD.frames[depth:]


_awaitable = types.coroutine(_step_by_step)


def _bare_call() -> ScopeError:
    return ScopeError(
        "map_logical_axis_names was called inside a trace without `with`",
        fix="write `with axisrules.map_logical_axis_names(...):`, or call it before jit.",
    )


def _result_is_dropped(frame: types.FrameType) -> bool:
    """Whether the caller's next instruction discards the result of the call that runs now."""
    code = frame.f_code.co_code
    at = frame.f_lasti + 2
    while at < len(code) and code[at] == 0:  # inline cache entries of the call
        at += 2
    return at < len(code) and code[at] == opmap["POP_TOP"]
