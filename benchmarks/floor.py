"""The least that a step could take: its operations over the rate of a product of large matrices on this machine.

python floor.py WORKLOAD SETTINGS-AS-JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import cores
import jax
import jax.numpy as jnp
from by_jax import make_training
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from timing import time_call

SIDE = 2048


def measure_rate() -> float:
    """Return the operations a second of the best of some products."""
    a = jnp.ones((SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    is_ready = cores.make_ready_check()
    return 2 * SIDE**3 / min(time_call(lambda: jax.block_until_ready(product(a, a)), is_ready) for _ in range(10))


def count_operations(program: ClosedJaxpr) -> float:
    """Return the operations of a program, with all rounds of its loops. JAX counts one round of each.

    >>> five = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]
    >>> round(count_operations(jax.make_jaxpr(five)(jnp.ones((8, 8)))) / (2 * 8**3))
    5
    """
    return count_once(program) + sum(
        rounds * count_operations(body) - count_once(body) for rounds, body in list_loops(program.jaxpr)
    )


def count_once(program: ClosedJaxpr) -> float:
    return jax.jit(jaxpr_as_fun(program)).lower(*program.in_avals).cost_analysis()["flops"]


def list_loops(program: Jaxpr) -> Iterator[tuple[int, ClosedJaxpr]]:
    """Return rounds and body of each loop that is not within another."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"], equation.params["jaxpr"]
        else:
            for inside in equation.params.values():
                if isinstance(inside, ClosedJaxpr):
                    yield from list_loops(inside.jaxpr)


def main() -> None:
    call, state, batches = make_training(sys.argv[1])
    print(json.dumps(count_operations(jax.make_jaxpr(call)(state, next(batches(0)))) / measure_rate()))


if __name__ == "__main__":
    main()
