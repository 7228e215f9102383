"""One training, run by plain Keras and on placements of R replicas, and what is compared between the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

import unisono as un
from sizes import cases

PLACEMENTS = cases((3,), (1, 3))
"""Beside plain Keras: one placement, unless all of them are tried."""

SGD_TOLERANCE, ADAM_TOLERANCE, LOG_TOLERANCE = 1e-6, 1e-5, 1e-5


@dataclasses.dataclass
class Run:
    """A model after its training, and the history of it."""

    model: Any
    logs: dict[str, list[Any]]

    @property
    def bits(self) -> tuple[str, dict[str, list[str]]]:
        """The fingerprint of the model, and the logs to their last digit, in a form in which nan equals nan."""
        return un.fingerprint(self.model), {
            name: [repr(np.asarray(v, "float64").tolist()) for v in values] for name, values in sorted(self.logs.items())
        }


def run(make: Callable[[], Any], fit: Callable[[Any], Any], strategy: Any = None) -> Run:
    """`make()` builds and compiles a model, in the strategy's scope if there is one; `fit(model)` trains it."""
    keras.utils.set_random_seed(0)
    if strategy is None:
        model = make()
    else:
        with strategy.scope():
            model = make()
    history = fit(model)
    return Run(model, dict(getattr(history, "history", {}) or {}))


def on(devices: int, replicas: int = 8) -> Any:
    """The strategy that runs R replicas on a number of devices."""
    if devices == 1:
        return un.OneDeviceStrategy(replicas=replicas)
    return un.MirroredStrategy(devices=devices, replicas=replicas)


def assert_same_bits(
    make: Callable[[], Any], fit: Callable[[Any], Any], devices: Sequence[int] = (1, 3), replicas: int = 8
) -> Run:
    """Weights, state, optimizer and history are equal to the bit on all these numbers of devices."""
    first, *others = [run(make, fit, on(count, replicas)) for count in devices]
    for other in others:
        assert other.bits == first.bits
    return first


def assert_equals_keras(
    make: Callable[[], Any],
    fit: Callable[[Any], Any],
    replicas: Sequence[int] = (8,),
    devices: Sequence[int] = PLACEMENTS,
    tolerance: float = SGD_TOLERANCE,
) -> Run:
    """R replicas train the model that plain Keras trains on whole batches, up to rounding, and with equal bits on all these numbers of
    devices."""
    plain = run(make, fit)
    for count in replicas:
        ours = assert_same_bits(make, fit, devices if count > 1 else (1,), count)
        assert distance(ours.model, plain.model) <= tolerance, f"R = {count}"
        assert_close_logs(ours.logs, plain.logs)
    return plain


def weights(model: Any) -> list[np.ndarray]:
    return [np.asarray(variable.value) for variable in model.weights]


def distance(model: Any, other: Any) -> float:
    """How far apart two models' weights are, relative to the norm of all of them."""
    ours, theirs = (np.concatenate([w.ravel().astype("float64") for w in weights(m)]) for m in (model, other))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def assert_close_logs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same names, and the same values up to rounding."""
    assert sorted(ours) == sorted(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=LOG_TOLERANCE, err_msg=name)


def rows(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    """`count` rows of random float32, every one different."""
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype("float32")


def labels(count: int, classes: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, size=(count, *shape)).astype("int32")


def fitting(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """`fit` with these arguments, without progress bar and shuffling."""
    return lambda model: model.fit(*args, **{"verbose": 0, "shuffle": False} | options)


def crossentropy(reduction: str | None = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def net(
    *stack: Any,
    loss: Any = "mse",
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1),
    kind: type[keras.Sequential] = keras.Sequential,
    **options: Any,
) -> Callable[[], keras.Model]:
    """Return a function that makes layers anew, one after another, and compiles them: of functions, and of sizes of dense ones."""

    def make() -> keras.Model:
        model = kind([layers.Dense(layer) if isinstance(layer, int) else layer() for layer in stack])
        model.compile(optimizer(), loss() if isinstance(loss, type) else loss, **options)
        return model

    return make


def tanh(size: int, **options: Any) -> Callable[[], Any]:
    """A dense layer, for `net`."""
    return lambda: layers.Dense(size, "tanh", **options)


def dense_with_momentum() -> keras.Model:
    """Return two dense layers, compiled with SGD and momentum."""
    momentum = lambda: keras.optimizers.SGD(0.1, momentum=0.9)
    return net(tanh(7), 3, loss=crossentropy(), optimizer=momentum, metrics=["accuracy"])()
