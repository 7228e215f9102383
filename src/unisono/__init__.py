"""Unisono: synchronous data-parallel training of Keras 3 models on JAX, with the same bits on every placement."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")
_keras_came_first = "keras" in sys.modules

import keras

if keras.backend.backend() != "jax":
    raise ImportError(
        f"Unisono runs on Keras' JAX backend, but Keras {'was imported before Unisono and ' * _keras_came_first}runs on "
        f"{keras.backend.backend()!r}. Start Python with KERAS_BACKEND=jax, or set it in os.environ before the first import of "
        f"keras."
    )

from unisono import callbacks as callbacks
from unisono.checkpoint.checkpoint import Checkpoint as Checkpoint
from unisono.checkpoint.latest import latest_checkpoint as latest_checkpoint
from unisono.export import export as export
from unisono.export import load_exported as load_exported
from unisono.fingerprint import fingerprint as fingerprint
from unisono.loop.arguments import replicate as replicate
from unisono.loop.context import get_replica_context as get_replica_context
from unisono.loop.context import in_cross_replica_context as in_cross_replica_context
from unisono.loop.function import function as function
from unisono.loop.gradients import value_and_grad as value_and_grad
from unisono.loop.losses import compute_average_loss as compute_average_loss
from unisono.loop.losses import scale_regularization_loss as scale_regularization_loss
from unisono.loop.reduction import ReduceOp as ReduceOp
from unisono.strategy.base import Strategy as Strategy
from unisono.strategy.kinds import MirroredStrategy as MirroredStrategy
from unisono.strategy.kinds import OneDeviceStrategy as OneDeviceStrategy
from unisono.strategy.kinds import ParameterServerStrategy as ParameterServerStrategy
from unisono.strategy.kinds import TPUStrategy as TPUStrategy
from unisono.strategy.kinds import get_strategy as get_strategy
from unisono.strategy.workers import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from unisono.version import VERSION as _VERSION

__version__ = _VERSION
