"""The memory of a training, from the model and from the compiled program of its step. Nothing is run, and nothing is sent to a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import keras

from unisono._src.engine.global_batch import GlobalBatch, count_shard_rows
from unisono._src.engine.step.memory import StepMemory
from unisono._src.keras.checks.jax_errors import explain_step_errors
from unisono._src.keras.cut_weights import count_variable_bytes, find_cut_places
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.memory.report import DeviceMemory, MemoryChoice, MemoryReport
from unisono._src.keras.private.trainer_state import STATE_NAMES, group_variables
from unisono._src.keras.steps.make_step import make_measured_step
from unisono._src.keras.steps.model_step import ModelStep
from unisono._src.typing import PyTree


class MeasuredStep(ModelStep):
    """A step that keeps what it is told of gathered rows. `fit` prints it."""

    layers: Mapping[str, int] = {}

    def note_gathered(self, gathered: Sequence[tuple[str, int]]) -> None:
        self.layers = self.count_by_layer(gathered)


def predict_memory(strategy: ReplicaStrategy, model: keras.Model, batch: GlobalBatch, replicas: Sequence[int]) -> MemoryReport:
    """Predict the memory of a training with such batches, for each R of `replicas`. Model, metrics and optimizer are built."""
    choices: list[MemoryChoice] = []
    for count in replicas:
        function = MeasuredStep(model, "train", count)
        step = measure_step(strategy, function, batch, count)
        by_device = {name_device(device): memory for device, memory in join_memory(model, step, strategy.devices).items()}
        rows = max(count_shard_rows(batch, count))
        choices.append(MemoryChoice(count, count == strategy.num_replicas_in_sync, rows, by_device, function.layers))
    limits = {name_device(device): limit for device in strategy.devices if (limit := read_limit(device)) is not None}
    return MemoryReport(model.name, batch.counted_rows, choices, limits)


def measure_step(strategy: ReplicaStrategy, function: ModelStep, batch: GlobalBatch, replicas: int) -> StepMemory:
    """Measure the step for this R. Its program is compiled, and kept for a training."""
    model = function.model
    own = strategy.placement
    placement = own if replicas == own.replicas else dataclasses.replace(own, replicas=replicas)
    state = tuple([describe_variable(variable) for variable in group_variables(model)[name]] for name in STATE_NAMES)
    with strategy.acting(), explain_step_errors(model, batch, replicas):
        return make_measured_step(strategy, function, placement).measure_memory(state, batch, find_cut_places(model, strategy))


def join_memory(model: keras.Model, step: StepMemory, devices: Sequence[jax.Device]) -> dict[jax.Device, DeviceMemory]:
    """Join the model's variables and a step, by device."""
    groups = group_variables(model)
    counted = {name: count_by_device(groups[name], devices) for name in STATE_NAMES}
    trained, others, optimizer, metrics = counted.values()
    weights = [*groups["trainable_variables"], *groups["non_trainable_variables"]]
    cut = count_by_device([weights[place] for place in sorted(step.cut_places)], devices)
    return {
        device: DeviceMemory(
            weights=trained[device] + others[device] - cut[device] + cut[device] // len(devices),
            optimizer=optimizer[device],
            gradients=step.sums,
            gathered=step.gathered,
            kept=step.kept,
            activations=step.temporary,
            batch=step.inputs + step.results + metrics[device],
            ahead=step.inputs,
        )
        for device in devices
    }


def count_by_device(variables: Sequence[keras.Variable], devices: Sequence[jax.Device]) -> dict[jax.Device, int]:
    """Count the bytes of variables on each device. Every device has all of them."""
    return dict.fromkeys(devices, sum(map(count_variable_bytes, variables)))


def describe_variable(variable: keras.Variable) -> PyTree:
    """Describe a variable in shapes. It may have no value, as in a loop of Keras."""
    return jax.ShapeDtypeStruct(tuple(variable.shape), jax.dtypes.canonicalize_dtype(variable.dtype))


def name_device(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def read_limit(device: jax.Device) -> int | None:
    """Read how many bytes JAX has on a device. None where it does not tell, as on CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")
