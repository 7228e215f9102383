"""Histograms and images of weights, and the projector's embeddings."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import warnings
import zlib
from typing import TypeAlias, cast

import keras
import numpy as np
from numpy.typing import ArrayLike

from unisono._src.keras.private.models import list_layers
from unisono._src.tools.tensorboard.event_file import EventFile

BUCKETS = 30
MOST_IMAGES = 3
COLOURS = {1: 0, 3: 2, 4: 6}
"""PNG's colour type for each number of channels."""


def write_weights(model: keras.Model, file: EventFile, epoch: int, as_images: bool) -> None:
    """Write all weights of a model, under Keras' tags."""
    for weight in (weight for layer in model.layers for weight in layer.weights):
        name = weight.path.replace(":", "_")
        value = cast(np.ndarray, keras.ops.convert_to_numpy(weight.value))
        file.write_tensor(f"{name}/histogram", "histograms", compute_histogram(value), epoch)
        shown = encode_images(value) if as_images else None
        if shown is not None:
            file.write_tensor(f"{name}/image", "images", shown, epoch)


def compute_histogram(values: ArrayLike) -> np.ndarray:
    """Compute rows of (left edge, right edge, count).

    `tf.summary.histogram` computes the same. Values that are not finite are left out.
    """
    values = np.asarray(values).astype("float64").ravel()
    values = values[np.isfinite(values)]
    if not values.size:
        return np.zeros((BUCKETS, 3))
    low = values.min()
    high = values.max()
    edges = np.linspace(low, high, BUCKETS + 1)
    if low == high:
        counts = np.eye(BUCKETS)[-1] * values.size
    else:
        places = np.floor((values - low) / ((high - low) / BUCKETS)).astype(int)
        counts = np.bincount(np.minimum(places, BUCKETS - 1), minlength=BUCKETS)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def encode_images(weight: ArrayLike) -> list[bytes] | None:
    """Encode weights as [width, height, PNG files].

    `tf.summary.image` writes this form. None for weights that Keras shows no image of.
    """
    stack = stack_images(np.squeeze(np.asarray(weight).astype("float32")))
    if stack is None:
        return None
    _, height, width, _ = stack.shape
    pixels = np.clip(np.nan_to_num(stack) * np.float32(255.5), 0, 255).astype("uint8")
    return [str(width).encode(), str(height).encode(), *map(encode_png, pixels[:MOST_IMAGES])]


def stack_images(weight: np.ndarray) -> np.ndarray | None:
    """Reshape weights to (images, height, width, channels). Keras' TensorBoard does the same. None if it makes no image."""
    if weight.ndim == 1:
        return weight.reshape(1, -1, 1, 1)
    if weight.ndim == 2:
        lying = weight.T if weight.shape[0] > weight.shape[1] else weight
        return lying[None, :, :, None]
    if weight.ndim == 3:
        kernels = weight.transpose(2, 0, 1) if keras.config.image_data_format() == "channels_last" else weight
        return kernels[:, :, :, None]
    return weight if weight.ndim == 4 and weight.shape[-1] in COLOURS else None


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode (height, width, channels) bytes as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


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
