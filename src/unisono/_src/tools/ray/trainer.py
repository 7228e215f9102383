"""`un.ray.Trainer`: a function that trains a model, run by the workers of Ray Train, which find one another.

Ray's own JaxTrainer connects no CPU workers, and gives each GPU worker of a node the first GPU. This needs none of it: Ray shows each worker
its own GPUs, and the variables of `unisono launch` tell a strategy of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax

from unisono._src.processes import names
from unisono._src.processes.environments.environment import join_address
from unisono._src.processes.launch.worker_environment import LOOPBACK
from unisono._src.tools.ray.installed import import_ray
from unisono._src.tools.ray.kept_programs import keep_programs
from unisono._src.tools.ray.local_folder import find_local_folder
from unisono._src.tools.ray.room import make_room_callback

TrainFunction: TypeAlias = Callable[..., object]


class Trainer:
    """Trains a model on the workers of Ray Train.

    Each worker calls the function, which makes a `MultiWorkerMirroredStrategy` and calls `fit`. The result has the same bits on any number of
    workers. Ray starts the workers, starts them again if one is lost, and stores checkpoints: `un.ray.Backup` has it do so. The arguments are
    those of Ray's trainers.

    Args:
        train_loop_per_worker: The function, without arguments or with one, `train_loop_config`.
        train_loop_config: What the function is given.
        scaling_config: A ray.train.ScalingConfig: how many workers, with which resources. By default one worker.
        run_config: A ray.train.RunConfig: the name of the run, its storage, how many failures it survives.
        datasets: Refused, since Ray would give each worker other rows. `un.ray.Dataset` reads a ray.data.Dataset.

    Example:
        >>> def train():
        ...     strategy = un.MultiWorkerMirroredStrategy(replicas=4)
        ...     with strategy.scope():
        ...         model = make_model()
        ...     model.compile("adam", "mse")
        ...     model.fit(x, y, callbacks=[un.ray.Backup(save_freq=100)])
        >>> scaling = ray.train.ScalingConfig(num_workers=2)  # doctest: +SKIP
        >>> un.ray.Trainer(train, scaling_config=scaling).fit()  # doctest: +SKIP
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        datasets: Any = None,
    ) -> None:
        ray = import_ray()
        if datasets:
            raise ValueError(
                f"un.ray.Trainer received datasets={list(datasets)}, of which Ray gives each worker other rows: the result would depend on the "
                f"number of workers. Write rows = un.ray.Dataset(dataset, x='image', y='label', batch_size=64), and in the function "
                f"model.fit(rows)."
            )
        if scaling_config is not None and scaling_config.num_workers == 0:
            raise ValueError(
                "un.ray.Trainer received ScalingConfig(num_workers=0), by which Ray runs the function in this process. Call the function "
                "itself for that, or write num_workers=1 or more."
            )
        connects = ray.train.v2.jax.JaxConfig(use_tpu=scaling_config is not None and scaling_config.use_tpu)
        given = run_config or ray.train.RunConfig()
        self._run_config = dataclasses.replace(given, callbacks=[*given.callbacks, make_room_callback()])
        self._trainer = ray.train.v2.jax.JaxTrainer(
            connect_before(train_loop_per_worker),
            train_loop_config=train_loop_config,
            jax_config=connects,
            scaling_config=scaling_config,
            run_config=self._run_config,
        )

    def fit(self) -> Any:
        """Train, and give Ray's result: a ray.train.Result, with the last metrics and checkpoint."""
        check_storage(self._run_config)
        with explain_failure(self._run_config):
            return self._trainer.fit()


def check_storage(run_config: Any) -> None:
    """Refuse a storage to which this process cannot write. Ray looks into it where it starts the workers, and says so in a long traceback."""
    try:
        _ = run_config.storage_context
    except Exception as error:
        raise OSError(
            f"un.ray.Trainer cannot write to {describe_storage(run_config)}: {error}. Nothing was started. Write storage_path= with a folder "
            f"or an address to which all nodes may write, such as '/mnt/shared/runs' or 's3://bucket/runs'."
        ) from error


@contextlib.contextmanager
def explain_failure(run_config: Any) -> Iterator[None]:
    """Let the error of a run say which workers were lost, and that its checkpoints are there."""
    ray = import_ray()
    try:
        yield
    except ray.train.WorkerGroupError as error:
        lost = [rank for rank, failure in error.worker_failures.items() if is_loss(ray, failure)]
        error.add_note(describe_failure(run_config, lost))
        raise


def is_loss(ray: Any, failure: BaseException) -> bool:
    """Whether a worker is gone, in place of an error that it raised."""
    return isinstance(getattr(failure, "health_check_failure", failure), ray.exceptions.RayActorError)


def describe_failure(run_config: Any, lost: list[int]) -> str:
    failures = run_config.failure_config.max_failures
    again = (
        f"The run has lost worker {' and worker '.join(map(str, lost))} without an error of Python, as after a kill, and "
        f"FailureConfig(max_failures={failures}) is how often Ray starts the workers again: write max_failures=3, or -1 for always. "
        if lost
        else ""
    )
    return (
        f"unisono.ray: {again}What was saved is in {describe_storage(run_config)}. A un.ray.Trainer with the same name= and storage_path= goes "
        f"on from the last checkpoint."
    )


def describe_storage(run_config: Any) -> str:
    return f"RunConfig(name={run_config.name!r}, storage_path={run_config.storage_path!r})"


def connect_before(train: TrainFunction) -> TrainFunction:
    """Have a worker learn of the others before it calls the function. Ray reads the name and the arguments of the function."""

    @functools.wraps(train)
    def connect_and_train(*args: Any) -> object:
        prepare_worker()
        storage = import_ray().train.get_context().get_storage()
        with keep_programs(find_local_folder(storage, "programs")):
            return train(*args)

    return connect_and_train


def prepare_worker() -> None:
    """Tell this worker of Ray Train of the others and of its devices."""
    ray = import_ray()
    context = ray.train.get_context()
    workers, rank = context.get_world_size(), context.get_world_rank()
    address = None
    if workers > 1:
        host = LOOPBACK if context.get_local_world_size() == workers else ray.util.get_node_ip_address()
        address = ray.train.collective.broadcast_from_rank_zero(find_free_address(host) if rank == 0 else None)
    os.environ.update(make_variables(address, workers, rank))
    # Ray hides the GPUs of others from a worker that has some, and not from one that has none.
    if not any(ray.get_runtime_context().get_accelerator_ids().values()) and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def find_free_address(host: str) -> str:
    """Find a port of this machine at which nobody listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return join_address(host, listener.getsockname()[1])


def make_variables(address: str | None, workers: int, rank: int) -> dict[str, str]:
    """Make the variables by which a strategy finds the other workers. One worker needs no address.

    >>> make_variables(None, 1, 0)
    {'UNISONO_PROCESSES': '1'}
    """
    if address is None:
        return {names.PROCESSES: str(workers)}
    return {names.COORDINATOR: address, names.PROCESSES: str(workers), names.PROCESS: str(rank)}
