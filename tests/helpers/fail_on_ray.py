"""Trainings on Ray that go wrong; prints in JSON what was said of each. The argument is a folder."""

import concurrent.futures
import json
import pathlib
import sys
import time
import traceback

import ray.train

import ray_training  # before keras
from unisono._src.tools.ray.room import SECONDS

FOLDER = pathlib.Path(sys.argv[-1])
KILLED_AT = 5


def take_storage_away(folder, rank):
    """What happens: where the run is stored, there is nothing any more, as if it were not mounted."""
    marker = folder / "taken away" / ".validate_storage_marker"
    return [ray_training.AtStep(3, marker.unlink, folder / "taken")] * (rank == 0)


def say(run, *args, **options):
    """Return what the error of a run says, and its notes."""
    try:
        run(*args, **options)
    except (ray.train.TrainingFailedError, OSError) as error:
        return "".join(traceback.format_exception_only(error))
    return "no error"


def wait_for_room(cluster):
    """Two workers have no room until a node comes, and then the training has a single replica."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        said = threads.submit(say, ray_training.run, "room", FOLDER, 2, max_failures=0, replicas=1)
        time.sleep(SECONDS + 5)
        print("a node comes", file=sys.stderr, flush=True)
        cluster.add_node(num_cpus=1)
        return said.result()


def main():
    cluster = ray_training.start_cluster(num_cpus=1)
    (FOLDER / "file").touch()
    said = {"no folder": say(ray_training.run, "nowhere", FOLDER, 1, storage=FOLDER / "file" / "runs")}
    said["fewer replicas"] = wait_for_room(cluster)
    lost = {"happens": ray_training.kill_worker(0, KILLED_AT)}
    said["lost coordinator"] = say(ray_training.run, "lost", FOLDER, 2, max_failures=0, **lost)
    result = ray_training.run("lost", FOLDER, 2, max_failures=0, **lost)
    said["taken away"] = say(ray_training.run, "taken away", FOLDER, 1, max_failures=0, happens=take_storage_away)
    ray_training.stop_cluster(cluster)
    fingerprints = [ray_training.train({}), result.return_value]
    print(json.dumps({"said": said, "fingerprints": fingerprints}))


if __name__ == "__main__":
    main()
