"""The content of an export as StableHLO, beside its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from unisono._src.export.forward_program import ForwardProgram
from unisono._src.export.input_signature import InputSignature
from unisono._src.export.model_variables import VariableDescription
from unisono._src.typing import Json


@dataclasses.dataclass(frozen=True)
class ExportContent:
    """A model without the values of its variables."""

    inputs: InputSignature
    variables: tuple[VariableDescription, ...]
    programs: dict[str, ForwardProgram]
    """The programs for "inference" and for "training"."""
    policy: str
    """The name of the model's precision."""
    output_names: tuple[str, ...] | None
    """The names of the outputs in logs, of a model that has several."""

    def record(self) -> dict[str, Json]:
        """Return the content in JSON, without the programs' code."""
        return {
            "inputs": dataclasses.asdict(self.inputs),
            "variables": [dataclasses.asdict(variable) for variable in self.variables],
            "programs": {mode: describe_program(program) for mode, program in self.programs.items()},
            "policy": self.policy,
            "output_names": self.output_names,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Json], codes: Mapping[str, bytes]) -> ExportContent:
        """Return the content that a record describes, with the code of its programs."""
        inputs = record["inputs"]
        return cls(
            InputSignature(
                inputs["structure"],
                tuple(inputs["names"]),
                tuple(map(tuple, inputs["shapes"])),
                tuple(inputs["dtypes"]),
                inputs["converts"],
            ),
            tuple(parse_variable(variable) for variable in record["variables"]),
            {
                mode: ForwardProgram(codes[mode], program["outputs"], tuple(program["masked"]), tuple(program["assigned"]))
                for mode, program in record["programs"].items()
            },
            record["policy"],
            record["output_names"] and tuple(record["output_names"]),
        )


def describe_program(program: ForwardProgram) -> dict[str, Json]:
    return {key: value for key, value in dataclasses.asdict(program).items() if key != "code"}


def parse_variable(record: Mapping[str, Json]) -> VariableDescription:
    constraint = record["constraint"]
    return VariableDescription(
        **{**record, "shape": tuple(record["shape"]), "constraint": constraint and (constraint[0], constraint[1])}
    )
