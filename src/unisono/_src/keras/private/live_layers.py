"""The layers that live in this process. They are found by the scopes of a program, or by a variable."""

from __future__ import annotations

import gc
import re

import keras

TRANSFORMS = re.compile(
    r"\b(jvp|transpose|vmap|jit|checkpoint|rematted_computation|while|body|cond|branch_\d+_fun|closed_call)\b"
)
"""What JAX writes around the names of scopes."""


class LiveLayers:
    """The layers that live now, by their paths. A path goes from the model down, without the model's own name."""

    def __init__(self) -> None:
        layers = [thing for thing in gc.get_objects() if isinstance(thing, keras.layers.Layer)]
        self._models = {get_path(layer) for layer in layers if isinstance(layer, keras.Model)}
        inner = {self._strip_model(get_path(layer)): layer for layer in layers if not isinstance(layer, keras.Model)}
        self._paths = set(inner)
        self._owners: dict[str, str] = {}
        """The innermost layers of variables whose paths do not begin with theirs, as of the states of random numbers."""
        for path in sorted(inner, key=lambda path: path.count("/")):
            own = f"{get_path(inner[path])}/"
            self._owners |= {variable.path: path for variable in inner[path].variables if not variable.path.startswith(own)}

    def find_by_scopes(self, scopes: str) -> str | None:
        """Find the innermost layer in the scopes of a program. It is None if there is none but models."""
        return self._find_innermost([part for part in re.split(r"[/()]", TRANSFORMS.sub("", scopes)) if part])

    def find_by_variable(self, path: str) -> str | None:
        """Find the innermost layer that has a variable. It is None if there is none but models."""
        return self._find_innermost(path.split("/")) or self._owners.get(path)

    def _find_innermost(self, parts: list[str]) -> str | None:
        if parts and parts[0] in self._models:
            parts = parts[1:]
        # Layers that Keras never builds, as Dropout, have their name alone as their path, wherever they are.
        ends = (end for end in range(len(parts), 0, -1) if {"/".join(parts[:end]), parts[end - 1]} & self._paths)
        return next(("/".join(parts[:end]) for end in ends), None)

    def _strip_model(self, path: str) -> str:
        first, _, rest = path.partition("/")
        return rest if first in self._models and rest else path


def get_path(layer: keras.layers.Layer) -> str:
    return getattr(layer, "path", None) or layer.name
