"""The inspector of `unisono memory`, in the script's process. It writes the report, and ends the process before the first step."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence

import keras

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.step.observer import StepObserver
from unisono._src.keras.checks import refusals
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.memory.prediction import predict_memory
from unisono._src.keras.memory.request import list_choices
from unisono._src.keras.steps.model_step import ModelStep
from unisono._src.processes import names
from unisono._src.typing import AnyArray


class MemoryInspector(StepObserver):
    """The inspector of one model's steps."""

    def __init__(self, strategy: ReplicaStrategy, model: keras.Model) -> None:
        self._strategy = strategy
        self._model = model

    def begin(self, batches: Sequence[GlobalBatch], constants: Sequence[AnyArray]) -> None:
        """Report the memory of such steps, and end the process."""
        asked = [int(word) for word in os.environ.get(names.MEMORY_REPLICAS, "").split(",") if word]
        choices = list_choices(self._strategy, self._model, batches[0].counted_rows, asked or None)
        report = predict_memory(self._strategy, self._model, batches[0], choices)
        if self._strategy.writes:
            content = json.dumps({"report": report.to_dict(), "table": str(report)})
            pathlib.Path(os.environ[names.MEMORY_REPORT]).write_text(content, encoding="utf-8")
        raise SystemExit(0)


def make_inspector(strategy: ReplicaStrategy, function: object) -> MemoryInspector:
    """Make the inspector of a step. Steps whose memory cannot be told end the process."""
    if not isinstance(function, ModelStep):
        raise SystemExit("unisono memory tells the memory of fit, and the first step of this script is one of strategy.run.")
    refusals.check_measured_model(function.model, strategy)
    return MemoryInspector(strategy, function.model)
