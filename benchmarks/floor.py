"""The least that a step could take: its operations over the rate of a product of large matrices on this machine.

python floor.py WORKLOAD SETTINGS-AS-JSON
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
from by_jax import training

SIDE = 2048


def rate() -> float:
    """Operations a second: the best of some products."""
    a = jnp.ones((SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(product(a, a))
        times.append(time.perf_counter() - start)
    return 2 * SIDE**3 / min(times)


def main() -> None:
    call, state, batches = training(sys.argv[1])
    x, y = next(batches(0))
    operations = call.lower(state, (x, y)).cost_analysis()["flops"]
    print(json.dumps(operations / rate()))


if __name__ == "__main__":
    main()
