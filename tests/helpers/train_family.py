"""A script as a user writes it, of a family: python train_family.py FAMILY."""

import sys

import unisono as un

# isort: split
import keras

from families import BATCH, FAMILIES
from layer_groups import make_family

name = sys.argv[1]
keras.utils.set_random_seed(3)
with un.MultiWorkerMirroredStrategy(replicas=4).scope():
    model, settings, data = FAMILIES[name]() if name in FAMILIES else make_family(name)
    model.compile(**settings)
model.fit(**data, batch_size=BATCH, epochs=2, verbose=0)
