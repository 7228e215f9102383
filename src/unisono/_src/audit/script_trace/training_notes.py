"""Notes of a training: its variables, steps, rows and programs, and the weights that it leaves."""

from __future__ import annotations

import gc
import hashlib
import types
from collections.abc import Sequence

import keras
import numpy as np
from jax.extend.core import ClosedJaxpr

from unisono._src.audit.program_trace import describe_program
from unisono._src.audit.script_trace.user_lines import Place, list_user_places
from unisono._src.data.global_batch import GlobalBatch, count_shard_rows
from unisono._src.record.program_recorder import ProgramRecorder
from unisono._src.step.device_state import DeviceState
from unisono._src.step.step import Step
from unisono._src.typing import Json, Keywords

OF_ENGINE = ("digest_state", "get_place", "put_first")
"""Parts of the names of programs that compute nothing of the user's."""


class TrainingNotes:
    """The notes of one process."""

    def __init__(self) -> None:
        self._step = 0
        """The number of the next step."""
        self._variables: list[Json] = []
        self._calls: dict[int, list[Place]] = {}
        """The user's lines from which a step was called, by its number."""
        self._programs: list[Json] = []
        self._rows: list[list[list[str]]] = []
        """By step and replica, digests of the rows."""
        self._trained: dict[int, Step] = {}
        """The step objects that train, by identity."""

    def note_variable(self, variable: keras.Variable, action: str, frame: types.FrameType) -> None:
        """Note that a variable was made or assigned, with the user's lines from a frame on."""
        path = getattr(variable, "path", None)  # absent before a variable is made
        places = list_user_places(frame)
        if path is not None and places:
            self._variables.append({"path": path, "action": action, "places": places, "step": self._step})

    def note_steps(self, batches: Sequence[GlobalBatch], replicas: int, frame: types.FrameType) -> None:
        """Note steps that were started, one for each batch, with the user's lines from a frame on."""
        self._calls[self._step] = list_user_places(frame)
        self._rows += [digest_shards(batch, replicas) for batch in batches]
        self._step += len(batches)

    def note_step_object(self, step: Step) -> None:
        """Note a step object if it trains: its weights are written at the end."""
        if open_step(step)[0] is not None:
            self._trained[id(step)] = step

    def note_program(self, name: str, program: ClosedJaxpr) -> None:
        """Note the equations of a program that was traced."""
        if not any(part in name for part in OF_ENGINE):
            self._programs.append({"name": name, "step": self._step, "equations": describe_program(program)})

    def convert_to_json(self) -> dict[str, Json]:
        return {
            "variables": self._variables,
            "calls": self._calls,
            "programs": self._programs,
            "layers": list_live_layers(),
            "rows": self._rows,
        }

    def write_weights(self, path: str) -> None:
        """Write the weights into a file, if anything was trained."""
        if self._trained:
            weights: Keywords = {}
            for step in self._trained.values():
                weights |= read_trained_weights(step)
            np.savez(path, **weights)


def open_step(step: Step) -> tuple[ProgramRecorder | None, DeviceState]:
    """Return what a step keeps to itself: its recorder, and its device state. Nothing else reads private attributes of the engine."""
    recorder = next((observer for observer in step.observers if isinstance(observer, ProgramRecorder)), None)
    return recorder, step._device_state


def read_trained_weights(step: Step) -> dict[str, np.ndarray]:
    """Return the weights of a step that trains, by path."""
    recorder, device_state = open_step(step)
    recorded = [] if recorder is None else recorder.list_recorded()
    groups = [(kind, variables) for kind, variables in recorded if kind != "gradient"]
    return {
        variable.path.replace("/", "|"): np.asarray(array)
        for (kind, variables), arrays in zip(groups, device_state.lead_state, strict=False)
        if kind == "weight"
        for variable, array in zip(variables, arrays, strict=True)
    }


def digest_shards(batch: GlobalBatch, replicas: int) -> list[list[str]]:
    """Return, for each replica, a digest of each of its rows."""
    arrays = [np.ascontiguousarray(leaf.array) for leaf in batch.leaves]
    digests = (
        hashlib.blake2b(b"".join(array[row].tobytes() for array in arrays), digest_size=6).hexdigest()
        for row in range(batch.rows)
    )
    return [[next(digests) for _ in range(count)] for count in count_shard_rows(batch, replicas)]


def list_live_layers() -> list[Json]:
    """Return the names and paths of all layers that still live, whether they are models, and the paths of variables that do not show them."""
    layers = [thing for thing in gc.get_objects() if isinstance(thing, keras.layers.Layer)]
    return [
        {
            "name": layer.name,
            "path": getattr(layer, "path", None) or layer.name,
            "class": type(layer).__name__,
            "is_model": isinstance(layer, keras.Model),
            "strays": list_strays(layer),
        }
        for layer in layers
    ]


def list_strays(layer: keras.layers.Layer) -> list[str]:
    """Return the paths of a layer's variables that are not below its own, as of the state of its random numbers."""
    if isinstance(layer, keras.Model):
        return []
    own = getattr(layer, "path", None) or layer.name
    return [variable.path for variable in layer.variables if not variable.path.startswith(f"{own}/")]
