"""Errors about misspelt arguments say which name is near. Python's own does so from 3.13 on."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeAlias, TypeVar

from unisono._src.hidden_frames import PUBLIC_CALL

P = ParamSpec("P")
T = TypeVar("T")

RefuseCall: TypeAlias = Callable[[Callable[..., object], tuple[object, ...], dict[str, object]], None]
"""Raises for arguments that do not fit the call: `refuse(call, args, kwargs)`."""

CUTOFF = 0.75
"""The similarity of near names, by difflib's measure."""


def says_near_names(call: Callable[P, T]) -> Callable[P, T]:
    """Let errors about misspelt arguments say the near name.

    This wraps a public function, method or `__init__`.

    Do not wrap a function that a loop calls at each step: a wrapped call takes longer. Its warnings come from one frame further away.
    """
    return refuses_by(refuse_misspelt)(call)


def refuses_by(refuse: RefuseCall) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a decorator whose calls refuse by `refuse`. For arguments that do not fit, it raises in place of the usual error."""

    def wrap(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def call_or_refuse(*args: P.args, **kwargs: P.kwargs) -> T:
            with PUBLIC_CALL:
                try:
                    return call(*args, **kwargs)
                except TypeError:
                    try:
                        inspect.signature(call).bind(*args, **kwargs)
                    except TypeError:  # else the error comes from inside of the call
                        refuse(call, args, kwargs)
                    raise

        return call_or_refuse

    return wrap


def refuse_misspelt(call: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Refuse argument names that the call does not have. Python's own errors are clear enough for other mistakes."""
    names = list_argument_names(call)
    unknown = [name for name in kwargs if name not in names]
    if not unknown:
        return
    near = find_near_names(unknown, names)
    replacements = " and ".join(f"{near[name]}= for {name}=" for name in unknown if name in near)
    raise TypeError(
        f"{call.__qualname__.removesuffix('.__init__')} received {format_arguments(unknown)}, and takes {format_arguments(names)}."
        f"{f' Write {replacements}.' if replacements else ''}"
    ) from None


def list_argument_names(call: Callable[..., object]) -> list[str]:
    """List the names of a call's arguments, without `self`."""
    parameters = list(inspect.signature(call).parameters.values())
    is_method = bool(parameters) and parameters[0].name == "self"
    return [parameter.name for parameter in parameters[is_method:] if parameter.kind is not parameter.VAR_POSITIONAL]


def find_near_names(unknown: Iterable[str], names: Iterable[str], cutoff: float = CUTOFF) -> dict[str, str]:
    """Find the right name for each name that is nearly right."""
    close_matches = {name: difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff) for name in unknown}
    return {name: matches[0] for name, matches in close_matches.items() if matches}


def format_arguments(names: Iterable[str]) -> str:
    """Write the names of arguments as text: `a=, b= and c=`."""
    *most, last = (f"{name}=" for name in names)
    return f"{', '.join(most)} and {last}" if most else last
