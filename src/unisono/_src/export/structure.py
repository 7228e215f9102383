"""Nested lists, tuples and dicts as JSON, and their leaves in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Structure = Any
"""A leaf's number, None, or {"list" | "tuple" | "dict": what is in it}."""


class StructureError(TypeError):
    """What cannot be described in JSON."""


def taken_apart(nested: Any) -> tuple[Structure, list[Any]]:
    """(structure, leaves). The keys of dicts keep their order.

    Args:
        nested: Leaves in lists, tuples, dicts with texts as keys, and None.

    Example:
        >>> taken_apart({"b": 5.0, "a": [6.0, None]})
        ({'dict': [['b', 0], ['a', {'list': [1, None]}]]}, [5.0, 6.0])
    """
    leaves: list[Any] = []

    def structure_of(part: Any) -> Structure:
        if part is None:
            return None
        if isinstance(part, dict):
            return {"dict": [[text(key), structure_of(value)] for key, value in part.items()]}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            raise StructureError(
                f"An export keeps lists, tuples and dicts, and received a named tuple of type {type(part).__name__}. Return a dict with "
                f"the keys {list(part._fields)} instead."  # pyright: ignore[reportAttributeAccessIssue]
            )
        if isinstance(part, list | tuple):
            return {"list" if isinstance(part, list) else "tuple": [structure_of(value) for value in part]}
        leaves.append(part)
        return len(leaves) - 1

    return structure_of(nested), leaves


def put_together(structure: Structure, leaves: Sequence[Any]) -> Any:
    """What `taken_apart` took apart, with these leaves.

    Example:
        >>> put_together({"tuple": [0, {"dict": [["a", 1]]}]}, ["x", "y"])
        ('x', {'a': 'y'})
    """
    if structure is None or isinstance(structure, int):
        return None if structure is None else leaves[structure]
    (kind, parts), *_ = structure.items()
    if kind == "dict":
        return {key: put_together(part, leaves) for key, part in parts}
    made = [put_together(part, leaves) for part in parts]
    return made if kind == "list" else tuple(made)


def leaves_like(structure: Structure, given: Any, names: Sequence[str]) -> list[Any]:
    """The leaves of what has this structure, or one that means the same.

    As Keras' functional models do it, lists and tuples are the same, one leaf is as good as a list of one, and a dict by the names
    of the leaves as good as a list of them.

    Args:
        structure: What is expected.
        given: What came.
        names: Of the leaves.
    """
    found: dict[int, Any] = {}

    def take(expected: Structure, part: Any) -> None:
        if isinstance(expected, int):
            part = part[0] if isinstance(part, list | tuple) and len(part) == 1 else part
            if isinstance(part, dict) and names[expected] in part:
                part = part[names[expected]]
            if part is None or isinstance(part, list | tuple | dict):
                raise mismatch(structure, given, names)
            found[expected] = part
        elif expected is not None:
            for inner, value in pairs(expected, part):
                take(inner, value)

    def pairs(expected: Structure, part: Any) -> list[tuple[Structure, Any]]:
        (kind, parts), *_ = expected.items()
        if isinstance(part, dict):
            keyed = parts if kind == "dict" else [(names[i] if isinstance(i, int) else None, i) for i in parts]
            if any(key not in part for key, _ in keyed):
                raise mismatch(structure, given, names)
            return [(inner, part[key]) for key, inner in keyed]
        values = list(part) if isinstance(part, list | tuple) else [part]
        if kind == "dict" or len(values) != len(parts):
            raise mismatch(structure, given, names)
        return list(zip(parts, values, strict=True))

    take(structure, given)
    return [found[index] for index in range(len(names))]


def mismatch(structure: Structure, given: Any, names: Sequence[str]) -> ValueError:
    def shape_of(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: shape_of(value) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return [shape_of(value) for value in part]
        return tuple(part.shape) if hasattr(part, "shape") else part

    return ValueError(
        f"The exported model takes {put_together(structure, names)!r} and received {shape_of(given)!r}. Give it arrays in that structure."
    )


def text(key: Any) -> str:
    if not isinstance(key, str):
        raise StructureError(
            f"An export keeps dicts with texts as keys, and received the key {key!r} of type {type(key).__name__}."
        )
    return key
