"""What trainings on Ray share: a cluster, a small training in which something happens, and a run of it."""

from __future__ import annotations

import os
import pathlib
import signal
import time

import unisono as un  # before keras

# isort: split
import keras
import numpy as np
import ray
import ray.cluster_utils
import ray.train

ROWS, BATCH = 36, 8
X = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
Y = X.sum(1, keepdims=True)


def start_cluster(**head):
    """Starts a Ray of this machine, and connects to it. Nodes can be added."""
    cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    ray.init(cluster.address)
    return cluster


def stop_cluster(cluster):
    ray.shutdown()
    cluster.shutdown()


def train(config):
    """Trains in a worker, or in this process alone if the config says nothing of a folder."""
    strategy = un.MultiWorkerMirroredStrategy(replicas=config.get("replicas", 4))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        )
    model.compile("adam", "mse")
    callbacks = []
    if "folder" in config:
        happens = config.get("happens", lambda *_: [])
        callbacks = [
            un.ray.Backup(save_freq=config.get("save_freq", 2)),
            *happens(pathlib.Path(config["folder"]), ray.train.get_context().get_world_rank()),
        ]
    data = {"x": config["rows"]} if "rows" in config else {"x": X, "y": Y, "batch_size": BATCH}
    model.fit(**data, epochs=config.get("epochs", 2), shuffle=False, verbose=0, callbacks=callbacks)
    return un.fingerprint(model)


def run(name, folder, workers, *, use_gpu=False, monitored=60.0, max_failures=1, storage=None, filesystem=None, **config):
    """Runs the training on Ray to its end."""
    return un.ray.Trainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=use_gpu, elastic_resize_monitor_interval_s=monitored),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(storage or folder),
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
    ).fit()


class AtStep(keras.callbacks.Callback):
    """Does something once behind a step, in one of the workers."""

    def __init__(self, step, action, note):
        super().__init__()
        self.step, self.action, self.note = step, action, note

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step and not self.note.exists():
            self.note.touch()
            self.action()


def kill_worker(killed, step):
    """What happens: one of the workers is killed once."""

    def happens(folder, rank):
        return [AtStep(step, lambda: os.kill(os.getpid(), signal.SIGKILL), folder / "killed")] * (rank == killed)

    return happens


class SlowSteps(keras.callbacks.Callback):
    """Notes the process, and takes its time for each step while there is a file of that name."""

    def __init__(self, folder, rank):
        super().__init__()
        self.folder, self.rank = folder, rank

    def on_train_batch_end(self, batch, logs=None):
        note = self.folder / f"worker {self.rank}"
        unfinished = note.with_suffix(".unfinished")
        unfinished.write_text(f"{os.getpid()} {ray.train.get_context().get_world_size()} {time.time()}")
        unfinished.replace(note)
        if (self.folder / "slow").exists():
            time.sleep(0.15)
