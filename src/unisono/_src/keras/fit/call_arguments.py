"""The arguments of a call of one of Keras' methods.

They are read, replaced, and compared between processes.
"""

from __future__ import annotations

import abc
import inspect

import keras

from unisono._src.keras.checks import refusals
from unisono._src.keras.distributed.batch_sources import StreamForKeras
from unisono._src.keras.distributed.dataset import DistributedDataset
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.private.callbacks import CallbackList, acts_at_batches, list_callbacks
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


class FitCallback(keras.callbacks.Callback, abc.ABC):
    """The base class of our callbacks.

    At single batches they do nothing that `steps_until_due` does not announce.
    """

    keeps_what_others_decide = False
    """Whether it keeps what other callbacks decide, and so runs after all others, wherever it stands in the list."""
    writes_for_all = False
    """Whether one of several processes runs it for all."""

    @abc.abstractmethod
    def steps_until_due(self, step: int) -> int:
        """The most steps that one call may take from `step` on. The call must end where the callback acts."""

    def fit_begins(self) -> None:
        """Prepare for a call of fit. It comes before Keras makes the train function."""

    def fit_is_over(self) -> None:
        """Clean up. It is called however fit ended."""


WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks of Keras that write or send something and do not change the training: only one of several processes runs them."""


def has_batch_callbacks(callbacks: UserObject, mode: str) -> bool:
    """Whether a callback sees single batches, in mode "train" or "test"."""
    return any(
        not isinstance(callback, FitCallback) and acts_at_batches(callback, mode) for callback in list_callbacks(callbacks)
    )


def has_keeper(callbacks: UserObject) -> bool:
    """Whether one of the callbacks keeps what others decide."""
    return any(is_keeper(callback) for callback in list_callbacks(callbacks))


def is_keeper(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, FitCallback) and callback.keeps_what_others_decide


def put_keepers_last(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Move callbacks that keep what others decide to the end."""
    callbacks = read_argument("fit", "callbacks", args, kwargs)
    if not has_keeper(callbacks):
        return args, kwargs
    in_order = sorted(list_callbacks(callbacks), key=is_keeper)
    if isinstance(callbacks, CallbackList):
        callbacks.callbacks[:] = in_order
        return args, kwargs
    return replace_arguments("fit", args, kwargs, callbacks=in_order)


def remove_writing_callbacks(method: str, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Remove callbacks that write, and progress, from the arguments.

    One of several processes writes files and shows progress; others do not.
    """
    silent = select_silent_callbacks(read_argument(method, "callbacks", args, kwargs))
    return replace_arguments(method, args, kwargs, verbose=0, callbacks=silent)


def select_silent_callbacks(callbacks: UserObject) -> list[keras.callbacks.Callback]:
    """Select the callbacks that write and send nothing."""
    return [
        callback
        for callback in list_callbacks(callbacks)
        if not isinstance(callback, WRITING) and not (isinstance(callback, FitCallback) and callback.writes_for_all)
    ]
