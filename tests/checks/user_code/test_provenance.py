"""What numbers of a program are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keras import ops

from unisono._src.checks.user_code.provenance import Provenance, RowSum

ROWS = jax.ShapeDtypeStruct((6, 2), np.float32)


def sources_of(function, *arguments):
    program = jax.make_jaxpr(function)(*arguments)
    return Provenance(program, 1), program.jaxpr.outvars


@pytest.mark.parametrize(
    ("loss", "means"),
    [
        (lambda x: ops.mean(x), [RowSum(12, (12,), ())]),
        (lambda x: ops.mean(x) / 4, [RowSum(12, (4, 12), ())]),
        (lambda x: ops.sum(x) / 8 + 3 * ops.sum(x * x), [RowSum(12, (8,), ()), RowSum(12, (), (1 / 3,))]),
        (lambda x: ops.sum(x / 8.0), [RowSum(12, (8,), ())]),
        (lambda x: -ops.cast(ops.sum(ops.cast(x, "float16")), "float32") * (1 / 16), [RowSum(12, (), (16,))]),
        (lambda x: jax.jit(lambda x: jnp.sum(x) / 6)(x), [RowSum(12, (6,), ())]),
        (lambda x: ops.sum(x), [RowSum(12, (), ())]),
        (lambda x: ops.sum(jnp.ones((6, 2))) / 6 + x[0, 0], []),
        (lambda x: ops.max(x) / 6, []),
        (lambda x: ops.sum(ops.mean(x, axis=-1)) / 8, [RowSum(6, (8,), ())]),
        (lambda x: ops.sum(x, axis=-1)[0] / 6, []),
    ],
)
def test_means(loss, means):
    sources, (of_loss,) = sources_of(loss, ROWS)
    found = [RowSum(m.elements, m.divisors, tuple(np.round(m.factors, 6).tolist())) for m in sources.means(of_loss)]
    assert found == [RowSum(m.elements, m.divisors, tuple(np.round(m.factors, 6).tolist())) for m in means]


def test_what_a_number_is_a_sum_of():
    def numbers(x):
        share = ops.sum(x) / 8
        return share, share, ops.cast(share + 1, "float16"), share * 2, x[0, 0], ops.stack([share / 3, x[0, 0]])

    sources, (share, *others) = sources_of(numbers, ROWS)
    assert [sources.can_reach(other, [share]) for other in others] == [True, True, False, False, True]
