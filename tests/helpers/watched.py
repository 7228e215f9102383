"""A process of its own: steps in which all processes exchange, and one of which misbehaves.

python watched.py VICTIM HOW STEP STEPS: HOW is an error, an exit, a signal, work that takes long, or nothing.
"""

import os
import signal
import sys
import time

from unisono._src.processes.environments.connect import connect_processes
from unisono._src.processes.watch.begin import begin_watch

cluster = connect_processes()
watch = begin_watch()

import jax
from jax.experimental import multihost_utils

victim, how, at, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


def stuck_here():
    time.sleep(600)


def misbehave():
    print("NOW", flush=True)
    if how == "raise":
        raise KeyError("of the victim")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    if how == "stuck":
        stuck_here()
    if how == "busy":
        with watch.report_busy("known work"):
            time.sleep(8)
        return
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(1)


print("PID", os.getpid(), flush=True)
for step in range(steps):
    with watch.report_waiting("for a sum"):
        total = multihost_utils.process_allgather(jax.numpy.ones(3)).sum()
    watch.report_step(step)
    if cluster.process == victim and step == at and how not in ("nothing", "later", "leave"):
        misbehave()
    time.sleep(0.02)
if how == "later" and cluster.process == victim:
    time.sleep(8)
if how == "leave":
    jax.distributed.shutdown()
    time.sleep(8)
print("DONE", step, float(total), flush=True)
