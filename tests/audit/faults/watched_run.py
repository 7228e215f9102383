"""Run a script as its user would, on the placement that the environment names, and keep the bits after each of its steps.

`python watched_run.py SCRIPT FOLDER` writes FOLDER/PROCESS.json. UNISONO_DEVICES and UNISONO_REPLICAS, where they are set, take the place of
`devices=` and `replicas=` in the script's strategy.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import sys
from typing import Any

import unisono as un

# isort: split
import keras
import numpy as np

from unisono._src.fit import batch_groups

STRATEGIES = ("MirroredStrategy", "MultiWorkerMirroredStrategy")
OVERRIDES = {"devices": "UNISONO_DEVICES", "replicas": "UNISONO_REPLICAS"}

steps: list[str] = []
"""Fingerprints of what the script trains: at the start, and after each step."""


def find_trained() -> list[keras.Model | keras.optimizers.Optimizer]:
    """Return the models and optimizers among the script's names."""
    kinds = keras.Model | keras.optimizers.Optimizer
    return [value for value in vars(sys.modules["__main__"]).values() if isinstance(value, kinds)]


def note_step() -> None:
    steps.append(un.fingerprint(find_trained()))


class NoteSteps(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        if not steps:
            note_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        note_step()


def place_strategy(name: str) -> None:
    """Let the environment say where the strategies of this name run."""
    strategy = getattr(un, name)
    stock_init = strategy.__init__
    stock_run = strategy.run

    def init(self: un.Strategy, **arguments: Any) -> None:
        stock_init(self, **arguments | {key: int(os.environ[name]) for key, name in OVERRIDES.items() if name in os.environ})

    def run(self: un.Strategy, *args: Any, **kwargs: Any) -> Any:
        if not steps:
            note_step()
        returned = stock_run(self, *args, **kwargs)
        note_step()
        return returned

    strategy.__init__ = init
    strategy.run = run


def note_fits() -> None:
    """Let each `fit` keep the bits after its steps. The user's callbacks come before."""
    stock_fit = keras.Model.fit

    def fit(self: keras.Model, *args: Any, callbacks: Any = (), **kwargs: Any) -> Any:
        return stock_fit(self, *args, callbacks=[*(callbacks or ()), NoteSteps()], **kwargs)

    keras.Model.fit = fit
    batch_groups.has_batch_callbacks = lambda callbacks, mode: True  # one call of a step program takes one batch


def read_weights(models: list[keras.Model]) -> list[float]:
    """Return the weights of the models, one behind the other."""
    weights = [weight for model in models for weight in model.trainable_weights]
    return np.concatenate([np.ravel(np.asarray(weight.value)) for weight in weights]).tolist()


def main(script: str, folder: str) -> None:
    for name in STRATEGIES:
        place_strategy(name)
    note_fits()
    sys.argv = [script]
    names = runpy.run_path(script, run_name="__main__")
    models = [value for value in names.values() if isinstance(value, keras.Model)]
    layers = [layer.name for model in models for layer in model.layers]
    record = {"steps": steps, "layers": layers, "weights": read_weights(models)}
    (pathlib.Path(folder) / f"{os.environ.get('UNISONO_PROCESS', '0')}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
