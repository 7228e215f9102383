"""By which names code asks for what is outside of it, read off its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """The global names that code uses, and the functions inside it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(found).union(*(globals_of(inner) for inner in codes_in(code)))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names that code uses, and the functions inside it; texts too, where it sets attributes by them."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str)) if "setattr" in code.co_names else ()
    return frozenset(code.co_names).union(texts, *(names_in(inner) for inner in codes_in(code)))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def names_of(function: Any) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else names_in(code)
