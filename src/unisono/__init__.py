"""Unisono: synchronous data-parallel training of Keras 3 models on JAX, with the same bits on every placement.

Importing it settles which backend Keras has, and nothing else: what a name stands for is imported where the name is first used, so that a
command that starts processes starts at once.

Public is what follows. All else lies in `unisono._src`, is internal and may change with every version.

    Strategies   MirroredStrategy, OneDeviceStrategy, MultiWorkerMirroredStrategy, TPUStrategy, ParameterServerStrategy (refused), Strategy
                 (what they share), get_strategy
    Loops        function, value_and_grad, compute_average_loss, scale_regularization_loss, replicate, ReduceOp, get_replica_context,
                 in_cross_replica_context
    Checkpoints  Checkpoint, latest_checkpoint, callbacks.BackupAndRestore
    Files        export, load_exported
    On Ray       ray.Trainer, ray.Backup, ray.Dataset
    Looking      fingerprint, callbacks.Record, callbacks.TensorBoard, native (the kernels in use), DeviceFaultError (of `verify=`)

Example:
    >>> import unisono as un
    >>> strategy = un.MirroredStrategy(devices=2, replicas=8)
    >>> with strategy.scope():
    ...     pass  # what is made here is trained by eight replicas on two devices
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from unisono._src.hidden_frames import PUBLIC_CALL as _PUBLIC_CALL
from unisono._src.versions import VERSION as _VERSION
from unisono._src.versions import check_versions as _check_versions

if TYPE_CHECKING:
    from unisono import callbacks as callbacks
    from unisono import ray as ray
    from unisono._src.engine.observers.verification import DeviceFaultError as DeviceFaultError
    from unisono._src.keras.checkpoint.checkpoint import Checkpoint as Checkpoint
    from unisono._src.keras.checkpoint.latest import latest_checkpoint as latest_checkpoint
    from unisono._src.keras.fingerprint import fingerprint as fingerprint
    from unisono._src.keras.loop.average_loss import compute_average_loss as compute_average_loss
    from unisono._src.keras.loop.average_loss import scale_regularization_loss as scale_regularization_loss
    from unisono._src.keras.loop.function import function as function
    from unisono._src.keras.loop.gradients import value_and_grad as value_and_grad
    from unisono._src.keras.loop.reduce_values import ReduceOp as ReduceOp
    from unisono._src.keras.loop.replica_context import get_replica_context as get_replica_context
    from unisono._src.keras.loop.replica_context import in_cross_replica_context as in_cross_replica_context
    from unisono._src.keras.replica.replicated import replicate as replicate
    from unisono._src.keras.strategy.base import Strategy as Strategy
    from unisono._src.keras.strategy.builtin import MirroredStrategy as MirroredStrategy
    from unisono._src.keras.strategy.builtin import OneDeviceStrategy as OneDeviceStrategy
    from unisono._src.keras.strategy.builtin import ParameterServerStrategy as ParameterServerStrategy
    from unisono._src.keras.strategy.builtin import TPUStrategy as TPUStrategy
    from unisono._src.keras.strategy.builtin import get_strategy as get_strategy
    from unisono._src.keras.strategy.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from unisono._src.kernels.native.in_use import native as native
    from unisono._src.tools.export import export as export
    from unisono._src.tools.export import load_exported as load_exported

__version__ = _VERSION

_MODULES = {
    "Checkpoint": "keras.checkpoint.checkpoint",
    "DeviceFaultError": "engine.observers.verification",
    "MirroredStrategy": "keras.strategy.builtin",
    "MultiWorkerMirroredStrategy": "keras.strategy.multi_worker",
    "OneDeviceStrategy": "keras.strategy.builtin",
    "ParameterServerStrategy": "keras.strategy.builtin",
    "ReduceOp": "keras.loop.reduce_values",
    "Strategy": "keras.strategy.base",
    "TPUStrategy": "keras.strategy.builtin",
    "compute_average_loss": "keras.loop.average_loss",
    "export": "tools.export",
    "fingerprint": "keras.fingerprint",
    "function": "keras.loop.function",
    "get_replica_context": "keras.loop.replica_context",
    "get_strategy": "keras.strategy.builtin",
    "in_cross_replica_context": "keras.loop.replica_context",
    "latest_checkpoint": "keras.checkpoint.latest",
    "load_exported": "tools.export",
    "native": "kernels.native.in_use",
    "replicate": "keras.replica.replicated",
    "scale_regularization_loss": "keras.loop.average_loss",
    "value_and_grad": "keras.loop.gradients",
}
"""Where each public name comes from, below `unisono._src`."""

_PUBLIC_MODULES = ("callbacks", "ray")

__all__ = [*_PUBLIC_MODULES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]  # the keys are texts


def _settle_backend() -> None:
    """Have Keras run on JAX, or say that it does not."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    came_first = "keras" in sys.modules
    backend = sys.modules["keras"].config.backend() if came_first else os.environ["KERAS_BACKEND"]
    if backend != "jax":
        raise ImportError(
            f"Unisono runs on Keras' JAX backend, but Keras {'was imported before Unisono and ' * came_first}runs on {backend!r}. Start "
            f"Python with KERAS_BACKEND=jax, or set it in os.environ before the first import of keras."
        )


_settle_backend()


def __getattr__(name: str) -> Any:
    """Return what a public name stands for, imported at its first use, with versions of Keras and JAX for which it was written."""
    with _PUBLIC_CALL:
        if name not in __all__:
            advice = importlib.import_module("unisono._src.keras.strategy.extended").INSTEAD_OF_NAMES.get(name)
            raise AttributeError(f"module 'unisono' has no attribute {name!r}{f'. {advice}' if advice else ''}")
        _check_versions()
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"unisono.{name}")
    value = globals()[name] = getattr(importlib.import_module(f"unisono._src.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
