"""Compilers in processes of their own.

Owns the order that goes to such a process, its time limit, the cache of its answers, and the one
place where XLA's dump flags stand. Reads no module.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axisrules._errors import HardwareError

Progress = Callable[[str], None]

_PASS = "spmd-partitioning"


def partitioned(order: dict[str, Any], time_limit: float, progress: Progress | None) -> str:
    """The text of a module right after partitioning, by the CPU compiler of jax alone.

    The compiler goes on to produce machine code, which nobody needs: it is stopped before.
    """
    with tempfile.TemporaryDirectory(prefix="axisrules-") as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": _PASS,
            "xla_dump_hlo_as_text": True,
            "xla_backend_optimization_level": 0,
        }
        order = {**order, "options": options, "topology": None, "topology_options": {}}
        with _running(order, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}) as child:
            for ended in child.watch(time_limit, progress, "partitioning"):
                text = _dumped(Path(folder))
                if text is not None:
                    return text
                if ended:
                    break
            raise child.failure("the module was not partitioned")


def _dumped(folder: Path) -> str | None:
    """The module after the pass, once it is written whole."""
    for path in sorted(folder.glob(f"*after_{_PASS}*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.rstrip().endswith("}") and "\nENTRY " in text:
            return text
    return None


def compiled(
    order: dict[str, Any], environment: Mapping[str, str], time_limit: float, progress: Progress | None
) -> dict[str, Any]:
    """What a finished compile says: its text and its memory, or the compiler's error."""
    place = _cache(order, environment)
    if place.exists():
        found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        return {**found, "cached": True}
    with _running({**order, "options": {}}, environment) as child:
        for ended in child.watch(time_limit, progress, f"compiling for {order['topology']}"):
            if ended:
                break
        answer = child.answer()
    if answer is None:
        raise child.failure("the compiler did not answer")
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.replace(place)
    return answer


def _cache(order: Mapping[str, Any], environment: Mapping[str, str]) -> Path:
    """Where an answer is kept: the same text by the same versions gives the same answer."""
    root = os.environ.get("AXISRULES_CACHE") or Path.home() / ".cache" / "axisrules"
    program = order["program"]
    parts = (
        _without_places(program.mlir_module()),
        repr([order[key] for key in ("mesh", "arguments", "donated", "topology", "topology_options", "x64")]),
        repr(sorted(environment.items())),
        repr(order["versions"]),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Path(root) / "compiled" / f"{key}.json"


def _without_places(text: str) -> str:
    """A lowered text without the lines of code that it came from."""
    kept = [line for line in text.splitlines() if not line.startswith("#loc")]
    return re.sub(r" loc\(#?[\w.]*\)", "", "\n".join(kept))


class _Child:
    """A process that compiles."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.said = ""

    def watch(self, time_limit: float, progress: Progress | None, what: str) -> Iterator[bool]:
        """Yields now and then, with whether the process has ended.

        Raises:
            HardwareError: The time is over.
        """
        begin = told = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            yield ended
            if ended:
                return
            now = time.monotonic()
            if now - begin > time_limit:
                raise HardwareError(
                    f"{what} took more than {time_limit:g} seconds",
                    fix="pass a larger time_limit=, or a smaller step: fewer layers, the same layout.",
                )
            if progress is not None and now - told >= 5:
                told = now
                progress(f"{what}: {now - begin:.0f} s of at most {time_limit:g} s")
            time.sleep(0.05)

    def answer(self) -> dict[str, Any] | None:
        """What the process wrote, if it came that far."""
        path = self.folder / "answer"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def failure(self, what: str) -> HardwareError:
        """The error for a process that ended without doing its work."""
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        answer = self.answer() or {}
        last = answer.get("error") or next((line for line in reversed(said) if line.strip()), "")
        return HardwareError(
            f"{what}: {last[:500]}" if last else what,
            exit_code=self.process.returncode,
            listing=said[-5:],
            fix="the lines above are the compiler's own.",
        )

    def end(self) -> None:
        """Ends the process, and whatever it has started."""
        if self.process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait()


@contextmanager
def _running(order: dict[str, Any], environment: Mapping[str, str]) -> Iterator[_Child]:
    with tempfile.TemporaryDirectory(prefix="axisrules-") as name:
        folder = Path(name)
        (folder / "order").write_bytes(pickle.dumps(order))
        with open(folder / "said", "wb") as said:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "axisrules.cost._child",
                    str(folder / "order"),
                    str(folder / "answer"),
                ],
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        child = _Child(process, folder)
        try:
            yield child
        finally:
            child.end()
