"""A process of its own: trains a family in a precision with every optimizer, on every placement, from every source of data, and
prints a fingerprint of each training as JSON.

python train_matrix.py '{"family": "conv", "precision": "float32", "optimizers": ["sgd"], "placements": {"8": [1, 3]}}'
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import optimizers

spec = json.loads(sys.argv[1])
placements = {int(replicas): counts for replicas, counts in spec["placements"].items()}
un.MirroredStrategy(devices=max(map(max, placements.values())), replicas=max(placements))  # before anything starts JAX

from families import FAMILIES
from layer_groups import COUNT, make_family
from sources import SOURCES

BATCH = 10  # batches of ten, ten and three rows: whatever R is, a replica has two rows, one, or none

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01, clipnorm=1.0),
    "adamw": lambda: optimizers.AdamW(optimizers.schedules.CosineDecay(0.01, 10), use_ema=True, ema_momentum=0.9),
    "rmsprop": lambda: optimizers.RMSprop(0.01, global_clipnorm=1.0),
}


def scaled(optimizer: Any) -> Any:
    """Under a loss scale, for float16, that is low enough for the first steps, and grows."""
    if keras.config.dtype_policy().name != "mixed_float16":
        return optimizer
    return optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=2)


def first_rows(rows: Any) -> Any:
    """As many as the groups have."""
    return {name: of_name[:COUNT] for name, of_name in rows.items()} if isinstance(rows, dict) else rows[:COUNT]


def trainings(family: str, optimizer: str, replicas: int, devices: int) -> Iterator[tuple[str, str]]:
    """(source of data, fingerprint) of a model that is trained from its first state again, from each source; then what it
    evaluates and predicts."""
    keras.utils.set_random_seed(0)
    with un.MirroredStrategy(devices=devices, replicas=replicas).scope():
        model, compile_, data = FAMILIES[family]() if family in FAMILIES else make_family(family)
    model.compile(**compile_ | {"optimizer": scaled(OPTIMIZERS[optimizer]())})
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    start, untrained = [variable.numpy() for variable in variables], un.fingerprint(model.trainable_variables)
    if "class_weight" in data:  # which Keras takes beside arrays only
        data["sample_weight"] = np.array([data["class_weight"].get(label, 1.0) for label in data["y"]], "float32")
    rows = tuple(first_rows(data[name]) for name in ("x", "y", "sample_weight") if name in data)
    for source, arguments in SOURCES.items():
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        history = model.fit(**arguments(rows, BATCH), shuffle=False, verbose=0).history
        assert un.fingerprint(model.trainable_variables) != untrained, "nothing was trained"
        yield source, un.fingerprint(model, history)
    logs = model.evaluate(**SOURCES["arrays"](rows, BATCH), verbose=0, return_dict=True)
    yield "evaluate and predict", un.fingerprint(logs, model.predict(rows[0], batch_size=BATCH, verbose=0))


keras.config.set_dtype_policy(spec["precision"])
for optimizer in spec["optimizers"]:
    for replicas, counts in placements.items():
        for devices in counts:
            for source, fingerprint in trainings(spec["family"], optimizer, replicas, devices):
                print(json.dumps([optimizer, replicas, devices, source, fingerprint]), flush=True)
