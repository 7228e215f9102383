"""What a function of the user's is called, and its code, for messages and counts."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


def name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def code_of(function: Any) -> types.CodeType | None:
    """Of what is called in the end: by a partial, an object, a wrapper."""
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
