"""Building a model by its first batch."""

from __future__ import annotations

import keras

from unisono._src.engine.global_batch import as_global_batch
from unisono._src.keras.checks.jax_errors import explain_step_errors
from unisono._src.keras.fit.bond import Bond
from unisono._src.keras.private.compiled_losses import hide_masks
from unisono._src.keras.private.data_adapters import count_static_rows, read_first_batch, unpack_batch
from unisono._src.keras.private.models import build_by_calling, get_class_method, needs_batch
from unisono._src.keras.private.trainer_state import list_model_variables
from unisono._src.placement import split_evenly
from unisono._src.typing import KerasObject, UserBatch


def build_model(bond: Bond, iterator: KerasObject, data_batch: UserBatch) -> None:
    """Build the model by a first batch, where it is not built.

    The batch comes from an iterator, or is given. The variables are then the same in all processes.
    """
    model = bond.model
    replicas = bond.strategy.num_replicas_in_sync
    fixed = count_static_rows(model)
    if fixed is not None and replicas > 1:
        batch = as_global_batch(data_batch if iterator is None else read_first_batch(iterator))
        if {len(part) for part in split_evenly(batch.rows, replicas)} == {fixed}:
            iterator = None
            data_batch = batch.shapes(fixed)  # the fixed rows are a replica's; else they are the global batch's
    with bond.strategy.acting(), explain_step_errors(model, data_batch, replicas, bond.is_eager), hide_masks():
        call_builder(bond, iterator, data_batch)
    bond.strategy.agree(list_model_variables(model))


def build_for_prediction(bond: Bond, batch: UserBatch) -> None:
    """Build a model by a batch, as Keras does where it predicts. The model need not be compiled."""
    x, _, _ = unpack_batch(batch)
    replicas = bond.strategy.num_replicas_in_sync
    with (
        bond.strategy.acting(),
        explain_step_errors(bond.model, batch, replicas, bond.is_eager),
        hide_masks(),
        keras.StatelessScope(),
    ):
        bond.model(x)
    bond.strategy.agree(list_model_variables(bond.model))


def call_builder(bond: Bond, iterator: KerasObject, data_batch: UserBatch) -> None:
    """Build the model by Keras, or else by a forward pass. The latter is for steps that are not compiled, where Keras fails."""
    by_keras = get_class_method(bond.model, "build_by")
    if not (bond.is_eager and needs_batch(bond.model)):
        return by_keras(iterator=iterator, data_batch=data_batch)
    batch = data_batch if iterator is None else read_first_batch(iterator)
    try:
        by_keras(data_batch=batch)
    except Exception:  # Keras builds without values, which code that is not compiled may need
        build_by_calling(bond.model, as_global_batch(batch, is_cut=bond.strategy.num_replicas_in_sync > 1).tree())
