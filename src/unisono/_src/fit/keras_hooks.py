"""The functions behind `fit`, `evaluate` and `predict` of a model that was made in a strategy's scope.

Keras' loops stay as they are: for each batch they call what `make_train_function` and its two siblings made. Our versions of these
methods are set on the model, on this one object, together with the methods that give the loops our data adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from unisono._src.checks import refusals
from unisono._src.checks.jax_errors import explain_step_errors
from unisono._src.data.global_batch import GlobalBatch, as_global_batch
from unisono._src.data.indexed_reading import IndexedAdapter
from unisono._src.data.keras_adapter import GlobalBatchAdapter
from unisono._src.data.row_order import RowOrder, draw_seed
from unisono._src.distributed.dataset import DistributedDataset
from unisono._src.distributed.per_replica import read_global_arrays
from unisono._src.distributed.replica_strategy import SCOPES, ReplicaStrategy
from unisono._src.fit.callback_protocol import (
    FitCallback,
    has_batch_callbacks,
    put_keepers_last,
    read_argument,
    remove_writing_callbacks,
    select_silent_callbacks,
)
from unisono._src.fit.data_position import DataPosition
from unisono._src.fit.step_function import StepFunction
from unisono._src.fit.steps_per_call import BatchGroup, StepsPerCall
from unisono._src.jax_private import tracing
from unisono._src.keras_private.building import build_by_calling, needs_batch
from unisono._src.keras_private.callbacks import forget_first_epoch, list_callbacks
from unisono._src.keras_private.data_adapters import (
    EpochSteps,
    GeneratorDataAdapter,
    count_static_rows,
    has_known_length,
    make_adapter,
    read_first_batch,
    replace_adapter,
)
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.models import (
    find_eager_option,
    get_class_method,
    is_built,
    overrides_method,
    release_state,
    replace_trainer_method,
)
from unisono._src.keras_private.trainer_state import (
    STATE_NAMES,
    WITHOUT_OPTIMIZER,
    list_model_variables,
    list_variable_ids,
)
from unisono._src.keras_private.trainer_state import take_state as take_model_state
from unisono._src.ownership import ModelBond, find_bond, set_bond
from unisono._src.placement import split_evenly
from unisono._src.replica.predictions import INPUT_GROUPS
from unisono._src.replica.protocol import State
from unisono._src.replica.replicated import refuse_tensorflow_data
from unisono._src.typing import Arguments, KerasObject, Keywords, Logs, Outputs, UserBatch, UserObject

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

REPLACED_METHODS = (
    "compile",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
    "build_by",
    "take_state",
)
"""The methods of a bond that stand in for those of the model's trainer."""


def get_bond(model: object) -> Bond | None:
    """Return the bond of a model; None for a model from outside of every scope."""
    bond = find_bond(model)
    return bond if isinstance(bond, Bond) else None


class Bond(ModelBond):
    """The tie between a model and its strategy. It holds what the model's training needs between two calls."""

    def __init__(self, model: keras.Model, strategy: ReplicaStrategy) -> None:
        self.model: KerasObject = model
        self.strategy = strategy
        self.data_position: DataPosition | None = None
        """The data position of the current call of fit."""
        self.callbacks: list[keras.callbacks.Callback] = []
        """The callbacks of the current call of fit."""
        self._awaits_position = False
        """Whether there is a current call of fit, and it has no data position yet."""
        self.ran_eagerly = False
        """Whether steps that were not compiled have changed the model."""
        self._order: RowOrder | None = None
        self._are_groups_allowed = False
        set_bond(model, self)
        for name in REPLACED_METHODS:
            replace_trainer_method(model, name, getattr(self, name))

    @property
    def is_eager(self) -> bool:
        """Return whether steps are not to be compiled."""
        return find_eager_option(self.model) is not None or tracing.is_jit_disabled()

    @property
    def has_promised_bits(self) -> bool:
        """Return whether every run of the program gives the model the same bits."""
        return self.strategy.deterministic and not self.ran_eagerly and not self.is_eager

    @property
    def order(self) -> RowOrder:
        """Return the place of the model in its data. The seed is drawn when it is first needed."""
        if self._order is None:
            self._order = RowOrder(draw_seed())
        return self._order

    # What Keras calls on the model in place of its own methods.

    def compile(self, *args: UserObject, **kwargs: UserObject) -> None:
        get_class_method(self.model, "compile")(*args, **kwargs)
        refusals.check_compile_options(self.model, self.strategy)

    def make_train_function(self, force: bool = False) -> None:
        refusals.check_model_scope(self.model, SCOPES.innermost)
        if self.model.train_function is not None and self._has_other_variables(self.model.train_function):
            refusals.check_changed_model(self.model, training=True)
        if self.model.train_function is None or force or self._has_other_mode(self.model.train_function):
            self.strategy.announce()
            self.model.train_function = StepFunction(self, "train", STATE_NAMES)

    def make_test_function(self, force: bool = False) -> None:
        if self.model.test_function is None or force or self._is_outdated(self.model.test_function):
            self.model.test_function = StepFunction(self, "evaluate", WITHOUT_OPTIMIZER)

    def make_predict_function(self, force: bool = False) -> None:
        if self.model.predict_function is None or force or self._is_outdated(self.model.predict_function):
            self.model.predict_function = StepFunction(self, "predict", INPUT_GROUPS)

    def _is_outdated(self, function: StepFunction) -> bool:
        return self._has_other_variables(function) or self._has_other_mode(function)

    def _has_other_mode(self, function: StepFunction) -> bool:
        """Return whether the function is compiled and steps are not to be compiled now, or the reverse."""
        return function.eager != self.is_eager

    def _has_other_variables(self, function: StepFunction) -> bool:
        return function.variables != list_variable_ids(self.model)

    def fit(self, *args: UserObject, **kwargs: UserObject) -> keras.callbacks.History:
        args, kwargs = self._replace_datasets("fit", args, kwargs)
        args, kwargs = put_keepers_last(args, kwargs)
        if not self.strategy.writes:
            args, kwargs = remove_writing_callbacks("fit", args, kwargs)
        callbacks = list_callbacks(read_argument("fit", "callbacks", args, kwargs))
        refusals.check_backup_callbacks(callbacks)
        self.strategy.check_alike({f"{name}= of fit": read_argument("fit", name, args, kwargs) for name in ALIKE})
        self.callbacks = callbacks
        self._awaits_position = True
        try:
            with self._allow_groups("fit", "train", args, kwargs):
                return get_class_method(self.model, "fit")(*args, **kwargs)
        finally:
            callbacks = self.callbacks
            self.callbacks = []
            self.data_position = None
            self._awaits_position = False
            forget_first_epoch(self.model)
            for callback in callbacks:
                if isinstance(callback, FitCallback):
                    callback.fit_is_over()  # which may raise a signal again

    def evaluate(self, *args: UserObject, **kwargs: UserObject) -> Logs | list[float] | float:
        args, kwargs = self._replace_datasets("evaluate", args, kwargs)
        if not self.strategy.writes:
            args, kwargs = remove_writing_callbacks("evaluate", args, kwargs)
        with self._allow_groups("evaluate", "test", args, kwargs):
            return self._call_and_restore("evaluate", *args, **kwargs)

    def predict(
        self,
        x: UserObject,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: UserObject = None,
        **more: UserObject,
    ) -> Outputs:
        (x,), _ = self._replace_datasets("predict", (x,), {})
        source = make_adapter(x, batch_size, steps)
        refusals.check_data_source(source, steps)
        if is_built(self.model):  # else Keras builds it on the first batch, as the source gives it
            source = GlobalBatchAdapter(source, self.order)
        if not self.strategy.writes:
            verbose = 0
            callbacks = select_silent_callbacks(callbacks)
        return self._call_and_restore("predict", source, batch_size, verbose, steps, callbacks, **more)

    def _replace_datasets(self, method: str, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Return the arguments with adapters in place of distributed datasets."""

        def replace_dataset(value: UserObject) -> UserObject:
            refuse_tensorflow_data(value, f"model.{method}")
            if not isinstance(value, DistributedDataset):
                return value
            refusals.check_dataset_replicas(value.placement.replicas, self.strategy)
            return value.source

        return tuple(map(replace_dataset, args)), {name: replace_dataset(value) for name, value in kwargs.items()}

    def train_on_batch(self, *args: UserObject, **kwargs: UserObject) -> Logs | list[float] | float:
        return self._call_and_restore(
            "train_on_batch",
            *map(read_global_arrays, args),
            **{name: read_global_arrays(value) for name, value in kwargs.items()},
        )

    def test_on_batch(self, *args: UserObject, **kwargs: UserObject) -> Logs | list[float] | float:
        return self._call_and_restore(
            "test_on_batch", *map(read_global_arrays, args), **{name: read_global_arrays(value) for name, value in kwargs.items()}
        )

    def predict_on_batch(self, *args: UserObject, **kwargs: UserObject) -> Outputs:
        return self._call_and_restore(
            "predict_on_batch",
            *map(read_global_arrays, args),
            **{name: read_global_arrays(value) for name, value in kwargs.items()},
        )

    def build_by(self, iterator: KerasObject = None, data_batch: UserBatch = None) -> None:
        """Build the model by a first batch, and put our adapter into the iterator of a loop that begins."""
        if iterator is not None and not isinstance(iterator.data_adapter, GlobalBatchAdapter):
            refusals.check_data_source(iterator.data_adapter, iterator.steps_per_epoch)
            replace_adapter(
                iterator,
                lambda source: GlobalBatchAdapter(source, source.order if isinstance(source, IndexedAdapter) else self.order),
            )
            epochs = EpochSteps(iterator)
            self.strategy.check_alike({"the number of steps of an epoch": epochs.steps})
            if self._awaits_position:
                self.data_position = DataPosition(epochs, self.callbacks)
                self._awaits_position = False
            if self._can_group(iterator):
                self._group_steps(epochs, self.data_position)
        fixed = count_static_rows(self.model)
        if fixed is not None and self.strategy.num_replicas_in_sync > 1:
            batch = as_global_batch(data_batch if iterator is None else read_first_batch(iterator))
            if {len(part) for part in split_evenly(batch.rows, self.strategy.num_replicas_in_sync)} == {fixed}:
                iterator = None
                data_batch = batch.shapes(fixed)  # the fixed rows are a replica's; else they are the global batch's
        with (
            self.strategy.acting(),
            explain_step_errors(self.model, data_batch, self.strategy.num_replicas_in_sync, self.is_eager),
            hide_masks(),
        ):
            self._build_model(iterator, data_batch)
        self.strategy.agree(list_model_variables(self.model))

    def _build_model(self, iterator: KerasObject, data_batch: UserBatch) -> None:
        by_keras = get_class_method(self.model, "build_by")
        if not (self.is_eager and needs_batch(self.model)):
            return by_keras(iterator=iterator, data_batch=data_batch)
        batch = data_batch if iterator is None else read_first_batch(iterator)
        try:
            by_keras(data_batch=batch)
        except Exception:  # Keras builds without values, which code that is not compiled may need
            build_by_calling(self.model, as_global_batch(batch).tree())

    def _group_steps(self, epochs: EpochSteps, data_position: DataPosition | None) -> None:
        """Let the loop take several steps in one call."""
        steps_per_call = StepsPerCall()

        def count_steps(step: int) -> int:
            most = data_position.most_steps(step) if data_position is not None else None
            return steps_per_call.steps() if most is None else min(steps_per_call.steps(), most)

        epochs.group_steps(count_steps, lambda batches, count: BatchGroup(batches, count, steps_per_call))

    def note_trained(self, batches: list[GlobalBatch], logs: Logs) -> None:
        """Note that a step was trained on these batches, and returned these logs."""
        position = batches[-1].position
        if self.data_position is None:
            if position is not None:
                self.order.note_pass(position[0])
            return
        if position is not None and self.data_position.order is not self.order and position[1] < len(batches):
            self.order.passes += 1  # this pass went over a dataset with its own order
        self.data_position.note_trained(batches, logs)

    def repeat_logs(self) -> Logs:
        """Return the logs of the last step again: an earlier call of fit stopped at the end of this epoch."""
        return self.data_position.repeat_logs() if self.data_position is not None else {}

    def take_state(self, purge_model_variables: bool = False, **groups: bool) -> State:
        """Return the model's state for a loop of Keras."""
        if self.data_position is not None and purge_model_variables and groups.get("optimizer_variables"):
            self.data_position.run_before_step()
        return take_model_state(self.model, purge_model_variables, **groups)

    # Several steps in one call.

    @contextlib.contextmanager
    def _allow_groups(self, method: str, mode: str, args: Arguments, kwargs: Keywords) -> Iterator[None]:
        """Allow groups of batches during a call of fit or evaluate, unless something could see the difference."""
        callbacks = read_argument(method, "callbacks", args, kwargs)
        outer = self._are_groups_allowed
        seen = overrides_method(self.model, method) or has_batch_callbacks(callbacks, mode)
        self._are_groups_allowed = not seen
        try:
            yield
        finally:
            self._are_groups_allowed = outer

    def _can_group(self, iterator: KerasObject) -> bool:
        """Return whether one call may take several batches. Not of a generator, which may look at the model after each batch."""
        stream = isinstance(iterator.data_adapter.source, GeneratorDataAdapter)
        one_by_one = stream or self.model.steps_per_execution != 1 or self.is_eager
        return self._are_groups_allowed and not one_by_one and has_known_length(iterator)

    def _call_and_restore(self, name: str, *args: UserObject, **kwargs: UserObject) -> UserObject:
        """Call a method of Keras. However it ends, the model then has its weights, and the devices have released their copies."""
        self.model.jax_state_sync()  # the caller may be a callback of fit
        try:
            return get_class_method(self.model, name)(*args, **kwargs)
        finally:
            release_state(self.model)
            for function in (self.model.test_function, self.model.predict_function):
                if function is not None:
                    function.forget()
