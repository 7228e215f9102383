"""The functions behind `fit`, `evaluate` and `predict` of a model that was made in a strategy's scope.

Keras' loops stay Keras': they call, for each batch, what `make_train_function` and its two siblings made. Those are set on
the model, on this one object, together with what gives the loops our data adapter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from unisono import keras_seam, refusals
from unisono.data.adapter import GlobalBatches
from unisono.data.division import divided
from unisono.data.order import Order, draw_seed
from unisono.errors import explained
from unisono.step.predict import PredictStep, joined
from unisono.step.step import Step

ATTRIBUTE = "_unisono"


def belongs_to(model: Any) -> Any | None:
    """The strategy in whose scope the model was made; None outside."""
    bond = getattr(model, ATTRIBUTE, None)
    return None if bond is None else bond.strategy


class Bond:
    """Ties one model to its strategy, and holds what the model's training needs between two calls."""

    def __init__(self, model: Any, strategy: Any) -> None:
        self.model = model
        self.strategy = strategy
        self._order: Order | None = None
        keras_seam.set_on(model, ATTRIBUTE, self)
        for name in (
            "compile", "make_train_function", "make_test_function", "make_predict_function",
            "evaluate", "predict", "_symbolic_build", "_get_jax_state",
        ):  # fmt: skip
            keras_seam.set_on(model, name, in_place_of(getattr(type(model), name), getattr(self, name.strip("_"))))

    @property
    def order(self) -> Order:
        """Where the model is in its data. The seed is drawn when it is first needed."""
        if self._order is None:
            self._order = Order(draw_seed())
        return self._order

    # What Keras calls on the model in place of its own methods.

    def compile(self, *args: Any, **kwargs: Any) -> None:
        keras_seam.of_class(self.model, "compile")(*args, **kwargs)
        refusals.check_compiled(self.model, self.strategy)

    def make_train_function(self, force: bool = False) -> None:
        self.strategy.check_use(self.model)
        if self.model.train_function is None or force:
            refusals.check_model(self.model, self.strategy)
            self.strategy.announce()
            step = Step(self.model, self.strategy.placement, self.strategy.exchange, training=True)
            self.model.train_function = self._several(step, trained_on=self.order.trained_on)

    def make_test_function(self, force: bool = False) -> None:
        if self.model.test_function is None or force:
            refusals.check_model(self.model, self.strategy)
            step = Step(self.model, self.strategy.placement, self.strategy.exchange, training=False)
            self.model.test_function = self._several(step)

    def make_predict_function(self, force: bool = False) -> None:
        if self.model.predict_function is None or force:
            refusals.check_model(self.model, self.strategy)
            step = PredictStep(self.model, self.strategy.placement)

            def predict(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
                outputs = [self._guarded(step, state, next(iterator))[0]]
                outputs += [self._guarded(step, state, batch)[0] for batch in some(iterator, self.model.steps_per_execution - 1)]
                return (outputs[0] if len(outputs) == 1 else joined(outputs)), state

            self.model.predict_function = predict

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring(keras_seam.of_class(self.model, "evaluate"), *args, **kwargs)

    def predict(self, x: Any, batch_size: int | None = None, verbose: Any = "auto", steps: int | None = None, **more: Any) -> Any:
        source = keras_seam.adapter_of(x, batch_size, steps)
        refusals.check_source(source, steps)
        if keras_seam.is_built(self.model):  # else Keras builds it on the first batch, as the source gives it
            source = GlobalBatches(source, self.strategy.placement, self.order)
        method = keras_seam.of_class(self.model, "predict")
        return self._restoring(method, source, batch_size=batch_size, verbose=verbose, steps=steps, **more)

    def symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None and not isinstance(iterator.data_adapter, GlobalBatches):
            refusals.check_source(iterator.data_adapter, iterator.steps_per_epoch)
            keras_seam.replace_adapter(iterator, lambda source: GlobalBatches(source, self.strategy.placement, self.order))
        fixed = keras_seam.static_rows(self.model)
        if fixed is not None and self.strategy.num_replicas_in_sync > 1:
            batch = data_batch if iterator is None else keras_seam.first_batch(iterator)
            iterator, data_batch = None, self._rows_of_a_replica(batch, fixed)
        with explained(self.model, data_batch):
            keras_seam.of_class(self.model, "_symbolic_build")(iterator=iterator, data_batch=data_batch)

    def _rows_of_a_replica(self, batch: Any, fixed: int) -> Any:
        """What one replica sees of a batch, in shapes, where the model's inputs fix its rows."""
        parts = divided(batch, self.strategy.placement)
        refusals.check_static_rows(fixed, parts.total_rows, self.strategy.num_replicas_in_sync, parts.rows)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), parts.shards[0])

    def get_jax_state(self, purge_model_variables: bool = False, **groups: bool) -> tuple[list[Any], ...]:
        return keras_seam.take_state(self.model, purge_model_variables, **groups)

    def _several(self, step: Any, trained_on: Callable[[int], None] | None = None) -> Callable[..., Any]:
        """What Keras calls for each execution: one step, or as many as `steps_per_execution` says."""

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            logs, state = self._guarded(step, state, next(iterator), trained_on)
            for batch in some(iterator, self.model.steps_per_execution - 1):
                logs, state = self._guarded(step, state, batch, trained_on)
            return logs, state

        return function

    def _guarded(self, step: Any, state: Any, batch: Any, trained_on: Callable[[int], None] | None = None) -> tuple[Any, Any]:
        with explained(self.model, batch):
            logs, state = step(state, batch)
        if hasattr(step, "state_names"):
            keras_seam.hold_state(self.model, step.state_names, state)
        position = position_of(batch)
        if trained_on is not None and position is not None:
            trained_on(position[0])
        return logs, state

    def _restoring(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Whatever stops the loop, the model has its weights afterwards."""
        try:
            return method(*args, **kwargs)
        finally:
            self.model.jax_state_sync()


def some(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Up to `count` items."""
    for _ in range(count):
        try:
            yield next(iterator)
        except StopIteration:
            return


def position_of(batch: Any) -> Any:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return getattr(leaves[0], "position", None)


def in_place_of(method: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` under the name, signature and documentation of Keras' `method`."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return function
