"""A training on Ray that begins on one worker, goes on with two, and loses one to `kill -9`: one fingerprint.

    python examples/ray_fit.py

It needs `pip install "unisono[demo,ray]"`. It starts a Ray cluster of its own on this machine, of one CPU, to which a second node comes in the
middle of an epoch. On a cluster of yours write ray.init(), and leave out the second node and what make_events makes (docs/ray.md).
"""

import argparse
import concurrent.futures
import os
import pathlib
import signal
import tempfile
import time

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import ray.cluster_utils
import ray.train
from keras import layers
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", help="for the checkpoints; by default a folder that is removed at the end")
SECOND_NODE_AT = 38  # steps since the training began; an epoch has 29
KILLED_AT = 50
WAITS = "waits for the second node"
LONGEST_WAIT = 120  # seconds


def train(config):
    strategy = un.MultiWorkerMirroredStrategy(replicas=4)  # first: it connects the workers, before anything starts JAX
    keras.utils.set_random_seed(0)
    x, y = load_digits(return_X_y=True)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Rescaling(1 / 16),
                layers.Dense(32, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.2),
                layers.Dense(10),
            ]
        )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    callbacks = [un.ray.Backup(save_freq=6), make_events(pathlib.Path(config["folder"]))] if config else []
    model.fit(x, y, batch_size=64, epochs=3, verbose=0, callbacks=callbacks)
    return un.fingerprint(model)


def make_events(folder):
    """What happens on a cluster: a second node comes, and a worker is killed."""
    workers, rank = ray.train.get_context().get_world_size(), ray.train.get_context().get_world_rank()

    class Events(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if rank == 0:
                print(f"workers: {workers}, epoch {epoch + 1}, from step {int(self.model.optimizer.iterations)} on", flush=True)

        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations)
            if step == SECOND_NODE_AT and workers == 1:
                (folder / WAITS).touch()
                time.sleep(LONGEST_WAIT)  # Ray ends this worker, and starts two
                raise TimeoutError("the second node did not come")
            if step == KILLED_AT and rank == 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                print(f"worker 1 is killed behind step {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    return Events()


def main(folder):
    cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(cluster.address)
    trainer = un.ray.Trainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=2),
        run_config=ray.train.RunConfig(
            name="digits",
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    with concurrent.futures.ThreadPoolExecutor() as threads:
        training = threads.submit(trainer.fit)
        while not training.done() and not (folder / WAITS).exists():
            time.sleep(0.2)
        if not training.done():
            cluster.add_node(num_cpus=1)
        result = training.result()
    ray.shutdown()
    cluster.shutdown()
    accuracy = f"accuracy {100 * result.metrics['accuracy']:.1f}% in the last epoch"
    print(f"on Ray: {accuracy}, fingerprint {result.return_value}")
    print(f"in this process alone: fingerprint {train(None)}")


if __name__ == "__main__":
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(pathlib.Path(options.folder or temporary))
