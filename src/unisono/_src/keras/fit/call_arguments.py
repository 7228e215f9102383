"""The arguments of a call of one of Keras' methods.

They are read, replaced, and compared between processes.
"""

from __future__ import annotations

import inspect

import keras

from unisono._src.keras.checks import refusals
from unisono._src.keras.distributed.batch_sources import StreamForKeras
from unisono._src.keras.distributed.dataset import DistributedDataset
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.replica.replicated import refuse_tensorflow_data
from unisono._src.typing import Arguments, Keywords, UserObject

ALIKE = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "validation_split",
    "validation_steps",
    "validation_freq",
    "shuffle",
)
"""Arguments of fit that must be alike in all processes of a training, so that they take the same steps."""


def read_argument(method: str, name: str, args: Arguments, kwargs: Keywords) -> UserObject:
    """Read an argument of a call of one of Keras' methods. None if the call does not fit the method, which Keras will report."""
    try:
        bound = inspect.signature(getattr(keras.Model, method)).bind_partial(None, *args, **kwargs)
    except TypeError:
        return None
    return bound.arguments.get(name)


def replace_arguments(method: str, args: Arguments, kwargs: Keywords, **replaced: UserObject) -> tuple[Arguments, Keywords]:
    """Replace some arguments of a call of one of Keras' methods."""
    bound = inspect.signature(getattr(keras.Model, method)).bind(None, *args, **kwargs)
    bound.arguments.update(replaced)
    return bound.args[1:], bound.kwargs


def replace_datasets(strategy: ReplicaStrategy, method: str, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Replace distributed datasets by adapters in the arguments."""

    def replace_dataset(value: UserObject) -> UserObject:
        refuse_tensorflow_data(value, f"model.{method}")
        if not isinstance(value, DistributedDataset):
            return value
        refusals.check_dataset_replicas(value.placement.replicas, strategy)
        return StreamForKeras(value.source) if value.source.is_stream else value.source

    return tuple(map(replace_dataset, args)), {name: replace_dataset(value) for name, value in kwargs.items()}


def check_fit_arguments(strategy: ReplicaStrategy, args: Arguments, kwargs: Keywords) -> None:
    """Refuse a call of fit with arguments that differ between processes."""
    strategy.check_alike({f"{name}= of fit": read_argument("fit", name, args, kwargs) for name in ALIKE})
