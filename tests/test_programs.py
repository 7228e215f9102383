"""One compilation for each number of rows, whatever the number of devices."""

from __future__ import annotations

import collections
import logging

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from unisono.xla.programs import Program


@pytest.fixture
def compiled(caplog):
    """The names of the programs that JAX compiles."""
    names = collections.Counter()

    class Watch(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if message.startswith("Compiling "):
                names[message.split()[1].removeprefix("jit(").removesuffix(")")] += 1

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Watch()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield names
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_two_ragged_epochs_compile_once_for_each_number_of_rows(compiled, devices, rng):
    """12 rows on 8 replicas are 2 or 1, the last 3 rows are 1 or none: two numbers of rows."""
    with un.MirroredStrategy(devices=devices, replicas=8).scope():
        model = keras.Sequential([layers.Input((5,)), layers.Dense(4, "relu"), layers.Dropout(0.1), layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    x, y = rng.standard_normal((27, 5)), rng.standard_normal((27, 2))
    compiled.clear()
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    assert (compiled["train"], compiled["finish_training"]) == (2, 1)
    assert compiled["add"] <= 1  # none where JAX has this very sum from the model before
    compiled.clear()
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    model.evaluate(x, y, batch_size=12, verbose=0)
    assert (compiled["train"], compiled["finish_training"], compiled["evaluate"]) == (0, 0, 2)
    assert compiled["add"] <= 1


def test_a_program_runs_the_same_machine_code_on_every_device(compiled):
    program = Program(lambda a, b: jax.numpy.tanh(a) * b + a)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1000)).astype("float32")
    results = [program(device, None, *jax.device_put((a, b), device)) for device in jax.devices()]
    assert sum(compiled.values()) == 1
    assert [r.devices() for r in results] == [{d} for d in jax.devices()]
    assert len({np.asarray(r).tobytes() for r in results}) == 1


def test_a_key_is_a_shape():
    program = Program(lambda a: a + 1)
    device = jax.devices()[0]
    assert program(device, 3, jax.numpy.zeros(3)).shape == (3,)
    assert program(device, 5, jax.numpy.zeros(5)).shape == (5,)
