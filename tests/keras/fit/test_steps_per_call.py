"""Several steps in a call: when, and that nobody can tell."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import cases, mostly_slow, slow
from trainings import assert_equals_keras, fitting, net, on, rows, run, tanh
from unisono._src.engine.step.step import Step
from unisono._src.keras.fit import steps_per_call
from unisono._src.keras.fit.call_arguments import FitCallback

X, Y = rows(96, 5), rows(96, 3)


def make(steps_per_execution=1):
    model = keras.Sequential([layers.Dense(7, "tanh"), layers.Dropout(0.2), layers.BatchNormalization(), layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


@pytest.fixture
def calls(monkeypatch):
    """How many batches each call of a step took."""
    taken, call = [], Step.__call__

    def noted(self, state, batches):
        taken.append(len(batches))
        return call(self, state, batches)

    monkeypatch.setattr(Step, "__call__", noted)
    return taken


@pytest.fixture
def unhurried(monkeypatch):
    """However slow the machine is, calls grow."""
    monkeypatch.setattr(steps_per_call, "SECONDS", 1e6)


@pytest.mark.slow
def test_a_long_execution_is_one_call_of_the_program(monkeypatch):
    orders, at_once = [], Step._run_together
    monkeypatch.setattr(
        Step, "_run_together", lambda self, group, *more: orders.append(len(group)) or at_once(self, group, *more)
    )
    run(lambda: make(8), lambda model: model.fit(X[:48], Y[:48], batch_size=6, verbose=0), on(1, 2))
    assert orders == [8]


def test_a_group_ends_with_the_epoch(calls, monkeypatch):
    monkeypatch.setattr(steps_per_call.StepsPerCall, "steps", lambda self: 7)
    run(make, lambda model: model.fit(X, Y, batch_size=6, epochs=2, verbose=0), on(1, 2))
    assert calls == [7, 7, 2, 7, 7, 2]
    calls.clear()
    run(make, lambda model: model.fit(X, Y, batch_size=6, epochs=2, steps_per_epoch=8, verbose=0), on(1, 2))
    assert calls == [7, 1, 7, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [keras.callbacks.LambdaCallback(on_batch_begin=lambda batch, logs: None)]},
        {"callbacks": [keras.callbacks.TerminateOnNaN()]},
        {"callbacks": [keras.callbacks.ModelCheckpoint("unused.keras", save_freq=1000)]},
    ],
    ids=["a hook at batches", "Keras' own with one", "saving by batches"],
)
def test_what_looks_at_batches_sees_each(options, calls):
    run(make, lambda model: model.fit(X, Y, batch_size=6, verbose=0, **options), on(1, 2))
    assert calls == [1] * 16


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_callbacks_by_epochs_do_not_slow_steps_down(calls, tmp_path):
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    run(make, lambda model: model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=callbacks), on(1, 2))
    assert max(calls) > 4


def test_a_model_with_a_fit_of_its_own_is_left_alone(calls):
    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, callbacks=[keras.callbacks.TerminateOnNaN()], **kwargs)

    with un.OneDeviceStrategy(replicas=2).scope():
        model = Own([layers.Dense(3)])
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=6, verbose=0)
    assert calls == [1] * 16


def test_a_generator_is_asked_for_one_batch_at_a_time(calls):
    def batches():
        for start in range(0, 96, 6):
            yield X[start : start + 6], Y[start : start + 6]

    run(make, lambda model: model.fit(batches(), steps_per_epoch=16, shuffle=False, verbose=0), on(1, 2))
    assert calls == [1] * 16


class Stream:
    """Batches whose number nobody knows before the pass ends."""

    def __init__(self, error_at=None):
        self.error_at = error_at

    def __iter__(self):
        for start in range(0, 96, 6):
            if start // 6 == self.error_at:
                raise OSError("disk gone")
            yield X[start : start + 6], Y[start : start + 6]


@pytest.mark.parametrize("steps", [5, 16])
def test_an_error_in_a_stream_comes_after_the_batches_before_it(steps, calls, monkeypatch):
    monkeypatch.setattr(steps_per_call.StepsPerCall, "steps", lambda self: 4)
    strategy = on(1, 2)
    with strategy.scope():
        model = make()
    with pytest.raises(OSError, match="disk gone"):
        model.fit(strategy.distribute_dataset(Stream(9)), epochs=9, steps_per_epoch=steps, verbose=0)
    assert int(model.optimizer.iterations) == 9


def test_what_came_before_an_error_in_the_data_is_trained_on():
    class Breaks(keras.utils.PyDataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            if index == 9:
                raise OSError("disk gone")
            return X[index * 6 : index * 6 + 6], Y[index * 6 : index * 6 + 6]

    with on(1, 2).scope():
        model = make(steps_per_execution=4)
    with pytest.raises(OSError, match="disk gone"):
        model.fit(Breaks(), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 9


def test_logs_are_read_a_few_times_a_second(monkeypatch):
    """Between two readings the bar is shown what it was shown before; the end of the epoch is exact."""
    now = [100.0]
    monkeypatch.setattr(steps_per_call.time, "perf_counter", lambda: now[0])
    paced, shown = steps_per_call.StepsPerCall(), []
    for step in range(8):
        now[0] += 0.04
        shown.append(paced.note_call(1, {"loss": np.float32(step)})["loss"])
    assert shown == [0, 0, 0, 3, 3, 3, 6, 6]


class InTurn(FitCallback):
    """Has Keras show its bar between the steps: otherwise it does so by threads, in any order."""

    def steps_until_due(self, step):
        return 64

    def on_train_batch_end(self, batch, logs=None):
        pass


def test_the_bar_shows_what_is_of_this_epoch(monkeypatch):
    """However short an epoch is: nothing of the epoch before, and at its last step its result, as callbacks at its end get it."""
    monkeypatch.setattr(steps_per_call, "SECONDS_BETWEEN_LOGS", 1e6)
    monkeypatch.setattr(steps_per_call.StepsPerCall, "steps", lambda self: 3)
    lines = []

    def note(self, current, values=None, finalize=None):
        lines.append((current, {name: float(value) for name, value in values}))

    monkeypatch.setattr(keras.utils.Progbar, "update", note)
    history = run(make, lambda model: model.fit(X, Y, batch_size=12, epochs=3, callbacks=[InTurn()]), on(1, 2)).logs
    results = [{name: float(values[epoch]) for name, values in history.items()} for epoch in range(3)]
    epochs = [lines[start : start + 4] for start in range(0, 12, 4)]
    assert [[step for step, _ in epoch] for epoch in epochs] == [[3, 6, 8, 8]] * 3
    for epoch, result in zip(epochs, results, strict=True):
        assert epoch[-2][1] == epoch[-1][1] == result
    shown = [values["loss"] for epoch in epochs for _, values in epoch[:1]]
    assert len(set(shown)) == 3
    assert not set(shown) & {result["loss"] for result in results}


def test_the_steps_of_a_call_follow_the_clock(monkeypatch):
    """One call late, for a call is waited for when the next one has been started; growing by a factor."""
    now, paced, steps = [100.0], steps_per_call.StepsPerCall(), []
    monkeypatch.setattr(steps_per_call.time, "perf_counter", lambda: now[0])
    for seconds_a_step in (5.0, 0.0041, 0.0041, 0.0041, 0.0041, 0.0041, 0.041, 0.041, 5.0, 5.0, 0.4, 0.4, 0.19, 0.19, 0.07, 0.07):
        steps.append(paced.steps())
        paced.note_call(paced.steps(), {})
        now[0] += seconds_a_step * steps[-1]
    assert steps == [1, 1, 1, 4, 16, 64, 121, 121, 12, 12, 1, 1, 4, 4, 6, 6]


EXECUTIONS = {
    "that divide nothing": (3, {"batch_size": 10, "epochs": 3, "validation_data": (X[:23], Y[:23]), "validation_batch_size": 4}),
    "more than an epoch has": (50, {"batch_size": 10, "epochs": 3, "validation_data": (X[:23], Y[:23])}),
    "and steps per epoch": (3, {"batch_size": 3, "epochs": 2, "steps_per_epoch": 4}),
}


@pytest.mark.parametrize("kind", mostly_slow(EXECUTIONS, "and steps per epoch"))
def test_steps_per_execution_are_those_of_keras(kind):
    steps, options = EXECUTIONS[kind]
    assert_equals_keras(net(tanh(7), 3, metrics=["mae"], steps_per_execution=steps), fitting(X[:43], Y[:43], **options))


def test_the_end_of_an_epoch_is_its_last_batch():
    history = run(make, lambda model: model.fit(X, Y, batch_size=6, epochs=2, verbose=0), on(1, 2))
    evaluated = history.model.evaluate(X, Y, batch_size=6, verbose=0, return_dict=True)
    assert set(history.logs) == set(evaluated) == {"loss", "mae"}


# --- the bits of what is compiled for users: last, for so is all that comes behind them ----------------------------------


@pytest.mark.usefixtures("unhurried", "compiled_for_users")
@pytest.mark.parametrize(("devices", "replicas"), [(1, 3), *slow((1, 2), (2, 2), (2, 3))])
def test_the_number_of_steps_in_a_call_changes_no_bit(devices, replicas, calls):
    """With a callback that looks at every batch, one at a time; else several; ragged batches and validation included."""
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)

    def fit(model, **options):
        return model.fit(X, Y, batch_size=6, epochs=cases(2, 3), verbose=0, validation_data=(X[:40], Y[:40]), **options)

    one = run(make, lambda model: fit(model, callbacks=[look]), on(devices, replicas))
    assert set(calls[:16]) == {1}
    calls.clear()
    several = run(make, fit, on(devices, replicas))
    assert max(calls) > 4
    said = [run(lambda n=n: make(n), fit, on(devices, replicas)) for n in cases((5,), (5, 100))]
    assert all(other.bits == one.bits for other in (several, *said))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.usefixtures("unhurried", "compiled_for_users")
@pytest.mark.parametrize(("steps", "taken"), [(5, 5 + 5 + 5 + 1 + 5 + 5), *slow((4, 20), (16, 48), (40, 96))])
def test_a_pass_may_end_in_the_middle_of_a_group(steps, taken, calls):
    """The next epoch begins another pass, whether steps are taken one at a time or not, as plain Keras does."""
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    strategy = on(1, 3)

    def fit(model, **options):
        return model.fit(strategy.distribute_dataset(Stream()), epochs=6, steps_per_epoch=steps, verbose=0, **options)

    one = run(make, lambda model: fit(model, callbacks=[look]), strategy)
    assert calls == [1] * taken
    calls.clear()
    several = run(make, fit, strategy)
    assert max(calls) > 1
    assert sum(calls) == taken
    assert one.bits == several.bits
