"""``init``: trees and modules whose arrays are created on their shards.

Owns the order of the work: trace, plan, make. How the arrays are made stands in ``_traces.py``. Decides
no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from axisrules import _compat, _traces
from axisrules._errors import InitError
from axisrules._meshes import active_mesh, need_devices
from axisrules._options import PlanOptions, make_options
from axisrules._place import place
from axisrules._plan import Plan
from axisrules._planning import make_plan
from axisrules._processes import agree, attempt


def init(
    make: Callable[..., Any],
    names: Any = None,
    *,
    args: tuple[Any, ...] = (),
    check: bool = True,
    **options: Unpack[PlanOptions],
) -> Any:
    """Makes a tree or a module whose arrays are born where the rules say.

    ``make`` is traced once, and every array is made by a program of its own that holds what this array
    needs and nothing else. Programs that differ in their keys alone are compiled once, so that the
    number of compilations does not grow with the depth of a model, and making the same model again
    compiles nothing. The values are those of ``jax.jit(make)``, bit for bit, but for sums over a
    dimension that lies split, and for what is computed from arrays that ``make`` captures: XLA treats
    those as constants in a program of the whole, and the last bits may differ.

    No array is ever whole on one device, and arrays are made one after another: beyond the result
    itself, at most 3.5 times the largest array is in use (random bits take three times their shard).
    Where XLA cannot partition an initializer, it runs whole on every device: ``orthogonal`` and
    ``delta_orthogonal``, which use QR.

    Args:
        make: A function that returns a tree or a module. It may be jitted; it must have no effects. An
            ``nnx.Rngs`` is built inside, or comes by ``args``: one that ``make`` captures cannot be
            used up while JAX is tracing.
        names: Names in any form that ``plan`` takes; by default those that the result itself carries.
        args: The arguments of ``make``: trees or modules. Their arrays are traced, anything else is
            passed as it is. They are not changed.
        check: Whether several processes compare their plans before any of them acts.
        **options: The options of ``plan``: ``mesh``, ``rules``, the policies, ``unnamed``, ``fill``,
            ``min_bytes``, ``memory_kind``, ``dtype``.

    Returns:
        What ``make`` returns, its arrays with the planned sharding.

    Raises:
        InitError: ``make`` has effects, or cannot be called as it is.
        AxisRulesError: Something does not fit; every failure of the tree is in the one error, and
            nothing was made.
        ProcessError: It failed on another process, or the plan there is another one.

    Example:
        >>> import axisrules as ar, jax
        >>> def make(key):
        ...     up, down = jax.random.split(key)
        ...     normal = jax.nn.initializers.lecun_normal()
        ...     return {"up": normal(up, (8, 32)), "down": normal(down, (32, 8))}
        >>> params = ar.init(make, {"up": "embed mlp", "down": "mlp embed"}, args=(jax.random.key(0),),
        ...                  mesh=ar.make_mesh("data=4,model=2"), rules={"embed": "data", "mlp": "model"})
        >>> tuple(params["up"].sharding.spec), params["up"].addressable_shards[0].data.shape
        (('data', 'model'), (2, 16))
    """
    traced: list[_traces.Traced] = []

    def planned() -> Plan:
        checked = make_options(**options)
        _check_call(make, args, checked.mesh)
        with _tracing_mesh():
            traced.append(_traces.trace(make, args))
        return make_plan(traced[0].tree, traced[0].flat, names, checked)

    plan = agree(attempt(planned), mesh=options.get("mesh"), check=check)
    with _tracing_mesh():
        made = _traces.make_arrays(plan, traced[0])
    arrays = [made.get(id(leaf), leaf) for leaf in plan.structure.pick(traced[0].flat.leaves)]
    mesh: Any = plan.mesh
    with jax.set_mesh(mesh):  # with another one active, JAX refuses devices in another order
        placed = place(plan, arrays)
    return plan.structure.fill(iter(placed))


def _check_call(make: Any, args: Any, mesh: Mesh | AbstractMesh) -> None:
    """Refuses what cannot be traced and made here."""
    if not callable(make):
        raise InitError(
            f"a {type(make).__qualname__} is not a function that makes a tree",
            fix="pass the function, as in axisrules.init(lambda: Model(...)); "
            "for arrays that exist there is axisrules.shard_tree.",
        )
    if not isinstance(args, tuple):
        raise InitError(
            f"args is a {type(args).__qualname__}, not a tuple", fix="write args=(key,) with the comma."
        )
    if _compat.in_trace():
        raise InitError(
            "arrays cannot be born on their shards while JAX is tracing",
            fix="call axisrules.init outside of jit, or lay the values out with axisrules.constrain.",
        )
    need_devices(mesh, "make arrays on", "sizes alone suffice for axisrules.plan of jax.eval_shape(make).")


@contextmanager
def _tracing_mesh() -> Iterator[None]:
    """The active mesh, unless it has Explicit axes: then none.

    On Explicit axes every value has a layout of its own, whole unless said otherwise, so that each
    device would make the whole array.
    """
    active = active_mesh()
    if active is None or AxisType.Explicit not in active.axis_types:
        yield
        return
    with jax.set_mesh(Mesh(np.asarray(jax.local_devices()[0], dtype=object), ())):
        yield
