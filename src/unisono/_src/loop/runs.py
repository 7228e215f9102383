"""`strategy.run`: a function on every replica, compiled once for each function and kind of arguments."""

from __future__ import annotations

import collections
import functools
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from unisono._src import execution_mode
from unisono._src.checks.user_code.captures import contents
from unisono._src.checks.user_code.identity import NUMBERS, Same, by_value
from unisono._src.function_names import code_of, name_of
from unisono._src.loop.compiled_function import Segment
from unisono._src.loop.run_arguments import sorted_out
from unisono._src.xla import tracing

MOST_SEGMENTS = 64
MOST_VARIANTS = 4
"""Of one function, with other settings around it."""
REMADE = 3
"""So many compilations of one line of code are more than anybody means."""
CHANGED = 8
"""So many of one function, because something has changed."""


class Runs:
    """The compiled functions of one strategy."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._segments: collections.OrderedDict[Hashable, list[Segment]] = collections.OrderedDict()
        self._made: collections.Counter[Any] = collections.Counter()

    def __call__(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = sorted_out(args, kwargs, self._strategy.num_replicas_in_sync)
        eager = self._is_eager()
        key = identity(function), eager, arguments.template, tuple((c.shape, str(c.dtype)) for c in arguments.constants)
        variants = self._segments.get(key, [])
        segment = next((variant for variant in variants if variant.is_current), None)
        if segment is not None:
            self._segments.move_to_end(key)
            return segment(arguments)
        segment = Segment(name_of(function), function, arguments.template, self._strategy, eager)
        returned = segment(arguments)
        self._segments[key] = [segment, *variants][:MOST_VARIANTS]
        while len(self._segments) > MOST_SEGMENTS:
            self._segments.popitem(last=False)
        if not eager:
            self._note(function, segment.used, is_new=not variants)
        return returned

    def _is_eager(self) -> bool:
        """In `un.function(..., eager=True)` and under `jax.disable_jit`, and where a model of the strategy is compiled with `run_eagerly=True`."""
        return (
            execution_mode.is_eager() or tracing.is_disabled() or any(model.run_eagerly for model in self._strategy.owned.models)
        )

    def _note(self, function: Callable[..., Any], variables: frozenset[int], is_new: bool) -> None:
        """Counts by what a function uses: the step of another model is another one. One that is compiled again because something around
        it has changed, as where layers are unfrozen in turn, may be so more often."""
        code, most = code_of(function), REMADE if is_new else CHANGED
        if code is None:
            return
        self._made[code, variables, is_new] += 1
        if self._made[code, variables, is_new] == most:
            why = (
                "Where the function is made anew for every step (a lambda, a function inside another one), make it once, outside of the "
                "loop; where a Python number among its arguments changes, pass it as an array: np.float32(value)."
                if is_new
                else "Something that it finds around it changes (an attribute, an item of a list, a setting of the optimizer). Pass a value "
                "that changes from step to step as an argument, as an array."
            )
            where = f"{code.co_filename}:{code.co_firstlineno}"
            warnings.warn(f"strategy.run has compiled {name_of(function)!r} ({where}) {most} times. {why}", stacklevel=4)


def identity(function: Callable[..., Any]) -> Hashable:
    """Equal for functions of the same code that find the same things around them: a lambda that is made anew for every step is
    compiled once."""
    if isinstance(function, types.MethodType):
        return identity(function.__func__), Same(function.__self__)
    if isinstance(function, functools.partial):
        named = tuple((name, known_by(value)) for name, value in sorted(function.keywords.items()))
        return identity(function.func), tuple(map(known_by, function.args)), named
    if not isinstance(function, types.FunctionType) or function.__dict__:
        return Same(function)
    found = [contents(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return function.__code__, Same(function.__globals__), tuple(map(known_by, [*found, *defaults]))


def known_by(thing: Any) -> Hashable:
    """Numbers and texts by what they are, functions as above, and all else by identity."""
    if thing is None or isinstance(thing, NUMBERS):
        return by_value(thing)
    return identity(thing) if isinstance(thing, types.FunctionType) and not is_recursive(thing) else Same(thing)


def is_recursive(function: types.FunctionType) -> bool:
    """Whether the function is around itself, or may be."""
    return any(isinstance(contents(cell), types.FunctionType) for cell in function.__closure__ or ())
