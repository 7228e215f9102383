"""How losses that replica code makes by itself grow with the rows: which of them are means, whatever their form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

import unisono as un
from unisono._src.keras.checks.user_code.loss_growth import compare_traces, find_loss_parts
from unisono._src.keras.checks.user_code.provenance import Provenance
from unisono._src.keras.replica.variable_discovery import trace_user_function

R = 8


@pytest.fixture(scope="module")
def weight():
    return keras.Variable(np.linspace(0.1, 0.6, 6, dtype="float32"), name="w")


def parts(form, weight, size=R):
    """Return the parts of the loss that `form` makes of the weighted rows of a replica."""

    def code(batch, constants):
        return un.value_and_grad(lambda: form(batch[0] @ weight.value), [weight])[0]

    def trace_of(size):
        return Provenance(trace_user_function(code, [jax.ShapeDtypeStruct((size, 6), "float32")], [], R, []))

    sources = trace_of(size)
    return find_loss_parts(sources, compare_traces(sources, trace_of, size), size, R)


MEANS = {
    "a mean": ops.mean,
    "a dot": lambda v: jnp.dot(v, jnp.ones_like(v) / v.shape[0]),
    "a segment sum": lambda v: ops.segment_sum(v, ops.zeros(v.shape, "int32"), 1)[0] / v.shape[0],
    "a reshape": lambda v: ops.mean(ops.reshape(v, (2, -1))),
    "a weighted mean": lambda v: ops.average(v, weights=v + 1),
    "the root of a mean": lambda v: ops.sqrt(ops.mean(ops.square(v))),
    "the square of a mean": lambda v: ops.square(ops.mean(v)),
    "a maximum": ops.max,
    "a vector's": lambda v: ops.mean(ops.stack([v, v])),
    "half of one": lambda v: ops.mean(v) / 2,
    "in half precision": lambda v: ops.cast(ops.mean(ops.cast(v, "bfloat16")), "float32"),
    "with dropout": lambda v: ops.mean(keras.random.dropout(v, 0.1, seed=1)),
}


def divides(parts, by=R):
    """Return how each part grows, and whether it is divided by the number of replicas."""
    return [(part.growth, by in part.path.divisors) for part in parts]


@pytest.mark.parametrize("how", MEANS)
def test_a_mean_is_one_in_every_form(how, weight):
    """Also over eight rows in eight replicas, whose own divisor is not the one by R."""
    assert divides(parts(MEANS[how], weight)) == [(1, False)]
    assert divides(parts(lambda v: MEANS[how](v) / R, weight)) == [(1, True)]


SUMS = {
    "a sum": ops.sum,
    "over the global batch": lambda v: ops.sum(v) / 64,
    "a dot": lambda v: jnp.dot(v, jnp.ones_like(v)) / 64,
    "means times rows": lambda v: ops.mean(v) * v.shape[0],
    "weights of rows": lambda v: ops.sum(v * ops.square(v)) / 64,
    "with dropout": lambda v: ops.sum(keras.random.dropout(v, 0.1, seed=1)) / 64,
}


@pytest.mark.parametrize("how", SUMS)
def test_a_sum_is_one_in_every_form(how, weight):
    assert [part.growth for part in parts(SUMS[how], weight)] == [2]


def test_shares_of_the_global_mean_are_not_measured(weight):
    assert parts(lambda v: un.compute_average_loss(v) + un.scale_regularization_loss(ops.sum(weight.value)), weight) == []


def test_parts_of_a_loss_are_measured_one_by_one(weight):
    def form(v):
        return ops.sum(v) / 64 + 0.1 * ops.mean(ops.square(v)) / R + 0.01 * ops.sum(ops.square(weight.value)) - ops.logsumexp(v)

    found = [(part.growth, part.adds_up) for part in parts(form, weight)]
    assert found == [(2, True), (1, True), (1, True), (None, False), (1, False)]  # the last two of logsumexp


def test_what_a_loop_makes_of_a_mean_does_not_add_up(weight):
    """Its body may do anything, as square it."""
    (part,) = parts(lambda v: jax.lax.fori_loop(0, 2, lambda _, m: m * m, ops.mean(v)), weight)
    assert not part.adds_up


def test_what_cannot_run_on_more_rows_is_judged_by_its_form(weight):
    def fixed(v):
        return ops.mean(ops.reshape(v, (R,)))

    assert divides(parts(fixed, weight)) == [(1, False)]
    assert divides(parts(lambda v: fixed(v) / R, weight)) == [(1, True)]
    assert divides(parts(lambda v: ops.max(ops.reshape(v, (R,))), weight)) == [(None, False)]
