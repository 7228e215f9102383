"""A compiled model's own step, as one function of state and batch.

It is Keras' step or the user's, and is called as Keras calls it, for any number of rows. Marks in it are equations of the traced
program that change nothing: on the gradients that the optimizer takes, on the loss, and the scopes of layers in which each
replica has its own statistics.
"""

from __future__ import annotations

import collections
import contextlib
import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence

import jax
import jax.numpy as jnp
import keras

from unisono._src.engine.phases.twins import ProgramsDifferError
from unisono._src.engine.state import RecordedVariables, State
from unisono._src.keras.private.compiled_losses import hide_masks, list_all_metrics, wrap_losses
from unisono._src.keras.private.instances import Method, wrap_method
from unisono._src.keras.private.models import list_layers
from unisono._src.keras.private.optimizers import list_optimizer_weights
from unisono._src.keras.private.trainer_state import STATE_NAMES, group_variables
from unisono._src.keras.record.traced_program import find_user_line
from unisono._src.keras.steps.loss_inputs import LabelRanges
from unisono._src.keras.steps.step_call import call_step, check_result, flatten_logs, run_predict_step
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.programs.marks import BATCH_SCOPE, GRADIENT, LAYER_SCOPE, LOSS
from unisono._src.typed_jax import mark_value
from unisono._src.typing import Array, KerasObject, Logs, PyTree


@contextlib.contextmanager
def mark_layers(layers: Iterable[keras.Layer]) -> Generator[None]:
    """Trace layers that have `synchronized` in scopes, for the block."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            synchronized: bool | None = getattr(layer, "synchronized", None)
            if synchronized is None:
                continue
            stack.enter_context(wrap_in_scope(layer, BATCH_SCOPE if synchronized else LAYER_SCOPE))
            if synchronized and isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = False  # which Keras' operations on JAX refuse
                stack.callback(setattr, layer, "synchronized", True)
        yield


def wrap_in_scope(layer: keras.Layer, scope: str) -> contextlib.AbstractContextManager[None]:
    """Trace the calls of a layer in a scope, for the block."""

    def wrap(call: Method) -> Method:
        def call_in_scope(*args: PyTree, **kwargs: PyTree) -> KerasObject:
            with jax.named_scope(scope):
                return call(*args, **kwargs)

        return call_in_scope

    return wrap_method(layer, "call", wrap)


class ModelStep:
    """The step of a model in "train", "evaluate" or "predict"."""

    is_of_replicas = False
    """Whether it is replica code, in which each replica returns values of its own."""

    def __init__(self, model: keras.Model, mode: str, replicas: int) -> None:
        self.model = model
        self.has_one_replica = replicas == 1
        self.labels = LabelRanges()
        self._known = {id(variable) for variable in model.variables}
        self._mode = mode
        self.returns_rows = mode == "predict"
        self.structure: jax.tree_util.PyTreeDef | None = None
        """The structure of the outputs of a prediction; a trace finds it."""
        self.gradient_variables: list[keras.Variable] = []
        """The variables of the gradients that are marked, in their order. A trace finds them."""
        self._told: set[str] = set()
        """What was reported: layers that gather rows, and what has all rows computed at once."""
        self.has_own_logs = False
        """Whether logs differ from the results of the metrics; a trace finds out."""

    @hide_masks()
    def __call__(self, state: State, batch: PyTree, constants: Sequence[Array] = ()) -> tuple[State, Logs]:
        """Compute (new state, logs). Of a prediction, the logs are its outputs by their numbers."""
        if self._mode == "predict":
            outputs, non_trainable = run_predict_step(self.model, state, batch)
            leaves, self.structure = jax.tree.flatten(outputs)
            return (state[0], non_trainable), {str(number): jnp.asarray(leaf) for number, leaf in enumerate(leaves)}
        self.gradient_variables = []
        marks = self._mark_gradients(), self._mark_loss(), self._note_labels(batch), mark_layers(list_layers(self.model))
        with contextlib.ExitStack() as stack:
            for context in (*marks, self._put_kernels()):
                stack.enter_context(context)
            returned = call_step(self.model, self._mode, state, batch)
            self._refuse_new_variables(state)
            logs, new_state = check_result(returned, self._mode, state)
        results = flatten_logs(self._compute_results(new_state))
        flat = {name: jnp.asarray(value) for name, value in flatten_logs(logs or {}).items()}
        if "loss" in flat and "loss" not in results:
            flat["loss"] = mark_value(flat["loss"], LOSS)
        self.has_own_logs = flat.keys() != results.keys()
        return new_state, flat

    def note_gathered(self, gathered: Sequence[tuple[str, int]]) -> None:
        """Report once for each layer what gathering rows costs.

        Losses and the step itself are expected to gather, and not reported.
        """
        for name, size in self.count_by_layer(gathered).items() if self._mode == "train" else ():
            if name not in self._told:
                self._told.add(name)
                print(
                    f"The layer {name!r} looks at other rows of the batch: {size:,} bytes are gathered in each step, and what it makes of them is "
                    f"computed for the whole batch",
                    file=sys.stderr,
                )

    def count_by_layer(self, gathered: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Count the bytes of gathered rows by the layer of the model that reads them."""
        by_layer: collections.Counter[str] = collections.Counter()
        for scopes, size in gathered:
            layer = self._find_layer(scopes)
            if layer is not None:
                by_layer[layer] += size
        return dict(by_layer)

    def explain_rows(self, rows: int, batch_rows: int) -> contextlib.AbstractContextManager[None]:
        """Explain nothing. Keras calls the step with all rows, too."""
        return contextlib.nullcontext()

    def note_other_programs(self, error: ProgramsDifferError) -> None:
        """Report once which layer has the step computed for all rows at once. Predictions and evaluations are not reported."""
        equation = error.equation
        layer = equation and self._find_layer(str(equation.source_info.name_stack))
        place = f"The layer {layer!r}" if layer else f"The step of the model {self.model.name!r}"
        if self._mode != "train" or place in self._told:
            return
        self._told.add(place)
        line = equation and find_user_line(equation)
        at = f" ({line[0]}:{line[1]})" if line else ""
        print(
            f"{place}{at} is another program for another number of rows, or fails on it: each step is computed for the whole batch at once",
            file=sys.stderr,
        )

    def _find_layer(self, scopes: str) -> str | None:
        """Find the innermost layer in the scopes of an equation. None for losses and the step itself."""
        names: set[str] = set(map(find_name, list_layers(self.model))) - {find_name(self.model)}
        return next((name for name in reversed(re.findall(r"[^/()]+", scopes)) if name in names), None)

    def list_recorded(self) -> RecordedVariables:
        groups = group_variables(self.model)
        kinds = {"weight": "trainable_variables", "state": "non_trainable_variables", "optimizer": "optimizer_variables"}
        of_state = [(kind, groups[name]) for kind, name in kinds.items()]
        return [("gradient", self.gradient_variables), *of_state] if self._mode == "train" else of_state

    def _refuse_new_variables(self, state: State) -> None:
        """Refuse variables that the state has no values of.

        They were made in the step, in a layer that nothing but the loss calls.
        """
        variables = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        new = [variable.path for variable in variables if id(variable) not in self._known]
        if new and len(variables) > len(state[0]) + len(state[1]):
            raise ValueError(
                f"A step of the model {self.model.name!r} made the variable {new[0]!r}: it built a layer that the forward pass does not "
                f"call. Build the layer before the model is trained: call layer.build(shape), or the layer on some rows."
            )

    def _compute_results(self, state: State) -> Logs:
        """Compute the results of the metrics."""
        names = [name for name in STATE_NAMES if self._mode == "train" or name != "optimizer_variables"]
        groups = group_variables(self.model)
        mapping = [pair for name, values in zip(names, state, strict=True) for pair in zip(groups[name], values, strict=True)]
        with keras.StatelessScope(state_mapping=mapping):
            return dict(self.model.get_metrics_result())

    def _mark_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Mark the gradients that the model's optimizer takes in the block."""
        if self._mode != "train":
            return contextlib.nullcontext()

        def wrap(apply: Method) -> Method:
            def apply_marked(optimizer_variables: PyTree, grads: list[Array | None], trainable_variables: PyTree) -> KerasObject:
                variables = list_optimizer_weights(self.model.optimizer)
                marked = [
                    gradient if gradient is None else self._mark_gradient(gradient, variable)
                    for gradient, variable in zip(grads, variables, strict=True)
                ]
                return apply(optimizer_variables, marked, trainable_variables)

            return apply_marked

        return wrap_method(self.model.optimizer, "stateless_apply", wrap)

    def _mark_gradient(self, gradient: Array, variable: keras.Variable) -> Array:
        self.gradient_variables.append(variable)
        return mark_value(gradient, f"{GRADIENT} {len(self.gradient_variables) - 1}")

    def _put_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Put kernels into the forward pass before its gradient is taken."""
        if self._mode != "train":
            return contextlib.nullcontext()

        def wrap(compute: Method) -> Method:
            def compute_with_kernels(weights: list[Array], *args: PyTree, **kwargs: PyTree) -> KerasObject:
                def compute_of(weights: list[Array]) -> KerasObject:
                    return compute(weights, *args, **kwargs)

                return rewrite_before_gradient(compute_of)(weights)

            return compute_with_kernels

        return wrap_method(self.model, "compute_loss_and_updates", wrap)

    @contextlib.contextmanager
    def _mark_loss(self) -> Generator[None]:
        """Mark what the block feeds to the metric of the loss. Of several values, their mean is marked."""

        def wrap(update: Method) -> Method:
            def update_marked(values: Array, sample_weight: Array | None = None) -> KerasObject:
                if jnp.size(values) == 1:
                    return update(mark_value(values, LOSS), sample_weight)
                mark_value(jnp.average(values, weights=sample_weight), LOSS)
                return update(values, sample_weight)

            return update_marked

        metrics = list_all_metrics(self.model)
        losses = [metric for metric in metrics if type(metric) is keras.metrics.Mean and metric.name == "loss"]
        with contextlib.ExitStack() as stack:
            for metric in losses:
                stack.enter_context(wrap_method(metric, "update_state", wrap))
            yield

    def _note_labels(self, batch: PyTree) -> contextlib.AbstractContextManager[None]:
        """Note the labels of compile()'s losses in the block. Losses that give no single number are refused."""

        def wrap(loss: Callable[..., Array]) -> Callable[..., Array]:
            def call_noted(y_true: PyTree, y_pred: PyTree, sample_weight: Array | None = None) -> Array:
                self.labels.note(batch, loss, y_true, y_pred, sample_weight)
                value = loss(y_true, y_pred, sample_weight)
                refuse_values(loss, value)
                return value

            return call_noted

        return wrap_losses(self.model, wrap)


def find_name(layer: KerasObject) -> str:
    return layer.name


def refuse_values(loss: object, value: Array) -> None:
    """Refuse a loss that returns one value for each row."""
    if isinstance(loss, keras.losses.Loss) and loss.reduction in (None, "none") and jnp.ndim(value):
        raise ValueError(
            f"The loss {loss.name!r} has reduction={loss.reduction!r} and gives one value for each row, but fit needs one "
            f"number. Write reduction='sum_over_batch_size', or use the values in a loop of your own."
        )
