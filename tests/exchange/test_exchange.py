"""One contract for both exchanges: the bits of the tree, on every placement."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unisono as un
from families import normalized, several_outputs
from sizes import ROWS_AT_ONCE, cases, slow
from unisono._src import reduction_tree
from unisono._src.exchange import CollectiveExchange, TransferExchange, collectives
from unisono._src.placement import Placement
from unisono._src.step.totals import add_contributions
from unisono._src.xla.programs import DeviceProgram

pytestmark = pytest.mark.usefixtures("compiled_for_users")

SHAPES = {"weights": (5, 7), "bias": (3,), "loss": (), "nothing": (0,)}


@functools.cache
def adder() -> DeviceProgram:
    return DeviceProgram(add_contributions)


def on_one_device(values, replicas):
    """The truth: numpy's additions in the order of the tree."""
    return reduction_tree.sum_tree(
        range(replicas), lambda s: len(s) == 1, lambda s: values[s.start], lambda a, b: jax.tree.map(np.add, a, b)
    )


def contribution(rng):
    floats = {
        name: np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6), "float32") for name, shape in SHAPES.items()
    }
    return {**floats, "counter": np.int32(rng.integers(0, 9)), "seed": rng.integers(0, 2**32, 2).astype("uint32")}


@settings(max_examples=cases(10, 25))
@example(kind=TransferExchange, size=16, replicas=4, devices=4, present=4, seed=0)
@given(
    kind=st.sampled_from([TransferExchange, CollectiveExchange]),
    size=st.sampled_from([16, collectives.BLOCK]),
    replicas=st.integers(1, 12),
    devices=st.integers(1, 8),
    present=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_an_exchange_has_the_bits_of_the_tree(kind, size, replicas, devices, present, seed):
    """Where some replicas have rows, on no more devices than there are replicas."""
    devices, rng = min(devices, replicas), np.random.default_rng(seed)
    values = [contribution(rng) if r < present else None for r in range(replicas)]

    placement = Placement(replicas, tuple(jax.devices()[:devices]))
    nodes = []
    for device, block in zip(placement.devices, placement.blocks, strict=True):
        here = {r: jax.device_put(values[r], device) for r in block}
        on_device = functools.partial(adder(), device, None)
        nodes.append(
            {
                span: reduction_tree.sum_tree(span, lambda s: len(s) == 1, lambda s, here=here: here[s.start], on_device)
                for span in reduction_tree.list_subtrees(block, range(replicas))
            }
        )
    exchange = kind(placement)
    with mock.patch.object(collectives, "BLOCK", size):
        totals = exchange.total(nodes, lambda device, a, b: adder()(device, None, a, b), exchange.placement.replicas)

    expected = on_one_device(values, replicas)
    assert len(totals) == len(exchange.homes)
    for home, total in zip(exchange.homes, totals, strict=True):
        assert all(leaf.devices() == {placement.devices[home]} for leaf in jax.tree.leaves(total))
        assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), total, expected))


def few_rows():
    """One whole batch and one with fewer rows than replicas."""
    model, compile_, data = normalized()
    return model, compile_, data | {name: data[name][: ROWS_AT_ONCE + 3] for name in ("x", "y")}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, *slow(8)])
def test_training_over_collectives_has_the_bits_of_transfers(devices):
    """Whole epochs, ragged batches, and totals that every device applies by itself."""
    fingerprints = []
    for kind in (TransferExchange, CollectiveExchange):
        keras.utils.set_random_seed(0)
        strategy = un.MirroredStrategy(devices=devices, replicas=8)
        strategy.exchange = kind(strategy.placement)
        with strategy.scope():
            model, compile_, data = cases(few_rows, several_outputs)()
        model.compile(**compile_)
        history = model.fit(**data, batch_size=ROWS_AT_ONCE, epochs=1, verbose=0, validation_data=(data["x"], data["y"]))
        fingerprints.append((un.fingerprint(model), history.history))
    assert fingerprints[0] == fingerprints[1]


def test_adding_is_the_only_arithmetic():
    left, right = jnp.float32(1e8), jnp.float32(1)
    assert add_contributions({"a": left}, {"a": right}) == {"a": jnp.float32(1e8)}
