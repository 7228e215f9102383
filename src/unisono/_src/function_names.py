"""The name and the code of a user function, for messages."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono._src.typing import UserObject


def get_function_name(function: Callable[..., object]) -> str:
    """Get the name of a function, or of a callable's class."""
    if isinstance(function, functools.partial):
        return get_function_name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def get_parameter_name(function: Callable[..., object], position: int) -> str:
    """Get the name of a function's parameter at this position.

    >>> get_parameter_name(lambda x, y: x, 1), get_parameter_name(lambda *them: 1, 1)
    ('y', 'args[1]')
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a callable that is not in Python
        parameters = ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in named]
    return names[position] if position < len(names) else f"args[{position}]"


def get_function_code(function: UserObject) -> types.CodeType | None:
    """Find the code that a callable runs in the end.

    It may be a function, a partial, a wrapper or a callable object. None for code that is not in Python.
    """
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            function = vars(type(function)).get("__call__")
            if function is None:
                return None
    return function.__code__
