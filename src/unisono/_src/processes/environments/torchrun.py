"""The variables of torchrun. Kubeflow's PyTorchJob, `accelerate launch` and scripts for torch set them too."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes.description import Cluster, ClusterError
from unisono._src.processes.environments.environment import PORT, Environment, choose_local_devices, join_address, read_number

PROCESSES = "WORLD_SIZE"
PROCESS = "RANK"
HOST = "MASTER_ADDR"
STORE_PORT = "MASTER_PORT"
LOCAL = "LOCAL_RANK"
LOCAL_PROCESSES = "LOCAL_WORLD_SIZE"
LAST_PORT = 65535


def describe_by_torchrun(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by torchrun's variables.

    None if they are unset, or count one process: images set them so. Process 0 listens at the port after the one of torchrun's store. If a
    machine has several processes, each gets the GPU of its local rank.
    """
    if not environment.get(PROCESSES) or not environment.get(PROCESS):  # either name alone has other uses
        return None
    processes = read_number(environment, PROCESSES)
    if processes == 1:
        return None
    missing = [
        name for name in (HOST, STORE_PORT) if not environment.get(name) and not (name == STORE_PORT and environment.get(PORT))
    ]
    if missing:
        raise ClusterError(
            f"the environment says {PROCESS}={environment[PROCESS]} and {PROCESSES}={processes}, as torchrun does, and lacks "
            f"{' and '.join(missing)}. Set all four, or none."
        )
    address = join_address(environment[HOST], environment.get(PORT) or choose_port(read_number(environment, STORE_PORT)))
    source = f"the environment ({PROCESS} and its kin, as of torchrun)"
    devices = choose_local_devices(environment, LOCAL, environment.get(LOCAL_PROCESSES) == "1")
    return Cluster(address, processes, read_number(environment, PROCESS), source, devices)


def choose_port(store: int) -> int:
    return store - 1 if store == LAST_PORT else store + 1


ENVIRONMENT = Environment("torchrun", (PROCESSES, PROCESS, HOST, STORE_PORT, LOCAL, LOCAL_PROCESSES), describe_by_torchrun)
