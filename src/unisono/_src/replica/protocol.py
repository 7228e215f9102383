"""The state of a step, and what is recorded of it."""

from __future__ import annotations

from typing import TypeAlias

import keras

from unisono._src.typing import Array

State: TypeAlias = tuple[list[Array], ...]
"""Groups of arrays. Most steps have the groups of Keras' loops."""

RecordedVariables: TypeAlias = list[tuple[str, list[keras.Variable]]]
"""(kind, variables) that are recorded of a step: gradients, then the groups of the state without the metrics."""
