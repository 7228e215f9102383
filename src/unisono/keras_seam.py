"""Everything private in Keras that Unisono leans on: nothing else in the package touches an underscored name of Keras.

Checked with Keras 3.15.0 and 3.15.1 on the JAX backend; a strategy refuses others by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras.src import backend
from keras.src import utils as keras_utils
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.callbacks.callback_list import CallbackList
from keras.src.layers.layer import Layer
from keras.src.losses.loss import apply_mask, reduce_weighted_values, squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer
from keras.src.trainers import data_adapters
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    data_adapter,
    data_adapter_utils,
    get_data_adapter,
    py_dataset_adapter,
)
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.trainers.trainer import Trainer
from keras.src.utils.rng_utils import get_random_seed
from keras.src.utils.traceback_utils import is_traceback_filtering_enabled

__all__ = [
    "ArrayDataAdapter",
    "CallbackList",
    "CompileLoss",
    "DataAdapter",
    "EpochIterator",
    "GeneratorDataAdapter",
    "LossScaleOptimizer",
    "PyDatasetAdapter",
    "TFDatasetAdapter",
    "Trainer",
    "apply_mask",
    "get_random_seed",
    "is_traceback_filtering_enabled",
    "reduce_weighted_values",
    "squeeze_or_expand_to_same_rank",
    "unpack",
]

CHECKED = ("3.15.0", "3.15.1")

ArrayDataAdapter = array_data_adapter.ArrayDataAdapter
DataAdapter = data_adapter.DataAdapter
PyDatasetAdapter = py_dataset_adapter.PyDatasetAdapter
get_keras_mask = backend.get_keras_mask
unpack = data_adapter_utils.unpack_x_y_sample_weight

METHODS = {
    "compile": "compile",
    "make_train_function": "make_train_function",
    "make_test_function": "make_test_function",
    "make_predict_function": "make_predict_function",
    "fit": "fit",
    "evaluate": "evaluate",
    "predict": "predict",
    "train_on_batch": "train_on_batch",
    "test_on_batch": "test_on_batch",
    "predict_on_batch": "predict_on_batch",
    "build_by": "_symbolic_build",
    "take_state": "_get_jax_state",
}
"""What is set on a model of a scope: our names for methods of Keras' JAX trainer."""

BOND = "_unisono"
"""The attribute by which a model of a scope knows what ties it to its strategy."""

State = tuple[list[Any], ...]
STATE_NAMES = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
WITHOUT_OPTIMIZER = tuple(name for name in STATE_NAMES if name != "optimizer_variables")


def check_version() -> None:
    if keras.__version__ not in CHECKED:
        raise ImportError(
            f"Unisono drives parts of Keras that are private, and was checked with keras {' and '.join(CHECKED)}; "
            f"this is keras {keras.__version__}. Install keras=={CHECKED[-1]}."
        )


# --- models of a scope ------------------------------------------------------------------------------------------------


class Watch:
    """While it is entered, by however many threads: calls `made(thing)` for each layer, optimizer, metric and variable made,
    `model_made(model)` for each model, and `model_used(model)` before a model is compiled or trained. Keras' classes are the stock
    objects before and after."""

    def __init__(self, made: Callable[[Any], None], model_made: Callable[[Any], None], model_used: Callable[[Any], None]) -> None:
        self._made = made
        self._model_made = model_made
        self._used = model_used
        self._entered = 0
        self._lock = threading.Lock()
        self._stock: dict[tuple[type, str], Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._patch()

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                for (of, name), stock in self._stock.items():
                    setattr(of, name, stock)
                self._stock = {}

    def _patch(self) -> None:
        self._replace(JAXTrainer, "__init__", after=self._model_made)
        for of in (BaseOptimizer, keras.metrics.Metric, keras.Variable):
            self._replace(of, "__init__", after=self._made)
        self._watch_layers()
        self._replace(Trainer, "compile", before=self._used)
        self._replace(JAXTrainer, "make_train_function", before=self._used)

    def _watch_layers(self) -> None:
        """By `__new__`: Keras reads the arguments of `__init__` to know how to save a layer."""
        stock, made = Layer.__dict__["__new__"], self._made
        self._stock[Layer, "__new__"] = stock

        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            layer = stock(cls, *args, **kwargs)
            made(layer)
            return layer

        Layer.__new__ = staticmethod(__new__)

    def _replace(self, of: type, name: str, before: Callable[[Any], None] | None = None, after: Any = None) -> None:
        stock = self._stock[of, name] = getattr(of, name)

        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(self)
            result = stock(self, *args, **kwargs)
            if after is not None:
                after(self)
            return result

        setattr(of, name, method)


def set_on(model: Any, name: str, value: Any) -> None:
    """An attribute of this one model, unseen by Keras' tracking of layers and variables."""
    object.__setattr__(model, name, value)


def bond_of(model: Any) -> Any | None:
    """What ties the model to the strategy in whose scope it was made; None outside."""
    return getattr(model, BOND, None)


def of_class(model: Any, name: str) -> Callable[..., Any]:
    """The method of the model's class, by our name, behind one that was set on the model."""
    return getattr(type(model), METHODS[name]).__get__(model)


def drop_state(model: Any) -> None:
    """The end of a loop, however it ended: the variables hold the state again, and nothing else does."""
    model.jax_state_sync()
    set_on(model, "_jax_state", None)


def layers_of(model: Any) -> list[Any]:
    return list(model._flatten_layers())


def is_built(model: Any) -> bool:
    return all(layer.built for layer in layers_of(model))


def overrides(model: Any, method: str) -> bool:
    """Whether the model's class has a method of its own in place of Keras' trainer's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


# --- the state that Keras' loops hold ---------------------------------------------------------------------------------


def hold_state(model: Any, names: tuple[str, ...], state: State) -> None:
    """Makes `state` what the model goes back to when a callback looks or the loop ends, however it ends."""
    set_on(model, "_jax_state", dict(zip(names, state, strict=True)))
    set_on(model, "_jax_state_synced", False)


def take_state(model: Any, purge: bool, **groups: bool) -> State:
    """The model's state as lists of arrays, as Keras takes it; but at no moment is it nowhere.

    Keras empties the variables first: what interrupts it there leaves a model without weights.
    """
    names = [name for name in STATE_NAMES if groups.get(name)]
    state = tuple([v.value for v in variables_of(model)[name]] for name in names)
    if purge:
        model._jax_state = dict(zip(names, state, strict=True))
        model._jax_state_synced = False
        model._purge_model_variables(**groups)
    return state


def variables_of(model: Any) -> dict[str, list[Any]]:
    optimizer = getattr(model, "optimizer", None)
    return dict(
        zip(
            STATE_NAMES,
            (
                model.trainable_variables,
                model.non_trainable_variables,
                optimizer.variables if optimizer is not None else [],
                model.metrics_variables,
            ),
            strict=True,
        )
    )


def current_values(model: Any, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """The newest values of the model's variables, also in a callback, while a loop holds them outside the model."""
    held = model._jax_state if getattr(model, "_jax_state", None) and not model._jax_state_synced else {}
    variables = variables_of(model)
    return {name: list(held[name]) if held.get(name) else [v.value for v in variables[name]] for name in names}


def holds_value(variable: Any) -> bool:
    """False while a loop of Keras holds the variable's value outside of it."""
    return variable._value is not None


def stateless_scope() -> Any:
    """The innermost StatelessScope around this line, if there is one."""
    return backend.get_stateless_scope() if backend.in_stateless_scope() else None


def raw_value(variable: Any) -> Any:
    """The variable's array, in the variable's dtype."""
    return variable._value


def set_raw_value(variable: Any, value: Any) -> None:
    """Takes an array that was computed from the variable's own, of its shape and dtype."""
    variable._value = value


class RecordingScope(keras.StatelessScope):
    """A StatelessScope that remembers which variables were assigned, also those that it was not told of."""

    def __init__(self, state_mapping: list[tuple[Any, Any]], **options: Any) -> None:
        super().__init__(state_mapping=state_mapping, **options)
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


class ReadingScope(RecordingScope):
    """One that also remembers which variables were read."""

    def __init__(self, state_mapping: Sequence[tuple[Any, Any]] = (), **options: Any) -> None:
        super().__init__(state_mapping=list(state_mapping), **options)
        self.read: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


# --- what replica code calls ------------------------------------------------------------------------------------------


Method = Callable[..., Any]

_replacing = threading.RLock()


@contextlib.contextmanager
def replaced(methods: Mapping[str, Callable[[Method], Method]]) -> Iterator[None]:
    """For the block and in this thread alone, calls of Keras' methods, by our names in `CALLS`, go to what `methods` makes of
    them."""
    thread = threading.get_ident()

    def in_place_of(stock: Method, ours: Method) -> Method:
        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (ours if threading.get_ident() == thread else stock)(self, *args, **kwargs)

        return method

    with _replacing:
        stocks = [(of, name, of.__dict__[name], wrap) for call, wrap in methods.items() for of, name in CALLS[call]]
        for of, name, stock, wrap in stocks:
            setattr(of, name, in_place_of(stock, wrap(stock)))
        try:
            yield
        finally:
            for of, name, stock, _ in stocks:
                setattr(of, name, stock)


OPTIMIZERS = (BaseOptimizer, LossScaleOptimizer, MultiOptimizer)

CALLS: dict[str, list[tuple[type, str]]] = {
    "apply": [(of, "apply") for of in OPTIMIZERS],
    "stateless_apply": [(of, "stateless_apply") for of in OPTIMIZERS if "stateless_apply" in of.__dict__],
    "scale_loss": [(of, "scale_loss") for of in OPTIMIZERS if "scale_loss" in of.__dict__],
    "loss": [(keras.losses.Loss, "__call__")],
    "metric": [(keras.metrics.Metric, "__call__")],
    "mean": [(keras.metrics.Mean, "update_state")],
}
"""The calls that replica code makes of Keras and that mean something of their own there."""


def set_keras_mask(values: Any, mask: Any) -> None:
    backend.set_keras_mask(values, mask)


# --- optimizers -------------------------------------------------------------------------------------------------------


def dead_attributes(optimizer: Any) -> list[str]:
    """Attributes that somebody has set on an optimizer of Keras and that it does not have."""
    if not type(optimizer).__module__.startswith("keras."):
        return []
    known = _attributes.get(type(optimizer))
    if known is None:
        known = _attributes[type(optimizer)] = {name for of in type(optimizer).__mro__ for name in names_set_by(of)}
    return [name for name in vars(optimizer) if name not in known and not name.startswith("_")]


_attributes: dict[type, set[str]] = {}


def names_set_by(of: type) -> set[str]:
    """The names that the methods of a class use as attributes, and those of the class."""
    codes = [f.__code__ for f in vars(of).values() if isinstance(f, types.FunctionType)]
    return {name for code in codes for name in code.co_names} | set(vars(of))


def weights_of(optimizer: Any) -> list[Any]:
    """The variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def name_scope_of(optimizer: Any) -> Any:
    """In which the optimizer is built."""
    return backend.name_scope(optimizer.name, caller=optimizer)


def check_known(optimizer: Any, variables: list[Any]) -> None:
    """Raises, as Keras does, for variables that the optimizer was not built for."""
    optimizer._check_variables_are_known(variables)


def updated_by(optimizer: Any) -> set[int]:
    """The ids of the optimizer's own variables that an update changes: all but the learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return {id(v) for v in optimizer.variables if v is not getattr(inner, "_learning_rate", None)}


# --- losses and metrics of compile() ----------------------------------------------------------------------------------


def loss_terms(model: Any) -> list[Any]:
    """The losses of compile(), one for each output that has one, as (path, loss, weight, name).

    None where a `compute_loss` of the model's own never asks for them: Keras builds them when they are first called.
    """
    whole = model._compile_loss
    return list(whole._flat_losses) if whole is not None and whole.built else []


def term_trackers(model: Any) -> list[Any]:
    """The metrics that follow each loss term, where there is more than one."""
    whole = model._compile_loss
    return [] if whole is None else list(whole.metrics)


@contextlib.contextmanager
def other_losses(model: Any, losses: list[Callable[..., Any]]) -> Iterator[None]:
    """Puts `losses` in the places of the model's own, inside Keras' matching of structures, and stops their trackers."""
    whole = model._compile_loss
    if whole is None or not whole.built:
        yield
        return
    twin = object.__new__(type(whole))  # not copy.copy: Keras' objects copy themselves by saving
    twin.__dict__.update(whole.__dict__)
    terms = [term._replace(loss=loss) for term, loss in zip(whole._flat_losses, losses, strict=True)]
    object.__setattr__(twin, "_flat_losses", terms)
    object.__setattr__(twin, "_metrics", [None] * len(terms) if len(terms) > 1 else [])
    object.__setattr__(model, "_compile_loss", twin)
    try:
        yield
    finally:
        object.__setattr__(model, "_compile_loss", whole)


def compiled_loss(model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The weighted sum of the loss terms of compile(); None without any."""
    return None if model._compile_loss is None else model._compile_loss(y, y_pred, sample_weight)


def computed_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    """What the model's own `compute_loss` returns."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def call_model(model: Any, x: Any, training: bool) -> Any:
    """The forward pass of a training step, inside a scope that holds the state.

    As Keras' own, but for one thing: layers that cast nothing by themselves (Embedding) add up their gradients in float32 in mixed
    precision, as they do where a loop calls `model(x)`.
    """
    forget_losses(model)
    mixed = model.compute_dtype != model.variable_dtype and backend.is_float_dtype(model.compute_dtype)
    with backend.AutocastScope(model.compute_dtype) if mixed else contextlib.nullcontext():
        return _called(model, x, training)


def _called(model: Any, x: Any, training: bool) -> Any:
    kwargs = {"training": training} if model._call_has_training_arg else {}
    if model.dtype_policy.quantization_mode is not None:
        return model.quantized_call(x, **kwargs)
    if model._remat_mode is not None:
        return model.rematerialized_call(model.call, x, **kwargs)(x, **kwargs)
    return model.call(x, **kwargs)


def forget_losses(model: Any) -> None:
    """Before each trace. Layers know the losses that they added by `id()`. Those of an earlier trace may be the ids of this
    one's losses by now, and a layer that is called then takes another's loss out of the scope, in plain Keras too."""
    model._clear_losses()


def loss_tracker(model: Any) -> Any:
    return model._loss_tracker


def leaf_metrics(model: Any) -> list[Any]:
    """The metrics of compile() and of the layers, but not the loss trackers."""
    trackers = [loss_tracker(model), *term_trackers(model)]
    metrics = [m for m in model.metrics if not any(m is tracker for tracker in trackers)]
    return [leaf for m in metrics for leaf in (m.metrics if isinstance(m, CompileMetrics) else [m])]


def leaf_metrics_of(model: Any) -> list[Any]:
    """All metrics of a model, the loss trackers among them, without those that only hold others."""
    return [leaf for m in model.metrics for leaf in (m.metrics if isinstance(m, CompileMetrics) else [m])]


def is_class_of_keras(metric: Any) -> bool:
    return type(metric).__module__.startswith("keras.")


def is_of_keras(metric: Any) -> bool:
    """Whether neither the metric's class nor the function that it takes the mean of is the user's."""
    function = getattr(metric, "_fn", None)
    return is_class_of_keras(metric) and (function is None or getattr(function, "__module__", "").startswith("keras."))


@contextlib.contextmanager
def wrapped_method(instance: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """For the block, `instance.name` is wrapped, on this one object."""
    before = instance.__dict__.get(name)
    object.__setattr__(instance, name, wrap(getattr(instance, name)))
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(instance, name)
        else:
            object.__setattr__(instance, name, before)


def wrapped_function(metric: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """For the block, the function that a MeanMetricWrapper takes the mean of is wrapped."""
    return wrapped_method(metric, "_fn", wrap)


# --- data adapters ----------------------------------------------------------------------------------------------------


def array_batches(adapter: Any, rows_of_batch: Callable[[int, int, int], Any]) -> Iterator[Any]:
    """Keras' batches of arrays, with the rows of batch b (start, stop) as `rows_of_batch(b, start, stop)` says."""

    def iterator(slice_and_convert: Callable[..., Any], inputs: Any) -> Iterator[Any]:
        for b in range(adapter._size):
            start = b * adapter._batch_size
            rows = rows_of_batch(b, start, min(start + adapter._batch_size, adapter._num_samples))
            yield keras.tree.map_structure(lambda s, rows=rows: slice_and_convert(s, indices=rows), inputs, none_is_leaf=False)

    with wrapped_method(adapter, "_get_iterator", lambda _: iterator):
        return adapter.get_jax_iterator()


def array_order(adapter: Any) -> tuple[int, Any]:
    """(number of rows, shuffle argument) of an adapter of arrays."""
    return adapter._num_samples, adapter._shuffle


def tf_dataset(adapter: Any) -> Any:
    return adapter._dataset


def is_pipeline(dataset: Any) -> bool:
    """A dataset of grain, tf.data or torch, which Keras reads by an adapter of its own."""
    return any(
        is_one(dataset)
        for is_one in (data_adapters.is_tf_dataset, data_adapters.is_torch_dataloader, data_adapters.is_grain_dataset)
    )


def adapter_of(x: Any, batch_size: int | None, steps: int | None) -> Any:
    """Keras' adapter for inputs without targets."""
    return get_data_adapter(x, batch_size=batch_size, steps_per_epoch=steps)


def first_batch(iterator: Any) -> Any:
    """The first batch; the iterator goes back to its start."""
    _, _, batches = next(iter(iterator))
    batch = next(batches)
    iterator.reset()
    return batch


def static_rows(model: Any) -> int | None:
    """The number of rows that the model's inputs fix, by `Input(batch_size=...)`; None where they are free.

    A Sequential model that was built by a batch has that batch's rows in its inputs, and means nothing by it.
    """
    inputs = keras.tree.flatten(model.inputs) if isinstance(model, Functional) else []
    return next((tensor.shape[0] for tensor in inputs if tensor.shape and tensor.shape[0] is not None), None)


def replace_adapter(iterator: EpochIterator, adapt: Callable[[Any], Any]) -> None:
    iterator.data_adapter = adapt(iterator.data_adapter)
    # Keras would send whole batches to the first device, ahead of time, where that is no CPU.
    object.__setattr__(iterator, "_get_iterator", iterator.data_adapter.get_jax_iterator)


def in_groups(iterator: EpochIterator, size: Callable[[], int], group: Callable[[Iterator[Any], int], Any]) -> None:
    """Has Keras' loop take several batches at a time, as with `steps_per_execution`, but as many as `size()` says each time,
    none of them over the end of the epoch. The steps get `group(batches, count)` in place of the iterator."""
    single = iterator._enumerate_iterator

    def groups() -> Iterator[tuple[int, int, Iterator[Any]]]:
        singles = single()
        for begin, end, batches in singles:
            steps = size()
            while end - begin + 1 < steps and more_in_epoch(end + 1):
                _, end, batches = next(singles)
            yield begin, end, group(batches, end - begin + 1)

    def more_in_epoch(step: int) -> bool:
        # Asked for one too many, Keras' generator would end the epoch before its last batches were read.
        length, seen = iterator._num_batches, iterator._steps_seen
        return step < (iterator.steps_per_epoch or length or 0) and not (length and seen >= length)

    object.__setattr__(iterator, "_enumerate_iterator", groups)


def has_length(iterator: EpochIterator) -> bool:
    return bool(iterator.num_batches)


# --- callbacks --------------------------------------------------------------------------------------------------------


HOOKS = {
    mode: tuple(f"on_{of}batch_{when}" for of in ("", f"{mode}_") for when in ("begin", "end")) for mode in ("train", "test")
}


def argument(method: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument of a call of one of Keras' methods; None where the call does not fit, which Keras will say."""
    try:
        bound = inspect.signature(getattr(keras.Model, method)).bind_partial(None, *args, **kwargs)
    except TypeError:
        return None
    return bound.arguments.get(name)


def wants_batches(callbacks: Any, hooks: tuple[str, ...]) -> bool:
    """Whether a callback does something at these hooks of single batches. Keras' bar shows what it is given, and callbacks
    that save or log by epochs have such hooks and do nothing there."""
    listed = callbacks.callbacks if isinstance(callbacks, CallbackList) else keras.tree.flatten(callbacks) if callbacks else []
    for callback in listed:
        idle = isinstance(callback, keras.callbacks.ProgbarLogger) or (
            isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore) and by_epoch(callback)
        )
        if not idle and not all(keras_utils.is_default(getattr(callback, hook)) for hook in hooks):
            return True
    return False


def by_epoch(callback: Any) -> bool:
    return getattr(callback, "save_freq", getattr(callback, "_save_freq", None)) == "epoch"
