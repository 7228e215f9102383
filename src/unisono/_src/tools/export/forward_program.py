"""A model's forward pass as StableHLO. It is a function of variables and inputs, for any number of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import jax
import keras
from jax import export as jax_export
from jax.extend.core import ClosedJaxpr

from unisono._src.keras.checks.user_code.jaxpr import walk_programs
from unisono._src.keras.private.compiled_losses import call_model, get_keras_mask, hide_masks
from unisono._src.keras.private.export_inputs import avoid_platform_kernels
from unisono._src.keras.private.instances import replace_methods
from unisono._src.keras.private.trace_failures import find_first_error
from unisono._src.keras.private.trainer_state import ReadingScope
from unisono._src.programs.private.jaxprs import omit_source_lines
from unisono._src.tools.export.input_signature import InputSignature
from unisono._src.tools.export.structure import Structure, StructureError, flatten_tree
from unisono._src.typing import AnyArray, Array, Outputs, UserFunction

PLATFORMS = ("cpu", "cuda", "tpu")

ROWS = (101, 106)
"""An odd and an even number of rows. No other length is likely to be one of them."""
LENGTH = 64
"""The length for all other open lengths, when the number of rows is fixed."""


class ForwardResults(NamedTuple):
    """The results of a program, as lists of arrays."""

    outputs: list[Array]
    masks: list[Array]
    """The masks of the outputs that have a Keras mask."""
    updates: list[Array]
    """The values that the forward pass assigned to variables."""
    losses: list[Array]
    """The loss terms of regularizers and `add_loss`."""


@dataclasses.dataclass(frozen=True)
class ForwardProgram:
    """StableHLO with its gradient, and what its results are."""

    code: bytes
    outputs: Structure
    masked: Sequence[int]
    """The indices of the outputs that have a mask."""
    assigned: Sequence[int]
    """The indices of the variables that are assigned."""

    @functools.cached_property
    def _exported(self) -> jax_export.Exported:
        return jax_export.deserialize(bytearray(self.code))

    def __call__(self, variables: Sequence[AnyArray], inputs: Sequence[AnyArray]) -> ForwardResults:
        return ForwardResults(*self._exported.call(list(variables), list(inputs)))


def make_forward_program(
    model: keras.Model, variables: Sequence[keras.Variable], inputs: InputSignature, training: bool
) -> ForwardProgram:
    """Trace and lower the forward pass. Every unknown length is left open."""
    forward = ForwardPass(model, variables, inputs, training)
    attempts = (False, True) if inputs.open_lengths > 1 else (False,)
    for shared in attempts:
        try:
            program = forward.lower(shared)
            break
        except (ExportError, StructureError):
            raise
        except Exception as error:
            if shared is attempts[-1]:
                raise forward.explain_failure(error) from error
    if forward.depends_on_rows():
        raise ExportError(
            f"The forward pass of the model {model.name!r} does one thing for {ROWS[0]} rows and another for {ROWS[1]}, or for 1: a Python if "
            f"on the number of rows, of which a file would hold one side. Write it with keras.ops.where or keras.ops.cond."
        )
    return program  # pyright: ignore[reportPossiblyUnboundVariable]  # the last attempt either broke out of the loop or raised


class ExportError(ValueError):
    """A model cannot be exported as it is."""


@dataclasses.dataclass(eq=False)
class ForwardPass:
    """The exported function, and what its trace has shown."""

    model: keras.Model
    variables: Sequence[keras.Variable]
    inputs: InputSignature
    training: bool
    _outputs: Structure = None
    _masked: Sequence[int] = ()
    _assigned: Sequence[int] = ()
    _depth: int = 0
    _failed_depth: int = 0
    _culprit: keras.Layer | None = None
    """The innermost layer that the last error passed through."""

    def __call__(self, values: list[Array], arrays: list[Array]) -> tuple[list[Array], ...]:
        mapping = list(zip(self.variables, values, strict=True))
        scope = ReadingScope(state_mapping=mapping, collect_losses=True)
        self._culprit = None
        with hide_masks(), scope, self._watching():
            result = call_model(self.model, self.inputs.nest(arrays), self.training)
            losses = list(self.model.losses)
            self._outputs, outputs = flatten_tree(result)
            masks = [get_keras_mask(output) for output in outputs]
        self._check(scope)
        self._masked = tuple(index for index, mask in enumerate(masks) if mask is not None)
        self._assigned = tuple(index for index, variable in enumerate(self.variables) if id(variable) in scope.assigned)
        updates = [cast("Array", scope.get_current_value(self.variables[index])) for index in self._assigned]
        return tuple(ForwardResults(outputs, [mask for mask in masks if mask is not None], updates, losses))

    def lower(self, shared: bool) -> ForwardProgram:
        """Trace and lower the function for any number of rows. Open lengths stay open. With `shared`, inputs share them."""
        with avoid_platform_kernels(), omit_source_lines():
            function = jax.jit(self.__call__, keep_unused=True)
            exported = jax_export.export(function, platforms=PLATFORMS)(self._variable_specs, self.inputs.make_open_specs(shared))
            code = bytes(exported.serialize(vjp_order=1))
        return ForwardProgram(code, self._outputs, self._masked, self._assigned)

    def depends_on_rows(self) -> bool:
        """Whether the operations depend on the number of rows.

        They also do if a single row has results of another rank.

        If Python code asks whether an open number is 1, or even, JAX answers no: the file would silently hold one branch for all
        batches. If the code asks which of two numbers is larger, JAX raises.
        """
        # Not every model takes a length of 64; a model that fails at every length is refused elsewhere.
        with contextlib.suppress(Exception):
            specs = [self.inputs.of_rows(rows, LENGTH) for rows in (*ROWS, 1)]
            odd, even, single = (jax.make_jaxpr(self)(self._variable_specs, inputs) for inputs in specs)
            ranks = [[len(variable.aval.shape) for variable in trace.jaxpr.outvars] for trace in (odd, single)]
            return list_operations(odd) != list_operations(even) or ranks[0] != ranks[1]
        return False

    @property
    def _variable_specs(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in self.variables]

    def explain_failure(self, error: Exception) -> ExportError:
        """Make an error that explains the failure. It says what failed, in which layer, and what to write."""
        name = self.model.name
        said = summarize_failure(error)
        layer = self._culprit
        if layer is None:
            return ExportError(
                f"The model {name!r} cannot be exported to StableHLO for {', '.join(PLATFORMS)}: {said} What runs in Python (callbacks, "
                f"jax.debug.print) cannot be in a file. Leave the layer that does it out of what is exported."
            )
        mode = "training" if self.training else "inference"
        lengths = (
            " If it is another length that is left open, write un.export(model, path, inputs=x[:1]) with a row of data, which fixes all but "
            "the number of rows."
        )
        return ExportError(
            f"The layer {layer.name!r} ({type(layer).__name__}) keeps the model {name!r} from being exported: its call() fails in "
            f"{mode} where the number of rows is left open. Write it with keras.ops and keras.ops.shape(x)[0], without if, int() or range() "
            f"on that number, or leave the layer out of what is exported.{lengths * bool(self.inputs.open_lengths)} It says: {said}"
        )

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        def watch(stock: UserFunction) -> UserFunction:
            def call(layer: keras.Layer, *args: object, **kwargs: object) -> Outputs:
                self._depth += 1
                try:
                    return stock(layer, *args, **kwargs)
                except Exception:
                    self._note_failure(layer, self._depth)
                    raise
                finally:
                    self._depth -= 1

            return call

        try:
            with replace_methods({"layer": watch}):
                yield
        except Exception:
            self._note_failure(self.model, 0)
            raise

    def _note_failure(self, layer: keras.Layer, depth: int) -> None:
        """Note a call that raised.

        If a deeper call raised just before, its error came through this one. Otherwise the earlier failure is forgotten: the model went on
        after it.
        """
        if self._culprit is None or self._failed_depth != depth + 1:
            self._culprit = layer
        self._failed_depth = depth

    def _check(self, scope: ReadingScope) -> None:
        """Refuse variables that the model does not track.

        The program takes no others. Metrics are ignored, since a file measures nothing.
        """
        known = {id(variable) for variable in [*self.variables, *self.model.metrics_variables]}
        used = [*(("assigns", *item) for item in scope.assigned.items()), *(("reads", *item) for item in scope.read.items())]
        unknown = [(verb, variable) for verb, key, variable in used if key not in known]
        if unknown:
            verb, variable = unknown[0]
            raise ExportError(
                f"The forward pass of the model {self.model.name!r} {verb} {variable.path!r}, a variable that the model does not track: in "
                f"the file it would be a constant. Make it an attribute of a layer of the model."
            )


def list_operations(program: ClosedJaxpr) -> list[list[str]]:
    return [[equation.primitive.name for equation in nested.jaxpr.eqns] for nested in walk_programs(program)]


def summarize_failure(error: BaseException) -> str:
    """Take the first line of JAX's or the layer's error. The text that Keras adds is left out."""
    error = find_first_error(error)
    inner = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)
    line = (inner[1] if inner else str(error)).strip().partition("\n")[0]
    return f"{line or type(error).__name__}{'' if line.endswith('.') else '.'}"
