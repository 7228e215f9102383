"""`function`: a step that looks stateful, compiled.

A function that calls `strategy.run` stays in Python on the host, and only its calls of `run` and `reduce` are compiled: values stay on
the devices, and nothing waits for them. Any other function is compiled as a whole, as a pure function of the variables that it uses.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import ParamSpec, TypeVar, overload

import jax
import keras

from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.function_names import get_function_code, get_function_name
from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras import execution_mode
from unisono._src.keras.checks.jax_errors import explain_function_errors
from unisono._src.keras.checks.user_code.captured_arrays import refuse_compiled_captures
from unisono._src.keras.checks.user_code.captures import can_run_replicas
from unisono._src.keras.checks.user_code.staleness import CaptureSnapshot
from unisono._src.keras.distributed.dataset import DistributedDataset, DistributedIterator
from unisono._src.keras.distributed.per_replica import is_replica_value
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.library_arrays import has_values
from unisono._src.keras.loop.run_arguments import (
    NUMBER_TYPES,
    ArgumentLeaves,
    ArgumentTemplate,
    ArrayKinds,
    RunArguments,
    sort_leaves,
)
from unisono._src.keras.loop.runs import MOST_COUNTS, REMADE, RecentItems, count_event
from unisono._src.keras.loop.traced_function import TracedFunction
from unisono._src.keras.private.compiled_losses import hide_masks
from unisono._src.keras.private.trainer_state import ReadingScope, RecordingScope, find_stateless_scope
from unisono._src.keras.record.run_recorder import get_recorder
from unisono._src.keras.replica.trace_recorder import get_current_code
from unisono._src.kernels.rewriting import rewrite_function
from unisono._src.near_names import says_near_names
from unisono._src.programs.private import jaxprs
from unisono._src.typing import AnyArray, Arguments, Array, Keywords, Outputs, UserFunction, UserObject, Values

P = ParamSpec("P")
T = TypeVar("T")

ROUNDS = 4
MOST_TRACED = 64
"""Compiled forms of one function that are kept."""


@overload
def function(fn: Callable[P, T], *, eager: bool = False, record: str | os.PathLike[str] | None = None) -> Callable[P, T]: ...


@overload
def function(
    *, eager: bool = False, record: str | os.PathLike[str] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


@says_near_names
def function(
    fn: UserFunction | None = None, *, eager: bool = False, record: str | os.PathLike[str] | None = None
) -> UserFunction:
    """Compile a function that reads and assigns Keras variables. These are of models, optimizers, metrics and random state.

    Args:
        fn: A function. If it calls `strategy.run`, Python runs its lines each time, and its runs are compiled. If not, it is compiled as
            a whole, and Python runs its lines once for each kind of arguments.
        eager: Whether nothing is compiled, neither the function nor what it runs on replicas. Replicas are then run one after another,
            operation by operation: slow, with other last bits, and with breakpoints and known values.
        record: A directory. From the first call on, the steps of this process are recorded there, as `callbacks.Record` does it for fit.

    Returns:
        A function of the same arguments; without `fn`, a decorator that makes one.

    Example:
        >>> total = keras.Variable(0.0, trainable=False)
        >>> add = function(lambda x: total.assign_add(x))
        >>> float(add(2.0)), float(add(3.0)), float(total.value)
        (2.0, 5.0, 5.0)
    """
    if fn is None:
        return lambda fn: function(fn, eager=eager, record=record)
    return functools.wraps(fn)(Function(fn, eager, record))


_compilations: RecentItems[Hashable, int] = RecentItems(MOST_COUNTS)
"""Counts of the compiled functions, by their code and the ids of their variables."""


class Function:
    """A user function that `function` has wrapped."""

    def __init__(self, fn: UserFunction, eager: bool, record: str | os.PathLike[str] | None) -> None:
        self._fn = fn
        self._record = record
        self._name = get_function_name(fn)
        self._eager = eager
        self._runs_replicas: bool | None = None
        self._traced: RecentItems[tuple[ArgumentTemplate, ArrayKinds], TracedFunction] = RecentItems(MOST_TRACED)
        self._values_of_kinds: RecentItems[Hashable, int] = RecentItems(MOST_TRACED)
        """Counts of the traces for arguments of one structure, whose arrays have these shapes and dtypes."""

    def __call__(self, *args: UserObject, **kwargs: UserObject) -> Outputs:
        with PUBLIC_CALL:
            return self._call(args, kwargs)

    def _call(self, args: Arguments, kwargs: Keywords) -> Outputs:
        if self._record is not None:
            get_recorder().record_from_here(self._record)
            self._record = None
        if self._eager:
            with execution_mode.disable_compilation():
                return self._fn(*args, **kwargs)
        if (
            get_current_code() is not None
            or find_stateless_scope() is not None
            or execution_mode.is_eager()
            or jaxprs.is_jit_disabled()
        ):
            return self._fn(*args, **kwargs)  # a part of what is traced already, or of what is not compiled
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_host_only)
        if self._runs_replicas is None:
            self._runs_replicas = can_run_replicas(self._fn, ReplicaStrategy, (DistributedDataset, DistributedIterator))
        if self._runs_replicas or any(map(is_host_only, leaves)):
            return self._fn(*args, **kwargs)
        arguments = sort_leaves(leaves, structure, lambda leaf: "constants" if has_values(leaf) else None)
        key = arguments.template, arguments.constant_shapes
        traced = self._traced.get(key)
        is_new = traced is None
        try:
            if traced is not None and traced.is_current:
                self._traced.move_to_end(key)
                return traced.run(arguments.constants)
            traced = self._compile(arguments)
            returned = traced.run(arguments.constants)
        except execution_mode.RunsReplicasError:
            self._runs_replicas = True
            return self._fn(*args, **kwargs)
        # Read after the trace: the code may change its surroundings by itself.
        self._traced[key] = traced.take_again()
        if is_new:
            self._warn_of_changing_values(arguments)
            self._warn_of_remade_functions(traced)
        return returned

    def __get__(self, instance: object | None, _: type | None = None) -> Callable[..., Outputs]:
        """Bind the function to an instance, where it is a method."""
        return self if instance is None else functools.partial(self, instance)

    def _compile(self, arguments: RunArguments) -> TracedFunction:
        find_captures = functools.partial(arguments.template.find_captures, self._fn)
        captured = CaptureSnapshot(find_captures)

        @hide_masks()
        def call(arrays: list[AnyArray]) -> Outputs:
            args, kwargs = arguments.template.fill(constants=arrays)
            before = ArgumentLeaves(self._fn, (args, kwargs))
            returned = self._fn(*args, **kwargs)
            before.refuse_changes()
            return jax.tree.map(unwrap_variable, returned)

        variables = self._find_variables(call, arguments.constants)

        def pure(values: Values, arrays: list[AnyArray]) -> tuple[Outputs, dict[int, Array]]:
            mapping = list(zip(variables, values, strict=True))
            with RecordingScope(state_mapping=mapping, collect_losses=True) as scope:
                returned = call(arrays)
            return returned, {i: scope.state_mapping[id(v)] for i, v in enumerate(variables) if id(v) in scope.assigned}

        captures = find_captures()
        refuse_compiled_captures(captures)
        values = {id(capture.value): capture.value for capture in captures}
        holders = [value for value in values.values() if isinstance(value, keras.Model | keras.optimizers.Optimizer)]
        program = DeviceProgram(rewrite_function(pure, jax.default_backend()))
        return TracedFunction(variables, program, captured, holders, [])

    def _warn_of_changing_values(self, arguments: RunArguments) -> None:
        """Warn once that constants change from call to call. The compiler takes numbers and objects as constants."""
        kind = arguments.template.structure, arguments.constant_shapes
        if count_event(self._values_of_kinds, kind) != REMADE:
            return
        place, value = self._find_changing_value(arguments)
        if isinstance(value, NUMBER_TYPES):
            write = "Pass a number that changes as an array: np.float32(value)."
        else:
            write = "Pass the same object each time, or the arrays in it."
        warnings.warn(
            f"un.function has compiled {self._name!r} {REMADE} times for other values of {place}, of type {type(value).__name__}. {write}",
            stacklevel=4,
        )

    def _find_changing_value(self, arguments: RunArguments) -> tuple[str, object]:
        """Find the first argument in which this call differs from another.

        The other call has arguments of the same structure and shapes.
        """
        mine = arguments.template
        other = next(
            template
            for template, shapes in self._traced
            if template != mine and (template.structure, shapes) == (mine.structure, arguments.constant_shapes)
        )
        return mine.find_difference(self._fn, other)

    def _warn_of_remade_functions(self, traced: TracedFunction) -> None:
        """Warn once that a line makes the function anew each time. Each one is compiled."""
        code = get_function_code(self._fn)
        if code is None or len(self._traced) > 1:
            return
        if count_event(_compilations, (code, frozenset(map(id, traced.variables)))) == REMADE:
            warnings.warn(
                f"un.function has compiled {self._name!r} ({code.co_filename}:{code.co_firstlineno}) in {REMADE} functions "
                f"that were made anew. Make the function once, outside of the loop.",
                stacklevel=4,
            )

    def _find_variables(self, call: Callable[[list[AnyArray]], Outputs], arrays: list[AnyArray]) -> list[keras.Variable]:
        """Find the variables that the function reads or assigns. Layers and optimizers are built on the way."""
        known: dict[int, keras.Variable] = {}
        made: list[str] = []
        for _ in range(ROUNDS):
            with (
                explain_function_errors(self._name),
                ReadingScope(collect_losses=True) as scope,
                execution_mode.mark_tracing(),
            ):
                # A new function each time: JAX keeps the traces of equal ones.
                jax.eval_shape(lambda arrays: call(arrays), arrays)
            used = {**scope.read, **scope.assigned}
            if used.keys() == known.keys():
                return list(used.values())
            made = [v.path for i, v in used.items() if i not in known]
            known = used
        raise ValueError(
            f"Every call of {self._name!r} makes variables anew ({', '.join(map(repr, made[:3]))}), whose values would be lost. "
            f"Make layers, optimizers, metrics and variables once, outside of the function."
        )


def is_host_only(thing: object) -> bool:
    """Whether only lines that Python runs can use the argument."""
    return is_replica_value(thing) or isinstance(thing, DistributedDataset | Iterator)


def unwrap_variable(value: object) -> object:
    """Unwrap a variable to its array. Every other value stays as it is."""
    return value.value if isinstance(value, keras.Variable) else value
