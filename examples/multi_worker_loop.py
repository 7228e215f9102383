"""A loop of one's own in one process or in several: one fingerprint, and a signal to one of them makes all save at one step.

    python examples/multi_worker_loop.py
    unisono launch --processes 2 examples/multi_worker_loop.py

Press Ctrl-C: the step is finished and saved, and the same command goes on from there, in as many processes as you like. With `--full` on
MNIST, which Keras downloads.
"""

import argparse

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
from keras import layers
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--full", action="store_true", help="MNIST in place of the digits that scikit-learn brings")
parser.add_argument("--checkpoints", default="ckpts", help="a directory that all processes share")
options = parser.parse_args()

strategy = un.MultiWorkerMirroredStrategy(replicas=8)  # first: it connects the processes, before anything starts JAX
keras.utils.set_random_seed(0)
EPOCHS = 5


def load():
    if options.full:
        x, y = keras.datasets.mnist.load_data()[0]
        return x.reshape(len(x), -1) / 255.0, y
    x, y = load_digits(return_X_y=True)
    return x / 16, y


# Every process names the whole data and the global batch; each computes its own replicas' rows.
data = strategy.distribute_dataset(load(), batch_size=64, shuffle=True)

with strategy.scope():
    model = keras.Sequential([layers.Dense(64, "relu"), layers.Dropout(0.2), layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-3)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def step(batch):
    x, y = batch

    def loss():
        logits = model(x, training=True)
        accuracy.update_state(y, logits)
        return losses(y, logits)  # one for each row: the engine divides

    value, gradients = un.value_and_grad(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


@un.function
def train(batch):
    return strategy.reduce("SUM", strategy.run(step, args=(batch,)))


epoch = keras.Variable(0, dtype="int32", trainable=False)
checkpoint = un.Checkpoint(model=model, optimizer=optimizer, accuracy=accuracy, data=data, epoch=epoch)
checkpoint.restore(un.latest_checkpoint(options.checkpoints))  # None at the first start: nothing is done

with checkpoint.saving_on_signal(f"{options.checkpoints}/", keep=2):
    while int(epoch) < EPOCHS:
        for batch in data:
            value = train(batch)
        if strategy.writes:
            print(f"epoch {int(epoch) + 1}: loss {float(value):.3f}, accuracy {100 * float(accuracy.result()):.1f}%")
        accuracy.reset_state()
        epoch.assign(epoch + 1)
        checkpoint.save(f"{options.checkpoints}/", keep=2)

where = f"process {strategy.cluster.process} of {strategy.cluster.processes}"
print(f"{where}: {strategy.num_replicas_in_sync} replicas, fingerprint {un.fingerprint(model, optimizer)}")
