"""TF_CONFIG, which programs for `tf.distribute` use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unisono._src.processes.description import Cluster, ClusterError
from unisono._src.processes.environments.environment import Environment

if TYPE_CHECKING:
    from unisono._src.typing import Json  # imports JAX, for which a launcher does not wait

TASK_KINDS = ("chief", "worker")
TF_CONFIG_FORM = """{"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]}, "task": {"type": "worker", "index": 0}}"""
REFUSED_TASKS = {
    "ps": "Parameter servers are for asynchronous training, which Unisono does not do",
    "evaluator": "An evaluator of its own is not needed: fit takes validation_data, and evaluates on all workers",
}


def describe_by_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    """Describe the cluster by TF_CONFIG; None if it names no cluster.

    Without a cluster this is a single process, as in TensorFlow. A chief, if any, is process 0, and the workers follow. The coordinator
    listens where the TensorFlow server of process 0 would listen: the address is free, because no such server runs.
    """
    text = environment.get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}). It looks like {TF_CONFIG_FORM}; received: {text}") from None
    if not isinstance(config, dict) or not all(isinstance(config.get(part, {}), dict) for part in ("cluster", "task")):
        raise ClusterError(f"TF_CONFIG looks like {TF_CONFIG_FORM}; received: {text}")
    cluster = config.get("cluster")
    if not cluster:
        return None
    task = config.get("task", {})
    check_tasks(text, cluster, task)
    addresses = {(kind, index): address for kind in TASK_KINDS for index, address in enumerate(cluster.get(kind, []))}
    tasks = list(addresses)
    own_task = task.get("type"), task.get("index")
    if own_task not in tasks:
        raise ClusterError(
            f"TF_CONFIG says that this is task {own_task[0]!r} {own_task[1]!r}, and names "
            f"{', '.join(f'{kind} {index}' for kind, index in tasks)}. Received: {text}"
        )
    return Cluster(addresses[tasks[0]], len(tasks), tasks.index(own_task), "TF_CONFIG")


def check_tasks(text: str, cluster: dict[str, Json], task: dict[str, Json]) -> None:
    for kind in (*cluster, task.get("type")):
        if kind in tuple(REFUSED_TASKS):  # the type of the task may be anything, such as a list
            raise ClusterError(
                f"TF_CONFIG names {kind!r}. {REFUSED_TASKS[kind]}. Leave it out: {TF_CONFIG_FORM}; received: {text}"
            )
        if kind not in TASK_KINDS:
            raise ClusterError(
                f"TF_CONFIG names {kind!r}, which is neither 'worker' nor 'chief'. It looks like {TF_CONFIG_FORM}; received: {text}"
            )
    for kind, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ClusterError(f"TF_CONFIG's {kind!r} is a list of addresses. It looks like {TF_CONFIG_FORM}; received: {text}")


ENVIRONMENT = Environment("TF_CONFIG", ("TF_CONFIG",), describe_by_tf_config)
