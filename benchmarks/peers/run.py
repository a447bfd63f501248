"""Asks axisrules and its peers the same questions: ``python benchmarks/peers/run.py``.

It makes an environment per distribution under ``.venv-peers``, runs each adapter there in a process of
its own, hands what comes back to the one judge, and prints Markdown. It needs nothing but Python, 3.12
or newer for all peers to install; a peer that does not install or start is a row that says why.

Times of different environments cannot be interleaved call by call. The rounds go through all peers in
turn, on one machine, and a figure is the median over the rounds; read the ratios, not the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import inputs
import judge
import tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 600  # seconds for one process


class Peer(NamedTuple):
    """An adapter, and the requirements of its environment."""

    adapter: str
    requirements: str


PEERS = {
    "axisrules": Peer("axisrules", "axisrules"),
    "Flax Linen": Peer("linen", "flax"),
    "Flax NNX": Peer("nnx", "flax"),
    "taktiny": Peer("taktiny", "taktiny"),
    "substrax": Peer("substrax", "substrax"),
    "haliax": Peer("haliax", "haliax"),
    "scalax": Peer("scalax", "scalax"),
}


def environment(requirements: str) -> str | None:
    """Make the environment unless it is there; why it cannot be made, or None."""
    home, wanted = ROOT / ".venv-peers" / requirements, HERE / "requirements" / f"{requirements}.txt"
    done = home / "done.txt"
    if done.exists() and done.read_text() == wanted.read_text():
        return None
    for command in (
        [sys.executable, "-m", "venv", "--clear", home],
        [home / "bin" / "python", "-m", "pip", "install", "-q", "-r", wanted],
    ):
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if made.returncode:
            return next(
                (line for line in reversed(made.stderr.splitlines()) if "ERROR" in line), "no reason given"
            )
    done.write_text(wanted.read_text())
    return None


def ask(
    python: Path | str, peer: Peer, asked: list[dict[str, Any]], devices: int, processes: int = 1
) -> list[dict[str, Any]]:
    """Of each process of one adapter, its versions and an answer per input; they share the devices."""
    request: dict[str, Any] = {"devices": devices // processes, "inputs": asked}
    if processes == 1:
        return [_answered(python, peer, request)]
    request |= {"processes": processes, "address": f"127.0.0.1:{_free_port()}"}
    requests = [{**request, "process": process} for process in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda one: _answered(python, peer, one), requests))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answered(python: Path | str, peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    # -P and the path: an adapter is named after what it adapts, and must not be found in its place.
    command = [python, "-P", HERE / "adapters" / f"{peer.adapter}.py"]
    env = {**os.environ, "PYTHONPATH": str(HERE), "JAX_PLATFORMS": "cpu"}
    try:
        made = subprocess.run(
            command, input=json.dumps(request), env=env, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return _silent(request, f"no answer in {LIMIT} s")
    if made.returncode:
        return _silent(request, (made.stderr.strip() or f"exit {made.returncode}").splitlines()[-1])
    return json.loads(made.stdout)


def _silent(request: dict[str, Any], why: str) -> dict[str, Any]:
    return {"versions": {}, "answers": [{"na": f"does not run: {why}"}] * len(request["inputs"])}


def answers(
    python: Path | str, peer: Peer, questions: list[inputs.Input]
) -> tuple[dict[str, str], list[Any]]:
    """The answers to all inputs in their order, of several processes the worst."""
    found: list[Any] = [None] * len(questions)
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (case, _) in enumerate(questions):
        groups.setdefault((inputs.devices(case), case.get("processes", 1)), []).append(number)
    versions: dict[str, str] = {}
    for setting, numbers in groups.items():
        told = [inputs.asked(*questions[number]) for number in numbers]
        made = ask(python, peer, told, *setting)
        versions = made[0]["versions"] or versions
        for number, *each in zip(numbers, *(one["answers"] for one in made), strict=True):
            found[number] = _worst_answer(questions[number], each)
    return versions, found


def _worst_answer(question: inputs.Input, found: list[Any]) -> Any:
    return max(found, key=lambda answer: _rank(judge.judge(*question, answer)))


def judged(questions: list[inputs.Input], found: list[Any]) -> list[tuple[str, str]]:
    return [judge.judge(case, run, answer) for (case, run), answer in zip(questions, found, strict=True)]


def installed(chosen: dict[str, Peer]) -> dict[str, str | None]:
    """By peer, why it is not there, or None."""
    made = {
        requirements: environment(requirements) for requirements in {p.requirements for p in chosen.values()}
    }
    return {name: made[peer.requirements] for name, peer in chosen.items()}


def python_of(peer: Peer) -> Path:
    return ROOT / ".venv-peers" / peer.requirements / "bin" / "python"


def correctness(chosen: dict[str, Peer], missing: dict[str, str | None], in_full: bool) -> None:
    """Print what each peer makes of the reported inputs."""
    questions = inputs.reported()
    cases = [case for case, _ in questions]
    verdicts, used = {}, []
    for name, peer in chosen.items():
        if missing[name]:
            verdicts[name] = [(judge.NOT_APPLICABLE, f"does not install: {missing[name]}")] * len(cases)
            continue
        versions, found = answers(python_of(peer), peer, questions)
        verdicts[name] = judged(questions, found)
        used.append(f"{name} ({', '.join(f'{package} {version}' for package, version in versions.items())})")
    ours = verdicts["axisrules"]
    print("Versions: " + "; ".join(used) + ".\n")
    print(f"**{len(cases)} inputs after public bug reports**\n\n{tables.counts(verdicts)}\n")
    print(f"**Each of them**\n\n{tables.inputs(cases, verdicts)}\n")
    print(f"Why n/a:\n\n{tables.reasons(cases, verdicts)}")
    if in_full:
        print("\n" + tables.everything(cases, verdicts))
    if not {verdict for verdict, _ in ours} <= {judge.RIGHT, judge.NOT_APPLICABLE}:
        raise SystemExit("axisrules is not right on every input")


def speed(chosen: dict[str, Peer], missing: dict[str, str | None], rounds: int) -> None:
    """Print a table of times per question."""
    questions = inputs.timed()
    found: dict[str, list[list[Any]]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, peer in chosen.items():
            if missing[name]:
                found[name].append([{"na": f"does not install: {missing[name]}"}] * len(questions))
            else:
                found[name].append(answers(python_of(peer), peer, list(questions.values()))[1])
    for number, (question, (case, run)) in enumerate(questions.items()):
        per_round = {name: [one[number] for one in each] for name, each in found.items()}
        verdicts = {
            name: _worst([judge.judge(case, run, one) for one in each]) for name, each in per_round.items()
        }
        print(tables.timing(question, per_round, verdicts) + "\n")


def _worst(verdicts: list[tuple[str, str]]) -> tuple[str, str]:
    return max(verdicts, key=_rank)


def _rank(verdict: tuple[str, str]) -> int:
    return judge.VERDICTS.index(verdict[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timing; 0 for none")
    parser.add_argument("--only", nargs="+", choices=list(PEERS)[1:], default=list(PEERS)[1:])
    parser.add_argument("--in-full", action="store_true", help="print the reason for every verdict")
    options = parser.parse_args()
    chosen = {name: peer for name, peer in PEERS.items() if name in ("axisrules", *options.only)}
    missing = installed(chosen)
    if options.rounds:
        speed(chosen, missing, options.rounds)
    correctness(chosen, missing, options.in_full)


if __name__ == "__main__":
    main()
