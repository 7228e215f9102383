"""The format "stablehlo": programs, weights and a record in one checkpoint. It is checked bit by bit when it is loaded."""

from __future__ import annotations

from pathlib import Path

import jax
import keras
import numpy as np

from unisono._src.keras.checkpoint.files import DamagedError, load_checkpoint
from unisono._src.keras.checkpoint.store import CheckpointStore
from unisono._src.tools.export import model_variables, write_place
from unisono._src.tools.export.forward_program import make_forward_program
from unisono._src.tools.export.loaded_model import ExportContent, LoadedModel, find_export_inputs
from unisono._src.typing import UserBatch

WEIGHTS = "weights/"
PROGRAMS = "programs/"
"""The prefixes of the names of arrays."""


def write_stablehlo(model: keras.Model, path: Path, example: UserBatch | None) -> None:
    """Write a built model to a directory that does not exist yet."""
    inputs = find_export_inputs(model, example)
    variables, described = model_variables.describe_variables(model)
    values = model_variables.read_values(model, variables)
    modes = {"inference": False, "training": True}
    programs = {mode: make_forward_program(model, variables, inputs, training) for mode, training in modes.items()}
    names = getattr(model, "output_names", None)  # only functional models have them
    # A quantized model takes the precision of its activations: the program has the rest.
    policy = model.dtype_policy.name.rpartition("_from_")[2]
    content = ExportContent(inputs, described, programs, policy, names and tuple(names))
    arrays = {f"{WEIGHTS}{variable.name}": value for variable, value in zip(described, values, strict=True)}
    arrays |= {f"{PROGRAMS}{mode}": np.frombuffer(program.code, np.uint8) for mode, program in programs.items()}
    record = {"export": content.record(), "versions": {"keras": keras.__version__, "jax": jax.__version__}}
    store = CheckpointStore(path, write_place.CHECKPOINT_NAME)
    store.save(1, lambda: (arrays, record))
    store.wait()


def read_stablehlo(path: Path) -> LoadedModel:
    """Read an export, check it, and return its model."""
    try:
        loaded = load_checkpoint(path / f"{write_place.CHECKPOINT_NAME}_1")
    except DamagedError as error:
        raise DamagedError(
            f"The export {path} is damaged: {str(error).partition(' is damaged: ')[2]} Export the model again, or take another copy."
        ) from error
    codes = {name.removeprefix(PROGRAMS): code.tobytes() for name, code in loaded.arrays.items() if name.startswith(PROGRAMS)}
    content = ExportContent.from_record(loaded.record["export"], codes)
    return LoadedModel(content, [loaded.arrays[f"{WEIGHTS}{described.name}"] for described in content.variables])
