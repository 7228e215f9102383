"""The same program in one process or in several, through `kill -9`: one fingerprint.

    python examples/multi_worker_fit.py
    unisono launch --processes 2 --restarts 3 examples/multi_worker_fit.py

With `--kill-at 15` process 1 kills itself behind that batch, once: the launcher starts all again, and they go on where they were. With
`--full` on MNIST, which Keras downloads. On a cluster, start it with the cluster's own tool (docs/processes.md).
"""

import argparse
import os
import signal

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--full", action="store_true", help="MNIST in place of the digits that scikit-learn brings")
parser.add_argument("--backup", default="backup", help="a directory that all processes share")
parser.add_argument("--kill-at", type=int, help="the batch behind which process 1 kills itself")
options = parser.parse_args()

strategy = un.MultiWorkerMirroredStrategy(replicas=8)  # first: it connects the processes, before anything starts JAX
keras.utils.set_random_seed(0)


def load():
    if options.full:
        (x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
        return x[..., None] / 255.0, x_test[..., None] / 255.0, y, y_test
    x, y = load_digits(return_X_y=True)
    return train_test_split(x.reshape(-1, 8, 8, 1) / 16, y, random_state=0)


class Killed(keras.callbacks.Callback):
    """As the machine of one process would die."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == options.kill_at and strategy.cluster.process == 1 and os.environ["UNISONO_RESTARTS"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


x, x_test, y, y_test = load()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

backup = un.callbacks.BackupAndRestore(options.backup, save_freq=10)
model.fit(x, y, batch_size=64, epochs=6, validation_data=(x_test, y_test), verbose=2, callbacks=[backup, Killed()])
accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
where = f"process {strategy.cluster.process} of {strategy.cluster.processes}"
print(
    f"{where}: {strategy.num_replicas_in_sync} replicas, test accuracy {100 * accuracy:.1f}%, fingerprint {un.fingerprint(model)}"
)
