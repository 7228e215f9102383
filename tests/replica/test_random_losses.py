"""Random losses, written where users write them: R replicas train what Keras trains on the whole batch, or there is a word about it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers, ops

import unisono as un
from sizes import mostly_slow, slow
from trainings import distance, fitting, on, rows, run

ROWS = 32
BATCH = 16
"""Four replicas have four rows each."""
TOLERANCE = 1e-5


def data(kind: str) -> tuple[Any, Any]:
    """Return two batches of rows, of which the first may tell nothing about what is done with the second."""
    x, y = rows(ROWS, 4), rows(ROWS, 2, seed=1)
    if kind == "zero at first":
        x[:BATCH], y[:BATCH] = 0, 0
    elif kind == "zero in two replicas":
        x[:8], y[:8] = 0, 0
    elif kind == "alike at first":
        x[:BATCH], y[:BATCH] = x[0], y[0]
    elif kind == "marked later":
        y[BATCH + 1 :: 3] = -1
    elif kind == "marked":
        y[1::3], y[:2] = -1, -1
    return x, y


DATA = ["drawn", "zero at first", "zero in two replicas", "alike at first", "marked later", "marked"]

OF_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "squares": lambda y, p: ops.sum(ops.square(y - p), axis=-1),
    "distance": lambda y, p: ops.sqrt(ops.sum(ops.square(y - p), axis=-1) + 1),
    "likeness": lambda y, p: -ops.sum(y * p, axis=-1),
    "soft": lambda y, p: ops.mean(ops.softplus(p - y), axis=-1),
}
APART = {"as it is": lambda v: v, "half": lambda v: v / 2, "tanh": ops.tanh}
COUPLED = {
    "by the largest": lambda v: v / (1 + ops.max(ops.abs(v))),
    "centred": lambda v: ops.square(v - ops.mean(v)),
    "ranked": lambda v: v * ops.cumsum(ops.ones_like(v)),
}


def counts(y: Any) -> Any:
    """Return 1 for rows that count, 0 for those that are marked."""
    return ops.cast(y[:, 0] != -1, "float32")


MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda v, y: ops.mean(v),
    "sum": lambda v, y: ops.sum(v) / 10,
    "three means": lambda v, y: 3 * ops.mean(v),
    "sum of what counts": lambda v, y: ops.sum(v * counts(y)) / 10,
    "what counts, over all": lambda v, y: ops.mean(v * counts(y)),
    "sum of excess": lambda v, y: ops.sum(ops.relu(v - 1)) / 10,
}
NEITHER: dict[str, Callable[[Any, Any], Any]] = {
    "root of a mean": lambda v, y: ops.sqrt(ops.mean(ops.square(v)) + 0.1),
    "logsumexp": lambda v, y: ops.logsumexp(v),
    "largest": lambda v, y: ops.max(v),
    "a sum and a mean": lambda v, y: ops.sum(v) / 10 + ops.mean(v),
    "square of a mean": lambda v, y: ops.square(ops.mean(v)),
    "mean of what counts": lambda v, y: ops.sum(v * counts(y)) / (ops.sum(counts(y)) + 1e-3),
    "weighted mean": lambda v, y: ops.sum(v * ops.exp(y[:, 1])) / ops.sum(ops.exp(y[:, 1])),
}


class Program(NamedTuple):
    """A loss, and where it is written."""

    of_rows: str
    between: str
    number: str
    where: str
    data: str = "drawn"

    @property
    def is_right(self) -> bool:
        """Whether replicas' parts of it add up to that of the whole batch, so that nothing is to be said."""
        return self.between in APART and self.number in (*MERGED, "a value for each row")

    def __call__(self, y: Any, p: Any) -> Any:
        values = (APART | COUPLED)[self.between](OF_ROWS[self.of_rows](y, p))
        return values if self.number == "a value for each row" else (MERGED | NEITHER)[self.number](values, y)


def compiled(loss: Any, kind: Any = keras.Sequential) -> Any:
    model = kind([layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def by_function(program: Program) -> Any:
    return compiled(lambda y, p: program(y, p))


def by_class(program: Program) -> Any:
    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return program(y_true, y_pred)

    return compiled(Own())


def by_call(program: Program) -> Any:
    class Own(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.mean(program(y_true, y_pred))

    return compiled(Own())


def by_compute_loss(program: Program) -> Any:
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(program(y, y_pred))

    return compiled(None, Own)


def by_add_loss(program: Program) -> Any:
    class Adds(layers.Layer):
        def call(self, p):
            self.add_loss(ops.mean(program(p[:, ::-1], p)))
            return p

    return compiled("mse", lambda parts: keras.Sequential([*parts, Adds()]))


def by_train_step(program: Program) -> Any:
    class Own(keras.Sequential):
        def train_step(self, state, data):
            weights, others, slots, tracked = state
            x, y = data

            def loss_of(weights):
                p, after = self.stateless_call(weights, others, x, training=True)
                return ops.mean(program(y, p)), after

            (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
            weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
            return {"loss": loss}, (weights, after, slots, tracked)

    return compiled(None, Own)


WHERE = {f.__name__: f for f in (by_function, by_class, by_call, by_compute_loss, by_add_loss, by_train_step)}


def check(program: Program) -> None:
    make, fit = lambda: WHERE[program.where](program), fitting(*data(program.data), batch_size=BATCH)
    plain = run(make, fit).model
    ours, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ours = run(make, fit, on(1, 4)).model
        except ValueError as refused:
            error = refused
    words = [str(warning.message) for warning in caught] + ([str(error)] if error else [])
    said = [word for word in words if "replicas=1" in word]
    assert error is None or said, error
    if program.is_right:
        assert said == []
    assert said or distance(ours, plain) < TOLERANCE, f"off by {distance(ours, plain):.1e}, and nothing was said"


class Loop:
    """A loop whose replica code returns the loss of a row for each, or one number."""

    def __init__(self, program: Program, strategy: Any) -> None:
        keras.utils.set_random_seed(0)
        self.strategy, self.program = strategy, program
        with strategy.scope():
            self.model = by_function(program)
            self.model.build((None, 4))
            self.optimizer = keras.optimizers.SGD(0.01)

    def step(self, batch: Any) -> None:
        x, y = batch
        weights = self.model.trainable_variables
        _, gradients = un.value_and_grad(lambda: self.program(y, self.model(x, training=True)), weights)
        self.optimizer.apply(gradients, weights)

    def train(self) -> Any:
        for batch in self.strategy.distribute_dataset(data(self.program.data), batch_size=BATCH):
            self.strategy.run(self.step, args=(batch,))
        return self.model


def check_loop(program: Program) -> None:
    """A number is added up over replicas as it is, so that only sums are right."""
    is_right = program.is_right and program.number == "a value for each row"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = Loop(program, on(1, 4)).train()
    said = [str(warning.message) for warning in caught]
    if is_right:
        assert said == []
    assert said or distance(ours, Loop(program, on(1, 1)).train()) < TOLERANCE


NUMBERS = ["a value for each row", *MERGED, *NEITHER]
PROGRAMS = [Program(*parts) for parts in itertools.product(OF_ROWS, APART | COUPLED, NUMBERS, WHERE, DATA)]


@pytest.mark.parametrize(
    ("number", "where"),
    mostly_slow(
        itertools.product(["three means", "root of a mean"], WHERE),
        ("three means", "by_function"),
        ("root of a mean", "by_train_step"),
    ),
)
def test_means_and_what_looks_like_one(number, where):
    check(Program("squares", "as it is", number, where))


@pytest.mark.parametrize(
    "program",
    [
        Program("distance", "tanh", "square of a mean", "by_function"),
        *slow(
            Program("squares", "tanh", "largest", "by_add_loss"),
            Program("likeness", "tanh", "logsumexp", "by_train_step"),
        ),
    ],
    ids=lambda program: program.where,
)
def test_saturated_values(program):
    """What is made of values that are almost the same is almost their mean."""
    check(program)


@pytest.mark.parametrize("where", ["by_function", *slow("by_compute_loss")])
def test_rows_that_look_at_one_another(where):
    check(Program("distance", "centred", "a value for each row", where))


@pytest.mark.parametrize("between", ["as it is", "centred"])
def test_values_of_rows_in_a_loop(between):
    check_loop(Program("distance", between, "a value for each row", "by_function"))


@pytest.mark.parametrize(
    "program",
    [
        Program("squares", "as it is", "sum", "by_function", "zero at first"),
        Program("squares", "half", "mean of what counts", "by_function", "marked later"),
        Program("soft", "as it is", "root of a mean", "by_compute_loss", "alike at first"),
        *slow(
            Program("likeness", "as it is", "sum", "by_train_step", "zero at first"),
            Program("squares", "as it is", "sum of excess", "by_add_loss", "zero in two replicas"),
            Program("distance", "as it is", "mean of what counts", "by_compute_loss", "marked"),
            Program("squares", "as it is", "mean of what counts", "by_train_step", "marked later"),
            Program("soft", "as it is", "weighted mean", "by_call", "alike at first"),
            Program("squares", "as it is", "sum of what counts", "by_class", "marked"),
        ),
    ],
    ids=lambda program: f"{program.number}, {program.data}, {program.where}",
)
def test_a_first_batch_that_tells_nothing(program):
    """Zeros are a sum and a mean, a mean over marked rows is one over all where none is marked, equal rows are their root mean square."""
    check(program)


@pytest.mark.parametrize("number", ["weighted mean", *slow("largest", "sum")])
def test_zeros_tell_a_loop_nothing(number):
    check_loop(Program("likeness", "half", number, "by_function", "zero at first"))


@pytest.mark.slow
@given(st.sampled_from(PROGRAMS))
def test_random_losses(program):
    check(program)
    if program.where == "by_function":
        check_loop(program)
