"""A setting of an optimizer that is changed after the first step holds from the next step on."""

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import unisono as un
from sizes import cases, mostly_slow
from trainings import assert_equals_keras, on, rows

X, Y = rows(24, 5) * 100, rows(24, 2)

OPTIMIZERS = {
    "alone": lambda inner: inner,
    "with a loss scale": lambda inner: optimizers.LossScaleOptimizer(inner, initial_scale=1.0),
    "one of several": lambda inner: optimizers.MultiOptimizer(optimizers.OptimizerMap(inner, {"none": optimizers.SGD()})),
    "what a function picks": lambda inner: optimizers.MultiOptimizer(lambda _: inner),
}


def compiled(optimizer, *placement):
    keras.utils.set_random_seed(1)
    with on(*placement).scope():
        model = keras.Sequential([layers.Input((5,)), layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def fit(model, epochs=1, **more):
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, **more)


@pytest.mark.parametrize("kind", mostly_slow(OPTIMIZERS, "one of several"))
def test_a_setting_changed_between_two_fits_holds(kind):
    inner = optimizers.SGD(1e-6)
    model = compiled(OPTIMIZERS[kind](inner), 2, 2)
    fit(model)
    before = model.get_weights()
    fit(model)
    assert max(np.abs(now - then).max() for now, then in zip(model.get_weights(), before, strict=True)) > 1e-6
    inner.clipvalue = 1e-3  # an update is at most the learning rate times this
    before = model.get_weights()
    fit(model)
    assert max(np.abs(now - then).max() for now, then in zip(model.get_weights(), before, strict=True)) < 1e-6


def test_what_an_optimizer_keeps_of_its_own_trace_is_no_changed_setting():
    """AdamW keeps which weights decay: its step is traced as often as that of Adam."""

    def count_traces(optimizer):
        traces = []

        class Counted(layers.Dense):
            def call(self, x):
                traces.append(1)
                return super().call(x)

        with on(1, 1).scope():
            model = keras.Sequential([layers.Input((5,)), Counted(2)])
        model.compile(optimizer, "mse")
        traces.clear()
        fit(model, 2)
        return len(traces)

    assert count_traces(optimizers.AdamW()) == count_traces(optimizers.Adam())


@pytest.mark.parametrize("placement", [(2, 2), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_a_setting_changed_by_a_callback_holds_from_the_next_epoch_on(placement):
    def change(*_):
        model.optimizer.clipvalue = 1e-3

    model = compiled(optimizers.Adam(), *placement)
    fit(model, 2, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=change)])
    by_callback = un.fingerprint(model)
    model = compiled(optimizers.Adam(), *placement)
    fit(model)
    change()
    fit(model, 2, initial_epoch=1)
    assert un.fingerprint(model) == by_callback
    model = compiled(optimizers.Adam(), *placement)
    fit(model, 2)
    assert un.fingerprint(model) != by_callback


def test_an_attribute_that_one_of_several_optimizers_does_not_have_is_refused():
    inner = optimizers.SGD()
    model = compiled(OPTIMIZERS["one of several"](inner), 1, 2)
    inner.lr = 0.1
    with pytest.raises(AttributeError, match=r"optimizer.lr was set, but \w+ has no such attribute"):
        fit(model)


def test_a_misspelt_setting_is_refused_and_a_note_is_not():
    model = compiled(optimizers.SGD(), 1, 2)
    model.optimizer.initial_learning_rate = 0.1
    model.optimizer.tag = "first"
    fit(model)
    model.optimizer.clip_norm = 1.0
    with pytest.raises(
        AttributeError, match=r"optimizer.clip_norm was set, but SGD has no such.*or give the attribute another name"
    ):
        fit(model)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lr", "Adam has no attribute 'lr' in Keras 3. Write optimizer.learning_rate, and float() for a number."),
        ("decay", "Adam has no attribute 'decay' in Keras 3. Write a schedule of keras.optimizers.schedules."),
        ("tag", None),
    ],
)
def test_reading_an_older_attribute_says_what_to_write(name, said):
    """In a callback, in a scope and in the code of a step; once where these lie in each other. Other attributes are errors of Python's."""
    strategy = on(1, 2)
    model = compiled(optimizers.Adam(), 1, 2)
    read = lambda *_: getattr(model.optimizer, name)

    def in_a_callback():
        fit(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=read)])

    def in_a_step_in_a_scope():
        with strategy.scope():
            strategy.run(read)

    def in_a_scope():
        with strategy.scope():
            read()

    for line in (in_a_callback, in_a_scope, in_a_step_in_a_scope, lambda: strategy.run(read), un.function(read)):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'") as error:
            line()
        notes = [note for note in getattr(error.value, "__notes__", []) if "Write" in note]
        assert notes == [said] * (said is not None)


def test_a_schedule_takes_the_place_of_a_learning_rate():
    """With a schedule the optimizer has one variable less."""

    def train(model):
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        model.optimizer.learning_rate = optimizers.schedules.ExponentialDecay(1e-6, 2, 0.5)
        return model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)

    assert_equals_keras(lambda: compiled_anywhere(optimizers.SGD(1e-6)), train, replicas=cases((4,), (1, 4)))


def compiled_anywhere(optimizer):
    model = keras.Sequential([layers.Input((5,)), layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def test_notes_with_the_name_of_a_setting_in_them_are_the_users():
    class OneCycle(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.optimizer.max_learning_rate = 1e-5
            self.model.optimizer.learning_rate_at_start = 1e-6

        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = self.model.optimizer.max_learning_rate / (epoch + 1)

    fit_twice = lambda model: model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[OneCycle()])
    assert_equals_keras(lambda: compiled_anywhere(optimizers.SGD(1e-6)), fit_twice, replicas=(4,))
