"""BackupAndRestore: a fit that was broken off at any step goes on, on another placement, and ends with the same bits."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
import warnings
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from keras import layers

import unisono as un
from processes import FULL, python
from sizes import STEPS, cases, mostly_slow, slow
from small_disk import fill, small_disk
from sources import SOURCES, Batches, generated, pipelines
from threads import in_thread
from trainings import labels, on, rows
from unisono._src.callbacks.callback_states import collect_states, set_states
from unisono._src.checkpoint.background import wait_for_writers
from unisono._src.checkpoint.files import load_checkpoint
from unisono._src.checkpoint.storage import FullDiskError
from unisono._src.checkpoint.store import CheckpointStore
from unisono._src.data import indexed_reading
from unisono._src.data.row_order import RowOrder
from unisono._src.keras_private.callbacks import CHANGING_ATTRIBUTES
from unisono._src.keras_private.data_adapters import make_adapter
from unisono._src.processes import stop_signals

BATCH = cases(4, 8)
"""In `make test` each of four replicas has one row, or none: that is one program."""
ROWS = BATCH * (STEPS - 1) + 1
X, Y = rows(ROWS, 6), labels(ROWS, 3)
EPOCHS = 3
THEN = cases((1, 4), (2, 4))
"""Where a run goes on, if the placement is not the subject: in `make test` its program is there already."""


def model_on(strategy, optimizer=lambda: keras.optimizers.Adam(0.01), seed=1, **options):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)])
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], **options)
    return model


class BrokenOffError(Exception):
    pass


class BreakOff(keras.callbacks.Callback):
    """Ends a fit after so many steps: once, where it is given to several."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise BrokenOffError

    def get_state(self):
        return None

    def set_state(self, state):
        pass


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
    validation = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": 4}
    given = SOURCES[source]((X, Y), BATCH) | validation | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        return Kept(model, model.fit(**given, epochs=epochs, verbose=0, callbacks=list(callbacks)))


def broken_off_and_resumed(directory, after, first=(1, 4), then=THEN, freq=None, make=model_on, callbacks=lambda: (), **options):
    """Saved at every so many steps; without `freq` once, behind the last step before that in which it is broken off."""
    backup = lambda: un.callbacks.BackupAndRestore(directory, save_freq=freq or max(1, after - 1))
    with pytest.raises(BrokenOffError):
        fit(make(on(*first)), callbacks=[backup(), *callbacks(), BreakOff(after)], **options)
    assert freq or after == 1 or CheckpointStore(directory).numbers
    seed = 99 if CheckpointStore(directory).numbers else 1  # it must not matter, once something was saved
    resumed = fit(make(on(*then), seed=seed), callbacks=[*callbacks(), backup()], **options)
    assert not directory.exists(), "a training that has come to its end leaves no checkpoint"
    return resumed


@pytest.fixture(scope="module")
def whole():
    """Trainings that nobody interrupts, by source."""
    known = {}

    def of(source="arrays", **options):
        key = source, json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = fit(model_on(on(1, 4)), source, **options)
        return known[key]

    return of


@pytest.mark.soak
@pytest.mark.parametrize("source", ["arrays", *slow("PyDataset"), *pipelines()])
@settings(max_examples=100 if FULL else 3, phases=tuple(Phase) if FULL else cases((Phase.explicit,), tuple(Phase)))
@cases(lambda test: test, example(after=STEPS, freq=1, then=(2, 4)))
@example(after=2 * STEPS - 1, freq=2, then=(4, 4))
@given(
    after=st.integers(1, EPOCHS * STEPS), freq=st.sampled_from([1, 2, 3, "epoch"]), then=st.sampled_from([(1, 4), (3, 4), (4, 4)])
)
def test_every_point_over_every_source(tmp_path_factory, whole, source, after, freq, then):
    """Of indexed sources and of streams, saved at any step, on another number of devices."""
    shuffle = source in ("arrays", "PyDataset")
    resumed = broken_off_and_resumed(
        tmp_path_factory.mktemp("at") / "backup", after, then=then, freq=freq, source=source, shuffle=shuffle
    )
    assert resumed == whole(source, shuffle=shuffle)


@pytest.mark.slow
def test_on_any_number_of_devices(tmp_path):
    """One run on eight devices, broken off, and all that may follow it."""
    reference = fit(model_on(on(1, 8)))
    callbacks = [un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=1), BreakOff(7)]
    with pytest.raises(BrokenOffError):
        fit(model_on(on(8, 8)), callbacks=callbacks)
    for devices in (1, 2, 3, 4, 8):
        shutil.copytree(tmp_path / "b", tmp_path / str(devices))
        assert (
            fit(model_on(on(devices, 8), seed=99), callbacks=[un.callbacks.BackupAndRestore(tmp_path / str(devices))])
            == reference
        )


@pytest.mark.parametrize("after", [7, *slow(1, 4, 5, 10)])
def test_a_generator_is_read_forward(tmp_path, after):
    """It gives its rows once, over two epochs here."""
    reference = over_a_generator(on(1, 4))
    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=max(1, after - 1))
    with pytest.raises(BrokenOffError):
        over_a_generator(on(1, 4), backup(), BreakOff(after))
    assert over_a_generator(on(*cases((1, 4), (3, 4))), backup()) == reference


def over_a_generator(strategy, *callbacks):
    model = model_on(strategy)
    return Kept(
        model,
        model.fit(
            generated((X, Y), BATCH, times=2),
            steps_per_epoch=STEPS,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=list(callbacks),
        ),
    )


@pytest.mark.parametrize("after", [4, *slow(3, 6)])
def test_epochs_that_are_not_passes(tmp_path, after):
    """Three steps an epoch of a dataset of five batches: Keras goes on in the pass with the next epoch."""
    options = {"steps_per_epoch": 2, "epochs": 5}
    reference = fit(model_on(on(1, 4)), "PyDataset", **options)
    assert broken_off_and_resumed(tmp_path / "b", after, source="PyDataset", **options) == reference


@pytest.mark.slow
def test_several_steps_in_a_call(tmp_path):
    """Callbacks see the executions that `steps_per_execution` makes; what is saved lies between two of them."""
    make = lambda strategy, **seed: model_on(strategy, steps_per_execution=2, **seed)
    reference = fit(make(on(1, 4)))
    assert broken_off_and_resumed(tmp_path / "b", 4, freq=3, make=make) == reference


@pytest.mark.slow
def test_a_backup_alone_leaves_steps_in_groups(tmp_path):
    """It sees the steps that it saves, and no others."""
    seen = []

    class Backup(un.callbacks.BackupAndRestore):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            super().on_train_batch_end(batch, logs)

    model = model_on(on(1, 4))
    many = rows(4000, 6), labels(4000, 3)
    model.fit(*many, batch_size=10, epochs=2, verbose=0, callbacks=[Backup(tmp_path / "b", save_freq=64)])
    assert len(seen) < 300, "steps came one at a time"
    assert {63, 127, 191} <= set(seen)


# --- the state of more than the weights -------------------------------------------------------------------------------


def decaying(epoch, rate):
    return rate * 0.7


def deciding():
    return (
        keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=1.0),
        keras.callbacks.LearningRateScheduler(decaying),
    )


@pytest.mark.slow
@pytest.mark.parametrize("after", [8, *slow(1, 10)])
def test_callbacks_that_decide(tmp_path, after):
    """Patience, best weights, a rate that each epoch multiplies: as if nobody had interrupted."""
    reference = fit(model_on(on(1, 4)), callbacks=deciding())
    assert broken_off_and_resumed(tmp_path / "b", after, callbacks=deciding) == reference


@pytest.mark.slow
def test_callbacks_are_matched_by_what_they_monitor(tmp_path, whole):
    """Their order does not matter; one that is missing is named, and one that is new."""
    of = lambda monitor: keras.callbacks.EarlyStopping(monitor, patience=20)
    loss, accuracy = of("loss"), of("val_accuracy")
    interrupted(tmp_path / "b", callbacks=[of("val_accuracy"), of("loss"), of("val_loss")])
    with pytest.warns(UserWarning, match="The callbacks are others") as said:
        resume(tmp_path / "b", callbacks=[loss, keras.callbacks.ReduceLROnPlateau("loss", patience=20), accuracy])
    assert [str(of.message).partition(": ")[2] for of in said if "are others" in str(of.message)] == [
        "it holds the state of EarlyStopping(monitor='val_loss'), which is not among the callbacks now; ReduceLROnPlateau(monitor='loss') is "
        "among the callbacks now, and begins anew. Give fit the same ones, to go on with the same run."
    ]
    assert (loss.best, accuracy.best) == (min(whole().logs["loss"]), max(whole().logs["val_accuracy"]))


@pytest.mark.parametrize(("after", "freq"), slow((8, 1), (11, "epoch")))
def test_averaged_weights_that_are_swapped(tmp_path, after, freq):
    """Between two epochs the model has the averaged ones."""
    make = lambda strategy, **seed: model_on(strategy, lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9), **seed)
    swap = lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    reference = fit(make(on(1, 4)), callbacks=swap())
    assert broken_off_and_resumed(tmp_path / "b", after, freq=freq, make=make, callbacks=swap) == reference


@pytest.mark.slow
def test_a_run_that_had_stopped_itself_stays_stopped(tmp_path):
    """Killed between the decision and the end."""
    stopping = lambda: [keras.callbacks.EarlyStopping("loss", patience=0, baseline=0.0, restore_best_weights=True)]

    class Killed(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise BrokenOffError

    reference = fit(model_on(on(1, 4)), callbacks=stopping(), epochs=5)
    assert len(reference.logs["loss"]) < 5
    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "b")
    with pytest.raises(BrokenOffError):
        fit(model_on(on(1, 4)), callbacks=[Killed(), *stopping(), backup()], epochs=5)
    resumed = model_on(on(2, 4))
    fit_of = resumed.fit(X, Y, batch_size=BATCH, epochs=5, verbose=0, callbacks=[*stopping(), backup()])
    assert fit_of.history == {}
    assert un.fingerprint(resumed) == un.fingerprint(reference.model)


@pytest.mark.parametrize("epochs", [pytest.param(1, id="all epochs", marks=pytest.mark.slow), pytest.param(5, id="stopped")])
def test_a_training_that_has_ended_goes_on_nowhere(tmp_path, epochs):
    """Killed at its end, in its last epoch or in one where a callback has stopped it."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    class Counting(keras.callbacks.Callback):
        def __init__(self, fails):
            super().__init__()
            self.fails = fails

        def on_train_end(self, logs=None):
            if self.fails:
                raise BrokenOffError

    callbacks = lambda fails: [Counting(fails), Stop(), un.callbacks.BackupAndRestore(tmp_path / "b")]
    with pytest.raises(BrokenOffError):
        fit(model_on(on(1, 4)), callbacks=callbacks(True), epochs=epochs)
    with pytest.warns(UserWarning, match="The training has come to its end, and Counting may have kept something"):
        resumed = fit(model_on(on(1, 4)), callbacks=callbacks(False), epochs=epochs)
    assert resumed.logs == {}


OPTIMIZERS = {
    "EMA": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=4),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**60, dynamic_growth_steps=3
    ),
    "schedule": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 12)),
}


@pytest.mark.parametrize("name", slow("loss scale", "EMA", "schedule"))
def test_what_optimizers_keep(tmp_path, name):
    make = lambda strategy, **seed: model_on(strategy, OPTIMIZERS[name], **seed)
    reference = fit(make(on(1, 4)))
    assert broken_off_and_resumed(tmp_path / "b", 7, make=make, freq=3) == reference


def test_a_state_sets_nothing_else():
    """Of what a file holds, a callback of Keras' takes what it is known to keep."""
    stopping = keras.callbacks.EarlyStopping()
    (name,) = collect_states([stopping])
    set_states([stopping], {name: {"wait": 3, "on_epoch_end": None, "model": "other"}})
    assert stopping.wait == 3
    assert callable(stopping.on_epoch_end)
    assert "model" not in vars(stopping)


def test_states_of_keras_callbacks_are_whole():
    """Every attribute that Keras' deciding callbacks set outside of __init__ is either saved or of no consequence."""
    import ast
    import inspect
    import textwrap

    free = {"monitor_op", "min_delta", "model", "stop_training", "learning_rate"}
    for kind, names in CHANGING_ATTRIBUTES.items():
        changed = set()
        for of in kind.__mro__[: kind.__mro__.index(keras.callbacks.Callback)]:
            for function in vars(of).values():
                if inspect.isfunction(function) and function.__name__ != "__init__":
                    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
                        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                            changed.add(node.attr)
        assert changed - free <= set(names), kind.__name__


@pytest.mark.slow
def test_a_callback_of_ones_own_is_named_or_asked(tmp_path):
    class Counting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.count = 0

        def on_train_batch_end(self, batch, logs=None):
            self.count += 1

    class Remembering(Counting):
        def get_state(self):
            return {"count": self.count, "of": np.arange(3)}

        def set_state(self, state):
            self.count = state["count"]
            assert state["of"].tolist() == [0, 1, 2]

    with pytest.warns(UserWarning, match="in the middle of epoch 2, and Counting may have kept something"):
        broken_off_and_resumed(tmp_path / "b", 7, callbacks=lambda: [Counting()])
    with pytest.warns(UserWarning, match="at the beginning of epoch 2, and Counting may have kept something"):
        broken_off_and_resumed(tmp_path / "b", 7, freq="epoch", callbacks=lambda: [Counting()])
    counters = []
    broken_off_and_resumed(tmp_path / "c", 7, callbacks=lambda: counters.append(Remembering()) or [counters[-1]])
    assert counters[-1].count == EPOCHS * STEPS


# --- signals ----------------------------------------------------------------------------------------------------------


class Signalling(keras.callbacks.Callback):
    """Sends a signal to this process at a step, or in a validation."""

    def __init__(self, name, hook, at):
        super().__init__()
        self.name, self.at = name, at
        setattr(self, hook, self.send)

    def send(self, batch, logs=None):
        self.at -= 1
        if self.at == 0:
            os.kill(os.getpid(), signal.Signals[self.name])


@pytest.mark.parametrize(
    ("name", "hook", "at"),
    [
        ("SIGTERM", "on_train_batch_end", 7),
        *slow(
            ("SIGINT", "on_train_batch_end", 5),  # the last step of an epoch
            ("SIGUSR1", "on_test_batch_end", 2),
            ("SIGTERM", "on_epoch_end", 1),
        ),
    ],
)
def test_a_signal_finishes_the_step_and_saves(tmp_path, whole, name, hook, at, capsys):
    before = signal.getsignal(signal.SIGTERM)
    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=False, signals=("SIGTERM", "SIGINT", "SIGUSR1"))
    with pytest.raises(SystemExit) as left:
        fit(model_on(on(1, 4)), callbacks=[Signalling(name, hook, at), backup()])
    assert left.value.code == stop_signals.INTERRUPTED == 75
    assert f"{name}: saving after this step" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert fit(model_on(on(*THEN)), callbacks=[backup()]) == whole()


@pytest.mark.parametrize("freq", [4, *slow("epoch", False)])
def test_a_signal_behind_the_last_step(tmp_path, freq):
    """The program is left as ever, and started again it has nothing left to train."""
    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=freq)
    model = model_on(on(1, 4))
    with pytest.raises(SystemExit) as left:
        fit(model, epochs=1, callbacks=[Signalling("SIGTERM", "on_train_end", 1), backup()])
    assert left.value.code == 75
    resumed = fit(model_on(on(*THEN), seed=99), epochs=1, callbacks=[backup()])
    assert resumed.logs == {}
    assert un.fingerprint(resumed.model) == un.fingerprint(model)
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_a_signal_in_the_middle_of_an_accumulation(tmp_path):
    """A step is accumulated whole before it is saved, and goes on with the replicas divided in another way."""
    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=False)
    reference = fit(model_on(un.OneDeviceStrategy(accumulate=6)), epochs=2)
    stop = Signalling("SIGTERM", "on_train_batch_begin", 7)
    with pytest.raises(SystemExit):
        fit(model_on(un.OneDeviceStrategy(accumulate=6)), epochs=2, callbacks=[stop, backup()])
    newest = CheckpointStore(tmp_path / "b").load_newest().record
    assert (newest["states"]["training"]["steps"], newest["replicas"]) == (7, 6)
    assert fit(model_on(un.MirroredStrategy(devices=3, accumulate=2), seed=99), epochs=2, callbacks=[backup()]) == reference


def test_a_signal_when_the_checkpoints_are_being_deleted(tmp_path, monkeypatch):
    """Nothing is left to be saved: it does what it does without the callback."""
    monkeypatch.setattr(CheckpointStore, "delete", lambda store: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(model_on(on(1, 4)), epochs=1, callbacks=[un.callbacks.BackupAndRestore(tmp_path / "b")])


def test_a_signal_that_nobody_answers_is_raised_again():
    with pytest.raises(KeyboardInterrupt), stop_signals.listen_for_signals(["SIGINT"]):
        signal.raise_signal(signal.SIGINT)


def test_an_error_is_not_lost_over_a_signal():
    def broken_off():
        with stop_signals.listen_for_signals(["SIGINT"]):
            signal.raise_signal(signal.SIGINT)
            raise BrokenOffError

    with pytest.raises(BrokenOffError):
        broken_off()


def test_a_second_signal_while_it_is_saved_ends_at_once(tmp_path, monkeypatch):
    """The save that was begun has not ended then."""
    written = threading.Event()

    def write(store, number, make_content):
        os.kill(os.getpid(), signal.SIGINT)
        written.wait(60)

    monkeypatch.setattr(CheckpointStore, "_write", write)
    backup = un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=False)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(model_on(on(1, 4)), callbacks=[Signalling("SIGINT", "on_train_batch_end", 2), backup])
        assert not written.is_set()
    finally:
        written.set()
        wait_for_writers()


def test_signals_in_another_thread_are_warned_about():
    """Python takes them in its main thread."""

    def training():
        with pytest.warns(UserWarning, match=r"SIGTERM, SIGINT will not be heard: .*in the thread 'worker'.*write signals=\(\)"):
            stop_signals.listen_for_signals(stop_signals.SIGNALS).__enter__()
        with stop_signals.listen_for_signals(()):
            return True

    assert in_thread("worker", training)


def test_a_second_signal_ends_at_once(tmp_path):
    class Impatient(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)  # two that os.kill sends may come as one

    with pytest.raises(KeyboardInterrupt):
        fit(model_on(on(1, 4)), callbacks=[Impatient(), un.callbacks.BackupAndRestore(tmp_path / "b")])


def test_signals_have_names():
    with (
        pytest.raises(ValueError, match="received 'SIGNOPE', which this system does not know"),
        stop_signals.listen_for_signals(["SIGNOPE"]),
    ):
        pass


# --- what does not fit ------------------------------------------------------------------------------------------------


def interrupted(directory, make=model_on, strategy=None, callbacks=(), after=7, freq=None, **options):
    callbacks = [un.callbacks.BackupAndRestore(directory, save_freq=freq or after - 1), *callbacks, BreakOff(after)]
    with pytest.raises(BrokenOffError):
        fit(make(strategy or on(1, 4)), callbacks=callbacks, **options)


def resume(directory, make=model_on, strategy=None, backup=None, callbacks=(), **options):
    backup = backup or un.callbacks.BackupAndRestore(directory)
    return fit(make(strategy or on(1, 4)), callbacks=[backup, *callbacks], **options)


@pytest.mark.slow
def test_another_number_of_replicas_is_another_run(tmp_path):
    interrupted(tmp_path / "b")
    with pytest.raises(
        ValueError, match=r"R = 4 replicas, and this strategy has R = 8.*replicas=4, which runs on any number of devices up to 4"
    ):
        resume(tmp_path / "b", strategy=on(1, 8))
    resume(tmp_path / "b", strategy=on(1, 8), backup=un.callbacks.BackupAndRestore(tmp_path / "b", allow_other_replicas=True))


def test_another_optimizer(tmp_path):
    interrupted(tmp_path / "b")
    with pytest.raises(
        ValueError, match=r"holds the state of Adam as model/optimizer, and here that is SGD.*Nothing was restored"
    ):
        resume(tmp_path / "b", lambda strategy: model_on(strategy, lambda: keras.optimizers.SGD(0.1)))
    with pytest.warns(UserWarning, match=r"other settings: beta_1: 0.9 there, 0.8 here. That is another run"):
        resume(tmp_path / "b", lambda strategy: model_on(strategy, lambda: keras.optimizers.Adam(0.01, beta_1=0.8)))


@pytest.mark.slow
def test_another_model(tmp_path):
    interrupted(tmp_path / "b")

    def wider(strategy):
        with strategy.scope():
            model = keras.Sequential([layers.Dense(9, "relu"), layers.BatchNormalization(), layers.Dense(3), layers.Dense(3)])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with pytest.raises(ValueError, match="does not fit") as error:
        resume(tmp_path / "b", wider)
    text = str(error.value)
    assert "model/layers/dense/0: (6, 8) float32 in the checkpoint, (6, 9) float32 here" in text
    assert "model/layers/dense_2/0: nothing in the checkpoint, (3, 3) float32 here" in text
    assert "model/layers/dropout/seeds/0: (2,) uint32 in the checkpoint, nothing here" in text


@pytest.mark.parametrize("source", ["arrays", *slow("PyDataset"), *pipelines()])
def test_other_rows_are_stopped(tmp_path, source):
    """An unseeded shuffle, or another file: found by the digest, not trained on."""
    interrupted(tmp_path / "b", source=source, shuffle=False)
    other = SOURCES[source]((X[::-1].copy(), Y), BATCH)["x"]
    with pytest.raises(ValueError, match="The data are not those of the checkpoint"):
        resume(tmp_path / "b", source=source, shuffle=False, x=other)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("arrays", f"pass 1 had 5 batches then, 6 now, {ROWS} rows then, {ROWS + BATCH} now"),
        *slow(("PyDataset", "pass 1 had 5 batches then, 6 now")),
    ],
)
def test_more_rows_are_stopped(tmp_path, source, said):
    """Though those that were trained on are the same."""
    interrupted(tmp_path / "b", source=source, shuffle=False)
    more = SOURCES[source]((np.concatenate([X, X[:BATCH]]), np.concatenate([Y, Y[:BATCH]])), BATCH)
    with pytest.raises(
        ValueError, match=f"The data are not those of the checkpoint: {said}. Give fit or the dataset the same rows"
    ):
        resume(tmp_path / "b", source=source, shuffle=False, **more)


class Growing(Batches):
    """One batch more in every pass."""

    def on_epoch_end(self):
        self.rows = jax.tree.map(lambda a: np.concatenate([a, a[:BATCH]]), self.rows)


@pytest.mark.slow
def test_a_dataset_that_grows_has_the_size_of_its_pass(tmp_path):
    data = lambda: {"x": Growing((X, Y), BATCH), "y": None, "batch_size": None, "shuffle": False}
    reference = fit(model_on(on(1, 4)), **data())
    for after in (STEPS, STEPS + 2):
        interrupted(tmp_path / str(after), **data(), after=after)
        assert resume(tmp_path / str(after), **data()) == reference


class Drawn(Batches):
    """Rows that depend on how often passes began and ended."""

    begun = ended = 0

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (1 + self.begun / 8) + self.ended / 8, y


@pytest.mark.parametrize(
    ("after", "freq"),
    [
        (STEPS + 2, STEPS + 1),
        *slow((STEPS + 2, 1), (STEPS, 1), (STEPS + 1, "epoch"), (2, 1), (STEPS + 3, 2), (2 * STEPS, 1), (2 * STEPS, "epoch")),
    ],
)
@pytest.mark.parametrize("workers", [1, *slow(2)])
def test_a_dataset_is_told_of_each_pass_once(tmp_path, after, freq, workers):
    """Before its batches are read: the batch that was trained on last, too, which is read again."""

    def train(strategy, callbacks=(), seed=1):
        return fit(
            model_on(strategy, seed=seed), x=Drawn((X, Y), BATCH, workers=workers), y=None, batch_size=None, callbacks=callbacks
        )

    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=freq)
    reference = train(on(1, 4))
    with pytest.raises(BrokenOffError):
        train(on(1, 4), [backup(), BreakOff(after)])
    assert train(on(*THEN), [backup()], seed=99) == reference


@pytest.mark.compat
def test_a_map_dataset_of_grain_begins_at_any_batch():
    """Those before are not read."""
    grain = pytest.importorskip("grain")
    read = []
    rows = grain.MapDataset.range(40).seed(3).shuffle().repeat(3)
    dataset = rows.batch(10).map_with_index(lambda index, batch: (read.append(index), batch)[1])
    source, order = make_adapter(dataset, None, None), RowOrder(0)
    wanted = list(indexed_reading.read_batches(source, order))
    assert indexed_reading.has_index(source)
    for start in (0, 5, 11, 12):
        read.clear()
        found = list(indexed_reading.read_batches(source, order, start))
        assert np.array_equal(found, wanted[start:])
        assert sorted(read) == list(range(start, 12))


def test_a_model_outside_of_every_scope(tmp_path):
    model = keras.Sequential([layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(
        ValueError, match=r"was made outside of every scope.*un.OneDeviceStrategy\(\) trains exactly what Keras trains"
    ):
        model.fit(X, Y, verbose=0, callbacks=[un.callbacks.BackupAndRestore(tmp_path / "b")])


@pytest.mark.slow
def test_a_policy_of_orbax_decides(tmp_path, whole):
    """Here one for certain steps; another one would be for seconds."""
    from orbax.checkpoint.experimental.v1.training import save_decision_policies as policies

    backup = lambda: un.callbacks.BackupAndRestore(
        tmp_path / "b", save_freq=policies.SpecificStepsPolicy({3, 7}), delete_checkpoint=False
    )
    with pytest.raises(BrokenOffError):
        fit(model_on(on(1, 4)), callbacks=[backup(), BreakOff(9)])
    store = CheckpointStore(tmp_path / "b")
    assert [load_checkpoint(store.path(number)).record["states"]["training"]["steps"] for number in store.numbers] == [3, 7]
    assert fit(model_on(on(2, 4)), callbacks=[backup()]) == whole()


@pytest.mark.parametrize("wrong", ["batch", 0, -3, 2.5, True])
def test_frequencies(tmp_path, wrong):
    with pytest.raises(ValueError, match="save_freq is 'epoch', a number of steps, False for signals alone, or a policy"):
        un.callbacks.BackupAndRestore(tmp_path, save_freq=wrong)


def test_an_empty_directory_name():
    with pytest.raises(ValueError, match="empty backup_dir"):
        un.callbacks.BackupAndRestore("")


def test_what_is_kept(tmp_path):
    """Two by default; all of a finished training with delete_checkpoint=False."""
    fit(model_on(on(1, 4)), callbacks=[un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=4, delete_checkpoint=False)])
    store = CheckpointStore(tmp_path / "b")
    assert len(store.numbers) == 2
    assert store.load_newest().record["replicas"] == 4


def test_a_damaged_checkpoint_is_left_and_the_one_before_it_used(tmp_path, whole):
    interrupted(tmp_path / "b", freq=3)
    (newest,) = [
        path for path in (tmp_path / "b").iterdir() if path.name == f"ckpt_{max(CheckpointStore(tmp_path / 'b').numbers)}"
    ]
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=rf"{newest.name} is damaged.*left in place.*is the newest good one"):
        resumed = resume(tmp_path / "b", backup=un.callbacks.BackupAndRestore(tmp_path / "b", delete_checkpoint=False, keep=10))
    assert resumed == whole()
    assert newest.exists()


class Filling(keras.callbacks.Callback):
    """Fills the disk before these epochs, and makes room again after the last one."""

    def __init__(self, disk, epochs=(1, 2)):
        super().__init__()
        self.disk, self.epochs = disk, epochs

    def on_epoch_begin(self, epoch, logs=None):
        wait_for_writers()
        if epoch in self.epochs:
            self.ballast = fill(self.disk)
        elif epoch - 1 in self.epochs:
            self.ballast.unlink()

    def get_state(self):
        return None

    def set_state(self, state):
        pass


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of writes of Orbax that end after the first has failed
def test_a_training_goes_on_though_the_disk_is_full(tmp_path, whole):
    """It says so for each checkpoint, keeps the last one, and writes again when there is room."""
    with small_disk(tmp_path / "disk", 1024) as disk:
        backup = lambda **kept: un.callbacks.BackupAndRestore(disk / "b", **kept)
        with pytest.warns(UserWarning, match="the disk is full") as said:
            fit(model_on(on(1, 4)), callbacks=[Filling(disk), backup(delete_checkpoint=False, keep=9)], epochs=4)
        failed = [re.sub(r" \d+ bytes wanted, \d+ free", "", str(one.message)) for one in said if "disk" in str(one.message)]
        assert failed == [
            f"The checkpoint {disk}/b/ckpt_{number} was not written: the disk is full:. Those before it are as they were: {disk}/b/ckpt_1. The "
            f"training goes on, and the next save tries again."
            for number in (2, 3)
        ]
        assert sorted(path.name for path in (disk / "b").iterdir()) == ["ckpt_1", "ckpt_4"]
        shutil.rmtree(disk / "b" / "ckpt_4")
        assert fit(model_on(on(*THEN)), callbacks=[Filling(disk, ()), backup()]) == whole()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of writes of Orbax that end after the first has failed
@pytest.mark.parametrize("saved", slow(True, False))
def test_a_signal_while_the_disk_is_full(tmp_path, saved, capsys):
    """The program goes on from the last checkpoint. Without one there is nothing to go on from, and the error says so."""
    with small_disk(tmp_path / "disk", 1024) as disk:
        callbacks = [Signalling("SIGTERM", "on_train_batch_end", 7), un.callbacks.BackupAndRestore(disk / "b")]
        if saved:
            with (
                pytest.warns(UserWarning, match="the disk is full.*b/ckpt_1. The last of these is what a training goes on from"),
                pytest.raises(SystemExit),
            ):
                fit(model_on(on(1, 4)), callbacks=[Filling(disk), *callbacks])
            assert f"saved {disk}/b/ckpt_1; leaving with exit code 75" in capsys.readouterr().err
        else:
            fill(disk)
            with (
                pytest.warns(UserWarning, match="there is none. The training goes on"),
                pytest.raises(FullDiskError, match="there is none"),
            ):
                fit(model_on(on(1, 4)), callbacks=callbacks)


@pytest.mark.slow
def test_a_later_fit_begins_at_its_own_epoch(tmp_path):
    """Keras would remember the epoch of a resume for ever."""
    interrupted(tmp_path / "b")
    model = resume(tmp_path / "b").model
    assert len(model.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2


class WarmUp(keras.callbacks.Callback):
    """A learning rate for each step, from nothing but the step."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.001 * (1 + self.epoch * STEPS + batch)


@pytest.mark.filterwarnings("ignore:.*may have kept something that is not saved")
class Augmented(Batches):
    """Some of its batches have noise of a generator."""

    draw: Any = staticmethod(lambda index: np.random.normal())

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x + np.float32(self.draw(index)), y) if index == 2 else (x, y)


DRAWS = {
    "np.random": lambda _: np.random.normal(),
    "random": lambda _: random.random(),
    "its own": lambda index: np.random.default_rng((7, index)).normal(),
}


@pytest.mark.parametrize(
    ("where", "draw"),
    mostly_slow(itertools.product(("fit", "loop"), DRAWS), ("fit", "np.random"), ("loop", "np.random"), ("loop", "its own")),
)
def test_rows_of_a_global_generator_are_warned_of(tmp_path, where, draw):
    """The last batch before a place need not be one of them: the comparison of its rows would not notice."""
    rows = Augmented((X, Y), BATCH)
    rows.draw = DRAWS[draw]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if where == "fit":
            fit(model_on(on(1, 4)), x=rows, y=None, batch_size=None, callbacks=[un.callbacks.BackupAndRestore(tmp_path / "b")])
        else:
            data = on(1, 4).distribute_dataset(rows)
            un.Checkpoint(data=data)
            list(data)
    expected = (
        r"draws from a global generator, np.random or random.*no checkpoint holds.*np.random.default_rng\(\(seed, index\)\)"
    )
    count = sum(re.search(expected, str(warning.message)) is not None for warning in said)
    assert bool(count) is (draw != "its own")


FORKING = """
import os, signal, time
from unisono._src.processes.stop_signals import listen_for_signals

with listen_for_signals(["SIGTERM"]) as stop:
    begun, begins = os.pipe()
    child = os.fork()  # as a dataset does for its workers
    if child == 0:
        os.write(begins, b"-")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)  # Python forgets signals that come before
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print("ended by", os.WTERMSIG(status), "and asked", stop.asked_by)
"""


def test_a_forked_process_does_not_hear_the_signal():
    """Nobody has asked the training to stop: the process ends as if there were no backup."""
    done = python("-c", FORKING, timeout=60)
    assert done.stdout.split("\n")[-2] == f"ended by {int(signal.SIGTERM)} and asked None", done.stderr
    assert "saving after this step" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("after", "freq"), [(STEPS + 2, STEPS + 1), *slow((STEPS + 2, 2), (STEPS + 1, 1), (STEPS + 1, "epoch"))])
def test_what_a_callback_sets_before_the_first_step_stays(tmp_path, after, freq):
    """The state is restored before the callbacks hear of the step, not after."""
    reference = fit(model_on(on(1, 4)), callbacks=[WarmUp()])
    assert broken_off_and_resumed(tmp_path / "b", after, freq=freq, callbacks=lambda: [WarmUp()]) == reference


class Turning(Batches):
    """Batches whose rows are others in each pass."""

    def on_epoch_end(self):
        self.rows = jax.tree.map(lambda array: np.roll(array, 3, axis=0), self.rows)


def endless():
    yield from generated((X[:24], Y[:24]), 4, times=100)


VALIDATIONS = {
    "a generator": lambda strategy: {"validation_data": endless(), "validation_steps": 4},
    "a dataset that changes": lambda strategy: {"validation_data": Turning((X[:24], Y[:24]), cases(4, 5))},
    "some steps of it": lambda strategy: {"validation_data": Turning((X[:24], Y[:24]), cases(4, 5)), "validation_steps": 2},
    "a distributed one": lambda strategy: {
        "validation_data": strategy.distribute_dataset(Turning((X[:24], Y[:24]), cases(4, 5)))
    },
}


@pytest.mark.parametrize("how", [*slow("a dataset that changes", "a generator", "a distributed one"), "some steps of it"])
@pytest.mark.parametrize(
    ("after", "freq"), [(2 * STEPS + 1, 2 * STEPS), *slow((2 * STEPS + 1, 1), (2 * STEPS + 1, "epoch"), (STEPS, 1))]
)
def test_data_of_validations_go_on_where_they_were(tmp_path, how, after, freq):
    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "b", save_freq=freq)

    def train(strategy, callbacks=(), seed=1):
        return fit(model_on(strategy, seed=seed), callbacks=callbacks, **VALIDATIONS[how](strategy))

    reference = train(on(1, 4))
    with pytest.raises(BrokenOffError):
        train(on(1, 4), [backup(), BreakOff(after)])
    assert train(on(*THEN), [backup()], seed=99) == reference


def test_a_dataset_that_changes_in_the_middle_of_a_pass_is_warned_of(tmp_path):
    model = model_on(on(1, 4))
    fit_some = lambda rows, **options: model.fit(
        rows, verbose=0, callbacks=[un.callbacks.BackupAndRestore(tmp_path / "b")], **options
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The dataset has an on_epoch_begin")
        fit_some(Turning((X, Y), BATCH))
        fit_some(Turning((X, Y), BATCH), steps_per_epoch=STEPS)
        fit_some(Batches((X, Y), BATCH), steps_per_epoch=2)
    with pytest.warns(
        UserWarning, match=rf"an epoch has 2 steps, which is no pass over the {STEPS} batches.*Leave out steps_per_epoch"
    ):
        fit_some(Turning((X, Y), BATCH), steps_per_epoch=2)
