"""Losses and layers that look at the whole batch, as guides have them, in phases: with the numbers of the whole batch."""

from __future__ import annotations

import keras
import pytest

from sizes import mostly_slow
from whole_batch_layers import Center, Codebook, Renewed, Sampling, between, mlp
from whole_batch_losses import SPARSE, barlow_twins, hardest_triplets, negatives_of_the_batch, supervised_contrast
from whole_batch_of_phases import CLOSE, compare, make_batch, make_step

FAMILIES = {
    "barlow twins": (mlp, barlow_twins),
    "hardest triplets": (mlp, hardest_triplets),
    "negatives of the batch": (mlp, negatives_of_the_batch),
    "supervised contrast": (mlp, supervised_contrast),
    "variational autoencoder": (between(Sampling), SPARSE),
    "codebook": (between(Codebook), SPARSE),
    "center": (between(Center), SPARSE),
    "renewed mean": (between(Renewed), SPARSE),
}


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "hardest triplets", "renewed mean"))
def test_a_family_has_the_numbers_of_the_whole_batch(family, rng):
    make_model, loss = FAMILIES[family]
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    batch = make_batch(model, rng)
    model.train_on_batch(*batch)
    step, state = make_step(model)
    error, _ = compare(lambda state, batch: step(state, batch)[::-1], state, batch)
    assert error < CLOSE
