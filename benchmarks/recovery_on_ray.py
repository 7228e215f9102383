"""Measures the time from the loss of a worker of Ray, or from the last step before a resize, to the next step. `recovery.py --ray` runs it.

A Ray of this machine, on loopback, with one worker a node, and the defaults of Ray's settings if --poll does not say another one. Moments are
those of the last of the new workers: its process starts, it calls the function, it has connected, it has restored, and a step is
finished that had not been done before. Ray imports its own modules, and those of the function, before it calls the function.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else Ray listens at this machine's own address too

import recovery

import unisono as un

# isort: split
import keras
import numpy as np
import ray
import ray.cluster_utils
import ray.train

MOMENTS = ("process", "function", "connected", "restored", "next step")
EPOCHS = 100
"""Of the training; it ends behind the first new step."""
SLOW = 0.05
"""Seconds of a step, until Ray ends the workers."""


def read_start_of_process() -> float:
    """Read when this process has started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


def train(config: dict[str, str]) -> None:
    """Train in a worker. The workers of the first start do what is measured; those of the second note the moments."""
    directory, kind = Path(config["directory"]), config["kind"]
    rank = ray.train.get_context().get_world_rank()
    is_first_start = not (directory / "over").exists()

    def note(what: str, when: float | None = None) -> None:
        if not is_first_start:
            recovery.write_note(directory, what, when)

    note("process", read_start_of_process())
    note("function")
    strategy = un.MultiWorkerMirroredStrategy(replicas=8)
    note("connected")

    class Moments(keras.callbacks.Callback):
        def on_train_begin(self, logs: object = None) -> None:
            note("restored")

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            step = int(self.model.optimizer.iterations)
            if is_first_start:
                time.sleep(SLOW)
                if kind == "killed" and rank == 1 and step == recovery.FAILS_AFTER:
                    while not (directory / kind / "checkpoint_manager_snapshot.json").exists():
                        time.sleep(SLOW)  # until Ray has taken a checkpoint
                    (directory / "over").touch()
                    recovery.write_note(directory, "failure")
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "resized":
                    (directory / "last step").write_text(f"{time.time()} {step}")
                    if (directory / kind / "checkpoint_manager_snapshot.json").exists():
                        (directory / "over").touch()  # the node may come
                return
            before = recovery.FAILS_AFTER if kind == "killed" else int((directory / "last step").read_text().split()[1])
            if step > before:
                note("next step")
                self.model.stop_training = True

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    rows = recovery.STEPS * 64
    x, y = rng.random((rows, 64), dtype="float32"), rng.integers(0, 10, rows)
    callbacks = [un.ray.Backup(save_freq=recovery.SAVED_EVERY), Moments()]
    model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=0, callbacks=callbacks)


def measure_recovery(kind: str) -> dict[str, float]:
    """Return the seconds from the kill, or from the last step of the smaller group, until each of the moments."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        nodes = 2 if kind == "killed" else 1
        cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        ray.init(cluster.address, log_to_driver=False)
        trainer = un.ray.Trainer(
            train,
            train_loop_config={"directory": name, "kind": kind},
            scaling_config=ray.train.ScalingConfig(num_workers=(nodes, 2), elastic_resize_monitor_interval_s=2),
            run_config=ray.train.RunConfig(name=kind, storage_path=name, failure_config=ray.train.FailureConfig(max_failures=1)),
        )
        with concurrent.futures.ThreadPoolExecutor() as threads:
            training = threads.submit(trainer.fit)
            while kind == "resized" and not training.done() and not (directory / "over").exists():
                time.sleep(0.1)
            if kind == "resized":
                cluster.add_node(num_cpus=1)
            training.result()
        ray.shutdown()
        cluster.shutdown()
        at = recovery.read_notes(directory)
        begin = at["failure"][0] if kind == "killed" else float((directory / "last step").read_text().split()[0])
    return {what: (min(at[what]) if what == "next step" else max(at[what])) - begin for what in MOMENTS}
