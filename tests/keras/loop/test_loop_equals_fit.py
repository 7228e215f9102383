"""A loop of the user's own and fit train to the same bits, on every placement."""

import itertools

import keras
import pytest

import unisono as un
from loops import MODELS, Loop, by_fit, data, policy
from sizes import cases, slow
from trainings import on

pytestmark = pytest.mark.usefixtures("compiled_for_users")

ROWS = {8: 19, 24: 27, 48: 123, 128: 300}
"""By the size of a batch. Of 8 rows each replica has one, and of the three that are left over one or none: that is one program. Of 24 rows it
has three."""
DEEP = ("conv", "lstm", "transformer")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")


LOOPS = cases(
    ((3, "average", "iterator"), (1, "vector", "for")),
    ((1, "vector", "for"), (4, "average", "iterator"), (8, "vector", "epoch")),
)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=64, dynamic_growth_steps=3)


@pytest.mark.parametrize(
    ("name", "batch_size", "precision"),
    [
        ("dense", 8, "mixed_float16"),
        *slow(("dense", 24, "mixed_float16")),
        *slow(*itertools.product(DEEP, (48, 128), PRECISIONS)),
    ],
)
def test_loops_have_one_fingerprint(name, batch_size, precision):
    """Ragged batches at the end; the loss by the engine on one placement, by compute_average_loss on another.

    Without attention in float16, which plain Keras cannot train on CPU either.
    """
    x, y = data(name, ROWS[batch_size])
    optimizer = scaled if precision == "mixed_float16" else keras.optimizers.Adam
    with policy(precision):
        seen = set()
        for devices, loss, how in LOOPS:
            seen.add(Loop(on(devices), MODELS[name], optimizer, loss, batch_size).train(x, y, how=how))
    assert len(seen) == 1


@pytest.mark.parametrize("replicas", slow(1, 2, 5))
@pytest.mark.parametrize("loss", ["average", *slow("vector", "fixed")])
def test_every_r_and_every_loss(replicas, loss):
    """A fixed divisor that is every batch's real one."""
    x, y = data("conv", 48)
    fit = by_fit(on(1, replicas), MODELS["conv"], keras.optimizers.Adam, x, y, 12)
    assert Loop(on(1, replicas), MODELS["conv"], loss=loss).train(x, y) == fit
    assert Loop(un.MirroredStrategy(replicas=replicas, devices=min(2, replicas)), MODELS["conv"], loss=loss).train(x, y) == fit


def test_shuffled_rows_come_in_the_order_of_fit():
    x, y = data("dense", 21)
    fit = by_fit(on(1), MODELS["dense"], keras.optimizers.Adam, x, y, 8, shuffle=True)
    assert Loop(on(1), batch_size=8).train(x, y, shuffle=True) == fit


@pytest.mark.slow
def test_fit_goes_on_where_a_loop_stopped():
    """And a loop where fit did: state lies in the variables in between."""
    x, y = data("dense", 36)
    loop = Loop(on(2))
    loop.train(x, y, epochs=1)
    loop.model.compile(loop.optimizer, "sparse_categorical_crossentropy")
    loop.model.fit(x, y, batch_size=12, epochs=1, shuffle=False, verbose=0)
    assert int(loop.optimizer.iterations.value) == 6
    loop.train(x, y, epochs=1)
    assert int(loop.optimizer.iterations.value) == 9


class Says(Loop):
    """Returns more than its loss, and feeds its metric inside of what is differentiated."""

    def __init__(self, strategy, name, what):
        super().__init__(strategy, MODELS[name])
        self.what = what

    def step(self, batch):
        x, y = batch

        def loss():
            predictions = self.model(x, training=True)
            if "metric" in self.what:
                self.accuracy.update_state(y, predictions)
            return self.loss(y, predictions), predictions

        (value, predictions), gradients = un.value_and_grad(loss, self.model.trainable_variables, has_aux=True)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        said = {"predictions": predictions, "gradients": gradients, "rows": x, "loss": value}
        return {key: said[key] for key in said if key in self.what}

    def one(self, batch):
        self.strategy.run(self.step, args=(batch,))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *slow(
            ("dense", "metric predictions rows"),
            ("conv", ""),
            ("conv", "metric predictions rows"),
            ("conv", "gradients loss"),
            ("transformer", "predictions loss"),
        ),
    ],
)
def test_what_the_code_returns_changes_no_bit(name, what):
    x, y = data(name, 43)
    fit = by_fit(on(1, 4), MODELS[name], keras.optimizers.Adam, x, y, 12)
    assert Says(on(2, 4), name, what).train(x, y) == fit
    assert Says(on(1, 1), name, what).train(x, y) == by_fit(on(1, 1), MODELS[name], keras.optimizers.Adam, x, y, 12)
