"""Runs one script in several JAX processes on this machine, joined by `jax.distributed`."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_START = """
import os, sys, traceback
sys.stdout = open({output!r}, "w")  # what the collectives print on their own goes elsewhere
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", {devices})
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    "127.0.0.1:{port}", num_processes={processes}, process_id={process}, initialization_timeout={patience}
)
try:
    exec(compile({script!r}, "<script>", "exec"), dict(__name__="__main__", jax=jax))
except BaseException:
    traceback.print_exc()
    sys.stdout.flush()
    os._exit(1)  # a normal exit would wait for the other processes
"""


def run_processes(script: str, processes: int, devices: int, timeout: float) -> list[str]:
    """What every process prints, in order.

    Args:
        script: The text that every process runs; `jax.process_index()` tells them apart.
        processes: How many.
        devices: CPU devices of each.
        timeout: Seconds after which all of them are killed.

    Raises:
        AssertionError: A process failed, or the time is over; with everything that they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        setting = {"devices": devices, "port": _free_port(), "processes": processes, "patience": int(timeout)}
        outputs = [Path(folder) / f"{process}.txt" for process in range(processes)]
        logs = [output.with_suffix(".log") for output in outputs]
        running = [
            _start(_START.format(process=process, output=str(output), script=script, **setting), log)
            for process, (output, log) in enumerate(zip(outputs, logs, strict=True))
        ]
        try:
            codes = _wait(running, time.monotonic() + timeout)
        finally:
            for process in running:
                _kill(process)
        if codes != [0] * processes:
            shown = [
                f"--- process {n}, exit code {code}\n{_read(output)}{_read(log)}"
                for n, (code, output, log) in enumerate(zip(codes, outputs, logs, strict=True))
            ]
            raise AssertionError(
                "\n".join([f"{processes} processes did not end well in {timeout} s", *shown])
            )
        return list(map(_read, outputs))


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(script: str, log: Path) -> subprocess.Popen[bytes]:
    # A group of its own, so that what it starts ends with it.
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-c", script], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def _wait(running: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """The exit codes once all have ended, or one has failed: the others would wait for it."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in running]
        if None not in codes or any(codes):
            time.sleep(0.2 if None in codes else 0)  # the cause of the first failure may still be printed
            break
        time.sleep(0.05)
    return [process.poll() for process in running]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL: a process that waits in a collective ignores SIGTERM."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
