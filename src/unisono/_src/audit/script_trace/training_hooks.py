"""Hooks on Keras and Unisono, by which a training is noted: what makes and assigns variables, runs steps and traces programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import keras

from unisono._src.audit.script_trace.training_notes import TrainingNotes
from unisono._src.data.global_batch import GlobalBatch
from unisono._src.keras_private.trainer_state import find_stateless_scope, is_write_back
from unisono._src.record.program_recorder import ProgramRecorder
from unisono._src.step.step import Step
from unisono._src.step.step_digests import StepDigests
from unisono._src.typing import UserObject
from unisono._src.xla.rewrite import rules


def add_hooks() -> TrainingNotes:
    """Have all training of this process noted from now on, and return the notes."""
    notes = TrainingNotes()
    hook_variables(notes)
    hook_steps(notes)
    rules.trace_observers.append(notes.note_program)
    return notes


def hook_variables(notes: TrainingNotes) -> None:
    """Have variables noted that are made or assigned."""
    keras_init = keras.Variable.__init__
    keras_assign = keras.Variable.assign

    def init(self: keras.Variable, *args: UserObject, **kwargs: UserObject) -> None:
        keras_init(self, *args, **kwargs)
        notes.note_variable(self, "made", sys._getframe(1))

    def assign(self: keras.Variable, value: UserObject, *args: UserObject, **kwargs: UserObject) -> UserObject:
        caller = sys._getframe(1)
        # In the trace of a step the variable keeps its value, and what is written back is what steps have computed.
        if find_stateless_scope() is None and not is_write_back(caller.f_code):
            notes.note_variable(self, "assigned", caller)
        return keras_assign(self, value, *args, **kwargs)

    keras.Variable.__init__ = init
    keras.Variable.assign = assign


def hook_steps(notes: TrainingNotes) -> None:
    """Have the steps noted that train."""
    own_note_steps = ProgramRecorder.after_steps
    own_outputs = Step.outputs

    def note_steps(self: ProgramRecorder, batches: Sequence[GlobalBatch], digests: Sequence[StepDigests]) -> None:
        notes.note_steps(batches, self.replicas, sys._getframe(1))
        own_note_steps(self, batches, digests)

    def outputs(self: Step, *args: UserObject, **kwargs: UserObject) -> UserObject:
        notes.note_step_object(self)
        return own_outputs(self, *args, **kwargs)

    ProgramRecorder.after_steps = note_steps
    Step.outputs = outputs
