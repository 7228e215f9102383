"""Small images with labels to train on. scikit-learn comes with them, or Keras downloads them."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import keras
import numpy as np

from unisono._src.tools.cli.output import CommandError

DatasetName = Literal["digits", "mnist", "fashion_mnist", "cifar10"]


@dataclasses.dataclass(frozen=True)
class Images:
    """Images in [0, 1], and their classes 0 to 9. They are float32 of shape (rows, height, width, channels)."""

    title: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    epochs: int
    """Epochs after which the demonstration shows something."""


def load_dataset(name: DatasetName) -> Images:
    """Load a dataset. All but `digits` are downloaded once."""
    if name == "digits":
        return read_digits()
    try:
        (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises a bare Exception if a download fails, and other errors if the file is broken
        cache_folder = os.path.join(os.environ.get("KERAS_HOME", "~/.keras"), "datasets")
        raise CommandError(
            f"the dataset {name!r} could not be loaded. keras.datasets.{name}.load_data() tried to download it, and failed:\n\n"
            f"    {error}\n\n"
            f"Without a network, write\n\n    unisono demo --dataset digits\n\n"
            f"which needs no download, or copy the folder {cache_folder} from a machine on which that call has worked."
        ) from error
    height, width = x_train.shape[1:3]
    x_train, x_test = (pixels.astype("float32").reshape(len(pixels), height, width, -1) / 255 for pixels in (x_train, x_test))
    y_train, y_test = (labels.astype("int32").reshape(-1) for labels in (y_train, y_test))
    return Images(f"{name}, {height} x {width} pixels", x_train, y_train, x_test, y_test, epochs=2)


def read_digits() -> Images:
    """Load 1797 handwritten digits of 8 x 8 pixels. Every fifth is held out."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
    y = labels.astype("int32")
    is_held_out = np.arange(len(x)) % 5 == 0
    title = "Handwritten digits, 8 x 8 pixels"
    return Images(title, x[~is_held_out], y[~is_held_out], x[is_held_out], y[is_held_out], epochs=40)
