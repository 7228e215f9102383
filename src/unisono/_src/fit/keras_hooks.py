"""The functions behind `fit`, `evaluate` and `predict` of a model that was made in a strategy's scope.

Keras' loops stay Keras': they call, for each batch, what `make_train_function` and its two siblings made. Those are set on
the model, on this one object, together with what gives the loops our data adapter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from unisono._src import keras_private
from unisono._src.checks import refusals
from unisono._src.checks.jax_errors import explained
from unisono._src.data.global_batch import global_batch
from unisono._src.data.keras_adapter import GlobalBatches
from unisono._src.data.row_order import Order, draw_seed
from unisono._src.distributed.dataset import DistributedDataset
from unisono._src.distributed.per_replica import arrays_of
from unisono._src.distributed.replicated import check_not_tensorflows
from unisono._src.fit.data_position import Course, position_of
from unisono._src.fit.steps_per_call import Group, Pace
from unisono._src.placement import split_evenly
from unisono._src.replica.compiled_model import ReplicaFunctions
from unisono._src.step.eager import EagerStep
from unisono._src.step.predict import PredictStep
from unisono._src.step.replica_sums import INPUTS
from unisono._src.step.step import Step
from unisono._src.xla import tracing

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
"""Arguments of fit by which processes that train together take the same steps."""


def belongs_to(model: Any) -> Any | None:
    """The strategy in whose scope the model was made; None outside."""
    bond = keras_private.bond_of(model)
    return None if bond is None else bond.strategy


class Bond:
    """Ties one model to its strategy, and holds what the model's training needs between two calls."""

    def __init__(self, model: Any, strategy: Any) -> None:
        self.model = model
        self.strategy = strategy
        self.course: Course | None = None
        """Of the call of fit that is under way."""
        self.callbacks: list[Any] = []
        """Of this call of fit."""
        self._begins = False
        """Whether a call of fit is under way that has no course yet."""
        self.ran_eagerly = False
        """Whether steps that were not compiled have changed the model."""
        self._order: Order | None = None
        self._groups = False
        keras_private.set_on(model, keras_private.BOND, self)
        for ours, theirs in keras_private.METHODS.items():
            keras_private.set_on(model, theirs, in_place_of(getattr(type(model), theirs), getattr(self, ours)))

    @property
    def is_eager(self) -> bool:
        """Whether steps are not to be compiled."""
        return keras_private.eager_option(self.model) is not None or tracing.is_disabled()

    @property
    def is_promised(self) -> bool:
        """Whether the bits of the model are those of every run of its program."""
        return self.strategy.deterministic and not self.ran_eagerly and not self.is_eager

    @property
    def order(self) -> Order:
        """Where the model is in its data. The seed is drawn when it is first needed."""
        if self._order is None:
            self._order = Order(draw_seed())
        return self._order

    # What Keras calls on the model in place of its own methods.

    def compile(self, *args: Any, **kwargs: Any) -> None:
        keras_private.of_class(self.model, "compile")(*args, **kwargs)
        refusals.check_compiled(self.model, self.strategy)

    def make_train_function(self, force: bool = False) -> None:
        self.strategy.check_use(self.model)
        if self.model.train_function is not None and self._has_other_variables(self.model.train_function):
            refusals.check_still_trainable(self.model, training=True)
        if self.model.train_function is None or force or self._is_run_otherwise(self.model.train_function):
            self.strategy.announce()
            make = functools.partial(self._step, training=True)
            self.model.train_function = self._several(make, keras_private.STATE_NAMES, self._trained)

    def make_test_function(self, force: bool = False) -> None:
        if self.model.test_function is None or force or self._is_other(self.model.test_function):
            make = functools.partial(self._step, training=False)
            self.model.test_function = self._several(make, keras_private.WITHOUT_OPTIMIZER)

    def make_predict_function(self, force: bool = False) -> None:
        if self.model.predict_function is None or force or self._is_other(self.model.predict_function):
            self.model.predict_function = self._several(self._predict_step, INPUTS)

    def _is_other(self, function: Any) -> bool:
        return self._has_other_variables(function) or self._is_run_otherwise(function)

    def _is_run_otherwise(self, function: Any) -> bool:
        """Whether it was made to be compiled, and is not to be now, or the other way round."""
        return function.eager != self.is_eager

    def _has_other_variables(self, function: Any) -> bool:
        return function.variables != keras_private.ids_of_variables(self.model)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._read_by_keras("fit", args, kwargs)
        args, kwargs = keras_private.with_last(self.model, args, kwargs)
        if not self.strategy.writes:
            args, kwargs = keras_private.without_writing("fit", args, kwargs)
        callbacks = keras_private.listed(keras_private.argument("fit", "callbacks", args, kwargs))
        refusals.check_callbacks(callbacks)
        self.strategy.check_alike({f"{name}= of fit": keras_private.argument("fit", name, args, kwargs) for name in ALIKE})
        self.callbacks, self._begins = callbacks, True
        try:
            with self._grouping("fit", "train", args, kwargs):
                return keras_private.of_class(self.model, "fit")(*args, **kwargs)
        finally:
            callbacks, self.callbacks = self.callbacks, []
            self.course, self._begins = None, False
            keras_private.forget_first_epoch(self.model)
            keras_private.fit_is_over(callbacks)  # which may raise a signal again

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._read_by_keras("evaluate", args, kwargs)
        if not self.strategy.writes:
            args, kwargs = keras_private.without_writing("evaluate", args, kwargs)
        with self._grouping("evaluate", "test", args, kwargs):
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
        (x,), _ = self._read_by_keras("predict", (x,), {})
        source = keras_private.adapter_of(x, batch_size, steps)
        refusals.check_source(source, steps)
        if keras_private.is_built(self.model):  # else Keras builds it on the first batch, as the source gives it
            source = GlobalBatches(source, self.order)
        if not self.strategy.writes:
            verbose, callbacks = 0, keras_private.that_do_not_write(callbacks)
        return self._restoring("predict", source, batch_size, verbose, steps, callbacks, **more)

    def _read_by_keras(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with adapters in place of distributed datasets."""

        def read(value: Any) -> Any:
            check_not_tensorflows(value, f"model.{method}")
            if not isinstance(value, DistributedDataset):
                return value
            refusals.check_replicas(value.replicas, self.strategy)
            return value.adapter

        return tuple(map(read, args)), {name: read(value) for name, value in kwargs.items()}

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring("train_on_batch", *map(arrays_of, args), **{name: arrays_of(of) for name, of in kwargs.items()})

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring("test_on_batch", *map(arrays_of, args), **{name: arrays_of(of) for name, of in kwargs.items()})

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._restoring("predict_on_batch", *map(arrays_of, args), **{name: arrays_of(of) for name, of in kwargs.items()})

    def build_by(self, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None and not isinstance(iterator.data_adapter, GlobalBatches):
            refusals.check_source(iterator.data_adapter, iterator.steps_per_epoch)
            keras_private.replace_adapter(iterator, lambda source: GlobalBatches(source, getattr(source, "order", self.order)))
            epochs = keras_private.Epochs(iterator)
            self.strategy.check_alike({"the number of steps of an epoch": epochs.steps})
            if self._begins:
                self.course, self._begins = Course(epochs, self.callbacks), False
            if self._may_group(iterator):
                self._in_groups(epochs, self.course)
        fixed = keras_private.static_rows(self.model)
        if fixed is not None and self.strategy.num_replicas_in_sync > 1:
            batch = global_batch(data_batch if iterator is None else keras_private.first_batch(iterator))
            if {len(part) for part in split_evenly(batch.rows, self.strategy.num_replicas_in_sync)} == {fixed}:
                iterator, data_batch = None, batch.shapes(fixed)  # meant for a replica; else for all of them together
        with (
            self.strategy.acting(),
            explained(self.model, data_batch, self.strategy.num_replicas_in_sync, self.is_eager),
            keras_private.fresh_masks(),
        ):
            self._build(iterator, data_batch)
        self.strategy.agree(keras_private.all_variables(self.model))

    def _build(self, iterator: Any, data_batch: Any) -> None:
        by_keras = keras_private.of_class(self.model, "build_by")
        if not (self.is_eager and keras_private.needs_batch(self.model)):
            return by_keras(iterator=iterator, data_batch=data_batch)
        batch = data_batch if iterator is None else keras_private.first_batch(iterator)
        try:
            by_keras(data_batch=batch)
        except Exception:  # Keras builds without values, and code that is not compiled may ask for some
            keras_private.build_by_calling(self.model, global_batch(batch).tree())

    def _in_groups(self, epochs: keras_private.Epochs, course: Course | None) -> None:
        pace = Pace()

        def size(step: int) -> int:
            most = course.most_steps(step) if course is not None else None
            return pace.steps() if most is None else min(pace.steps(), most)

        epochs.in_groups(size, lambda batches, count: Group(batches, count, pace))

    def _trained(self, batches: list[Any], logs: Any) -> None:
        position = position_of(batches[-1])
        if self.course is None:
            if position is not None:
                self.order.trained_on(position[0])
            return
        if position is not None and self.course.order is not self.order and position[1] < len(batches):
            self.order.passes += 1  # over a dataset with an order of its own
        self.course.trained(batches, position, logs)

    def take_state(self, purge_model_variables: bool = False, **groups: bool) -> tuple[list[Any], ...]:
        if self.course is not None and purge_model_variables and groups.get("optimizer_variables"):
            self.course.before_step()
        return keras_private.take_state(self.model, purge_model_variables, **groups)

    # Several steps in a call.

    @contextlib.contextmanager
    def _grouping(self, method: str, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """For the call, batches may be taken in groups, unless something could see the difference."""
        callbacks, outer = keras_private.argument(method, "callbacks", args, kwargs), self._groups
        seen = keras_private.overrides(self.model, method) or keras_private.wants_batches(callbacks, keras_private.HOOKS[mode])
        self._groups = not seen
        try:
            yield
        finally:
            self._groups = outer

    def _may_group(self, iterator: Any) -> bool:
        """A generator may look at what its batches have done to the model."""
        stream = isinstance(iterator.data_adapter.source, keras_private.GeneratorDataAdapter)
        one_by_one = stream or self.model.steps_per_execution != 1 or self.is_eager
        return self._groups and not one_by_one and keras_private.has_length(iterator)

    # The steps.

    def _step(self, training: bool) -> Step | EagerStep:
        functions = self._functions("train" if training else "evaluate")
        if functions.eager:
            return EagerStep(functions, *self.strategy.on_lead)
        return Step(functions.mode, functions, self.strategy.placement, self.strategy.exchange)

    def _predict_step(self) -> PredictStep:
        functions = self._functions("predict")
        self.strategy.agree(keras_private.all_variables(self.model))
        where = self.strategy.on_lead if functions.eager else (self.strategy.placement, self.strategy.exchange)
        return PredictStep(functions, *where)

    def _functions(self, mode: str) -> ReplicaFunctions:
        refusals.check_model(self.model, self.strategy)
        eager = self.is_eager
        if eager:
            option = keras_private.eager_option(self.model)
            how = f"is compiled with {option}" if option else "runs under jax.disable_jit"
            self.strategy.say_that_it_is_slow(f"The model {self.model.name!r} {how}")
        return ReplicaFunctions(self.model, mode, self.strategy.num_replicas_in_sync, eager)

    def _several(
        self,
        make: Callable[[], Step | EagerStep | PredictStep],
        state_names: tuple[str, ...],
        trained: Callable[[list[Any], Any], None] | None = None,
    ) -> Callable[..., Any]:
        """What Keras calls for each execution: one step, or as many as `steps_per_execution` says."""
        current, sizes, eager = make(), None, self.is_eager

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            nonlocal current, sizes
            if isinstance(iterator, keras_private.NoStep):
                return self.course.nothing_left() if self.course is not None else {}, state
            if sizes not in (None, tuple(map(len, state))):
                refusals.check_still_trainable(self.model, trained is not None)
                current = make()
            sizes, batches, error = tuple(map(len, state)), [next(iterator)], None
            group = iterator if isinstance(iterator, Group) else None
            try:
                for batch in itertools.islice(iterator, (group.count if group else self.model.steps_per_execution) - 1):
                    batches.append(batch)
            except Exception as e:  # what came before it is trained on
                error = e
            if trained is not None:
                refusals.check_attributes(self.model.optimizer)
            try:
                with self.strategy.acting(), explained(self.model, batches[0], self.strategy.num_replicas_in_sync, eager):
                    logs, state = current(state, batches)
            finally:
                self.ran_eagerly |= eager and trained is not None
                if current.state:
                    keras_private.hold_state(self.model, state_names, current.state)
            if trained is not None:
                trained(batches, logs)
            if error is not None:
                raise error
            return group.pace.called(len(batches), logs, current.says_more) if group else logs, state

        function.forget = lambda: current.forget()  # pyright: ignore[reportFunctionMemberAccess]
        function.eager = eager  # pyright: ignore[reportFunctionMemberAccess]
        function.variables = keras_private.ids_of_variables(self.model)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    def _restoring(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Whatever stops the loop, the model has its weights afterwards, and the devices let go of their copies."""
        self.model.jax_state_sync()  # a callback of fit may have called us
        try:
            return keras_private.of_class(self.model, name)(*args, **kwargs)
        finally:
            keras_private.drop_state(self.model)
            for function in (self.model.test_function, self.model.predict_function):
                if function is not None:
                    function.forget()


def in_place_of(method: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` under the name, signature and documentation of Keras' `method`."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return function
