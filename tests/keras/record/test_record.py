"""Records of runs: equal on every placement, true to the arrays that they are of, and no bit of the training is another."""

from __future__ import annotations

import math
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import families
import unisono as un
from sizes import BATCH, cases, mostly_slow, slow
from trainings import on
from unisono._src.engine.digest import choose_cover, digest_on_host
from unisono._src.engine.state import get_step_count
from unisono._src.keras.record import record_file
from unisono._src.keras.record.run_recorder import get_recorder
from unisono._src.tools.records import read_run_record

REPLICAS = 4
PLACEMENTS = cases((1, 3), (1, 3, 4))
"""Numbers of devices."""


@pytest.fixture(autouse=True)
def new_run():
    """Count steps from 0, and leave no record behind."""
    before = get_step_count().steps
    get_step_count().steps = 0
    yield
    get_recorder().stop()
    get_step_count().steps = before


def small_model():
    hidden = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3)]
    return keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(3)])


RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((19, 6)).astype("float32"), RNG.integers(0, 3, 19).astype("int32")


def fit_small(strategy, directory=None, epochs=2, **compiled):
    get_step_count().steps = 0
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = small_model()
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
    callbacks = [un.callbacks.Record(directory)] if directory else []
    model.fit(X, Y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks)
    return model


def content(directory):
    """What is compared of a record: all but the placement, and the names of variables, which Keras numbers as it goes."""
    return [
        (
            step.number,
            [(variable.kind, variable.shape) for variable in step.program.variables],
            step.position,
            step.rows,
            repr(step.loss),
            step.row_digests,
            step.digests,
            step.entry,
        )
        for step in read_run_record(directory).steps.values()
    ]


@pytest.mark.parametrize("family", mostly_slow(families.FAMILIES, "normalized"))
def test_equal_on_every_placement_and_no_bit_is_another(family, tmp_path):
    prints, records = set(), []
    for devices in (None, *PLACEMENTS):
        get_step_count().steps = 0
        keras.utils.set_random_seed(0)
        with on(devices or 1, REPLICAS).scope():
            model, compiled, data = families.FAMILIES[family]()
        model.compile(**compiled)
        callbacks = [un.callbacks.Record(tmp_path / str(devices))] if devices else []
        model.fit(**data, batch_size=families.BATCH, epochs=1, verbose=0, callbacks=callbacks)
        prints.add(un.fingerprint(model))
        if devices:
            records.append(content(tmp_path / str(devices)))
    assert len(prints) == 1
    assert len(records[0]) == 11
    assert all(record == records[0] for record in records)


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_digests_are_those_of_the_arrays(replicas, tmp_path):
    model = fit_small(on(1, replicas), tmp_path)
    steps = read_run_record(tmp_path).steps
    last = steps[max(steps)]
    assert [step.rows for step in steps.values()] == [8, 8, 3, 8, 8, 3]
    assert last.position == (1, 2)
    of_kinds = {
        "weight": model.trainable_variables,
        "state": model.non_trainable_variables,
        "optimizer": model.optimizer.variables,
    }
    recorded = list(zip(last.program.variables, last.digests, strict=True))
    for kind, variables in of_kinds.items():
        found = [digest for variable, digest in recorded if variable.kind == kind]
        assert found == [digest_on_host(np.asarray(variable.value)) for variable in variables]
    assert [v.path for v in last.program.variables if v.kind == "gradient"] == [v.path for v in model.trainable_variables]
    assert last.program.facts["replicas"] == replicas
    assert steps[0].entry is not None
    assert np.isfinite([step.loss for step in steps.values()]).all()


def test_rows_are_those_of_the_global_batch(tmp_path):
    """Though no device gets all of them."""
    strategy = on(4, REPLICAS)
    with strategy.scope():
        model = small_model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with get_recorder().record_into(tmp_path):
        model.train_on_batch(X, Y)
    (step,) = read_run_record(tmp_path).steps.values()
    assert step.row_digests == (digest_on_host(X), digest_on_host(Y))


@pytest.mark.slow
def test_rows_that_are_sent_in_other_parts_have_one_digest(tmp_path):
    """Masks are counted on whole parts, and a step that is verified runs a replica by itself, after a step on the same batch that is not."""
    strategy = un.MirroredStrategy(devices=2, replicas=REPLICAS, verify=1 / 2)
    with strategy.scope():
        model = small_model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=[])
    weights = np.linspace(0, 1, len(X)).astype("float32")
    with get_recorder().record_into(tmp_path / "fit"):
        for _ in range(2):
            model.train_on_batch(X, Y, sample_weight=weights)
    with get_recorder().record_into(tmp_path / "loop"):
        loop(strategy, rounds=2)
    plain, verified = read_run_record(tmp_path / "fit").steps.values()
    assert plain.row_digests == verified.row_digests == (digest_on_host(X), digest_on_host(Y), digest_on_host(weights))
    looped = list(read_run_record(tmp_path / "loop").steps.values())
    assert len(looped) == 6
    assert all(looped[number].row_digests == looped[number + 1].row_digests for number in (0, 2, 4))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.integers(1, 20))
def test_a_cover_has_each_row_once(ends, count):
    parts = {range(min(pair), min(count, max(pair))) for pair in ends}
    parts = {part for part in parts if part}
    cover = choose_cover(parts, count)
    assert [row for part in cover for row in part] == list(range(count))


@pytest.mark.slow
def test_a_callback_that_assigns_is_seen_at_the_entry_of_a_step(tmp_path):
    strategy = on(1, REPLICAS)
    with strategy.scope():
        model = small_model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    class Assign(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.trainable_variables[0].assign(np.zeros((6, 8), "float32"))

    callbacks = [un.callbacks.Record(tmp_path), Assign()]
    model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    steps = read_run_record(tmp_path).steps
    kinds = [variable.kind for variable in steps[0].program.variables]
    before = [digest for kind, digest in zip(kinds, steps[1].digests, strict=True) if kind != "gradient"]
    entry = list(steps[2].entry or ())
    assert [index for index, (one, other) in enumerate(zip(before, entry, strict=True)) if one != other] == [0]
    assert entry[0] == (0, 0)
    assert steps[1].entry is None


def loop(strategy, rounds=1, **options):
    """Train on each batch as often as `rounds` says."""
    get_step_count().steps = 0
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer = small_model(), keras.optimizers.Adam()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(batch):
        x, y = batch

        def loss():
            return un.compute_average_loss(loss_fn(y, model(x, training=True)))

        value, gradients = un.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @un.function(**options)
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    batches = strategy.distribute_dataset((X, Y), batch_size=BATCH)
    values = [float(step(batch)) for batch in batches for _ in range(rounds)]
    return un.fingerprint(model, optimizer), values


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_a_loop_is_recorded(replicas, tmp_path):
    plain, _ = loop(on(1, replicas))
    recorded, values = loop(on(1, replicas), record=tmp_path / "one")
    get_recorder().stop()
    others = [loop(on(cases(min(replicas, 2), replicas), replicas), record=tmp_path / "all")[0]]
    get_recorder().stop()
    assert {plain, recorded, *others} == {plain}
    assert content(tmp_path / "one") == content(tmp_path / "all")
    steps = read_run_record(tmp_path / "one").steps
    np.testing.assert_allclose([step.loss for step in steps.values()], values, rtol=1e-6)
    assert {step.program.name for step in steps.values()} == {"replica_step"}


@pytest.mark.parametrize("replicas", [3, *slow(1)])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_loss_that_is_not_told_is_no_nan(replicas, is_told, tmp_path):
    """Replicas return the root of a negative number, or nothing."""
    strategy = on(1, replicas)
    with strategy.scope():
        weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD()

    def replica_step(batch):
        _, gradients = un.value_and_grad(lambda: un.compute_average_loss(weight * batch), [weight])
        optimizer.apply(gradients, [weight])
        return jnp.sqrt(batch.min()) if is_told else None

    @un.function(record=tmp_path)
    def step(batch):
        return strategy.run(replica_step, args=(batch,))

    for batch in strategy.distribute_dataset(-np.ones(12, "float32"), batch_size=6):
        step(batch)
    get_recorder().stop()
    losses = [step.loss for step in read_run_record(tmp_path).steps.values()]
    assert [repr(loss) for loss in losses] == [repr(math.nan if is_told else None)] * 2


class Tracked(keras.Model):
    """As Keras' guide to custom steps on JAX writes it: the loss is fed to a mean of this name, once for a batch or for each row."""

    def __init__(self, by_rows, told, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3)
        self.mean = keras.metrics.Mean(name="loss")
        self.by_rows, self.told = by_rows, told

    @property
    def metrics(self):
        return [self.mean]

    def call(self, x):
        return self.dense(x)

    def loss_and_updates(self, trainable, fixed, x, y):
        y_pred, fixed = self.stateless_call(trainable, fixed, x)
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return losses.mean(), (losses, fixed)

    def train_step(self, state, data):
        trainable, fixed, slots, metrics = state
        with_gradient = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, (losses, fixed)), gradients = with_gradient(trainable, fixed, *data)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        if self.told:
            metrics = self.mean.stateless_update_state(metrics, losses if self.by_rows else loss)
        return {"loss": self.mean.stateless_result(metrics)}, (trainable, fixed, slots, metrics)


def fit_tracked(strategy, directory, by_rows=False, told=True):
    """Return the mean after each batch: of the losses since the epoch began."""
    get_step_count().steps = 0
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Tracked(by_rows, told)
    model.compile(optimizer="adam")
    means = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: means.append(logs["loss"]))
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[un.callbacks.Record(directory), note])
    return means


@pytest.mark.parametrize(("replicas", "by_rows"), [(3, True), *slow((1, False), (3, False))])
def test_the_loss_of_a_step_of_its_own_is_what_it_feeds_to_its_mean(replicas, by_rows, tmp_path):
    means = fit_tracked(on(1, replicas), tmp_path / "one", by_rows)
    fit_tracked(on(replicas, replicas), tmp_path / "all", by_rows)
    get_recorder().stop()
    assert content(tmp_path / "one") == content(tmp_path / "all")
    losses = np.array([step.loss for step in read_run_record(tmp_path / "one").steps.values()]).reshape(2, 3)
    weights = [8, 8, 3] if by_rows else [1, 1, 1]
    np.testing.assert_allclose(((losses * weights).cumsum(1) / np.cumsum(weights)).ravel(), means, rtol=1e-5)


@pytest.mark.parametrize("replicas", [3, *slow(1)])
def test_a_step_that_feeds_no_mean_tells_no_loss(replicas, tmp_path):
    fit_tracked(on(1, replicas), tmp_path, told=False)
    assert {step.loss for step in read_run_record(tmp_path).steps.values()} == {None}


def test_one_process_records_into_one_directory(tmp_path):
    loop(on(1, 1), record=tmp_path / "one")
    with pytest.raises(ValueError, match=r"record='.*two', and this process records into '.*one' already\. Name one directory"):
        loop(on(1, 1), record=tmp_path / "two")


def test_a_record_that_was_torn_is_read_and_goes_on(tmp_path):
    """Behind every byte at which a process may be killed."""
    fit_small(on(1, 1), tmp_path / "whole")
    whole = content(tmp_path / "whole")
    data = (tmp_path / "whole" / record_file.NAME).read_bytes()
    begun = next(record_file.iterate_frames(tmp_path / "whole" / record_file.NAME))[0]

    @given(st.integers(begun, len(data)))
    def torn(end):
        directory = tmp_path / "torn"
        directory.mkdir(exist_ok=True)
        (directory / record_file.NAME).write_bytes(data[:end])
        read = content(directory)
        assert read == whole[: len(read)]
        with record_file.open_to_append(directory) as file:
            record_file.write_json(file, record_file.BEGIN, {"format": 1, "first": 6, "command": [], "time": 0.0})
        assert content(directory) == read
        assert len(read_run_record(directory).starts) == 2

    torn()


def test_a_new_run_in_the_same_directory_replaces_the_old_one(tmp_path):
    fit_small(on(1, 1), tmp_path, epochs=2)
    fit_small(on(1, 1), tmp_path, epochs=1)
    assert len(read_run_record(tmp_path).steps) == 3


def test_steps_that_are_not_compiled_are_not_recorded(tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with on(1, 1).scope():
            model = keras.Sequential([layers.Input((6,)), layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(X[:8], X[:8, :3], batch_size=4, verbose=0, callbacks=[un.callbacks.Record(tmp_path)])
    texts = [str(warning.message) for warning in said]
    assert (
        "The steps of 'train' are not compiled, and such steps are not recorded. Leave out run_eagerly=True and jax.disable_jit() to record them."
        in texts
    )
    assert get_step_count().steps == 2


def test_a_number_of_steps_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_STEPS", "few")
    with pytest.raises(
        ValueError, match=r"the environment variable UNISONO_STEPS is a whole number of 1 or more; received 'few'\."
    ):
        fit_small(on(1, 1), tmp_path, epochs=1)


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"holds no record of a run: there is no file steps\.record\. Record a run by UNISONO_RECORD="
    ):
        read_run_record(tmp_path)
    with pytest.raises(ValueError, match=r"Record received an empty directory\. Name a directory"):
        un.callbacks.Record("")
    with record_file.open_to_append(tmp_path) as file:
        record_file.write_json(file, record_file.BEGIN, {"format": 99, "first": 0, "command": [], "time": 0.0})
    with pytest.raises(ValueError, match=r"has the format 99, and this version of Unisono reads formats up to 1"):
        read_run_record(tmp_path)
