"""Strategies for hypothesis: names, rules, meshes and shapes that meet each other often.

Owns what is drawn, and from which words: those of a user's rules, or some of its own. Imports
hypothesis when a strategy is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from axisrules._errors import PolicyError
from axisrules._extras import extra_module
from axisrules._meshes import MeshLike, as_mesh, axis_sizes
from axisrules._names import AxisNames, parse_names
from axisrules._rules import Rules, RulesLike, as_rules

NAMES = ("batch", "seq", "embed", "mlp", "heads", "kv", "vocab", "layers")
AXES = ("data", "fsdp", "model", "expert")
_PLAIN_SIZES = (1, 2, 4, 6, 8, 12, 24, 7, 0)


def hypothesis_strategies() -> Any:
    """The module ``hypothesis.strategies``.

    Raises:
        MissingExtraError: Hypothesis is not installed.
    """
    return extra_module(
        "hypothesis.strategies", package="hypothesis", extra="testing", purpose="strategies for tests"
    )


def axis_names(
    names: RulesLike | Iterable[str] | None = None, *, min_rank: int = 0, max_rank: int = 4
) -> Any:
    """The names of one array: a tuple of distinct names, and ``None`` here and there.

    Args:
        names: Where they come from: rules, or names themselves; by default some of our own.
        min_rank: The fewest dimensions.
        max_rank: The most dimensions.

    Returns:
        A strategy of tuples.

    Raises:
        MissingExtraError: Hypothesis is not installed.

    Example:
        >>> import axisrules as ar
        >>> from hypothesis import given, settings
        >>> rules = ar.Rules({"embed": "data", "mlp": ("data", "model")})
        >>> @settings(max_examples=20, deadline=None, database=None)
        ... @given(names=ar.testing.axis_names(rules))
        ... def every_name_is_known(names):
        ...     assert set(names) <= {"embed", "mlp", None}
        >>> every_name_is_known()
    """
    return hypothesis_strategies().composite(_draw_names)(words_of(names), min_rank, max_rank)


def _draw_names(
    draw: Callable[[Any], Any], words: Sequence[str], min_rank: int, max_rank: int
) -> tuple[str | None, ...]:
    st = hypothesis_strategies()
    rank = draw(st.integers(min_rank, max_rank))
    if not words:
        return (None,) * int(rank)
    named = min(rank, len(words))
    distinct = draw(st.lists(st.sampled_from(words), min_size=named, max_size=named, unique=True))
    names = [draw(st.sampled_from((name, name, name, None))) for name in distinct]
    return (*names, *(None,) * (rank - named))


def words_of(names: Any) -> tuple[str, ...]:
    """Distinct names from rules, from a text of names, or from names."""
    if names is None:
        return NAMES
    if isinstance(names, str):
        names = names.split()
    elif isinstance(names, (Rules, Mapping)):
        return tuple(as_rules(names).by_name)
    given = tuple(names)
    if all(isinstance(name, str) for name in given):
        return tuple(dict.fromkeys(given))
    return tuple(as_rules(given).by_name)


def rules(
    names: RulesLike | Iterable[str] | None = None,
    axes: MeshLike | RulesLike | Iterable[str] | None = None,
    *,
    min_size: int = 0,
    max_size: int = 8,
) -> Any:
    """Rule sets: to an axis, to several, to none, and with fallbacks.

    Args:
        names: The names that rules are for: as in ``axis_names``.
        axes: The mesh axes that they lead to: a mesh, rules that name them, or axes themselves; by
            default some of our own.
        min_size: The fewest rules, where there are names.
        max_size: The most rules.

    Returns:
        A strategy of ``Rules``.

    Raises:
        MissingExtraError: Hypothesis is not installed.

    Example:
        What rules to add to one's own never breaks:

        >>> import axisrules as ar
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=20, deadline=None, database=None)
        ... @given(more=ar.testing.rules(["head_dim"], "data=4,model=2"))
        ... def embed_stays_where_it_is(more):
        ...     ours = ar.Rules({"embed": "data"})
        ...     spec = ar.logical_to_mesh_axes(("head_dim", "embed"), ours.append(more))
        ...     assert spec[1] == "data"
        >>> embed_stays_where_it_is()
    """
    st = hypothesis_strategies()
    words, known = words_of(names), axes_of(axes)
    if not words:
        return st.just(Rules())
    some = st.lists(st.sampled_from(known), max_size=3, unique=True).map(tuple) if known else st.just(())
    one = st.sampled_from(known) if known else st.none()
    pair = st.tuples(st.sampled_from(words), st.one_of(st.none(), one, some))
    return st.lists(pair, min_size=min_size, max_size=max_size).map(Rules)


def axes_of(value: Any) -> tuple[str, ...]:
    """Mesh axes from a mesh, from rules, or from axes."""
    if value is None:
        return AXES
    meshlike = isinstance(value, Mapping) and all(isinstance(size, int) for size in value.values())
    if isinstance(value, (str, Mesh, AbstractMesh)) or (meshlike and value):
        return tuple(axis for axis, _ in axis_sizes(as_mesh(value)))
    if not isinstance(value, (Rules, Mapping)):
        value = tuple(value)
        if all(isinstance(axis, str) for axis in value):
            return tuple(dict.fromkeys(value))
    return tuple(dict.fromkeys(axis for _, axes in as_rules(value).pairs for axis in axes))


def meshes(
    axes: RulesLike | Iterable[str] | None = None,
    *,
    min_devices: int = 1,
    max_devices: int = 1024,
    primes: Sequence[int] = (2,),
    absent: str = "error",
) -> Any:
    """Meshes as mappings of axis sizes, some of size 1; every ``mesh=`` takes them.

    Args:
        axes: The axes: rules that name them, or axes themselves, which then are in every mesh; by
            default one to four of our own.
        min_devices: The fewest devices.
        max_devices: The most devices.
        primes: What the number of devices is a product of: ``(2, 3)`` for 1, 2, 3, 4, 6, 8, ...
        absent: ``"error"``: every axis is in the mesh; ``"drop"``: some may be absent, for rules that
            are used with ``absent="drop"``.

    Returns:
        A strategy of dictionaries of axis sizes.

    Raises:
        PolicyError: No number of devices is a product of the primes within the limits.
        MissingExtraError: Hypothesis is not installed.

    Example:
        >>> import axisrules as ar, math
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=20, deadline=None, database=None)
        ... @given(mesh=ar.testing.meshes({"embed": ("data", "model")}, min_devices=8))
        ... def there_are_8_devices_or_more(mesh):
        ...     assert list(mesh) == ["data", "model"] and math.prod(mesh.values()) >= 8
        >>> there_are_8_devices_or_more()
    """
    if absent not in ("error", "drop"):
        raise PolicyError(f"absent={absent!r} is no policy", fix="pass absent='error' or absent='drop'.")
    counts = tuple(sorted(n for n in _products(tuple(primes), max_devices) if n >= min_devices))
    if not counts:
        raise PolicyError(
            f"no product of {', '.join(map(str, primes))} lies between {min_devices} and {max_devices}",
            fix="widen the limits, or add to primes.",
        )
    known = axes_of(axes)
    every = axes is not None and absent == "error" and bool(known)
    return hypothesis_strategies().composite(_draw_mesh)(known or AXES, every, counts, tuple(primes))


def _products(primes: tuple[int, ...], limit: int) -> set[int]:
    if not all(isinstance(prime, int) and prime > 1 for prime in primes):
        raise PolicyError(f"primes={primes!r} are no numbers over 1", fix="pass primes=(2,).")
    found, new = {1}, {1}
    while new:
        new = {n * prime for n in new for prime in primes if n * prime <= limit} - found
        found |= new
    return found


def _draw_mesh(
    draw: Callable[[Any], Any], axes: Sequence[str], every: bool, counts: Sequence[int], primes: Sequence[int]
) -> dict[str, int]:
    st = hypothesis_strategies()
    if not every:
        axes = draw(st.lists(st.sampled_from(axes), min_size=1, max_size=max(4, len(axes)), unique=True))
    sizes = dict.fromkeys(axes, 1)
    for factor in _factors(draw(st.sampled_from(counts)), primes):
        sizes[draw(st.sampled_from(list(axes)))] *= factor
    return sizes


def _factors(count: int, primes: Sequence[int]) -> Iterator[int]:
    """The number as a product of the given ones, which need not be prime; there is such a product."""
    while count > 1:
        usable = [n for n in primes if count % n == 0 and count // n in _products(tuple(primes), count)]
        yield usable[0]
        count //= usable[0]


def shapes(
    names: AxisNames,
    mesh: MeshLike | None = None,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    divides: str = "often",
) -> Any:
    """Shapes of an array with these names.

    Args:
        names: The names; ``...`` stands for up to two dimensions.
        mesh: The mesh that the sizes are to divide over.
        sizes: The sizes that a dimension may have, by name, where they are known.
        divides: ``"often"``: most sizes divide over some mesh axes, and some are 0, 1 or odd;
            ``"always"``: every size divides over all devices, so that no rule can fail to divide.

    Returns:
        A strategy of tuples of sizes.

    Raises:
        PolicyError: ``divides`` is another word.
        MissingExtraError: Hypothesis is not installed.

    Example:
        >>> import axisrules as ar
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=20, deadline=None, database=None)
        ... @given(shape=ar.testing.shapes("embed mlp", "data=4,model=2", divides="always"))
        ... def it_divides(shape):
        ...     ar.resolve("embed mlp", shape, mesh="data=4,model=2", rules={"embed": "data", "mlp": "model"})
        >>> it_divides()
    """
    if divides not in ("often", "always"):
        raise PolicyError(
            f"divides={divides!r} is no policy", fix="pass divides='often' or divides='always'."
        )
    by_axis = () if mesh is None else axis_sizes(as_mesh(mesh))
    return hypothesis_strategies().composite(_draw_shape)(
        parse_names(names, unconstrained=True), [n for _, n in by_axis], dict(sizes or {}), divides
    )


def _draw_shape(
    draw: Callable[[Any], Any],
    names: tuple[Any, ...],
    axes: Sequence[int],
    sizes: Mapping[str, Sequence[int]],
    divides: str,
) -> tuple[int, ...]:
    st = hypothesis_strategies()
    general = st.sampled_from(_sizes(axes, divides))
    if ... in names:
        at = names.index(...)
        names = names[:at] + (None,) * draw(st.integers(0, 2)) + names[at + 1 :]
    return tuple(
        int(draw(st.sampled_from(list(sizes[name])) if name in sizes else general)) for name in names
    )


def _sizes(axes: Sequence[int], divides: str) -> list[int]:
    """The sizes to choose from, the simplest first."""
    count = math.prod(axes)
    if divides == "always":
        return [count * n for n in (1, 2, 3, 6)]
    splits = [n for n in axes if n > 1]
    pairs = [a * b for i, a in enumerate(splits) for b in splits[i + 1 :]]
    return list(dict.fromkeys([*_PLAIN_SIZES, *splits, *(3 * n for n in splits), *pairs, 2 * count]))
