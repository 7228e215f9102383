"""Scopes of programs and paths of variables find the layers that live."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from unisono._src.keras.private.variable_paths import LiveLayers


class Block(layers.Layer):
    def __init__(self) -> None:
        super().__init__(name="a_block")
        self.wide = layers.Dense(2, name="wide")
        self.rest = layers.Dropout(0.5, name="rest")

    def build(self, shape):
        self.wide.build(shape)

    def call(self, inputs, training=False):
        return self.rest(self.wide(inputs), training=training)


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="a_net")
        self.block = Block()

    def build(self, shape):
        self.block.build(shape)

    def call(self, inputs):
        return self.block(inputs)


@pytest.fixture(scope="module")
def net():
    net = Net()
    net(np.zeros((1, 3)))
    return net


@pytest.mark.parametrize(
    ("scopes", "layer"),
    [
        ("jvp(a_net)/a_block/wide", "a_block/wide"),
        ("transpose(jvp(a_net))/a_block/wide/while/body", "a_block/wide"),
        ("a_block/rest/of_its_own", "a_block/rest"),
        ("a_net", None),
        ("jvp(compile_loss)/mse", None),
        ("", None),
    ],
)
def test_the_innermost_layer_is_found_by_scopes(net, scopes, layer):
    assert LiveLayers().find_by_scopes(scopes) == layer


def test_variables_find_their_layers(net):
    found = LiveLayers()
    assert found.find_by_variable(net.block.wide.kernel.path) == "a_block/wide"
    assert found.find_by_variable("adam/learning_rate") is None
    (state,) = [variable for variable in net.variables if "seed" in variable.path]
    assert not state.path.startswith("a_net/a_block/rest")
    assert found.find_by_variable(state.path) == "rest"
