"""Strategies: how many replicas, on which devices. The names and the scope of `tf.distribute`."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras

from unisono import exchange, keras_seam, refusals, training
from unisono.loop import older, running, values
from unisono.loop.datasets import DistributedDataset, InputContext, pipelines, source_of
from unisono.loop.run import Runs
from unisono.owned import Owned
from unisono.placement import Placement
from unisono.xla import determinism, runtime

Devices = int | Sequence[jax.Device] | jax.sharding.Mesh | None


class Scopes(threading.local):
    """The strategies whose scopes this thread is in, innermost last."""

    def __init__(self) -> None:
        self.open: list[Strategy] = []


_scopes = Scopes()
_watch = keras_seam.Watch(
    made=lambda thing: made_in_scope(thing),
    model_made=lambda model: model_made_in_scope(model),
    model_used=lambda model: used_in_scope(model),
)


def made_in_scope(thing: Any) -> None:
    """What is made in a scope of this thread belongs to its strategy."""
    if _scopes.open:
        _scopes.open[-1].owned.add(thing)
        if isinstance(thing, keras.metrics.Metric):
            older.name_metric(thing)


def model_made_in_scope(model: Any) -> None:
    """A model that is trained uses its strategy."""
    if _scopes.open:
        training.Bond(model, _scopes.open[-1])


def used_in_scope(model: Any) -> None:
    """A model that is compiled or trained in a scope of this thread must have been made in that strategy's."""
    if _scopes.open:
        refusals.check_made_here(model, _scopes.open[-1], training.belongs_to(model))


class Strategy:
    """R logical replicas on D devices; what all strategies share.

    Args:
        devices: How many devices, or which: a count, a list of JAX devices, or a mesh. By default all that JAX has, but
            never more than replicas.
        replicas: R, the number of parts into which every global batch is cut. By default the number of devices.
        accumulate: R as a multiple of the devices: each runs this many replicas one after another.
        deterministic: Whether results are the same to the bit, the default. False gives that up for GPU kernels that add in
            no fixed order; fingerprints of such runs say so.

    Example:
        >>> strategy = MirroredStrategy(replicas=8)
        >>> strategy.num_replicas_in_sync
        8
    """

    _uses_all_devices = True
    """Whether the number of devices, where it is not given, is the machine's."""
    _example = "MirroredStrategy(devices=2), or MirroredStrategy(devices=jax.devices()[:2]) to choose them"
    """What to write in place of older forms."""

    def __init__(
        self,
        *positional: Any,
        devices: Devices = None,
        replicas: int | None = None,
        accumulate: int | None = None,
        deterministic: bool = True,
        **older: Any,
    ) -> None:
        keras_seam.check_version()
        self._check_form(positional, older)
        devices, replicas, accumulate = (
            whole_number(name, value)
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
        found = self._find(devices)
        of_machine = devices is None and replicas is None and self._uses_all_devices
        if replicas is None:
            replicas = len(found) * (accumulate or 1)
        elif devices is None:
            found = found[:replicas]
        if deterministic:
            determinism.check({device.platform for device in found})
        self.placement = Placement(replicas, tuple(found))
        self.exchange = exchange.choose(self.placement)
        self.deterministic = deterministic
        self._to_announce = of_machine
        self.owned = Owned()
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

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Models made inside belong to this strategy, wherever they are compiled and fitted."""
        if _scopes.open and _scopes.open[-1] is not self:
            raise RuntimeError(
                f"This is the scope of {_scopes.open[-1]!r}; the scope of {self!r} cannot begin inside it. Leave the first scope "
                f"before you enter another."
            )
        with _watch, older.reductions():
            _scopes.open.append(self)
            try:
                yield self
            finally:
                _scopes.open.pop()

    # A loop of the user's own.

    def distribute_dataset(self, dataset: Any, batch_size: int | None = None, shuffle: bool = False) -> DistributedDataset:
        """Global batches of which `run` gives each replica its rows.

        Args:
            dataset: A list or another iterable of global batches; a tuple or dict of arrays, or an array; a
                keras.utils.PyDataset, a grain or tf.data dataset, a torch DataLoader.
            batch_size: The rows of a global batch, for arrays.
            shuffle: Whether arrays, or the batches of a PyDataset, come in another order in every pass, as in `fit`.
        """
        return DistributedDataset(source_of(dataset, batch_size, shuffle), self.placement)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], Any]) -> DistributedDataset:
        """Global batches that are made of the replicas' own.

        Args:
            dataset_fn: Called once for each replica, wherever it runs, with a context that knows its number as
                `input_pipeline_id`; returns the replica's batches.
        """
        return DistributedDataset(pipelines(dataset_fn, self.num_replicas_in_sync), self.placement)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn` on every replica that has rows, and returns what it returns, for each replica.

        Args:
            fn: A function, compiled once for each kind of arguments. It gets a replica's rows of what comes from a distributed
                dataset, a replica's value of what an earlier run returned, and everything else as it is.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        running.check()
        older.name_arrays()
        refusals.check_scope_of_run(_scopes.open[-1] if _scopes.open else self, self)
        self.announce()
        return self._runs(fn, args, dict(kwargs or {}))

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """The sum or the mean of what replicas returned.

        Args:
            reduce_op: un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN".
            value: What `run` returned, or a tree of it.
            axis: Over which to sum within each replica too; 0 for the rows. A mean is then one over all rows.
        """
        return values.reduced(reduce_op, value, axis, self.placement)

    def gather(self, value: Any, axis: int) -> Any:
        """What replicas returned, one behind the other along an axis."""
        return values.gathered(value, axis, self.placement)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """What each replica returned, in order; of a replica without rows, no rows or zero."""
        return values.local_results(value, self.num_replicas_in_sync)

    experimental_distribute_dataset = distribute_dataset
    experimental_run_v2 = run
    experimental_local_results = local_results

    def announce(self) -> None:
        """Says once, at the first fit, that R came from the machine."""
        if self._to_announce:
            self._to_announce = False
            r = self.num_replicas_in_sync
            print(f"R = {r} from this machine; write replicas={r} to get these bits elsewhere", file=sys.stderr)

    def check_use(self, model: Any) -> None:
        """Before training: the scope around this line, if there is one, must be the model's."""
        used_in_scope(model)

    def check_attributes(self, optimizer: Any) -> None:
        """At every run: what was set on an optimizer must be something that it has."""
        refusals.check_attributes(optimizer)

    def check_variables(self, variables: list[Any]) -> None:
        """In replica code: all must be this strategy's."""
        refusals.check_variables(variables, self)

    def _check_form(self, positional: tuple[Any, ...], older: dict[str, Any]) -> None:
        """The arguments of older programs, which had other forms."""
        name = type(self).__name__
        received = [repr(value) for value in positional] + [f"{key}={value!r}" for key, value in older.items()]
        if received:
            raise TypeError(
                f"{name} takes devices=, replicas=, accumulate= and deterministic=, by name, and received {', '.join(received)}. "
                f"Write {self._example}."
            )

    def _check(self, devices: Devices, replicas: int | None, accumulate: int | None, deterministic: bool) -> None:
        name = type(self).__name__
        if not isinstance(deterministic, bool):
            raise ValueError(f"{name} received deterministic={deterministic!r}; write True or False.")
        determinism.check_switch(deterministic)
        if replicas is not None and accumulate is not None:
            raise ValueError(
                f"{name} received replicas={replicas} and accumulate={accumulate}, two ways of saying one thing: replicas is "
                f"accumulate times the number of devices. Write one of them."
            )
        for argument, value in (("devices", devices), ("replicas", replicas), ("accumulate", accumulate)):
            if argument != "devices" and not isinstance(value, int | None):
                raise ValueError(f"{name} received {argument}={value!r}; it must be a whole number.")
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} received {argument}={value}; it must be 1 or more.")
        count = devices if isinstance(devices, int) or devices is None else len(listed(devices))
        if count and replicas and count > replicas:
            raise ValueError(
                f"{name} received {count} devices and replicas={replicas}, but each device runs at least one replica. Write "
                f"devices={replicas}, or replicas={count} to cut the global batch finer."
            )

    def _find(self, devices: Devices) -> list[jax.Device]:
        if devices is None:
            return jax.devices()
        if not isinstance(devices, int):
            return listed(devices)
        available = jax.devices()
        if devices <= len(available):
            return available[:devices]
        kind = available[0].platform
        first = f"{type(self).__name__} received devices={devices}, but JAX runs with {len(available)} {kind} device"
        if kind != "cpu":
            raise ValueError(f"{first}{'s' * (len(available) > 1)}. Write devices={len(available)} or leave it out.")
        raise ValueError(
            f"{first}{'s' * (len(available) > 1)}. CPU devices are made when JAX starts, which a model, an optimizer or an array "
            f"does. Make the strategy first, or write before anything else:\n\n    import jax\n"
            f'    jax.config.update("jax_num_cpu_devices", {devices})'
        )

    def __repr__(self) -> str:
        def counted(count: int, noun: str) -> str:
            return f"{count} {noun}{'s' * (count != 1)}"

        kind = self.devices[0].platform
        return f"<{type(self).__name__}: {counted(self.num_replicas_in_sync, 'replica')} on {counted(len(self.devices), f'{kind} device')}>"


def whole_number(name: str, value: Any) -> Any:
    """Numbers of NumPy and others as Python's; what is no number passes."""
    if isinstance(value, (bool, float)):
        raise ValueError(f"{name} must be a whole number; received {name}={value!r}.")
    return operator.index(value) if hasattr(value, "__index__") else value


def listed(devices: Sequence[jax.Device] | jax.sharding.Mesh) -> list[jax.Device]:
    found = list(devices.devices.flat) if isinstance(devices, jax.sharding.Mesh) else list(devices)
    odd = [d for d in found if not isinstance(d, jax.Device)]
    if odd or not found:
        raise ValueError(
            f"devices must be a count, a list of JAX devices or a mesh; received {devices!r}. Write devices=2, or "
            f"devices=jax.devices()[:2]."
        )
    if len(set(found)) < len(found):
        raise ValueError(f"devices names a device twice: {found}. One device can run many replicas: write accumulate=2.")
    return found


class MirroredStrategy(Strategy):
    """Replicas on all devices of this process, or on those that `devices` says."""


class OneDeviceStrategy(Strategy):
    """All replicas on one device, one after another: what others call gradient accumulation."""

    _uses_all_devices = False
    _example = "OneDeviceStrategy(), or OneDeviceStrategy(devices=jax.devices()[1:2]) to choose it"

    def _check(self, devices: Devices, replicas: int | None, accumulate: int | None, deterministic: bool) -> None:
        super()._check(devices, replicas, accumulate, deterministic)
        count = devices if isinstance(devices, int) else 1 if devices is None else len(listed(devices))
        if count != 1:
            raise ValueError(f"OneDeviceStrategy received {count} devices. Write MirroredStrategy(devices={count}).")

    def _find(self, devices: Devices) -> list[jax.Device]:
        return super()._find(devices)[:1]


class TPUStrategy(Strategy):
    """Replicas on TPU devices: the same engine."""

    _example = "TPUStrategy(): it needs no resolver, since JAX finds the TPUs of this machine by itself"

    def _find(self, devices: Devices) -> list[jax.Device]:
        found = super()._find(devices)
        if any(device.platform != "tpu" for device in found):
            raise ValueError(
                f"TPUStrategy found no TPU: JAX runs on {found[0].platform}. On a TPU machine install jax[tpu]; elsewhere write "
                f"MirroredStrategy(), which runs the same program on what there is."
            )
        return found


class ParameterServerStrategy:
    """Refused: training here is synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "ParameterServerStrategy trains asynchronously: workers update the weights in whatever order they come, so no two "
            "runs are the same. Training here is synchronous on every placement. Write MirroredStrategy()."
        )


class DefaultStrategy(Strategy):
    """One replica on JAX's first device: what `get_strategy()` gives outside every scope. Models stay plain Keras models."""

    def __init__(self) -> None:
        keras_seam.check_version()
        self.deterministic = True
        self._to_announce = False
        self.owned = Owned()
        self._runs = Runs(self)

    @functools.cached_property
    def exchange(self) -> exchange.Exchange:  # pyright: ignore[reportIncompatibleVariableOverride]
        return exchange.choose(self.placement)

    @functools.cached_property
    def placement(self) -> Placement:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Placement(1, tuple(jax.devices()[:1]))

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    def check_variables(self, variables: list[Any]) -> None:
        """Those outside of every scope are its own."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        if _scopes.open:
            raise RuntimeError(f"This is the scope of {_scopes.open[-1]!r}; the default strategy cannot begin inside it.")
        yield self


_default: list[DefaultStrategy] = []


def get_strategy() -> Strategy:
    """The strategy of the scope around this line; outside every scope, the default one of one replica.

    Example:
        >>> get_strategy().num_replicas_in_sync
        1
    """
    if _scopes.open:
        return _scopes.open[-1]
    if not _default:
        _default.append(DefaultStrategy())
    return _default[0]
