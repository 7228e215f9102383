"""`function`: a step that looks stateful, compiled.

A function that calls `strategy.run` stays in Python on the host, and only its calls of `run` and `reduce` are compiled: values stay on
the devices, and nothing waits for them. Any other function is compiled as a whole, as a pure function of the variables that it uses.
"""

from __future__ import annotations

import collections
import functools
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import jax
import keras
import numpy as np
from jax.tree_util import PyTreeDef

from unisono._src import execution_mode
from unisono._src.checks.jax_errors import explain_compile_errors
from unisono._src.checks.user_code.captured_arrays import check_captured_iterators, check_leaked_tracers
from unisono._src.checks.user_code.captures import can_run_replicas
from unisono._src.checks.user_code.identity import IdentityKey
from unisono._src.checks.user_code.staleness import CaptureSnapshot
from unisono._src.distributed.dataset import DistributedDataset, DistributedIterator
from unisono._src.distributed.per_replica import is_replica_value
from unisono._src.function_names import get_function_code, get_function_name
from unisono._src.jax_private import tracing
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.trainer_state import (
    ReadingScope,
    RecordingScope,
    find_stateless_scope,
    get_raw_value,
    set_raw_value,
)
from unisono._src.loop.run_arguments import refuse_changed_structure
from unisono._src.near_names import says_near_names
from unisono._src.replica.trace_recorder import get_current_code
from unisono._src.typing import AnyArray, Array, Outputs, Shape, UserFunction, UserObject, Values
from unisono._src.xla.determinism import get_compiler_options
from unisono._src.xla.rewrite import rewrite_function

P = ParamSpec("P")
T = TypeVar("T")

ROUNDS = 4
REMADE = 3
"""Compilations for the same arrays after which a warning says so: nobody means that many."""


@overload
def function(fn: Callable[P, T], *, eager: bool = False) -> Callable[P, T]: ...


@overload
def function(*, eager: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


@says_near_names
def function(fn: UserFunction | None = None, *, eager: bool = False) -> UserFunction:
    """Compile a function that reads and assigns Keras variables: models, optimizers, metrics, random state.

    Args:
        fn: A function. If it calls `strategy.run`, Python runs its lines each time, and its runs are compiled. If not, it is compiled as
            a whole, and Python runs its lines once for each kind of arguments.
        eager: Whether nothing is compiled, neither the function nor what it runs on replicas. Replicas are then run one after another,
            operation by operation: slow, with other last bits, and with breakpoints and known values.

    Returns:
        A function of the same arguments; without `fn`, a decorator that makes one.

    Example:
        >>> total = keras.Variable(0.0, trainable=False)
        >>> add = function(lambda x: total.assign_add(x))
        >>> float(add(2.0)), float(add(3.0)), float(total.value)
        (2.0, 5.0, 5.0)
    """
    if fn is None:
        return lambda fn: function(fn, eager=eager)
    return functools.wraps(fn)(Function(fn, eager))


_compilations: collections.Counter[tuple[types.CodeType, frozenset[int]]] = collections.Counter()
"""Counts of the compiled functions, by their code and the ids of their variables."""


class TracedFunction(NamedTuple):
    """A function compiled for one kind of arguments."""

    variables: list[keras.Variable]
    program: Callable[[Values, list[AnyArray]], tuple[Outputs, dict[int, Array]]]
    """Takes (values of the variables, arguments that are arrays), and returns (what the function returns, new values by position)."""


CallKey: TypeAlias = tuple[PyTreeDef, tuple[Hashable, ...], tuple[tuple[Shape, str], ...]]
"""The kind of a call's arguments: (structure, what is no array, shapes and dtypes of the arrays)."""


class Function:
    """A user function that `function` has wrapped."""

    def __init__(self, fn: UserFunction, eager: bool) -> None:
        self._fn = fn
        self._eager = eager
        self._runs_replicas: bool | None = None
        self._traced: dict[CallKey, tuple[TracedFunction, CaptureSnapshot]] = {}

    def __call__(self, *args: UserObject, **kwargs: UserObject) -> Outputs:
        if self._eager:
            with execution_mode.disable_compilation():
                return self._fn(*args, **kwargs)
        if (
            get_current_code() is not None
            or find_stateless_scope() is not None
            or execution_mode.is_eager()
            or tracing.is_jit_disabled()
        ):
            return self._fn(*args, **kwargs)  # a part of what is traced already, or of what is not compiled
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_host_only)
        if self._runs_replicas is None:
            self._runs_replicas = can_run_replicas(
                self._fn, execution_mode.ReplicaRunner, (DistributedDataset, DistributedIterator)
            )
        if self._runs_replicas or any(map(is_host_only, leaves)):
            return self._fn(*args, **kwargs)
        arrays = [leaf for leaf in leaves if is_array_leaf(leaf)]
        fixed = tuple(None if is_array_leaf(leaf) else make_hashable(leaf) for leaf in leaves)
        key = structure, fixed, tuple((np.shape(a), str(a.dtype)) for a in arrays)
        try:
            traced, around = self._traced.get(key, (None, None))
            if traced is not None and around is not None and around.is_unchanged:
                return self._call_program(traced, arrays)
            before = CaptureSnapshot(bind_self(self._fn, leaves))
            traced = self._compile(leaves, structure, arrays)
            returned = self._call_program(traced, arrays)
        except execution_mode.RunsReplicasError:
            self._runs_replicas = True
            return self._fn(*args, **kwargs)
        is_new = around is None
        # Read after the trace: the code may change its surroundings by itself.
        self._traced[key] = traced, CaptureSnapshot(bind_self(self._fn, leaves), before)
        if is_new:
            self._warn_of_python_numbers(key)
            self._warn_of_remade_functions(traced)
        return returned

    def __get__(self, instance: object | None, _: type | None = None) -> Callable[..., Outputs]:
        """Return the function bound to an instance, where it is used as a method."""
        return self if instance is None else functools.partial(self, instance)

    def _compile(self, leaves: list[UserObject], structure: PyTreeDef, arrays: list[AnyArray]) -> TracedFunction:
        @hide_masks()
        def call(arrays: list[AnyArray]) -> Outputs:
            left = iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(left) if is_array_leaf(leaf) else leaf for leaf in leaves])
            returned = self._fn(*args, **kwargs)
            refuse_changed_structure(
                get_function_name(self._fn), structure, jax.tree.structure((args, kwargs), is_leaf=is_host_only)
            )
            return returned

        variables = self._find_variables(call, arrays)

        def pure(values: Values, arrays: list[AnyArray]) -> tuple[Outputs, dict[int, Array]]:
            mapping = list(zip(variables, values, strict=True))
            with RecordingScope(state_mapping=mapping, collect_losses=True) as scope:
                returned = jax.tree.map(unwrap_variable, call(arrays))
            return returned, {i: scope.state_mapping[id(v)] for i, v in enumerate(variables) if id(v) in scope.assigned}

        check_leaked_tracers(bind_self(self._fn, leaves))
        check_captured_iterators(bind_self(self._fn, leaves))
        platform = jax.default_backend()
        return TracedFunction(
            variables, jax.jit(rewrite_function(pure, platform), compiler_options=get_compiler_options(platform))
        )

    def _warn_of_python_numbers(self, key: CallKey) -> None:
        """Warn once that Python numbers, which the compiler takes as constants, change from call to call."""
        structure, _, arrays = key
        alike = sum(other[0] == structure and other[2] == arrays for other in self._traced)
        if alike == REMADE:
            warnings.warn(
                f"un.function has compiled {get_function_name(self._fn)!r} {REMADE} times for arguments that differ in Python values alone. Pass a "
                f"number that changes as an array: np.float32(value).",
                stacklevel=4,
            )

    def _warn_of_remade_functions(self, traced: TracedFunction) -> None:
        """Warn once that a line makes the function again and again, and that each one is compiled."""
        code = get_function_code(self._fn)
        if code is None or len(self._traced) > 1:
            return
        key = code, frozenset(map(id, traced.variables))
        _compilations[key] += 1
        if _compilations[key] == REMADE:
            warnings.warn(
                f"un.function has compiled {get_function_name(self._fn)!r} ({code.co_filename}:{code.co_firstlineno}) in {REMADE} functions "
                f"that were made anew. Make the function once, outside of the loop.",
                stacklevel=4,
            )

    def _find_variables(self, call: Callable[[list[AnyArray]], Outputs], arrays: list[AnyArray]) -> list[keras.Variable]:
        """Return the variables that the function reads or assigns. Layers and optimizers are built on the way."""
        known: dict[int, keras.Variable] = {}
        for _ in range(ROUNDS):
            with (
                explain_compile_errors(get_function_name(self._fn)),
                ReadingScope(collect_losses=True) as scope,
                execution_mode.mark_tracing(),
            ):
                jax.eval_shape(lambda arrays: jax.tree.map(unwrap_variable, call(arrays)), arrays)
            used = {**scope.read, **scope.assigned}
            if used.keys() == known.keys():
                return list(used.values())
            made = [v.path for i, v in used.items() if i not in known]
            known = used
        raise ValueError(
            f"Every call of {get_function_name(self._fn)!r} makes variables anew ({', '.join(map(repr, made[:3]))}), whose values would be lost. "
            f"Make layers, optimizers, metrics and variables once, outside of the function."
        )

    def _call_program(self, traced: TracedFunction, arrays: list[AnyArray]) -> Outputs:
        with execution_mode.mark_tracing():  # the first call traces once more
            returned, assigned = traced.program([get_raw_value(v) for v in traced.variables], arrays)
        for index, value in assigned.items():
            set_raw_value(traced.variables[index], value)
        return returned


def bind_self(fn: UserFunction, leaves: list[UserObject]) -> UserFunction:
    """Return the function, bound to its first argument where that may be its `self`."""
    return types.MethodType(fn, leaves[0]) if leaves and not is_array_leaf(leaves[0]) and hasattr(leaves[0], "__dict__") else fn


def is_host_only(thing: object) -> bool:
    """Return whether only lines that Python runs can use the argument."""
    return is_replica_value(thing) or isinstance(thing, DistributedDataset | Iterator)


def is_array_leaf(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def make_hashable(leaf: object) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return IdentityKey(leaf)
    return type(leaf), leaf


def unwrap_variable(value: object) -> object:
    """Return the array of a variable, and every other value as it is."""
    return value.value if isinstance(value, keras.Variable) else value
