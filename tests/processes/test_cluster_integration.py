"""Processes that find each other, through every place in which a cluster may be described."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from processes import environment, free_port, wait_for_all
from sizes import slow, thorough

pytestmark = pytest.mark.processes

LIMIT = 180.0
SCRIPT = """
import os, sys
from unisono._src.processes.environments.connect import connect_processes
cluster = connect_processes(*map(eval, sys.argv[1:]), timeout=int(os.environ.get("TIMEOUT", 20)))
again = connect_processes()
import jax
print(cluster.processes, cluster.process, again.process, jax.process_count(), jax.process_index(), flush=True)
from jax.experimental import multihost_utils
print(multihost_utils.process_allgather(jax.numpy.ones(3)).sum(), flush=True)
listening = {line.split()[3] for file in ("/proc/net/tcp", "/proc/net/tcp6") for line in open(file).readlines()[1:]}
mine = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
addresses = set()
for file in ("/proc/net/tcp", "/proc/net/tcp6"):
    for words in map(str.split, open(file).readlines()[1:]):
        if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
            addresses.add(words[1].split(":")[0])
print("LISTENING", *addresses, flush=True)
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def started(*words: str, **extra: str) -> subprocess.Popen[str]:
    env = environment(JAX_PLATFORMS="cpu", **extra)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    done = wait_for_all(processes, LIMIT)
    for process, (_, err) in zip(processes, done, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [[line for line in out.splitlines() if not line.startswith("[Gloo]")] for out, _ in done]


def by_arguments(port, process):
    return (f"'127.0.0.1:{port}'", "2", str(process)), {}


def by_the_launchers_variables(port, process):
    return (), {"UNISONO_COORDINATOR": f"127.0.0.1:{port}", "UNISONO_PROCESSES": "2", "UNISONO_PROCESS": str(process)}


def by_tf_config(port, process):
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:2"]}
    return (), {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker" if process else "chief", "index": 0}}),
    }


def by_torchrun(port, process):
    """The variables that torchrun sets for two processes of one machine; its store has the port, and this test's coordinator the next one."""
    return (), {
        "RANK": str(process), "WORLD_SIZE": "2", "LOCAL_RANK": str(process), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port - 1),
    }  # fmt: skip


def by_kubeflow(port, process):
    return (), {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process),
        "JAX_COORDINATOR_PORT": str(port), "JAX_DISTRIBUTED_BACKEND": "gloo",
    }  # fmt: skip


def by_keras(port, process):
    """The variables that `keras.distribution.initialize` reads."""
    return (), {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port},127.0.0.1:2", "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": str(process),
    }  # fmt: skip


def by_skypilot(port, process):
    return (), {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(process), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "JAX_COORDINATOR_PORT": str(port),
    }  # fmt: skip


def by_slurm(port, process):
    """The variables that srun sets."""
    return (), {
        "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process), "SLURM_STEP_NUM_NODES": "1", "JAX_COORDINATOR_PORT": str(port),
    }  # fmt: skip


@pytest.mark.parametrize(
    "described",
    [
        by_torchrun,
        *slow(by_the_launchers_variables, by_slurm),
        *thorough(by_arguments, by_tf_config, by_kubeflow, by_keras, by_skypilot),
    ],
)
def test_processes_find_each_other(described):
    port = free_port()
    processes = []
    for process in range(2):
        words, extra = described(port, process)
        processes.append(started(*words, **extra))
    for process, lines in enumerate(results(processes)):
        assert lines[0] == f"2 {process} {process} 2 {process}"
        assert lines[1] == "6.0"
        assert set(lines[2].split()[1:]) <= LOOPBACK


@pytest.mark.slow
def test_nobody_there_is_a_single_process():
    assert results([started()])[0][:2] == ["1 0 0 1 0", "3.0"]


def failed(*words: str, **extra: str) -> str:
    process = started(*words, **extra)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    return err


@pytest.mark.parametrize("process", [*slow(0), *thorough(1)])
def test_who_waits_in_vain_says_so(process):
    port = free_port()
    lines = failed(f"'127.0.0.1:{port}'", "2", str(process), TIMEOUT="6").splitlines()
    waited = (
        f"process {process} of 2 waited 6 seconds for the others at 127.0.0.1:{port} (the program said so). All processes must run, "
        f"process 0 be reachable at that address, and its port be free."
    )
    if process == 0:
        assert lines == [f"unisono: {waited} Not all have come."]
    else:
        assert lines[-1].startswith(f"unisono._src.processes.description.ClusterError: {waited} Nobody listens there: ")


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert failed(f"'127.0.0.1:{port}'", "2", "0").splitlines()[-1] == (
            f"unisono._src.processes.description.ClusterError: process 0 of 2 cannot listen at 127.0.0.1:{port} (the program said so): "
            f"[Errno 98] Address already in use. Name another port, the same in all processes."
        )
