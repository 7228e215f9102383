"""Whatever stops a run in mid-epoch, the model keeps the weights of the last whole step and can go on."""

from __future__ import annotations

import signal
import threading

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from processes import python
from sizes import mostly_slow, slow

ROWS, BATCH = 40, 4


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    with un.MirroredStrategy(devices=2, replicas=4).scope():
        made = keras.Sequential(
            [layers.Input((5,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(2)]
        )
    made.compile("adam", "mse")
    return made


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.standard_normal((ROWS, 5)).astype("float32"), rng.standard_normal((ROWS, 2)).astype("float32")


class Steps(keras.callbacks.Callback):
    """The fingerprint after every step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(un.fingerprint(self.model))


@pytest.fixture(scope="module")
def whole_steps(data):
    made, steps = model(), Steps()
    made.optimizer.build(made.trainable_variables)
    start = un.fingerprint(made)
    made.fit(*data, batch_size=BATCH, epochs=3, verbose=0, callbacks=[steps])
    return [start, *steps.seen]


def test_a_generator_that_ends_early_ends_the_epoch(data):
    def batches():
        for i in range(4):
            yield data[0][i * BATCH : (i + 1) * BATCH], data[1][i * BATCH : (i + 1) * BATCH]

    made, steps = model(), Steps()
    with pytest.warns(UserWarning, match="ran out of data"):
        made.fit(batches(), steps_per_epoch=6, epochs=1, shuffle=False, verbose=0, callbacks=[steps])
    assert len(steps.seen) == 4
    assert un.fingerprint(made) == steps.seen[-1]


def test_a_dataset_that_raises_does_so_in_its_turn(data):
    """Batches are asked for ahead; an error must not take the place of the step before it."""

    class Source(keras.utils.PyDataset):
        num_batches = 10

        def __getitem__(self, index):
            if index == 5:
                raise OSError("no batch 5")
            return data[0][index * BATCH : (index + 1) * BATCH], data[1][index * BATCH : (index + 1) * BATCH]

    made, steps = model(), Steps()
    with pytest.raises(OSError, match="no batch 5"):
        made.fit(Source(), shuffle=False, verbose=0, callbacks=[steps])
    assert len(steps.seen) == 5
    assert un.fingerprint(made) == steps.seen[-1]


def test_a_callback_that_raises_keeps_the_step(data, whole_steps):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                raise KeyboardInterrupt

    made = model()
    with pytest.raises(KeyboardInterrupt):
        made.fit(*data, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Stop()])
    assert un.fingerprint(made) == whole_steps[8]


@pytest.mark.parametrize("method", ["evaluate", *slow("predict")])
def test_an_interrupted_evaluation_leaves_the_weights(method, data):
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

        on_predict_batch_end = on_test_batch_end

    made = model()
    made.optimizer.build(made.trainable_variables)
    before = un.fingerprint(made)
    args = data if method == "evaluate" else data[:1]
    with pytest.raises(KeyboardInterrupt):
        getattr(made, method)(*args, batch_size=BATCH, verbose=0, callbacks=[Stop()])
    assert un.fingerprint(made) == before


def test_an_error_of_one_batch_does_not_bring_old_weights_back(data):
    made = model()
    made.train_on_batch(data[0][:BATCH], data[1][:BATCH])
    made.set_weights([np.ones_like(w) for w in made.get_weights()])
    ones = un.fingerprint(made)
    with pytest.raises(ValueError, match="input"):
        made.train_on_batch(data[0][:BATCH, :3], data[1][:BATCH])
    with pytest.raises(ValueError, match="empty"):
        made.evaluate(data[0][:0], data[1][:0], verbose=0)
    assert un.fingerprint(made) == ones


@pytest.mark.parametrize("number", mostly_slow(range(12), 3))
def test_ctrl_c_at_any_moment_keeps_a_whole_step(number, data, whole_steps):
    """A real signal, wherever the program is; fit ends with the weights of some whole step, and can go on."""
    made = model()
    made.fit(*data, batch_size=BATCH, epochs=1, verbose=0)  # compiled
    assert un.fingerprint(made) == whole_steps[10]
    timer = threading.Timer(0.002 + 0.004 * number, signal.raise_signal, (signal.SIGINT,))
    try:
        timer.start()
        made.fit(*data, batch_size=BATCH, epochs=2, verbose=0)
        timer.join()
        signal.sigpending()
    except KeyboardInterrupt:
        pass
    assert un.fingerprint(made) in whole_steps[10:]
    made.fit(*data, batch_size=BATCH, epochs=1, verbose=0)


LEFT = """
import sys, time
import unisono as un
import keras, numpy as np

class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        time.sleep(0.2)
        return np.ones((8, 5), "float32") * index, np.ones((8, 1), "float32")

if __name__ == "__main__":
    with un.OneDeviceStrategy(replicas=4).scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    call, workers = sys.argv[1:]
    rows = Rows(workers=2, use_multiprocessing=workers == "processes", max_queue_size=8)
    if call == "fit":
        model.fit(rows, epochs=2, steps_per_epoch=5, verbose=0)
    elif call == "validation":
        model.fit(np.ones((8, 5)), np.ones((8, 1)), validation_data=rows, validation_steps=2, verbose=0)
    elif call == "evaluate":
        model.evaluate(rows, steps=2, verbose=0)
    elif call == "predict":
        model.predict(rows, steps=2, verbose=0)
    else:
        batches = iter(un.OneDeviceStrategy().distribute_dataset(rows))
        next(batches)
    print("has ended")
"""


@pytest.mark.parametrize("workers", [*slow("processes"), "threads"])
@pytest.mark.parametrize("call", ["fit", *slow("validation", "evaluate", "predict", "loop")])
def test_a_program_ends_though_workers_of_a_dataset_have_batches_left(tmp_path, call, workers):
    (tmp_path / "program.py").write_text(LEFT)
    done = python(str(tmp_path / "program.py"), call, workers, timeout=60)
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["has", "ended"]), done.stderr[-2000:]
