# Keras 3.15 does not annotate its functions of nested structures: here are those that Unisono calls.

from collections.abc import Callable
from typing import Any

def flatten(structure: object) -> list[Any]: ...
def map_structure(func: Callable[..., Any], *structures: object, none_is_leaf: bool = True) -> Any: ...
