"""A process of its own: trains families on one placement and prints what came out, as JSON.

python train_and_print.py '{"devices": 2, "replicas": 8, "families": ["conv"]}'
"""

import json
import sys

import keras

import unisono as un

spec = json.loads(sys.argv[1])
kind = un.MultiWorkerMirroredStrategy if spec.get("workers") else un.MirroredStrategy
strategy = kind(devices=spec["devices"], replicas=spec["replicas"])  # before anything starts JAX

import families

keras.config.set_dtype_policy(spec.get("policy", "float32"))
results = {}
for name in spec["families"]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, compile_, data = families.FAMILIES[name]()
    model.compile(**compile_)
    model.optimizer.build(model.trainable_variables)
    prints = []
    every_epoch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_, model=model, prints=prints: prints.append(un.fingerprint(model))
    )
    validation = (data["x"], data["y"])
    history = model.fit(
        **data,
        batch_size=families.BATCH,
        epochs=spec.get("epochs", 2),
        verbose=0,
        callbacks=[every_epoch],
        validation_data=validation,
    )
    predictions = model.predict(data["x"], batch_size=families.BATCH, verbose=0)
    results[name] = {"epochs": prints, "history": history.history, "predictions": un.fingerprint(predictions)}
print(json.dumps(results))
