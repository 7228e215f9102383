"""Errors that Keras raises itself keep their type and their first line under a strategy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import mostly_slow
from unisono._src.keras.checks.jax_errors import StepError

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
WIDE = np.ones((8, 4), "float32")


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return X[:4], Y[:4]


def net(loss: Any = "mse", **compiled: Any) -> keras.Model:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": loss} | compiled)
    return model


def of(*made: layers.Layer) -> keras.Model:
    model = keras.Sequential(made)
    model.compile("sgd", "mse")
    return model


def uncompiled() -> keras.Model:
    return keras.Sequential([layers.Input((3,)), layers.Dense(1)])


def two_outputs(loss: Any, **compiled: Any) -> keras.Model:
    x = keras.Input((3,), name="x")
    model = keras.Model({"x": x}, {"p": layers.Dense(1, name="p")(x), "q": layers.Dense(1, name="q")(x)})
    model.compile("sgd", loss, **compiled)
    return model


def endless() -> Any:
    while True:
        yield X[:4], Y[:4]


BOTH, TARGETS = {"p": "mse", "q": "mse"}, {"p": Y, "q": Y}
CASES: dict[str, Callable[[], Any]] = {
    "features of another size": lambda: net().fit(WIDE, Y),
    "features of another rank": lambda: net().fit(X[:, 0], Y),
    "features of another size, in evaluate": lambda: net().evaluate(WIDE, Y),
    "features of another size, in predict": lambda: net().predict(WIDE),
    "features of another size, in train_on_batch": lambda: net().train_on_batch(WIDE, Y),
    "texts as features": lambda: net().fit(np.array([["a", "b", "c"]] * 8), Y),
    "labels of another shape": lambda: net("categorical_crossentropy").fit(X, WIDE),
    "one-hot labels for a sparse loss": lambda: net("sparse_categorical_crossentropy").fit(X, WIDE),
    "numbers of rows that differ": lambda: net().fit(X, Y[:7]),
    "weights of another number of rows": lambda: net().fit(X, Y, sample_weight=np.ones(5)),
    "an unknown loss": lambda: net("mze").fit(X, Y),
    "an unknown optimizer": lambda: net(optimizer="sdg"),
    "an unknown metric": lambda: net(metrics=["acuracy"]).fit(X, Y),
    "a misspelt argument of compile": lambda: net(metricss=[]),
    "a misspelt argument of fit": lambda: net().fit(X, Y, batchsize=4),
    "labels beside a dataset": lambda: net().fit(Batches(1), Y),
    "weights beside a dataset": lambda: net().fit(Batches(1), sample_weight=np.ones(8)),
    "labels beside a generator": lambda: net().fit(endless(), Y, steps_per_epoch=2),
    "weights for classes and for samples": lambda: net().fit(X, Y, sample_weight=np.ones(8), class_weight={0: 1.0, 1: 2.0}),
    "weights for classes of two outputs": lambda: two_outputs(BOTH).fit(X, TARGETS, class_weight={0: 1.0}),
    "validation_split of a dataset": lambda: net().fit(Batches(1), validation_split=0.5),
    "validation data of another form": lambda: net().fit(X, Y, validation_data=(X, Y, Y, Y)),
    "validation_freq of another type": lambda: net().fit(X, Y, validation_data=(X, Y), validation_freq="2"),
    "no compile before fit": lambda: uncompiled().fit(X, Y),
    "no compile before evaluate": lambda: uncompiled().evaluate(X, Y),
    "no compile before train_on_batch": lambda: uncompiled().train_on_batch(X, Y),
    "a loss for an unknown output": lambda: two_outputs({"p": "mse", "z": "mse"}).fit({"x": X}, TARGETS),
    "losses for three outputs": lambda: two_outputs(["mse"] * 3).fit({"x": X}, TARGETS),
    "labels for one output": lambda: two_outputs(BOTH).fit({"x": X}, {"p": Y}),
    "metrics of an unknown output": lambda: two_outputs(BOTH, metrics={"z": "mae"}).fit({"x": X}, TARGETS),
    "weights of an unknown loss": lambda: two_outputs(BOTH, loss_weights={"z": 1.0}).fit({"x": X}, TARGETS),
    "an unknown input": lambda: two_outputs(BOTH).fit({"z": X}, TARGETS),
    "a layer for images": lambda: of(layers.Conv2D(2, 3)).fit(X, Y),
    "a shape that does not fit": lambda: of(layers.Dense(4), layers.Reshape((3,))).fit(X, Y),
    "a model without call": lambda: keras.Model().fit(X, Y),
    "no data": lambda: net().predict(None),
}  # fmt: skip


def raised(call: Callable[[], Any], scope: contextlib.AbstractContextManager[Any]) -> Exception:
    keras.backend.clear_session()  # names of layers begin anew
    with pytest.raises(Exception) as caught, scope:  # noqa: PT011  # which one it is, Keras says
        call()
    return caught.value


def first_line(error: Exception) -> str:
    return re.sub(r"shape \([48], ", "shape (rows, ", str(error).strip().partition("\n")[0])


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        CASES,
        "features of another size",
        "no compile before fit",
        "labels for one output",
    ),
)
def test_the_error_is_that_of_keras(case):
    """A replica gets half of the rows, and says so where a layer has no other rows to name."""
    plain = raised(CASES[case], contextlib.nullcontext())
    ours = raised(CASES[case], un.OneDeviceStrategy(replicas=2).scope())
    assert (type(ours), first_line(ours)) == (type(plain), first_line(plain))
    assert not isinstance(plain, StepError)


OF_JAX: dict[str, Callable[[], Any]] = {
    "no labels": lambda: net().fit(X),
    "no labels in evaluate": lambda: net().evaluate(X),
    "labels that cannot be subtracted": lambda: net().fit(X, np.ones((8, 2, 5))),
    "weights that cannot be multiplied": lambda: net().fit(X, Y, sample_weight=np.ones((8, 3))),
}


@pytest.mark.parametrize("case", mostly_slow(OF_JAX, "no labels"))
def test_what_keras_leaves_to_jax_is_said_by_the_model_and_holds_the_words_of_jax(case):
    plain = raised(OF_JAX[case], contextlib.nullcontext())
    ours = raised(OF_JAX[case], un.OneDeviceStrategy(replicas=2).scope())
    if isinstance(plain, AttributeError):  # Keras 3.16 fails while it explains: it reads the shape of labels that are None
        assert first_line(ours) == first_line(plain)
        return
    assert isinstance(ours, StepError)
    assert isinstance(ours, type(plain))
    assert first_line(ours).startswith("A step of the model 'sequential' could not run on ")
    assert first_line(ours).endswith(f"JAX says: {first_line(plain)}")
