"""`TensorBoard`: Keras' callback of this name, without TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Literal, TypeGuard, cast

import jax
import keras
import numpy as np
from numpy.typing import ArrayLike

from unisono._src.keras.fit.bond import Bond, get_bond
from unisono._src.keras.fit.call_arguments import FitCallback
from unisono._src.keras.fit.steps_per_call import MOST_STEPS
from unisono._src.keras.private.optimizers import LossScaleOptimizer
from unisono._src.local_paths import as_local_path
from unisono._src.near_names import says_near_names
from unisono._src.tools.tensorboard.batch_count import BatchCount, Speed
from unisono._src.tools.tensorboard.event_file import EventFiles, import_tensorboardx
from unisono._src.tools.tensorboard.layer_graph import write_model
from unisono._src.tools.tensorboard.profiling import Profile, ProfileBatch
from unisono._src.tools.tensorboard.weight_summaries import MetadataFiles, check_metadata, write_tables, write_weights
from unisono._src.typing import Json, Logs, UserObject

FLUSH_SECONDS = 10.0


class TensorBoard(FitCallback):
    """A callback that writes a training's event files.

    `tensorboard --logdir logs` shows them. Arguments, directories, tags and steps are those of `keras.callbacks.TensorBoard`. For each
    epoch it also writes the rows per second of the training without validation (epoch_images_per_second) and the scale of a
    LossScaleOptimizer (epoch_loss_scale).

    One call takes several steps, as without the callback, but a batch that is written is the last of its call.

    Args:
        log_dir: The directory, with "train" and "validation" in it.
        histogram_freq: The number of epochs from one histogram of all weights to the next; 0 for none.
        write_graph: Whether the graph of layers is written. For a model that is neither Functional nor Sequential it is a summary as text.
        write_images: Whether weights are written as images too, with the histograms.
        write_steps_per_second: Whether the steps per second of each epoch are written, and with `update_freq` also of batches.
        update_freq: "epoch", or "batch" or a number n to write losses and metrics also of every batch, or of every n-th batch.
        profile_batch: The batch, or the first and the last batch, that `jax.profiler` records; 0 for none. Batches are counted from 1
            on, over all epochs. To see the profile: pip install xprof.
        embeddings_freq: The number of epochs from one copy of the tables of Embedding layers, for the projector, to the next; 0 for none.
        embeddings_metadata: A file with a label for each row of the tables, or a dict of files by the layers' names; relative to log_dir.

    Example:
        >>> callback = TensorBoard("logs", histogram_freq=1, profile_batch=(10, 20))
    """

    writes_for_all = True

    @says_near_names
    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: int | Literal["epoch", "batch"] = "epoch",
        profile_batch: ProfileBatch = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: MetadataFiles = None,
    ) -> None:
        super().__init__()
        import_tensorboardx()  # else a missing package would show at the end of the first epoch
        self.log_dir = str(log_dir)
        if embeddings_freq:
            as_local_path("TensorBoard(embeddings_freq=)", log_dir)
        self.histogram_freq = check_epochs("histogram_freq", histogram_freq)
        self.write_graph = write_graph
        self.write_images = write_images
        self.write_steps_per_second = write_steps_per_second
        self.update_freq: int | Literal["epoch"] = 1 if update_freq == "batch" else update_freq
        self.embeddings_freq = check_epochs("embeddings_freq", embeddings_freq)
        self.embeddings_metadata = embeddings_metadata
        if update_freq != "epoch" and not is_whole_number(self.update_freq, least=1):
            raise ValueError(f"update_freq is 'epoch', 'batch', or a number of batches; received {update_freq!r}.")
        if write_images and not histogram_freq:
            warnings.warn(
                "write_images=True writes images when histograms are written. Write histogram_freq=1 with it.", stacklevel=3
            )
        if embeddings_metadata is not None and not embeddings_freq:
            warnings.warn(
                "embeddings_metadata is for the tables that embeddings_freq=1 writes, which was not given.", stacklevel=3
            )
        self.profile_batch: ProfileBatch = profile_batch
        self._files = EventFiles(self.log_dir)
        self._bond: Bond | None = None
        self._steps_per_execution = 1
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Prepare for the next fit."""
        self._profile = Profile(self.profile_batch, os.path.join(self.log_dir, "train"))
        self._batch_count = BatchCount()
        self._speed = Speed(0)
        self._is_fitting = False

    # Methods that Keras calls.

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._bond = get_bond(model)
        self.fit_is_over()  # outside of a strategy, no call tells that a fit was broken off

    def on_train_begin(self, logs: Logs | None = None) -> None:
        model = self._synced_model
        self._is_fitting = True
        self._steps_per_execution = model.steps_per_execution
        if self.embeddings_freq:
            check_metadata(model, self.embeddings_metadata)
        if self.write_graph:
            write_model(model, self._files["train"])

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._batch_count.begin_epoch(epoch)
        self._speed = Speed(self._steps_taken() if self.write_steps_per_second else 0)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        number = self._number(batch)
        self._speed.begin_batch(batch, number)
        self._profile.begin_batch(number, batch, self._wait_for_steps)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        number = self._number(batch)
        if self._batch_count.count_batch(number):
            self._speed.end_batch(batch)
            if self.update_freq != "epoch" and number % self.update_freq == 0:
                self._write_batch(number, logs)
        self._profile.end_batch(number, self._wait_for_steps)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self._is_fitting:
            self._speed.note_rows(self._synced_model)

    def on_test_end(self, logs: Logs | None = None) -> None:
        if self._synced_model.optimizer is not None:
            named = {f"evaluation_{name}_vs_iterations": value for name, value in flatten_numbers(logs or {})}
            self._files["validation"].write_scalars(named, self._steps_taken())
        if not self._is_fitting:
            self._files.close()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        model = self._synced_model
        self._speed.note_rows(model)
        if logs:
            self._write_epoch(epoch, dict(flatten_numbers(logs)))
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            write_weights(model, self._files["train"], epoch, self.write_images)
        if self.embeddings_freq and epoch % self.embeddings_freq == 0:
            write_tables(model, self.log_dir, epoch, self.embeddings_metadata)
        self._files.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._profile.warn_if_missed(self._batch_count.done)
        self.fit_is_over()

    # Methods that our fit calls.

    def fit_is_over(self) -> None:
        """End the fit, also after an error."""
        self._profile.stop()
        self._files.close()
        self._begin_anew()

    def steps_until_due(self, step: int) -> int:
        """Count the steps that the next call may take.

        It ends with a step that is written, or at which a profile begins or ends.
        """
        done = self._number(step) - 1
        until_written = MOST_STEPS if self.update_freq == "epoch" else self.update_freq - done % self.update_freq
        return min(until_written, self._profile.count_steps_until_due(done))

    # Methods that BackupAndRestore calls.

    def get_state(self) -> dict[str, Json]:
        """Get the state, in JSON."""
        self._files.flush()  # batches that a checkpoint has counted are not written again
        return dataclasses.asdict(self._batch_count)

    def set_state(self, state: dict[str, Json]) -> None:
        self._batch_count = BatchCount(**state)

    # Writing.

    def _write_batch(self, number: int, logs: Logs | None) -> None:
        values = {f"batch_{name}": value for name, value in flatten_numbers(self._newest_logs(logs or {}))}  # waits for the step
        if self.write_steps_per_second:
            values["batch_steps_per_second"] = self._speed.batches_per_second(number)
        self._files["train"].write_scalars(values, number)
        self._files.flush(FLUSH_SECONDS)

    def _write_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        train = {name: value for name, value in logs.items() if not name.startswith("val_")}
        validation = {name.removeprefix("val_"): value for name, value in logs.items() if name not in train}
        train |= read_logged_settings(self._synced_model.optimizer)
        if self.write_steps_per_second:
            train["steps_per_second"] = self._speed.steps_per_second(self._steps_taken())
        if self._speed.rows_per_second is not None:
            train["images_per_second"] = self._speed.rows_per_second
        for run, values in (("train", train), ("validation", validation)):
            if values:
                self._files[run].write_scalars({f"epoch_{name}": value for name, value in values.items()}, epoch)

    # The state of the training.

    def _newest_logs(self, shown: Logs) -> Logs:
        """Get the logs of the last step, and what callbacks added. Our fit gives callbacks older logs, which cost no wait."""
        position = None if self._bond is None else self._bond.data_position
        return shown if position is None else {**shown, **position.logs}

    def _wait_for_steps(self) -> None:
        jax.block_until_ready(self._newest_logs({}))  # outside of a strategy, Keras has waited

    @property
    def _synced_model(self) -> keras.Model:
        """The model with the newest values in its variables. Keras writes them back whenever a callback asks for the model."""
        return cast(keras.Model, self.model)

    def _number(self, batch: int) -> int:
        """Number the batch with this index over all epochs. As Keras counts, the batches of one execution are one batch."""
        return self._batch_count.batches_before_epoch + batch // self._steps_per_execution + 1

    def _steps_taken(self) -> int:
        """Count the optimizer's steps, as Keras does. A model without an optimizer counts batches."""
        optimizer = self._synced_model.optimizer
        return self._batch_count.done if optimizer is None else int(convert_to_float(optimizer.iterations))


def check_epochs(name: str, value: UserObject) -> int:
    """Check a number of epochs, and pass it on."""
    if not is_whole_number(value, least=0):
        raise ValueError(f"{name} is a number of epochs, or 0 for never; received {value!r}.")
    return value


def is_whole_number(value: UserObject, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def flatten_numbers(logs: Logs) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for all numbers of the logs. A metric with several values has a name for each."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from flatten_numbers(value)
        elif np.ndim(value):
            yield from ((f"{name}/{index}", float(item)) for index, item in enumerate(np.ravel(value)))
        else:
            yield name, float(value)


def read_logged_settings(optimizer: keras.optimizers.Optimizer | None) -> dict[str, float]:
    """Read an optimizer's learning rates and loss scale. They have the names that Keras writes."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    settings = {}
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        settings = {f"learning_rate_{part.name}": convert_to_float(part.learning_rate) for part in inner.optimizers}
    elif inner is not None:
        settings = {"learning_rate": convert_to_float(inner.learning_rate)}
    if isinstance(optimizer, LossScaleOptimizer):
        settings["loss_scale"] = convert_to_float(optimizer.dynamic_scale)
    return settings


def convert_to_float(value: keras.Variable | ArrayLike) -> float:
    return float(np.asarray(keras.ops.convert_to_numpy(value)))
