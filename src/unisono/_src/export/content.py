"""The content of an export as StableHLO, beside its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from unisono._src.export.forward_program import Program
from unisono._src.export.input_signature import Inputs
from unisono._src.export.model_variables import Described
from unisono._src.typing import Json


@dataclasses.dataclass(frozen=True)
class Content:
    """A model without the values of its variables."""

    inputs: Inputs
    variables: tuple[Described, ...]
    programs: dict[str, Program]
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
    def of_record(cls, record: Mapping[str, Json], codes: Mapping[str, bytes]) -> Content:
        """Return the content that a record describes, with the code of its programs."""
        inputs = record["inputs"]
        return cls(
            Inputs(
                inputs["structure"],
                tuple(inputs["names"]),
                tuple(map(tuple, inputs["shapes"])),
                tuple(inputs["dtypes"]),
                inputs["converts"],
            ),
            tuple(parse_variable(variable) for variable in record["variables"]),
            {
                mode: Program(codes[mode], program["outputs"], tuple(program["masked"]), tuple(program["assigned"]))
                for mode, program in record["programs"].items()
            },
            record["policy"],
            record["output_names"] and tuple(record["output_names"]),
        )


def describe_program(program: Program) -> dict[str, Json]:
    return {key: value for key, value in dataclasses.asdict(program).items() if key != "code"}


def parse_variable(record: Mapping[str, Json]) -> Described:
    constraint = record["constraint"]
    return Described(**{**record, "shape": tuple(record["shape"]), "constraint": constraint and (constraint[0], constraint[1])})
