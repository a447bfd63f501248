"""What surrounds a function that makes modules inside a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flax import errors, nnx

from axisrules._errors import InitError


@contextmanager
def making() -> Iterator[None]:
    """Flax lays nothing out by itself, and the error for a captured generator says what to write.

    Raises:
        InitError: A variable that comes from outside of the trace would be changed in it.
    """
    try:
        with nnx.use_eager_sharding(False):
            yield
    except errors.TraceContextError as cause:
        raise InitError(
            f"make changes a variable that it captures, which JAX cannot trace: "
            f"{str(cause).partition(' (http')[0]}",
            fix="build the generator inside, axisrules.init(lambda: Model(nnx.Rngs(0))), "
            "or hand it in, axisrules.init(Model, args=(rngs,)).",
        ) from cause
