"""TensorFlow's tutorial of a custom training loop, in its own vocabulary: a conv net, trained by loops of three shapes.

Run it with `python examples/fashion_mnist_loop.py`; with `--full` on Fashion-MNIST, which Keras downloads.
"""

import argparse
import tempfile

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--full", action="store_true", help="Fashion-MNIST in place of the digits that scikit-learn brings")
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 2 replicas; changes no bit")
parser.add_argument("--checkpoints", help="a directory for checkpoints; by default one that is deleted in the end")
options = parser.parse_args()

strategy = un.MirroredStrategy(devices=options.devices, replicas=2)  # first: it makes the CPU devices where there is no GPU
keras.utils.set_random_seed(0)  # before the datasets, whose order is drawn from it
EPOCHS = 10 if options.full else 5
GLOBAL_BATCH_SIZE = 64 * strategy.num_replicas_in_sync


def load():
    """(images, classes) to train on and to test with; images have one channel, in [0, 1]."""
    if options.full:
        return [(x[..., None] / np.float32(255), y) for x, y in keras.datasets.fashion_mnist.load_data()]
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


train, test = load()
# Whole batches, because the loss is divided by GLOBAL_BATCH_SIZE. Without that argument, un.compute_average_loss divides by the rows
# that a batch has.
train = tuple(rows[: len(rows) // GLOBAL_BATCH_SIZE * GLOBAL_BATCH_SIZE] for rows in train)
train_dataset = strategy.distribute_dataset(train, batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
test_dataset = strategy.distribute_dataset(test, batch_size=GLOBAL_BATCH_SIZE)


def create_model():
    padding = "valid" if options.full else "same"  # two valid convolutions and two pools would leave nothing of 8 x 8 pixels
    regularizer = keras.regularizers.L2(1e-5)
    return keras.Sequential([
        layers.Conv2D(32, 3, padding=padding, activation="relu", kernel_regularizer=regularizer),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, padding=padding, activation="relu", kernel_regularizer=regularizer),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
        layers.Dense(10, activation="softmax", kernel_regularizer=regularizer),
    ])  # fmt: skip


with strategy.scope():
    model = create_model()
    optimizer = keras.optimizers.Adam()
    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
loss_object = keras.losses.SparseCategoricalCrossentropy(reduction=None)  # one loss for each example


def train_step(inputs):
    """A replica's share of the loss. The gradients of all replicas are summed where they are applied."""
    images, labels = inputs

    def compute_loss():
        predictions = model(images, training=True)
        loss = un.compute_average_loss(loss_object(labels, predictions), global_batch_size=GLOBAL_BATCH_SIZE)
        return loss + un.scale_regularization_loss(model.losses), predictions

    (loss, predictions), gradients = un.value_and_grad(compute_loss, model.trainable_variables, has_aux=True)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@un.function
def distributed_train_step(batch):
    return strategy.reduce(un.ReduceOp.SUM, strategy.run(train_step, args=(batch,)), axis=None)


@un.function
def distributed_train_epoch(dataset):
    total_loss = 0.0
    for batch in dataset:
        total_loss += distributed_train_step(batch)
    return total_loss / len(dataset)


def test_and_print(name, train_loss):
    for batch in test_dataset:
        strategy.run(test_step, args=(batch,))
    print(
        f"{name:<16}  loss {float(train_loss):.4f}  accuracy {float(train_accuracy.result()):.2%}"
        f"  test loss {float(test_loss.result()):.4f}  test accuracy {float(test_accuracy.result()):.2%}"
    )
    for metric in (train_accuracy, test_loss, test_accuracy):
        metric.reset_state()


temporary = tempfile.TemporaryDirectory()
checkpoint_dir = options.checkpoints or temporary.name
checkpoint_prefix = f"{checkpoint_dir}/ckpt"
checkpoint = un.Checkpoint(optimizer=optimizer, model=model)

print(strategy)
print("The whole dataset in a for-loop")
for epoch in range(EPOCHS):
    total_loss = 0.0
    for batch in train_dataset:
        total_loss += distributed_train_step(batch)
    if epoch % 2 == 0:
        checkpoint.save(checkpoint_prefix)
    test_and_print(f"  epoch {epoch + 1}", total_loss / len(train_dataset))

# Into a fresh model and optimizer, which are not built yet, without a strategy.
print("The latest checkpoint")
new_model, new_optimizer = create_model(), keras.optimizers.Adam()
eval_accuracy = keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_checkpoint = un.Checkpoint(optimizer=new_optimizer, model=new_model)
new_checkpoint.restore(un.latest_checkpoint(checkpoint_dir))
eval_accuracy.update_state(test[1], new_model(test[0], training=False))
print(f"  restored without a strategy: test accuracy {float(eval_accuracy.result()):.2%}")

print("Ten steps by iter and next")
batches = iter(train_dataset)
total_loss = 0.0
for _ in range(10):
    total_loss += distributed_train_step(next(batches))
test_and_print("  ten steps", total_loss / 10)

print("A whole epoch in one function")
test_and_print("  one epoch", distributed_train_epoch(train_dataset))

# The tutorial's example of how to divide: two replicas, a global batch of 4.
example = strategy.distribute_dataset(np.float32([2, 3, 4, 5]), batch_size=4)
shares = strategy.run(un.compute_average_loss, args=(next(iter(example)),), kwargs={"global_batch_size": 4})
print("Losses 2, 3 on one replica and 4, 5 on the other, of a global batch of 4")
print(f"  a replica's share  {', '.join(f'{float(share):g}' for share in strategy.local_results(shares))}")
print(f"  loss of the batch  {float(strategy.reduce('SUM', shares, axis=None)):g}")
mean = sum(map(float, strategy.local_results(shares))) / 2
print(f"  mean of the shares {mean:g}, half of it: shares are to be added, and reduce warns where their mean is asked for")
