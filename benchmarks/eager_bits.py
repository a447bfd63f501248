"""How far ``init`` is from eager initialisation: ``python -m benchmarks.eager_bits``.

Prints, per initializer of JAX, the largest difference in units in the last place. ``init`` has the bits of
``jax.jit``; eager values may have others.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

import axisrules as ar

SHAPE = (64, 256)
MESHES = ("data=1", "data=2", "data=4,model=2")
PLAIN = ("normal", "truncated_normal", "uniform", "orthogonal")
SCALED = ("glorot", "he", "lecun")


def made_by():
    """The initializers by name."""
    found = {name: getattr(initializers, name)() for name in PLAIN}
    for family in SCALED:
        found |= {
            f"{family}_{kind}": getattr(initializers, f"{family}_{kind}")() for kind in ("normal", "uniform")
        }
    return found


def ulps(ours, theirs):
    """The largest distance in units in the last place, and how many elements differ."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    unit = np.spacing(np.abs(theirs).astype(np.float32)).astype(np.float64)
    apart = np.abs(ours - theirs) / unit
    return f"{apart.max():.0f} ({np.mean(apart > 0):.1%})"


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    print(f"| initializer, {SHAPE} | " + " | ".join(MESHES) + " |\n| --- | --- | --- | --- |")
    for name, initializer in made_by().items():
        cells = []
        for sizes in MESHES:
            made = ar.init(
                lambda initializer=initializer: initializer(jax.random.key(0), SHAPE, jnp.float32),
                "embed mlp", mesh=ar.make_mesh(sizes), rules={"embed": "data", "mlp": "model"}, absent="drop",
            )  # fmt: skip
            cells.append(ulps(made, initializer(jax.random.key(0), SHAPE, jnp.float32)))
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
