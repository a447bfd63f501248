"""The side by side comparison: its judge can be trusted, and axisrules is right on every input of it."""

import importlib
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
sys.path.append(str(PEERS))  # the comparison is no package: it runs under the Python of every peer
inputs, judge, runner = map(importlib.import_module, ("inputs", "judge", "run"))
REPORTED = inputs.reported()


@pytest.fixture(scope="module")
def answers():
    """What the adapter of axisrules answers to all reported inputs, in processes of its own."""
    for package in ("optax", "orbax.checkpoint"):
        pytest.importorskip(package)
    return runner.answers(sys.executable, runner.PEERS["axisrules"], REPORTED)[1]


NUMBERED = [
    pytest.param(number, id=f"{case['id']}-{run['options']}") for number, (case, run) in enumerate(REPORTED)
]


@pytest.mark.parametrize("number", NUMBERED)
def test_axisrules_is_right_on_every_reported_input(answers, number):
    verdict, why = judge.judge(*REPORTED[number], answers[number])
    assert verdict == "right", why


CASE = {
    "mesh": {"data": 2, "model": 2},
    "rules": [["embed", "data"], ["mlp", "model"]],
    "tree": {"a/w": {"shape": [4, 6], "dtype": "float32", "names": ["embed", "mlp"]}},
}
RUN = {"options": {}, "specs": {"a/w": ["data", "model"]}}
REFUSAL = {"options": {}, "error": "rank_mismatch", "mentions": ["a/w", "3"]}
TILES = {
    "0": [[0, 2], [0, 3]],
    "1": [[0, 2], [3, 6]],
    "2": [[2, 4], [0, 3]],
    "3": [[2, 4], [3, 6]],
}


def answer(tiles=TILES, **more):
    return {"leaves": {"a/w": {"tiles": tiles, **more}}, "report": [], "moved": [], "warned": []}


def verdict(run, found, case=CASE):
    return judge.judge(case, run, found)[0]


def test_the_judge_lays_a_tuple_out_major_to_minor():
    assert judge.tiles({"x": 2, "y": 2}, [8], [["y", "x"]]) == {
        "0": [[0, 2]],
        "1": [[4, 6]],
        "2": [[2, 4]],
        "3": [[6, 8]],
    }


def test_the_judge_knows_a_layout_whatever_its_spelling():
    assert judge.tiles({"x": 1, "y": 2}, [4, 2], [["x", "y"]]) == judge.tiles(
        {"x": 1, "y": 2}, [4, 2], ["y", None]
    )


def test_the_right_layout_is_right():
    assert verdict(RUN, answer()) == "right"


@pytest.mark.parametrize(
    "found",
    [
        answer({"0": [[0, 4], [0, 6]]}),
        answer({**TILES, "0": TILES["3"]}),
        answer({device: parts[:1] for device, parts in TILES.items()}),
        answer(kept=False),
        {**answer(), "leaves": {"a/w": {"other": "ndarray"}}},
        {**answer(), "leaves": {}},
    ],
    ids=["one device", "other tiles", "a dimension less", "other values", "no array", "no leaf"],
)
def test_another_outcome_is_silently_wrong(found):
    assert verdict(RUN, found) == "silently wrong"


def test_an_outcome_with_a_warning_is_not_silent():
    assert verdict(REFUSAL, {**answer(), "warned": ["No mesh found."]}) == "wrong, with a warning"


def test_other_axis_types_than_asked_for_are_wrong():
    case = {**CASE, "mesh_axis_types": {"data": "Explicit", "model": "Explicit"}}
    assert verdict(RUN, answer(types={"data": "Auto", "model": "Auto"}), case) == "silently wrong"
    assert verdict(RUN, answer(types=case["mesh_axis_types"]), case) == "right"


def test_what_is_moved_twice_gathered_untied_or_too_large_is_wrong():
    assert verdict({**RUN, "second_call_moves_bytes": 0}, {**answer(), "moved": ["a/w"]}) == "silently wrong"
    assert verdict({**RUN, "device0_bytes": 23}, answer()) == "silently wrong"
    assert verdict({**RUN, "device0_bytes": 24}, answer()) == "right"
    gathered = {**RUN, "no_host_allgather": True}
    assert verdict(gathered, {**answer(), "gathered": [2**20]}) == "silently wrong"
    assert verdict(gathered, {**answer(), "gathered": [64]}) == "right"
    two = {**answer(), "leaves": {path: {"tiles": TILES, "object": path} for path in ("a/w", "b")}}
    assert verdict({**RUN, "same_object": [["a/w", "b"]]}, two) == "silently wrong"


def test_an_input_that_is_wrong_must_not_be_taken():
    assert verdict(REFUSAL, answer()) == "silently wrong"


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("ValueError", "2 names for 3 dimensions at a/w", "right"),
        ("TypeError", "a/w: 3", "refused by name"),
        ("ValueError", "bad rank at a/w", "refused by name"),
        ("ValueError", "outputs with pytree key path result['a']['w'] do not fit", "refused by name"),
        ("ValueError", "bad rank 3", "refused"),
    ],
)
def test_a_refusal_is_right_only_where_it_says_all_that_it_should(kind, message, expected):
    assert verdict(REFUSAL, {"error": kind, "message": message}) == expected


def test_a_refusal_of_an_input_that_is_right_is_never_right():
    assert verdict(RUN, {"error": "ValueError", "message": "a/w 3"}) == "refused by name"


def test_a_short_path_is_not_found_in_any_word():
    assert not judge.names_parameter("with an error", "w")
    assert judge.names_parameter("argument 'w' of", "w")


def test_what_is_not_said_is_told_apart_from_what_is_wrong():
    run = {**RUN, "report": [{"path": "a/w", "dim": 1, "reason": "axis_taken"}]}
    assert verdict(run, answer()) == "right, unreported"
    said = {"path": "a/w", "dim": 1, "reason": "axis_taken", "name": "mlp"}
    assert verdict(run, {**answer(), "report": [said]}) == "right"
    assert verdict({**RUN, "unused_rules": ["mlp"]}, answer()) == "right, unreported"


def test_manual_axes_are_expected_in_their_places_outside():
    run = {"options": {"manual_axes": ["data"]}, "specs": {"a/w": [None, "model"]}}
    assert verdict(run, answer()) == "right"


def test_every_timed_input_has_an_answer_to_be_judged_by():
    for case, run in inputs.timed().values():
        assert run["specs"].keys() == case["tree"].keys()
        for path, spec in run["specs"].items():
            judge.tiles(case["mesh"], case["tree"][path]["shape"], spec)


def test_an_adapter_without_an_answer_says_why():
    assert verdict(RUN, {"na": "has no names"}) == "n/a"


@pytest.mark.parametrize("adapter", sorted(path.stem for path in (PEERS / "adapters").glob("*.py")))
def test_an_adapter_never_sees_the_answer(adapter):
    told = [inputs.asked(case, run) for case, run in inputs.reported()]
    assert not any({"expect", "right", "specs", "error", "mentions"} & one.keys() for one in told)
    text = (PEERS / "adapters" / f"{adapter}.py").read_text()
    assert not any(case["id"] in text for case, _ in inputs.reported())
