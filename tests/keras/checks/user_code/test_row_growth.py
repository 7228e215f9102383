"""What replica code makes of a replica's rows together, before layers, in weights and in losses with axes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import keras
import pytest
from keras import layers, ops

import unisono as un
from sizes import mostly_slow, slow
from trainings import labels, on, rows

R = 4
X, Y = rows(32, 4), labels(32, 4)
COUPLED = r"'losses' makes of all rows together what is not made of their parts"
MEAN = r"'losses' differentiates a number that stays the same where a replica's rows are taken twice, as a mean over them does"
KEY = jax.random.key(3)

Losses = Callable[..., Any]
"""Of the parts below, and the features and labels of a replica's rows: what `value_and_grad` differentiates."""


class Parts:
    """A strategy, and what the code below uses."""

    def __init__(self, replicas: int = R) -> None:
        keras.utils.set_random_seed(0)
        self.strategy = on(1, replicas)
        with self.strategy.scope():
            self.model = keras.Sequential([keras.Input((4,)), layers.Dense(4, "tanh")])
            self.seeds = keras.random.SeedGenerator(0)
            self.prototypes = keras.Variable(rows(8, 4, seed=2))
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def compute(losses: Losses, replicas: int = R, batch_size: int = 32) -> None:
    """Run the losses on the rows of the first batch."""
    parts = Parts(replicas)

    def step(batch: Any, key: Any) -> Any:
        return un.value_and_grad(lambda: losses(parts, *batch, key), parts.model.trainable_variables)

    step.__name__ = "losses"
    (batch, *_) = parts.strategy.distribute_dataset((X, Y), batch_size=batch_size)
    parts.strategy.run(step, args=(batch, KEY))


def swap(x: Any) -> Any:
    return 0.7 * x + 0.3 * ops.flip(x, axis=0)


def share(values: Any) -> Any:
    return values / ops.sum(values)


def keep_above(losses: Any, bound: Any) -> Any:
    return losses * ops.cast(losses > bound, losses.dtype)


TOGETHER: dict[str, tuple[str, Losses]] = {
    "rows without their mean": (COUPLED, lambda p, x, y, key: p.loss(y, p.model(x - ops.mean(x, axis=0)))),
    "rows mixed with others": (COUPLED, lambda p, x, y, key: p.loss(y, p.model(swap(x)))),
    "predictions without their mean": (COUPLED, lambda p, x, y, key: p.loss(y, (z := p.model(x)) - ops.mean(z, axis=0))),
    "labels of the next row": (COUPLED, lambda p, x, y, key: p.loss(ops.roll(y, 1), p.model(x))),
    "weights that add up to one": (COUPLED, lambda p, x, y, key: (p.loss(y, p.model(x)), share(ops.exp(x[:, 0])))),
    "weights of an average": (
        COUPLED, lambda p, x, y, key: un.compute_average_loss(p.loss(y, p.model(x)), sample_weight=share(ops.exp(x[:, 0])))
    ),
    "losses above their mean": (COUPLED, lambda p, x, y, key: keep_above(each := p.loss(y, p.model(x)), ops.mean(each))),
    "losses above their median": (COUPLED, lambda p, x, y, key: keep_above(each := p.loss(y, p.model(x)), ops.median(each))),
    "means of features": (MEAN, lambda p, x, y, key: ops.mean(ops.square(p.model(x) - x), axis=0)),
    "a mean with its axis": (MEAN, lambda p, x, y, key: ops.mean(p.loss(y, p.model(x)), keepdims=True)),
}  # fmt: skip


def of_replica(key: Any) -> Any:
    return jax.random.fold_in(key, un.get_replica_context().replica_id_in_sync_group)


ALONE: dict[str, Losses] = {
    "rows that are scaled": lambda p, x, y, key: p.loss(y, p.model(x / 255 - 0.5)),
    "rows without their own mean": lambda p, x, y, key: p.loss(y, p.model(x - ops.mean(x, axis=1, keepdims=True))),
    "parts of rows": lambda p, x, y, key: ops.mean(
        ops.square(p.model(ops.reshape(ops.concatenate([x, x], 1), (-1, 4)))), axis=1
    ),
    "two views": lambda p, x, y, key: ops.mean(ops.square(p.model(ops.concatenate([x, 2 * x]))), axis=1),
    "a view beside noise": lambda p, x, y, key: p.loss(y, p.model(x + keras.random.normal(x.shape, seed=p.seeds))),
    "rows beside prototypes": lambda p, x, y, key: p.loss(y, p.model(x) @ ops.transpose(p.model(p.prototypes))),
    "weights of rows": lambda p, x, y, key: (p.loss(y, p.model(x)), ops.cast(y > 0, "float32")),
    "weights of classes": lambda p, x, y, key: (ops.square(p.model(x)), ops.ones_like(x)),
    "time before rows": lambda p, x, y, key: ops.transpose(ops.square(p.model(x))),
    "sums of features": lambda p, x, y, key: ops.sum(ops.square(p.model(x) - x), axis=0) / 32,
    "a stack of sums": lambda p, x, y, key: ops.stack([k * ops.sum(p.loss(y, p.model(x))) for k in (0.4, 0.3, 0.2, 0.1)]),
    "a sum with its axis": lambda p, x, y, key: ops.sum(p.loss(y, p.model(x)), keepdims=True) * (1 / 32),
    "a number": lambda p, x, y, key: ops.mean(ops.sum(ops.square(p.model(x) - x), axis=0)),
    "the mean of a vector": lambda p, x, y, key: ops.mean(ops.square(p.model(x)), axis=1),
    "a fixed seed": lambda p, x, y, key: p.loss(y, p.model(x + keras.random.normal(x.shape, seed=1))),
    "a key that is an argument": lambda p, x, y, key: p.loss(y, p.model(x + jax.random.normal(key, x.shape))),
    "noise of a generator": lambda p, x, y, key: p.loss(y, p.model(x) * keras.random.uniform(x.shape, seed=p.seeds)),
    "noise of the replica": lambda p, x, y, key: p.loss(y, p.model(x) * jax.random.uniform(of_replica(key), x.shape)),
    "a fixed projection": lambda p, x, y, key: p.loss(y, p.model(x @ jax.random.normal(KEY, (4, 4)))),
    "a projection as long as the rows": lambda p, x, y, key: p.loss(
        y, p.model(ops.concatenate([x, x], axis=1) @ jax.random.normal(KEY, (8, 4)))
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        TOGETHER,
        "rows without their mean",
        "labels of the next row",
        "weights that add up to one",
        "losses above their median",
        "means of features",
    ),
)
def test_what_is_made_of_a_replicas_rows_together_is_said(case: str):
    said, losses = TOGETHER[case]
    with pytest.warns(UserWarning, match=said) as caught:
        compute(losses)
    assert len(caught) == 1


@pytest.mark.parametrize("case", mostly_slow(ALONE, "two views", "weights of rows"))
def test_what_is_made_of_each_row_is_not(case: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(ALONE[case])


@pytest.mark.parametrize("case", ["rows without their mean", *slow("means of features")])
def test_one_replica_has_all_rows(case: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(TOGETHER[case][1], replicas=1)


def test_an_average_of_what_has_no_rows_is_refused():
    with pytest.raises(
        ValueError, match=r"received an array whose shape \(4,\) is the same for any number of rows; it needs one"
    ):
        compute(lambda p, x, y, key: un.compute_average_loss(ops.sum(ops.square(p.model(x) - x), axis=0)))


@pytest.mark.parametrize("batch_size", [32, 4])
def test_a_mean_over_all_rows_is_divided_once(batch_size: int):
    """In one of the cases there are as many rows as values of the mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(TOGETHER["means of features"][1], replicas=1, batch_size=batch_size)


def test_one_replica_that_divides_by_its_rows_divides_twice():
    with pytest.warns(UserWarning, match="divides the loss of each example by 32, and the engine divides"):
        compute(lambda p, x, y, key: p.loss(y, p.model(x)) / 32, replicas=1)


@pytest.mark.parametrize("case", ["rows mixed with others", *slow("rows without their mean", "losses above their median")])
def test_replicas_of_one_row_are_tried_on_two(case: str):
    with pytest.warns(UserWarning, match=COUPLED):
        compute(TOGETHER[case][1], batch_size=R)
