"""The one judge of what came of an input, for every peer and for axisrules alike.

It compares which part of each array lies on which device, never how a spec is spelt, and computes
both from the input alone. It knows no peer, needs no jax, and takes no adapter's word for an outcome.
"""

from __future__ import annotations

import math
from typing import Any

RIGHT = "right"
UNREPORTED = "right, unreported"  # laid out as it should be; what the input asks to be told is not said
WRONG = "silently wrong"
WARNED = "wrong, with a warning"
NAMED = "refused by name"
REFUSED = "refused"  # with an error that does not say which parameter
NOT_APPLICABLE = "n/a"
LARGE = 65536  # bytes that no two processes have to tell each other about a plan
CRASHES = ("AttributeError", "TypeError")  # Python's own, about a value that nobody looked at

VERDICTS = (RIGHT, UNREPORTED, WRONG, WARNED, NAMED, REFUSED, NOT_APPLICABLE)


def judge(case: dict[str, Any], run: dict[str, Any], answer: dict[str, Any]) -> tuple[str, str]:
    """The verdict on one answer, and why.

    Args:
        case: one entry of ``reports.json``.
        run: one of its ``expect``.
        answer: what the worker wrote down.
    """
    if "na" in answer:
        return NOT_APPLICABLE, answer["na"]
    if "error" in answer:
        return _refusal(case, run, answer)
    if "error" in run:
        return _wrong(answer, f"took an input that is wrong: {run['error']}")
    for path, spec in run["specs"].items():
        if fault := _fault(case, run, path, spec, answer["leaves"]):
            return _wrong(answer, f"{path}: {fault}")
    for look in (_same_objects, _moved, _gathered, _too_large):
        if fault := look(run, answer):
            return _wrong(answer, fault)
    return _told(run, answer)


def _wrong(answer: dict[str, Any], why: str) -> tuple[str, str]:
    warned = answer.get("warned")
    return (WARNED, f"{why}; {warned[0]}") if warned else (WRONG, why)


def _refusal(case: dict[str, Any], run: dict[str, Any], answer: dict[str, Any]) -> tuple[str, str]:
    message = f"{answer['error']}: {answer['message']}"
    if (
        "error" in run
        and answer["error"] not in CRASHES
        and all(word in answer["message"] for word in run["mentions"])
    ):
        return RIGHT, message
    named = any(names_parameter(answer["message"], path) for path in case["tree"])
    return (NAMED if named else REFUSED), message


def names_parameter(message: str, path: str) -> bool:
    """Whether an error says which parameter it is about, in any of the usual spellings.

    A path of one letter or word is looked for with what surrounds a path in the spellings of JAX.
    """
    segments = path.split("/")
    keys = "".join(f"['{segment}']" for segment in segments)
    dotted = "." + ".".join(segments)
    spellings = [keys, dotted, f"'{path}'", f"param: {path}", f"at:    {path}"]
    if len(segments) > 1:
        spellings += [path, ".".join(segments)]
    return any(spelling in message for spelling in spellings)


def _fault(
    case: dict[str, Any], run: dict[str, Any], path: str, spec: list[Any], leaves: dict[str, Any]
) -> str | None:
    """What is wrong with one leaf, or None."""
    if path not in leaves:
        return "is not in the result"
    leaf = leaves[path]
    if "tiles" not in leaf:
        return f"is {leaf['other']}, neither a spec nor an array"
    shape = case["tree"][path]["shape"] if path in case["tree"] else _shape_of_moment(case, path)
    expected = tiles(case["mesh"], shape, _outside(case, run, spec))
    if not _same_tiles(leaf["tiles"], expected):
        return f"lies otherwise than {spec}"
    if not leaf.get("kept", True):
        return "holds other values than its source"
    asked = case.get("mesh_axis_types")
    if "types" in leaf and asked and leaf["types"] != asked:
        return f"lies on axes of types {leaf['types']} where {asked} were asked for"
    return None


def _shape_of_moment(case: dict[str, Any], path: str) -> list[int]:
    """Of ``opt/0/mu/w`` that of ``w``; a counter is a scalar."""
    parameter = "/".join(path.split("/")[3:])
    return case["tree"][parameter]["shape"] if parameter else []


def _outside(case: dict[str, Any], run: dict[str, Any], spec: list[Any]) -> list[Any]:
    """The spec as seen outside of shard_map, where its manual axes are back in their places."""
    manual = run["options"].get("manual_axes", ())
    if not manual:
        return spec
    (leaf,) = case["tree"].values()
    axes = dict(case["rules"])
    return [
        axes[name] if axes[name] in manual else entry for name, entry in zip(leaf["names"], spec, strict=True)
    ]


def tiles(mesh: dict[str, int], shape: list[int], spec: list[Any]) -> dict[str, list[Any]]:
    """By device of a row-major mesh, the half-open range of every dimension; None where free."""
    sizes = list(mesh.values())
    found = {}
    for device in range(math.prod(sizes)):
        at = dict(zip(mesh, _coordinates(device, sizes), strict=True))
        found[str(device)] = [
            _part(at, mesh, size, entry)
            for size, entry in zip(shape, [*spec, *[None] * len(shape)], strict=False)
        ]
    return found


def _coordinates(device: int, sizes: list[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        device, coordinate = divmod(device, size)
        found.append(coordinate)
    return found[::-1]


def _part(at: dict[str, int], mesh: dict[str, int], size: int, entry: Any) -> list[int] | None:
    if entry == "UNCONSTRAINED":
        return None
    axes = [entry] if isinstance(entry, str) else entry or []
    index = 0
    for axis in axes:
        index = index * mesh[axis] + at[axis]
    step = size // math.prod(mesh[axis] for axis in axes)
    return [index * step, (index + 1) * step]


def _same_tiles(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        len(found[device]) == len(parts)
        and all(part is None or part == other for part, other in zip(parts, found[device], strict=True))
        for device, parts in expected.items()
    )


def _same_objects(run: dict[str, Any], answer: dict[str, Any]) -> str | None:
    for tied in run.get("same_object", ()):
        if len({answer["leaves"][path]["object"] for path in tied}) > 1:
            return f"{' and '.join(tied)} are one array no more"
    return None


def _moved(run: dict[str, Any], answer: dict[str, Any]) -> str | None:
    if run.get("second_call_moves_bytes") == 0 and answer["moved"]:
        return f"a second call moved {answer['moved'][0]}"
    return None


def _gathered(run: dict[str, Any], answer: dict[str, Any]) -> str | None:
    if run.get("no_host_allgather") and max(answer["gathered"], default=0) >= LARGE:
        return f"gathered {max(answer['gathered'])} bytes from every process"
    return None


def _too_large(run: dict[str, Any], answer: dict[str, Any]) -> str | None:
    limit = run.get("device0_bytes", run.get("max_out_mib", math.inf) * 2**20)
    held = sum(
        4 * math.prod(stop - start for start, stop in leaf["tiles"]["0"])
        for leaf in answer["leaves"].values()
        if limit < math.inf
    )
    return f"{held} bytes on the first device" if held > limit else None


def _told(run: dict[str, Any], answer: dict[str, Any]) -> tuple[str, str]:
    """Whether the peer also says what the input asks to be told."""
    said = answer.get("report", [])
    for row in run.get("report", ()):
        if not any(row.items() <= one.items() for one in said):
            return UNREPORTED, f"nothing says {row}"
    for name in run.get("unused_rules", ()):
        if not any(one["reason"] == "unused_rule" and one["name"] == name for one in said):
            return UNREPORTED, f"nothing says that the rule for {name} is never used"
    return RIGHT, ""
