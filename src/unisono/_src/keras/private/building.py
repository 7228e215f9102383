"""Building a model by calling it, for code that cannot be traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras

from unisono._src.keras.private.data_adapters import unpack_batch
from unisono._src.keras.private.models import is_built, list_layers
from unisono._src.typing import UserBatch


def needs_batch(model: keras.Model) -> bool:
    """Whether Keras needs a batch to build model, metrics or losses."""
    containers = [container for container in (model._compile_metrics, model._compile_loss) if container is not None]
    return not all(part.built for part in [*list_layers(model), *containers])


def build_by_calling(model: keras.Model, batch: UserBatch) -> None:
    """Build what Keras could not build without values.

    The forward pass, the metrics and the losses run on these rows.

    Variables that had a value before keep it, and metrics are reset.
    """
    x, y, sample_weight = jax.tree.map(jnp.asarray, unpack_batch(batch))
    before = [(variable, variable.value) for variable in model.variables]
    y_pred = model(x, training=False)
    for _ in list_layers(model):  # a layer counts as built only if all its inner layers were built before the call
        if is_built(model):
            break
        y_pred = model(x, training=False)
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    model._compute_loss(x, y, y_pred, sample_weight=sample_weight, training=False)
    for variable, value in before:
        variable.assign(value)
    model.reset_metrics()
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
