"""States in JSON, beside their arrays. A state comes back as it was given, or is refused before anything is written.

JSON has neither tuples nor keys that are no texts: these, and arrays, are encoded as `{MARK: [kind, content]}`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from unisono._src.typing import AnyArray, Json, PyTree

STATES = "/states/"
"""The prefix of the names of arrays of states. No object of the user can have such a name."""

MARK = "in the checkpoint"

PLAIN = (bool, int, float, str, type(None))
ARRAYS = (np.ndarray, np.memmap)

DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64",
    "complex128", "bfloat16", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4",
}  # fmt: skip
"""The dtypes that Orbax writes and reads with every bit."""


def encode_state(state: PyTree) -> tuple[Json, dict[str, AnyArray]]:
    """Return the state in JSON, with names in place of its arrays; and the arrays by name. Arrays on devices stay there."""
    arrays: dict[str, AnyArray] = {}
    return _encode_value(state, "", arrays), arrays


def decode_state(state: Json, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Return the state with its arrays, which are NumPy's now."""
    if isinstance(state, list):
        return [decode_state(value, arrays) for value in state]
    if not isinstance(state, dict):
        return state
    if MARK not in state:
        return {key: decode_state(value, arrays) for key, value in state.items()}
    kind, content = state[MARK]
    if kind == "dict":
        return {key: decode_state(value, arrays) for key, value in content}
    if kind == "tuple":
        return tuple(decode_state(value, arrays) for value in content)
    return arrays[content] if kind == "array" else arrays[content][()]


def _encode_value(state: PyTree, path: str, arrays: dict[str, AnyArray]) -> Json:
    kind = type(state)
    if kind in PLAIN:
        return state
    if isinstance(state, jax.Array | np.generic) or kind in ARRAYS:
        return _encode_array(state, path, arrays)
    if kind is dict:
        return _encode_dict(state, path, arrays)
    if kind in (list, tuple):
        values = [_encode_value(value, f"{path}/{index}", arrays) for index, value in enumerate(state)]
        return values if kind is list else {MARK: ["tuple", values]}
    raise TypeError(
        f"A state to be saved holds {state!r} of type {kind.__name__} at {path.removeprefix('/')}. get_state() must return what JSON knows "
        f"(numbers, texts, lists, dicts, None), tuples, and arrays, and nothing of a class that is derived of theirs: it would come back as "
        f"something else. Turn it into these."
    )


def _encode_dict(state: dict[object, PyTree], path: str, arrays: dict[str, AnyArray]) -> Json:
    for key in state:
        if type(key) not in PLAIN:
            raise TypeError(
                f"A state to be saved has the key {key!r} of type {type(key).__name__} in the dict at {path.removeprefix('/')}. Its keys may be "
                f"texts, numbers, bools and None."
            )
    values = {key: _encode_value(value, f"{path}/{key}", arrays) for key, value in state.items()}
    is_json = MARK not in state and all(type(key) is str for key in state)
    return values if is_json else {MARK: ["dict", [[key, value] for key, value in values.items()]]}


def _encode_array(array: AnyArray | np.generic, path: str, arrays: dict[str, AnyArray]) -> Json:
    dtype = array.dtype
    if str(dtype) not in DTYPES:  # another order of bytes would be part of this text
        raise TypeError(
            f"A state to be saved holds an array of dtype {dtype} at {path.removeprefix('/')}, which is not kept. Turn it into numbers, or "
            f"into a list."
        )
    name = f"{STATES}{len(arrays)}"
    arrays[name] = array if isinstance(array, jax.Array) else np.array(array)
    return {MARK: ["number" if isinstance(array, np.generic) else "array", name]}
