"""The variables that `keras.distribution.initialize` reads."""

from __future__ import annotations

from collections.abc import Mapping

from unisono._src.processes.description import Cluster, ClusterError
from unisono._src.processes.environments.environment import Environment, read_number

PROCESSES = "KERAS_DISTRIBUTION_NUM_PROCESSES"
PROCESS = "KERAS_DISTRIBUTION_PROCESS_ID"
ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
FORM = f"{ADDRESSES}=10.0.0.1:1234,10.0.0.2:1234, {PROCESSES}=2, {PROCESS}=0"


def describe_by_keras(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by Keras' variables; None if none is set.

    The addresses are those of all processes. With the number of processes, the address of process 0 is enough. Process 0 listens at the
    first address.
    """
    if not any(environment.get(name) for name in (PROCESSES, PROCESS, ADDRESSES)):
        return None
    addresses = [address.strip() for address in environment.get(ADDRESSES, "").split(",") if address.strip()]
    processes = read_number(environment, PROCESSES) if environment.get(PROCESSES) else len(addresses)
    source = f"the environment ({PROCESSES} and its kin)"
    if processes == 1:
        return Cluster(None, 1, 0, source)
    missing = [name for name in (PROCESS, ADDRESSES) if not environment.get(name)]
    if missing:
        raise ClusterError(f"the environment lacks {' and '.join(missing)}. Keras' variables look like {FORM}; set them or none.")
    if len(addresses) > 1 and len(addresses) != processes:
        raise ClusterError(
            f"{ADDRESSES} has {len(addresses)} addresses, and {PROCESSES} is {processes}. Write an address for each process, or that of "
            f"process 0 alone: {FORM}."
        )
    return Cluster(addresses[0], processes, read_number(environment, PROCESS), source)


ENVIRONMENT = Environment("Keras", (PROCESSES, PROCESS, ADDRESSES), describe_by_keras, counting=3)
