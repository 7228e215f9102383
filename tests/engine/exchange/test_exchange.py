"""One contract for all exchanges: the bits of the tree, on every placement."""

from __future__ import annotations

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
from unisono._src.engine import reduction_tree
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange import CollectiveExchange, LeadExchange, collectives
from unisono._src.engine.exchange.collectives import read_bits, view_bits
from unisono._src.engine.exchange.in_program import DeviceGroups
from unisono._src.engine.exchange.on_lead import add_vectors
from unisono._src.engine.exchange.protocol import FinishedSums, SumDescription
from unisono._src.engine.packing import pack_tree
from unisono._src.engine.step import running_sums
from unisono._src.engine.step.plan import plan_batch
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.rewriting import rewrite_function
from unisono._src.placement import Placement

pytestmark = pytest.mark.usefixtures("compiled_for_users")

SHAPES = {"weights": (5, 7), "bias": (3,), "loss": (), "nothing": (0,)}


def on_one_device(values, span):
    """The truth: numpy's additions in the order of the tree."""
    return reduction_tree.sum_tree(
        span, lambda s: len(s) == 1, lambda s: values[s.start], lambda a, b: jax.tree.map(np.add, a, b)
    )


def contribution(rng):
    floats = {
        name: np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6), "float32") for name, shape in SHAPES.items()
    }
    return {**floats, "counter": np.int32(rng.integers(0, 9)), "seed": rng.integers(0, 2**32, 2).astype("uint32")}


@settings(max_examples=cases(10, 25))
@example(kind=LeadExchange, size=16, replicas=4, devices=4, present=4, seed=0)
@given(
    kind=st.sampled_from([LeadExchange, CollectiveExchange]),
    size=st.sampled_from([16, collectives.BLOCK]),
    replicas=st.integers(2, 12),
    devices=st.integers(2, 8),
    present=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_an_exchange_has_the_bits_of_the_tree(kind, size, replicas, devices, present, seed):
    """Where some replicas have rows, on no more devices than there are replicas."""
    devices, rng = min(devices, replicas), np.random.default_rng(seed)
    values = [jax.tree.map(np.asarray, pack_tree(contribution(rng))) if r < present else None for r in range(replicas)]

    placement = Placement(replicas, tuple(jax.devices()[:devices]))
    mesh = get_mesh(placement.devices)
    plan = plan_batch(replicas, tuple(int(value is not None) for value in values), placement)
    like = jax.tree.map(lambda vector: jax.ShapeDtypeStruct(vector.shape, vector.dtype), values[0])

    def lay_out(node, name):
        """The sum of a node at the first place, before numbers that must not be read."""
        rest = np.full((2, *like[name].shape), 7, like[name].dtype)
        return np.concatenate([on_one_device(values, node[0])[name][None] if node and node[1] else rest[:1], rest])

    finished = [
        FinishedSums(layer.nodes, {name: mesh.put_blocks([lay_out(node, name) for node in layer.nodes]) for name in like})
        for layer in plan.layers
    ]
    exchange = kind(placement)
    with mock.patch.object(collectives, "BLOCK", size):
        total = exchange.total(finished, SumDescription(plan.leaves, plan.of_processes, like, None))

    expected = on_one_device(values, range(replicas))
    for name, sums in total.items():
        for block in mesh.list_blocks(sums):
            assert (block.dtype, np.asarray(block)[0].tobytes()) == (expected[name].dtype, expected[name].tobytes())


NODES = [(8, 2), (8, 4), (8, 8), (16, 2), (3, 3), (5, 5), (7, 7), (6, 6)]
"""(replicas, devices), where each device has one subtree."""


@pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))
@settings(max_examples=cases(6, 25))
@given(placed=st.sampled_from(NODES), length=st.sampled_from([1, 70_000]), steps=st.integers(1, 4), seed=st.integers(0, 99))
def test_programs_add_up_inside_in_the_order_of_the_tree(placed, length, steps, seed):
    """In each step of a loop, in vectors of several dtypes."""
    replicas, devices = placed
    rng, placement = np.random.default_rng(seed), Placement(replicas, tuple(jax.devices()[:devices]))
    plan, mesh = plan_batch(replicas, None, placement), get_mesh(placement.devices)
    values = [
        {"float32": rng.standard_normal(length).astype("float32"), "uint32": rng.integers(0, 2**32, 3).astype("uint32")}
        for _ in range(replicas)
    ]
    own = [on_one_device(values, node[0]) for node in plan.layers[0].nodes]
    group = DeviceGroups().find(plan.leaves, plan.layers[0].nodes)

    def run(numbers, sums):
        def step(number, added):
            return running_sums.add_over_devices(sums, *numbers[0], phase=0)

        return jax.lax.fori_loop(0, steps, step, sums)

    sums = {name: mesh.put_blocks([np.stack([one[name], one[name] * 0]) for one in own]) for name in own[0]}
    numbers = mesh.put_blocks([np.array([[group, device]], np.int32) for device in range(devices)])
    total = jax.jit(rewrite_function(mesh.map_blocks(run, cut=True, cut_results=True), "cpu"))(numbers, sums)
    expected = on_one_device(values, range(replicas))
    for name, added in total.items():
        assert {np.asarray(block)[0].tobytes() for block in mesh.list_blocks(added)} == {expected[name].tobytes()}


@pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))
def test_sums_that_do_not_need_each_other_may_come_in_any_order():
    """Device 0 comes with those of the second phase first, device 1 with those of the first."""
    mesh = get_mesh(tuple(jax.devices()[:2]))
    group = DeviceGroups().find(2, [(range(0, 1), True), (range(1, 2), True)])

    def run(numbers, sums):
        def after(steps):
            return {"float32": jax.lax.fori_loop(0, steps, lambda _, a: jnp.sin(a), sums["float32"]) * 0 + sums["float32"]}

        device = numbers[0, 1]
        first, second = after(jnp.where(device == 0, 3000, 0)), after(jnp.where(device == 1, 3000, 0))
        second = {"float32": 10 * second["float32"]}
        return [running_sums.add_over_devices(sums, *numbers[0], phase) for phase, sums in enumerate((first, second))]

    sums = {"float32": mesh.put_blocks([np.full((1, 5000), 1 + device, "float32") for device in (0, 1)])}
    numbers = mesh.put_blocks([np.array([[group, device]], np.int32) for device in (0, 1)])
    program = jax.jit(rewrite_function(mesh.map_blocks(run, cut=True, cut_results=True), "cpu"))
    for _ in range(5):
        first, second = (np.asarray(total["float32"]) for total in program(numbers, sums))
        assert (set(first.flat), set(second.flat)) == ({3.0}, {30.0})


def few_rows():
    """One whole batch and one with fewer rows than replicas."""
    model, compile_, data = normalized()
    return model, compile_, data | {name: data[name][: ROWS_AT_ONCE + 3] for name in ("x", "y")}


@pytest.mark.parametrize("devices", [2, *slow(3, 8)])
def test_training_has_the_bits_of_every_exchange(devices):
    """Inside of programs, on the lead, and over collectives. Whole epochs, ragged batches, and totals that every device applies by itself."""
    fingerprints = []
    for kind, inside in ((LeadExchange, True), (LeadExchange, False), (CollectiveExchange, False)):
        keras.utils.set_random_seed(0)
        strategy = un.MirroredStrategy(devices=devices, replicas=8)
        strategy.exchange = kind(strategy.placement)
        strategy.exchange.adds_in_programs &= inside
        with strategy.scope():
            model, compile_, data = cases(few_rows, several_outputs)()
        model.compile(**compile_)
        history = model.fit(**data, batch_size=ROWS_AT_ONCE, epochs=1, verbose=0, validation_data=(data["x"], data["y"]))
        fingerprints.append((un.fingerprint(model), history.history))
    assert fingerprints[0] == fingerprints[1] == fingerprints[2]


def test_adding_is_the_only_arithmetic():
    left, right = jnp.float32(1e8), jnp.float32(1)
    assert add_vectors({"a": left}, {"a": right}) == {"a": jnp.float32(1e8)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_words_travel_as_numbers_of_a_sum(dtype):
    words = np.array([0, 1, -1, 2**31 - 1, -(2**31), 0x7FC00001, 0x7F800001], np.int32)
    there = np.asarray(view_bits(words, jnp.dtype(dtype)))
    assert (there.dtype.kind, there.dtype.itemsize) == ("u", jnp.dtype(dtype).itemsize)
    assert np.array_equal(read_bits(jnp.stack([there, there]), len(words)), [words, words])
