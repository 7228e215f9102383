"""Errors that leave a public call show the user's frames, and none of ours."""

from __future__ import annotations

import contextlib
import traceback

import keras
import numpy as np
import pytest

import unisono as un
from unisono._src.hidden_frames import OURS, PUBLIC_CALL, hide_frames

ROWS = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
ONE = un.OneDeviceStrategy(replicas=2)


@pytest.fixture(autouse=True)
def as_users_see_it(monkeypatch):
    monkeypatch.delenv("UNISONO_TRACEBACK")


def frames_of(error):
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def raised_by(call):
    with pytest.raises(Exception, match=".") as raised:
        call()
    return raised.value


def compiled(loss="mse"):
    with ONE.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def fitted(loss="mse", **options):
    return compiled(loss).fit(*ROWS, batch_size=4, verbose=0, **options)


def fitted_elsewhere():
    model = compiled()
    with un.OneDeviceStrategy(replicas=3).scope():
        model.fit(*ROWS)


def shards():
    return next(iter(ONE.distribute_dataset([ROWS[0]])))


def scope_in_a_scope():
    with ONE.scope():
        un.OneDeviceStrategy(replicas=3).scope().__enter__()


def users_own(*_):
    raise KeyError("mine")


class UsersCallback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        users_own()


def broken_rows():
    yield ROWS[0]
    users_own()


@un.function
def stepping(batch):
    return ONE.run(users_own, args=(batch,))


@un.function
def compiled_whole(value):
    return users_own(value)


OF_OURS = {
    "a name": lambda: un.MirrorStrategy,
    "a strategy": lambda: un.MirroredStrategy(devices=0),
    "a misspelt argument": lambda: un.MirroredStrategy(replica=2),
    "a strategy that is refused": lambda: un.ParameterServerStrategy(),
    "fit": fitted_elsewhere,
    "run": lambda: ONE.run(lambda rows: un.get_replica_context().all_reduce("SUM", rows), args=(shards(),)),
    "reduce": lambda: ONE.reduce("SUMM", ONE.run(lambda rows: rows, args=(shards(),))),
    "gather": lambda: ONE.gather(ROWS[0], axis=0),
    "local_results": lambda: ONE.local_results(un.OneDeviceStrategy(replicas=3).run(lambda: keras.ops.ones(()))),
    "a dataset": lambda: ONE.distribute_dataset(3),
    "a checkpoint": lambda: un.Checkpoint(model=3),
    "a record": lambda: un.callbacks.Record(""),
    "a fingerprint": lambda: un.fingerprint(object()),
}

OF_USERS = {
    "a loss in fit": lambda: fitted(users_own),
    "a callback in fit": lambda: fitted(callbacks=[UsersCallback()]),
    "run": lambda: ONE.run(users_own, args=(shards(),)),
    "run in a function": lambda: stepping(shards()),
    "a function": lambda: compiled_whole(1.0),
    "rows": lambda: list(ONE.distribute_dataset(broken_rows())),
    "a dataset for each replica": lambda: ONE.distribute_datasets_from_function(users_own),
}


@pytest.mark.parametrize("call", OF_OURS.values(), ids=OF_OURS)
def test_an_error_of_ours_ends_at_the_users_line(call):
    assert {file for file, _ in frames_of(raised_by(call)) if file.startswith(OURS)} == set()
    assert frames_of(raised_by(call))[-1][0] == __file__


def test_an_error_of_a_scope_ends_in_contextlib():
    assert frames_of(raised_by(scope_in_a_scope))[-2:][0] == (__file__, "scope_in_a_scope")


@pytest.mark.parametrize("call", OF_USERS.values(), ids=OF_USERS)
def test_an_error_of_the_users_keeps_their_frames(call):
    error = raised_by(call)
    frames = frames_of(error)
    assert frames[-1] == (__file__, "users_own")
    assert not [file for file, _ in frames if not file.startswith(__file__) and "_pytest" not in file]
    assert type(error) is KeyError


def test_what_the_error_came_from_stays(monkeypatch):
    def fail():
        with PUBLIC_CALL:
            try:
                users_own()
            except KeyError as error:
                error.add_note("a note")
                raise ValueError("a sentence") from error

    error = raised_by(fail)
    assert (type(error.__cause__), error.__cause__.__notes__, frames_of(error.__cause__)[-1]) == (
        KeyError, ["a note"], (__file__, "users_own"),
    )  # fmt: skip


OURS_, JAX, KERAS, USER = (
    (f"{OURS}x.py", "unisono._src.x"),
    ("/jax.py", "jax._src.x"),
    ("/keras.py", "keras.src.x"),
    ("/user.py", "__main__"),
)


def left_of(places, failing):
    """The files that are left of the frames of functions in these places, of which the last one runs a line that fails."""
    call = None
    for file, module in reversed(places):
        line = failing if call is None else "call()"
        space = {"__name__": module, "call": call}
        exec(compile(f"def run():\n    {line}", file, "exec"), space)
        call = space["run"]
    error = raised_by(call)
    hide_frames(error)
    return [file for file, _ in frames_of(error)[1:]]  # without raised_by


@pytest.mark.parametrize(
    ("places", "failing", "left"),
    [
        ((USER, OURS_, OURS_), "raise ValueError('x')", (USER,)),
        ((USER, OURS_, OURS_), "None.x", (USER, OURS_)),  # a fault of Unisono: the user sees that it is not theirs
        ((USER, OURS_, KERAS, JAX, OURS_), "raise ValueError('x')", (USER,)),
        ((USER, OURS_, KERAS, JAX, USER, USER), "raise ValueError('x')", (USER, USER, USER)),
        ((USER, OURS_, KERAS, USER, JAX), "raise ValueError('x')", (USER, USER, JAX)),
        ((USER, OURS_, JAX, JAX), "raise ValueError('x')", (USER, JAX, JAX)),  # JAX's own error
        ((USER, KERAS, OURS_), "raise ValueError('x')", (USER, KERAS)),  # called by the user
    ],
)
def test_which_frames_are_left(places, failing, left):
    assert left_of(places, failing) == [file for file, _ in left]


def test_all_frames_are_shown_on_request(monkeypatch):
    monkeypatch.setenv("UNISONO_TRACEBACK", "full")
    assert frames_of(raised_by(OF_OURS["a strategy"]))[-1][0].startswith(OURS)


def test_a_call_inside_of_another_one_leaves_the_frames_to_it():
    seen = []

    def look(_):
        with contextlib.suppress(ValueError):
            try:
                un.MirroredStrategy(devices=0)
            except ValueError as error:
                seen.append(frames_of(error)[-1][0])
                raise
        return 0.0

    un.function(eager=True)(look)(1.0)
    assert seen[0].startswith(OURS)
