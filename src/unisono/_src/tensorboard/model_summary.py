"""A model as TensorBoard shows it."""

from __future__ import annotations

import json
from typing import Any

from unisono._src.tensorboard.event_file import EventFile
from unisono._src.tensorboard.layer_graph import MODELS, Node, nodes_of


def write(model: Any, file: EventFile) -> None:
    """The graph of layers, also in the form and under the tag that Keras writes ("conceptual graph"); or a table of layers as text."""
    drawn = drawing_of(model)
    if drawn is None:
        file.tensor("model_summary", "text", f"```\n{text_of(model)}\n```".encode(), 0)
        return
    config, nodes = drawn
    file.tensor("keras", "graph_keras_model", config.encode(), 0, content=b"1")
    file.graph(nodes)


def drawing_of(model: Any) -> tuple[str, list[Node]] | None:
    """Its JSON, and the graph in it."""
    if type(model).__name__ not in MODELS:
        return None
    try:
        config = model.to_json()
        return config, nodes_of(json.loads(config))
    except Exception:  # a layer of the user's has no config, or one that is like no other: no reason to lose a training
        return None


def text_of(model: Any) -> str:
    lines: list[str] = []
    model.summary(print_fn=lines.append)
    return "\n".join(lines)
