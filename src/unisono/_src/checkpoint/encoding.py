"""States as JSON, with their arrays apart. What comes back is what was given, or it is refused before anything is written.

JSON knows neither tuples nor keys that are no texts: such things, and arrays, stand there as `{MARK: [kind, content]}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

STATES = "/states/"
"""Before the names of arrays of states, which no object of the user's can be called."""

MARK = "in the checkpoint"

PLAIN = (bool, int, float, str, type(None))
ARRAYS = (np.ndarray, np.memmap)

DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64",
    "complex128", "bfloat16", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4",
}  # fmt: skip
"""What Orbax writes and reads with every bit."""


def separated(state: Any) -> tuple[Any, dict[str, Any]]:
    """(The state with arrays replaced by their names, the arrays by name, those of devices still there)."""
    arrays: dict[str, Any] = {}
    return _plain(state, "", arrays), arrays


def joined(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The state with its arrays, which are NumPy's now."""
    if isinstance(state, list):
        return [joined(value, arrays) for value in state]
    if not isinstance(state, dict):
        return state
    if MARK not in state:
        return {key: joined(value, arrays) for key, value in state.items()}
    kind, content = state[MARK]
    if kind == "dict":
        return {key: joined(value, arrays) for key, value in content}
    if kind == "tuple":
        return tuple(joined(value, arrays) for value in content)
    return arrays[content] if kind == "array" else arrays[content][()]


def _plain(state: Any, path: str, arrays: dict[str, Any]) -> Any:
    kind = type(state)
    if kind in PLAIN:
        return state
    if isinstance(state, jax.Array | np.generic) or kind in ARRAYS:
        return _apart(state, path, arrays)
    if kind is dict:
        return _of_dict(state, path, arrays)
    if kind in (list, tuple):
        values = [_plain(value, f"{path}/{index}", arrays) for index, value in enumerate(state)]
        return values if kind is list else {MARK: ["tuple", values]}
    raise TypeError(
        f"A state to be saved holds {state!r} of type {kind.__name__} at {path.removeprefix('/')}. get_state() must return what JSON knows "
        f"(numbers, texts, lists, dicts, None), tuples, and arrays, and nothing of a class that is derived of theirs: it would come back as "
        f"something else. Turn it into these."
    )


def _of_dict(state: dict[Any, Any], path: str, arrays: dict[str, Any]) -> Any:
    for key in state:
        if type(key) not in PLAIN:
            raise TypeError(
                f"A state to be saved has the key {key!r} of type {type(key).__name__} in the dict at {path.removeprefix('/')}. Its keys may be "
                f"texts, numbers, bools and None."
            )
    values = {key: _plain(value, f"{path}/{key}", arrays) for key, value in state.items()}
    is_json = MARK not in state and all(type(key) is str for key in state)
    return values if is_json else {MARK: ["dict", [[key, value] for key, value in values.items()]]}


def _apart(array: Any, path: str, arrays: dict[str, Any]) -> Any:
    dtype = array.dtype
    if str(dtype) not in DTYPES:  # where the order of bytes is another one, it is part of this
        raise TypeError(
            f"A state to be saved holds an array of dtype {dtype} at {path.removeprefix('/')}, which is not kept. Turn it into numbers, or "
            f"into a list."
        )
    name = f"{STATES}{len(arrays)}"
    arrays[name] = array if isinstance(array, jax.Array) else np.array(array)
    return {MARK: ["number" if isinstance(array, np.generic) else "array", name]}
