"""Trainings of `fit` that are broken off and go on from their last checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

import keras
from keras import layers

import unisono as un
from sizes import STEPS, cases
from sources import SOURCES
from trainings import labels, on, rows
from unisono._src.keras.checkpoint.store import CheckpointStore

BATCH = cases(4, 8)
"""In `make test` each of four replicas has one row, or none: that is one program."""
ROWS = BATCH * (STEPS - 1) + 1
X, Y = rows(ROWS, 6), labels(ROWS, 3)
EPOCHS = 3
THEN = cases((1, 4), (2, 4))
"""Where a run goes on, if the placement is not the subject: in `make test` its program is there already."""

Backup = un.callbacks.BackupAndRestore


def model_on(strategy, optimizer=lambda: keras.optimizers.Adam(0.01), seed=1, **options):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)])
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], **options)
    return model


class BrokenOffError(Exception):
    pass


class Stateless(keras.callbacks.Callback):
    """A callback that says that it has nothing to keep."""

    def get_state(self):
        return None

    def set_state(self, state):
        pass


class BreakOff(Stateless):
    """Ends a fit after so many steps: once, where it is given to several."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise BrokenOffError


class Kept:
    """What a run ends with: all bits of the model, and the logs of the epochs that it has seen."""

    def __init__(self, model, history):
        self.model, self.logs = model, history.history

    def __eq__(self, other):
        """The run with the shorter history was resumed."""
        count = min(len(self.logs["loss"]), len(other.logs["loss"]))
        last = [{name: values[len(values) - count :] for name, values in run.logs.items()} for run in (self, other)]
        return un.fingerprint(self.model) == un.fingerprint(other.model) and last[0] == last[1]


def fit(model, source="arrays", callbacks=(), epochs=EPOCHS, **options):
    validation: dict[str, Any] = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": 4}
    given = SOURCES[source]((X, Y), BATCH) | validation | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        return Kept(model, model.fit(**given, epochs=epochs, verbose=0, callbacks=list(callbacks)))


def interrupt(directory, make=model_on, strategy=None, callbacks=(), after=7, freq=None, **options):
    """Trains, and is broken off after so many steps. Saves at every `freq` steps; without it once, behind the step before."""
    backup = Backup(directory, save_freq=freq or max(1, after - 1))
    try:
        fit(make(strategy or on(1, 4)), callbacks=[backup, *callbacks, BreakOff(after)], **options)
    except BrokenOffError:
        assert freq or after == 1 or CheckpointStore(directory).numbers
        return
    raise AssertionError("the training has come to its end")


def resume(directory, make=model_on, strategy=None, backup=None, callbacks=(), **options):
    """Trains from the last checkpoint to the end, with another seed, which must not matter once something was saved."""
    seed = {"seed": 99} if CheckpointStore(directory).numbers else {}
    model = make(strategy or on(1, 4), **seed)
    return fit(model, callbacks=[*callbacks, backup or Backup(directory)], **options)
