"""Half precision by one line, as in plain Keras: what computes in it, what does not, and the same bits on two placements.

Run it with `python examples/mixed_precision.py`.
"""

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import layers

# Two rings of points.
rng = np.random.default_rng(0)
label = rng.integers(0, 2, 500)
angle = rng.uniform(0, 2 * np.pi, 500)
radius = 1 + label + 0.2 * rng.normal(size=500)
point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype("float32")


def train(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((2,)),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.Dense(2, dtype="float32", name="logits"),  # logits in full: a loss of half precision would be coarse
        ])  # fmt: skip
    # Under mixed_float16, Keras puts the optimizer in a LossScaleOptimizer: small gradients would be zero otherwise.
    model.compile(
        optimizer=keras.optimizers.Adam(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(point, label, batch_size=64, epochs=10, verbose=0)
    return model


two = un.MirroredStrategy(devices=2, replicas=4)  # first, because it makes two CPU devices where there is no GPU
one = un.OneDeviceStrategy(replicas=4)

for policy in ("mixed_bfloat16", "mixed_float16"):
    keras.config.set_dtype_policy(policy)
    print(policy)
    for strategy in (two, one):
        model = train(strategy)
        _, accuracy = model.evaluate(point, label, batch_size=100, verbose=0)
        print(f"  on {len(strategy.devices)}: accuracy {accuracy:.1%}, {un.fingerprint(model)}")
    for layer in model.layers:
        print(f"  {layer.name} computes in {layer.compute_dtype}, its variables are {layer.variable_dtype}")
    scale = getattr(model.optimizer, "dynamic_scale", None)
    print("  no loss scale" if scale is None else f"  loss scale {float(scale.value):g}")
