"""Build the steps of a function, compiled or not. This is the one place that gives a step its observers."""

from __future__ import annotations

import importlib
import os
from typing import TypeAlias, overload

from unisono._src.engine.observers.device_verification import DeviceVerification
from unisono._src.engine.observers.process_comparison import ProcessComparison
from unisono._src.engine.observers.process_verification import ProcessVerification
from unisono._src.engine.observers.verified_steps import VerifiedSteps
from unisono._src.engine.step.observer import StepObserver
from unisono._src.engine.step.step import MOST_STEPS, Step
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.record.program_recorder import ProgramRecorder
from unisono._src.keras.replica.user_function import UserStep
from unisono._src.keras.steps.eager import EagerStep, EagerWholeStep
from unisono._src.keras.steps.model_step import ModelStep
from unisono._src.placement import Placement
from unisono._src.processes import names

ModelSteps: TypeAlias = Step | EagerWholeStep
LoopSteps: TypeAlias = Step | EagerStep


@overload
def make_step(
    strategy: ReplicaStrategy,
    name: str,
    function: ModelStep,
    *,
    trains: bool,
    eager: bool,
    most_steps: int = ...,
) -> ModelSteps: ...


@overload
def make_step(
    strategy: ReplicaStrategy,
    name: str,
    function: UserStep,
    *,
    trains: bool,
    eager: bool,
    most_steps: int,
    verifies: bool,
    fixed_digest: int,
) -> LoopSteps: ...


def make_step(
    strategy: ReplicaStrategy,
    name: str,
    function: ModelStep | UserStep,
    *,
    trains: bool,
    eager: bool,
    most_steps: int = MOST_STEPS,
    verifies: bool = True,
    fixed_digest: int = 0,
) -> ModelSteps | LoopSteps:
    """Build the steps of a model or of a loop's function.

    Args:
        strategy: Says where the replicas run.
        name: What profiles and records call the program.
        function: What a step computes.
        trains: Whether its steps are counted, recorded and verified.
        eager: Whether Python calls the function at each step, and nothing is compiled.
        most_steps: How many steps one call may take.
        verifies: Whether steps may be verified, where they train.
        fixed_digest: A digest of numbers that are part of the program, which processes compare.
    """
    observers: list[StepObserver] = []
    if strategy.placement.processes:
        observers.append(ProcessComparison(strategy.placement, trains, fixed_digest))
    if trains:
        observers.append(ProgramRecorder(name, strategy, function.list_recorded))
    tools = open_tools(strategy, function) if trains else []
    if eager and isinstance(function, UserStep):
        return EagerStep(function, *strategy.on_lead, observers)
    if eager and isinstance(function, ModelStep):
        return EagerWholeStep(function, *strategy.on_lead, observers)
    if trains:
        observers += [*tools, *(verify_steps(strategy) if verifies else [])]
    return Step(name, function, strategy.placement, strategy.exchange, most_steps, observers)


def make_measured_step(strategy: ReplicaStrategy, function: ModelStep, placement: Placement) -> Step:
    """Build the step of training, to be compiled and never run. The placement may have another R than the strategy."""
    recorder = ProgramRecorder("train", strategy, function.list_recorded)
    return Step("train", function, placement, strategy.exchange, observers=[recorder])


def open_tools(strategy: ReplicaStrategy, function: ModelStep | UserStep) -> list[StepObserver]:
    """Import the observer that the environment names, if any."""
    module = os.environ.get(names.INSPECTOR)
    return [importlib.import_module(module).make_inspector(strategy, function)] if module else []


def verify_steps(strategy: ReplicaStrategy) -> list[StepObserver]:
    """Build the observer that verifies steps, if it is asked for."""
    if strategy.verify is None:
        return []
    kind = ProcessVerification if strategy.placement.has_one_device_in_each_process else DeviceVerification
    return [VerifiedSteps(kind(strategy.verify, strategy.placement), strategy.placement)]
