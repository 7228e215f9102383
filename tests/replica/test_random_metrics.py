"""Random metrics, fed where users feed them: R replicas log what Keras logs of the whole batch, or there is a word about it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers, ops

from sizes import BATCH, ROWS, mostly_slow, slow
from trainings import assert_close_logs, fitting, on, rows, run

X = rows(ROWS, 4)
Y = (rows(ROWS, 2, seed=1) > 0.8).astype("float32")
"""Rows without a positive, and whole shards of them."""

OF_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "squares": lambda y, p: ops.sum(ops.square(y - p), axis=-1),
    "hits": lambda y, p: ops.cast(ops.argmax(y, axis=-1) == ops.argmax(p, axis=-1), "float32"),
    "positives": lambda y, p: ops.sum(y, axis=-1),
    "rare": lambda y, p: ops.cast(p[:, 0] > 0.6, "float32"),
}
MERGED: dict[str, Callable[[Any], Any]] = {
    "sum": ops.sum,
    "half the sum": lambda v: ops.sum(v) / 2,
    "mean": ops.mean,
    "largest": ops.max,
    "root of the sum": lambda v: ops.sqrt(ops.sum(v)),
    "sum over the largest": lambda v: ops.sum(v) / (1 + ops.max(v)),
    "deviation": lambda v: ops.sum(ops.square(v - ops.mean(v))),
}
INTO: dict[str, Callable[[Any, Any], Any]] = {
    "added": lambda old, new: old + new,
    "subtracted": lambda old, new: old - new,
    "largest": ops.maximum,
    "smoothed": lambda old, new: 0.9 * old + 0.1 * new,
    "last": lambda old, new: new,
    "capped": lambda old, new: ops.minimum(old + new, 20.0),
}
COUNTED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda v: 0.0,
    "rows": lambda v: ops.sum(ops.ones_like(v)),
    "batches": lambda v: 1.0,
    "values": lambda v: ops.sum(ops.cast(v > 0, "float32")),
    "pairs": lambda v: ops.square(ops.sum(ops.ones_like(v))) - ops.sum(ops.ones_like(v)),
}


class Program(NamedTuple):
    """What a metric adds to its state, and where it is fed."""

    of_rows: str
    merged: str
    into: str
    counted: str
    where: str

    @property
    def is_right(self) -> bool:
        """Whether its state is a sum over rows, which nothing may refuse."""
        return self.merged in ("sum", "half the sum") and self.into in ("added", "subtracted") and self.counted in SUMS_OF_ROWS


SUMS_OF_ROWS = ("nothing", "rows", "values")


class Own(keras.metrics.Metric):
    def __init__(self, program: Program) -> None:
        super().__init__(name="own")
        self.program = program
        self.value = self.add_variable((), "zeros", name="value")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = OF_ROWS[self.program.of_rows](ops.cast(y_true, "float32"), y_pred)
        self.value.assign(INTO[self.program.into](self.value, MERGED[self.program.merged](values)))
        self.count.assign(self.count + COUNTED[self.program.counted](values))

    def result(self) -> Any:
        return self.value / ops.maximum(self.count, 1.0)


def parts() -> list[Any]:
    return [layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2, "sigmoid")]


def by_compile(program: Program) -> Any:
    model = keras.Sequential(parts())
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[Own(program)])
    return model


class Feeds(keras.Sequential):
    """Feeds a metric of its own where the loss is made."""

    own: Any = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.own.update_state(y, y_pred)
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def by_compute_loss(program: Program) -> Any:
    model = Feeds(parts())
    model.own = Own(program)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Computes(keras.Sequential):
    """Feeds a metric of its own where metrics are computed."""

    own: Any = None

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.own.update_state(y, y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"own": self.own.result()}


def by_compute_metrics(program: Program) -> Any:
    model = Computes(parts())
    model.own = Own(program)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


WHERE = {f.__name__: f for f in (by_compile, by_compute_loss, by_compute_metrics)}
PROGRAMS = [Program(*parts) for parts in itertools.product(OF_ROWS, MERGED, INTO, COUNTED, WHERE)]


def check(program: Program) -> None:
    make, fit = lambda: WHERE[program.where](program), fitting(X, Y, batch_size=BATCH, epochs=2)
    ours: dict[str, Any] = {}
    error = None
    try:
        ours = run(make, fit, on(1, 4)).logs
    except ValueError as refused:
        error = str(refused)
    if program.is_right:
        assert error is None
    if error is None:
        assert_close_logs(ours, run(make, fit).logs)
    else:
        assert "The metric 'own'" in error
        assert "cannot be merged over replicas" in error


@pytest.mark.parametrize(
    ("program", "where"),
    mostly_slow(
        itertools.product([("squares", "sum", "added", "rows"), ("rare", "root of the sum", "added", "nothing")], WHERE),
        (("squares", "sum", "added", "rows"), "by_compile"),
        (("rare", "root of the sum", "added", "nothing"), "by_compute_loss"),
    ),
)
def test_sums_and_what_looks_like_one(program, where):
    check(Program(*program, where))


@pytest.mark.slow
@given(st.sampled_from(PROGRAMS))
def test_random_metrics(program):
    check(program)


class Number(NamedTuple):
    """One number for all rows, which becomes a metric by a function, a mean, a sum or a log."""

    of_rows: str
    merged: str
    where: str
    begins_with: str = "rows"
    """Or with zeros: those of the first batch."""

    @property
    def is_right(self) -> bool:
        return self.merged in ("sum", "half the sum", "mean")

    def __call__(self, y: Any, p: Any) -> Any:
        return MERGED[self.merged](OF_ROWS[self.of_rows](ops.cast(y, "float32"), p))


def by_function_of_all(number: Number) -> Any:
    model = keras.Sequential(parts())
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[lambda y, p: number(y, p)])
    return model


class FeedsNumbers(keras.Sequential):
    """Feeds a mean or a sum with one number where the loss is made."""

    own: Any = None
    number: Any = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.own.update_state(self.number(y, y_pred))
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


class LogsNumbers(keras.Sequential):
    """Has a number among its logs."""

    number: Any = None

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"own": self.number(y, y_pred)}


def compiled_with(kind: Any, number: Number, own: Any = None) -> Any:
    model = kind(parts())
    model.number = number
    if own is not None:
        model.own = own
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


AS_NUMBER: dict[str, Callable[[Number], Any]] = {
    "function": by_function_of_all,
    "mean": lambda number: compiled_with(FeedsNumbers, number, keras.metrics.Mean(name="own")),
    "sum": lambda number: compiled_with(FeedsNumbers, number, keras.metrics.Sum(name="own")),
    "log": lambda number: compiled_with(LogsNumbers, number),
}
NUMBERS = [Number(*parts) for parts in itertools.product(OF_ROWS, MERGED, AS_NUMBER, ("rows", "zeros"))]


def check_number(number: Number) -> None:
    x, y = X.copy(), Y.copy()
    if number.begins_with == "zeros":
        x[:BATCH], y[:BATCH] = 0, 0
    make, fit = lambda: AS_NUMBER[number.where](number), fitting(x, y, batch_size=BATCH, epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = run(make, fit, on(1, 4)).logs
    said = [str(warning.message) for warning in caught if "replicas=1" in str(warning.message)]
    if number.is_right:
        assert said == []
    if not said:
        assert_close_logs(ours, run(make, fit).logs)


@pytest.mark.parametrize(
    "number",
    [
        Number("squares", "largest", "function"),
        Number("positives", "sum", "mean", "zeros"),
        Number("squares", "deviation", "log"),
        *slow(
            Number("hits", "sum over the largest", "function"),
            Number("squares", "sum", "function", "zeros"),
            Number("squares", "root of the sum", "sum"),
            Number("squares", "sum", "log"),
        ),
    ],
    ids=lambda number: f"{number.merged}, {number.where}, {number.begins_with}",
)
def test_numbers_for_all_rows(number):
    check_number(number)


@pytest.mark.slow
@given(st.sampled_from(NUMBERS))
def test_random_numbers(number):
    check_number(number)
