"""Checkpoints of format 2, by Orbax. They are read, and never written. Orbax is imported when one of them is found."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from unisono._src.keras.checkpoint.local_storage import LocalPlace
from unisono._src.keras.checkpoint.storage import Place
from unisono._src.programs.private import distributed
from unisono._src.typing import AnyArray, Json

FORMAT = 2
ARRAYS = "arrays"
METADATA = "_CHECKPOINT_METADATA"
"""The names of what Orbax leaves in the folder of a checkpoint."""


def read_record(path: Place) -> Json:
    with (path / METADATA).open_file() as file:
        return json.load(file)["custom_metadata"]


def read_arrays(path: Place, like: Mapping[str, np.ndarray]) -> Mapping[str, AnyArray]:
    """Read the arrays of a checkpoint. `like` has their names, shapes and dtypes."""
    if not isinstance(path, LocalPlace):
        raise ImportError(
            f"The checkpoint {path} was written by Orbax, as checkpoints of format {FORMAT} were, and is read from the local disk alone. "
            f"Copy it to a local folder, and restore it from there: the next save is of the newest format, wherever it goes."
        )
    try:
        import orbax.checkpoint.experimental.v1 as ocp
    except ImportError as error:
        raise ImportError(
            f"The checkpoint {path} was written by Orbax, as checkpoints of format {FORMAT} were, and orbax-checkpoint cannot be imported "
            f"({error}). To read it, write: pip install 'unisono[orbax]'"
        ) from error
    # Each process reads for itself: by itself Orbax starts collectives over the devices of all.
    _, process = distributed.get_process_count_and_number()
    context = ocp.Context()
    context.multiprocessing.primary_host = process
    context.multiprocessing.active_processes = {process}
    filled = {name: array for name, array in like.items() if array.size}  # Orbax wrote no empty arrays
    with context:
        loaded = ocp.load(str(path), filled, checkpointable_name=ARRAYS) if filled else {}
    return {name: loaded[name] if array.size else array for name, array in like.items()}
