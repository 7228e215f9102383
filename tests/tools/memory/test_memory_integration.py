"""`unisono memory` by a real process: the table of a script's own model and batch, before anything is trained."""

from __future__ import annotations

import json

import pytest

from processes import kept_in, python

pytestmark = pytest.mark.processes

FIT = """
import pathlib
import sys
import unisono as un
import keras
import numpy as np

with un.OneDeviceStrategy(replicas=2).scope():
    model = keras.Sequential([keras.layers.Dense(3, name="first")])
model.compile("adam", "mse")
print("the words are", sys.argv[1:])
model.fit(np.zeros((20, 4), "uint8"), np.zeros((20, 3), "float32"), batch_size=10)
pathlib.Path(sys.argv[1]).write_text("trained")
"""

LOOP = """
import unisono as un
import keras
import numpy as np

strategy = un.OneDeviceStrategy(replicas=2)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()


def step(x):
    value, gradients = un.value_and_grad(lambda: keras.ops.square(model(x))[:, 0], model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


(batch,) = strategy.distribute_dataset([np.ones((4, 1), "float32")])
strategy.run(step, args=(batch,))
"""


def test_a_script_ends_before_its_first_step(tmp_path):
    script, trained = tmp_path / "train.py", tmp_path / "trained"
    script.write_text(FIT)
    done = python("-m", "unisono", "memory", "--json", "--replicas", "2,5", str(script), str(trained), "--x", **kept_in(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"the words are ['{trained}', '--x']" in done.stderr
    assert not trained.exists()
    report = json.loads(done.stdout)
    assert [(choice["replicas"], choice["is_own"]) for choice in report["choices"]] == [(2, True), (5, False)]
    of_device = report["choices"][0]["devices"]["cpu:0"]
    assert (of_device["weights"], report["batch_size"]) == (4 * (4 * 3 + 3), 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LOOP, "the first step of this script is one of strategy.run"),
        ("print('nothing')", "the script ended with exit code 0 before the first step of a fit or train_on_batch"),
    ],
)
def test_a_script_without_such_a_step_is_told_so(tmp_path, text, message):
    script = tmp_path / "train.py"
    script.write_text(text)
    done = python("-m", "unisono", "memory", str(script))
    assert done.returncode == 2
    assert message in done.stderr
