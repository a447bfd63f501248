"""The memory of ``init``, in a process of its own: ``python -m benchmarks.peak_init MIB_PER_ARRAY ARRAYS``.

Prints the bytes of the result, of its largest array, and how many anonymous bytes there were at the
peak beyond those before.
"""

import gc
import json
import sys
import threading
import time

import jax

import axisrules as ar

NAMES = {"up": "embed mlp", "down": "mlp embed"}
RULES = {"embed": "data", "mlp": "model"}


def anonymous():
    """Bytes of this process that belong to no file."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def layers(count, width):
    def make():
        normal = jax.nn.initializers.truncated_normal(0.02)
        keys = jax.random.split(jax.random.key(0), count)
        return [
            {"up": normal(up, (width, 4 * width)), "down": normal(down, (4 * width, width))}
            for up, down in zip(keys[::2], keys[1::2], strict=True)
        ]

    return make, [NAMES] * (count // 2)


def main(mib, count):
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    mesh = ar.make_mesh("data=4,model=2")
    width = int((mib * 2**20 / 16) ** 0.5)
    jax.block_until_ready(ar.init(*layers(4, 64), mesh=mesh, rules=RULES))
    gc.collect()
    before = peak = anonymous()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = jax.tree.leaves(jax.block_until_ready(ar.init(*layers(count, width), mesh=mesh, rules=RULES)))
    done.set()
    watcher.join()
    sizes = [array.nbytes for array in made]
    print(json.dumps({"final": sum(sizes), "largest": max(sizes), "peak": peak - before}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
