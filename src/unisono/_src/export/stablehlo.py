"""The format "stablehlo": programs, weights and a record in one checkpoint, checked bit by bit when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from unisono._src.checkpoint.reading import DamagedError, load
from unisono._src.checkpoint.store import Store
from unisono._src.export import model_variables, write_place
from unisono._src.export.content import Content
from unisono._src.export.forward_program import program_of
from unisono._src.export.loaded_model import LoadedModel, inputs_of

WEIGHTS, PROGRAMS = "weights/", "programs/"
"""Before the names of arrays."""


def write(model: Any, path: Path, example: Any) -> None:
    """Writes a built model to a directory that is not there yet."""
    content, values = exported(model, example)
    arrays = {f"{WEIGHTS}{of.name}": value for of, value in zip(content.variables, values, strict=True)}
    arrays |= {f"{PROGRAMS}{mode}": np.frombuffer(program.code, np.uint8) for mode, program in content.programs.items()}
    record = {"export": content.record(), "versions": {"keras": keras.__version__, "jax": jax.__version__}}
    store = Store(path, write_place.NAME)
    store.save(1, lambda: arrays, lambda _: record)
    store.wait()


def exported(model: Any, example: Any) -> tuple[Content, list[np.ndarray]]:
    """(what a file holds of the model, the values of its variables)."""
    taken = inputs_of(model, example)
    found, described = model_variables.of_model(model)
    values = model_variables.values(model, found)
    programs = {mode: program_of(model, found, taken, training) for mode, training in (("inference", False), ("training", True))}
    names = getattr(model, "output_names", None)  # of functional models alone
    return Content(taken, described, programs, policy_of(model), names and tuple(names)), values


def read(path: Path) -> LoadedModel:
    """Reads and checks it, and makes a model of it."""
    try:
        found = load(path / f"{write_place.NAME}_1")
    except DamagedError as error:
        raise DamagedError(
            f"The export {path} is damaged: {str(error).partition(' is damaged: ')[2]} Export the model again, or take another copy."
        ) from error
    codes = {name.removeprefix(PROGRAMS): a.tobytes() for name, a in found.arrays.items() if name.startswith(PROGRAMS)}
    content = Content.of_record(found.record["export"], codes)
    return LoadedModel(content, [found.arrays[f"{WEIGHTS}{of.name}"] for of in content.variables])


def policy_of(model: Any) -> str:
    """By name. Of a quantized model that of its activations: the program has the rest."""
    return model.dtype_policy.name.rpartition("_from_")[2]
