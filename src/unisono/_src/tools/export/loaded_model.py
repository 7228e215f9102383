"""The model that `un.load_exported` makes of StableHLO. Its forward pass is the program of the file."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.keras.private.compiled_losses import set_keras_mask
from unisono._src.keras.private.instances import set_untracked
from unisono._src.keras.replica.random_keys import derive_key
from unisono._src.keras.replica.trace_recorder import get_current_code
from unisono._src.tools.export import model_variables
from unisono._src.tools.export.forward_program import ForwardProgram
from unisono._src.tools.export.input_signature import InputSignature, read_inputs
from unisono._src.tools.export.model_variables import VariableDescription
from unisono._src.tools.export.structure import build_tree
from unisono._src.typing import Array, Config, Json, Outputs, UserBatch


@dataclasses.dataclass(frozen=True)
class ExportContent:
    """The content of a StableHLO export, without the variables' values."""

    inputs: InputSignature
    variables: Sequence[VariableDescription]
    programs: dict[str, ForwardProgram]
    """The programs for "inference" and for "training"."""
    policy: str
    """The name of the model's precision."""
    output_names: Sequence[str] | None
    """The names of the outputs in logs, if there are several."""

    def record(self) -> dict[str, Json]:
        """Describe the content in JSON, without the programs' code."""
        record = dataclasses.asdict(self)
        for program in record["programs"].values():
            del program["code"]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Json], codes: Mapping[str, bytes]) -> ExportContent:
        """Build the content from its record and the programs' code."""
        return cls(
            InputSignature(**record["inputs"]),
            [VariableDescription(**described) for described in record["variables"]],
            {mode: ForwardProgram(codes[mode], **program) for mode, program in record["programs"].items()},
            record["policy"],
            record["output_names"],
        )


@keras.saving.register_keras_serializable(package="unisono")
class LoadedModel(keras.Model):
    """A model that was exported, without the code of its layers.

    It is evaluated and trained like any other model, by itself or as a layer. It has the variables of the exported model, and its
    random generators go on from their exported state. Frozen (`trainable = False`) it computes as in inference, in training too.

    Args:
        content: The content of the file, without the values.
        values: The variables' values; None for zeros, as Keras' loading needs it, which assigns the values afterwards.
        name: The model's name.
        trainable: Whether it is trained.
    """

    def __init__(
        self, content: ExportContent, values: Sequence[np.ndarray] | None = None, name: str | None = None, trainable: bool = True
    ) -> None:
        set_untracked(self, "_in_order", [])
        super().__init__(name=name, dtype=content.policy, autocast=False)
        self.content = content
        if values is None:
            values = [np.zeros(described.shape, described.dtype) for described in content.variables]
        self._generators = [keras.random.SeedGenerator(0) for described in content.variables if described.seed]
        generators = iter(self._generators)
        for described, value in zip(content.variables, values, strict=True):
            if described.seed:
                variable = next(generators).state
                variable.assign(value)
            else:
                variable = model_variables.add_variable(self, described, value)
            self._in_order.append(variable)
        if content.output_names is not None:
            self.output_names = list(content.output_names)
        self.trainable = trainable
        self.built = True

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables in the exported model's order. Both models have one fingerprint so."""
        return list(self._in_order)

    @property
    def weights(self) -> list[keras.Variable]:
        """The weights in the same order. `get_weights` and `set_weights` of both models fit so."""
        return [
            variable for variable, described in zip(self._in_order, self.content.variables, strict=True) if not described.seed
        ]

    def call(self, inputs: UserBatch, training: bool = False) -> Outputs:
        content = self.content
        program = content.programs["training" if training and self.trainable else "inference"]
        values = [variable.value for variable in self._in_order]
        drawn_from = self._derive_seeds()
        for index, seed in drawn_from.items():
            values[index] = seed
        results = program(values, content.inputs.arrays(inputs))
        for index, value in zip(program.assigned, results.updates, strict=True):
            variable = self._in_order[index]
            variable.assign(variable.value + (value - drawn_from[index]) if index in drawn_from else value)  # seeds count draws
        for loss in results.losses:
            self.add_loss(loss)
        for index, mask in zip(program.masked, results.masks, strict=True):
            set_keras_mask(results.outputs[index], mask)
        return build_tree(program.outputs, results.outputs)

    def _derive_seeds(self) -> dict[int, Array]:
        """Derive the seeds of a replica, by their positions.

        Nothing else looks into the program, so its replicas would draw the same numbers.
        """
        code = get_current_code()
        if code is None:
            return {}
        seeds = [(index, self._in_order[index].value) for index, each in enumerate(self.content.variables) if each.seed]
        return {index: jnp.where(code.replica == 0, value, derive_key(value, code.replica)) for index, value in seeds}

    def get_config(self) -> dict[str, Json]:
        codes = {mode: base64.b64encode(program.code).decode() for mode, program in self.content.programs.items()}
        return {"name": self.name, "trainable": self.trainable, "record": self.content.record(), "codes": codes}

    @classmethod
    def from_config(cls, config: Config, custom_objects: object = None) -> LoadedModel:
        codes = {mode: base64.b64decode(code) for mode, code in config["codes"].items()}
        return cls(ExportContent.from_record(config["record"], codes), name=config["name"], trainable=config["trainable"])


def find_export_inputs(model: keras.Model, example: UserBatch | None) -> InputSignature:
    """Find the inputs of a model to export. A loaded model knows its own."""
    return model.content.inputs if isinstance(model, LoadedModel) and example is None else read_inputs(model, example)
