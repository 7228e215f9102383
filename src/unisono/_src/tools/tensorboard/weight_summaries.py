"""Weights as TensorBoard shows them: histograms and images."""

from __future__ import annotations

import struct
import zlib
from typing import cast

import keras
import numpy as np
from numpy.typing import ArrayLike

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
