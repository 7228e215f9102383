"""Strategies: how many replicas, on which devices. The names and the scope of `tf.distribute`."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from unisono._src import exchange, execution_mode, keras_private
from unisono._src.checkpoint import run_description
from unisono._src.checks import refusals
from unisono._src.cluster.started_alone import check_alone
from unisono._src.distributed import per_replica
from unisono._src.distributed.batch_sources import source_of
from unisono._src.distributed.dataset import DistributedDataset, undistributed
from unisono._src.distributed.replica_pipelines import InputContext, pipelines
from unisono._src.loop import reduce_values
from unisono._src.loop.runs import Runs
from unisono._src.near_names import refuses_by, says_near_names
from unisono._src.ownership import Owned
from unisono._src.placement import Placement
from unisono._src.strategy import device_arguments, scopes
from unisono._src.strategy.device_arguments import Devices
from unisono._src.xla import determinism, lapack, runtime


class Strategy(execution_mode.Runner):
    """R logical replicas on D devices; what all strategies share.

    Args:
        devices: How many devices, or which: a count, a list of JAX devices, or a mesh. By default all that JAX has, but
            never more than replicas.
        replicas: R, the number of parts into which every global batch is cut. By default the number of devices.
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

    @refuses_by(device_arguments.refuse_form)
    def __init__(
        self,
        *,
        devices: Devices = None,
        replicas: int | None = None,
        accumulate: int | None = None,
        deterministic: bool = True,
    ) -> None:
        keras_private.check_version()
        devices, replicas, accumulate = (
            device_arguments.whole_number(name, value)
            for name, value in (("devices", devices), ("replicas", replicas), ("accumulate", accumulate))
        )
        self._check(devices, replicas, accumulate, deterministic)
        count = devices if isinstance(devices, int) else None
        if not runtime.has_started():
            if deterministic:
                determinism.ask_for()
            if count:
                runtime.make_cpu_devices(count)
            runtime.ask_for_threads()
        self._meet_others()
        found = self._find(devices)
        of_machine = devices is None and replicas is None and self._uses_all_devices
        if deterministic:
            platforms = {device.platform for device in found}
            determinism.check(platforms)
            if "cpu" in platforms:
                lapack.use_one_thread()
        self.placement = self._place(found, devices is None, replicas, accumulate)
        self.exchange = exchange.choose(self.placement)
        self.deterministic = deterministic
        self._to_announce = of_machine
        self._said: set[str] = set()
        self.owned = Owned(self)
        self._runs = Runs(self)
        runtime.check_threads()

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of logical replicas."""
        return self.placement.replicas

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that run the replicas, in contiguous blocks."""
        return self.placement.devices

    @functools.cached_property
    def on_lead(self) -> tuple[Placement, exchange.Exchange]:
        """Where replicas run whose steps are not compiled: all those of this process on its first device."""
        placement = self.placement.on_lead()
        return placement, exchange.choose(placement)

    @property
    def facts(self) -> dict[str, Any]:
        """What the bits of a run depend on beside its program, seed and data: R, versions, precisions, the kind of device.

        Where `un.fingerprint(strategy.facts)` is the same, so are the results. A checkpoint holds them.
        """
        return run_description.of_run(self, self.num_replicas_in_sync)

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Models made inside belong to this strategy, wherever they are compiled and fitted."""
        return scopes.inside(self)

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Steps call code of the user's inside: it finds this strategy by `get_strategy`, in a scope or not."""
        return scopes.act(self)

    # A loop of the user's own.

    @says_near_names
    def distribute_dataset(self, dataset: Any, batch_size: int | None = None, shuffle: bool = False) -> DistributedDataset:
        """Global batches of which `run` gives each replica its rows.

        Args:
            dataset: A list or another iterable of global batches; a tuple or dict of arrays, or an array; a
                keras.utils.PyDataset, a grain or tf.data dataset, a torch DataLoader.
            batch_size: The rows of a global batch, for arrays.
            shuffle: Whether arrays, or the batches of a PyDataset, come in another order in every pass, as in `fit`.
        """
        refusals.check_sharding(dataset)
        return DistributedDataset(source_of(undistributed(dataset), batch_size, shuffle), self.placement)

    @says_near_names
    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], Any]) -> DistributedDataset:
        """Global batches that are made of the replicas' own.

        Args:
            dataset_fn: Called once for each replica, wherever it runs, with a context that knows its number as
                `input_pipeline_id`; returns the replica's batches.
        """
        return DistributedDataset(
            pipelines(lambda context: undistributed(dataset_fn(context)), self.num_replicas_in_sync), self.placement
        )

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn` on every replica that has rows, and returns what it returns, for each replica.

        Args:
            fn: A function, compiled once for each kind of arguments. It gets a replica's rows of what comes from a distributed
                dataset, a replica's value of what an earlier run returned, and everything else as it is.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        execution_mode.check()
        refusals.check_outside("run")
        refusals.check_scope_of_run(scopes.innermost() or self, self)
        self.announce()
        with self.acting():
            return self._runs(fn, args, dict(kwargs or {}))

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """The sum or the mean of what replicas returned.

        Args:
            reduce_op: un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN".
            value: What `run` returned, or a tree of it.
            axis: Over which to sum within each replica too; 0 for the rows. A mean is then one over all rows.
        """
        refusals.check_outside("reduce")
        per_replica.check(value, self.placement, "reduce")
        return reduce_values.reduced(reduce_op, value, axis, self.placement)

    @says_near_names
    def gather(self, value: Any, axis: int) -> Any:
        """What replicas returned, one behind the other along an axis."""
        refusals.check_outside("gather")
        per_replica.check(value, self.placement, "gather")
        return reduce_values.gathered(value, axis, self.placement)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """What each replica returned, in order; of a replica without rows, no rows or zero."""
        refusals.check_outside("local_results")
        per_replica.check(value, self.placement, "local_results")
        return reduce_values.local_results(value, self.num_replicas_in_sync)

    experimental_distribute_dataset = distribute_dataset
    experimental_run_v2 = run
    experimental_local_results = local_results

    def announce(self) -> None:
        """Says once, at the first fit, that R came from the machine."""
        if self._to_announce:
            self._to_announce = False
            r = self.num_replicas_in_sync
            print(f"R = {r} from this machine; write replicas={r} to get these bits elsewhere", file=sys.stderr)

    def say_that_it_is_slow(self, what: str) -> None:
        """Once for a model, or a function, that is not compiled."""
        if what in self._said:
            return
        self._said.add(what)
        warnings.warn(
            f"{what}: its replicas run one after another on {self.devices[0]}, operation by operation, which is slow and has other last bits "
            f"than a compiled run. Fingerprints of what is trained so begin with 'unpromised-'. Compile it again when you are done with "
            f"debugging.",
            stacklevel=3,
        )

    def check_alike(self, what: Mapping[str, Any]) -> None:
        """Called with what must be the same in all processes, by names that messages use."""

    def agree(self, variables: list[Any]) -> None:
        """Called when it is known which variables will be used, before they are: several processes must start from the same."""

    writes = True
    """Whether this process, of those that train together, writes files and shows progress."""

    def check_use(self, model: Any) -> None:
        """Before training: the scope around this line, if there is one, must be the model's."""
        scopes.model_used(model)

    def check_attributes(self, optimizer: Any) -> None:
        """At every run: what was set on an optimizer must be something that it has."""
        refusals.check_attributes(optimizer)

    def check_variables(self, variables: list[Any], assigned: list[Any]) -> None:
        """In replica code: all must be this strategy's, and it must be clear what becomes of those that are assigned."""
        refusals.check_variables(variables, self)
        refusals.check_assigned(assigned, self)

    def _check(self, devices: Devices, replicas: int | None, accumulate: int | None, deterministic: bool) -> None:
        device_arguments.check(type(self).__name__, devices, replicas, accumulate, deterministic)

    def _meet_others(self) -> None:
        """Called before JAX starts: this strategy meets nobody."""
        check_alone(type(self).__name__)

    def _find(self, devices: Devices) -> list[jax.Device]:
        return device_arguments.found(type(self).__name__, devices)

    def _place(self, found: list[jax.Device], all_of_them: bool, replicas: int | None, accumulate: int | None) -> Placement:
        """`all_of_them`: whether the devices that were found are only those that there are, not those that were asked for."""
        if replicas is None:
            replicas = len(found) * (accumulate or 1)
        elif all_of_them:
            found = found[:replicas]
        return Placement(replicas, tuple(found))

    def __repr__(self) -> str:
        def counted(count: int, noun: str) -> str:
            return f"{count} {noun}{'s' * (count != 1)}"

        kind = self.devices[0].platform
        return f"<{type(self).__name__}: {counted(self.num_replicas_in_sync, 'replica')} on {counted(len(self.devices), f'{kind} device')}>"
