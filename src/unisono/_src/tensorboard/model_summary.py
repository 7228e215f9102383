"""The layers of a model as TensorBoard shows them: a graph, or a table."""

from __future__ import annotations

import json

import keras

from unisono._src.tensorboard.event_file import EventFile
from unisono._src.tensorboard.layer_graph import MODELS, Node, build_nodes


def write_model(model: keras.Model, file: EventFile) -> None:
    """Write the graph of layers, also in the form and under the tag of Keras ("conceptual graph"); or a table of layers as text."""
    graph = draw_graph(model)
    if graph is None:
        file.tensor("model_summary", "text", f"```\n{format_table(model)}\n```".encode(), 0)
        return
    config, nodes = graph
    file.tensor("keras", "graph_keras_model", config.encode(), 0, content=b"1")
    file.write_layers(nodes)


def draw_graph(model: keras.Model) -> tuple[str, list[Node]] | None:
    """Return (the model's JSON, the nodes of its graph); None for a model without a graph."""
    if type(model).__name__ not in MODELS:
        return None
    try:
        config = model.to_json()
        return config, build_nodes(json.loads(config))
    except Exception:  # a layer of the user has no config, or an unusual one: no reason to lose a training
        return None


def format_table(model: keras.Model) -> str:
    lines: list[str] = []
    model.summary(print_fn=lines.append)
    return "\n".join(lines)
