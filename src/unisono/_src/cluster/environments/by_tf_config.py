"""TF_CONFIG, as programs for tf.distribute set it: a chief, if any, is process 0, and the workers follow.

The coordinator listens where the TensorFlow server of process 0 would listen: the address is free, because no such server runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from unisono._src.cluster.environments.environment import Cluster, ClusterError
from unisono._src.typing import Json

NAME = "TF_CONFIG"
KINDS = ("chief", "worker")
FORM = """{"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]}, "task": {"type": "worker", "index": 0}}"""
REFUSED = {
    "ps": "Parameter servers are for asynchronous training, which Unisono does not do",
    "evaluator": "An evaluator of its own is not needed: fit takes validation_data, and evaluates on all workers",
}


class TFConfig:
    """The cluster as TF_CONFIG describes it."""

    def describe(self, environment: Mapping[str, str]) -> Cluster | None:
        text = environment.get(NAME)
        if not text:
            return None
        config = parse_config(text)
        cluster = config.get("cluster", {})
        task = config.get("task", {})
        if not cluster:
            return None  # as in TensorFlow: a single process
        check_tasks(text, cluster, task)
        addresses = [(kind, index) for kind in KINDS for index in range(len(cluster.get(kind, [])))]
        own_task = task.get("type"), task.get("index")
        if own_task not in addresses:
            raise ClusterError(
                f"TF_CONFIG says that this is task {own_task[0]!r} {own_task[1]!r}, and names "
                f"{', '.join(f'{kind} {index}' for kind, index in addresses)}. Received: {text}"
            )
        first_kind, first_index = addresses[0]
        return Cluster(cluster[first_kind][first_index], len(addresses), addresses.index(own_task), NAME)


def parse_config(text: str) -> dict[str, Json]:
    """Return the value of TF_CONFIG, in which the cluster and the task, where they are there, are dicts."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}). It looks like {FORM}; received: {text}") from None
    parts = (config.get("cluster", {}), config.get("task", {})) if isinstance(config, dict) else (None,)
    if not all(isinstance(part, dict) for part in parts):
        raise ClusterError(f"TF_CONFIG looks like {FORM}; received: {text}")
    return config


def check_tasks(text: str, cluster: dict[str, Json], task: dict[str, Json]) -> None:
    for kind in (*cluster, task.get("type")):
        if kind in REFUSED:
            raise ClusterError(f"TF_CONFIG names {kind!r}. {REFUSED[kind]}. Leave it out: {FORM}; received: {text}")
        if kind not in KINDS:
            raise ClusterError(
                f"TF_CONFIG names {kind!r}, which is neither 'worker' nor 'chief'. It looks like {FORM}; received: {text}"
            )
    for kind, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ClusterError(f"TF_CONFIG's {kind!r} is a list of addresses. It looks like {FORM}; received: {text}")
