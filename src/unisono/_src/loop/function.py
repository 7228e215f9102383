"""`function`: a step that looks stateful, compiled.

What calls `run` stays in Python on the host, where only its calls of `run` and `reduce` are compiled: values stay on the devices,
and nothing waits for them. What does not is compiled as a whole, as a pure function of the variables that it uses.
"""

from __future__ import annotations

import collections
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
import keras
import numpy as np

from unisono._src import execution_mode, keras_private
from unisono._src.checks.jax_errors import explained_function
from unisono._src.checks.user_code.captured_arrays import check_iterators, check_nothing_left
from unisono._src.checks.user_code.captures import runs_replicas
from unisono._src.checks.user_code.identity import Same
from unisono._src.checks.user_code.staleness import Surroundings
from unisono._src.distributed.dataset import DistributedDataset, DistributedIterator
from unisono._src.distributed.per_replica import is_value
from unisono._src.function_names import code_of, name_of
from unisono._src.loop.run_arguments import check_arguments
from unisono._src.near_names import says_near_names
from unisono._src.replica.trace_recorder import current
from unisono._src.xla import tracing
from unisono._src.xla.determinism import compiler_options
from unisono._src.xla.rewrite import rewritten

P = ParamSpec("P")
T = TypeVar("T")

ROUNDS = 4
REMADE = 3
"""So many compilations for the same arrays are more than anybody means."""


@overload
def function(fn: Callable[P, T], *, eager: bool = False) -> Callable[P, T]: ...


@overload
def function(*, eager: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


@says_near_names
def function(fn: Callable[..., Any] | None = None, *, eager: bool = False) -> Callable[..., Any]:
    """Compiles a function that reads and assigns Keras variables: models, optimizers, metrics, random state.

    Args:
        fn: A function. With calls of `strategy.run`, its own lines are run by Python each time and its runs are compiled; without,
            it is compiled as a whole, and its lines are run by Python once for each kind of arguments.
        eager: Whether nothing is compiled, neither the function nor what it runs on replicas, which are then run one after another,
            operation by operation: slow, with other last bits, and with breakpoints and values that are known.

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


_made: collections.Counter[Any] = collections.Counter()
"""How many functions of the same code and variables were compiled."""


class Traced(NamedTuple):
    """A function compiled for one kind of arguments."""

    variables: list[Any]
    program: Callable[..., Any]


class Function:
    """What `function` returns."""

    def __init__(self, fn: Callable[..., Any], eager: bool) -> None:
        self._fn = fn
        self._eager = eager
        self._runs_replicas: bool | None = None
        self._traced: dict[Any, tuple[Traced, Surroundings]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._eager:
            with execution_mode.eagerly():
                return self._fn(*args, **kwargs)
        if (
            current() is not None
            or keras_private.stateless_scope() is not None
            or execution_mode.is_eager()
            or tracing.is_disabled()
        ):
            return self._fn(*args, **kwargs)  # a part of what is traced already, or of what is not compiled
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_of_host)
        if self._runs_replicas is None:
            self._runs_replicas = runs_replicas(self._fn, execution_mode.Runner, (DistributedDataset, DistributedIterator))
        if self._runs_replicas or any(map(is_of_host, leaves)):
            return self._fn(*args, **kwargs)
        arrays = [leaf for leaf in leaves if is_traced(leaf)]
        fixed = tuple(None if is_traced(leaf) else hashable(leaf) for leaf in leaves)
        key = structure, fixed, tuple((np.shape(a), str(a.dtype)) for a in arrays)
        try:
            traced, around = self._traced.get(key, (None, None))
            if traced is not None and around is not None and around.unchanged:
                return self._call(traced, arrays)
            before = Surroundings(method_of(self._fn, leaves))
            traced = self._compiled(leaves, structure, arrays)
            returned = self._call(traced, arrays)
        except execution_mode.RunsReplicasError:
            self._runs_replicas = True
            return self._fn(*args, **kwargs)
        is_new = around is None
        # As they are when all is traced: code may change them by itself.
        self._traced[key] = traced, Surroundings(method_of(self._fn, leaves), before)
        if is_new:
            self._note_compiled(key)
            self._note_made(traced)
        return returned

    def __get__(self, instance: Any, _: Any = None) -> Any:
        """As a method."""
        return self if instance is None else functools.partial(self, instance)

    def _compiled(self, leaves: list[Any], structure: Any, arrays: list[Any]) -> Traced:
        @keras_private.fresh_masks()
        def call(arrays: list[Any]) -> Any:
            left = iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(left) if is_traced(leaf) else leaf for leaf in leaves])
            returned = self._fn(*args, **kwargs)
            check_arguments(name_of(self._fn), structure, jax.tree.structure((args, kwargs), is_leaf=is_of_host))
            return returned

        variables = self._variables(call, arrays)

        def pure(values: list[Any], arrays: list[Any]) -> Any:
            mapping = list(zip(variables, values, strict=True))
            with keras_private.RecordingScope(state_mapping=mapping, collect_losses=True) as scope:
                returned = jax.tree.map(bare, call(arrays))
            return returned, {i: scope.state_mapping[id(v)] for i, v in enumerate(variables) if id(v) in scope.assigned}

        check_nothing_left(method_of(self._fn, leaves))
        check_iterators(method_of(self._fn, leaves))
        platform = jax.default_backend()
        return Traced(variables, jax.jit(rewritten(pure, platform), compiler_options=compiler_options(platform)))

    def _note_compiled(self, key: Any) -> None:
        """Says once that numbers of Python's, which the compiler takes as they are, change from call to call."""
        structure, _, arrays = key
        alike = sum(other[0] == structure and other[2] == arrays for other in self._traced)
        if alike == REMADE:
            warnings.warn(
                f"un.function has compiled {name_of(self._fn)!r} {REMADE} times for arguments that differ in Python values alone. Pass a "
                f"number that changes as an array: np.float32(value).",
                stacklevel=4,
            )

    def _note_made(self, traced: Traced) -> None:
        """Says once that a line makes functions of the same variables anew, each of which is compiled."""
        code = code_of(self._fn)
        if code is None or len(self._traced) > 1:
            return
        made = code, frozenset(map(id, traced.variables))
        _made[made] += 1
        if _made[made] == REMADE:
            warnings.warn(
                f"un.function has compiled {name_of(self._fn)!r} ({code.co_filename}:{code.co_firstlineno}) in {REMADE} functions that were "
                f"made anew. Make the function once, outside of the loop.",
                stacklevel=4,
            )

    def _variables(self, call: Callable[[list[Any]], Any], arrays: list[Any]) -> list[Any]:
        """Those that the function reads or assigns. Layers and optimizers are built on the way."""
        known: dict[int, Any] = {}
        for _ in range(ROUNDS):
            with (
                explained_function(name_of(self._fn)),
                keras_private.ReadingScope(collect_losses=True) as scope,
                execution_mode.tracing(),
            ):
                jax.eval_shape(lambda arrays: jax.tree.map(bare, call(arrays)), arrays)
            found = {**scope.read, **scope.assigned}
            if found.keys() == known.keys():
                return list(found.values())
            made, known = [v.path for i, v in found.items() if i not in known], found
        raise ValueError(
            f"Every call of {name_of(self._fn)!r} makes variables anew ({', '.join(map(repr, made[:3]))}), whose values would be lost. Make "
            f"layers, optimizers, metrics and variables once, outside of the function."
        )

    def _call(self, traced: Traced, arrays: list[Any]) -> Any:
        with execution_mode.tracing():  # the first call traces once more
            returned, assigned = traced.program([keras_private.raw_value(v) for v in traced.variables], arrays)
        for index, value in assigned.items():
            keras_private.set_raw_value(traced.variables[index], value)
        return returned


def method_of(fn: Any, leaves: list[Any]) -> Any:
    """The function with what may be its `self`."""
    return types.MethodType(fn, leaves[0]) if leaves and not is_traced(leaves[0]) and hasattr(leaves[0], "__dict__") else fn


def is_of_host(thing: Any) -> bool:
    """What only Python's own lines can use."""
    return is_value(thing) or isinstance(thing, DistributedDataset | Iterator)


def is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return Same(leaf)
    return type(leaf), leaf


def bare(value: Any) -> Any:
    """The array of a variable."""
    return value.value if isinstance(value, keras.Variable) else value
