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

DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64",
    "complex128", "bfloat16", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4",
}  # fmt: skip
"""The dtypes of numbers, in the order of bytes of this machine."""


def encode_state(state: PyTree) -> tuple[Json, dict[str, AnyArray]]:
    """Encode a state in JSON, beside its arrays by name.

    The JSON has the names in place of the arrays. Arrays on devices stay there.
    """
    arrays: dict[str, AnyArray] = {}

    def encode(value: PyTree, path: str) -> Json:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            return [encode(inner, f"{path}/{index}") for index, inner in enumerate(value)]
        if kind is tuple:
            return {MARK: ["tuple", encode(list(value), path)]}
        if kind is dict:
            check_keys(value, path)
            values = {key: encode(inner, f"{path}/{key}") for key, inner in value.items()}
            is_json = MARK not in value and all(type(key) is str for key in value)
            return values if is_json else {MARK: ["dict", [[key, inner] for key, inner in values.items()]]}
        check_array(value, path)
        name = f"{STATES}{len(arrays)}"
        arrays[name] = value if isinstance(value, jax.Array) else np.array(value)
        return {MARK: ["number" if isinstance(value, np.generic) else "array", name]}

    return encode(state, ""), arrays


def decode_state(state: Json, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Decode a state from JSON. Its arrays are NumPy's now."""
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


def check_keys(state: dict[object, PyTree], path: str) -> None:
    for key in state:
        if type(key) not in PLAIN:
            raise TypeError(
                f"A state to be saved has the key {key!r} of type {type(key).__name__} in the dict at {path.removeprefix('/')}. Its keys may be "
                f"texts, numbers, bools and None."
            )


def check_array(value: PyTree, path: str) -> None:
    """Refuse what is no array, and an array of anything but numbers."""
    kind = type(value)
    if not isinstance(value, jax.Array | np.generic) and kind not in (np.ndarray, np.memmap):
        raise TypeError(
            f"A state to be saved holds {value!r} of type {kind.__name__} at {path.removeprefix('/')}. get_state() must return what JSON knows "
            f"(numbers, texts, lists, dicts, None), tuples, and arrays, and nothing of a class that is derived of theirs: it would come back as "
            f"something else. Turn it into these."
        )
    if str(value.dtype) not in DTYPES:  # another order of bytes would be part of this text
        raise TypeError(
            f"A state to be saved holds an array of dtype {value.dtype} at {path.removeprefix('/')}, which is not kept. Turn it into numbers, or "
            f"into a list."
        )
