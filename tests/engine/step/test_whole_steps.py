"""Steps that are one call, between steps that are several."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from processes import python
from trainings import on
from unisono._src.engine.step.program_calls import ProgramCalls
from unisono._src.kernels.native.library import load_kernels
from whole_batch_layers import Experts
from whole_batch_losses import CLASSES, contrast, dice, rmse


def new_model():
    inputs = keras.Input((4,))
    hidden = Experts()(inputs)
    outputs = {name: layers.Dense(CLASSES, name=name)(hidden) for name in ("value", "mask", "embedding")}
    return keras.Model(inputs, outputs)


@pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))
def test_a_step_of_several_calls_is_ended_by_its_own_program(monkeypatch):
    """A step of one call follows it, of another kind: 20 rows on eight replicas, and then 16."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(36, 4)).astype("float32"), rng.integers(0, 3, 36)
    calls = []
    call = ProgramCalls.__call__

    def noted(self, group, round_, orders):
        calls.append((group[0].rows, self._cut, orders[0][0].finishing, orders[0][0].group > 0))
        return call(self, group, round_, orders)

    monkeypatch.setattr(ProgramCalls, "__call__", noted)
    keras.utils.set_random_seed(0)
    with on(8, 8).scope():
        model = new_model()
    losses = {"value": rmse, "mask": dice, "embedding": contrast}
    model.compile(keras.optimizers.SGD(0.1), losses, steps_per_execution=2)
    model.fit(x, dict.fromkeys(model.output_names, labels), batch_size=20, epochs=2, shuffle=False, verbose=0)
    kinds = {rows: {cut for of, cut, *_ in calls if of == rows} for rows in (20, 16)}
    assert [len(cuts) for cuts in kinds.values()] == [1, 1]
    assert {inside for rows, _, _, inside in calls if rows == 16} == {True}
    assert {inside for rows, _, _, inside in calls if rows == 20} == {False}


CALLS_PYTHON = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import unisono as un
import keras, numpy as np
from keras import layers

class Fussy(layers.Layer):
    refused = None

    def call(self, x):
        return jax.pure_callback(self.look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def look(self, x):
        if self.refused is not None and (np.asarray(x) == self.refused).any():
            raise RuntimeError("these rows are refused")
        return np.asarray(x)

with un.MirroredStrategy(devices=2, replicas=4).scope():
    model = keras.Sequential([layers.Input((3,)), Fussy(), layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.arange(24, dtype="float32").reshape(8, 3), np.ones((8, 1), "float32")
model.fit(x, y, batch_size=8, verbose=0)
model.layers[0].refused = x[-1, 0]
model.fit(x, y, batch_size=8, verbose=0)
"""


@pytest.mark.processes
def test_python_that_raises_on_one_device_ends_the_step():
    """The program ends with this error, and does not wait for the other device, which waits to add up with it."""
    done = python("-c", CALLS_PYTHON, timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: these rows are refused" in done.stderr
