"""The methods that replace those of a Keras trainer.

They are set on a model that was made in a strategy's scope. Keras' loops stay as they are: for each batch they call what
`make_train_function` and its two siblings made. Our versions of these methods are set on the model, on this one object, together
with the methods that give the loops our data adapter.
"""

from __future__ import annotations

import inspect

import keras

from unisono._src.engine.state import State
from unisono._src.keras.checks import refusals
from unisono._src.keras.checks.jax_errors import explain_read_attributes
from unisono._src.keras.data.keras_source import UnsentBatches, as_source
from unisono._src.keras.data.source import Source
from unisono._src.keras.distributed.per_replica import read_global_arrays
from unisono._src.keras.distributed.replica_strategy import SCOPES, ReplicaStrategy
from unisono._src.keras.fit.bond import Bond
from unisono._src.keras.fit.call_arguments import (
    check_fit_arguments,
    put_keepers_last,
    read_argument,
    remove_writing_callbacks,
    replace_datasets,
    select_silent_callbacks,
)
from unisono._src.keras.fit.model_building import build_for_prediction, build_model
from unisono._src.keras.fit.step_function import StepFunction
from unisono._src.keras.fit.steps_per_call import BatchGrouping
from unisono._src.keras.private.callbacks import list_callbacks
from unisono._src.keras.private.data_adapters import is_call_of_fit, make_adapter, replace_adapter
from unisono._src.keras.private.epoch_steps import EpochSteps, is_controlled
from unisono._src.keras.private.models import get_class_method, is_built, overrides_method, release_state, replace_trainer_method
from unisono._src.keras.private.trainer_state import take_state as take_model_state
from unisono._src.keras.private.trainer_state import write_back_state
from unisono._src.typing import Arguments, KerasObject, Keywords, Logs, Outputs, UserBatch, UserObject


def bind_trainer(model: keras.Model, strategy: ReplicaStrategy) -> None:
    """Tie a model to a strategy, whose replicas then train it."""
    hooks = TrainerHooks(Bond(model, strategy))
    for name, method in inspect.getmembers(hooks, inspect.ismethod):
        if not name.startswith("_"):
            replace_trainer_method(model, name, method)


class TrainerHooks:
    """The methods that replace those of a model's class.

    Keras and users call them. Every public method replaces the one of its name.
    """

    def __init__(self, bond: Bond) -> None:
        self._bond = bond
        self._model = bond.model
        self._strategy = bond.strategy
        self._grouping = BatchGrouping(bond)

    def compile(self, *args: UserObject, **kwargs: UserObject) -> None:
        get_class_method(self._model, "compile")(*args, **kwargs)
        refusals.check_compile_options(self._model, self._strategy)

    def make_train_function(self, force: bool = False) -> None:
        refusals.check_model_scope(self._model, SCOPES.innermost)
        refusals.check_made_function(self._model, "train")
        function: StepFunction | None = self._model.train_function
        if function is not None and function.has_other_variables:
            refusals.check_changed_model(self._model, training=True)
        if function is None or force or function.has_other_mode:
            self._strategy.announce()
            self._model.train_function = StepFunction(self._bond, "train")

    def make_test_function(self, force: bool = False) -> None:
        refusals.check_made_function(self._model, "test")
        function: StepFunction | None = self._model.test_function
        if function is None or force or function.has_other_variables or function.has_other_mode:
            self._model.test_function = StepFunction(self._bond, "evaluate")

    def make_predict_function(self, force: bool = False) -> None:
        refusals.check_made_function(self._model, "predict")
        function: StepFunction | None = self._model.predict_function
        if function is None or force or function.has_other_variables or function.has_other_mode:
            self._model.predict_function = StepFunction(self._bond, "predict")

    def fit(self, *args: UserObject, **kwargs: UserObject) -> keras.callbacks.History:
        args, kwargs = replace_datasets(self._strategy, "fit", args, kwargs)
        args, kwargs = put_keepers_last(args, kwargs)
        refusals.check_tensorboard_callback(read_argument("fit", "callbacks", args, kwargs))
        if not self._strategy.writes:
            args, kwargs = remove_writing_callbacks("fit", args, kwargs)
        callbacks = list_callbacks(read_argument("fit", "callbacks", args, kwargs))
        refusals.check_backup_callbacks(callbacks)
        check_fit_arguments(self._strategy, args, kwargs)
        with self._bond.note_fit(callbacks), self._grouping.allow("fit", "train", args, kwargs), explain_read_attributes():
            return get_class_method(self._model, "fit")(*args, **kwargs)

    def evaluate(self, *args: UserObject, **kwargs: UserObject) -> Logs | list[float] | float:
        args, kwargs = replace_datasets(self._strategy, "evaluate", args, kwargs)
        refusals.check_tensorboard_callback(read_argument("evaluate", "callbacks", args, kwargs))
        if not self._strategy.writes:
            args, kwargs = remove_writing_callbacks("evaluate", args, kwargs)
        is_validation = is_call_of_fit(kwargs)
        with (
            self._grouping.allow("evaluate", "test", args, kwargs),
            self._bond.note_validation() if is_validation else self._bond.close_loops(),
        ):
            return self._call_and_restore("evaluate", *args, **kwargs)

    def predict(self, *args: UserObject, **kwargs: UserObject) -> Outputs:
        if overrides_method(self._model, "predict"):  # the class may take other arguments, and gives Keras others
            args, kwargs = replace_datasets(self._strategy, "predict", args, kwargs)
            return self._call_and_restore("predict", *args, **kwargs)
        return self._predict(*args, **kwargs)

    def _predict(
        self,
        x: UserObject,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: UserObject = None,
        **more: UserObject,
    ) -> Outputs:
        (x,), _ = replace_datasets(self._strategy, "predict", (x,), {})
        refusals.check_tensorboard_callback(callbacks)
        source = make_adapter(x, batch_size, steps)
        refusals.check_data_source(source, steps)
        if not is_built(self._model) and isinstance(source, Source):
            with source.order.keep_passes():
                batch = next(iter(source.get_numpy_iterator()))
            build_for_prediction(self._bond, batch)
        if is_built(self._model):  # else Keras builds it on the first batch, as the source gives it
            source = UnsentBatches(as_source(source, self._strategy.placement, self._bond.order), self._is_cut)
        if not self._strategy.writes:
            verbose = 0
            callbacks = select_silent_callbacks(callbacks)
        return self._call_and_restore("predict", source, batch_size, verbose, steps, callbacks, **more)

    def train_on_batch(self, *args: UserObject, **kwargs: UserObject) -> Logs | list[float] | float:
        return self._call_on_batch("train_on_batch", args, kwargs)

    def test_on_batch(self, *args: UserObject, **kwargs: UserObject) -> Logs | list[float] | float:
        return self._call_on_batch("test_on_batch", args, kwargs)

    def predict_on_batch(self, *args: UserObject, **kwargs: UserObject) -> Outputs:
        return self._call_on_batch("predict_on_batch", args, kwargs)

    def build_by(self, iterator: KerasObject = None, data_batch: UserBatch = None) -> None:
        """Build the model by a first batch. Our adapter is put into the iterator of a loop that begins."""
        if iterator is None:
            build_model(self._bond, None, data_batch)
            return
        if not is_controlled(iterator):
            self._adapt_loop(iterator)
        with iterator.data_adapter.order.keep_passes():
            build_model(self._bond, iterator, data_batch)

    def take_state(self, purge_model_variables: bool = False, **groups: bool) -> State:
        """Take the model's state for a loop of Keras."""
        return take_model_state(self._model, purge_model_variables, **groups)

    @property
    def _is_cut(self) -> bool:
        """Whether several replicas share each batch."""
        return self._strategy.num_replicas_in_sync > 1

    def _adapt_loop(self, iterator: KerasObject) -> None:
        """Put our adapter into the iterator of a loop that begins."""
        refusals.check_data_source(iterator.data_adapter, iterator.steps_per_epoch)
        epochs = EpochSteps(iterator)
        replace_adapter(
            iterator, lambda adapter: as_source(adapter, self._strategy.placement, self._bond.order, epochs.are_passes)
        )
        self._strategy.check_alike({"the number of steps of an epoch": epochs.steps})
        self._bond.note_epochs(epochs)
        self._grouping.group_steps(iterator, epochs)

    def _call_on_batch(self, name: str, args: Arguments, kwargs: Keywords) -> UserObject:
        """Call a method of Keras on one batch of global arrays. They take the place of shards."""
        arrays = {argument: read_global_arrays(value) for argument, value in kwargs.items()}
        return self._call_and_restore(name, *map(read_global_arrays, args), **arrays)

    def _call_and_restore(self, name: str, *args: UserObject, **kwargs: UserObject) -> UserObject:
        """Call a method of Keras, and give the model its weights back.

        However it ends, the devices then have released their copies.
        """
        write_back_state(self._model)  # the caller may be a callback of fit
        try:
            with explain_read_attributes():
                return get_class_method(self._model, name)(*args, **kwargs)
        finally:
            release_state(self._model)
            for function in (self._model.test_function, self._model.predict_function):
                if function is not None:
                    function.forget()
