"""`strategy.run`: a function on every replica.

It is compiled once for each function and kind of arguments.
"""

from __future__ import annotations

import collections
import functools
import types
import warnings
from collections.abc import Hashable, Iterable
from typing import TypeVar

from unisono._src.function_names import get_function_code, get_function_name
from unisono._src.keras import execution_mode
from unisono._src.keras.checks.user_code.captures import read_cell
from unisono._src.keras.checks.user_code.staleness import VALUE_TYPES, IdentityKey, make_exact_key
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.loop.compiled_function import CompiledFunction
from unisono._src.keras.loop.run_arguments import sort_arguments
from unisono._src.keras.record.run_recorder import is_recording
from unisono._src.programs.private import jaxprs
from unisono._src.typing import Keywords, Outputs, UserFunction, UserObject

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_COUNTS = 1024
REMADE = 3
"""The number of compilations of one line of code, or for the same arrays, that is warned of: nobody means so many."""


class RecentItems(collections.OrderedDict[Key, Value]):
    """A dict that forgets its oldest items. An item is as old as when it was set, or moved to the end."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


def count_event(counts: RecentItems[Key, int], key: Key) -> int:
    """Count the calls with the key, this one included."""
    counts[key] = counts.get(key, 0) + 1
    return counts[key]


MOST_FUNCTIONS = 64
MOST_VARIANTS = 4
"""Compiled forms of one function, with other settings around it."""
CHANGED = 8
"""The number of compilations of one function that is warned of, where each follows a change around it."""


class FunctionCache:
    """The compiled functions of one strategy."""

    def __init__(self, strategy: ReplicaStrategy) -> None:
        self._strategy = strategy
        self._functions: RecentItems[Hashable, list[CompiledFunction]] = RecentItems(MOST_FUNCTIONS)
        self._compilations: RecentItems[Hashable, int] = RecentItems(MOST_COUNTS)

    def __call__(self, function: UserFunction, args: Iterable[UserObject], kwargs: Keywords) -> Outputs:
        """Run the function on every replica. It is compiled first, if no compiled form is current."""
        arguments = sort_arguments(args, kwargs, self._strategy.num_replicas_in_sync)
        eager = self._is_eager()
        key = make_function_key(function), eager, is_recording(), arguments.template, arguments.constant_shapes
        variants = self._functions.get(key, [])
        compiled = next((variant for variant in variants if variant.is_current), None)
        if compiled is not None:
            self._functions.move_to_end(key)
            return compiled(arguments)
        compiled = CompiledFunction(get_function_name(function), function, arguments.template, self._strategy, eager)
        returned = compiled(arguments)
        self._functions[key] = [compiled, *variants][:MOST_VARIANTS]
        if not eager:
            self._warn_of_recompilation(function, compiled.used, is_new=not variants)
        return returned

    def _is_eager(self) -> bool:
        """Whether nothing is compiled.

        This is in `un.function(..., eager=True)`, under `jax.disable_jit`, and where a model of the strategy has
        `run_eagerly=True`.
        """
        return (
            execution_mode.is_eager()
            or jaxprs.is_jit_disabled()
            or any(model.run_eagerly for model in self._strategy.owned.models)
        )

    def _warn_of_recompilation(self, function: UserFunction, variables: frozenset[int], is_new: bool) -> None:
        """Warn once of too many compilations.

        They are counted by code and variables: the step of another model is another function. More compilations are allowed where
        something around the function has changed, as where layers are unfrozen in turn.
        """
        code = get_function_code(function)
        most = REMADE if is_new else CHANGED
        if code is None:
            return
        if count_event(self._compilations, (code, variables, is_new)) == most:
            why = (
                "Where the function is made anew for every step (a lambda, a function inside another one), make it once, outside of the "
                "loop; where a Python number among its arguments changes, pass it as an array: np.float32(value)."
                if is_new
                else "Something that it finds around it changes (an attribute, an item of a list, a setting of the optimizer). Pass a value "
                "that changes from step to step as an argument, as an array."
            )
            where = f"{code.co_filename}:{code.co_firstlineno}"
            warnings.warn(
                f"strategy.run has compiled {get_function_name(function)!r} ({where}) {most} times. {why}", stacklevel=4
            )


def make_function_key(function: UserFunction) -> Hashable:
    """Build a key that is equal for functions of the same code.

    The objects around them must be the same too. So a lambda that is made anew for every step is compiled once.
    """
    if isinstance(function, types.MethodType):
        return make_function_key(function.__func__), IdentityKey(function.__self__)
    if isinstance(function, functools.partial):
        named = tuple((name, make_value_key(value)) for name, value in sorted(function.keywords.items()))
        return make_function_key(function.func), tuple(map(make_value_key, function.args)), named
    if not isinstance(function, types.FunctionType) or function.__dict__:
        return IdentityKey(function)
    captured = [read_cell(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return function.__code__, IdentityKey(function.__globals__), tuple(map(make_value_key, [*captured, *defaults]))


def make_value_key(thing: object) -> Hashable:
    """Build a key of a value.

    It is by value for numbers and texts, as above for functions, and by identity for everything else.
    """
    if thing is None or isinstance(thing, VALUE_TYPES):
        return make_exact_key(thing)
    return make_function_key(thing) if isinstance(thing, types.FunctionType) and not is_recursive(thing) else IdentityKey(thing)


def is_recursive(function: types.FunctionType) -> bool:
    """Whether the function captures itself, or may do so."""
    return any(isinstance(read_cell(cell), types.FunctionType) for cell in function.__closure__ or ())
