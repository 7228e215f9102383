"""Profiles of batches, in TensorBoard's folder."""

from __future__ import annotations

import gzip
import json

import jax
import keras
import pytest

from event_files import EPOCHS, X, Y, regressor, trained
from sizes import BATCH, STEPS, slow
from trainings import fitting, on, run
from unisono._src.tools.tensorboard.callback import TensorBoard
from unisono._src.tools.tensorboard.profiling import Profile

ON_DEVICES = pytest.mark.parametrize(
    "strategy", [lambda: on(3), *slow(None, lambda: on(1))], ids=["three devices", "plain", "one device"]
)
"""In `make test` without plain Keras, for what it sees as our fit does."""


def traced(directory):
    (path,) = (directory / "train" / "plugins" / "profile").glob("*/*.trace.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    return sorted(name for name in names if name and name.startswith("Profiled batch"))


@ON_DEVICES
@pytest.mark.parametrize(("asked", "batches"), [pytest.param(7, [1], id="one"), *slow(((4, 6), [3, 4, 0]), ("4,6", [3, 4, 0]))])
def test_a_profile(tmp_path, strategy, asked, batches):
    """Named by the numbers in the epoch, as in Keras. Several may come at once, and are named by the first."""
    seen = []

    class One(keras.callbacks.Callback):
        """Has steps come one at a time."""

        def on_train_batch_begin(self, batch, logs=None):
            seen.append(batch)

    trained(tmp_path, strategy, callbacks=[One()], profile_batch=asked)
    assert len(seen) == EPOCHS * STEPS
    assert traced(tmp_path) == sorted(f"Profiled batch {batch}" for batch in batches)


@pytest.mark.slow
def test_a_profile_over_the_end(tmp_path):
    """Is written when fit is over, however that comes."""

    def fail(epoch, logs):
        raise RuntimeError("at the end of the epoch")

    board = TensorBoard(tmp_path / "a", profile_batch=(3, 100))
    failing = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(RuntimeError, match="at the end of the epoch"):
        run(regressor(), fitting(X, Y, batch_size=BATCH, callbacks=[failing, board]), on(3))
    assert traced(tmp_path / "a")
    trained(tmp_path / "b", epochs=1, profile_batch=(3, 100))
    assert traced(tmp_path / "b") == ["Profiled batch 2", "Profiled batch 3", "Profiled batch 4"]


def test_a_profile_is_of_whole_batches(tmp_path, monkeypatch):
    """What was started before them is waited for, and they are."""
    done = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda directory, profiler_options: done.append(f"start in {directory}"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: done.append("stop"))
    profile = Profile((2, 3), str(tmp_path))
    for number in range(1, 6):
        profile.begin_batch(number, number - 1, lambda: done.append("wait"))
        done.append(number)
        profile.end_batch(number, lambda: done.append("wait"))
    assert done == [1, "wait", f"start in {tmp_path}", 2, 3, "wait", "stop", 4, 5]


def test_a_profile_that_nothing_reached(tmp_path):
    with pytest.warns(UserWarning, match=r"profile_batch=16 asks for a profile from batch 16 on, and this fit had 15"):
        trained(tmp_path, lambda: on(3), profile_batch=16)


@pytest.mark.slow
def test_a_profile_beside_another(tmp_path):
    jax.profiler.start_trace(str(tmp_path / "other"))
    try:
        with pytest.warns(
            UserWarning, match=r"profile_batch=2: there is no profile, because RuntimeError was raised: Profile has"
        ):
            logs = trained(tmp_path / "board", profile_batch=2).logs
    finally:
        jax.profiler.stop_trace()
    assert len(logs["loss"]) == EPOCHS
    assert not (tmp_path / "board" / "train" / "plugins").exists()
