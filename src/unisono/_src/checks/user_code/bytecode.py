"""Names by which code asks for what is outside of it, read off its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator


@functools.lru_cache(maxsize=4096)
def find_global_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that code uses, and the functions inside it."""
    names = {
        instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return frozenset(names).union(*(find_global_names(inner) for inner in find_inner_codes(code)))


@functools.lru_cache(maxsize=4096)
def find_code_names(code: types.CodeType) -> frozenset[str]:
    """Return all names that code uses, and the functions inside it; strings too, where the code sets attributes by them."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str)) if "setattr" in code.co_names else ()
    return frozenset(code.co_names).union(texts, *(find_code_names(inner) for inner in find_inner_codes(code)))


def find_inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def find_used_names(function: object) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else find_code_names(code)
