"""One compilation for each number of rows, whatever the number of devices."""

from __future__ import annotations

import collections
import gc
import logging
import pathlib

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import slow
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.xla.programs import DeviceProgram


@pytest.fixture
def compiled(caplog, compiled_anew):
    """The names of the programs that JAX compiles, none of which was compiled before."""
    names = collections.Counter()

    class Watch(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if message.startswith("Finished XLA compilation of "):
                names[message.split()[4].removeprefix("jit(").removesuffix(")")] += 1

    logger, handler = logging.getLogger("jax._src.dispatch"), Watch()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield names
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("devices", [3, *slow(1, 8)])
def test_two_ragged_epochs_compile_once_for_each_number_of_rows(compiled, devices, rng):
    """12 rows on 8 replicas are 2 or 1, the last 3 rows are 1 or none: three programs."""
    with un.MirroredStrategy(devices=devices, replicas=8).scope():
        model = keras.Sequential([layers.Input((5,)), layers.Dense(4, "relu"), layers.Dropout(0.1), layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    x, y = rng.standard_normal((27, 5)), rng.standard_normal((27, 2))
    compiled.clear()
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    assert compiled["train"] == 3
    assert compiled["add"] <= 2  # of all devices, and of those that have rows of the last batch
    compiled.clear()
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    model.evaluate(x, y, batch_size=12, verbose=0)
    assert (compiled["train"], compiled["evaluate"]) == (0, 3)
    assert compiled["add"] <= 2


def test_a_program_runs_the_same_machine_code_on_every_device(compiled):
    program = DeviceProgram(lambda a, b: jax.numpy.tanh(a) * b + a)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1000)).astype("float32")
    results = [program(device, None, *jax.device_put((a, b), device)) for device in jax.devices()]
    assert sum(compiled.values()) == 1
    assert [r.devices() for r in results] == [{d} for d in jax.devices()]
    assert len({np.asarray(r).tobytes() for r in results}) == 1
    mesh = get_mesh(tuple(jax.devices()))
    together = DeviceProgram(lambda a, b: jax.numpy.tanh(a) * b + a, cut=True)  # as one call of all devices, too
    cut = together(mesh, None, mesh.put_blocks([a] * mesh.size), mesh.put_everywhere(b))
    assert [block.devices() for block in mesh.list_blocks(cut)] == [{d} for d in jax.devices()]
    assert {np.asarray(block).tobytes() for block in mesh.list_blocks(cut)} == {np.asarray(results[0]).tobytes()}


def test_a_key_is_a_shape():
    program = DeviceProgram(lambda a: a + 1)
    device = jax.devices()[0]
    assert program(device, 3, jax.numpy.zeros(3)).shape == (3,)
    assert program(device, 5, jax.numpy.zeros(5)).shape == (5,)


@pytest.mark.slow
def test_a_model_of_the_same_make_is_not_compiled_again(compiled, rng):
    """On another placement neither; another number of units, or another name in the logs, is another program."""

    def fit(devices=1, units=4, metric="mae"):
        with un.MirroredStrategy(devices=devices, replicas=4).scope():
            model = keras.Sequential([layers.Input((5,)), layers.Dense(units), layers.Dense(2)])
        model.compile("adam", "mse", metrics=[metric])
        compiled.clear()
        return model.fit(x, y, batch_size=4, epochs=2, verbose=0).history

    x, y = rng.standard_normal((12, 5)), rng.standard_normal((12, 2))
    assert set(fit()) == {"loss", "mae"}
    assert compiled["train"] == 1
    assert set(fit(metric="mean_absolute_error")) == {"loss", "mean_absolute_error"}
    assert compiled["train"] == 1
    for devices in (1, 2, 4):
        assert set(fit(devices)) == {"loss", "mae"}
        assert compiled["train"] == 0
    fit(units=3)
    assert compiled["train"] == 1


class OneOfTwo(layers.Layer):
    """Scales by one of two weights of the same shape."""

    def __init__(self, used):
        super().__init__()
        self.used = used

    def build(self, shape):
        self.scales = [self.add_weight(shape=(), initializer=keras.initializers.Constant(value)) for value in (1, 5)]

    def call(self, x):
        return x * self.scales[self.used]


def test_models_that_use_other_weights_of_one_shape_have_programs_of_their_own():
    """Their programs differ in nothing else."""
    for used, expected in ((0, 1.0), (1, 5.0)):
        with un.OneDeviceStrategy(replicas=2).scope():
            model = keras.Sequential([layers.Input((1,)), OneOfTwo(used)])
        assert set(model.predict(np.ones((4, 1)), verbose=0).ravel()) == {expected}


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="Linux says how many pieces of memory a process has")
def test_machine_code_is_unloaded_where_no_model_uses_it():
    """A process may have only so many pieces of memory; what is kept for the next model of the same make is one copy."""

    def pieces():
        gc.collect()
        return len(pathlib.Path("/proc/self/maps").read_text().splitlines())

    first, *others = jax.devices()
    program = DeviceProgram(lambda a: jax.numpy.sin(a @ a.T).sum())
    program(first, None, np.ones((30, 30), "float32"))
    before = pieces()
    for device in others:
        program(device, None, np.ones((30, 30), "float32"))
    loaded = pieces() - before
    assert loaded >= len(others)
    del program
    assert pieces() - before < loaded / 4


def test_constants_are_part_of_a_program():
    device, results = jax.devices()[0], []
    for value in (1.0, 2.0):
        constant = jax.numpy.full(1000, value) + jax.numpy.arange(1000.0)
        program = DeviceProgram(lambda a, constant=constant: a + constant)
        results.append(float(program(device, None, jax.numpy.zeros(1000))[0]))
    assert results == [1, 2]
