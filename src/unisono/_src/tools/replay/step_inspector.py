"""The inspector of a replayed step, in the replaying process. It writes down what each replica computes, in JSON."""

from __future__ import annotations

import code
import json
import linecache
import os
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.row_counts import WholeBatch
from unisono._src.engine.state import RecordedVariables, list_told
from unisono._src.engine.step.observer import InspectedReplica, InspectedStep, StepObserver, WatchedStep
from unisono._src.engine.step.traced_step import InspectedProgram
from unisono._src.keras.private.variable_paths import LiveLayers
from unisono._src.keras.record.traced_program import describe_equation, find_user_line, format_constants, format_equation
from unisono._src.processes import names
from unisono._src.processes.names import get_replayed_step
from unisono._src.tools.audit.audit_report import name_number
from unisono._src.tools.records import GRADIENT
from unisono._src.tools.replay.not_finite import NotFinite, find_not_finite
from unisono._src.typing import Json

PROMPT_NAMES = {"weight": "weights", "state": "state", "optimizer": "optimizer"}
"""The names at the prompt, by the kinds of variables in a record."""

BANNER = """
This is step {step} before it is run. The names are:
  weights, state, optimizer   dicts of arrays, by path
  batch                       the global batch
  replicas                    what each replica computes: rows, loss, gradients
Ctrl-D goes on with the step."""


class ReplicaValues:
    """The values that one replica computes in the step."""

    def __init__(self, replica: InspectedReplica, paths: Sequence[str]) -> None:
        self.replica = replica.replica
        self.rows = replica.rows
        self.batch = replica.batch
        loss = None if replica.loss is None else np.ravel(replica.loss)
        is_told = loss is not None and loss.size == 1 and list_told(loss) != [None]
        self.loss = float(loss[0]) if loss is not None and is_told else None
        """Its part of the loss: the parts of all replicas add up to the loss of the step. None if the step does not tell it."""
        parts = zip(paths, replica.gradients, strict=False)
        self.gradients = {path: np.asarray(gradient) for path, gradient in parts if gradient is not None}

    def __repr__(self) -> str:
        loss = "no loss" if self.loss is None else f"loss {self.loss:.6g}"
        return f"<replica {self.replica}: rows {self.rows.start} to {self.rows.stop - 1}, {loss}>"

    def describe(self) -> Json:
        norms = {path: measure_norm(gradient) for path, gradient in self.gradients.items()}
        return {
            "replica": self.replica,
            "rows": [self.rows.start, self.rows.stop],
            "loss": None if self.loss is None else name_number(self.loss),
            "gradient_norms": {path: name_number(norm) for path, norm in norms.items()},
        }


class ReplayInspector(StepObserver):
    """The inspector of one process."""

    def __init__(self, step: int, report: str) -> None:
        self.step = step
        self._report = report

    def count_unwatched(self, step: int) -> int:
        before = self.step - step
        return before if before >= 0 else sys.maxsize

    def before_rows(self, step: WatchedStep) -> None:
        if step.number == self.step:
            self.inspect(step.inspect())

    def inspect(self, step: InspectedStep) -> None:
        """Write the report, and open a prompt if one is asked for."""
        replicas = list_replicas(step)
        content = {"replicas": [replica.describe() for replica in replicas], "not_finite": describe_first_not_finite(step)}
        with open(self._report, "w", encoding="utf-8") as file:
            json.dump(content, file)
        if os.environ.get(names.REPLAY_PROMPT):
            open_prompt(self.step, step, replicas)


def make_inspector(*_: object) -> ReplayInspector:
    """Make the inspector that the environment asks for, of any strategy and step."""
    step = get_replayed_step()
    assert step is not None
    return ReplayInspector(step, os.environ[names.REPLAY_REPORT])


def list_replicas(step: InspectedStep) -> list[ReplicaValues]:
    """List what each replica computes."""
    paths = [variable.path for kind, variables in step.recorded if kind == GRADIENT for variable in variables]
    return [ReplicaValues(replica, paths) for replica in step.replicas]


def open_prompt(number: int, step: InspectedStep, replicas: list[ReplicaValues]) -> None:
    """Open a prompt with the state before a step. It is open until the user ends it."""
    values: dict[str, dict[str, np.ndarray]] = {name: {} for name in PROMPT_NAMES.values()}
    for (kind, variables), arrays in zip(list_state_groups(step), step.state, strict=False):
        values[PROMPT_NAMES[kind]] |= {
            variable.path: np.asarray(array) for variable, array in zip(variables, arrays, strict=True)
        }
    local = {**values, "batch": step.batch.tree(), "replicas": replicas, "np": np}
    code.interact(BANNER.format(step=number + 1), local=local, exitmsg="")


def list_state_groups(step: InspectedStep) -> RecordedVariables:
    """List (kind, variables) of the groups of the state. The last group, of metrics, is left out."""
    return [(kind, variables) for kind, variables in step.recorded if kind != GRADIENT]


def describe_first_not_finite(step: InspectedStep) -> list[Json]:
    """Describe the origins of values that are not finite. They are of the first program with such a value in its results."""
    paths = [variable.path for _, variables in list_state_groups(step) for variable in variables]
    paths += [""] * len(step.state[-1])
    for program in step.programs:
        origins = find_not_finite(program.function, program.args)
        if origins:
            described = [describe_not_finite(origin, program, paths) for origin in origins]
            return [add_row_of_data(add_replica(each, step, program), step.batch) for each in described]
    return []


def describe_not_finite(origin: NotFinite, program: InspectedProgram, paths: Sequence[str]) -> Json:
    """Describe a value that is not finite.

    The description has its row, layer, equation and line, as far as each is known. `paths` are the paths of the state's variables, in the
    order of the program's arguments.
    """
    described: Json = {"kind": origin.kind}
    described |= dict.fromkeys(("row", "where", "layer", "equation", "source"))
    if origin.equation is not None:
        is_by_row = origin.place and origin.shape[0] == len(program.rows)
        row = program.rows.start + origin.place[0] if is_by_row else None
        return described | {"row": row} | describe_equation_origin(origin.equation)
    assert origin.argument is not None
    number = origin.argument - len(paths)
    if number < 0:
        return described | {"where": f"the variable {paths[origin.argument]}, before the step"}
    if number >= len(jax.tree.leaves(program.batch)):
        return described | {"where": "a constant of the step"}
    place = origin.place[1:] if isinstance(program.batch, WholeBatch) else origin.place
    return described | {"where": f"array {number} of the batch", "row": program.rows.start + place[0] if place else None}


def add_replica(described: Json, step: InspectedStep, program: InspectedProgram) -> Json:
    """Add the replica that has the row to the description.

    If no row is known, it is the replica that has all rows of the program. None if there are several.
    """
    rows = program.rows if described["row"] is None else range(described["row"], described["row"] + 1)
    found = {step.find_replica(row) for row in rows}
    return described | {"replica": found.pop() if len(found) == 1 else None}


def add_row_of_data(described: Json, batch: GlobalBatch) -> Json:
    """Add the row of the data set, if the batch knows it."""
    chosen = batch.leaves[0].chosen
    row = described["row"]
    return described | {"row_of_data": None if chosen is None or row is None else int(chosen[row])}


def describe_equation_origin(eqn: core.JaxprEqn) -> Json:
    """Describe an equation by its layer, text and user's line."""
    described = describe_equation(eqn, {})
    constants = format_constants(described)
    line = find_user_line(eqn)
    return {
        "layer": LiveLayers().find_by_scopes(str(eqn.source_info.name_stack)),
        "equation": format_equation(described) + (f", with {constants}" if constants else ""),
        "source": line and [line[0], line[1], linecache.getline(line[0], line[1]).strip()],
    }


def measure_norm(gradient: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(gradient, np.float64)))
