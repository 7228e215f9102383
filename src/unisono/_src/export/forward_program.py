"""A model's forward pass as StableHLO: a function of its variables and its inputs, for any number of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import export as jax_export

from unisono._src import keras_private
from unisono._src.export import open_batch
from unisono._src.export.input_signature import Inputs
from unisono._src.export.structure import Structure, StructureError, taken_apart
from unisono._src.xla.tracebacks import without_source_lines

PLATFORMS = ("cpu", "cuda", "tpu")


class Results(NamedTuple):
    """What a program gives back, as lists of arrays."""

    outputs: list[Any]
    masks: list[Any]
    """Of those outputs that have a Keras mask."""
    updates: list[Any]
    """The values that the forward pass assigned to variables."""
    losses: list[Any]
    """Of regularizers and `add_loss`."""


@dataclasses.dataclass(frozen=True)
class Program:
    """StableHLO with its gradient, and what its results mean."""

    code: bytes
    outputs: Structure
    masked: tuple[int, ...]
    """The positions of the outputs that have a mask."""
    assigned: tuple[int, ...]
    """The positions of the variables that are assigned."""

    @functools.cached_property
    def _exported(self) -> jax_export.Exported:
        return jax_export.deserialize(bytearray(self.code))

    def __call__(self, variables: Sequence[Any], inputs: Sequence[Any]) -> Results:
        return Results(*self._exported.call(list(variables), list(inputs)))


def program_of(model: Any, variables: Sequence[Any], inputs: Inputs, training: bool) -> Program:
    """Traces and lowers the forward pass, with every length that is unknown left open."""
    forward = Forward(model, variables, inputs, training)
    like = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
    attempts = (False, True) if inputs.open_lengths > 1 else (False,)
    for shared in attempts:
        try:
            found = lowered(forward, like, inputs.symbolic(shared))
            break
        except (ExportError, StructureError):
            raise
        except Exception as error:
            if shared is attempts[-1]:
                raise forward.explained(error) from error
    if open_batch.differ(Forward(model, variables, inputs, training), like, inputs):
        raise ExportError(
            f"The forward pass of the model {model.name!r} does one thing for {open_batch.ROWS[0]} rows and another for {open_batch.ROWS[1]}, or for "
            f"1: a Python if on the number of rows, of which a file would hold one side. Write it with keras.ops.where or keras.ops.cond."
        )
    return found  # the last attempt either broke out of the loop or raised


class ExportError(ValueError):
    """A model cannot be exported as it is."""


class Forward:
    """The function that is exported, and what its trace found out."""

    def __init__(self, model: Any, variables: Sequence[Any], inputs: Inputs, training: bool) -> None:
        self._model = model
        self._variables = variables
        self._inputs = inputs
        self._training = training
        self._failed: list[tuple[int, Any]] = []
        """(depth, layer) of the layers out of which an error came, in that order."""
        self._depth = 0
        self.outputs: Structure = None
        self.masked: tuple[int, ...] = ()
        self.assigned: tuple[int, ...] = ()

    def __call__(self, values: list[Any], arrays: list[Any]) -> tuple[list[Any], ...]:
        mapping = list(zip(self._variables, values, strict=True))
        scope = keras_private.ReadingScope(state_mapping=mapping, collect_losses=True)
        self._failed.clear()
        with keras_private.fresh_masks(), scope, self._watching():
            result = keras_private.call_model(self._model, self._inputs.nested(arrays), self._training)
            losses = list(self._model.losses)
            self.outputs, outputs = taken_apart(result)
            masks = [keras_private.get_keras_mask(output) for output in outputs]
        self._check(scope)
        self.masked = tuple(index for index, mask in enumerate(masks) if mask is not None)
        self.assigned = tuple(index for index, v in enumerate(self._variables) if id(v) in scope.assigned)
        updates = [scope.get_current_value(self._variables[index]) for index in self.assigned]
        return tuple(Results(outputs, [mask for mask in masks if mask is not None], updates, losses))

    def explained(self, error: Exception) -> ExportError:
        """What went wrong, where, and what to write."""
        name = self._model.name
        if not self._failed:
            return ExportError(
                f"The model {name!r} cannot be exported to StableHLO for {', '.join(PLATFORMS)}: {said(error)} What runs in Python (callbacks, "
                f"jax.debug.print) cannot be in a file. Leave the layer that does it out of what is exported."
            )
        layer, pass_ = self._culprit(), "training" if self._training else "inference"
        lengths = (
            " If it is another length that is left open, write un.export(model, path, inputs=x[:1]) with a row of data, which fixes all but "
            "the number of rows."
        )
        return ExportError(
            f"The layer {layer.name!r} ({type(layer).__name__}) keeps the model {name!r} from being exported: its call() fails in "
            f"{pass_} where the number of rows is left open. Write it with keras.ops and keras.ops.shape(x)[0], without if, int() or range() "
            f"on that number, or leave the layer out of what is exported.{lengths * bool(self._inputs.open_lengths)} It says: {said(error)}"
        )

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        def watched(stock: Callable[..., Any]) -> Callable[..., Any]:
            def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
                self._depth += 1
                try:
                    return stock(layer, *args, **kwargs)
                except Exception:
                    self._failed.append((self._depth, layer))
                    raise
                finally:
                    self._depth -= 1

            return call

        try:
            with keras_private.replaced({"layer": watched}):
                yield
        except Exception:
            self._failed.append((0, self._model))
            raise

    def _culprit(self) -> Any:
        """The innermost layer of those that the last error came through; some may have failed before, and the model gone on."""
        found = None
        for expected, (depth, layer) in enumerate(reversed(self._failed)):
            if depth != expected:
                break
            found = layer
        return found

    def _check(self, scope: keras_private.ReadingScope) -> None:
        """The program knows the model's variables and no others. Metrics are left behind: nothing is measured by a file."""
        known = {id(v) for v in [*self._variables, *self._model.metrics_variables]}
        used = {"assigns": scope.assigned, "reads": scope.read}
        for verb, variable in ((verb, v) for verb, found in used.items() for i, v in found.items() if i not in known):
            raise ExportError(
                f"The forward pass of the model {self._model.name!r} {verb} {variable.path!r}, a variable that the model does not track: in "
                f"the file it would be a constant. Make it an attribute of a layer of the model."
            )


def lowered(forward: Forward, variables: list[Any], inputs: list[Any]) -> Program:
    with keras_private.for_every_platform(), without_source_lines():
        function = jax.jit(forward.__call__, keep_unused=True)
        exported = jax_export.export(function, platforms=PLATFORMS)(variables, inputs)
        code = bytes(exported.serialize(vjp_order=1))
    return Program(code, forward.outputs, forward.masked, forward.assigned)


def said(error: BaseException) -> str:
    """The first line of what JAX or the layer says, without what Keras writes around it."""
    error = keras_private.first_raised(error)
    inner = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)
    line = (inner[1] if inner else str(error)).strip().partition("\n")[0]
    return f"{line or type(error).__name__}{'' if line.endswith('.') else '.'}"
