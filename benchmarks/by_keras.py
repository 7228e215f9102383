"""Contenders whose step is that of `fit`: Keras on its three backends, its own data parallelism, TensorFlow's, and ours.

python by_keras.py CONTENDER WORKLOAD SETTINGS-AS-JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

LAUNCHED = "ours-launched"
"""Ours in one of several processes, of which the first prints."""


def make_scope(contender: str, settings: dict[str, Any]) -> Any:
    """Return the scope of a contender. Call it before anything starts a backend."""
    if contender == "ours":
        import unisono as un

        return un.MirroredStrategy(**settings.get("strategy", {})).scope()
    if contender == LAUNCHED:
        import unisono as un

        strategy = un.MultiWorkerMirroredStrategy(**settings["strategy"])
        if not strategy.writes:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return strategy.scope()
    if contender == "keras-jax":
        return contextlib.nullcontext()
    if contender == "keras-jax-data-parallel":
        import jax

        jax.config.update("jax_num_cpu_devices", settings["devices"])
        import keras

        devices = keras.distribution.list_devices()[: settings["devices"]]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False))
        return contextlib.nullcontext()
    if contender in ("keras-tensorflow", "tf-mirrored"):
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(settings.get("threads", 0))
        if contender == "keras-tensorflow":
            return contextlib.nullcontext()
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * settings["devices"])
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(settings["devices"])]).scope()
    import torch

    torch.set_num_threads(settings.get("threads", torch.get_num_threads()))
    return contextlib.nullcontext()


def main() -> None:
    contender = sys.argv[1]
    name = sys.argv[2]
    settings = json.loads(sys.argv[3])
    scope = make_scope(contender, settings)
    import keras
    from timing import report_epochs
    from workloads import MORE, WORKLOADS

    if "data_format" in settings:
        keras.config.set_image_data_format(settings["data_format"])
    workload = (WORKLOADS | MORE)[name]
    with scope:
        model, optimizer = workload.model(keras)
        model.compile(
            optimizer,
            workload.loss(keras),
            metrics=["accuracy"],
            steps_per_execution=settings.get("steps_per_execution", 1),
            **({"jit_compile": settings["jit"]} if "jit" in settings else {}),
        )
    x, y = workload.data()
    if settings.get("data_format") == "channels_first":
        x = x.transpose(0, 3, 1, 2).copy()
    is_ready = (lambda: True) if contender == LAUNCHED else None  # processes train as many epochs
    report_epochs(workload, lambda _: model.fit(x, y, batch_size=workload.batch, verbose=0), is_ready)


if __name__ == "__main__":
    main()
