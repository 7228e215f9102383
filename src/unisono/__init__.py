"""Unisono: synchronous data-parallel training of Keras 3 models on JAX, with the same bits on every placement."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

if keras.backend.backend() != "jax":
    how = "Keras was imported before Unisono and" if "keras" in sys.modules else "Keras"
    raise ImportError(
        f"Unisono runs on Keras' JAX backend, but {how} runs on {keras.backend.backend()!r}. Start Python with KERAS_BACKEND=jax, "
        f"or set it in os.environ before the first import of keras."
    )

from unisono.fingerprint import fingerprint as fingerprint
from unisono.strategy import MirroredStrategy as MirroredStrategy
from unisono.strategy import OneDeviceStrategy as OneDeviceStrategy
from unisono.strategy import ParameterServerStrategy as ParameterServerStrategy
from unisono.strategy import Strategy as Strategy
from unisono.strategy import TPUStrategy as TPUStrategy
from unisono.strategy import get_strategy as get_strategy

__version__ = "0.1.0"
