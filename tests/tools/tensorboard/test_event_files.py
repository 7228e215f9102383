"""A resumed training goes on in its files, which are closed and whole however it ended."""

from __future__ import annotations

import json
import os
import signal

import keras
import pytest

from event_files import EPOCHS, VALIDATION, X, Y, regressor, scalars, trained, values, without_speed
from sizes import BATCH, STEPS, slow
from trainings import fitting, on, rows, run
from unisono._src.tools.tensorboard.batch_count import Speed
from unisono._src.tools.tensorboard.callback import TensorBoard
from unisono.callbacks import BackupAndRestore


class BrokenOffError(Exception):
    pass


class BreakOff(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise BrokenOffError
        self.left -= 1

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def newest(directory):
    """{tag: {step: number}}; what was written again behind a checkpoint must say the same again."""
    found = {}
    for step, value in values(directory):
        if value.HasField("simple_value") and not value.tag.endswith("_per_second"):
            assert found.setdefault(value.tag, {}).setdefault(step, value.simple_value) == value.simple_value
    return {tag: dict(sorted(numbers.items())) for tag, numbers in found.items()}


def fit_with_backup(directory, devices, *others, first="board"):
    board, backup = TensorBoard(directory, update_freq=1), BackupAndRestore(directory / "backup", save_freq=2)
    ours = [board, backup] if first == "board" else [backup, board]
    run(regressor(), fitting(X, Y, batch_size=BATCH, epochs=EPOCHS, callbacks=[*others, *ours], **VALIDATION), on(devices))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    fit_with_backup(directory, 3)
    return {of: without_speed(scalars(directory / of)) for of in ("train", "validation")}


@pytest.mark.parametrize("first", ["backup", *slow("board")])
@pytest.mark.parametrize("after", [6, *slow(1, 4, 5, 12)])
def test_a_resumed_training_goes_on_in_its_files(tmp_path, whole, after, first):
    """In whichever order the callbacks stand: all batches and epochs have the numbers and values of an uninterrupted run."""
    with pytest.raises(BrokenOffError):
        fit_with_backup(tmp_path, 3, BreakOff(after), first=first)
    fit_with_backup(tmp_path, 1, first=first)
    assert {of: newest(tmp_path / of) for of in whole} == whole
    assert list(whole["train"]["batch_loss"]) == list(range(1, 16))


def test_an_epoch_that_only_its_validation_is_left_of(tmp_path, whole):
    """Keras' loop is given its last step again, which is not written again."""

    def interrupt(batch, logs):
        if board.get_state()["batches_before_epoch"] == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    def fit(devices, *others):
        backup = BackupAndRestore(tmp_path / "backup", save_freq=False)
        fit = fitting(X, Y, batch_size=BATCH, epochs=EPOCHS, callbacks=[*others, board, backup], **VALIDATION)
        run(regressor(), fit, on(devices))

    board = TensorBoard(tmp_path, update_freq=1)
    with pytest.raises(SystemExit):
        fit(3, keras.callbacks.LambdaCallback(on_test_batch_begin=interrupt))
    fit(1)
    assert {of: without_speed(scalars(tmp_path / of)) for of in whole} == whole


def test_the_state_is_json_and_what_it_has_counted_is_on_disk(tmp_path):
    states, written = [], []

    def note(batch, logs):
        states.append(json.loads(json.dumps(board.get_state())))
        written.append(list(scalars(tmp_path / "train")["batch_loss"]))

    board = TensorBoard(tmp_path, update_freq=1)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    run(regressor(), fitting(X, Y, batch_size=BATCH, epochs=2, callbacks=[board, note]))
    assert states[6] == {"epoch": 1, "batches_before_epoch": 5, "batches_of_epoch": 2}
    assert written[6] == [1, 2, 3, 4, 5, 6, 7]


def test_rows_of_a_resumed_epoch(tmp_path):
    """Only those that were trained on here are counted, though the metric knows the others."""
    speed = Speed(0)
    speed.begin_batch(3, 4)
    for batch in (3, 4, 5, 6, 7):
        speed.end_batch(batch)
    model = regressor()()
    model.evaluate(rows(40, 6), rows(40, 2), verbose=0)  # 40 rows in 8 batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono._src.tools.tensorboard.batch_count.time.perf_counter", lambda: speed._began + 5.0)
        speed.note_rows(model)
    assert speed.rows_per_second == 5.0


def open_files(directory):
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the listing's own
            continue
    return [link for link in links if link.startswith(str(directory))]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="tells open files on Linux")
@pytest.mark.parametrize("strategy", [None, lambda: on(3)], ids=["plain", "ours"])
def test_files_are_closed_and_whole_however_fit_ended(tmp_path, strategy):
    assert trained(tmp_path / "a", strategy).logs
    assert open_files(tmp_path) == []
    if strategy is None:
        return
    board = TensorBoard(tmp_path / "b", update_freq=1)
    with pytest.raises(BrokenOffError):
        run(regressor(), fitting(X, Y, batch_size=BATCH, callbacks=[BreakOff(3), board]), strategy())
    assert open_files(tmp_path) == []
    assert list(scalars(tmp_path / "b" / "train")["batch_loss"]) == [1, 2, 3]


def test_a_plain_fit_after_one_that_was_broken_off(tmp_path):
    """Counts from 1 again."""
    board, model = TensorBoard(tmp_path, update_freq=1), regressor()()
    with pytest.raises(BrokenOffError):
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[BreakOff(3), board])
    model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[board])
    assert [step for step, value in values(tmp_path / "train") if value.tag == "batch_loss"] == [1, 2, 3, 1, 2, 3, 4, 5]
    assert open_files(tmp_path) == []


def test_fits_of_one_second_have_files_of_their_own(tmp_path):
    for _ in range(3):
        trained(tmp_path, epochs=1)
    assert len(list((tmp_path / "train").iterdir())) == 3
