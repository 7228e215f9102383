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
from sizes import mostly_slow
from trainings import distance, fitting, on, rows, run

X, Y = rows(41, 4), rows(41, 2, seed=1)
BATCH = 16
"""Of 41 rows: four replicas have four rows each, or three and two."""
TOLERANCE = 1e-5

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
MERGED = {"mean": ops.mean, "sum": lambda v: ops.sum(v) / 10, "three means": lambda v: 3 * ops.mean(v)}
NEITHER = {
    "root of a mean": lambda v: ops.sqrt(ops.mean(ops.square(v)) + 0.1),
    "logsumexp": lambda v: ops.logsumexp(v),
    "largest": lambda v: ops.max(v),
    "a sum and a mean": lambda v: ops.sum(v) / 10 + ops.mean(v),
    "square of a mean": lambda v: ops.square(ops.mean(v)),
}


class Program(NamedTuple):
    """A loss, and where it is written."""

    of_rows: str
    between: str
    number: str
    where: str

    @property
    def is_right(self) -> bool:
        """Whether replicas' parts of it add up to that of the whole batch, so that nothing is to be said."""
        return self.between in APART and self.number in (*MERGED, "a value for each row")

    def __call__(self, y: Any, p: Any) -> Any:
        values = (APART | COUPLED)[self.between](OF_ROWS[self.of_rows](y, p))
        return values if self.number == "a value for each row" else (MERGED | NEITHER)[self.number](values)


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
    make, fit = lambda: WHERE[program.where](program), fitting(X[:32], Y[:32], batch_size=BATCH)
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
        for batch in self.strategy.distribute_dataset((X[:32], Y[:32]), batch_size=BATCH):
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


PROGRAMS = [
    Program(*parts) for parts in itertools.product(OF_ROWS, APART | COUPLED, ["a value for each row", *MERGED, *NEITHER], WHERE)
]


@pytest.mark.parametrize(
    ("number", "where"),
    mostly_slow(
        itertools.product(["three means", "root of a mean"], WHERE),
        ("three means", "by_function"),
        ("root of a mean", "by_compute_loss"),
        ("three means", "by_add_loss"),
        ("root of a mean", "by_train_step"),
    ),
)
def test_means_and_what_looks_like_one(number, where):
    check(Program("squares", "as it is", number, where))


@pytest.mark.parametrize(
    "program",
    [
        Program("squares", "tanh", "largest", "by_add_loss"),
        Program("distance", "tanh", "square of a mean", "by_function"),
        Program("likeness", "tanh", "logsumexp", "by_train_step"),
    ],
    ids=lambda program: program.where,
)
def test_saturated_values(program):
    """What is made of values that are almost the same is almost their mean."""
    check(program)


@pytest.mark.parametrize("where", ["by_function", "by_compute_loss"])
def test_rows_that_look_at_one_another(where):
    check(Program("distance", "centred", "a value for each row", where))


@pytest.mark.parametrize("between", ["as it is", "centred"])
def test_values_of_rows_in_a_loop(between):
    check_loop(Program("distance", between, "a value for each row", "by_function"))


@pytest.mark.slow
@given(st.sampled_from(PROGRAMS))
def test_random_losses(program):
    check(program)
    if program.where == "by_function":
        check_loop(program)
