"""How values read in messages, and which known word is nearest to a wrong one.

Owns the text form of meshes, specs, rules and bytes. Knows no class of axisrules.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is closest in spelling, or ``None`` where none is close."""
    return _nearest(str(word), tuple(k for k in known if isinstance(k, str)))


@lru_cache(maxsize=4096)
def _nearest(word: str, known: tuple[str, ...]) -> str | None:
    close = difflib.get_close_matches(word, known, n=1)
    return close[0] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A half sentence that proposes the nearest known word, or nothing."""
    close = nearest(word, known)
    return f"; did you mean {close!r}?" if close else ""


def format_mesh(sizes: Mapping[str, int] | None) -> str:
    """Mesh axis sizes as text: ``data=4, model=16``."""
    return ", ".join(f"{axis}={size}" for axis, size in (sizes or {}).items())


def format_bytes(number: int) -> str:
    """Bytes in the unit that a person would use; exact below 1 KiB."""
    size = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{number:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def format_count(number: int, word: str, several: str | None = None) -> str:
    """A number of things: ``1 change``, ``2 changes``; ``several`` is a plural of its own, as of leaf."""
    return f"{number:,} {word if number == 1 else several or word + 's'}"


def format_spec(spec: Iterable[Any]) -> str:
    """A partition spec as text that pastes into code, the same on every JAX version."""
    return f"P({', '.join(map(_format_entry, spec))})"


def _format_entry(entry: Any) -> str:
    plain = entry is None or isinstance(entry, (str, tuple))
    return repr(entry) if plain else "P.UNCONSTRAINED"


def format_rule(index: int, name: str, axes: Sequence[str]) -> str:
    """A rule as text: ``#3 kv_heads -> model``."""
    return f"#{index} {name} -> {format_axes(axes)}"


def format_axes(axes: Sequence[str]) -> str:
    """Mesh axes as text: ``None``, ``model`` or ``(data, model)``."""
    if len(axes) < 2:
        return axes[0] if axes else "None"
    return f"({', '.join(axes)})"
