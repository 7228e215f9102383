"""BackupAndRestore: a fit that was broken off at any step goes on, on another placement, and ends with the same bits."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import random
import re
import textwrap
import warnings
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from keras import layers

import unisono as un
from broken_off import BATCH, EPOCHS, ROWS, THEN, Backup, BrokenOffError, X, Y, fit, interrupt, model_on, resume
from processes import FULL
from sizes import STEPS, cases, mostly_slow, slow
from sources import SOURCES, Batches, generated, pipelines
from trainings import labels, on, rows
from unisono._src.keras.callbacks.callback_states import collect_states, set_states
from unisono._src.keras.data import indexed_reading
from unisono._src.keras.data.row_order import RowOrder
from unisono._src.keras.private.callbacks import CHANGING_ATTRIBUTES
from unisono._src.keras.private.data_adapters import make_adapter


@pytest.fixture(scope="module")
def whole():
    """Trainings that nobody interrupts, by source."""
    known = {}

    def of(source="arrays", **options):
        key = source, json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = fit(model_on(on(1, 4)), source, **options)
        return known[key]

    return of


@pytest.mark.soak
@pytest.mark.parametrize("source", ["arrays", *slow("PyDataset"), *pipelines()])
@settings(max_examples=100 if FULL else 3, phases=tuple(Phase) if FULL else cases((Phase.explicit,), tuple(Phase)))
@cases(lambda test: test, example(after=STEPS, freq=1, then=(2, 4)))
@example(after=2 * STEPS - 1, freq=2, then=(4, 4))
@given(
    after=st.integers(1, EPOCHS * STEPS), freq=st.sampled_from([1, 2, 3, "epoch"]), then=st.sampled_from([(1, 4), (3, 4), (4, 4)])
)
def test_every_point_over_every_source(tmp_path_factory, whole, source, after, freq, then):
    """Of indexed sources and of streams, saved at any step, on another number of devices. At its end it leaves no checkpoint."""
    directory = tmp_path_factory.mktemp("at") / "backup"
    data = {"source": source, "shuffle": source in ("arrays", "PyDataset")}
    interrupt(directory, after=after, freq=freq, **data)
    assert resume(directory, strategy=on(*then), **data) == whole(**data)
    assert not directory.exists()


# --- trainings with more than weights, over data of every kind --------------------------------------------------------


class Growing(Batches):
    """One batch more in every pass."""

    def on_epoch_end(self):
        self.rows = jax.tree.map(lambda a: np.concatenate([a, a[:BATCH]]), self.rows)


class Drawn(Batches):
    """Rows that depend on how often passes began and ended."""

    begun = ended = 0

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (1 + self.begun / 8) + self.ended / 8, y


class Turning(Batches):
    """Batches whose rows are others in each pass."""

    def on_epoch_end(self):
        self.rows = jax.tree.map(lambda array: np.roll(array, 3, axis=0), self.rows)


class WarmUp(keras.callbacks.Callback):
    """A learning rate for each step, from nothing but the step."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.001 * (1 + self.epoch * STEPS + batch)


def decaying(epoch, rate):
    return rate * 0.7


def deciding():
    """Patience, best weights, a rate that each epoch multiplies."""
    return (
        keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=1.0),
        keras.callbacks.LearningRateScheduler(decaying),
    )


def with_optimizer(optimizer):
    return lambda strategy, **seed: model_on(strategy, optimizer, **seed)


def over(rows):
    """Arguments of fit, from a dataset that is made anew for each run."""
    return {"x": rows, "y": None, "batch_size": None, "shuffle": False}


def validated_by(data, **options):
    return lambda strategy: {"validation_data": data(strategy), **options}


averaging = with_optimizer(lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9))
turning = lambda strategy: Turning((X[:24], Y[:24]), cases(4, 5))

TRAININGS: dict[str, dict[str, Any]] = {
    "a generator": {"data": lambda _: over(generated((X, Y), BATCH, 2)) | {"steps_per_epoch": STEPS, "epochs": 2}},
    "epochs that are no passes": {"data": lambda _: {"source": "PyDataset", "steps_per_epoch": 2, "epochs": 5}},
    "several steps in a call": {"make": lambda strategy, **seed: model_on(strategy, steps_per_execution=2, **seed)},
    "a dataset that grows": {"data": lambda _: over(Growing((X, Y), BATCH))},
    "a dataset that is told of passes": {"data": lambda _: over(Drawn((X, Y), BATCH))},
    "the same with workers": {"data": lambda _: over(Drawn((X, Y), BATCH, workers=2))},
    "validated by a generator": {
        "data": validated_by(lambda _: generated((X[:24], Y[:24]), 4, times=100), validation_steps=4),
    },
    "validated by a dataset that changes": {"data": validated_by(turning)},
    "validated by some steps of it": {"data": validated_by(turning, validation_steps=2)},
    "validated by a distributed one": {"data": validated_by(lambda strategy: strategy.distribute_dataset(turning(strategy)))},
    "callbacks that decide": {"callbacks": deciding},
    "a rate for each step": {"callbacks": lambda: [WarmUp()]},
    "averages that are swapped": {"callbacks": lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)], "make": averaging},
    "averages that overwrite": {
        "make": with_optimizer(lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=4))
    },
    "a loss scale": {
        "make": with_optimizer(
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), initial_scale=2.0**60, dynamic_growth_steps=3
            )
        )
    },
    "a schedule": {
        "make": with_optimizer(lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 12))),
    },
}

PLACES = [
    ("a generator", 7, None),
    ("epochs that are no passes", 4, None),
    ("a dataset that is told of passes", STEPS + 2, STEPS + 1),
    ("validated by some steps of it", 2 * STEPS + 1, 2 * STEPS),
    *slow(
        *(("a generator", after, None) for after in (1, 4, 5, 10)),
        *(("epochs that are no passes", after, None) for after in (3, 6)),
        ("several steps in a call", 4, 3),
        *(("a dataset that grows", after, None) for after in (STEPS, STEPS + 2)),
        *(
            (name, after, freq)
            for name in ("a dataset that is told of passes", "the same with workers")
            for after, freq in [(STEPS + 2, 1), (STEPS, 1), (STEPS + 1, "epoch"), (2, 1), (STEPS + 3, 2), (2 * STEPS, "epoch")]
        ),
        *((name, 2 * STEPS + 1, freq) for name in TRAININGS if name.startswith("validated") for freq in (1, "epoch")),
        *(("callbacks that decide", after, None) for after in (8, 1, 10)),
        *(
            ("a rate for each step", after, freq)
            for after, freq in [(STEPS + 2, STEPS + 1), (STEPS + 2, 2), (STEPS + 1, 1), (STEPS + 1, "epoch")]
        ),
        ("averages that are swapped", 8, 1),
        ("averages that are swapped", 11, "epoch"),
        *((name, 7, 3) for name in ("a loss scale", "averages that overwrite", "a schedule")),
    ),
]


@pytest.mark.filterwarnings("ignore:.*may have kept something that is not saved")
@pytest.mark.parametrize(("name", "after", "freq"), PLACES)
def test_a_training_goes_on_as_if_nobody_had_interrupted_it(tmp_path, name, after, freq):
    training = {"make": model_on, "callbacks": lambda: (), "data": lambda _: {}} | TRAININGS[name]

    def options(strategy):
        return {"callbacks": training["callbacks"](), "make": training["make"], "strategy": strategy} | training["data"](strategy)

    reference = options(on(1, 4))
    reference = fit(reference.pop("make")(reference.pop("strategy")), **reference)
    interrupt(tmp_path / "b", after=after, freq=freq, **options(on(1, 4)))
    assert resume(tmp_path / "b", **options(on(*THEN))) == reference


@pytest.mark.slow
def test_a_backup_alone_leaves_steps_in_groups(tmp_path):
    """It sees the steps that it saves, and no others."""
    seen = []

    class Watched(Backup):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            super().on_train_batch_end(batch, logs)

    many = rows(4000, 6), labels(4000, 3)
    model_on(on(1, 4)).fit(*many, batch_size=10, epochs=2, verbose=0, callbacks=[Watched(tmp_path / "b", save_freq=64)])
    assert len(seen) < 300, "steps came one at a time"
    assert {63, 127, 191} <= set(seen)


@pytest.mark.slow
def test_a_later_fit_begins_at_its_own_epoch(tmp_path):
    """Keras would remember the epoch of a resume for ever."""
    interrupt(tmp_path / "b")
    model = resume(tmp_path / "b").model
    assert len(model.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2


class Ending(keras.callbacks.Callback):
    """May break a training off at its end."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def on_train_end(self, logs=None):
        if self.fails:
            raise BrokenOffError


@pytest.mark.parametrize("epochs", [5, *slow(1)])
def test_a_training_that_has_ended_goes_on_nowhere(tmp_path, epochs):
    """Killed at its end, in its last epoch or in one where a callback has stopped it, before the best weights are restored."""
    best = lambda: keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)  # stops after two
    train = lambda *callbacks: fit(model_on(on(1, 4)), callbacks=[*callbacks, best()], epochs=epochs)
    reference = train()
    assert len(reference.logs["loss"]) == min(epochs, 2)
    with pytest.raises(BrokenOffError):
        train(Ending(True), Backup(tmp_path / "b"))
    with pytest.warns(UserWarning, match="The training has come to its end, and Ending may have kept something"):
        resumed = train(Ending(False), Backup(tmp_path / "b"))
    assert resumed.logs == {}
    assert un.fingerprint(resumed.model) == un.fingerprint(reference.model)


# --- the state of callbacks -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_callbacks_are_matched_by_what_they_monitor(tmp_path, whole):
    """Their order does not matter; one that is missing is named, and one that is new."""
    of = lambda monitor: keras.callbacks.EarlyStopping(monitor, patience=20)
    loss, accuracy = of("loss"), of("val_accuracy")
    interrupt(tmp_path / "b", callbacks=[of("val_accuracy"), of("loss"), of("val_loss")])
    with pytest.warns(UserWarning, match="The callbacks are others") as said:
        resume(tmp_path / "b", callbacks=[loss, keras.callbacks.ReduceLROnPlateau("loss", patience=20), accuracy])
    assert [str(of.message).partition(": ")[2] for of in said if "are others" in str(of.message)] == [
        "it holds the state of EarlyStopping(monitor='val_loss'), which is not among the callbacks now; ReduceLROnPlateau(monitor='loss') is "
        "among the callbacks now, and begins anew. Give fit the same ones, to go on with the same run."
    ]
    assert (loss.best, accuracy.best) == (min(whole().logs["loss"]), max(whole().logs["val_accuracy"]))


def test_a_state_sets_nothing_else():
    """Of what a file holds, a callback of Keras' takes what it is known to keep."""
    stopping = keras.callbacks.EarlyStopping()
    (name,) = collect_states([stopping])
    set_states([stopping], {name: {"wait": 3, "on_epoch_end": None, "model": "other"}})
    assert stopping.wait == 3
    assert callable(stopping.on_epoch_end)
    assert "model" not in vars(stopping)


def test_states_of_keras_callbacks_are_whole():
    """Every attribute that Keras' deciding callbacks set outside of __init__ is either saved or of no consequence."""
    free = {"monitor_op", "min_delta", "model", "stop_training", "learning_rate"}
    for kind, names in CHANGING_ATTRIBUTES.items():
        bases = kind.__mro__[: kind.__mro__.index(keras.callbacks.Callback)]
        functions = [function for of in bases for function in vars(of).values() if inspect.isfunction(function)]
        texts = [textwrap.dedent(inspect.getsource(of)) for of in functions if of.__name__ != "__init__"]
        nodes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
        changed = {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}
        assert changed - free <= set(names), kind.__name__


class Counting(keras.callbacks.Callback):
    count = 0

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1


class Remembering(Counting):
    def get_state(self):
        return {"count": self.count, "of": np.arange(3)}

    def set_state(self, state):
        self.count = state["count"]
        assert state["of"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_callback_of_ones_own_is_named_or_asked(tmp_path):
    for freq, where in ((None, "in the middle"), ("epoch", "at the beginning")):
        interrupt(tmp_path / "b", callbacks=[Counting()], freq=freq)
        with pytest.warns(UserWarning, match=f"{where} of epoch 2, and Counting may have kept something"):
            resume(tmp_path / "b", callbacks=[Counting()])
    remembering = Remembering()
    interrupt(tmp_path / "c", callbacks=[Remembering()])
    resume(tmp_path / "c", callbacks=[remembering])
    assert remembering.count == EPOCHS * STEPS


# --- what does not fit ------------------------------------------------------------------------------------------------


def wider(strategy, seed=1):
    with strategy.scope():
        model = keras.Sequential([layers.Dense(9, "relu"), layers.BatchNormalization(), layers.Dense(3), layers.Dense(3)])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


MORE = np.concatenate([X, X[:BATCH]]), np.concatenate([Y, Y[:BATCH]])
SAME_ROWS = "The data are not those of the checkpoint"
MISFITS = {
    "another R": (
        {"strategy": lambda: on(1, 8)},
        r"R = 4 replicas, and this strategy has R = 8.*replicas=4, which runs on any number of devices up to 4",
    ),
    "another optimizer": (
        {"make": lambda: with_optimizer(lambda: keras.optimizers.SGD(0.1))},
        "holds the state of Adam as model/optimizer, and here that is SGD.*Nothing was restored",
    ),
    "another model": (
        {"make": lambda: wider},
        r"(?s)model/layers/dense/0: \(6, 8\) float32 in the checkpoint, \(6, 9\) float32 here"
        r".*model/layers/dropout/seeds/0: \(2,\) uint32 in the checkpoint, nothing here"
        r".*model/layers/dense_2/0: nothing in the checkpoint, \(3, 3\) float32 here",
    ),
    "more rows": (
        {"x": lambda: MORE[0], "y": lambda: MORE[1]},
        f"{SAME_ROWS}: pass 1 had 5 batches then, 6 now, {ROWS} rows then, {ROWS + BATCH} now. Give fit or the dataset the same rows",
    ),
    "more batches": (
        {"x": lambda: SOURCES["PyDataset"](MORE, BATCH)["x"], "source": lambda: "PyDataset"},
        f"{SAME_ROWS}: pass 1 had 5 batches then, 6 now. Give fit or the dataset the same rows",
    ),
}


@pytest.mark.parametrize("name", mostly_slow(MISFITS, "another optimizer", "more rows"))
def test_what_does_not_fit_is_refused(tmp_path, name):
    changed = {key: make() for key, make in MISFITS[name][0].items()}
    interrupt(tmp_path / "b", shuffle=False, source=changed.get("source", "arrays"))
    with pytest.raises(ValueError, match=MISFITS[name][1]):
        resume(tmp_path / "b", shuffle=False, **changed)
    if name == "another R":
        resume(tmp_path / "b", backup=Backup(tmp_path / "b", allow_other_replicas=True), shuffle=False, **changed)


@pytest.mark.parametrize("source", ["arrays", *slow("PyDataset"), *pipelines()])
def test_other_rows_are_stopped(tmp_path, source):
    """An unseeded shuffle, or another file: found by the digest, not trained on."""
    interrupt(tmp_path / "b", source=source, shuffle=False)
    other = SOURCES[source]((X[::-1].copy(), Y), BATCH)["x"]
    with pytest.raises(ValueError, match=SAME_ROWS):
        resume(tmp_path / "b", source=source, shuffle=False, x=other)


def test_other_settings_of_the_optimizer_are_warned_of(tmp_path):
    interrupt(tmp_path / "b")
    with pytest.warns(UserWarning, match=r"other settings: beta_1: 0.9 there, 0.8 here. That is another run"):
        resume(tmp_path / "b", with_optimizer(lambda: keras.optimizers.Adam(0.01, beta_1=0.8)))


# --- data that no checkpoint can hold ---------------------------------------------------------------------------------


class Augmented(Batches):
    """Some of its batches have noise of a generator."""

    draw: Any = staticmethod(lambda index: np.random.normal())

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x + np.float32(self.draw(index)), y) if index == 2 else (x, y)


DRAWS = {
    "np.random": lambda _: np.random.normal(),
    "random": lambda _: random.random(),
    "its own": lambda index: np.random.default_rng((7, index)).normal(),
}


@pytest.mark.parametrize(
    ("where", "draw"),
    mostly_slow(itertools.product(("fit", "loop"), DRAWS), ("fit", "np.random"), ("loop", "np.random"), ("loop", "its own")),
)
def test_rows_of_a_global_generator_are_warned_of(tmp_path, where, draw):
    """The last batch before a place need not be one of them: the comparison of its rows would not notice."""
    rows = Augmented((X, Y), BATCH)
    rows.draw = DRAWS[draw]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if where == "fit":
            fit(model_on(on(1, 4)), callbacks=[Backup(tmp_path / "b")], **over(rows))
        else:
            data = on(1, 4).distribute_dataset(rows)
            un.Checkpoint(data=data)
            list(data)
    expected = (
        r"draws from a global generator, np.random or random.*no checkpoint holds.*np.random.default_rng\(\(seed, index\)\)"
    )
    count = sum(re.search(expected, str(warning.message)) is not None for warning in said)
    assert bool(count) is (draw != "its own")


@pytest.mark.compat
def test_a_map_dataset_of_grain_begins_at_any_batch():
    """Those before are not read, nor those that are left out."""
    grain = pytest.importorskip("grain")
    read = []
    rows = grain.MapDataset.range(40).seed(3).shuffle().repeat(3)
    dataset = rows.batch(10).map_with_index(lambda index, batch: (read.append(index), batch)[1])
    source, order = make_adapter(dataset, None, None), RowOrder(0)
    wanted = list(indexed_reading.read_batches(source, order, 0))
    assert indexed_reading.has_index(source)
    for start, step in ((0, 1), (5, 1), (11, 1), (12, 1), (1, 3), (2, 4)):
        read.clear()
        found = list(indexed_reading.read_batches(source, order, 0, slice(start, None, step)))
        assert np.array_equal(found, wanted[start::step])
        assert sorted(read) == list(range(start, 12, step))


@pytest.mark.compat
@pytest.mark.parametrize("leave_out", ["filter", "map after filter"])
def test_a_map_dataset_of_grain_that_leaves_out_batches_is_a_stream(leave_out):
    """Its indices count what nobody gets."""
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(40).batch(10).filter(lambda batch: bool(batch[0] % 20))
    dataset = dataset.map(np.negative) if leave_out == "map after filter" else dataset
    assert not indexed_reading.has_index(make_adapter(dataset, None, None))


def test_a_dataset_that_changes_in_the_middle_of_a_pass_is_warned_of(tmp_path):
    model = model_on(on(1, 4))
    fit_some = lambda rows, **options: model.fit(rows, verbose=0, callbacks=[Backup(tmp_path / "b")], **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The dataset has an on_epoch_begin")
        fit_some(Turning((X, Y), BATCH))
        fit_some(Turning((X, Y), BATCH), steps_per_epoch=STEPS)
        fit_some(Batches((X, Y), BATCH), steps_per_epoch=2)
    with pytest.warns(
        UserWarning, match=rf"an epoch has 2 steps, which is no pass over the {STEPS} batches.*Leave out steps_per_epoch"
    ):
        fit_some(Turning((X, Y), BATCH), steps_per_epoch=2)
