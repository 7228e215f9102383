"""Trainings on Ray whose workers are killed, and whose nodes come and go, at random moments: python soak_on_ray.py FOLDER SEED EVENTS

Prints each event, and in JSON the fingerprints of all runs and of this process alone, and where Ray's processes listen.
"""

import concurrent.futures
import json
import os
import pathlib
import random
import signal
import sys
import time

import ray_training  # before keras

# isort: split
from marked_processes import MARK, find_addresses, find_marked

MOST = 5
"""Events of one run."""
EPOCHS = 60
SAVE_FREQ = 8
NODES = 2
LONGEST_WAIT = 240
"""Seconds until workers train again."""


def train_slowly(folder, rank):
    return [ray_training.SlowSteps(folder, rank)]


def read_workers(folder, since):
    """The process numbers of all workers that train together, each of which has finished a step since then; None if there are not all."""
    notes = [note.read_text().split() for note in folder.glob("worker ?")]
    found = [(int(pid), int(size)) for pid, size, at in notes if float(at) > since]
    return [pid for pid, _ in found] if found and all(size == len(found) for _, size in found) else None


def wait_for_workers(training, folder, since, count):
    """Wait until so many workers train. None if the training has ended."""
    end = time.monotonic() + LONGEST_WAIT
    while not training.done():
        workers = read_workers(folder, since)
        if workers and len(workers) == count:
            return workers
        if time.monotonic() > end:
            raise TimeoutError(f"there are no {count} workers that train after {LONGEST_WAIT} seconds")
        time.sleep(0.05)
    return None


def disturb(training, cluster, folder, draw, most):
    """Let events happen to a training, and count them."""
    others, since = list(cluster.worker_nodes), 0.0
    for event in range(most):
        workers = wait_for_workers(training, folder, since, 1 + len(others))
        time.sleep(draw.uniform(0, 3))
        kind = draw.choice(["kill", "resize"])
        since = time.time()
        if workers is None or training.done():
            return event
        if kind == "kill":
            killed = draw.randrange(len(workers))
            os.kill(workers[killed], signal.SIGKILL)
            what = f"process {workers[killed]} of {len(workers)} workers is killed"
        elif len(others) + 1 < NODES:
            others.append(cluster.add_node(num_cpus=1))
            what = f"a node comes to {len(workers)} workers"
        else:
            cluster.remove_node(others.pop(draw.randrange(len(others))))
            what = f"a node of {len(workers)} workers is lost"
        print(f"event: {what}", flush=True)
    return most


def main(folder, seed, events):
    draw, fingerprints, addresses = random.Random(seed), [], set()
    cluster = ray_training.start_cluster(num_cpus=1)
    while events:
        here = folder / f"run {len(fingerprints)}"
        here.mkdir()
        (here / "slow").touch()
        options = {"monitored": 2, "max_failures": -1, "happens": train_slowly, "epochs": EPOCHS, "save_freq": SAVE_FREQ}
        with concurrent.futures.ThreadPoolExecutor() as threads:
            training = threads.submit(ray_training.run, "run", here, (1, NODES), **options)
            try:
                events -= disturb(training, cluster, here, draw, min(events, MOST))
                addresses |= find_addresses(find_marked(os.environ[MARK]))
            finally:
                (here / "slow").unlink()
            fingerprints.append(training.result(timeout=2 * LONGEST_WAIT).return_value)
        print(f"run {len(fingerprints)}: {fingerprints[-1]}", flush=True)
    ray_training.stop_cluster(cluster)
    alone = ray_training.train({"epochs": EPOCHS})
    print(json.dumps({"alone": alone, "fingerprints": fingerprints, "addresses": sorted(addresses)}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
