"""Fine-tune a BERT-style encoder: pre-train it on hidden words, train a head on the frozen encoder, then train both.

Run it with `python examples/fine_tuning.py`. It needs no data: the text is generated. `--devices` changes no fingerprint.

The task is to tag the names of a text as persons, cities or firms. All names are made of the same syllables, so that only the words
around a name tell what it stands for, and some sentences do not tell it either. Few sentences have tags, and the test has names that
occur in none of them: what the encoder knows of these names, it knows from the text without tags.

Rows are padded. `mask_zero` masks the padding in the attention, the loss and the metrics. Weights of tokens say where the loss counts:
at the hidden words in the pre-training, and ten times more at names than at other words in the fine-tuning.
"""

import argparse

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import layers, ops

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 4 replicas; changes no fingerprint")
parser.add_argument("--epochs", type=int, default=12, help="epochs of the pre-training; the others take two thirds of it")
options = parser.parse_args()

strategy = un.MirroredStrategy(devices=options.devices, replicas=4)  # first: it makes the CPU devices where there is no GPU
BATCH_SIZE = 64
LENGTH = 24  # words of a row
WIDTH = 48
BLOCKS = 2

# --- Text ---------------------------------------------------------------------------------------------------------------------

KINDS = ("person", "city", "firm")
SENTENCES = """
person flew from city to city last week
firm hired person in city
the people of city know person well
person sold all shares of firm
firm opened a shop in city
person met person near the station of city
firm bought firm for two millions
city lies north of city
person and person were born in city
yesterday person left firm
everyone talks about person
everyone talks about city
everyone talks about firm
nobody knew person then
nobody knew city then
nobody knew firm then
""".strip().splitlines()

rng = np.random.default_rng(0)
SYLLABLES = np.array([consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou"])
all_names = [f"{first}{second}" for first in SYLLABLES for second in SYLLABLES if first != second]
NAMES = dict(zip(KINDS, rng.choice(all_names, size=(len(KINDS), 60), replace=False), strict=True))
OTHER_WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()} - set(KINDS))
VOCABULARY = ["", "[hidden]", *OTHER_WORDS, *(name for names in NAMES.values() for name in names)]
IDS = {word: number for number, word in enumerate(VOCABULARY)}  # 0 is the padding
HIDDEN = IDS["[hidden]"]


def write_text(rows, names):
    """Return (words, tags), a row for one to three sentences. Tag 0 is of words that are no names."""
    words = np.zeros((rows, LENGTH), "int32")
    tags = np.zeros((rows, LENGTH), "int32")
    for row in range(rows):
        text = " ".join(rng.choice(SENTENCES, size=rng.integers(1, 4))).split()[:LENGTH]
        for place, word in enumerate(text):
            words[row, place] = IDS[rng.choice(NAMES[word][names])] if word in KINDS else IDS[word]
            tags[row, place] = KINDS.index(word) + 1 if word in KINDS else 0
    return words, tags


plain_words, _ = write_text(2000, names=slice(0, 60))
train_words, train_tags = write_text(200, names=slice(0, 20))
test_words, test_tags = write_text(500, names=slice(20, 60))

# --- Model --------------------------------------------------------------------------------------------------------------------


class Embedded(layers.Layer):
    """Words and their places as vectors. Padding is masked."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(len(VOCABULARY), WIDTH, mask_zero=True)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, words):
        return self.words(words) + self.places(ops.arange(LENGTH))

    def compute_mask(self, words, mask=None):
        return self.words.compute_mask(words)


def new_encoder():
    words = keras.Input((LENGTH,), dtype="int32")
    x = Embedded()(words)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1)(normal, normal)
        normal = layers.LayerNormalization()(x)
        x += layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normal))
    return keras.Model(words, layers.LayerNormalization()(x), name="encoder")


def train(name, model, rate, epochs, words, targets, weights):
    """Train the weights that are not frozen, and print a line of the table."""
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )  # again for each part: `trainable` has changed
    history = model.fit(words, targets, sample_weight=weights, batch_size=BATCH_SIZE, epochs=epochs, verbose=0).history
    trained = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    line = f"{name:<30} {trained:>8,} weights  loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}"
    if targets is train_tags:
        is_name = (test_tags > 0).astype("float32")
        _, accuracy = model.evaluate(test_words, test_tags, sample_weight=is_name, batch_size=BATCH_SIZE, verbose=0)
        line += f"  names of the test {accuracy:6.1%}"
    else:
        line += f"  hidden words {history['accuracy'][-1]:11.1%}"
    print(f"{line}  {un.fingerprint(model)}")


# --- Training -----------------------------------------------------------------------------------------------------------------

print(f"{len(VOCABULARY)} words; guessing among the three kinds would be right for 33 % of the names\n")

# Each row comes four times, each time with other words hidden. The encoder learns to say which words they were.
all_words = np.tile(plain_words, (4, 1))
is_hidden = (all_words > 0) & (rng.random(all_words.shape) < 0.25)
seen_words = np.where(is_hidden, HIDDEN, all_words)

keras.utils.set_random_seed(0)
with strategy.scope():
    encoder = new_encoder()
    guesser = keras.Sequential([encoder, layers.Dense(len(VOCABULARY))])
train("pre-training", guesser, 2e-3, options.epochs, seen_words, all_words, is_hidden.astype("float32"))

token_weights = np.where(train_tags > 0, 1.0, 0.1).astype("float32")
tagging = (max(1, options.epochs * 2 // 3), train_words, train_tags, token_weights)
with strategy.scope():
    tagger = keras.Sequential([encoder, layers.Dropout(0.1), layers.Dense(1 + len(KINDS))])
encoder.trainable = False
train("head, encoder frozen", tagger, 1e-2, *tagging)
encoder.trainable = True
train("all, encoder unfrozen", tagger, 1e-3, *tagging)

with strategy.scope():
    without = keras.Sequential([new_encoder(), layers.Dropout(0.1), layers.Dense(1 + len(KINDS))])
train("all, without pre-training", without, 1e-3, *tagging)
