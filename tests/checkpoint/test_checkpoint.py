"""un.Checkpoint: a loop that was broken off anywhere goes on with the same bits; what does not fit is named."""

from __future__ import annotations

import json
import os
import signal
import warnings

import keras
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from keras import layers, ops

import unisono as un
from loops import Loop, crossentropy, normalized
from processes import FULL
from sizes import cases, slow
from sources import Batches
from threads import in_thread
from trainings import on, rows
from unisono._src.checkpoint.files import DamagedError
from unisono._src.data.resume_point import ResumePoint
from unisono._src.keras_private.variable_paths import walk_variables

ROWS, BATCH = cases((13, 4), (43, 12))
"""In `make test` each of four replicas has one row, or none: that is one program."""
X, Y = rows(ROWS, 6), np.random.default_rng(1).integers(0, 5, ROWS)
STEPS, EPOCHS = 4, 3


class Stream:
    """Batches without an index, which can be begun again."""

    def __init__(self, seed=None):
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        order = self.rng.permutation(len(X))
        return (tuple(of[order[i : i + BATCH]] for of in (X, Y)) for i in range(0, len(X), BATCH))


def pipeline(context):
    rows = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    return [(X[rows][i : i + 3], Y[rows][i : i + 3]) for i in range(0, 11, 3)]


DATA = {
    "arrays": lambda strategy: strategy.distribute_dataset((X, Y), batch_size=BATCH, shuffle=True),
    "a list": lambda strategy: strategy.distribute_dataset([(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]),
    "PyDataset": lambda strategy: strategy.distribute_dataset(Batches((X, Y), BATCH), shuffle=True),
    "a stream": lambda strategy: strategy.distribute_dataset(Stream(3)),
    "pipelines": lambda strategy: strategy.distribute_datasets_from_function(pipeline),
}


class Training:
    """A loop as a user would write it, with an epoch counter of its own."""

    def __init__(self, strategy, data="arrays"):
        self.loop = Loop(strategy, normalized)
        self.data = DATA[data](strategy)
        self.epoch = keras.Variable(0, dtype="int32", trainable=False)
        self.done = 0
        self.checkpoint = un.Checkpoint(
            model=self.loop.model, optimizer=self.loop.optimizer, accuracy=self.loop.accuracy, data=self.data, epoch=self.epoch
        )

    def restored(self, path, **options):
        """From a process that had other random numbers."""
        keras.utils.set_random_seed(99)
        for variable in self.loop.model.variables:
            variable.assign(variable + 1)
        assert self.checkpoint.restore(path, **options)
        return self

    def run(self, directory=None, save_at=None):
        """To the end, or until a step whose number is given, which is saved."""
        while int(self.epoch) < EPOCHS:
            for batch in self.data:
                self.loop.one(batch)
                self.done += 1
                if self.done == save_at:
                    return self.checkpoint.save(directory / "ckpt")
            self.epoch.assign(self.epoch + 1)
        return un.fingerprint(self.loop.model, self.loop.optimizer, self.loop.accuracy)


@pytest.fixture(scope="module")
def whole():
    known = {}
    return lambda data: known.setdefault(data, None) or known.__setitem__(data, Training(on(1, 4), data).run()) or known[data]


RESUMED = cases((1, 4), (2, 4))
"""Where a training goes on if the placement is not the subject."""
COMMON = ("arrays",)
"""The sources that `make test` takes; `make test-all` takes all."""


@pytest.mark.soak
@pytest.mark.parametrize("data", [pytest.param(data, marks=[pytest.mark.slow] * (data not in COMMON)) for data in DATA])
@settings(max_examples=100 if FULL else 2, phases=list(Phase) if FULL else cases([Phase.explicit], list(Phase)))
@cases(lambda test: test, example(at=STEPS, then=(2, 4)))
@example(at=2 * STEPS + 1, then=cases((2, 4), (4, 4)))
@given(at=st.integers(1, EPOCHS * STEPS), then=st.sampled_from([(1, 4), (2, 4), (3, 4), (4, 4)]))
def test_every_point_over_every_source(tmp_path_factory, whole, data, at, then):
    directory = tmp_path_factory.mktemp("ckpts")
    path = Training(on(1, 4), data).run(directory, save_at=at)
    assert un.latest_checkpoint(directory) == path
    assert Training(on(*then), data).restored(path).run() == whole(data)


@pytest.mark.slow
def test_saved_between_epochs(tmp_path, whole):
    """A pass that has come to its end is not begun again."""
    first = Training(on(1, 4))
    for batch in first.data:
        first.loop.one(batch)
    first.epoch.assign(1)
    path = first.checkpoint.save(tmp_path / "ckpt")
    assert Training(on(2, 4)).restored(path).run() == whole("arrays")


class Leaving(Training):
    """A loop that leaves each pass after two batches."""

    def run(self, directory=None, save_at=None, how="after the loop"):
        """To the end, or until a step whose number is given, after which it is saved."""
        while int(self.epoch) < EPOCHS:
            for number, batch in enumerate(self.data, 1):
                self.loop.one(batch)
                self.done += 1
                if self.done == save_at and how == "in the loop":
                    return self.checkpoint.save(directory / "ckpt")
                if number == 2:
                    break
            self.epoch.assign(self.epoch + 1)
            if self.done == save_at:
                return self.checkpoint.save(directory / "ckpt")
        return un.fingerprint(self.loop.model, self.loop.optimizer, self.loop.accuracy)


class Reordered(Batches):
    """Batches in an order that changes at the begin and at the end of each pass."""

    def on_epoch_begin(self):
        self.rows = tuple(np.roll(of, 3, axis=0) for of in self.rows)

    def on_epoch_end(self):
        self.rows = tuple(np.roll(of, 5, axis=0) for of in self.rows)


DATA["a PyDataset that changes"] = lambda strategy: strategy.distribute_dataset(Reordered((X, Y), BATCH))


@pytest.mark.filterwarnings("ignore:The loop over the dataset was left")
@pytest.mark.parametrize("data", ["a stream", *slow(*(name for name in DATA if name != "a stream"))])
@pytest.mark.parametrize(
    ("at", "how"), [(4, "after the loop"), *slow((2, "after the loop"), (3, "in the loop"), (5, "in the loop"))]
)
def test_passes_that_are_left(tmp_path, data, at, how):
    """The next loop begins a pass, in the process that goes on and in the process that resumes."""
    whole = Leaving(on(1, 4), data).run()
    path = Leaving(on(1, 4), data).run(tmp_path, at, how)
    if how == "in the loop":  # the resumed loop counts its batches from the middle of the pass
        resumed = Leaving(on(2, 4), data).restored(path)
        for batch in resumed.data:
            resumed.loop.one(batch)
            break
        resumed.epoch.assign(resumed.epoch + 1)
        assert resumed.run() == whole
        return
    assert Leaving(on(*RESUMED), data).restored(path).run() == whole


def test_passes_that_are_left_alike_are_kept_as_one_entry():
    """A program may take its first batch from a new iterator in each step."""
    data = on(1, 4).distribute_dataset((X, Y), batch_size=BATCH)
    for batches in (1, 1, 1, 2, STEPS, 2, 2):
        iterator = iter(data)
        for _ in range(batches):
            next(iterator)
    assert [list(passes) for passes in data.get_state()["place"]["left"]] == [[0, 3, 1], [3, 4, 2], [4, 5, STEPS], [5, 6, 2]]
    place = ResumePoint.from_json(json.loads(json.dumps(data.get_state()["place"])))
    assert place.position == (6, 2)
    assert place.left_passes == {0: 1, 1: 1, 2: 1, 3: 2, 4: STEPS, 5: 2}


def test_a_pass_that_is_left_before_it_is_saved_is_said(tmp_path):
    training = Leaving(on(1, 4))
    with pytest.warns(
        UserWarning, match=r"left after 2 of 4 batches of pass 0, and then saved: what resumes.* begins the next pass"
    ):
        training.run(tmp_path, save_at=2)


def test_a_loop_that_stops_at_the_last_batch_of_a_pass_has_left_nothing(tmp_path, whole):
    def train(training, epochs):
        for _ in range(epochs):
            for number, batch in enumerate(training.data, 1):
                training.loop.one(batch)
                if number == STEPS:
                    break
            training.epoch.assign(training.epoch + 1)
        return training

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The loop over the dataset was left")
        path = train(Training(on(1, 4)), 1).checkpoint.save(tmp_path / "ckpt")
    resumed = train(Training(on(*RESUMED)).restored(path), EPOCHS - 1)
    assert un.fingerprint(resumed.loop.model, resumed.loop.optimizer, resumed.loop.accuracy) == whole("arrays")


def test_an_interruption_leaves_no_pass(tmp_path):
    """Saved where an error is handled, the loop is in the middle of the pass: what resumes goes on there."""
    training = Training(on(1, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The loop over the dataset was left")
        try:
            for number, batch in enumerate(training.data):
                if number == 2:
                    raise KeyboardInterrupt
                training.loop.one(batch)
        except KeyboardInterrupt:
            path = training.checkpoint.save(tmp_path / "ckpt")
    resumed = Training(on(*RESUMED)).restored(path)
    assert resumed.data.position == (0, 0), "not begun"
    assert next(iter(resumed.data)) is not None
    assert resumed.data.position == (0, 4)


@pytest.mark.slow
def test_saved_again_before_the_next_batch(tmp_path, whole):
    """The place is that of the checkpoint that was restored, also where the process had gone on from there itself."""
    training = Training(on(1, 4))
    training.loop.optimizer.build(training.loop.model.trainable_variables)
    before = training.checkpoint.save(tmp_path / "before")
    path = training.run(tmp_path, save_at=STEPS + 1)
    for batch in training.data:
        training.loop.one(batch)
    training.restored(path)
    again = training.checkpoint.save(tmp_path / "again")
    assert Training(on(2, 4)).restored(again).run() == whole("arrays")
    assert training.restored(before).run() == whole("arrays")


def test_what_is_trained_after_save_is_not_in_it(tmp_path, whole):
    """Steps go on while the checkpoint is being written, and use the memory of the state again."""
    training = Training(on(1, 4))
    path = training.run(tmp_path, save_at=3)
    training.run()
    training.checkpoint.wait()
    assert Training(on(1, 4)).restored(path).run() == whole("arrays")


def test_a_stream_with_other_rows_is_stopped(tmp_path):
    """An unseeded shuffle."""
    DATA["unseeded"] = lambda strategy: strategy.distribute_dataset(Stream())
    try:
        path = Training(on(1, 4), "unseeded").run(tmp_path, save_at=6)
        resumed = Training(on(1, 4), "unseeded")
        resumed.checkpoint.restore(path)
        with pytest.raises(
            ValueError, match=r"up to batch 2 of pass 1 have other rows now, or come in another order.*seed its shuffling"
        ):
            resumed.run()
    finally:
        del DATA["unseeded"]


class Sized(Stream):
    """A stream that knows how many batches it has."""

    def __init__(self, count):
        super().__init__(3)
        self.count = count

    def __len__(self):
        return self.count


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda count: {"dataset": Sized(count)}, "pass 0 had 4 batches then, 5 now"),
        (lambda count: {"dataset": [(X[:BATCH], Y[:BATCH])] * count}, "pass 0 had 4 batches then, 5 now"),
        (lambda count: {"dataset": (X[: count * 2],), "batch_size": 2}, "pass 0 had 4 batches then, 5 now, 8 rows then, 10 now"),
    ],
    ids=["stream", "list", "arrays"],
)
def test_data_of_another_size_are_stopped(tmp_path, made, said):
    data, other = (on(1, 4).distribute_dataset(**made(count)) for count in (4, 5))
    checkpoint = un.Checkpoint(data=data, step=keras.Variable(0))
    iterator = iter(data)
    next(iterator)
    path = checkpoint.save(tmp_path / "ckpt")
    un.Checkpoint(data=other, step=keras.Variable(0)).restore(path)
    with pytest.raises(
        ValueError, match=f"The data are not those of the checkpoint: {said}. Give fit or the dataset the same rows"
    ):
        next(iter(other))


def test_reading_forward_is_said(tmp_path, monkeypatch, capsys):
    from unisono._src.data import resume

    monkeypatch.setattr(resume, "SAY_AFTER", 0.0)
    path = Training(on(1, 4), "a stream").run(tmp_path, save_at=6)
    resumed = Training(on(1, 4), "a stream")
    resumed.checkpoint.restore(path)
    next(iter(resumed.data))
    assert (
        "Read forward to batch 2 of pass 1: 6 batches in 0 s. Arrays, lists of batches, a keras.utils.PyDataset and a grain.MapDataset have "
        "an index, and begin there at once.\n" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_another_strategy_with_the_same_replicas(tmp_path, whole):
    path = Training(on(4, 4)).run(tmp_path, save_at=5)
    assert Training(un.OneDeviceStrategy(replicas=4)).restored(path).run() == whole("arrays")
    with pytest.raises(ValueError, match="R = 4 replicas, and this strategy has R = 2"):
        Training(on(1, 2)).checkpoint.restore(path)
    Training(on(1, 2)).restored(path, allow_other_replicas=True)


@pytest.mark.parametrize(("name", "at"), [("SIGUSR1", STEPS), *slow(("SIGTERM", 2), ("SIGTERM", STEPS + 1))])
def test_a_signal_saves_between_two_steps(tmp_path, whole, name, at):
    first = Training(on(1, 4))
    step = first.loop.one

    def one(batch):
        step(batch)
        if first.done + 1 == at:
            os.kill(os.getpid(), signal.Signals[name])

    first.loop.one = one
    with pytest.raises(SystemExit) as left, first.checkpoint.saving_on_signal(tmp_path / "ckpt", ("SIGTERM", "SIGUSR1")):
        first.run()
    assert left.value.code == 75
    assert first.done == at
    assert Training(on(*RESUMED)).restored(un.latest_checkpoint(tmp_path)).run() == whole("arrays")


@pytest.mark.parametrize("of", ["data", "optimizer", "variable"])
def test_another_number_of_replicas_is_seen_without_a_model(tmp_path, of):
    """By the data, or by whatever was made in a scope."""

    def thing(strategy):
        with strategy.scope():
            return {
                "data": lambda: strategy.distribute_dataset((X, Y), batch_size=BATCH),
                "optimizer": keras.optimizers.Adam,
                "variable": lambda: keras.Variable(0.0),
            }[of]()

    strategies = on(1, 4), on(1, 2)
    first, other = map(thing, strategies)
    step = keras.Variable(0)
    path = saved(tmp_path, step=step, of=first)
    with pytest.raises(ValueError, match="R = 4 replicas, and this strategy has R = 2"):
        un.Checkpoint(step=step, of=other).restore(path)
    assert un.Checkpoint(step=step, of=first).restore(path)


def test_saving_in_another_thread_is_warned_about(tmp_path):
    """Which may be in the middle of a step."""
    data = on(1, 4).distribute_dataset((X, Y), batch_size=BATCH)
    checkpoint = un.Checkpoint(step=keras.Variable(0), data=data)
    iterator = iter(data)
    next(iterator)
    checkpoint.save(tmp_path / "ckpt")

    def elsewhere():
        with pytest.warns(UserWarning, match=r"save was called in the thread 'saver'.*Save in the loop, between two steps"):
            checkpoint.save(tmp_path / "ckpt")
        return True

    assert in_thread("saver", elsewhere)


def test_a_signal_needs_the_data(tmp_path):
    checkpoint = un.Checkpoint(epoch=keras.Variable(0))
    with (
        pytest.raises(ValueError, match=r"Write Checkpoint\(\.\.\., data=dataset\)"),
        checkpoint.saving_on_signal(tmp_path / "ckpt"),
    ):
        pass


# --- without a strategy, and unbuilt ----------------------------------------------------------------------------------


def unbuilt():
    return keras.Sequential([layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.2), layers.Dense(5)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8)
        self.heads = {"a": layers.Dense(2), "b": [layers.Dense(3)]}

    def call(self, x):
        x = ops.relu(self.hidden(x))
        return ops.concatenate([self.heads["a"](x), self.heads["b"][0](x)], -1)


@pytest.mark.parametrize("make", [unbuilt, *slow(Subclassed)])
def test_into_a_fresh_unbuilt_model_and_optimizer_without_a_strategy(tmp_path, make):
    """As the tutorial's end does: other automatic names, nothing built."""
    loop = Loop(on(1, 4), make)
    batch = next(iter(loop.strategy.distribute_dataset((X, Y), batch_size=BATCH)))
    loop.one(batch)
    path = un.Checkpoint(optimizer=loop.optimizer, model=loop.model).save(str(tmp_path) + "/")
    model, optimizer = make(), keras.optimizers.Adam()
    fresh = un.Checkpoint(optimizer=optimizer, model=model)
    assert fresh.restore(path)
    assert un.fingerprint(model, optimizer) == un.fingerprint(loop.model, loop.optimizer)
    np.testing.assert_array_equal(model(X), loop.model(X))


def test_two_models_with_their_own_optimizers(tmp_path):
    """Each optimizer is built for the variables that it was built for."""

    def made():
        keras.utils.set_random_seed(4)
        return {
            f"{name}_{part}": of() for name in "ab" for part, of in (("model", unbuilt), ("optimizer", keras.optimizers.Adam))
        }

    first = made()
    for name in "ab":
        first[f"{name}_model"](X)
        first[f"{name}_optimizer"].build(first[f"{name}_model"].trainable_variables)
    path = un.Checkpoint(**first).save(tmp_path / "gan")
    second = made()
    un.Checkpoint(**second).restore(path)
    assert un.fingerprint(*second.values()) == un.fingerprint(*first.values())


class WithMetric(keras.Model):
    """Compiled with metrics, which a loop never builds, and with one of its own."""

    def __init__(self):
        super().__init__()
        self.dense, self.seen = layers.Dense(2), keras.metrics.Sum()
        self(X)
        self.compile(keras.optimizers.SGD(), "mse", metrics=["mae", keras.metrics.MeanSquaredError()])
        self.optimizer.build(self.trainable_variables)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("there", [True, False], ids=["built there", "not built there"])
@pytest.mark.parametrize("here", [True, False], ids=["built here", "not built here"])
def test_metrics_of_compile_that_are_built_late(tmp_path, there, here):
    """By fit or evaluate, before or after the restore; the model's own are matched in any case."""
    first, fresh = WithMetric(), WithMetric()
    for model, built in ((first, there), (fresh, here)):
        if built:
            model.evaluate(X, np.ones((ROWS, 2)), verbose=0)
    first.seen.update_state(5.0)
    fresh.seen.update_state(7.0)
    un.Checkpoint(model=fresh).restore(saved(tmp_path, model=first))
    assert un.fingerprint(fresh) == un.fingerprint(first)
    assert float(fresh.seen.result()) == 5.0
    if there and here:
        assert un.fingerprint(fresh.metrics_variables) == un.fingerprint(first.metrics_variables)
    elif here:
        assert fresh.get_metrics_result()["mae"] == 0.0, "as a model has them before its first batch"


@pytest.mark.parametrize("make", [unbuilt, lambda: layers.Dense(3)], ids=["model", "layer"])
def test_what_was_not_built_when_it_was_saved(tmp_path, make):
    """A signal may come before the first batch."""
    path = saved(tmp_path, thing=make(), step=keras.Variable(3))
    step = keras.Variable(0)
    with pytest.warns(
        UserWarning, match=r"thing \((Dense|Sequential)\) was not built when .*Call it on one batch before you save"
    ):
        assert un.Checkpoint(thing=make(), step=step).restore(path)
    assert int(step) == 3
    built = make()
    built(X)
    with pytest.raises(ValueError, match="does not fit") as error:
        un.Checkpoint(thing=built, step=step).restore(path)
    assert "nothing in the checkpoint, (6, " in str(error.value)


class WithSeeds(layers.Layer):
    def __init__(self):
        super().__init__()
        self.random, self.seeds = keras.random.SeedGenerator(), layers.Dense(3)

    def build(self, shape):
        self.seeds.build(shape)


def test_attributes_that_are_called_like_our_groups(tmp_path):
    """Two variables never have one name."""
    first, second = WithSeeds(), WithSeeds()
    first.build((None, 6))
    assert [name for name, _ in walk_variables(first, "of")] == ["of/seeds/0", "of/seeds/0'", "of/seeds/1"]
    un.Checkpoint(layer=second).restore(saved(tmp_path, layer=first))
    assert un.fingerprint(second) == un.fingerprint(first)


def with_optimizers(base):
    """A layer or a model that is not compiled, and has optimizers all the same."""

    class WithOptimizers(base):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)
            self.optimizer = keras.optimizers.Adam()
            self.slow = keras.optimizers.SGD(momentum=0.9)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

        def train(self):
            for optimizer in (self.optimizer, self.slow):
                optimizer.apply([ops.ones(variable.shape) for variable in self.dense.variables], self.dense.variables)

    return WithOptimizers


@pytest.mark.parametrize("base", [layers.Layer, keras.Model])
def test_optimizers_that_are_attributes(tmp_path, base):
    """They are built in the restored object, and saved also where they were built after the first save."""
    make = with_optimizers(base)
    first, fresh = make(), make()
    checkpoint = un.Checkpoint(thing=first)
    checkpoint.save(tmp_path / "ckpt")
    first(X)
    first.train()
    un.Checkpoint(thing=fresh).restore(checkpoint.save(tmp_path / "ckpt"))
    assert un.fingerprint(fresh, fresh.optimizer, fresh.slow) == un.fingerprint(first, first.optimizer, first.slow)
    other = make()
    other.slow = keras.optimizers.Adam()
    with pytest.raises(ValueError, match="holds the state of SGD as thing/slow, and here that is Adam"):
        un.Checkpoint(thing=other).restore(un.latest_checkpoint(tmp_path))
    assert not other.built


class ShapesUnknown(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def get_build_config(self):
        return None


def test_a_model_that_cannot_be_built(tmp_path):
    model = ShapesUnknown()
    model(X)
    path = un.Checkpoint(model=model).save(tmp_path / "m")
    with pytest.raises(ValueError, match=r"model \(ShapesUnknown\) is not built.*Call it on one batch before you restore"):
        un.Checkpoint(model=ShapesUnknown()).restore(path)


# --- differences ------------------------------------------------------------------------------------------------------


def saved(tmp_path, **trackables):
    checkpoint = un.Checkpoint(**trackables)
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.wait()
    return path


def sequential(*units, dtype="float32"):
    return keras.Sequential([layers.Input((6,)), *(layers.Dense(u, dtype=dtype) for u in units)])


def test_every_difference_is_named_and_nothing_restored(tmp_path):
    """Keras' own loading keeps fresh weights in silence."""
    path = saved(tmp_path, model=sequential(3, 4))
    other = sequential(3, 5, 2)
    before = un.fingerprint(other)
    with pytest.raises(ValueError, match="does not fit") as error:
        un.Checkpoint(model=other).restore(path)
    assert str(error.value).splitlines()[1:] == [
        "  model/layers/dense_1/0: (3, 4) float32 in the checkpoint, (3, 5) float32 here",
        "  model/layers/dense_1/1: (4,) float32 in the checkpoint, (5,) float32 here",
        "  model/layers/dense_2/0: nothing in the checkpoint, (5, 2) float32 here",
        "  model/layers/dense_2/1: nothing in the checkpoint, (2,) float32 here",
        "Nothing was restored.",
    ]
    assert un.fingerprint(other) == before
    with pytest.raises(ValueError, match=r"\(6, 3\) float32 in the checkpoint, \(6, 3\) bfloat16 here"):
        un.Checkpoint(model=sequential(3, 4, dtype="bfloat16")).restore(path)
    with pytest.raises(ValueError, match=r"model/layers/dense_1/0: \(3, 4\) float32 in the checkpoint, nothing here"):
        un.Checkpoint(model=sequential(3)).restore(path)


def test_other_objects(tmp_path):
    path = saved(tmp_path, model=sequential(3), step=keras.Variable(7))
    with pytest.raises(
        ValueError, match=r"also holds step. Give step= to Checkpoint as well, or write restore\(path, partial=True\)"
    ):
        un.Checkpoint(model=sequential(3)).restore(path)
    assert un.Checkpoint(model=sequential(3)).restore(path, partial=True)
    with pytest.raises(ValueError, match=r"holds no other, only model, step. Nothing was restored"):
        un.Checkpoint(model=sequential(3), step=keras.Variable(0), other=keras.Variable(0)).restore(path)
    with pytest.raises(TypeError, match=r"Checkpoint\(epoch=\.\.\.\) received 3 of type int.*Write keras.Variable"):
        un.Checkpoint(epoch=3)
    with pytest.raises(ValueError, match=r"received the name 'a/b'. Its names are those of Python's arguments"):
        un.Checkpoint(**{"a/b": keras.Variable(0)})


def held(seed):
    """A seed generator, and objects in a list and in a dict."""
    seeds = keras.random.SeedGenerator(seed)
    counts = [keras.Variable(float(seed)), keras.Variable(10.0 * seed)]
    towers = {"left": sequential(3), "right": (sequential(3),)}
    return {"seeds": seeds, "counts": counts, "towers": towers}


def drawn(seeds):
    return keras.random.normal((3,), seed=seeds).tolist()


def test_seed_generators_and_what_lists_and_dicts_hold(tmp_path):
    things, others = held(1), held(2)
    drawn(things["seeds"])
    path = saved(tmp_path, **things)
    others["counts"].append(keras.Variable(5.0))
    with pytest.raises(ValueError, match=r"holds no counts\[2\]"):
        un.Checkpoint(**others).restore(path)
    others["counts"].pop()
    assert un.Checkpoint(**others).restore(path)
    assert drawn(others["seeds"]) == drawn(things["seeds"])
    assert [float(count) for count in others["counts"]] == [1.0, 10.0]
    assert un.fingerprint(others["towers"]["left"]) == un.fingerprint(things["towers"]["left"])
    assert un.fingerprint(others["towers"]["right"][0]) == un.fingerprint(things["towers"]["right"][0])
    with pytest.raises(ValueError, match=r"also holds counts\[1\]. Give counts\[1\] to Checkpoint as well"):
        un.Checkpoint(**others | {"counts": others["counts"][:1]}).restore(path)
    with pytest.raises(TypeError, match=r"Checkpoint\(counts\[1\]=\.\.\.\) received 3 of type int"):
        un.Checkpoint(counts=[keras.Variable(0), 3])


class Stubborn(keras.Variable):
    def assign(self, value):
        pass


class OfSome(layers.Layer):
    def __init__(self, make, count):
        super().__init__()
        self.all = [make(float(index)) for index in range(count)]
        self.built = True


@pytest.mark.parametrize("count", [2, 1], ids=["a whole object", "a part of it"])
def test_bits_are_compared_in_a_partial_restore_too(tmp_path, count):
    thing = OfSome(lambda value: keras.Variable(value + 1), 2)
    path = saved(tmp_path, thing=thing, step=keras.Variable(0))
    assert un.Checkpoint(thing=OfSome(keras.Variable, count)).restore(path, partial=True)
    with pytest.raises(RuntimeError, match=r"thing was restored from .*, and thing/0 has other bits now.*do not train on"):
        un.Checkpoint(thing=OfSome(Stubborn, count)).restore(path, partial=True)


def test_another_optimizer(tmp_path):
    path = saved(tmp_path, optimizer=keras.optimizers.Adam())
    with pytest.raises(ValueError, match="holds the state of Adam as optimizer, and here that is SGD"):
        un.Checkpoint(optimizer=keras.optimizers.SGD()).restore(path)


@pytest.mark.parametrize(
    ("name", "where"), [("jax", "jax.__version__"), ("numpy", "numpy.__version__"), ("unisono", "unisono._src.versions.VERSION")]
)
def test_other_versions_are_warned_about(tmp_path, monkeypatch, name, where):
    path = saved(tmp_path, model=sequential(3))
    monkeypatch.setattr(where, "9.9.9")
    with pytest.warns(UserWarning, match=rf"of another setting, with which results may differ: {name}: .* there, 9.9.9 here\."):
        un.Checkpoint(model=sequential(3)).restore(path)


def test_nothing_is_warned_of_where_the_checkpoint_does_not_fit(tmp_path, monkeypatch):
    path = saved(tmp_path, model=sequential(3))
    monkeypatch.setattr("jax.__version__", "9.9.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="does not fit"):
            un.Checkpoint(model=sequential(4)).restore(path)


def test_a_run_whose_bits_are_not_promised_goes_on_as_one_whose_bits_are(tmp_path):
    """Which is said: the fingerprint of the checkpoint begins with another word, and no bit differs."""

    def made(deterministic):
        with un.OneDeviceStrategy(replicas=2, deterministic=deterministic).scope():
            return sequential(3)

    first, other = made(False), made(True)
    path = saved(tmp_path, model=first)
    with pytest.warns(UserWarning, match="deterministic: False there, True here"):
        un.Checkpoint(model=other).restore(path)
    assert un.fingerprint(first) == f"unpromised-{un.fingerprint(other)}"


def test_another_precision_is_warned_about(tmp_path):
    path = saved(tmp_path, model=sequential(3, dtype="mixed_bfloat16"))
    with pytest.warns(UserWarning, match="precision of a layer of model: mixed_bfloat16 there, float32 here"):
        un.Checkpoint(model=sequential(3)).restore(path)


def test_precisions_are_kept_to_the_bit(tmp_path):
    model = sequential(3, dtype="bfloat16")
    other = sequential(3, dtype="bfloat16")
    assert un.fingerprint(model) != un.fingerprint(other)
    un.Checkpoint(model=other).restore(saved(tmp_path, model=model))
    assert un.fingerprint(model) == un.fingerprint(other)


class Own:
    def __init__(self):
        self.state = {"seen": [1, 2.5, None, "x", float("inf")], "mean": np.arange(3.0)}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_objects_with_a_state_of_their_own(tmp_path):
    path = saved(tmp_path, own=Own())
    own = Own()
    own.state = None
    un.Checkpoint(own=own).restore(path)
    assert own.state["seen"] == [1, 2.5, None, "x", float("inf")]
    assert own.state["mean"].tolist() == [0, 1, 2]
    own.state = {"of": np.array(["text"])}
    with pytest.raises(
        TypeError, match=r"holds an array of dtype <U4 at own/of, which is not kept. Turn it into numbers, or into a list"
    ):
        un.Checkpoint(own=own).save(tmp_path / "ckpt")


# --- paths ------------------------------------------------------------------------------------------------------------


def test_numbers_and_names(tmp_path):
    """A prefix, a directory that exists, one with a slash; what is there is never written over."""
    checkpoint = un.Checkpoint(step=keras.Variable(0))
    assert checkpoint.save(tmp_path / "a") == str(tmp_path / "a_1")
    assert checkpoint.save(tmp_path / "a") == str(tmp_path / "a_2")
    assert un.Checkpoint(step=keras.Variable(0)).save(tmp_path / "a") == str(tmp_path / "a_3")
    assert un.latest_checkpoint(tmp_path / "a") == str(tmp_path / "a_3")
    (tmp_path / "there").mkdir()
    assert checkpoint.save(tmp_path / "there") == str(tmp_path / "there" / "ckpt_1")
    assert checkpoint.save(f"{tmp_path}/new/") == str(tmp_path / "new" / "ckpt_1")
    assert un.latest_checkpoint(tmp_path / "new") == str(tmp_path / "new" / "ckpt_1")


def test_how_many_are_kept(tmp_path):
    checkpoint = un.Checkpoint(step=keras.Variable(0))
    for _ in range(5):
        checkpoint.save(tmp_path / "a", keep=2)
    checkpoint.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_4", "a_5"]


def test_nothing_to_restore(tmp_path):
    assert un.latest_checkpoint(tmp_path) is None
    assert un.latest_checkpoint(tmp_path / "nowhere") is None
    assert un.Checkpoint(step=keras.Variable(0)).restore(None) is False


def test_objects_without_variables_of_their_own(tmp_path):
    """An optimizer that belongs to the model too, a layer of it, an activation."""

    def things(add):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(), "mse")
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
        for variable in model.variables:
            variable.assign(variable + add)
        return {
            "model": model,
            "optimizer": model.optimizer,
            "head": model.layers[-1],
            "act": layers.Activation("relu"),
        }

    saved, fresh = things(0), things(1)
    path = un.Checkpoint(**saved).save(tmp_path / "ckpt")
    assert un.fingerprint(fresh["model"]) != un.fingerprint(saved["model"])
    assert un.Checkpoint(**fresh).restore(path)
    assert un.fingerprint(fresh["model"], fresh["optimizer"]) == un.fingerprint(saved["model"], saved["optimizer"])


@pytest.mark.parametrize("name", ["ckpt", "model.v2"])
def test_copies_with_other_times(tmp_path, name):
    """Numbers say which of ours is the newest."""
    checkpoint = un.Checkpoint(v=keras.Variable(1.0))
    paths = [checkpoint.save(tmp_path / name) for _ in range(3)]
    checkpoint.wait()
    for seconds, path in enumerate(reversed(paths)):
        os.utime(f"{path}/record.json", (seconds, seconds))
    assert un.latest_checkpoint(tmp_path) == str(paths[-1])


def test_the_newest_of_keras_files(tmp_path):
    model = sequential(3)
    for number, name in enumerate(["a.weights.h5", "b.keras", "c.weights.h5"]):
        model.save(tmp_path / name) if name.endswith("keras") else model.save_weights(tmp_path / name)
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    newest = un.latest_checkpoint(tmp_path)
    assert newest == str(tmp_path / "c.weights.h5")
    other = sequential(3)
    other.load_weights(newest)
    assert un.fingerprint(other) == un.fingerprint(model)
    (tmp_path / "c.weights.h5").write_bytes((tmp_path / "c.weights.h5").read_bytes()[:1000])
    damaged = bytearray((tmp_path / "b.keras").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "b.keras").write_bytes(damaged)
    os.utime(tmp_path / "c.weights.h5", (1002, 1002))
    os.utime(tmp_path / "b.keras", (1001, 1001))
    with pytest.warns(UserWarning, match=r"c.weights.h5 is damaged.*b.keras is damaged.*a.weights.h5 is the newest good one"):
        assert un.latest_checkpoint(tmp_path) == str(tmp_path / "a.weights.h5")


@pytest.mark.parametrize("name", ["new.weights.h5", "new.keras"])
def test_a_flipped_bit_anywhere_in_a_file_of_keras(tmp_path, name):
    """h5py and zipfile raise errors of many kinds; the file before it is found all the same."""
    model = sequential(3)
    model.save_weights(tmp_path / "old.weights.h5")
    os.utime(tmp_path / "old.weights.h5", (1, 1))
    path = tmp_path / name
    model.save(path) if name.endswith("keras") else model.save_weights(path)
    whole, skipped = path.read_bytes(), 0
    for position in range(0, len(whole), max(1, len(whole) // 150)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = un.latest_checkpoint(tmp_path)
        assert found == str(path) or (found == str(tmp_path / "old.weights.h5") and f"{name} is damaged" in str(said[-1].message))
        skipped += found != str(path)
    assert skipped > 5


@pytest.mark.slow
def test_a_damaged_checkpoint_names_the_newest_good_one(tmp_path):
    variable = keras.Variable(np.arange(1000.0))
    checkpoint = un.Checkpoint(step=variable)
    paths = [checkpoint.save(tmp_path / "a") for _ in range(3)]
    checkpoint.wait()
    for path in paths[1:]:
        damage(path)
    with pytest.raises(DamagedError, match=r"a_3 is damaged.*a_1 is the newest good one beside it"):
        checkpoint.restore(paths[2])
    with pytest.warns(UserWarning, match=r"a_3 is damaged.*a_2 is damaged.*left in place.*a_1"):
        assert un.latest_checkpoint(tmp_path) == paths[0]
    damage(paths[0])
    with pytest.raises(DamagedError, match="No good checkpoint is left in"):
        un.latest_checkpoint(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def damage(path):
    """Of the file that holds the values, one bit."""
    from pathlib import Path

    largest = max((file for file in Path(path).rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_losses_are_not_variables():
    """The crossentropy of the loops has no state, and is refused by its type."""
    with pytest.raises(TypeError, match="SparseCategoricalCrossentropy"):
        un.Checkpoint(loss=crossentropy())


def classifier_with(activation="relu", rate=0.2, loss="mse", schedule=0.9, own=None):
    body = [keras.layers.Dense(3, activation, name="first"), keras.layers.Dropout(rate)]
    model = keras.Sequential([keras.Input((4,)), *body, keras.layers.Dense(2, activation=own)])
    decaying = keras.optimizers.schedules.ExponentialDecay(0.1, 10, schedule)
    model.compile(keras.optimizers.SGD(decaying), loss)
    model.optimizer.build(model.trainable_variables)
    return model


def own_activation(x):
    return x * 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"activation": "tanh"}, r"activation of layer 0 \(Dense\) of model: relu there, tanh here"),
        ({"rate": 0.5}, r"rate of layer 1 \(Dropout\) of model: 0.2 there, 0.5 here"),
        ({"loss": "mae"}, r"loss of compile\(\) of model: mse there, mae here"),
        ({"loss": keras.losses.Huber(0.5)}, r"loss of compile\(\) of model: mse there, Huber here"),
        ({"schedule": 0.5}, r"decay_rate of config of learning_rate of compile\(\) of model: 0.9 there, 0.5 here"),
        ({"own": own_activation}, r"activation of layer 2 \(Dense\) of model: linear there, own_activation here"),
    ],
)
def test_another_configuration_is_warned_about(tmp_path, other, said):
    path = saved(tmp_path, model=classifier_with())
    with pytest.warns(UserWarning, match=rf"training goes on with that of this program: {said}\. That is another run"):
        un.Checkpoint(model=classifier_with(**other)).restore(path)


@pytest.mark.parametrize("own", [None, own_activation, lambda x: x])
def test_the_same_configuration_says_nothing(tmp_path, own):
    """Also in other objects, whose names Keras counts up, and of functions of the user's."""
    path = saved(tmp_path, model=classifier_with(own=own, loss=keras.losses.Huber(0.5)))
    un.Checkpoint(model=classifier_with(own=own, loss=keras.losses.Huber(0.5))).restore(path)


def test_what_keras_cannot_write_down_is_not_compared(tmp_path):
    class Silent(keras.layers.Layer):
        def __init__(self, thing):
            super().__init__()
            self.thing = thing

        def call(self, x):
            return x

    made = lambda: keras.Sequential([keras.Input((4,)), Silent(object()), keras.layers.Dense(2)])
    path = saved(tmp_path, model=made())
    un.Checkpoint(model=made()).restore(path)
