"""A function of un.function, compiled for one kind of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import keras

from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.keras import execution_mode
from unisono._src.keras.checks.jax_errors import check_optimizer_attributes
from unisono._src.keras.checks.user_code.staleness import CaptureSnapshot
from unisono._src.keras.private.optimizers import list_optimizers, read_attributes
from unisono._src.keras.private.trainer_state import get_raw_values, set_raw_values
from unisono._src.typing import AnyArray, Array, Outputs


class TracedFunction(NamedTuple):
    """A function compiled for one kind of arguments."""

    variables: list[keras.Variable]
    program: DeviceProgram
    """Maps (values of the variables, arguments that are arrays) to (what the function returns, new values by position)."""
    captured: CaptureSnapshot
    """What the program takes as fixed."""
    models_and_optimizers: list[keras.Model | keras.optimizers.Optimizer]
    """Those that the function finds by names."""
    settings: list[object]
    """What decides, beside arrays, how the function updates variables."""

    @property
    def is_current(self) -> bool:
        """Whether all that the trace took as fixed is unchanged."""
        return self.captured.is_unchanged and self.settings == self.read_settings()

    def read_settings(self) -> list[object]:
        """Read the settings as they are now. Settings that do nothing are refused."""
        read: list[object] = [[variable.trainable for variable in self.variables]]
        for holder in self.models_and_optimizers:
            for optimizer in list_optimizers(holder):
                check_optimizer_attributes(optimizer)
                read.append(read_attributes(optimizer))
        return read

    def take_again(self) -> TracedFunction:
        """Take again, after the trace, what is fixed now."""
        return self._replace(captured=self.captured.take_again(), settings=self.read_settings())

    def run(self, arrays: Sequence[AnyArray]) -> Outputs:
        """Run the program, and leave the new values in the variables."""
        device, values, arrays = put_on_one_device(get_raw_values(self.variables), arrays)
        kind = tuple(isinstance(array, jax.Array) and (array.weak_type, array.committed) for array in (*values, *arrays))
        assigned: dict[int, Array]
        with execution_mode.mark_tracing():  # the first call traces once more
            returned, assigned = self.program(device, kind, values, arrays)
        set_raw_values([self.variables[index] for index in assigned], list(assigned.values()))
        return returned


def put_on_one_device(
    values: Sequence[AnyArray], arrays: Sequence[AnyArray]
) -> tuple[jax.Device, list[AnyArray], list[AnyArray]]:
    """Put values and arrays on one device: (device, values, arrays).

    It is the device of the first that lies on one; JAX's default device where none does.
    """
    devices = (next(iter(array.devices())) for array in (*values, *arrays) if isinstance(array, jax.Array))
    device = next(devices, None) or next(iter(jax.device_put(0).devices()))
    return device, [move_array(value, device) for value in values], [move_array(array, device) for array in arrays]


def move_array(array: AnyArray, device: jax.Device) -> AnyArray:
    """Move an array so that a program on the device takes it."""
    return jax.device_put(array, device) if isinstance(array, jax.Array) and device not in array.devices() else array
