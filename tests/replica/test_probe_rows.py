"""Rows that are made up to measure on: whatever arrays a batch holds, and whatever code compares them with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers, ops

from sizes import BATCH
from trainings import on, rows, run
from unisono._src.replica.drawn_values import draw_values_like
from unisono._src.replica.marks import can_hold, find_compared_values, mark_rows
from unisono._src.replica.probe_rows import make_up_rows

ODD = {
    "hashes": np.array([2**63 + 5, 3, 2**64 - 1, 7], "uint64"),
    "the largest whole number": np.array([0, 2**63 - 1], "int64"),
    "a sentinel": np.array([0.0, 1e20], "float32"),
    "nothing": np.array([np.nan, np.nan], "float32"),
    "something missing": np.array([np.nan, 1.5, 2.5, np.nan], "float32"),
    "bfloat16": np.array([0.5, 2.0], ml_dtypes.bfloat16),
    "large halves": np.array([1.5, 60000.0], "float16"),
    "bits": np.array([True, True]),
    "zeros": np.zeros((4, 2), "float32"),
    "no rows": np.zeros((0, 2), "float32"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", ODD)
def test_rows_are_drawn_in_the_place_of_any(what):
    """Finite ones, of the same dtype, and others than these wherever there was a number."""
    array = ODD[what]
    drawn = draw_values_like(np.random.default_rng(0), array)
    assert (drawn.shape, drawn.dtype) == (array.shape, array.dtype)
    if what not in ("nothing", "no rows"):
        assert np.all(np.isfinite(drawn.astype("float64")) | (array.dtype == "float16"))
        assert what == "bits" or np.any(drawn != array)


@given(
    st.sampled_from(sorted(ODD)),
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, -100.0, 1e30, float("nan"), float("inf")]), max_size=4),
)
def test_marks_are_put_where_they_fit(what, numbers):
    array = ODD[what]
    for (made,) in mark_rows(np.random.default_rng(0), [array], {0: set(numbers)}):
        assert (made.shape, made.dtype) == (array.shape, array.dtype)


def test_every_process_puts_the_same_marks():
    """The place of a NaN among the numbers of a set differs from process to process."""
    compared = [{-1.0, 0.0, 1.0, 5.0, float("nan")} for _ in range(50)]
    made = {repr([*mark_rows(np.random.default_rng(0), [np.arange(8.0)], {0: numbers})]) for numbers in compared}
    assert len(made) == 1


def test_numbers_fit_into_what_can_hold_them():
    assert can_hold(-1.0, np.dtype("int8"))
    assert not can_hold(-1.0, np.dtype("uint8"))
    assert not can_hold(300.0, np.dtype("int8"))
    assert not can_hold(float("nan"), np.dtype("int32"))
    assert can_hold(float("nan"), np.dtype("float16"))
    assert not can_hold(1e30, np.dtype("float16"))
    assert can_hold(0.5, np.dtype(ml_dtypes.bfloat16))


COMPARED = {
    "an equality": (lambda y: y == -1, {-1.0}),
    "an order": (lambda y: y[:, 0] > 0.5, {-0.5, 0.5, 1.5}),
    "a test for numbers": (jnp.isnan, {float("nan")}),
    "inside of a function": (jax.jit(lambda y: ops.cast(y, "float32") != -100), {-100.0}),
    "inside of a branch": (lambda y: jax.lax.cond(y[0, 0] == 3, lambda y: y == 4, lambda y: y != 5, y), {3.0, 4.0, 5.0}),
    "of what was computed": (lambda y: 2 * y == 4, set()),
}


@pytest.mark.parametrize("how", COMPARED)
def test_what_a_program_compares_its_rows_with(how):
    function, expected = COMPARED[how]
    found = find_compared_values(jax.make_jaxpr(function)(jnp.ones((3, 2))), [0]).get(0, set())
    np.testing.assert_array_equal(sorted(found), sorted(expected))


def test_made_up_batches_have_the_form_of_the_batch():
    batch = {"x": rows(4, 2), "y": (np.arange(4), None)}
    for made in make_up_rows(batch, {1: {-1.0}}):
        assert jax.tree.structure(made) == jax.tree.structure(batch)


class OfFour(keras.Sequential):
    """Has a step of its own, over batches of four arrays."""

    def train_step(self, state, data):
        weights, others, slots, tracked = state
        a, b, c, d = data

        def loss_of(weights):
            p, after = self.stateless_call(weights, others, a + b + c, training=True)
            return ops.sum(ops.square(p - d)), after

        (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": loss}, (weights, after, slots, tracked)


def test_a_step_of_the_models_own_may_have_batches_of_any_form():
    def batches():
        for start in range(0, 16, BATCH):
            yield tuple(rows(16, 2, seed=seed)[start : start + BATCH] for seed in range(4))

    def make():
        model = OfFour([layers.Input((2,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01))
        return model

    fit = lambda model: model.fit(batches(), verbose=0, shuffle=False, steps_per_epoch=16 // BATCH)
    plain, ours = run(make, fit), run(make, fit, on(1, 4))
    np.testing.assert_allclose(ours.model.get_weights()[0], plain.model.get_weights()[0], rtol=1e-5)
