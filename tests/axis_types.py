"""The kinds of mesh that every test runs on that places something: Auto, Explicit, and one axis of each.

The fixtures ``axis_types`` and ``mesh`` of conftest.py give a test all of them in turn. Tests that compile
much run on some of them, and by `make check-all` on all.
"""

import pytest

import axisrules as ar

AXIS_TYPES = ("auto", "explicit", "mixed")
AUTO_FIRST = ["auto", *[pytest.param(kind, marks=pytest.mark.slow) for kind in AXIS_TYPES[1:]]]


def mesh_of(axis_types, axes="data=4,model=2", **options):
    """A mesh of one kind; of a mixed one the first axis is Explicit and the others are Auto."""
    first = axes.partition("=")[0] if isinstance(axes, str) else next(iter(axes))
    return ar.make_mesh(
        axes, axis_types={first: "explicit"} if axis_types == "mixed" else axis_types, **options
    )


def in_turn(values):
    """Each value with one kind of mesh, the next one with the next; the other pairs are slow."""
    return [
        pytest.param(value, kind, marks=() if number % len(AXIS_TYPES) == place else pytest.mark.slow)
        for number, value in enumerate(values)
        for place, kind in enumerate(AXIS_TYPES)
    ]
