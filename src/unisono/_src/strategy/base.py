"""Strategies: how many replicas, on which devices. The names and the scope of `tf.distribute`."""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import keras

from unisono._src import exchange, execution_mode
from unisono._src.checkpoint import run_description
from unisono._src.checks import refusals
from unisono._src.cluster.connect import check_alone
from unisono._src.distributed import per_replica
from unisono._src.distributed.batch_sources import make_source
from unisono._src.distributed.dataset import DistributedDataset, refuse_distributed_dataset
from unisono._src.distributed.replica_pipelines import InputContext, make_pipelines
from unisono._src.jax_private.runtime import has_jax_started
from unisono._src.keras_private.keras_versions import check_keras_version
from unisono._src.loop import reduce_values
from unisono._src.loop.runs import FunctionCache
from unisono._src.near_names import refuses_by, says_near_names
from unisono._src.ownership import OwnedObjects
from unisono._src.placement import Placement
from unisono._src.strategy import device_arguments, scopes
from unisono._src.strategy.device_arguments import DeviceChoice
from unisono._src.typing import Json, Outputs, PyTree, UserBatch, UserFunction, UserObject
from unisono._src.xla import determinism, lapack, runtime


class Strategy(execution_mode.ReplicaRunner):
    """R logical replicas on D devices: the common part of all strategies.

    Args:
        devices: How many devices, or which: a count, a list of JAX devices, or a mesh. By default all devices of JAX,
            but never more than replicas.
        replicas: R, the number of replicas into which every global batch is cut. By default the number of devices.
        accumulate: R as a multiple of the devices: each runs this many replicas one after another.
        deterministic: Whether results are the same to the bit, the default. False gives that up for GPU kernels that add in
            no fixed order; fingerprints of such runs say so.

    Example:
        >>> import unisono as un
        >>> strategy = un.MirroredStrategy(replicas=8)
        >>> strategy.num_replicas_in_sync
        8
    """

    _uses_all_devices = True
    """Whether the number of devices, where it is not given, is the machine's."""
    _example = "MirroredStrategy(devices=2), or MirroredStrategy(devices=jax.devices()[:2]) to choose them"
    """What to write in place of older forms."""

    @refuses_by(device_arguments.refuse_unknown_arguments)
    def __init__(
        self,
        *,
        devices: DeviceChoice = None,
        replicas: int | None = None,
        accumulate: int | None = None,
        deterministic: bool = True,
    ) -> None:
        check_keras_version()
        devices, replicas, accumulate = (
            device_arguments.as_whole_number(name, value)
            for name, value in (("devices", devices), ("replicas", replicas), ("accumulate", accumulate))
        )
        self._check(devices, replicas, accumulate, deterministic)
        count = devices if isinstance(devices, int) else None
        if not has_jax_started():
            if deterministic:
                determinism.add_missing_flags()
            if count:
                runtime.make_cpu_devices(count)
            runtime.set_fewest_threads()
        self._meet_others()
        chosen = self._find(devices)
        is_number_of_machine = devices is None and replicas is None and self._uses_all_devices
        if deterministic:
            platforms = {device.platform for device in chosen}
            determinism.check_flags(platforms)
            if "cpu" in platforms:
                lapack.use_one_thread()
        self.placement = self._place(chosen, devices is None, replicas, accumulate)
        self.exchange = exchange.choose_exchange(self.placement)
        self.deterministic = deterministic
        self._to_announce = is_number_of_machine
        self._said: set[str] = set()
        self.owned = OwnedObjects(self)
        self._runs = FunctionCache(self)
        runtime.check_threads()

    @property
    def num_replicas_in_sync(self) -> int:
        """Return R, the number of logical replicas."""
        return self.placement.replicas

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Return the devices that run the replicas, in contiguous blocks."""
        return self.placement.devices

    @functools.cached_property
    def on_lead(self) -> tuple[Placement, exchange.Exchange]:
        """Return the placement and the exchange of steps that are not compiled: all replicas of this process on its first device."""
        placement = self.placement.on_lead()
        return placement, exchange.choose_exchange(placement)

    @property
    def facts(self) -> dict[str, Json]:
        """Return what decides the bits of a run beside its program, seed and data: R, versions, precisions, the kind of device.

        Two runs with the same `un.fingerprint(strategy.facts)` have the same results. A checkpoint holds these facts.
        """
        return run_description.describe_run(self, self.num_replicas_in_sync)

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Return a scope: models made inside belong to this strategy, wherever they are compiled and fitted."""
        return scopes.open_scope(self)

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Return a block for steps that call user code: the code finds this strategy by `get_strategy`, in a scope or not."""
        return scopes.act_as_strategy(self)

    # Loops that the user writes.

    @says_near_names
    def distribute_dataset(self, dataset: UserObject, batch_size: int | None = None, shuffle: bool = False) -> DistributedDataset:
        """Return global batches of which `run` gives each replica its rows.

        Args:
            dataset: A list or another iterable of global batches; a tuple or dict of arrays, or an array; a
                keras.utils.PyDataset, a grain or tf.data dataset, a torch DataLoader.
            batch_size: The rows of a global batch, for arrays.
            shuffle: Whether arrays, or the batches of a PyDataset, come in another order in every pass, as in `fit`.
        """
        refusals.check_auto_sharding(dataset)
        return DistributedDataset(make_source(refuse_distributed_dataset(dataset), batch_size, shuffle), self.placement)

    @says_near_names
    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], Iterable[UserBatch]]) -> DistributedDataset:
        """Return global batches, each joined from one batch of every replica.

        Args:
            dataset_fn: Called once for each replica, on whatever device it runs, with a context that holds the replica's number as
                `input_pipeline_id`; returns the replica's batches.
        """
        return DistributedDataset(
            make_pipelines(lambda context: refuse_distributed_dataset(dataset_fn(context)), self.num_replicas_in_sync),
            self.placement,
        )

    def run(self, fn: UserFunction, args: Sequence[UserObject] = (), kwargs: Mapping[str, UserObject] | None = None) -> Outputs:
        """Call `fn` on every replica that has rows, and return its results of all replicas.

        Args:
            fn: A function, compiled once for each kind of arguments. It gets a replica's rows of a batch of a
                distributed dataset, a replica's value of the results of an earlier run, and every other argument as it is.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        execution_mode.check_not_tracing()
        refusals.check_outside_replica_code("run")
        refusals.check_run_scope(scopes.get_innermost_strategy() or self, self)
        self.announce()
        with self.acting():
            return self._runs(fn, args, dict(kwargs or {}))

    def reduce(self, reduce_op: str | enum.Enum, value: PyTree, axis: int | None = None) -> PyTree:
        """Return the sum or the mean of the replicas' results.

        Args:
            reduce_op: un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN".
            value: A result of `run`, or a tree of results.
            axis: The axis over which to sum within each replica too; 0 for the rows. A mean is then the mean over all rows.
        """
        refusals.check_outside_replica_code("reduce")
        per_replica.check_replica_count(value, self.placement, "reduce")
        return reduce_values.reduce_over_replicas(reduce_op, value, axis, self.placement)

    @says_near_names
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Return the replicas' results, concatenated along an axis."""
        refusals.check_outside_replica_code("gather")
        per_replica.check_replica_count(value, self.placement, "gather")
        return reduce_values.gather_replicas(value, axis, self.placement)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Return the result of each replica, in order. A replica without rows has no rows, or zero."""
        refusals.check_outside_replica_code("local_results")
        per_replica.check_replica_count(value, self.placement, "local_results")
        return reduce_values.split_by_replica(value, self.num_replicas_in_sync)

    experimental_distribute_dataset = distribute_dataset
    experimental_run_v2 = run
    experimental_local_results = local_results

    def announce(self) -> None:
        """Print once, at the first fit, that R came from the machine."""
        if self._to_announce:
            self._to_announce = False
            replicas = self.num_replicas_in_sync
            print(f"R = {replicas} from this machine; write replicas={replicas} to get these bits elsewhere", file=sys.stderr)

    def warn_of_slow_steps(self, what: str) -> None:
        """Warn once of a model or a function that is not compiled."""
        if what in self._said:
            return
        self._said.add(what)
        warnings.warn(
            f"{what}: its replicas run one after another on {self.devices[0]}, operation by operation, which is slow and has other last bits "
            f"than a compiled run. Fingerprints of what is trained so begin with 'unpromised-'. Compile it again when you are done with "
            f"debugging.",
            stacklevel=3,
        )

    def check_alike(self, what: Mapping[str, object]) -> None:
        """Refuse values that differ between processes; the keys are names for the message."""

    def agree(self, variables: list[keras.Variable]) -> None:
        """Give the variables the same values in all processes, before they are first used."""

    writes = True
    """Whether this process writes files and shows progress for all processes."""

    def check_use(self, model: keras.Model) -> None:
        """Refuse to train the model inside the scope of another strategy."""
        scopes.check_scope_of_model(model)

    def check_attributes(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Refuse attributes that were set on an optimizer and that it does not have. Called at every run."""
        refusals.check_optimizer_attributes(optimizer)

    def check_variables(self, variables: list[keras.Variable], assigned: list[keras.Variable]) -> None:
        """Refuse variables of other strategies in replica code, and assigned ones whose new value replicas cannot agree on."""
        refusals.check_replica_variables(variables, self)
        refusals.check_assigned_variables(assigned, self)

    def _check(self, devices: DeviceChoice, replicas: int | None, accumulate: int | None, deterministic: bool) -> None:
        device_arguments.check_strategy_arguments(type(self).__name__, devices, replicas, accumulate, deterministic)

    def _meet_others(self) -> None:
        """Connect to the other processes, before JAX starts. This strategy has none."""
        check_alone(type(self).__name__)

    def _find(self, devices: DeviceChoice) -> list[jax.Device]:
        return device_arguments.find_devices(type(self).__name__, devices)

    def _place(self, devices: list[jax.Device], are_default: bool, replicas: int | None, accumulate: int | None) -> Placement:
        """Return the placement of the replicas. `are_default`: the user asked for no devices, so these are all that there are."""
        if replicas is None:
            replicas = len(devices) * (accumulate or 1)
        elif are_default:
            devices = devices[:replicas]
        return Placement(replicas, tuple(devices))

    def __repr__(self) -> str:
        def format_count(count: int, noun: str) -> str:
            return f"{count} {noun}{'s' * (count != 1)}"

        kind = self.devices[0].platform
        replicas = format_count(self.num_replicas_in_sync, "replica")
        return f"<{type(self).__name__}: {replicas} on {format_count(len(self.devices), f'{kind} device')}>"
