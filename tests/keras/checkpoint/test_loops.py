"""un.Checkpoint: a loop that was broken off anywhere goes on with the same bits."""

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

import unisono as un
from loops import Loop, normalized
from processes import FULL
from sizes import cases, slow
from sources import Batches
from threads import in_thread
from trainings import on, rows
from unisono._src.keras.data import resume
from unisono._src.keras.data.resume_point import ResumePoint

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


class Reordered(Batches):
    """Batches in an order that changes at the begin and at the end of each pass."""

    def on_epoch_begin(self):
        self.rows = tuple(np.roll(of, 3, axis=0) for of in self.rows)

    def on_epoch_end(self):
        self.rows = tuple(np.roll(of, 5, axis=0) for of in self.rows)


def pipeline(context):
    own = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    size = BATCH // context.num_input_pipelines
    return [(X[own][i : i + size], Y[own][i : i + size]) for i in range(0, len(X[own]), size)]


DATA = {
    "arrays": lambda strategy: strategy.distribute_dataset((X, Y), batch_size=BATCH, shuffle=True),
    "a list": lambda strategy: strategy.distribute_dataset([(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]),
    "PyDataset": lambda strategy: strategy.distribute_dataset(Batches((X, Y), BATCH), shuffle=True),
    "a stream": lambda strategy: strategy.distribute_dataset(Stream(3)),
    "pipelines": lambda strategy: strategy.distribute_datasets_from_function(pipeline),
}
LEFT = {**DATA, "a PyDataset that changes": lambda strategy: strategy.distribute_dataset(Reordered((X, Y), BATCH))}
UNSEEDED = {"unseeded": lambda strategy: strategy.distribute_dataset(Stream())}


class Training:
    """A loop as a user would write it, with an epoch counter of its own; it may leave each pass after some batches."""

    def __init__(self, strategy, data="arrays", leaves_after=None):
        self.loop = Loop(strategy, normalized)
        self.data = (LEFT | UNSEEDED)[data](strategy)
        self.epoch = keras.Variable(0, dtype="int32", trainable=False)
        self.done, self.leaves_after = 0, leaves_after
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

    def run(self, directory=None, save_at=None, in_loop=True):
        """To the end, or until a step whose number is given, which is saved."""
        while int(self.epoch) < EPOCHS:
            for number, batch in enumerate(self.data, 1):
                self.loop.one(batch)
                self.done += 1
                if self.done == save_at and in_loop:
                    return self.checkpoint.save(directory / "ckpt")
                if number == self.leaves_after:
                    break
            self.epoch.assign(self.epoch + 1)
            if self.done == save_at:
                return self.checkpoint.save(directory / "ckpt")
        return self.bits()

    def bits(self):
        return un.fingerprint(self.loop.model, self.loop.optimizer, self.loop.accuracy)


@pytest.fixture(scope="module")
def whole():
    known = {}
    return lambda data: known.setdefault(data, None) or known.__setitem__(data, Training(on(1, 4), data).run()) or known[data]


RESUMED = cases((1, 4), (2, 4))
"""Where a training goes on if the placement is not the subject."""


@pytest.mark.soak
@pytest.mark.parametrize("data", ["arrays", *slow(*(name for name in DATA if name != "arrays"))])
@settings(max_examples=100 if FULL else 2, phases=list(Phase) if FULL else cases([Phase.explicit], list(Phase)))
@cases(lambda test: test, example(at=STEPS, then=(2, 4)))
@example(at=2 * STEPS + 1, then=cases((2, 4), (4, 4)))
@given(at=st.integers(1, EPOCHS * STEPS), then=st.sampled_from([(1, 4), (2, 4), (3, 4), (4, 4)]))
def test_every_point_over_every_source(tmp_path_factory, whole, data, at, then):
    directory = tmp_path_factory.mktemp("ckpts")
    path = Training(on(1, 4), data).run(directory, save_at=at)
    assert un.latest_checkpoint(directory) == path
    assert Training(on(*then), data).restored(path).run() == whole(data)


def test_what_is_trained_after_save_is_not_in_it(tmp_path, whole):
    """Steps go on while the checkpoint is being written, and use the memory of the state again."""
    training = Training(on(1, 4))
    path = training.run(tmp_path, save_at=3)
    training.run()
    training.checkpoint.wait()
    assert Training(on(1, 4)).restored(path).run() == whole("arrays")


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


# --- passes that are left ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The loop over the dataset was left")
@pytest.mark.parametrize("data", ["a stream", *slow(*(name for name in LEFT if name != "a stream"))])
@pytest.mark.parametrize(("at", "in_loop"), [(4, False), *slow((2, False), (3, True), (5, True))])
def test_passes_that_are_left(tmp_path, data, at, in_loop):
    """The next loop begins a pass, in the process that goes on and in the process that resumes."""
    whole = Training(on(1, 4), data, 2).run()
    path = Training(on(1, 4), data, 2).run(tmp_path, at, in_loop)
    resumed = Training(on(*RESUMED), data, 2).restored(path)
    if in_loop:  # the resumed loop counts its batches from the middle of the pass
        for batch in resumed.data:
            resumed.loop.one(batch)
            break
        resumed.epoch.assign(resumed.epoch + 1)
    assert resumed.run() == whole


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
    with pytest.warns(
        UserWarning, match=r"left after 2 of 4 batches of pass 0, and then saved: what resumes.* begins the next pass"
    ):
        Training(on(1, 4), leaves_after=2).run(tmp_path, save_at=2, in_loop=False)


@pytest.mark.filterwarnings("error:The loop over the dataset was left")
def test_a_loop_that_stops_at_the_last_batch_of_a_pass_has_left_nothing(tmp_path, whole):
    path = Training(on(1, 4), leaves_after=STEPS).run(tmp_path, save_at=STEPS, in_loop=False)
    assert Training(on(*RESUMED), leaves_after=STEPS).restored(path).run() == whole("arrays")


@pytest.mark.filterwarnings("error:The loop over the dataset was left")
def test_an_interruption_leaves_no_pass(tmp_path):
    """Saved where an error is handled, the loop is in the middle of the pass: what resumes goes on there."""
    training = Training(on(1, 4))
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


# --- other data -------------------------------------------------------------------------------------------------------


def test_a_stream_with_other_rows_is_stopped(tmp_path):
    """An unseeded shuffle."""
    path = Training(on(1, 4), "unseeded").run(tmp_path, save_at=6)
    resumed = Training(on(1, 4), "unseeded")
    resumed.checkpoint.restore(path)
    with pytest.raises(
        ValueError, match=r"up to batch 2 of pass 1 have other rows now, or come in another order.*seed its shuffling"
    ):
        resumed.run()


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
    checkpoint = un.Checkpoint(data=data)
    iterator = iter(data)
    next(iterator)
    un.Checkpoint(data=other).restore(checkpoint.save(tmp_path / "ckpt"))
    with pytest.raises(
        ValueError, match=f"The data are not those of the checkpoint: {said}. Give fit or the dataset the same rows"
    ):
        next(iter(other))


def test_reading_forward_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resume, "SAY_AFTER", 0.0)
    path = Training(on(1, 4), "a stream").run(tmp_path, save_at=6)
    resumed = Training(on(1, 4), "a stream")
    resumed.checkpoint.restore(path)
    next(iter(resumed.data))
    assert (
        "Read forward to batch 2 of pass 1: 6 batches in 0 s. Arrays, lists of batches, a keras.utils.PyDataset and a grain.MapDataset have "
        "an index, and begin there at once.\n" in capsys.readouterr().err
    )


# --- signals and threads ----------------------------------------------------------------------------------------------


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


def test_a_signal_needs_the_data(tmp_path):
    checkpoint = un.Checkpoint(epoch=keras.Variable(0))
    with pytest.raises(ValueError, match=r"Write Checkpoint\(\.\.\., data=dataset\)"):
        checkpoint.saving_on_signal(tmp_path / "ckpt").__enter__()


def test_saving_in_another_thread_is_warned_about(tmp_path):
    """Which may be in the middle of a step."""
    data = on(1, 4).distribute_dataset((X, Y), batch_size=BATCH)
    checkpoint = un.Checkpoint(data=data)
    iterator = iter(data)
    next(iterator)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "save was called")
        checkpoint.save(tmp_path / "ckpt")

    def elsewhere():
        with pytest.warns(UserWarning, match=r"save was called in the thread 'saver'.*Save in the loop, between two steps"):
            checkpoint.save(tmp_path / "ckpt")
        return True

    assert in_thread("saver", elsewhere)
