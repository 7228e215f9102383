"""The digest covers positions, shapes, dtypes and bits, and never names."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import unisono as un


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    made = keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dropout(0.5), layers.BatchNormalization()])
    made.compile("adam", "mse")
    made.optimizer.build(made.trainable_variables)
    return made


def test_names_do_not_count():
    one, other = model(), model()
    assert [v.path for v in one.variables] != [v.path for v in other.variables]
    assert un.fingerprint(one) == un.fingerprint(other)


@pytest.mark.parametrize("index", range(11))
def test_every_variable_of_a_model_counts(index):
    """Weights, moving statistics, seeds, and the optimizer's variables."""
    made = model()
    before = un.fingerprint(made)
    variables = [*made.variables, *made.optimizer.variables]
    variable = variables[index]
    variable.assign(variable.value + 1)
    assert un.fingerprint(made) != before


@given(st.integers(0, 31), st.integers(0, 2))
def test_every_bit_counts(bit, position):
    array = np.array([1.5, -2.0, 0.0], "float32")
    other = array.copy()
    other.view("uint32")[position] ^= np.uint32(1 << bit)
    assert un.fingerprint(array) != un.fingerprint(other)


def test_shape_dtype_and_position_count():
    zeros = np.zeros(4, "float32")
    different = [
        [zeros],
        [zeros.reshape(2, 2)],
        [zeros.astype("int32")],
        [zeros, zeros],
        [[zeros, np.ones(1)]],
        [[np.ones(1), zeros]],
    ]
    assert len({un.fingerprint(*objects) for objects in different}) == len(different)


def test_optimizers_metrics_layers_and_trees_have_fingerprints():
    made, metric = model(), keras.metrics.Mean()
    metric.update_state([1.0, 2.0])
    before = un.fingerprint(made.optimizer, metric, made.layers[0], made.layers[0].kernel, {"a": (1.0, np.zeros(2))})
    metric.update_state([1.0])
    assert un.fingerprint(made.optimizer, metric, made.layers[0], made.layers[0].kernel, {"a": (1.0, np.zeros(2))}) != before


def test_what_has_no_bits_is_refused():
    with pytest.raises(TypeError, match="of type function, which holds no bits that it knows"):
        un.fingerprint([1.0, un.fingerprint])


def test_texts_differ_by_their_letters():
    assert un.fingerprint({"a": "1"}) == un.fingerprint({"a": "1"})
    assert len({un.fingerprint(thing) for thing in ("1", "2", 1, np.frombuffer(b"1", "uint8"))}) == 4


def test_a_callback_sees_the_state_of_the_step(rng):
    """While fit runs, Keras holds the state outside the model."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(un.fingerprint(self.model))

    with un.OneDeviceStrategy(replicas=2).scope():
        made = model()
    made.compile("adam", "mse")
    x = rng.standard_normal((12, 3)).astype("float32")
    made.fit(x, rng.standard_normal((12, 4)), batch_size=4, epochs=1, verbose=0, callbacks=[Watch()])
    assert len(set(seen)) == 3
    assert seen[-1] == un.fingerprint(made)


def test_an_optimizer_alone_is_refused_where_keras_holds_its_state(rng):
    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            un.fingerprint(made.optimizer)  # self.model would have Keras bring the state back first

    made = model()
    x = rng.standard_normal((12, 3)).astype("float32")
    with pytest.raises(ValueError, match=r"Write fingerprint\(model\)"):
        made.fit(x, rng.standard_normal((12, 4)), verbose=0, callbacks=[Watch()])
