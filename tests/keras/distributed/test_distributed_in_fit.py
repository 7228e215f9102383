"""fit, evaluate and predict on distributed datasets."""

from __future__ import annotations

import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from loops import CLASSES, Loop, crossentropy, data
from sizes import mostly_slow, slow
from sources import Batches, generated
from trainings import on

X, Y = data("dense", 43)
FEW, SIZE = (X[:20], Y[:20]), 8
"""Batches in which each of eight replicas has one row or none, which is one program."""


def test_fit_takes_distributed_datasets():
    """And calls callbacks as often as on the data itself."""

    def trained(distributed):
        loop, calls = Loop(on(2, 4)), []
        data = [(X[:16], Y[:16]), (X[16:24], Y[16:24])]
        if distributed:
            x, validation = (loop.strategy.distribute_dataset(rows, batch_size=SIZE) for rows in data)
        else:
            x, validation = (Batches(rows, SIZE) for rows in data)
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: calls.append(("train", batch)),
            on_epoch_end=lambda epoch, logs: calls.append(("epoch", epoch)),
        )
        loop.model.compile(loop.optimizer, crossentropy(), metrics=["accuracy"])
        history = loop.model.fit(x, validation_data=validation, epochs=2, verbose=0, shuffle=False, callbacks=[count]).history
        evaluated = loop.model.evaluate(validation, verbose=0, return_dict=True)
        assert evaluated["loss"] == history["val_loss"][-1]
        rows = X[:16]
        predicted = loop.model.predict(
            loop.strategy.distribute_dataset(rows, batch_size=SIZE) if distributed else rows, SIZE, verbose=0
        )
        assert predicted.shape == (16, CLASSES)
        return loop.train(X, Y, epochs=0), history, calls, predicted.tolist()

    assert trained(True) == trained(False)


class Shared:
    """An iterable that gives one generator again and again."""

    def __init__(self):
        self._batches = generated((X, Y), 12)

    def __iter__(self):
        return self._batches


WHOLE = X[:24], Y[:24]
"""Batches of twelve, all of them whole."""


def of_pipeline(context):
    return [rows[context.input_pipeline_id :: 4] for rows in WHOLE]


STREAMS = {
    "a generator": lambda strategy: strategy.distribute_dataset(generated(WHOLE, 12)),
    "a generator for each replica": lambda strategy: strategy.distribute_datasets_from_function(
        lambda context: generated(of_pipeline(context), 3)
    ),
}


def fresh(strategy, built=True):
    """A model that Keras builds, or whose metrics it builds, by looking at the first batch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([layers.Input(X.shape[1:])] if built else [])
        model.add(layers.Dense(CLASSES))
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    return model


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # by Keras, at the end of any stream
@pytest.mark.parametrize("kind", mostly_slow(STREAMS, "a generator"))
@pytest.mark.parametrize("built", [True, *slow(False)])
def test_keras_may_look_at_the_first_batch_of_a_stream(kind, built):
    """Every batch is then trained on once, and in later epochs the stream is over."""
    strategy = on(1, 4)
    make = STREAMS[kind]
    listed = strategy.distribute_dataset(list(generated(WHOLE, 12))) if kind == "a generator" else None
    model, again = fresh(strategy, built), fresh(strategy, built)
    history = model.fit(make(strategy), verbose=0).history
    again.fit(
        listed or strategy.distribute_datasets_from_function(lambda context: list(generated(of_pipeline(context), 3))),
        verbose=0,
    )
    assert un.fingerprint(model) == un.fingerprint(again)
    assert len(history["loss"]) == 1
    assert fresh(strategy, built).evaluate(make(strategy), verbose=0) == pytest.approx(
        fresh(strategy, built).evaluate(*WHOLE, batch_size=12, verbose=0), rel=1e-5
    )
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        fresh(strategy, built).fit(make(strategy), epochs=2, verbose=0)


@pytest.mark.parametrize("built", [False, *slow(True)])
def test_a_look_at_the_first_batch_is_no_pass(built):
    """The rows of a shuffled dataset come in the order of fit, whether Keras has looked at the first batch or not."""
    strategy = on(1, 4)

    def trained(**options):
        model = fresh(strategy)
        if built:
            model.train_on_batch(X[:12], Y[:12])
            model.optimizer.learning_rate = 0.1
        model.fit(**options, epochs=2, verbose=0)
        return un.fingerprint(model)

    shuffled = strategy.distribute_dataset(WHOLE, batch_size=12, shuffle=True)
    assert trained(x=shuffled) == trained(x=WHOLE[0], y=WHOLE[1], batch_size=12)
    assert shuffled.source.order.passes == 2


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ["stream", "arrays"])
def test_prediction_builds_a_model_by_the_first_batch(kind):
    strategy = on(1, 4)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(2)])
    batches = ((x,) for x, _ in generated((X, Y), 12))
    dataset = strategy.distribute_dataset(batches) if kind == "stream" else strategy.distribute_dataset(X, batch_size=12)
    predicted = model.predict(dataset, verbose=0)
    assert predicted.shape == (43, 2)
    np.testing.assert_array_equal(predicted, model.predict(X, batch_size=12, verbose=0))


def test_steps_of_an_epoch_go_on_in_a_stream():
    strategy = on(1, 4)
    taken = []

    def batches():
        for batch in generated((X, Y), 12):
            taken.append(len(batch[0]))
            yield batch

    dataset = strategy.distribute_dataset(batches())
    model = fresh(strategy)
    model.fit(dataset, steps_per_epoch=1, epochs=2, verbose=0)
    assert taken == [12, 12]
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        model.fit(dataset, steps_per_epoch=1, verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_iterable_that_is_a_stream_loses_no_batch_in_silence():
    strategy = on(1, 4)
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        fresh(strategy).fit(strategy.distribute_dataset(Shared()), verbose=0)
    shared = strategy.distribute_dataset(Shared())
    assert sum(batch[0].shape[0] for batch in shared) == 43
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        next(iter(shared))


def test_a_dataset_of_another_strategy():
    loop = Loop(on(2, 4))
    loop.model.compile("sgd", crossentropy())
    with pytest.raises(ValueError, match="distributed to 3 replicas, and the model belongs to"):
        loop.model.fit(on(1, 3).distribute_dataset([(X, Y)]), verbose=0)
    with pytest.raises(ValueError, match="of a dataset that was distributed to 3 replicas"):
        loop.strategy.run(lambda x: x, args=(next(iter(on(1, 3).distribute_dataset([X]))),))


def test_batches_smaller_than_r_are_warned_about_once():
    """They look like a replica's batches where global ones are due. One alone is the last of a pass, or of a pass that is repeated."""
    strategy = on(1, 4)
    with strategy.scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    calls = {
        "fit": lambda rows, size: model.fit(rows, rows[:, :1], batch_size=size, epochs=2, verbose=0),
        "evaluate": lambda rows, size: [model.evaluate(rows, rows[:, :1], batch_size=size, verbose=0) for _ in range(2)],
        "a loop": lambda rows, size: [list(dataset) for dataset in [strategy.distribute_dataset(rows, size)] for _ in range(2)],
        "a repeated dataset": lambda rows, size: list(
            strategy.distribute_dataset([rows[:size], rows[:1], rows[:size], rows[:1]])
        ),
    }
    x = X.astype("float32")
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call(x[:9], 4)
            assert [str(one.message) for one in said] == [], name
            call(x[:6], 2)
        assert len(said) == 1, name
        assert re.search(r"Batches of [12] rows for 4 replicas: .*global.*4 times as large", str(said[0].message))
