"""Trainings by `fit` whose losses, states and metrics hypothesis draws: eight replicas train as plain Keras does on the whole batch.

A drawn program may be ill-conditioned. So plain Keras also trains on rows that are off by one rounding: where that alone moves the result, nothing is
compared. Optimizers that divide by gradients have a large epsilon, since they make steps of the rounding of gradients that are zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from drawn_programs import CLASSES, LOSSES, NUMBERS, WIDTH, compute_loss, compute_number
from own_steps import InTurn
from sizes import cases
from trainings import on
from whole_batch_families import Family, measure, train

STEADY, CLOSE = 5e-6, 2e-5

INTO = {
    "added": lambda old, new: old + new,
    "largest": jnp.maximum,
    "smoothed": lambda old, new: 0.9 * old + 0.1 * new,
    "last": lambda old, new: new,
}
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.01),
    "average": lambda: keras.optimizers.RMSprop(0.01, epsilon=0.01, clipnorm=1.0),
}
WHERE = ("by function", "by compute_loss", "by add_loss", "by train_step")


@dataclasses.dataclass(frozen=True)
class Program:
    where: str
    updates: Any
    """A list of losses for each optimizer; several of them in a train_step alone."""
    optimizers: Any
    state: Any = None
    """What a variable remembers of each batch, and whether the rows read it."""
    metrics: Any = ()


def split_labels(y: Any) -> tuple[Any, Any]:
    y = jnp.asarray(y)
    return y[:, 0].astype("int32"), y[:, 1] > 0


class Own(keras.metrics.Metric):
    def __init__(self, number: Any, into: str, name: str) -> None:
        super().__init__(name=name)
        self.number, self.into = number, into
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        new = compute_number(y_pred[:, 0], *split_labels(y_true), self.number)
        self.value.assign(INTO[self.into](jnp.asarray(self.value.value), new))

    def result(self) -> Any:
        return +self.value


class Net(keras.Model):
    """A number for each row, and a state that the forward pass assigns."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        shapes = (WIDTH, WIDTH), (WIDTH,)
        self.kernels = [
            self.add_weight(shape=shape, initializer=keras.initializers.RandomNormal(stddev=1.0, seed=seed))
            for seed, shape in enumerate(shapes)
        ]
        self.memory = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        values = jnp.tanh(x["rows"] @ self.kernels[0].value) @ self.kernels[1].value
        if self.program.state is not None:
            number, into, is_read = self.program.state
            self.memory.assign(
                INTO[into](jnp.asarray(self.memory.value), compute_number(values, *split_labels(x["labels"]), number))
            )
            values = values / (1 + self.memory.value**2) if is_read else values
        if self.program.where == "by add_loss":
            self.add_loss(compute_loss(values, *split_labels(x["labels"]), self.program.updates[0]))
        return values[:, None]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.program.where == "by compute_loss":
            return compute_loss(y_pred[:, 0], *split_labels(y), self.program.updates[0])
        return super().compute_loss(x, y, y_pred, sample_weight, training)


class NetInTurn(InTurn, Net):
    """Several updates of the same weights in a step."""

    def list_trained(self, turn: str) -> list[Any]:
        return self.trainable_variables

    def compute_turn(self, turn: str, data: Any) -> Any:
        x, y = data
        return compute_loss(self(x)[:, 0], *split_labels(y), self.program.updates[int(turn)])


def make_family(program: Program, data: Any) -> Family:
    make_optimizers = lambda: [OPTIMIZERS[name]() for name in program.optimizers]
    if program.where == "by train_step":
        turns = tuple(str(turn) for turn in range(len(program.updates)))
        kind = type("Turns", (NetInTurn,), {"turns": turns})
        return Family(lambda: kind(program), lambda: dict(zip(turns, make_optimizers(), strict=True)), data)
    losses = program.updates[0]
    loss = (lambda y, p: compute_loss(p[:, 0], *split_labels(y), losses)) if program.where == "by function" else None
    make_metrics = lambda: [Own(number, into, f"own{place}") for place, (number, into) in enumerate(program.metrics)]
    return Family(
        lambda: Net(program), lambda: {"optimizer": make_optimizers()[0], "loss": loss, "metrics": make_metrics()}, data
    )


def make_data(rows: int, seed: int, rounded: int = 0) -> Any:
    """Return rows and labels; where `rounded` is not 0, it is the seed of what moves each number by one rounding."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, WIDTH))
    labels = np.stack([rng.integers(0, CLASSES, rows), rng.random(rows) < 0.7], axis=1).astype("float32")
    labels[::3, 1] = 1  # some rows of each batch count
    if rounded:
        x *= 1 + 1.2e-7 * np.random.default_rng(rounded).choice([-1, 1], x.shape)
    return {"rows": x.astype("float32"), "labels": labels}, labels


STATES = st.none() | st.tuples(NUMBERS, st.sampled_from(sorted(INTO)), st.booleans())
METRICS = st.lists(st.tuples(NUMBERS, st.sampled_from(sorted(INTO))), max_size=2)


@st.composite
def programs(draw):
    where = draw(st.sampled_from(WHERE))
    count = draw(st.integers(1, 3)) if where == "by train_step" else 1
    updates = [draw(LOSSES) for _ in range(count)]
    optimizers = [draw(st.sampled_from(sorted(OPTIMIZERS))) for _ in range(count)]
    return Program(where, updates, optimizers, draw(STATES), [] if where == "by train_step" else draw(METRICS))


@st.composite
def sizes(draw):
    """(replicas, devices, rows of a batch, rows)"""
    replicas = draw(st.integers(2, 8))
    batch = draw(st.integers(replicas, 3 * replicas))
    return replicas, draw(st.integers(2, replicas)), batch, batch * 2 + draw(st.integers(2, batch))


def check(program: Program, sizes: Any, seed: int) -> None:
    replicas, devices, batch, rows = sizes
    wanted, *others = (
        train(make_family(program, make_data(rows, seed, rounded)), batch_size=batch) for rounded in range(cases(2, 4))
    )
    assume(max(error for other in others for error in measure(other, wanted).values()) < STEADY)  # nan is not
    family = make_family(program, make_data(rows, seed))
    ours, elsewhere = (train(family, on(count, replicas), batch) for count in (1, devices))
    errors = measure(ours, wanted)
    assert max(errors.values()) < CLOSE, errors
    for log, values in wanted.run.logs.items():
        np.testing.assert_allclose(ours.run.logs[log], values, rtol=CLOSE, atol=1e-6, err_msg=log)
    assert elsewhere.run.bits == ours.run.bits


@settings(max_examples=cases(1, 30))
@example(
    Program(
        "by train_step",
        [[(["of its segment", "pairs"], "root")], [(["masked", "ranked"], "quantile"), ([], "largest")]],
        ["momentum", "adam"],
        ((["centred"], "hardest"), "smoothed", True),
    ),
    (4, 2, 8, 19),
    0,
)
@given(program=programs(), sizes=sizes(), seed=st.integers(0, 99))
def test_a_drawn_training_is_that_of_the_whole_batch(program, sizes, seed):
    check(program, sizes, seed)
