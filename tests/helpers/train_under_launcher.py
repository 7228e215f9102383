"""A program as a launcher starts it in each process: trains a small model, and prints what the process is, and its bits.

With a folder it goes on from the backup there. In the first run of a job of Slurm it is asked to stop, as Slurm asks before the time is up.
"""

import json
import os
import re
import signal
import sys

import keras
import numpy as np
from keras import layers

import unisono as un

REPLICAS, ROWS, BATCH = 4, 33, 8


class AskedToStop(keras.callbacks.Callback):
    """One process gets a signal in the middle of the first epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and os.environ["SLURM_PROCID"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)


def train(strategy: un.Strategy, callbacks: list[keras.callbacks.Callback]) -> str:
    """Train, and return the fingerprint."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((ROWS, 6)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(5, "relu"), layers.Dropout(0.2), layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, np.arange(ROWS) % 3, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    return un.fingerprint(model)


def check_bits(printed: str, restarts: str = "0") -> None:
    """Check what two processes have printed: both have the bits of this one."""
    bits = train(un.OneDeviceStrategy(replicas=REPLICAS), [])
    found = sorted(json.loads(line) for line in re.findall(r"TRAINED (\[.*\])", printed))
    assert found == [[2, process, bits, restarts] for process in range(2)], printed[-3000:]


if __name__ == "__main__":
    strategy = un.MultiWorkerMirroredStrategy(replicas=REPLICAS)
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    backup = [un.callbacks.BackupAndRestore(folder, signals=("SIGUSR1",)) for folder in sys.argv[1:]]
    bits = train(strategy, [*backup, *([AskedToStop()] if backup and restarts == "0" else [])])
    print("TRAINED", json.dumps([strategy.cluster.processes, strategy.cluster.process, bits, restarts]), flush=True)
