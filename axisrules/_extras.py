"""Packages that an extra brings: imported when used, and named when missing."""

from __future__ import annotations

import importlib
from typing import Any

from axisrules._errors import MissingExtraError


def extra_module(module: str, *, package: str, extra: str, purpose: str) -> Any:
    """A module that is not a dependency of the core.

    Args:
        module: What to import, such as ``"safetensors.numpy"``.
        package: What it is called in the package index.
        extra: The extra of axisrules that brings it.
        purpose: Who needs it, as the subject of a sentence with "need", such as ``"YAML files"``.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise MissingExtraError(
            f"{purpose} need {package}, which is not installed", fix=f"pip install 'axisrules[{extra}]'"
        ) from cause
