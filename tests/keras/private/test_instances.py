"""A method is wrapped on one object for a while, and then everything is as before."""

from __future__ import annotations

import keras
import pytest

from unisono._src.keras.private.instances import wrap_method


@pytest.mark.parametrize("before", [{}, {"call": None}, {"call": print}])
def test_a_wrapped_method_is_as_before(before):
    layer = keras.layers.Dense(1)
    for name, value in before.items():
        object.__setattr__(layer, name, value)
    attributes = dict(vars(layer))
    with wrap_method(layer, "call", lambda call: lambda *_: call):
        assert vars(layer)["call"]() is attributes.get("call", vars(layer)["call"]())
    assert vars(layer) == attributes
