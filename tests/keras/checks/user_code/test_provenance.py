"""What numbers of a program are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keras import ops

from unisono._src.keras.checks.user_code.provenance import Provenance
from unisono._src.keras.replica.trace_recorder import ReplicaCode, ReplicaScope
from unisono._src.keras.replica.variable_discovery import Trace

ROWS = jax.ShapeDtypeStruct((6, 2), np.float32)


def sources_of(function, *arguments):
    code = ReplicaCode(ReplicaScope(), jnp.int32(0), 1, jnp.float32(1), None)
    sources = Provenance(Trace(code, jax.make_jaxpr(function)(*arguments), 1))
    return sources, sources.program.jaxpr.outvars


@jax.custom_jvp
def unchanged(x):
    return x * 1.0


unchanged.defjvp(lambda primals, tangents: (unchanged(*primals), tangents[0]))


@pytest.mark.parametrize(
    ("loss", "sums"),
    [
        (lambda x: ops.mean(x), [(12, (12,), ())]),
        (lambda x: ops.mean(x) / 4, [(12, (4, 12), ())]),
        (lambda x: ops.sum(x) / 8 + 3 * ops.sum(x * x), [(12, (8,), ()), (12, (), (1 / 3,))]),
        (lambda x: ops.sum(x / 8.0), [(12, (8,), ())]),
        (lambda x: -ops.cast(ops.sum(ops.cast(x, "float16")), "float32") * (1 / 16), [(12, (), (16,))]),
        (lambda x: jax.jit(lambda x: jnp.sum(x) / 6)(x), [(12, (6,), ())]),
        (lambda x: jax.checkpoint(lambda x: jnp.sum(x) / 6)(x), [(12, (6,), ())]),
        (lambda x: unchanged(ops.sum(x)) / 6, [(12, (6,), (1,))]),
        (lambda x: ops.exp(ops.sum(jnp.ones(3))) * ops.sum(x) / 6, [(12, (6,), ())]),
        (lambda x: ops.sum(x), [(12, (), ())]),
        (lambda x: ops.sum(jnp.ones((6, 2))) / 6 + x[0, 0], []),
        (lambda x: ops.max(x) / 6, []),
        (lambda x: ops.sum(ops.mean(x, axis=-1)) / 8, [(6, (8,), ())]),
        (lambda x: ops.sum(x, axis=-1)[0] / 6, []),
    ],
)
def test_sums_over_rows(loss, sums):
    sources, (of_loss,) = sources_of(loss, ROWS)
    found = [(term.elements, *term.path) for term in sources.terms(of_loss) if term.elements]
    rounded = lambda of: [(elements, divisors, tuple(np.round(factors, 6).tolist())) for elements, divisors, factors in of]
    assert rounded(found) == rounded(sums)


def test_what_a_number_is_a_sum_of():
    def numbers(x):
        share = ops.sum(x) / 8
        return share, share, ops.cast(share + 1, "float16"), share * 2, x[0, 0], ops.stack([share / 3, x[0, 0]])

    sources, (share, *others) = sources_of(numbers, ROWS)
    assert [sources.can_reach(other, [share]) for other in others] == [True, True, False, False, True]
