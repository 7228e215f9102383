"""States as JSON, with their arrays apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

STATES = "states/"
"""Before the names of arrays of states, which no object of the user's can be called."""

ARRAY = "array of the checkpoint"
"""The key of what stands in place of an array."""


def separated(state: Any, path: str = "states") -> tuple[Any, dict[str, Any]]:
    """(The state with arrays replaced by their names, the arrays by name, those of devices still there)."""
    if isinstance(state, np.ndarray | jax.Array):
        return {ARRAY: path}, {path: state if isinstance(state, jax.Array) else state.copy()}
    if isinstance(state, np.generic):
        return state.item(), {}
    if isinstance(state, Mapping):
        parts = {str(key): separated(value, f"{path}/{key}") for key, value in state.items()}
        return {key: plain for key, (plain, _) in parts.items()}, merged(arrays for _, arrays in parts.values())
    if isinstance(state, list | tuple):
        of_list = [separated(value, f"{path}/{index}") for index, value in enumerate(state)]
        return [plain for plain, _ in of_list], merged(arrays for _, arrays in of_list)
    if state is None or isinstance(state, bool | int | float | str):
        return state, {}
    raise TypeError(
        f"A state to be saved holds {state!r} of type {type(state).__name__} at {path.removeprefix(STATES)}. get_state() must return what "
        f"JSON knows (numbers, texts, lists, dicts, None), and arrays."
    )


def joined(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The state with its arrays."""
    if isinstance(state, dict):
        if set(state) == {ARRAY}:
            return arrays[state[ARRAY]]
        return {key: joined(value, arrays) for key, value in state.items()}
    return [joined(value, arrays) for value in state] if isinstance(state, list) else state


def merged(parts: Any) -> dict[str, Any]:
    return {name: array for part in parts for name, array in part.items()}
