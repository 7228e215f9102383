# Keras 3.15 has few annotations. The stubs of this folder have those that Unisono's strictly checked rooms need, on the JAX backend: of what
# variables, metrics, losses, optimizers and models hold and return, with the arguments that Unisono gives. All modules without a stub here
# are Keras' own. This file has the public names that Unisono uses.

from typing import Any

from jax import Array
from keras import callbacks as callbacks
from keras import config as config
from keras import constraints as constraints
from keras import datasets as datasets
from keras import distribution as distribution
from keras import initializers as initializers
from keras import layers as layers
from keras import losses as losses
from keras import metrics as metrics
from keras import models as models
from keras import ops as ops
from keras import optimizers as optimizers
from keras import random as random
from keras import saving as saving
from keras import tree as tree
from keras import utils as utils
from keras.src.backend.common.keras_tensor import KerasTensor as KerasTensor
from keras.src.backend.common.stateless_scope import StatelessScope as StatelessScope
from keras.src.backend.common.variables import Variable as _KerasVariable
from keras.src.layers.core.input_layer import Input as Input
from keras.src.layers.input_spec import InputSpec as InputSpec
from keras.src.layers.layer import Layer as Layer
from keras.src.models.model import Model as Model
from keras.src.models.sequential import Sequential as Sequential

__version__: str

class Variable(_KerasVariable):
    _value: Array
    @property
    def value(self) -> Array: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def constraint(self) -> Any: ...
    @property
    def aggregation(self) -> str: ...
    @property
    def trainable(self) -> bool: ...
    @trainable.setter
    def trainable(self, value: bool) -> None: ...
    @property
    def overwrite_with_gradient(self) -> bool: ...
    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None: ...
