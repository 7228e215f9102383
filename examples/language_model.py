"""A small language model: mixed_bfloat16, clipped gradients, a warm-up of the learning rate, and a run that is killed and resumes exactly.

Run it with `python examples/language_model.py`. It needs no data: the text is Python's language reference, which Python brings along
for `help()`. `--devices` changes no fingerprint.

The program trains a model that predicts the next character, and lets it write. Then it starts itself twice more: the second run is
killed in the middle of an epoch, as by a failing machine, and the third resumes from its last backup, on one device. In the end
weights, optimizer and random state of the first and the third run have the same bits.
"""

import argparse
import os
import pathlib
import pydoc_data.topics
import signal
import subprocess
import sys
import tempfile

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import layers, ops

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 4 replicas; changes no fingerprint")
parser.add_argument("--steps", type=int, default=120, help="steps of an epoch; there are three epochs")
parser.add_argument("--backup", type=pathlib.Path, help="train once, with backups in this directory: start it again to resume")
parser.add_argument("--kill-at", type=int, help="the step behind which the run with --backup kills itself")
options = parser.parse_args()

strategy = un.MirroredStrategy(devices=options.devices, replicas=4)  # first: it makes the CPU devices where there is no GPU
keras.config.set_dtype_policy("mixed_bfloat16")  # computes in bfloat16; variables and sums of gradients are float32
EPOCHS = 3
BATCH_SIZE = 32
LENGTH = 64  # characters of a window
WIDTH = 96
BLOCKS = 2

# --- Text ---------------------------------------------------------------------------------------------------------------------

text = "\n".join(" ".join(part.split()) for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n"))
CHARACTERS = sorted(set(text))
codes = np.searchsorted(CHARACTERS, list(text)).astype("int32")
windows = np.lib.stride_tricks.sliding_window_view(codes, LENGTH + 1)
HELD_OUT = 20_000  # characters at the end of the text
held_out = windows[-HELD_OUT::LENGTH]


class Windows(keras.utils.PyDataset):
    """Batches of windows at random places of the text. A batch is a function of its index."""

    def __len__(self):
        return EPOCHS * options.steps

    def __getitem__(self, index):
        places = np.random.default_rng(index).integers(len(windows) - HELD_OUT - LENGTH, size=BATCH_SIZE)
        return windows[places, :-1], windows[places, 1:]


# --- Model --------------------------------------------------------------------------------------------------------------------


class Embedded(layers.Layer):
    """Characters and their places as vectors."""

    def __init__(self):
        super().__init__()
        self.characters = layers.Embedding(len(CHARACTERS), WIDTH)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, characters):
        return self.characters(characters) + self.places(ops.arange(LENGTH))


def new_model():
    characters = keras.Input((LENGTH,), dtype="int32")
    x = Embedded()(characters)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(x)
        x += layers.Dropout(0.1)(layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normal)))
    x = layers.LayerNormalization()(x)
    return keras.Model(characters, layers.Dense(len(CHARACTERS), dtype="float32", name="logits")(x))


def train(callbacks=()):
    """Return the trained model and its history."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = new_model()
    steps = EPOCHS * options.steps
    rate = keras.optimizers.schedules.CosineDecay(0.0, decay_steps=steps, warmup_target=3e-3, warmup_steps=steps // 10)
    model.compile(
        optimizer=keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0),  # clips the sum over all replicas
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        Windows(),
        epochs=EPOCHS,
        steps_per_epoch=options.steps,
        shuffle=False,  # the windows are at random places already
        validation_data=(held_out[:, :-1], held_out[:, 1:]),
        validation_batch_size=64,
        callbacks=list(callbacks),
        verbose=2,
    )
    return model, history.history


def write(model, start, count, heat=0.5):
    """Return the characters that the model writes behind the start."""
    drawn = np.random.default_rng(0)
    written = np.searchsorted(CHARACTERS, list(start)).tolist()
    for _ in range(count):
        chances = np.exp(model.predict(np.array([written[-LENGTH:]]), verbose=0)[0, -1] / heat)
        written.append(drawn.choice(len(CHARACTERS), p=chances / chances.sum()))
    return "".join(CHARACTERS[code] for code in written)


# --- A run that is killed, and one that resumes it ----------------------------------------------------------------------------


class Kill(keras.callbacks.Callback):
    """Ends the process as a failing machine would: nothing can be saved any more."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


if options.backup:
    backup = un.callbacks.BackupAndRestore(options.backup, save_freq=options.steps // 3)
    model, _ = train([backup, Kill()] if options.kill_at else [backup])
    print(un.fingerprint(model))
    sys.exit()


def run_again(*arguments):
    """Run this program in another process; return its exit code and the last word that it printed."""
    command = [sys.executable, __file__, "--steps", str(options.steps), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.split()[-1]


# --- Result -------------------------------------------------------------------------------------------------------------------

print(f"{len(text):,} characters, {len(CHARACTERS)} different ones")
model, history = train()
fingerprint = un.fingerprint(model)
most_frequent = np.bincount(held_out[:, 1:].ravel()).max() / held_out[:, 1:].size
print(f"next character right: {history['val_accuracy'][-1]:.1%}; always the most frequent one: {most_frequent:.1%}")
start = "The value of an expression is an object. If the object is a function, "  # at least as long as a window
print(f"It writes: {write(model, start, 100)}\n")

kill_at = EPOCHS * options.steps // 2
with tempfile.TemporaryDirectory() as folder:
    killed, _ = run_again("--devices", str(options.devices), "--backup", folder, "--kill-at", str(kill_at))
    _, resumed = run_again("--devices", "1", "--backup", folder)
print(f"{'run':<10} {'devices':>7} {'steps':>12}  fingerprint")
print(f"{'whole':<10} {options.devices:>7} {'1 to ' + str(EPOCHS * options.steps):>12}  {fingerprint}")
print(f"{'killed':<10} {options.devices:>7} {'1 to ' + str(kill_at):>12}  none: {signal.Signals(-killed).name}")
print(f"{'resumed':<10} {1:>7} {'to ' + str(EPOCHS * options.steps):>12}  {resumed}")
print("\nThe resumed run has the bits of the whole one." if resumed == fingerprint else "\nThe fingerprints DIFFER.")
