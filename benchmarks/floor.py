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
from by_jax import training
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from timing import timed

SIDE = 2048


def rate() -> float:
    """Return the operations a second of the best of some products."""
    a = jnp.ones((SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    is_ready = cores.patient()
    return 2 * SIDE**3 / min(timed(lambda: jax.block_until_ready(product(a, a)), is_ready) for _ in range(10))


def operations(program: ClosedJaxpr) -> float:
    """Of all rounds of its loops; JAX' own count knows one round of each.

    >>> five = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]
    >>> round(operations(jax.make_jaxpr(five)(jnp.ones((8, 8)))) / (2 * 8**3))
    5
    """
    return counted(program) + sum(rounds * operations(body) - counted(body) for rounds, body in loops(program.jaxpr))


def counted(program: ClosedJaxpr) -> float:
    return jax.jit(jaxpr_as_fun(program)).lower(*program.in_avals).cost_analysis()["flops"]


def loops(program: Jaxpr) -> Iterator[tuple[int, ClosedJaxpr]]:
    """(rounds, body) of those that are not within another."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"], equation.params["jaxpr"]
        else:
            for inside in equation.params.values():
                if isinstance(inside, ClosedJaxpr):
                    yield from loops(inside.jaxpr)


def main() -> None:
    call, state, batches = training(sys.argv[1])
    print(json.dumps(operations(jax.make_jaxpr(call)(state, next(batches(0)))) / rate()))


if __name__ == "__main__":
    main()
