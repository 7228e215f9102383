"""The tables of Embedding layers, as TensorBoard's projector reads them without TensorFlow."""

from __future__ import annotations

import json
import os
import pathlib
import warnings
from typing import TypeAlias

import keras
import numpy as np

from unisono._src.keras_private.models import list_layers

CONFIG = "projector_config.pbtxt"

MetadataFiles: TypeAlias = str | os.PathLike[str] | dict[str, str | os.PathLike[str]] | None
"""Keras' argument: a file with labels for all layers, or files by the layers' names."""


class Projector:
    """The writer of the tables, as tab-separated files for each layer and epoch, and of the list of files that the projector reads.

    Keras writes checkpoints instead, which the projector reads with TensorFlow.

    Args:
        log_dir: The directory of the list, as in Keras. Paths of metadata are relative to it.
        metadata: Keras' argument: a file for all layers, or files by the layers' names.
    """

    def __init__(self, log_dir: str, metadata: MetadataFiles) -> None:
        self._log_dir = pathlib.Path(log_dir)
        self._metadata = metadata

    def check(self, model: keras.Model) -> None:
        """Refuse metadata of unknown layers, and warn of a model without tables, before the training."""
        names = [layer.name for layer in find_embeddings(model)]
        unknown = sorted(set(self._metadata) - set(names)) if isinstance(self._metadata, dict) else []
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

    def write(self, model: keras.Model, epoch: int) -> None:
        """Write the tables of an epoch, and the list of all files. After a resume, files of the earlier training are among them."""
        folder = self._log_dir / "train" / "embeddings"
        for layer in find_embeddings(model):
            path = folder / layer.name / f"epoch_{epoch:05d}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            table = np.asarray(keras.ops.convert_to_numpy(layer.embeddings)).astype("float32")
            np.savetxt(path, table, fmt="%.9g", delimiter="\t")
        (self._log_dir / CONFIG).write_text("".join(map(self._format_entry, sorted(folder.glob("*/*.tsv")))))

    def _format_entry(self, path: pathlib.Path) -> str:
        layer = path.parent.name
        fields = {"tensor_name": f"{layer}/{path.stem}", "tensor_path": path.relative_to(self._log_dir).as_posix()}
        metadata = self._metadata.get(layer) if isinstance(self._metadata, dict) else self._metadata
        if metadata is not None:
            fields["metadata_path"] = os.fspath(metadata)
        lines = [f"  {name}: {json.dumps(value)}" for name, value in fields.items()]
        return "\n".join(["embeddings {", *lines, "}\n"])


def find_embeddings(model: keras.Model) -> list[keras.layers.Embedding]:
    return [layer for layer in list_layers(model) if isinstance(layer, keras.layers.Embedding)]
