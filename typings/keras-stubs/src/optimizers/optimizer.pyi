# keras.optimizers.Optimizer of Keras 3.15, which has another base for each backend.

from keras.src.optimizers.base_optimizer import BaseOptimizer

class Optimizer(BaseOptimizer): ...
