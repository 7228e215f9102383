"""The details of a run beside its digests.

These are the programs that it traced, and the first values of its rows and of the states it began with.
"""

from __future__ import annotations

import functools
import os
import zlib

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from unisono._src.engine.global_batch import GlobalBatch, count_shard_rows
from unisono._src.engine.state import RecordedVariables, State, get_step_count
from unisono._src.keras.private.variable_paths import LiveLayers
from unisono._src.keras.record.traced_program import describe_program, list_first_values
from unisono._src.kernels import rewriting
from unisono._src.typing import Json

SWITCH = "UNISONO_RECORD_DETAILS"
"""The environment variable that has details recorded. They are what an audit says of a difference; computing them takes time."""

OF_ENGINE = ("digest_state", "get_place", "put_first")
"""Parts of the names of programs that compute nothing of the user's."""


class RunDetails:
    """The details of one process that are not written yet. A record is open only when the first step is written."""

    def __init__(self) -> None:
        self._noted: list[Json] = []

    def take_noted(self) -> list[Json]:
        """Take what was noted since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def note_program(self, name: str, program: ClosedJaxpr) -> None:
        """Note the equations of a traced program. It is traced for the next step."""
        if not any(part in name for part in OF_ENGINE):
            equations = describe_program(program, LiveLayers())
            self._noted.append({"of": "program", "step": get_step_count().steps, "name": name, "equations": equations})

    def note_state(self, recorded: RecordedVariables, state: State) -> None:
        """Note the first values of the next step's start. `recorded` are the variables that a record has."""
        layers = LiveLayers()
        groups = [variables for kind, variables in recorded if kind != "gradient"]
        values = {
            variable.path: [layers.find_by_variable(variable.path), list_first_values(array)]
            for variables, arrays in zip(groups, state, strict=False)
            for variable, array in zip(variables, arrays, strict=True)
        }
        self._noted.append({"of": "state", "step": get_step_count().steps, "variables": values})

    def note_rows(self, step: int, batch: GlobalBatch, replicas: int) -> None:
        """Note each row of a step by digest and first values. They are kept by the names of the arrays."""
        leaves = jax.tree_util.tree_leaves_with_path(batch.tree())
        arrays = {jax.tree_util.keystr(path): list_rows(np.asarray(array)) for path, array in leaves}
        shards = list(count_shard_rows(batch, replicas))
        self._noted.append({"of": "rows", "step": step, "shards": shards, "arrays": arrays})


def list_rows(array: np.ndarray) -> list[Json]:
    """List (digest, first values) of each row."""
    rows = np.ascontiguousarray(np.atleast_1d(array))
    return [[zlib.crc32(row.tobytes()), list_first_values(row)] for row in rows]


@functools.cache
def get_details() -> RunDetails | None:
    """Get the details of this process. It is None if they are not asked for."""
    if not os.environ.get(SWITCH):
        return None
    details = RunDetails()
    rewriting.trace_observers.append(details.note_program)
    return details
