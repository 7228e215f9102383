"""The inspector of the step that is replayed, in the process that replays it: it writes down what each replica computes, in JSON."""

from __future__ import annotations

import code
import json
import math
import os
from collections.abc import Sequence

import jax
import keras
import numpy as np
from jax.extend import core

from unisono._src.audit.program_comparison import format_equation, read_layer
from unisono._src.audit.program_trace import describe_equation
from unisono._src.audit.script_trace.training_notes import list_live_layers
from unisono._src.audit.source_code import quote_line
from unisono._src.audit.trace_comparison import Place
from unisono._src.data.global_batch import GlobalBatch
from unisono._src.replay.not_finite import NotFinite, find_not_finite
from unisono._src.replayed_step import get_replayed_step
from unisono._src.replica.contribution import Contribution
from unisono._src.step.inspection import InspectedStep, ReplicaCall
from unisono._src.typed_jax import jit
from unisono._src.typing import Json

REPORT = "UNISONO_REPLAY_REPORT"
"""The environment variable that names the file for what was seen."""

INTERACTIVE = "UNISONO_REPLAY_INTERACTIVE"
"""The environment variable that asks for a prompt before the step is run."""

BANNER = """
This is step {step} before it is run. The names are:
  weights, state, optimizer   dicts of arrays, by path
  batch                       the global batch
  replicas                    what each replica computes: rows, loss, gradients
Ctrl-D goes on with the step."""


class ReplicaValues:
    """What one replica computes in the step."""

    def __init__(self, call: ReplicaCall, contribution: Contribution, loss: float, paths: Sequence[str]) -> None:
        self.replica = call.replica
        self.rows = call.rows
        self.batch = call.batch
        self.loss = loss
        """Its part of the loss: the losses of all replicas add up to the loss of the step."""
        self.gradients = dict(zip(paths, map(np.asarray, contribution.gradients), strict=False))

    def __repr__(self) -> str:
        return f"<replica {self.replica}: rows {self.rows.start} to {self.rows.stop - 1}, loss {self.loss:.6g}>"

    def describe(self) -> Json:
        norms = {path: measure_norm(gradient) for path, gradient in self.gradients.items()}
        return {
            "replica": self.replica,
            "rows": [self.rows.start, self.rows.stop],
            "loss": name_number(self.loss),
            "gradient_norms": {path: name_number(norm) for path, norm in norms.items()},
        }


class ReplayInspector:
    """The inspector of one process."""

    def __init__(self, step: int, report: str) -> None:
        self.step = step
        self._report = report

    def inspect(self, step: InspectedStep) -> None:
        contribute = jit(step.functions.contribution)
        recorded = step.functions.list_recorded()
        paths = [variable.path for kind, variables in recorded if kind == "gradient" for variable in variables]
        replicas: list[ReplicaValues] = []
        for call in step.calls:
            contribution, _ = contribute(*call.args)
            loss = np.asarray(step.functions.read_loss(contribution), np.float64)
            replicas.append(ReplicaValues(call, contribution, float(loss) if loss.size == 1 else math.nan, paths))
        found = find_in_replicas(step, list_state_names(step))
        content = {"replicas": [replica.describe() for replica in replicas], "not_finite": found}
        with open(self._report, "w", encoding="utf-8") as file:
            json.dump(content, file)
        if os.environ.get(INTERACTIVE):
            self._open_prompt(step, replicas)

    def _open_prompt(self, step: InspectedStep, replicas: list[ReplicaValues]) -> None:
        groups = [(kind, variables) for kind, variables in step.functions.list_recorded() if kind != "gradient"]
        names = {"weight": "weights", "state": "state", "optimizer": "optimizer"}
        values = {name: {} for name in names.values()}
        for (kind, variables), arrays in zip(groups, step.state, strict=False):
            values[names[kind]] |= {variable.path: np.asarray(array) for variable, array in zip(variables, arrays, strict=True)}
        local = {**values, "batch": step.batch.tree(), "replicas": replicas, "np": np}
        code.interact(BANNER.format(step=self.step + 1), local=local, exitmsg="")


def make_inspector() -> ReplayInspector:
    """Return the inspector that the environment asks for."""
    step = get_replayed_step()
    assert step is not None
    return ReplayInspector(step, os.environ[REPORT])


def list_state_names(step: InspectedStep) -> list[str]:
    """Return the paths of the variables of the state, in the order of a replica's arguments; metrics have none."""
    names: list[str] = []
    groups = [variables for kind, variables in step.functions.list_recorded() if kind != "gradient"]
    for place, arrays in enumerate(step.state):
        variables: list[keras.Variable] = groups[place] if place < len(groups) else []
        names += [variable.path for variable in variables] or [""] * len(arrays)
    return names


def find_in_replicas(step: InspectedStep, names: Sequence[str]) -> list[Json]:
    """Return where values that are not finite come from, of the first replica that has one in its results."""
    for call in step.calls:
        found = find_not_finite(step.functions.contribution, call.args)
        if found:
            return [add_row_of_data(describe_not_finite(each, call, names), step.batch) for each in found]
    return []


def describe_not_finite(found: NotFinite, call: ReplicaCall, names: Sequence[str]) -> Json:
    """Return a value that is not finite with its replica, row, layer, equation and line, as far as each is known."""
    described: Json = {
        "kind": found.kind,
        "replica": call.replica,
        "row": None,
        "where": None,
        "layer": None,
        "equation": None,
        "source": None,
    }
    arrays = len(jax.tree.leaves(call.batch))
    if found.argument is not None:
        in_batch = found.argument - len(names)
        if in_batch < 0:
            return described | {"where": f"the variable {names[found.argument]}, before the step"}
        if in_batch >= arrays:
            return described | {"where": "a constant of the step"}
        return described | {"where": f"array {in_batch} of the batch", "row": call.rows.start + found.place[0]}
    assert found.equation is not None
    if found.place and found.shape[0] == len(call.rows):
        described["row"] = call.rows.start + found.place[0]
    return described | describe_origin(found.equation)


def add_row_of_data(described: Json, batch: GlobalBatch) -> Json:
    """Return what was found with the row of the data set, where the batch knows it."""
    chosen = batch.leaves[0].chosen
    row = described["row"]
    return described | {"row_of_data": None if chosen is None or row is None else int(chosen[row])}


def describe_origin(eqn: core.JaxprEqn) -> Json:
    """Return the layer, the equation and the user's line of an equation."""
    described = describe_equation(eqn, {}, str(eqn.source_info.name_stack))
    source = quote_line(Place(*described["lines"][0])) if described["lines"] else None
    return {
        "layer": read_layer(described["scopes"], list_live_layers()),
        "equation": format_equation(described),
        "source": source and [source.file, source.line, source.text],
    }


def measure_norm(gradient: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(gradient, np.float64)))


def name_number(number: float) -> float | str:
    """Return a number as JSON knows it: in words where it is not finite."""
    return number if math.isfinite(number) else str(number)
