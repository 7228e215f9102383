"""A function is compiled again where a setting of an optimizer has changed."""

from __future__ import annotations

import keras
import pytest

from unisono._src.keras.loop.compiled_function import read_update_settings
from unisono._src.keras.replica.used_variables import UsedVariables


class Schedule:
    """An object whose place in memory the next one of its kind gets."""


def test_a_new_object_is_noticed_at_the_place_in_memory_of_the_old_one():
    optimizer = keras.optimizers.SGD()
    variables = UsedVariables([], [], [optimizer], [], [], [], set())
    for _ in range(100):
        optimizer.schedule = Schedule()
        before = read_update_settings(variables)
        assert before == read_update_settings(variables)
        optimizer.schedule = None
        optimizer.schedule = Schedule()
        assert before != read_update_settings(variables)


def test_settings_of_an_inner_optimizer_are_read():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    variables = UsedVariables([], [], [optimizer], [], [], [], set())
    before = read_update_settings(variables)
    optimizer.inner_optimizer.nesterov = True
    assert before != read_update_settings(variables)


class Cautious(keras.optimizers.SGD):
    """An optimizer of the user's that holds others."""

    def __init__(self, *others):
        super().__init__()
        self.others = list(others)
        self.others[0].outer = self


@pytest.mark.parametrize(
    "hold",
    [
        lambda inner: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner)),
        lambda inner: keras.optimizers.LossScaleOptimizer(keras.optimizers.MultiOptimizer(lambda _: inner)),
        Cautious,
    ],
)
def test_settings_of_optimizers_and_schedules_in_an_optimizer_are_read(hold):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    inner = keras.optimizers.Adam(schedule)
    optimizer = hold(inner)
    optimizer.build([keras.Variable(0.0)])
    variables = UsedVariables([], [], [optimizer], [], [], [], set())
    for holder, name in ((inner, "beta_1"), (inner, "clipnorm"), (schedule, "decay_rate")):
        before = read_update_settings(variables)
        assert before == read_update_settings(variables)
        setattr(holder, name, 0.5)
        assert before != read_update_settings(variables)
