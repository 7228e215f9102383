"""Strategies: how many replicas, on which devices. They have the names and the scope of `tf.distribute`."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import keras

from unisono._src.engine.xla import determinism, runtime
from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras import execution_mode
from unisono._src.keras.checkpoint import run_description
from unisono._src.keras.checks import refusals
from unisono._src.keras.distributed import per_replica
from unisono._src.keras.distributed.batch_sources import make_source
from unisono._src.keras.distributed.dataset import DistributedDataset, refuse_distributed_dataset
from unisono._src.keras.distributed.replica_pipelines import InputContext, make_pipelines
from unisono._src.keras.distributed.replica_strategy import SCOPES, ReplicaStrategy
from unisono._src.keras.loop import reduce_values
from unisono._src.keras.loop.runs import FunctionCache
from unisono._src.keras.memory.report import MemoryReport
from unisono._src.keras.memory.request import report_memory
from unisono._src.keras.strategy import scopes
from unisono._src.keras.strategy.device_arguments import (
    DeviceChoice,
    StrategyArguments,
    check_arguments,
    check_sharded_part,
    check_sharded_placement,
    check_verified_placement,
    check_verified_share,
    find_devices,
    is_devices_overridden,
    override_placement,
    refuse_unknown_arguments,
    translate_device_names,
)
from unisono._src.keras.strategy.extended import ClusterResolver, StrategyExtended
from unisono._src.keras.strategy.known_variables import warn_of_misspelt_variables
from unisono._src.near_names import refuses_by, says_near_names
from unisono._src.placement import Placement
from unisono._src.processes.environments.connect import check_alone
from unisono._src.programs.private.backends import has_jax_started
from unisono._src.typing import Json, Outputs, PyTree, UserBatch, UserFunction, UserObject


class Strategy(ReplicaStrategy):
    """R logical replicas on D devices: the common part of all strategies.

    Devices are looked up at the first use (a scope that is entered, an attribute that is read), which starts JAX. On CPU it makes as many
    devices as the largest number that any strategy has asked for until then, so that the order of strategies does not matter.

    Args:
        devices: How many devices, or which: a count, a list of JAX devices, or a mesh. By default all devices of JAX,
            but never more than replicas.
        replicas: R, the number of replicas into which every global batch is cut. By default the number of devices.
        accumulate: R as a multiple of the devices: each runs this many replicas one after another.
        deterministic: Whether results are the same to the bit, the default. False gives that up for GPU kernels that add in
            no fixed order; fingerprints of such runs say so.
        verify: The share of steps in which one replica's contribution is computed again on another device and compared, as 1/100. A device
            that computes other bits is named.
        shard: "frozen" cuts weights that are not trained over the devices. Each is put together while it is read.

    Example:
        >>> import unisono as un
        >>> strategy = un.MirroredStrategy(replicas=8)
        >>> strategy.num_replicas_in_sync
        8
    """

    _uses_all_devices = True
    """Whether the machine decides the number of devices, if it is not given."""
    _example = "MirroredStrategy(devices=2), or MirroredStrategy(devices=jax.devices()[:2]) to choose them"
    """What to write in place of older forms."""

    @refuses_by(refuse_unknown_arguments)
    def __init__(
        self,
        *,
        devices: DeviceChoice = None,
        replicas: int | None = None,
        accumulate: int | None = None,
        deterministic: bool = True,
        verify: float | None = None,
        shard: str | None = None,
    ) -> None:
        warn_of_misspelt_variables()
        given = override_placement(devices, replicas, accumulate)
        self._arguments = check_arguments(type(self).__name__, given.devices, given.replicas, given.accumulate, deterministic)
        self._check(self._arguments)
        verify = None if is_devices_overridden() else verify  # an audit compares in its own way, on one device too
        check_verified_share(type(self).__name__, verify)
        if not has_jax_started():
            if deterministic:
                determinism.add_missing_flags()
            if isinstance(self._arguments.devices, int):
                runtime.make_cpu_devices(self._arguments.devices)
            runtime.set_fewest_threads()
        self._meet_others()
        shard = None if is_devices_overridden() else shard  # an audit compares on one device too
        check_sharded_part(type(self).__name__, shard)
        is_number_of_machine = given.devices is None and given.replicas is None and self._uses_all_devices
        super().__init__(deterministic, is_number_of_machine, verify, shard)
        self._runs = FunctionCache(self)
        # If JAX has not started, strategies that are made later may ask for more CPU devices. Several processes compare their devices now.
        if has_jax_started() or not self.agreement.is_alone:
            self._start()

    def _choose_placement(self) -> Placement:
        devices = self._find(self._arguments)
        if self.deterministic:
            platforms = {device.platform for device in devices}
            determinism.check_flags(platforms)
            if "cpu" in platforms:
                runtime.use_one_thread()
        placement = self._place(devices, self._arguments)
        check_verified_placement(type(self).__name__, self.verify, placement)
        check_sharded_placement(type(self).__name__, self.shard, placement)
        runtime.check_threads()
        return placement

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of logical replicas. If it was given, reading it does not start JAX."""
        return self._arguments.replicas or self.placement.replicas

    @property
    def extended(self) -> StrategyExtended:
        """The parts of `tf.distribute`'s `extended` that have a meaning here."""
        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What is known of the processes. None for a strategy of one process."""
        return None

    @property
    def facts(self) -> dict[str, Json]:
        """R, versions, precisions and the kind of device. Beside program, seed and data they decide the bits of a run.

        Two runs with the same `un.fingerprint(strategy.facts)` have the same results. A checkpoint holds these facts.
        """
        return run_description.describe_run(self, self.num_replicas_in_sync)

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Open a scope: models made inside belong to this strategy. It trains them wherever they are compiled and fitted."""
        self._start()
        return scopes.open_scope(self)

    # Loops that the user writes.

    @says_near_names
    def distribute_dataset(self, dataset: UserObject, batch_size: int | None = None, shuffle: bool = False) -> DistributedDataset:
        """Distribute global batches: `run` gives each replica its rows.

        Args:
            dataset: A list or another iterable of global batches; a tuple or dict of arrays, or an array; a
                keras.utils.PyDataset, a grain or tf.data dataset, a torch DataLoader.
            batch_size: The rows of a global batch, for arrays.
            shuffle: Whether arrays, or the batches of a PyDataset, come in another order in every pass, as in `fit`.
        """
        refusals.check_auto_sharding(dataset)
        is_cut = self.num_replicas_in_sync > 1
        return DistributedDataset(make_source(refuse_distributed_dataset(dataset), batch_size, shuffle, is_cut), self.placement)

    @says_near_names
    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], Iterable[UserBatch]]) -> DistributedDataset:
        """Distribute global batches, each joined from one batch of every replica.

        Args:
            dataset_fn: Called once for each replica, on whatever device it runs, with a context that holds the replica's number as
                `input_pipeline_id`; returns the replica's batches.
        """
        return DistributedDataset(
            make_pipelines(lambda context: refuse_distributed_dataset(dataset_fn(context)), self.num_replicas_in_sync),
            self.placement,
        )

    def run(self, fn: UserFunction, args: Sequence[UserObject] = (), kwargs: Mapping[str, UserObject] | None = None) -> Outputs:
        """Call `fn` on every replica that has rows. It returns the results of all replicas.

        Args:
            fn: A function, compiled once for each kind of arguments. It gets a replica's rows of a batch of a
                distributed dataset, a replica's value of the results of an earlier run, and every other argument as it is.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        with PUBLIC_CALL:
            execution_mode.check_not_tracing()
            refusals.check_outside_replica_code("run")
            refusals.check_run_scope(SCOPES.innermost or self, self)
            self.announce()
            with self.acting():
                return self._runs(fn, args, dict(kwargs or {}))

    def reduce(self, reduce_op: str | enum.Enum, value: PyTree, axis: int | None = None) -> PyTree:
        """Reduce the replicas' results to their sum or mean.

        Args:
            reduce_op: un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN".
            value: A result of `run`, or a tree of results.
            axis: The axis over which to sum within each replica too; 0 for the rows. A mean is then the mean over all rows.
        """
        with PUBLIC_CALL:
            refusals.check_outside_replica_code("reduce")
            per_replica.check_replica_count(value, self.placement, "reduce")
            return reduce_values.reduce_over_replicas(reduce_op, value, axis, self.placement)

    @says_near_names
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenate the replicas' results along an axis.

        Args:
            value: A result of `run`, or a tree of results.
            axis: The axis; 0 for the rows.
        """
        refusals.check_outside_replica_code("gather")
        per_replica.check_replica_count(value, self.placement, "gather")
        return reduce_values.gather_replicas(value, axis, self.placement)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """List the result of each replica, in order, on the first device.

        A replica without rows has no rows, or zero.

        Args:
            value: A result of `run`, or a tree of results.
        """
        with PUBLIC_CALL:
            refusals.check_outside_replica_code("local_results")
            per_replica.check_replica_count(value, self.placement, "local_results")
            return reduce_values.split_by_replica(value, self.placement)

    @says_near_names
    def memory(
        self,
        model: keras.Model,
        batch_size: int,
        x: UserBatch = None,
        y: UserBatch = None,
        sample_weight: UserBatch = None,
        replicas: Iterable[int] | None = None,
    ) -> MemoryReport:
        """Predict the memory of `fit` on each device, before anything is trained.

        The program of the step is compiled for each R and not run; `fit` does not compile it again. The optimizer is built, as by `fit`.

        Args:
            model: A compiled and built model from this strategy's scope.
            batch_size: The rows of a global batch.
            x: Inputs of any number of rows, or their shapes. They are needed where the model does not know them.
            y: Labels in the same way. By default they are derived from the loss and the outputs.
            sample_weight: Weights of the rows in the same way, if there are any.
            replicas: The R for which to predict. By default these are the strategy's own, its half and its double.

        Returns:
            A report that prints as a table. `to_dict()` and `to_json()` give its numbers in bytes.
        """
        refusals.check_outside_replica_code("memory")
        return report_memory(self, model, batch_size, x, y, sample_weight, replicas)

    experimental_distribute_dataset = distribute_dataset
    experimental_run_v2 = run
    experimental_local_results = local_results

    @classmethod
    def _write_devices(cls, value: UserObject) -> str | None:
        """Write the call for devices in a form of `tf.distribute`. None if they are in no such form."""
        devices = translate_device_names(value)
        return None if devices is None else f"{cls.__name__}({devices})"

    def _check(self, arguments: StrategyArguments) -> None:
        """Refuse arguments that this strategy cannot have."""

    def _meet_others(self) -> None:
        """Connect to the other processes, before JAX starts. This strategy has none."""
        check_alone(type(self).__name__)

    def _find(self, arguments: StrategyArguments) -> list[jax.Device]:
        """Find the devices of this process."""
        return find_devices(arguments)

    def _place(self, devices: list[jax.Device], arguments: StrategyArguments) -> Placement:
        """Place the replicas on the devices."""
        if arguments.replicas is None:
            return Placement(len(devices) * (arguments.accumulate or 1), tuple(devices))
        if arguments.devices is None:  # these are all that there are
            devices = devices[: arguments.replicas]
        return Placement(arguments.replicas, tuple(devices))

    def __repr__(self) -> str:
        replicas = self.num_replicas_in_sync
        devices = len(self.devices)
        kind = self.devices[0].platform
        return (
            f"<{type(self).__name__}: {replicas} replica{'s' * (replicas != 1)} on {devices} {kind} device{'s' * (devices != 1)}>"
        )
