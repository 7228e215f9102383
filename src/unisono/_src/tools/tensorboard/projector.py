"""The tables of Embedding layers for TensorBoard's projector. It reads them without TensorFlow."""

from __future__ import annotations

import json
import os
import pathlib
import warnings
from typing import TypeAlias

import keras
import numpy as np

from unisono._src.keras.private.models import list_layers

CONFIG = "projector_config.pbtxt"

MetadataFiles: TypeAlias = str | os.PathLike[str] | dict[str, str | os.PathLike[str]] | None
"""Keras' argument: a file with labels for all layers, or files by the layers' names."""


def check_metadata(model: keras.Model, metadata: MetadataFiles) -> None:
    """Refuse metadata of unknown layers, before the training. A model without tables is warned of."""
    names = [layer.name for layer in find_embeddings(model)]
    unknown = sorted(set(metadata) - set(names)) if isinstance(metadata, dict) else []
    if unknown:
        raise ValueError(
            f"embeddings_metadata received the names {unknown}, and the model's Embedding layers are {names}. Write the names of these."
        )
    if not names:
        warnings.warn(
            "embeddings_freq was given, and the model has no keras.layers.Embedding, so that nothing is written for the projector. "
            "Write embeddings_freq=0.",
            stacklevel=2,
        )


def write_tables(model: keras.Model, log_dir: str, epoch: int, metadata: MetadataFiles) -> None:
    """Write an epoch's tables as tab-separated files.

    The list of all such files, which the projector reads, is written too.

    Keras writes checkpoints instead, which the projector reads with TensorFlow. After a resume, files of the earlier training are in the
    list too.
    """
    folder = pathlib.Path(log_dir, "train", "embeddings")
    for layer in find_embeddings(model):
        path = folder / layer.name / f"epoch_{epoch:05d}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = np.asarray(keras.ops.convert_to_numpy(layer.embeddings)).astype("float32")
        np.savetxt(path, table, fmt="%.9g", delimiter="\t")
    entries = [format_entry(path, log_dir, metadata) for path in sorted(folder.glob("*/*.tsv"))]
    pathlib.Path(log_dir, CONFIG).write_text("".join(entries))


def format_entry(path: pathlib.Path, log_dir: str, metadata: MetadataFiles) -> str:
    """Format the entry of a table in the list. Paths are relative to `log_dir`."""
    layer = path.parent.name
    fields = {"tensor_name": f"{layer}/{path.stem}", "tensor_path": path.relative_to(log_dir).as_posix()}
    labels = metadata.get(layer) if isinstance(metadata, dict) else metadata
    if labels is not None:
        fields["metadata_path"] = os.fspath(labels)
    lines = [f"  {name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["embeddings {", *lines, "}\n"])


def find_embeddings(model: keras.Model) -> list[keras.layers.Embedding]:
    return [layer for layer in list_layers(model) if isinstance(layer, keras.layers.Embedding)]
