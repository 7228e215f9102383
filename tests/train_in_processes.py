"""One of several processes that train together, or the only one: prints what came out, as JSON.

python train_in_processes.py '{"replicas": 8}'        unisono launch --processes 2 train_in_processes.py '{"replicas": 8}'
"""

import json
import os
import signal
import sys

import keras
import numpy as np

import unisono as un

spec = json.loads(sys.argv[1])
if "cores" in spec:  # of each process; it counts them when JAX starts
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec["cores"][int(os.environ["UNISONO_PROCESS"])]])
strategy = un.MultiWorkerMirroredStrategy(devices=spec.get("devices"), replicas=spec["replicas"])  # before anything starts JAX

import families
from loops import MODELS, Loop, data

found = {}
keras.utils.set_random_seed(spec.get("seed", 0))
if spec.get("other_weights"):  # as of processes of which each draws its own
    keras.utils.set_random_seed(strategy.cluster.process)

for family in spec.get("families", ()):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, compile_, rows = families.FAMILIES[family]()
    model.compile(**compile_)
    history = model.fit(**rows, batch_size=families.BATCH, epochs=1, verbose=0, validation_data=(rows["x"], rows["y"]))
    predictions = model.predict(rows["x"], batch_size=families.BATCH, verbose=0)
    found[family] = un.fingerprint(model), history.history, un.fingerprint(predictions)
    found[f"{family}, few rows"] = un.fingerprint(model.predict(rows["x"][:3], verbose=0))

if spec.get("loop"):
    loop = Loop(strategy, MODELS[spec["loop"]])
    rows = data("dense", 43)
    totals = []
    for batch in strategy.distribute_dataset(rows, batch_size=12):  # the last has seven rows, fewer than replicas
        totals.append(float(loop.one(batch)))
        if len(totals) == spec.get("killed_after") and strategy.cluster.process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    outputs, numbers = strategy.run(
        lambda batch: (loop.model(batch[0]), un.get_replica_context().replica_id_in_sync_group), args=(batch,)
    )
    each = strategy.local_results(outputs)
    found["loop"] = {
        "bits": un.fingerprint(loop.model, loop.optimizer),
        "losses": totals,
        "gathered": un.fingerprint(np.asarray(strategy.gather(outputs, axis=0))),
        "each": [list(one.shape) for one in each],
        "rows": un.fingerprint(np.concatenate([np.asarray(one) for one in each])),
        "sum over rows": un.fingerprint(np.asarray(strategy.reduce("SUM", outputs, axis=0))),
        "mean": float(strategy.reduce("MEAN", numbers)),
        "numbers": [int(one) for one in strategy.local_results(numbers)],
    }
if "files" in spec:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, compile_, rows = families.FAMILIES["conv"]()
    model.compile(**compile_)
    callbacks = [
        keras.callbacks.ModelCheckpoint(os.path.join(spec["files"], "{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.CSVLogger(os.path.join(spec["files"], "log.csv"), append=True),
        keras.callbacks.EarlyStopping("loss", mode="max", patience=1),
    ]
    history = model.fit(**rows, batch_size=families.BATCH, epochs=5, verbose=2, callbacks=callbacks)
    found["epochs"] = len(history.epoch)

if spec.get("lengths"):

    def stream():
        for _ in range(3 + strategy.cluster.process):
            yield np.ones((12, 4), "float32"), np.zeros((12, 1), "float32")

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(stream(), verbose=0, callbacks=[un.callbacks.BackupAndRestore(spec["lengths"])])

if spec.get("shuffled"):

    def batches():
        rng = np.random.default_rng(strategy.cluster.process)  # not the same in all
        for _ in range(3):
            yield rng.standard_normal((12, 6)).astype("float32"), np.zeros(12, "int32")

    loop = Loop(strategy)
    for batch in strategy.distribute_dataset(batches()):
        loop.one(batch)

print(json.dumps(found))
