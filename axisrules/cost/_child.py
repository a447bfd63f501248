"""The process in which a step is compiled: ``python -m axisrules.cost._child order answer``.

Owns nothing but the order that it is given: a program that was lowered by another process. A
compiler that aborts takes this process along and no other. Imports jax alone.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from typing import Any


def main(order_path: str, answer_path: str) -> None:
    """Compiles the program of an order, and writes what the compiler says of it."""
    with open(order_path, "rb") as file:
        order = pickle.load(file)
    answer = _answer(order)
    with open(f"{answer_path}.part", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(f"{answer_path}.part", answer_path)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    import jax

    try:
        compiled = _compile(order)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error)}
    sizes = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    found = {name: getattr(sizes, f"{name}_size_in_bytes", None) for name in names}
    return {"text": compiled.as_text(), "memory": found}


def _compile(order: dict[str, Any]) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", order["x64"])
    axes = dict(order["mesh"])
    devices = _devices(order)
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, dtype, spec in order["arguments"]
    ]
    program = jax.jit(order["program"].call, donate_argnums=order["donated"])
    return program.lower(*arguments).compile(compiler_options=order["options"])


def _devices(order: dict[str, Any]) -> Any:
    import jax
    import numpy as np

    count = 1
    for _, size in order["mesh"]:
        count *= size
    if order["topology"] is None:
        jax.config.update("jax_num_cpu_devices", count)
        return np.array(jax.devices("cpu")[:count])
    from jax.experimental import topologies

    described = topologies.get_topology_desc(
        platform="tpu", topology_name=order["topology"], **order["topology_options"]
    )
    return np.array(described.devices[:count])


if __name__ == "__main__":
    main(*sys.argv[1:])
