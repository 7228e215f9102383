"""The functions behind `fit`, `evaluate` and `predict` of a model that was made in a strategy's scope.

Keras' loops stay Keras': they call, for each batch, what `make_train_function` and its two siblings made. Those are set on
the model, on this one object, together with what gives the loops our data adapter.
"""

from __future__ import annotations

import functools
import itertools
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
        for ours, theirs in keras_seam.METHODS.items():
            keras_seam.set_on(model, theirs, in_place_of(getattr(type(model), theirs), getattr(self, ours)))

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
            self.strategy.announce()
            self.model.train_function = self._several(lambda: self._step(training=True), trained_on=self.order.trained_on)

    def make_test_function(self, force: bool = False) -> None:
        if self.model.test_function is None or force:
            self.model.test_function = self._several(lambda: self._step(training=False))

    def make_predict_function(self, force: bool = False) -> None:
        if self.model.predict_function is None or force:
            self.model.predict_function = self._several(self._predict_step, together=joined)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring("evaluate", *args, **kwargs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        **more: Any,
    ) -> Any:
        source = keras_seam.adapter_of(x, batch_size, steps)
        refusals.check_source(source, steps)
        if keras_seam.is_built(self.model):  # else Keras builds it on the first batch, as the source gives it
            source = GlobalBatches(source, self.strategy.placement, self.order)
        return self._restoring("predict", source, batch_size, verbose, steps, callbacks, **more)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring("train_on_batch", *args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring("test_on_batch", *args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring("predict_on_batch", *args, **kwargs)

    def build_by(self, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None and not isinstance(iterator.data_adapter, GlobalBatches):
            refusals.check_source(iterator.data_adapter, iterator.steps_per_epoch)
            keras_seam.replace_adapter(iterator, lambda source: GlobalBatches(source, self.strategy.placement, self.order))
        fixed = keras_seam.static_rows(self.model)
        if fixed is not None and self.strategy.num_replicas_in_sync > 1:
            batch = data_batch if iterator is None else keras_seam.first_batch(iterator)
            iterator, data_batch = None, self._rows_of_a_replica(batch, fixed)
        with explained(self.model, data_batch):
            keras_seam.of_class(self.model, "build_by")(iterator=iterator, data_batch=data_batch)

    def _rows_of_a_replica(self, batch: Any, fixed: int) -> Any:
        """What one replica sees of a batch, in shapes, where the model's inputs fix its rows."""
        parts = divided(batch, self.strategy.placement)
        refusals.check_static_rows(fixed, parts.total_rows, self.strategy.num_replicas_in_sync, parts.rows)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), parts.shards[0])

    def take_state(self, purge_model_variables: bool = False, **groups: bool) -> tuple[list[Any], ...]:
        return keras_seam.take_state(self.model, purge_model_variables, **groups)

    # The steps.

    def _step(self, training: bool) -> Step:
        refusals.check_model(self.model, self.strategy)
        return Step(self.model, self.strategy.placement, self.strategy.exchange, training)

    def _predict_step(self) -> PredictStep:
        refusals.check_model(self.model, self.strategy)
        return PredictStep(self.model, self.strategy.placement, self.strategy.exchange)

    def _several(
        self,
        make: Callable[[], Step | PredictStep],
        trained_on: Callable[[int], None] | None = None,
        together: Callable[[list[Any]], Any] = lambda logs: logs[-1],
    ) -> Callable[..., Any]:
        """What Keras calls for each execution: one step, or as many as `steps_per_execution` says. `together` makes one of
        what several steps return."""
        current, sizes = make(), None

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            nonlocal current, sizes
            if sizes not in (None, tuple(map(len, state))):
                refusals.check_still_trainable(self.model, trained_on is not None)
                current = make()
            sizes, logs = tuple(map(len, state)), []
            for batch in itertools.chain([next(iterator)], some(iterator, self.model.steps_per_execution - 1)):
                with explained(self.model, batch):
                    log, state = current(state, batch)
                logs.append(log)
                keras_seam.hold_state(self.model, current.state_names, state)
                position = position_of(batch)
                if trained_on is not None and position is not None:
                    trained_on(position[0])
            return together(logs), state

        function.forget = lambda: current.forget()  # pyright: ignore[reportFunctionMemberAccess]
        return function

    def _restoring(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Whatever stops the loop, the model has its weights afterwards, and the devices let go of their copies."""
        self.model.jax_state_sync()  # a callback of fit may have called us
        try:
            return keras_seam.of_class(self.model, name)(*args, **kwargs)
        finally:
            keras_seam.drop_state(self.model)
            for function in (self.model.test_function, self.model.predict_function):
                if function is not None:
                    function.forget()


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
