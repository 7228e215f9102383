"""Trains on the workers of Ray, and in this process alone; prints in JSON what came out. The argument is a folder.

The second run stores by fsspec, from where checkpoints are downloaded, as from any remote storage. Ray is told of two GPUs, which this machine
need not have: JAX computes on CPU. Each worker gets one of them.
"""

import json
import os
import pathlib
import signal
import sys

import unisono as un  # before keras

# isort: split
import fsspec
import keras
import numpy as np
import pyarrow.fs
import ray.data
import ray.train

FOLDER = pathlib.Path(sys.argv[-1])
KILLED_AT = 5
X = np.random.default_rng(0).normal(size=(36, 8)).astype("float32")
Y = X.sum(1, keepdims=True)


class KillOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        killed = pathlib.Path(os.environ["FOLDER"], "killed")
        if int(self.model.optimizer.iterations) == KILLED_AT and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config):
    """Rows come from ray.data, if there are any; in the second worker, the training is killed once."""
    strategy = un.MultiWorkerMirroredStrategy(replicas=4)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        )
    model.compile("adam", "mse")
    callbacks = []
    if config:
        os.environ["FOLDER"] = config["folder"]
        rank = ray.train.get_context().get_world_rank()
        pathlib.Path(config["folder"], f"GPUs of {rank}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
        callbacks = [un.ray.Backup(save_freq=2), *[KillOnce()] * (rank == 1)]
    data = {"x": config["rows"]} if "rows" in config else {"x": X, "y": Y, "batch_size": 8}
    model.fit(**data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return un.fingerprint(model)


def run(name, workers, filesystem=None, **config):
    return un.ray.Trainer(
        train,
        train_loop_config={"folder": str(FOLDER), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=workers == 2),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(FOLDER),
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()


def main():
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False)
    rows = ray.data.from_items([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], override_num_blocks=5)
    one = run("one", 1, rows=un.ray.Dataset(rows, x="x", y="y", batch_size=8))
    two = run("two", 2, pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("file"))))
    ray.shutdown()
    result = {
        "fingerprints": [train({}), one.return_value, two.return_value],
        "killed": (FOLDER / "killed").exists(),
        "GPUs": [(FOLDER / f"GPUs of {rank}").read_text() for rank in range(2)],
        "metrics": {name: value for name, value in two.metrics.items() if name != "loss"},
        "storage": two.checkpoint.filesystem.type_name,
        "files": sorted(path.name for path in pathlib.Path(two.checkpoint.path).iterdir()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
