"""Variables of one's own that hold the data, and numbers that NumPy draws, are the same on every replica: replica code must not train on them."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from sizes import mostly_slow, slow
from trainings import labels, rows

X, Y = rows(64, 5), labels(64, 3)
BATCH = 32


def things(replicas: int = 4) -> Any:
    """What the code below uses: a model with moving statistics, and variables of one's own."""
    strategy = un.OneDeviceStrategy(replicas=replicas)
    with strategy.scope():
        made = {
            "model": keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(3)]),
            "embedding": keras.Sequential([layers.Embedding(64, 3)]),
            "projection": layers.Dense(3),
            "optimizer": keras.optimizers.SGD(0.1),
            "accuracy": keras.metrics.SparseCategoricalAccuracy(),
            "seeds": keras.random.SeedGenerator(0),
            "x": keras.Variable(X, trainable=False, name="x"),
            "y": keras.Variable(Y, trainable=False, dtype="int32", name="y"),
            "ids": keras.Variable(np.arange(64)[::-1], trainable=False, dtype="int32", name="ids"),
            "weights_of_classes": keras.Variable([1.0, 2.0, 3.0], trainable=False),
            "mean": keras.Variable(X.mean(0), trainable=False),
            "table": keras.Variable(rows(64, 5, seed=3), trainable=False),
            "prompt": keras.Variable(rows(8, 5, seed=4), trainable=False),
            "center": keras.Variable(rows(5), trainable=False, aggregation="mean"),
            "trained": keras.Variable(rows(8, 3, seed=5)),
        }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    return types.SimpleNamespace(strategy=strategy, loss=loss, **made)


Losses = Callable[[Any, Any, Any], Any]
"""Of the things, and the features and labels of a replica's rows: what `value_and_grad` differentiates."""


def run(losses: Losses, replicas: int = 4, apply: bool = True) -> Any:
    t = things(replicas)

    def step(batch: Any) -> Any:
        weights = t.model.trainable_variables
        value, gradients = un.value_and_grad(lambda: losses(t, *batch), weights)
        if apply:
            t.optimizer.apply(gradients, weights)
        return value

    (batch, *_) = t.strategy.distribute_dataset((X, Y), batch_size=BATCH)
    return t.strategy.run(step, args=(batch,))


SAME_ROWS: dict[str, tuple[str, Losses]] = {
    "features, of which some are taken": ("x", lambda t, x, y: t.loss(y, t.model(t.x[:8]))),
    "as many features as there are rows": ("x", lambda t, x, y: t.loss(y, t.model(t.x[: len(x)]))),
    "features that are gathered": ("x", lambda t, x, y: t.loss(y, t.model(ops.take(t.x, np.arange(8), axis=0)))),
    "features that are changed": ("x", lambda t, x, y: t.loss(y, t.model(2 * t.x[8:16] + 1))),
    "features beside those of the rows": ("x", lambda t, x, y: t.loss(y, t.model(x + t.x[: len(x)]))),
    "labels": ("y", lambda t, x, y: t.loss(t.y[:8], t.model(x))),
    "labels of a loss by hand": ("y", lambda t, x, y: ops.sum(ops.square(ops.one_hot(t.y[: len(x)], 3) - t.model(x)))),
    "features and labels": ("x", lambda t, x, y: t.loss(t.y[:8], t.model(t.x[:8]))),
    "features and labels of a loss by hand": (
        "x", lambda t, x, y: ops.mean(ops.square(ops.one_hot(t.y[:8], 3) - t.model(t.x[:8])))
    ),
    "all features and labels": ("x", lambda t, x, y: t.loss(t.y, t.model(t.x))),
    "numbers of words": ("ids", lambda t, x, y: t.loss(y, t.model(x) + t.embedding(t.ids[:8]))),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME_ROWS)
@pytest.mark.parametrize("apply", [True, *slow(False)], ids=["applied", "returned"])
def test_a_variable_in_place_of_rows_is_refused(case: str, apply: bool):
    name, losses = SAME_ROWS[case]
    message = rf"reaches replica code as the variable '{name}' and is not distributed.*distribute_dataset.*un\.replicate"
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        run(losses, apply=apply)


SECOND_RUN: dict[str, tuple[bool, Any]] = {
    "a matrix": (False, lambda t, x, y, first: t.loss(y, t.model(x) + x @ ops.transpose(t.prompt) @ t.trained + first)),
    "another matrix": (False, lambda t, x, y, first: t.loss(y, t.model(x) + first + ops.matmul(first, t.square))),
    "features": (True, lambda t, x, y, first: t.loss(y, t.model(t.x[: len(x)]) + first)),
    "labels of a product": (True, lambda t, x, y, first: ops.dot(ops.cast(t.y[: len(x)], "float32"), ops.sum(first * t.model(x), axis=1))),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of means, which are another subject
@pytest.mark.parametrize("case", mostly_slow(SECOND_RUN, "a matrix", "features", "labels of a product"))
def test_code_that_gets_values_of_an_earlier_run_is_looked_at_too(case: str):
    """It cannot be tried on more rows: matrices of as many rows as a replica pass by how they are used."""
    is_refused, losses = SECOND_RUN[case]
    t = things()
    with t.strategy.scope():
        t.square = keras.Variable(rows(8, 8)[:3, :3], trainable=False)

    def second(batch: Any, first: Any) -> Any:
        return un.value_and_grad(lambda: losses(t, *batch, first), t.model.trainable_variables)

    (batch, *_) = t.strategy.distribute_dataset((X, Y), batch_size=BATCH)
    first = t.strategy.run(lambda batch: t.model(batch[0]), args=(batch,))
    with pytest.raises(ValueError, match="as the variable") if is_refused else contextlib.nullcontext():
        t.strategy.run(second, args=(batch, first))


def test_one_replica_may_have_its_variables_where_it_wants():
    run(lambda t, x, y: t.loss(t.y[: len(x)], t.model(t.x[: len(x)])), replicas=1)


@pytest.mark.parametrize("with_rows", [True, False])
def test_evaluation_on_a_variable_is_refused(with_rows: bool):
    t = things()

    def evaluate(*_: Any) -> None:
        t.accuracy.update_state(t.y[:8], t.model(t.x[:8]))

    (batch, *_) = t.strategy.distribute_dataset((X, Y), batch_size=BATCH)
    with pytest.raises(ValueError, match="as the variable 'x' and is not distributed"):
        t.strategy.run(evaluate, args=(batch,) if with_rows else ())


def drawn_rows(t: Any, x: Any) -> Any:
    return keras.random.randint((len(x),), 0, 64, seed=t.seeds)


def drawn_steps(t: Any, x: Any, schedule: Any) -> Any:
    return ops.take(schedule, drawn_rows(t, x) % 3)[:, None]


def gathered(t: Any, indices: Any) -> Any:
    return t.loss(ops.take(t.y, indices, axis=0), t.model(ops.take(t.x, indices, axis=0)))


def distances(x: Any, prototypes: Any) -> Any:
    return ops.sum(ops.square(x[:, None] - prototypes[None]), axis=-1)


SCHEDULE, PROMPTS = np.linspace(0.1, 1, 3, dtype="float32"), rows(8, 5, seed=6)
FOR_ALL: dict[str, Losses] = {
    "weights of classes": lambda t, x, y: t.loss(y, t.model(x)) * ops.take(t.weights_of_classes, y),
    "weights of outputs": lambda t, x, y: t.loss(y, t.model(x) * t.weights_of_classes),
    "a mean": lambda t, x, y: t.loss(y, t.model(x - t.mean)),
    "the mean of the data": lambda t, x, y: t.loss(y, t.model((x - ops.mean(t.x, axis=0)) / ops.std(t.x, axis=0, keepdims=True))),
    "a table that rows look up": lambda t, x, y: t.loss(y, t.model(ops.take(t.table, y, axis=0))),
    "a table that a layer projects": lambda t, x, y: t.loss(
        y, t.model(x) + ops.mean(ops.matmul(t.model(x), ops.transpose(t.projection(t.table[:]))), axis=1, keepdims=True)
    ),
    "prototypes": lambda t, x, y: t.loss(y, t.model(x) + ops.min(distances(x, t.prompt), axis=1, keepdims=True)),
    "the nearest rows": lambda t, x, y: t.loss(y, t.model(ops.take(t.x, ops.argmin(distances(x, t.x), axis=1), axis=0))),
    "a matrix of as many rows as a replica": lambda t, x, y: t.loss(y, t.model(x) + x @ ops.transpose(t.prompt) @ t.trained),
    "rows that each replica draws": lambda t, x, y: gathered(t, drawn_rows(t, x)),
    "rows that the batch names": lambda t, x, y: gathered(t, y),
    "a schedule at steps that each replica draws": lambda t, x, y: t.loss(y, t.model(x * drawn_steps(t, x, t.weights_of_classes))),
    "the same in an array": lambda t, x, y: t.loss(y, t.model(x * drawn_steps(t, x, SCHEDULE))),
    "one row for all": lambda t, x, y: t.loss(y, t.model(x + ops.tile(t.x[:1], (len(x), 1)))),
    "one row of an array for all": lambda t, x, y: t.loss(y, t.model(x + ops.tile(ops.convert_to_tensor(PROMPTS)[:1], (len(x), 1)))),
    "a table for each row": lambda t, x, y: t.loss(y, t.model(x + ops.mean(ops.repeat(t.prompt[None], len(x), axis=0), axis=1))),
    "a penalty": lambda t, x, y: t.loss(y, t.model(x)) + 0.1 * ops.sum(ops.square(t.table - t.x)),
    "the same for each row": lambda t, x, y: t.loss(y, t.model(x + ops.broadcast_to(t.mean, ops.shape(x)))),
    "an embedding of as many positions": lambda t, x, y: t.loss(y, t.model(x) + ops.mean(t.embedding(t.ids[:8]), axis=0)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of means, which are another subject
@pytest.mark.parametrize(
    "case",
    mostly_slow(FOR_ALL, "weights of classes", "rows that each replica draws", "one row for all"),
)
def test_variables_that_are_for_all_pass(case: str):
    run(FOR_ALL[case])


def test_a_variable_that_the_code_moves_passes():
    def losses(t: Any, x: Any, y: Any) -> Any:
        target = ops.broadcast_to(t.center, ops.shape(x))
        t.center.assign(0.9 * t.center + 0.1 * ops.mean(x, axis=0))
        return keras.losses.MeanSquaredError(reduction=None)(target, x * ops.mean(t.model(x), axis=1, keepdims=True))

    run(losses)


def test_a_variable_of_which_the_user_says_that_it_is_for_all_passes():
    t = things()
    same = un.replicate(t.x)

    def drawn(batch: Any) -> Any:
        return t.model(same)

    (batch, *_) = t.strategy.distribute_dataset((X, Y), batch_size=BATCH)
    assert t.strategy.local_results(t.strategy.run(drawn, args=(batch,)))[0].shape == (64, 3)


GENERATOR = np.random.default_rng(0)
DRAWN: dict[str, Losses] = {
    "noise": lambda t, x, y: t.loss(y, t.model(x + np.random.normal(size=x.shape).astype("float32"))),
    "noise of a generator": lambda t, x, y: t.loss(y, t.model(x + GENERATOR.normal(size=x.shape).astype("float32"))),
    "a permutation": lambda t, x, y: t.loss(y, t.model(ops.take(x, np.random.permutation(len(x)), axis=0))),
    "weights": lambda t, x, y: (t.loss(y, t.model(x)), np.random.uniform(size=len(y)).astype("float32")),
    "as a tensor": lambda t, x, y: t.loss(y, t.model(x * ops.convert_to_tensor(np.random.rand(len(x), 1), "float32"))),
    "beside an array": lambda t, x, y: t.loss(y, t.model(x - X.mean(0) + np.random.rand(len(x), 1).astype("float32"))),
}  # fmt: skip


@pytest.mark.parametrize("case", DRAWN)
def test_numbers_that_numpy_draws_in_replica_code_are_refused(case: str):
    message = (
        r"makes an array of shape \(8.*as numpy.random does.*same on all 4 replicas and in every step.*SeedGenerator.*seed=seeds"
    )
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        run(DRAWN[case])


NOT_DRAWN: dict[str, Losses] = {
    "numbers that Keras draws": lambda t, x, y: t.loss(y, t.model(x + keras.random.normal(ops.shape(x), seed=t.seeds))),
    "positions": lambda t, x, y: t.loss(y, ops.take(t.model(x), np.arange(len(x)), axis=0)),
    "positions beside an array": lambda t, x, y: t.loss(y, ops.take(t.model(x - MEAN), np.arange(len(x)), axis=0)),
    "a mask of pairs": lambda t, x, y: t.loss(y, t.model(x)) + 0 * ops.sum((x @ ops.transpose(x)) * (1 - np.eye(len(x), dtype="float32"))),
    "a ramp": lambda t, x, y: t.loss(y, t.model(x)) * np.linspace(0, 1, len(x), dtype="float32"),
}  # fmt: skip
MEAN = X.mean(0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", mostly_slow(NOT_DRAWN, "numbers that Keras draws", "a mask of pairs"))
def test_arrays_that_are_the_same_in_every_trace_pass(case: str):
    run(NOT_DRAWN[case])


def test_one_replica_may_draw_by_numpy():
    run(DRAWN["noise"], replicas=1)
