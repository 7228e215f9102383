"""The strategies by name, and the default strategy outside of scopes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import cast

import jax
import keras

from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras.distributed.replica_strategy import SCOPES, ReplicaStrategy
from unisono._src.keras.loop.runs import FunctionCache
from unisono._src.keras.strategy.base import Strategy
from unisono._src.keras.strategy.device_arguments import StrategyArguments, is_devices_overridden
from unisono._src.placement import Placement
from unisono._src.typing import UserObject


class MirroredStrategy(Strategy):
    """Replicas on all devices of this process, or on given devices."""


class OneDeviceStrategy(Strategy):
    """All replicas on one device, one after another: gradient accumulation."""

    _uses_all_devices = False
    _example = "OneDeviceStrategy(), or OneDeviceStrategy(devices=jax.devices()[1:2]) to choose it"

    @classmethod
    def _write_devices(cls, value: UserObject) -> str | None:
        """Write the call for these devices.

        A number names the device, as in "/gpu:2". Several devices are for another strategy.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            chosen = f"{cls.__name__}(devices=jax.devices()[{value}:{value + 1}]) for the device of this number"
            return f"{chosen}, or MirroredStrategy(devices={value}) for so many" if value > 1 else chosen
        of_several = isinstance(value, list | tuple) and len(value) > 1
        return MirroredStrategy._write_devices(value) if of_several else super()._write_devices(value)

    def _check(self, arguments: StrategyArguments) -> None:
        count = arguments.device_count
        if count not in (None, 1) and not is_devices_overridden():
            raise ValueError(f"OneDeviceStrategy received {count} devices. Write MirroredStrategy(devices={count}).")

    def _find(self, arguments: StrategyArguments) -> list[jax.Device]:
        return super()._find(arguments) if is_devices_overridden() else super()._find(arguments)[:1]


class TPUStrategy(Strategy):
    """Replicas on TPU devices: the same engine."""

    _example = "TPUStrategy(): it needs no resolver, since JAX finds the TPUs of this machine by itself"

    def _find(self, arguments: StrategyArguments) -> list[jax.Device]:
        chosen = super()._find(arguments)
        if any(device.platform != "tpu" for device in chosen):
            raise ValueError(
                f"TPUStrategy found no TPU: JAX runs on {chosen[0].platform}. On a TPU machine install jax[tpu]; elsewhere write "
                f"MirroredStrategy(), which runs the same program on what there is."
            )
        return chosen


class ParameterServerStrategy:
    """A name of `tf.distribute` that is refused: training here is synchronous."""

    def __init__(self, *_: object, **__: object) -> None:
        with PUBLIC_CALL:
            raise ValueError(
                "ParameterServerStrategy trains asynchronously: workers update the weights in whatever order they come, so no two "
                "runs are the same. Training here is synchronous on every placement. Write MirroredStrategy()."
            )


class DefaultStrategy(Strategy):
    """One replica on JAX's first device, outside every scope. `get_strategy()` gives it there. Models stay plain Keras models."""

    def __init__(self) -> None:
        ReplicaStrategy.__init__(self, deterministic=True, is_number_of_machine=False)
        self._runs = FunctionCache(self)

    def _choose_placement(self) -> Placement:
        return Placement(1, tuple(jax.local_devices()[:1]))

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    def check_variables(self, variables: list[keras.Variable], assigned: list[keras.Variable]) -> None:
        """Accept all variables. Those made outside of every scope belong to this strategy."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        if SCOPES.innermost is not None:
            raise RuntimeError(f"This is the scope of {SCOPES.innermost!r}; the default strategy cannot begin inside it.")
        yield self


make_default_strategy = functools.cache(DefaultStrategy)


def get_strategy() -> Strategy:
    """Find the current strategy.

    It is the strategy whose step calls this code, else the strategy of the scope around it, else the default strategy of one replica.

    Example:
        >>> get_strategy().num_replicas_in_sync
        1
    """
    strategy = SCOPES.acting[-1] if SCOPES.acting else SCOPES.innermost
    return make_default_strategy() if strategy is None else cast(Strategy, strategy)
