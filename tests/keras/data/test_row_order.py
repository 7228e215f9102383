"""The order of rows is a function of (seed, pass, batch)."""

from __future__ import annotations

import random

import keras
import numpy as np

from unisono._src.keras.data.row_order import RowOrder, draw_seed


def test_a_pass_has_its_own_order_and_the_same_one_again():
    order = RowOrder(7)
    first = order.permute_pass(0, 100)
    assert np.array_equal(first, RowOrder(7).permute_pass(0, 100))
    assert sorted(first) == list(range(100))
    assert not np.array_equal(order.permute_pass(1, 100), first)
    assert not np.array_equal(RowOrder(8).permute_pass(0, 100), first)


def test_the_order_is_the_same_on_every_version_of_numpy():
    assert RowOrder(1).permute_pass(0, 8).tolist() == [1, 6, 0, 3, 7, 4, 2, 5]
    assert RowOrder(1).permute_batch(2, 3, 6).tolist() == [0, 3, 1, 5, 2, 4]


def test_drawing_a_seed_draws_nothing():
    """Layers made afterwards must start from the numbers that plain Keras gives them."""
    before = np.random.get_state()[1].copy(), random.getstate()
    assert draw_seed() == 0  # of set_random_seed(0)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert random.getstate() == before[1]


def test_without_a_seed_of_keras_the_state_of_numpy_decides():
    keras.src.backend.common.global_state.set_global_attribute("global_random_seed", None)
    np.random.seed(1)
    one = draw_seed()
    assert one == draw_seed()
    np.random.random()
    assert one != draw_seed()
    np.random.seed(1)
    assert one == draw_seed()
