"""Graphs whose batches cannot be cut into rows, and a model of them: nodes beside a label for each graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops


class GraphNet(keras.Model):
    """A number for each graph, from the nodes of all graphs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.last = layers.Dense(4, "tanh"), layers.Dropout(0.2), layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        nodes = self.drop(self.hidden(inputs["nodes"]), training=training)
        return self.last(ops.segment_sum(nodes, inputs["graph"], num_segments=inputs["like"].shape[0]))


def draw_graphs(sizes: Sequence[tuple[int, int]], passes: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yield (inputs, targets) of batches of these sizes, (nodes, graphs), in each pass."""
    rng = np.random.default_rng(0)
    for _ in range(passes):
        for nodes, count in sizes:
            x = rng.normal(size=(nodes, 5)).astype("float32")
            inputs = {"nodes": x, "graph": np.sort(rng.integers(0, count, nodes)), "like": np.zeros(count)}
            yield inputs, rng.normal(size=(count, 1)).astype("float32")
