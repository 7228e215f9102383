"""One of several processes, which verify each other. In each step one of them may flip a bit of what it computes.

unisono launch --processes 3 verify_in_processes.py
    '{"verify": 1, "training": "whole", "faults": [null, {"victim": 1, "always": false, "seed": 3}]}'

Prints the fingerprint of the start, then for each step the fingerprint after it, the error, and how often a bit was flipped here, as JSON.
"""

import json
import random
import sys

import unisono as un

# isort: split
import jax
import numpy as np

from small_training import REPLICAS, TRAININGS, WEIGHTS
from unisono._src.engine.observers.verified_steps import LoneReplicas

spec = json.loads(sys.argv[1])
strategy = un.MultiWorkerMirroredStrategy(devices=spec.get("devices", 1), replicas=REPLICAS, verify=spec["verify"])
whole = LoneReplicas._take_contribution


class Fault:
    """A bit that a device of a process flips in what it computes, once or always."""

    def __init__(self, victim, always, seed, device=0):
        draw = random.Random(seed)
        self.bit, self.place = draw.randrange(32), draw.random()
        self.is_here, self.always, self.flips = strategy.cluster.process == victim, always, 0
        self.device = device

    def take(self, replicas, index, sums):
        contribution = whole(replicas, index, sums)
        if self.is_here and index == self.device and (self.always or not self.flips):
            self.flips += 1
            vector = np.array(contribution["float32"])
            vector.view("uint32")[int(self.place * WEIGHTS)] ^= np.uint32(1 << self.bit)
            contribution = contribution | {"float32": jax.device_put(vector, replicas._mesh.devices[index])}
        return contribution


training = TRAININGS[spec["training"]](strategy)
told = [{"print": un.fingerprint(training.model)}]
for spec_of_fault in spec["faults"]:
    fault = Fault(**(spec_of_fault or {"victim": None, "always": False, "seed": 0}))
    LoneReplicas._take_contribution = lambda replicas, index, sums, fault=fault: fault.take(replicas, index, sums)
    try:
        training.step()
        error = None
    except un.DeviceFaultError as raised:
        error = str(raised)
    told.append({"print": un.fingerprint(training.model), "error": error, "flips": fault.flips})
print(json.dumps(told), flush=True)
