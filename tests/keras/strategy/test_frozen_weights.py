"""Weights that are not trained lie cut over the devices: where they lie does not change a bit."""

from __future__ import annotations

import contextlib
import shutil

import jax
import keras
import numpy as np
import pytest

import frozen_nets
import unisono as un
from sizes import mostly_slow
from unisono._src.engine.state import get_step_count
from unisono._src.engine.step.observer import StepObserver
from unisono._src.keras.record.run_recorder import get_recorder
from unisono._src.keras.steps import make_step
from unisono._src.tools.records import read_run_record

ROWS = 21
"""Two batches of eight rows and one of five: replicas of two rows, of one, and of none."""

COMBINATIONS = [
    *((net, optimizer, None) for net in frozen_nets.NETS for optimizer in ("adamw", "sgd", "muon", "adafactor", "scaled")),
    *((net, "adamw", "mixed_bfloat16") for net in frozen_nets.NETS),
]


def train(devices: int, net: str, optimizer: str = "adamw", **options: object) -> tuple[str, list[float], keras.Model]:
    strategy = un.MirroredStrategy(devices=devices, replicas=4, **options)
    model = frozen_nets.build(strategy, net, optimizer)
    x, y = frozen_nets.NETS[net].draw(ROWS), frozen_nets.draw_labels(ROWS)
    logs = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:8], y[:8]), validation_batch_size=8).history
    outputs = model.predict(x[:8], batch_size=8, verbose=0)
    return un.fingerprint(model), [*logs["loss"], *logs["val_loss"], *outputs.ravel().tolist()], model


@pytest.mark.parametrize(
    ("net", "optimizer", "policy"),
    mostly_slow(COMBINATIONS, ("attention", "adamw", None)),  # other tests train convolutions, and processes the quantized net
)
def test_bits_are_those_of_whole_weights(net: str, optimizer: str, policy: str | None) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy or "float32")
    try:
        whole = train(1, net, optimizer)
        for devices in (2, 4):
            cut = train(devices, net, optimizer, shard="frozen")
            assert cut[:2] == whole[:2]
            assert frozen_nets.count_cut(cut[2]) == frozen_nets.NETS[net].cut
    finally:
        keras.config.set_dtype_policy(before)


def test_records_are_those_of_whole_weights(tmp_path) -> None:
    x, y = frozen_nets.NETS["convolutions"].draw(16), frozen_nets.draw_labels(16)
    steps, ends = [], []
    for place, (devices, options) in enumerate([(1, {}), (4, {"shard": "frozen"})]):
        get_step_count().steps = 0
        model = frozen_nets.build(un.MirroredStrategy(devices=devices, replicas=4, **options), "convolutions")
        folder = tmp_path / f"record{place}"
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[un.callbacks.Record(folder)])
        get_recorder().stop()
        steps.append([(step.loss, step.row_digests, step.digests) for step in read_run_record(folder).steps.values()])
        ends.append(un.fingerprint(model))
    assert steps[0] == steps[1]
    assert ends[0] == ends[1]


def test_a_run_of_whole_weights_goes_on_with_cut_ones(tmp_path) -> None:
    x, y = frozen_nets.NETS["convolutions"].draw(16), frozen_nets.draw_labels(16)

    def train_until(epochs: int, devices: int, **options: object) -> str:
        model = frozen_nets.build(un.MirroredStrategy(devices=devices, replicas=4, **options), "convolutions", "sgd")
        backup = un.callbacks.BackupAndRestore(tmp_path / "saved", delete_checkpoint=False)
        model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[backup])
        return un.fingerprint(model)

    train_until(1, 1)
    resumed = train_until(2, 4, shard="frozen")
    shutil.rmtree(tmp_path / "saved")
    assert resumed == train_until(2, 1)


def test_a_trained_model_is_used_and_unfrozen(tmp_path) -> None:
    """Keras adds adapters to weights where it saves a model."""
    model = frozen_nets.build(un.MirroredStrategy(devices=2, replicas=2, shard="frozen"), "attention", "sgd")
    x, y = frozen_nets.NETS["attention"].draw(4), frozen_nets.draw_labels(4)
    model.train_on_batch(x, y)
    outputs = model.predict_on_batch(x)
    np.testing.assert_allclose(model(x), outputs, rtol=1e-4)
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "model.keras", compile=False)(x), outputs, rtol=1e-4)
    for weight in model.weights:
        weight.trainable = True
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.warns(UserWarning, match="saves nothing here"):
        model.train_on_batch(x, y)
    assert frozen_nets.count_cut(model) == 0


def test_adapters_are_trained_as_by_keras_and_their_gradients_stay_small() -> None:
    x, y = frozen_nets.NETS["attention"].draw(16), frozen_nets.draw_labels(16)
    strategy = un.OneDeviceStrategy(replicas=4)
    ends = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(0)
        with scope:
            model = frozen_nets.make_attention()
        model.compile(frozen_nets.make_optimizer("sgd"), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        begin = model.get_weights()
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
        ends.append(np.concatenate([np.ravel(end - start) for end, start in zip(model.get_weights(), begin, strict=True)]))
    assert np.linalg.norm(ends[1] - ends[0]) < 2e-6 * np.linalg.norm(ends[0])
    trained = sum(variable.value.nbytes for variable in model.trainable_variables)
    # The gradient of an embedding is scattered into a table, and added up as it is.
    table = frozen_nets.WORDS * frozen_nets.WIDTH * 4
    # Two sums at a time, of what is trained, of this table and of the loss.
    assert strategy.memory(model, 16, replicas=[4]).own.devices["cpu:0"].gradients < 2 * (trained + table + 256)


def test_loops_leave_frozen_weights_cut(tmp_path) -> None:
    def run(devices: int, **options: object) -> tuple[str, int]:
        strategy = un.MirroredStrategy(devices=devices, replicas=4, **options)
        model = frozen_nets.build(strategy, "convolutions", "sgd")
        if devices > 1:  # assigned values lie cut as well
            model.load_weights(tmp_path / "whole.weights.h5")
        else:
            model.save_weights(tmp_path / "whole.weights.h5")
        x, y = frozen_nets.NETS["convolutions"].draw(8), frozen_nets.draw_labels(8)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def step(x, y):
            compute = lambda: un.compute_average_loss(loss(y, model(x, training=True)), global_batch_size=8)
            value, gradients = un.value_and_grad(compute, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return value

        losses = [
            float(strategy.reduce("SUM", strategy.run(step, args=batch)))
            for _ in range(2)
            for batch in strategy.distribute_dataset((x, y), batch_size=8)
        ]
        return (un.fingerprint(model), *losses), frozen_nets.count_cut(model)

    (whole, none), (cut, all_cut) = run(1), run(4, shard="frozen")
    assert cut == whole
    assert (none, all_cut) == (0, 2)


def test_a_loop_that_cuts_nothing_is_refused() -> None:
    strategy = un.MirroredStrategy(devices=2, replicas=2, shard="frozen")
    with strategy.scope():
        weight = keras.Variable(np.ones((64, 256), "float32"))
        optimizer = keras.optimizers.SGD()

    def step(batch):
        value, gradients = un.value_and_grad(lambda: keras.ops.mean(batch @ weight), [weight])
        optimizer.apply(gradients, [weight])
        return value

    (batch,) = strategy.distribute_dataset([np.ones((4, 64), "float32")])
    with pytest.raises(
        ValueError, match="saves nothing here: all weights of 'step' .*\n    variable.*: 65,536 bytes; it is trained"
    ):
        strategy.run(step, args=(batch,))


def test_what_replicas_compute_is_told_of_cut_weights(monkeypatch) -> None:
    """An observer looks into a step, as a replay does."""
    told = []

    class Looking(StepObserver):
        def count_unwatched(self, step: int) -> int:
            return 0

        def before_rows(self, step) -> None:
            inspected = step.inspect()
            arrays = jax.tree.leaves([inspected.state, [replica.gradients for replica in inspected.replicas]])
            told.append([np.asarray(array).tobytes() for array in arrays])

    monkeypatch.setattr(make_step, "open_tools", lambda strategy, function: [Looking()])
    x, y = frozen_nets.NETS["convolutions"].draw(8), frozen_nets.draw_labels(8)
    for devices, options in [(1, {}), (2, {"shard": "frozen"})]:
        model = frozen_nets.build(un.MirroredStrategy(devices=devices, replicas=4, **options), "convolutions", "sgd")
        model.train_on_batch(x, y)
    assert told[0] == told[1]


def test_steps_that_are_not_compiled_read_cut_weights() -> None:
    model = frozen_nets.build(un.MirroredStrategy(devices=2, replicas=2, shard="frozen"), "quantized")
    model.run_eagerly = True
    x, y = frozen_nets.NETS["quantized"].draw(4), frozen_nets.draw_labels(4)
    with pytest.warns(UserWarning, match="runs on"):
        assert np.isfinite(model.train_on_batch(x, y)[0])


@pytest.mark.parametrize(
    ("devices", "freezes", "reason"),
    [
        (1, True, "there is one device"),
        (2, False, "it is trained"),
        (3, True, r"3 devices divide none of the axes \(64, 256\)"),
    ],
)
def test_what_saves_nothing_is_refused(devices: int, freezes: bool, reason: str) -> None:
    strategy = un.MirroredStrategy(devices=devices, replicas=6, shard="frozen")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(4)])
    model.layers[0].trainable = not freezes
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=f"saves nothing here.*\n    sequential.*/dense.*/kernel: 65,536 bytes; {reason}"):
        model.fit(np.zeros((6, 64)), np.zeros((6, 4)), batch_size=6, verbose=0)


def test_other_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="received shard='weights'; it is the part of the state .* Write shard='frozen'"):
        un.MirroredStrategy(devices=2, shard="weights")
