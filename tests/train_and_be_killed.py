"""A process of its own: a training that goes on from its checkpoints, and prints the fingerprint at the end and what each epoch has seen.

python train_and_be_killed.py '{"directory": "here", "devices": 2, "how": "fit"}'

No devices stand for OneDeviceStrategy, and "all" for those of all processes that train together. `fit` has BackupAndRestore and arrays,
`loop` un.Checkpoint and a stream. "faults" says, for each time that `unisono launch` has started the processes, which of them fails
after how many steps, and in which way.
"""

import itertools
import json
import os
import signal
import sys
import time

import keras
import numpy as np
from keras import layers, ops

import unisono as un

spec = json.loads(sys.argv[1])
directory, devices = spec["directory"], spec["devices"]
ROWS, BATCH, EPOCHS = 230, 10, 3


class Miscounted(keras.metrics.Metric):
    """How many rows of the epoch were not seen exactly once, so far; the labels carry the rows' numbers."""

    def __init__(self):
        super().__init__(name="miscounted")
        self.counts = self.add_variable((ROWS,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.counts.assign_add(ops.sum(ops.one_hot(ops.cast(y_true[:, 1], "int32"), ROWS), axis=0))

    def result(self):
        return ops.sum(ops.cast(ops.not_equal(self.counts, 1.0), "float32"))


def loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": lambda: {}["a fault"],
    "exits": lambda: os._exit(3),
    "leaves": lambda: sys.exit(4),
    "hangs": lambda: time.sleep(3600),
    "asked to stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


steps = itertools.count(1)


def after_step():
    """ "steps" counts those that this process has done."""
    time.sleep(0.01)  # so that there is time to be killed
    done = next(steps)
    for process, step, how in spec.get("faults", [])[int(os.environ.get("UNISONO_RESTARTS", 0)) :][:1]:
        if (strategy.cluster.process, done) == (process % strategy.cluster.processes, step):
            FAULTS[how]()


class AfterStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        after_step()


if devices == "all":
    strategy = un.MultiWorkerMirroredStrategy(replicas=8)
else:
    strategy = un.MirroredStrategy(devices=devices, replicas=8) if devices else un.OneDeviceStrategy(replicas=8)
keras.utils.set_random_seed(0)
with strategy.scope():
    hidden = [layers.Dense(64, "relu"), layers.BatchNormalization(), layers.Dropout(0.2)]
    model = keras.Sequential([layers.Input((8,)), *hidden, layers.Dense(3)])
    optimizer, miscounted = keras.optimizers.Adam(0.01), Miscounted()
rng = np.random.default_rng(0)
x, y = rng.standard_normal((ROWS, 8)).astype("float32"), np.stack([rng.integers(0, 3, ROWS), np.arange(ROWS)], 1)


def fit():
    model.compile(optimizer, loss, metrics=[miscounted])
    backup = un.callbacks.BackupAndRestore(directory, save_freq=3)
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[backup, AfterStep()])
    return history.history["miscounted"]


class Stream:
    """Without an index: it is read forward to where the training stopped."""

    def __iter__(self):
        return ((x[start : start + BATCH], y[start : start + BATCH]) for start in range(0, ROWS, BATCH))


def loop():
    def replica_step(batch):
        def losses():
            predictions = model(batch[0], training=True)
            return loss(batch[1], predictions), predictions

        (value, predictions), gradients = un.value_and_grad(losses, model.trainable_variables, has_aux=True)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        miscounted.update_state(batch[1], predictions)
        return value

    data = strategy.distribute_dataset(Stream())
    epoch, seen = keras.Variable(0, dtype="int32", trainable=False), keras.Variable(np.full(EPOCHS, -1.0), trainable=False)
    checkpoint = un.Checkpoint(model=model, optimizer=optimizer, miscounted=miscounted, data=data, epoch=epoch, seen=seen)
    checkpoint.restore(un.latest_checkpoint(directory))
    with checkpoint.saving_on_signal(f"{directory}/", keep=2):
        while int(epoch) < EPOCHS:
            for batch in data:
                strategy.run(replica_step, args=(batch,))
                after_step()
                if int(optimizer.iterations) % 3 == 0:
                    checkpoint.save(f"{directory}/", keep=2)
            counts = np.array(seen.value)
            counts[int(epoch)] = miscounted.result()
            seen.assign(counts)
            miscounted.reset_state()
            epoch.assign(epoch + 1)
    checkpoint.wait()
    return np.asarray(seen).tolist()


print("ready", flush=True)
seen = {"fit": fit, "loop": loop}[spec["how"]]()
bits = un.fingerprint(model, optimizer)
print(json.dumps({"bits": bits, "steps": int(optimizer.iterations.value), "miscounted": seen}))
