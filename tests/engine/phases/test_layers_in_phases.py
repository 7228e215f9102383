"""All layers of Keras in phases: their training steps are traced and analysed, and nothing is gathered."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import layer_groups
from sizes import mostly_slow
from whole_batch_of_phases import analyse

LEFT_OUT = {"random patches", "random places", "more random places"}
"""In the first, rows meet on purpose: mixing and cutting. Keras compiles none of the others."""


GROUPS = sorted({*layer_groups.EXACT, *layer_groups.OTHERS} - LEFT_OUT)
QUICK = ("random colours", "noise and batch statistics", "merges and activations")


@pytest.mark.parametrize("group", mostly_slow(GROUPS, *QUICK))
def test_layers_gather_nothing(group):
    model, options, data = layer_groups.make_family(group)
    model.compile(**options)
    batch = jnp.asarray(data["x"][:10]), jnp.asarray(data["y"][:10])
    model._symbolic_build(data_batch=batch)  # Keras makes variables at the first batch
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables)
    state = tuple([variable.value for variable in of] for of in groups)
    phased = analyse(model.train_step, state, batch, sizes=(5, 5))
    assert [equation.layer for equation in phased.analysis.gathered.values()] == []
