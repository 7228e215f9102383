"""Keras' callbacks see what they see in plain Keras, as often, and what they change takes effect."""

import keras
import numpy as np
import pytest
from keras import callbacks

import unisono as un
from sizes import ROWS_AT_ONCE, mostly_slow, slow
from trainings import assert_equals_keras, assert_same_bits, fitting, net, on, rows, run, tanh
from unisono._src.engine.state import get_step_count
from unisono._src.keras.fit import steps_per_call, watches

X, Y = rows(43, 5), rows(43, 2, seed=1)


def regressor(rate=0.1, loss="mse", **options):
    return net(tanh(4), 2, optimizer=lambda: keras.optimizers.SGD(rate, momentum=0.5), loss=loss, metrics=["mae"], **options)


class Hooks(callbacks.Callback):
    """Writes down every hook with its batch or epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def of(self, hook):
        return [number for name, number in self.seen if name == hook]


def noted(name):
    def hook(self, *args, logs=None):
        self.seen.append((name, args[0] if args and isinstance(args[0], int) else None))

    return hook


PHASES = [f"on_{mode}_{edge}" for mode in ("train", "test", "predict") for edge in ("begin", "end")]
BATCHES = [f"on_{mode}_batch_{edge}" for mode in ("train", "test", "predict") for edge in ("begin", "end")]
for hook_name in [*PHASES, *BATCHES, "on_epoch_begin", "on_epoch_end"]:
    setattr(Hooks, hook_name, noted(hook_name))


@pytest.mark.parametrize("steps", [1, *slow(3)])
def test_the_hooks_of_fit_evaluate_and_predict(steps):
    """Every hook, in its order and with its numbers, as plain Keras calls them."""
    seen = []
    for strategy in (None, on(3)):
        hooks = Hooks()
        model = run(
            regressor(steps_per_execution=steps),
            fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2, validation_data=(X[:13], Y[:13]), callbacks=[hooks]),
            strategy,
        ).model
        model.evaluate(X, Y, batch_size=ROWS_AT_ONCE, verbose=0, callbacks=[hooks])
        model.predict(X, batch_size=ROWS_AT_ONCE, verbose=0, callbacks=[hooks])
        seen.append(hooks.seen)
    assert seen[1] == seen[0]
    assert len([name for name, _ in seen[1] if name == "on_train_batch_end"]) == (2 * -(-43 // ROWS_AT_ONCE) if steps == 1 else 4)


GROUPS = {
    10: (range(0, 50, 10), range(9, 50, 10)),
    20: ([0, 20, 40], [19, 39, 59]),  # Keras names the end of a short group as if it were whole
    500: ([0], [499]),
}


@pytest.mark.parametrize("steps", mostly_slow(GROUPS, 20))
def test_batch_hooks_of_several_steps_per_execution(steps):
    """50 batches in groups: the numbers of each group's begin and end, in fit, evaluate and predict."""
    x, y, hooks = rows(149, 5), rows(149, 2, seed=1), Hooks()
    model = run(regressor(steps_per_execution=steps), fitting(x, y, batch_size=3, callbacks=[hooks]), on(3, 4)).model
    model.evaluate(x, y, batch_size=3, verbose=0, callbacks=[hooks])
    model.predict(x, batch_size=3, verbose=0, callbacks=[hooks])
    for mode in ("train", "test", "predict"):
        assert hooks.of(f"on_{mode}_batch_begin") == list(GROUPS[steps][0]), mode
        assert hooks.of(f"on_{mode}_batch_end") == list(GROUPS[steps][1]), mode


def test_a_rate_set_before_every_batch():
    """A callback changes the learning rate in every batch: the weights of plain Keras."""

    def fit(model):
        def change(batch, logs=None):
            model.optimizer.learning_rate = 0.2 / (batch + 1)

        return fitting(X, Y, batch_size=ROWS_AT_ONCE, callbacks=[callbacks.LambdaCallback(on_train_batch_begin=change)])(model)

    assert_equals_keras(regressor(), fit)


def test_reduce_on_plateau_and_early_stopping():
    """A rate far too high: the rate falls and training stops in the epochs of plain Keras, with the best weights back."""

    def fit(model):
        plateau = callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=10.0)
        stop = callbacks.EarlyStopping(monitor="val_loss", patience=2, min_delta=10.0, restore_best_weights=True)
        return fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=9, validation_data=(X[:13], Y[:13]), callbacks=[plateau, stop])(
            model
        )

    plain = assert_equals_keras(regressor(), fit)
    assert len(plain.logs["loss"]) == 3
    assert plain.logs["learning_rate"] == pytest.approx([0.1, 0.1, 0.05])


def test_model_checkpoint_of_weights_and_of_the_model(tmp_path):
    """Files of every epoch, which hold what the model held then, and open without a strategy."""
    files = [
        callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True),
        callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True),
        callbacks.ModelCheckpoint(tmp_path / "batch-{batch}.keras", save_freq=2),
    ]
    prints = []
    note = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: prints.append(un.fingerprint(note.model)))
    model = run(regressor(), fitting(X, Y, batch_size=10, epochs=2, callbacks=[note, *files]), on(3)).model
    assert prints[1] == un.fingerprint(model) != prints[0]
    assert {f.name for f in tmp_path.iterdir()} >= {"1.weights.h5", "2.weights.h5", "best.keras", "batch-4.keras"}
    assert un.fingerprint(keras.saving.load_model(tmp_path / "best.keras")) == un.fingerprint(model)
    fresh = regressor()()
    fresh.build((None, 5))
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(tmp_path / "2.weights.h5")
    assert un.fingerprint(fresh) == un.fingerprint(model)
    four_steps = run(regressor(), fitting(X[:40], Y[:40], batch_size=10), on(1)).model
    assert un.fingerprint(keras.saving.load_model(tmp_path / "batch-4.keras")) == un.fingerprint(four_steps)


def test_terminate_on_nan():
    """Training stops in the first batch whose loss is no number."""
    x, hooks = X.copy(), Hooks()
    x[21, 0] = np.nan
    before = get_step_count().steps
    fit = fitting(x, Y, batch_size=10, epochs=3, callbacks=[callbacks.TerminateOnNaN(), hooks])
    with pytest.warns(
        UserWarning, match=rf"The loss is nan in step {before + 3}\. .*UNISONO_RECORD=run .*; then: unisono replay"
    ):
        run(regressor(), fit, on(3))
    assert hooks.of("on_train_batch_end") == [0, 1, 2]


@pytest.mark.parametrize("seconds", [0, 1e6])
def test_a_loss_that_is_not_finite_is_said_once(seconds, monkeypatch):
    """While the training goes on, or at its end; without a callback, and with the steps of the call that it came from."""
    monkeypatch.setattr(watches, "SECONDS_BETWEEN_LOOKS", seconds)
    monkeypatch.setattr(steps_per_call.StepsPerCall, "steps", lambda self: 2)
    x = X.copy()
    x[21, 0] = np.nan
    before = get_step_count().steps
    with pytest.warns(UserWarning, match=rf"The loss is nan in one of the steps {before + 3} to {before + 4}\. ") as said:
        run(regressor(), fitting(x, Y, batch_size=10, epochs=3), on(1, 2))
    assert len(said) == 1


@pytest.mark.slow
def test_swapped_averages():
    """SwapEMAWeights evaluates the averages and leaves the weights, as in plain Keras."""

    make = net(tanh(4), 2, optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8))

    def fit(model):
        swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
        return fitting(X, Y, batch_size=10, epochs=2, validation_data=(X[:13], Y[:13]), callbacks=[swap])(model)

    assert_equals_keras(make, fit, tolerance=1e-5)


def test_weights_that_a_callback_sets_are_used():
    """A callback halves a kernel between two batches: every replica goes on from it."""

    class Halving(callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            kernel = self.model.layers[0].kernel  # reading the model brings the state back into it
            if batch == 2:
                kernel.assign(kernel.value * 0.5)

    assert_equals_keras(regressor(), lambda model: fitting(X, Y, batch_size=ROWS_AT_ONCE, callbacks=[Halving()])(model))


def test_stop_training_in_mid_epoch():
    """A callback that sets stop_training after the second batch: two steps, then the end of the epoch's hooks."""

    def fit(model):
        def stop(batch, logs):
            model.stop_training = batch == 1

        return fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=3, callbacks=[callbacks.LambdaCallback(on_train_batch_end=stop)])(
            model
        )

    ours = assert_same_bits(regressor(), fit)
    assert len(ours.logs["loss"]) == 1
    assert int(ours.model.optimizer.iterations.value) == int(run(regressor(), fit).model.optimizer.iterations.value)
