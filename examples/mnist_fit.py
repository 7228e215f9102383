"""TensorFlow's tutorial of distributed training with Keras: fit with callbacks, weights out of checkpoints, an exported model.

Run it with `python examples/mnist_fit.py`; with `--tfds` on MNIST from TensorFlow Datasets, for which you need
`pip install tensorflow-cpu tensorflow-datasets`. To see the curves: `pip install tensorboard`, and `tensorboard --logdir` with the
directory of logs that is printed.
"""

import argparse
import pathlib
import tempfile

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
from keras import layers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tfds", action="store_true", help="MNIST in place of the digits that scikit-learn brings")
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 2 replicas; changes no bit")
parser.add_argument("--directory", help="for logs, checkpoints and the exported model; by default one that is deleted in the end")
parser.add_argument(
    "--format", default="stablehlo", help="of the exported model: stablehlo, or saved_model (which needs TensorFlow)"
)
options = parser.parse_args()

strategy = un.MirroredStrategy(devices=options.devices, replicas=2)  # first: it makes the CPU devices where there is no GPU
keras.utils.set_random_seed(0)
BUFFER_SIZE = 10_000
BATCH_SIZE_PER_REPLICA = 64 if options.tfds else 16  # few digits, and learning rates that fall after three epochs
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 12
temporary = tempfile.TemporaryDirectory()
directory = pathlib.Path(options.directory or temporary.name)


def of_tfds():
    import tensorflow as tf
    import tensorflow_datasets as tfds

    datasets, info = tfds.load("mnist", with_info=True, as_supervised=True)
    print(f"{info.splits['train'].num_examples} images to train on, {info.splits['test'].num_examples} to test with")

    def scale(image, label):
        return tf.cast(image, tf.float32) / 255, label

    # A seed: the rows then come in the same order in every run, and a checkpoint can tell that they do.
    train = datasets["train"].map(scale).cache().shuffle(BUFFER_SIZE, seed=0).batch(BATCH_SIZE)
    return train, {"x": datasets["test"].map(scale).batch(BATCH_SIZE)}


def of_sklearn():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    train = strategy.distribute_dataset((x[:1500], y[:1500]), batch_size=BATCH_SIZE, shuffle=True)
    return train, {"x": x[1500:], "y": y[1500:], "batch_size": BATCH_SIZE}


train_dataset, eval_data = of_tfds() if options.tfds else of_sklearn()

with strategy.scope():
    model = keras.Sequential([
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ])  # fmt: skip
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(),
        metrics=["accuracy"],
    )


def decay(epoch):
    return 1e-3 if epoch < 3 else 1e-4 if epoch < 7 else 1e-5


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"Learning rate for epoch {epoch + 1} is {float(self.model.optimizer.learning_rate):.6f}")


checkpoint_dir = directory / "training_checkpoints"
callbacks = [
    un.callbacks.TensorBoard(log_dir=directory / "logs"),
    keras.callbacks.ModelCheckpoint(filepath=checkpoint_dir / "ckpt_{epoch}.weights.h5", save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
model.fit(train_dataset, epochs=EPOCHS, callbacks=callbacks, verbose=2)
print(f"curves: tensorboard --logdir={directory / 'logs'}")


def evaluate(name, model):
    loss, accuracy = model.evaluate(**eval_data, verbose=0)
    print(f"{name:<38} loss {loss:.4f}  accuracy {accuracy:.2%}")


model.load_weights(un.latest_checkpoint(checkpoint_dir))
evaluate("the latest weights", model)

path = directory / "my_model"
un.export(model, path, format=options.format)


def compiled(exported):
    model = keras.Sequential([exported])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="adam", metrics=["accuracy"])
    return model


evaluate("exported, loaded without a strategy", compiled(un.load_exported(path)))
with strategy.scope():
    replicated_model = compiled(un.load_exported(path))
evaluate("exported, loaded with one", replicated_model)
