"""A process of its own: a training that goes on from its checkpoints, and prints the fingerprint at the end and what each epoch has seen.

python train_and_be_killed.py '{"directory": "here", "devices": 2, "how": "fit"}'

No devices stand for OneDeviceStrategy, and "all" for those of all processes that train together. `fit` has BackupAndRestore and arrays,
`loop` un.Checkpoint and a stream. "faults" says, for each time that `unisono launch` has started the processes, which of them fails
after how many steps, and in which way. "alone" is a directory in which the same training is done once more, on one device, when this one
has ended: what it ends with is printed as well. "epochs" and "replicas" are three and eight, unless they are said.
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
ROWS, BATCH, EPOCHS = 230, 10, spec.get("epochs", 3)
REPLICAS = spec.get("replicas", 8)


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


def after_step(strategy):
    """ "steps" counts those that this process has done."""
    time.sleep(0.01)  # so that there is time to be killed
    done = next(steps)
    for process, step, how in spec.get("faults", [])[int(os.environ.get("UNISONO_RESTARTS", 0)) :][:1]:
        if (strategy.cluster.process, done) == (process % strategy.cluster.processes, step):
            FAULTS[how]()


class AfterStep(keras.callbacks.Callback):
    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy

    def on_train_batch_end(self, batch, logs=None):
        after_step(self.strategy)


rng = np.random.default_rng(0)
x, y = rng.standard_normal((ROWS, 8)).astype("float32"), np.stack([rng.integers(0, 3, ROWS), np.arange(ROWS)], 1)


class Stream:
    """Without an index: it is read forward to where the training stopped."""

    def __iter__(self):
        return ((x[start : start + BATCH], y[start : start + BATCH]) for start in range(0, ROWS, BATCH))


class Training:
    def __init__(self, strategy, directory):
        self.strategy, self.directory = strategy, directory
        keras.utils.set_random_seed(0)
        with strategy.scope():
            hidden = [layers.Dense(64, "relu"), layers.BatchNormalization(), layers.Dropout(0.2)]
            self.model = keras.Sequential([layers.Input((8,)), *hidden, layers.Dense(3)])
            self.optimizer, self.miscounted = keras.optimizers.Adam(0.01), Miscounted()

    def fit(self):
        self.model.compile(self.optimizer, loss, metrics=[self.miscounted])
        backup = un.callbacks.BackupAndRestore(self.directory, save_freq=3)
        history = self.model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[backup, AfterStep(self.strategy)])
        return history.history["miscounted"]

    def loop(self):
        def replica_step(batch):
            def losses():
                predictions = self.model(batch[0], training=True)
                return loss(batch[1], predictions), predictions

            (value, predictions), gradients = un.value_and_grad(losses, self.model.trainable_variables, has_aux=True)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            self.miscounted.update_state(batch[1], predictions)
            return value

        data = self.strategy.distribute_dataset(Stream())
        epoch, seen = keras.Variable(0, dtype="int32", trainable=False), keras.Variable(np.full(EPOCHS, -1.0), trainable=False)
        checkpoint = un.Checkpoint(
            model=self.model, optimizer=self.optimizer, miscounted=self.miscounted, data=data, epoch=epoch, seen=seen
        )
        checkpoint.restore(un.latest_checkpoint(self.directory))
        with checkpoint.saving_on_signal(f"{self.directory}/", keep=2):
            while int(epoch) < EPOCHS:
                for batch in data:
                    self.strategy.run(replica_step, args=(batch,))
                    after_step(self.strategy)
                    if int(self.optimizer.iterations) % 3 == 0:
                        checkpoint.save(f"{self.directory}/", keep=2)
                counts = np.array(seen.value)
                counts[int(epoch)] = self.miscounted.result()
                seen.assign(counts)
                self.miscounted.reset_state()
                epoch.assign(epoch + 1)
        checkpoint.wait()
        return np.asarray(seen).tolist()

    def result(self):
        seen = getattr(self, spec["how"])()
        bits = un.fingerprint(self.model, self.optimizer)
        return {"bits": bits, "steps": int(self.optimizer.iterations.value), "miscounted": seen}


def strategy_of(devices):
    if devices == "all":
        return un.MultiWorkerMirroredStrategy(replicas=REPLICAS)
    return un.MirroredStrategy(devices=devices, replicas=REPLICAS) if devices else un.OneDeviceStrategy(replicas=REPLICAS)


strategy = strategy_of(spec["devices"])
training = Training(strategy, spec["directory"])
print("ready", flush=True)
found = training.result()
if "alone" in spec:
    found["alone"] = Training(strategy_of(1), spec["alone"]).result()
print(json.dumps(found))
