"""The promise, over random small models, sizes and placements."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keras import layers

import unisono as un
from sizes import cases

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("compiled_for_users")]

EXAMPLES = 40 if os.environ.get("UNISONO_MATRIX") == "full" else cases(1, 8)
MOST_PIECES, MOST_ROWS, MOST_REPLICAS, EPOCHS = cases((2, 12, 4, 1), (3, 40, 8, 2))
"""The fewer replicas, and the shorter batches, the fewer programs to compile."""
DIVERGED = {"pieces": ["activity"], "optimizer": "sgd", "rows": 16, "batch": 1, "weighted": False, "placements": (2, 2)}
"""At a rate of 0.05."""

PIECES = {
    "dense": lambda: layers.Dense(5, "tanh", kernel_regularizer="l2"),
    "norm": lambda: layers.BatchNormalization(),
    "layer norm": lambda: layers.LayerNormalization(),
    "dropout": lambda: layers.Dropout(0.3),
    "activity": lambda: layers.Dense(4, "gelu", activity_regularizer="l1"),
    "noise": lambda: layers.GaussianNoise(0.1),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
    "adamw": lambda: keras.optimizers.AdamW(0.01, use_ema=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, global_clipnorm=1.0),
}


@settings(max_examples=EXAMPLES)
@cases(lambda test: test, example(**DIVERGED))  # what is drawn first is nearly the same
@given(
    pieces=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=MOST_PIECES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    rows=st.integers(1, MOST_ROWS),
    batch=st.integers(1, MOST_ROWS // 2),
    weighted=st.booleans(),
    placements=st.integers(2, MOST_REPLICAS).flatmap(lambda r: st.tuples(st.just(r), st.integers(2, r))),
)
def test_a_random_model_trains_to_the_same_bits(pieces, optimizer, rows, batch, weighted, placements):
    replicas, devices = placements
    rng = np.random.default_rng(rows)
    data = {"x": rng.standard_normal((rows, 6)).astype("float32"), "y": rng.standard_normal((rows, 2)).astype("float32")}
    if weighted:
        data["sample_weight"] = rng.uniform(0.1, 2, rows).astype("float32")
    seen = []
    for strategy in (un.OneDeviceStrategy(replicas=replicas), un.MirroredStrategy(devices=devices, replicas=replicas)):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([layers.Input((6,)), *(PIECES[name]() for name in pieces), layers.Dense(2)])
        model.compile(OPTIMIZERS[optimizer](), "mse", weighted_metrics=["mae"])
        history = model.fit(**data, batch_size=batch, epochs=EPOCHS, verbose=0).history
        predicted = un.fingerprint(model.predict(data["x"], batch_size=batch, verbose=0))
        seen.append((un.fingerprint(model), history, predicted))
    assert seen[0] == seen[1]
    assert all(np.isfinite(history["loss"]).all() for _, history, _ in seen)
