"""Digests of Python values. Two runs are compared by them, so that none says anything of an address or of the order of a set."""

from __future__ import annotations

import collections
import hashlib
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from unisono._src.typing import UserObject

OPAQUE = "?"
"""In place of the digest of a value whose content is not known."""

SET = "set"
"""The beginning of the digest of a set."""

DEPTH = 3
"""How far into lists, dicts and objects a digest looks."""

MOST_ITEMS = 200
MOST_BYTES = 1 << 20
LONGEST = 60
"""Longer texts are shortened."""


def digest_value(value: UserObject, depth: int = 0) -> str:
    """Return a short digest of a value; `OPAQUE` where it cannot be known."""
    try:
        return digest_known(value, depth)
    except Exception:  # of a class of the user's: a trace must not change what the script does
        return OPAQUE


def digest_known(value: UserObject, depth: int) -> str:
    """Return the digest of a value; raise what its class raises."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return shorten_text(f"{kind.__name__}:{value!r}")
    if kind.__name__ in ("ndarray", "ArrayImpl") or (kind.__module__ == "numpy" and hasattr(value, "dtype")):
        import numpy  # the script has imported it

        return digest_numbers(numpy.asarray(value))  # raises for an array that is being traced
    if depth >= DEPTH:
        return OPAQUE
    if kind in (list, collections.deque) or isinstance(value, tuple):
        return join_digests(kind.__name__, [digest_value(item, depth + 1) for item in list(value)[:MOST_ITEMS]])
    if isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
        return join_digests("dict", [digest_value(key, depth + 1) + digest_value(item, depth + 1) for key, item in items])
    if isinstance(value, (set, frozenset)):
        return SET + join_digests("set", sorted(digest_value(item, depth + 1) for item in list(value)[:MOST_ITEMS]))
    if isinstance(value, types.FunctionType):
        return shorten_text(f"function:{value.__code__.co_firstlineno}:{tuple(value.__code__.co_positions())}")
    return digest_object(value, depth)


def digest_object(value: UserObject, depth: int) -> str:
    """Return the digest of an object by its attributes; of a generator of random numbers by its state."""
    kind = type(value)
    if kind.__name__ == "Generator" and hasattr(value, "bit_generator"):
        return shorten_text(repr(value.bit_generator.state))
    if kind.__name__ == "Random":
        return shorten_text(repr(value.getstate()))
    if hasattr(value, "stateless_call") or hasattr(value, "add_weight") or isinstance(value, (types.ModuleType, type)):
        return OPAQUE
    attributes = getattr(value, "__dict__", None)
    if not attributes or kind.__module__.startswith(("jax", "unisono", "concurrent", "threading")):
        return OPAQUE
    parts = [name + digest_value(item, depth + 1) for name, item in attributes.items() if not name.startswith("__")]
    return join_digests(kind.__name__, [part for part in parts[:MOST_ITEMS] if not part.endswith(OPAQUE)])


def digest_numbers(array: np.ndarray) -> str:
    """Return the digest of an array: its dtype, its shape, and a hash of its first bytes."""
    import numpy

    head = f"array:{array.dtype}:{array.shape}:"
    flat = array.ravel()
    if array.dtype.hasobject:
        return shorten_text(head + repr(flat[:MOST_ITEMS].tolist()))
    most = max(1, MOST_BYTES // max(1, array.itemsize))
    return head + hash_bytes(numpy.ascontiguousarray(flat[:most]).tobytes())


def join_digests(name: str, parts: list[str]) -> str:
    """Return the digest of what consists of parts; `OPAQUE` where nothing is known of any of them."""
    if parts and all(part == OPAQUE for part in parts):
        return OPAQUE
    return shorten_text(f"{name}:{len(parts)}:{';'.join(parts)}")


def shorten_text(text: str) -> str:
    """Return a text, of a long one its beginning and a hash."""
    return text if len(text) <= LONGEST else f"{text[:24]}...{hash_bytes(text.encode())}"


def hash_bytes(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
