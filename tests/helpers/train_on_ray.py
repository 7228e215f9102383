"""Trains on the workers of Ray, and in this process alone; prints in JSON what came out. The argument is a folder.

The second run stores by fsspec, from where checkpoints are downloaded, as from any remote storage. Ray is told of two GPUs, which this machine
need not have: JAX computes on CPU. Each worker gets one of them.
"""

import json
import os
import pathlib
import sys

import ray_training  # before keras

# isort: split
import fsspec
import jax
import pyarrow.fs
import ray.data

import unisono as un

FOLDER = pathlib.Path(sys.argv[-1])
KILLED_AT = 5


def note_worker_and_kill(folder, rank):
    programs = pathlib.Path(jax.config.jax_compilation_cache_dir)
    (folder / f"programs of start {int((folder / 'killed').exists())}").write_text(f"{programs} {len(list(programs.iterdir()))}")
    (folder / f"GPUs of {rank}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
    return ray_training.kill_worker(1, KILLED_AT)(folder, rank)


def main():
    cluster = ray_training.start_cluster(num_cpus=2, num_gpus=2)
    items = [{"x": x, "y": y} for x, y in zip(ray_training.X, ray_training.Y, strict=True)]
    rows = un.ray.Dataset(ray.data.from_items(items, override_num_blocks=5), x="x", y="y", batch_size=ray_training.BATCH)
    one = ray_training.run("one", FOLDER, 1, rows=rows)
    by_fsspec = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("file")))
    two = ray_training.run("two", FOLDER, 2, use_gpu=True, filesystem=by_fsspec, happens=note_worker_and_kill)
    ray_training.stop_cluster(cluster)
    result = {
        "fingerprints": [ray_training.train({}), one.return_value, two.return_value],
        "killed": (FOLDER / "killed").exists(),
        "programs": [(FOLDER / f"programs of start {start}").read_text().split() for start in range(2)],
        "GPUs": [(FOLDER / f"GPUs of {rank}").read_text() for rank in range(2)],
        "metrics": {name: value for name, value in two.metrics.items() if name != "loss"},
        "storage": two.checkpoint.filesystem.type_name,
        "files": sorted(path.name for path in pathlib.Path(two.checkpoint.path).iterdir()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
