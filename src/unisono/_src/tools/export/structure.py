"""Nested lists, tuples and dicts in JSON, and their leaves in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from unisono._src.typing import Json, PyTree

Node: TypeAlias = dict[str, list[Json]]
"""A container: {"list" | "tuple": structures} or {"dict": pairs of a key and a structure}."""

Structure: TypeAlias = int | Node | None
"""The number of a leaf, None, or a container."""


class StructureError(TypeError):
    """A structure cannot be described in JSON."""


def flatten_tree(nested: PyTree) -> tuple[Structure, list[PyTree]]:
    """Split a tree into its structure and its leaves.

    It is a tree of lists, tuples, dicts with texts as keys, and None. Dicts keep their order.

    Example:
        >>> flatten_tree({"b": 5.0, "a": [6.0, None]})
        ({'dict': [['b', 0], ['a', {'list': [1, None]}]]}, [5.0, 6.0])
    """
    leaves: list[PyTree] = []

    def describe(part: PyTree) -> Structure:
        if part is None:
            return None
        if isinstance(part, dict):
            wrong = [key for key in part if not isinstance(key, str)]
            if wrong:
                raise StructureError(
                    f"An export keeps dicts with texts as keys, and received the key {wrong[0]!r} of type {type(wrong[0]).__name__}."
                )
            return {"dict": [[key, describe(value)] for key, value in part.items()]}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            raise StructureError(
                f"An export keeps lists, tuples and dicts, and received a named tuple of type {type(part).__name__}. Return a dict with "
                f"the keys {list(part._fields)} instead."  # pyright: ignore[reportAttributeAccessIssue]  # hasattr has found it
            )
        if isinstance(part, list | tuple):
            return {"list" if isinstance(part, list) else "tuple": [describe(value) for value in part]}
        leaves.append(part)
        return len(leaves) - 1

    return describe(nested), leaves


def build_tree(structure: Structure, leaves: Sequence[object]) -> PyTree:
    """Build the tree of a structure of `flatten_tree`, with these leaves.

    Example:
        >>> build_tree({"tuple": [0, {"dict": [["a", 1]]}]}, ["x", "y"])
        ('x', {'a': 'y'})
    """
    if structure is None or isinstance(structure, int):
        return None if structure is None else leaves[structure]
    (kind, parts), *_ = structure.items()
    if kind == "dict":
        return {key: build_tree(part, leaves) for key, part in parts}
    values = [build_tree(part, leaves) for part in parts]
    return values if kind == "list" else tuple(values)


def match_leaves(structure: Structure, given: PyTree, names: Sequence[str]) -> list[PyTree]:
    """List the leaves of a tree that has this structure.

    A structure that means the same will do. As in Keras' functional models, a list equals a tuple, a leaf equals a list of one leaf, and a
    dict by the names of the leaves equals a list of the leaves.

    Args:
        structure: The expected structure.
        given: The tree that was received.
        names: The names of the leaves.
    """

    def take(expected: Structure, part: PyTree) -> Iterator[PyTree]:
        if isinstance(expected, int):
            part = part[0] if isinstance(part, list | tuple) and len(part) == 1 else part
            if isinstance(part, dict) and names[expected] in part:
                part = part[names[expected]]
            if part is None or isinstance(part, list | tuple | dict):
                raise LookupError
            yield part
        elif expected is not None:
            for inner, value in pair(expected, part):
                yield from take(inner, value)

    def pair(expected: Node, part: PyTree) -> list[tuple[Structure, PyTree]]:
        (kind, parts), *_ = expected.items()
        if isinstance(part, dict):
            keyed = parts if kind == "dict" else [(names[inner] if isinstance(inner, int) else None, inner) for inner in parts]
            if any(key not in part for key, _ in keyed):
                raise LookupError
            return [(inner, part[key]) for key, inner in keyed]
        values = part if isinstance(part, list | tuple) else [part]
        if kind == "dict" or len(values) != len(parts):
            raise LookupError
        return list(zip(parts, values, strict=True))

    def show(part: PyTree) -> PyTree:
        if isinstance(part, dict):
            return {key: show(value) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return [show(value) for value in part]
        return tuple(part.shape) if hasattr(part, "shape") else part

    try:
        return list(take(structure, given))
    except LookupError:
        raise ValueError(
            f"The exported model takes {build_tree(structure, names)!r} and received {show(given)!r}. Give it arrays in that structure."
        ) from None
