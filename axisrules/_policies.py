"""What to do where a rule does not fit: the four policies and their words."""

from __future__ import annotations

from typing import NamedTuple

from axisrules._errors import PolicyError
from axisrules._text import did_you_mean


class Policies(NamedTuple):
    """What to do where a rule does not fit (the words are those of ``resolve``)."""

    taken: str = "next"
    indivisible: str = "error"
    absent: str = "error"
    unmapped: str = "warn"


DEFAULT = Policies()
_ALLOWED = {
    "taken": ("next", "partial", "error"),
    "indivisible": ("error", "next", "partial"),
    "absent": ("error", "drop"),
    "unmapped": ("warn", "error", "replicate"),
}


def policies(taken: str, indivisible: str, absent: str, unmapped: str) -> Policies:
    """Checked policies.

    Raises:
        PolicyError: A policy has a value that it cannot have.
    """
    chosen = Policies(taken, indivisible, absent, unmapped)
    if chosen == DEFAULT:
        return DEFAULT
    for key, value in chosen._asdict().items():
        if value not in _ALLOWED[key]:
            words = " or ".join(repr(word) for word in _ALLOWED[key])
            raise PolicyError(
                f"{key}={value!r} is no policy{did_you_mean(str(value), _ALLOWED[key])}",
                fix=f"pass {key}={words}.",
            )
    return chosen
