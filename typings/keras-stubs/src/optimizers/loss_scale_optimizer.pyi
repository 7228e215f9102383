# keras.optimizers.LossScaleOptimizer of Keras 3.15.

from typing import Any

from keras import Variable
from keras.src.optimizers.optimizer import Optimizer

class LossScaleOptimizer(Optimizer):
    inner_optimizer: Optimizer
    dynamic_scale: Variable
    def __init__(
        self, inner_optimizer: Optimizer, initial_scale: float = ..., dynamic_growth_steps: int = ..., **kwargs: Any
    ) -> None: ...
