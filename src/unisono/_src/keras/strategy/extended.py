"""`strategy.extended` and `strategy.cluster_resolver`.

They have the parts of `tf.distribute`'s that programs and packages read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import jax
import keras

if TYPE_CHECKING:
    from unisono._src.keras.strategy.base import Strategy


INSTEAD = {
    "batch_reduce_to": "strategy.reduce",
    "broadcast_to": "nothing: replicas have the same variables",
    "call_for_each_replica": "strategy.run",
    "colocate_vars_with": "nothing: each device has all variables",
    "reduce_to": "strategy.reduce",
    "update": "optimizer.apply, or variable.assign, in the function that strategy.run gets",
    "value_container": "nothing: a variable is one object for all replicas",
}
"""What to write in place of a method of `tf.distribute.StrategyExtended`."""


class StrategyExtended:
    """The parts of `tf.distribute`'s `extended` that have a meaning here."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process that run replicas."""
        return self._strategy.devices

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process that hold variables: the same ones."""
        return self._strategy.devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return self._strategy.writes

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return self._strategy.writes

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all batches need one shape. They do not."""
        return False

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Whether a variable was made in the scope of the strategy."""
        return id(v) in self._strategy.owned.variables

    def _in_multi_worker_mode(self) -> bool:
        """Whether several processes train together. keras-tuner asks for it by this name."""
        return not self._strategy.agreement.is_alone

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse a name without a meaning here, and say what to write."""
        names = ", ".join(attribute for attribute in vars(type(self)) if not attribute.startswith("_"))
        write = f" Write {INSTEAD[name]}." if name in INSTEAD else ""
        raise AttributeError(f"strategy.extended has {names}; received {name!r}.{write}", name=name, obj=self)


class ClusterSpec:
    """The processes of a training, in the form of `tf.train.ClusterSpec`."""

    def __init__(self, workers: list[str]) -> None:
        self._workers = workers

    @property
    def jobs(self) -> list[str]:
        """The kinds of processes. There are workers alone, or none if this is the only process."""
        return list(self.as_dict())

    def as_dict(self) -> dict[str, list[str]]:
        """List the processes by kind."""
        return {"worker": self._workers} if self._workers else {}

    def num_tasks(self, job_name: str) -> int:
        """Count the processes of a kind."""
        return len(self.as_dict()[job_name])


class ClusterResolver:
    """What `tf.distribute` says of the processes in `strategy.cluster_resolver`.

    As there, a process that is alone has no type and no number. All others are workers, by the number of their process: the first one
    writes.
    """

    def __init__(self, process: int, processes: int, coordinator: str | None) -> None:
        self.task_type = "worker" if processes > 1 else None
        self.task_id = process if processes > 1 else None
        self._processes = processes
        self._coordinator = coordinator

    def cluster_spec(self) -> ClusterSpec:
        """List the processes. The address of process 0 may be known; the others do not listen, and have none."""
        if self.task_type is None:
            return ClusterSpec([])
        return ClusterSpec([self._coordinator or "process 0", *(f"process {number}" for number in range(1, self._processes))])

    def num_accelerators(self) -> dict[str, int]:
        """Count this process' GPUs or TPUs by kind. It starts JAX."""
        kind = jax.default_backend()
        return {} if kind == "cpu" else {kind.upper(): jax.local_device_count()}

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse a name without a meaning here."""
        raise AttributeError(
            f"strategy.cluster_resolver has task_type, task_id, cluster_spec() and num_accelerators(); received {name!r}. No process has a "
            f"server to which others connect.",
            name=name,
            obj=self,
        )


FIXED_ORDER = "Leave it out: sums have one fixed order, whatever the devices."

INSTEAD_OF_NAMES = {
    "cluster_resolver": (
        "Delete the resolver: un.MultiWorkerMirroredStrategy() finds the other processes by TF_CONFIG and by the variables of Slurm and other "
        "launchers, and un.TPUStrategy() finds the TPUs. In place of a SimpleClusterResolver write "
        "un.MultiWorkerMirroredStrategy(coordinator='10.0.0.1:1234', processes=2, process=0)."
    ),
    "experimental": "Write the name without experimental: un.MultiWorkerMirroredStrategy, un.TPUStrategy.",
    "has_strategy": "Compare un.get_strategy() with your strategy.",
    "experimental_set_strategy": "Open a scope: with strategy.scope().",
    "CrossDeviceOps": FIXED_ORDER,
    "HierarchicalCopyAllReduce": FIXED_ORDER,
    "NcclAllReduce": FIXED_ORDER,
    "ReductionToOneDevice": FIXED_ORDER,
    "InputOptions": "Leave it out: the next batch is read and sent ahead.",
    "RunOptions": "Leave it out.",
    "Server": "Leave it out: there are no servers to start.",
    "coordinator": "It is for parameter servers, whose training is asynchronous. Write un.MirroredStrategy().",
}
"""What to write in place of a name of `tf.distribute` that does not exist here."""
