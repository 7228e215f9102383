"""What an export as StableHLO holds beside its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unisono._src.export.forward_program import Program
from unisono._src.export.input_signature import Inputs
from unisono._src.export.model_variables import Described


@dataclasses.dataclass(frozen=True)
class Content:
    inputs: Inputs
    variables: tuple[Described, ...]
    programs: dict[str, Program]
    """By "inference" and "training"."""
    policy: str
    """The name of the model's precision."""
    output_names: tuple[str, ...] | None
    """By which logs tell several outputs apart."""

    def record(self) -> dict[str, Any]:
        """In JSON, without the programs' code."""
        return {
            "inputs": dataclasses.asdict(self.inputs),
            "variables": [dataclasses.asdict(of) for of in self.variables],
            "programs": {mode: without_code(program) for mode, program in self.programs.items()},
            "policy": self.policy,
            "output_names": self.output_names,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any], codes: Mapping[str, bytes]) -> Content:
        inputs = record["inputs"]
        return cls(
            Inputs(
                inputs["structure"],
                tuple(inputs["names"]),
                tuple(map(tuple, inputs["shapes"])),
                tuple(inputs["dtypes"]),
                inputs["converts"],
            ),
            tuple(described(of) for of in record["variables"]),
            {
                mode: Program(codes[mode], of["outputs"], tuple(of["masked"]), tuple(of["assigned"]))
                for mode, of in record["programs"].items()
            },
            record["policy"],
            record["output_names"] and tuple(record["output_names"]),
        )


def without_code(program: Program) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(program).items() if key != "code"}


def described(of: Mapping[str, Any]) -> Described:
    constraint = of["constraint"]
    return Described(**{**of, "shape": tuple(of["shape"]), "constraint": constraint and (constraint[0], constraint[1])})
