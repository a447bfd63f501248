"""What the processes of one program tell each other about a batch before it is placed.

Owns the exchange: one small text per process and batch, through the key-value store that
``jax.distributed.initialize`` starts. It runs nothing on a device, so it may run in any thread.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from axisrules import _compat
from axisrules._errors import ProcessError

PATIENCE = 300.0  # seconds to wait for another process
_SLICE = 0.5  # seconds between looks at whether the wait is still wanted

Word = dict[str, Any]  # what a process says; plain data


class Agreement:
    """The exchanges of one stream of batches, which has to be the same stream on every process.

    Args:
        stream: Its name, the same on every process.
        wanted: Whether to go on waiting for other processes.
    """

    def __init__(self, stream: str, wanted: Callable[[], bool] = lambda: True) -> None:
        self._stream, self._wanted = stream, wanted
        self._numbers: dict[tuple[int, ...], itertools.count[int]] = {}

    def exchange(self, word: Word, processes: Sequence[int]) -> dict[int, Word]:
        """Tells the other processes a word, and waits for theirs.

        Args:
            word: What this process says.
            processes: Who takes part, this process included, in order.

        Returns:
            Every process's word.

        Raises:
            ProcessError: A process stayed silent.
        """
        me, client = jax.process_index(), _compat.coordination_client()
        if client is None or len(processes) < 2:
            return {me: word}
        group, number = self._next(processes)
        place, leader = f"{group}/{number}", processes[0]
        if me != leader:
            client.key_value_set(f"{place}/{me}", json.dumps(word))
            found = json.loads(self._wait(client, f"{place}/all", leader, number))
            return {int(one): said for one, said in found.items()}
        words = {me: word}
        for other in processes[1:]:
            words[other] = json.loads(self._wait(client, f"{place}/{other}", other, number))
        client.key_value_set(f"{place}/all", json.dumps(words))
        if number:  # whoever speaks now has read what was said before
            client.key_value_delete(f"{group}/{number - 1}")
        return words

    def fail(self, reason: str, processes: Sequence[int]) -> None:
        """Tells the other processes that this one has no batch to bring, and waits for nobody."""
        me, client = jax.process_index(), _compat.coordination_client()
        if client is None or len(processes) < 2:
            return
        group, number = self._next(processes)
        word: Word = {"failed": reason}
        leads = me == processes[0]
        said = json.dumps({me: word} if leads else word)
        client.key_value_set(f"{group}/{number}/{'all' if leads else me}", said)

    def _next(self, processes: Sequence[int]) -> tuple[str, int]:
        """Where the processes meet next."""
        number = next(self._numbers.setdefault(tuple(processes), itertools.count()))
        return f"axisrules/{self._stream}/{processes[0]}-{processes[-1]}-{len(processes)}", number

    def _wait(self, client: Any, key: str, other: int, number: int) -> str:
        deadline = time.monotonic() + PATIENCE
        while self._wanted():
            try:
                said: str = client.blocking_key_value_get(key, int(_SLICE * 1000))
            except jax.errors.JaxRuntimeError as cause:
                if "DEADLINE_EXCEEDED" not in str(cause):
                    raise
                if time.monotonic() < deadline:
                    continue
                raise ProcessError(
                    f"process {other} did not bring batch {number} of {self._stream} within {PATIENCE:.0f} s",
                    fix="call shard_batch, or run through prefetch, equally often on every process.",
                ) from cause
            return said
        raise ProcessError(f"{self._stream} was closed while it waited for process {other}")
