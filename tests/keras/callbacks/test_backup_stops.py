"""BackupAndRestore where something is in the way: signals, a full disk, damage, and arguments that mean nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading

import keras
import pytest
from keras import layers
from orbax.checkpoint.experimental.v1.training import save_decision_policies as policies

import unisono as un
from broken_off import THEN, Backup, Stateless, X, Y, fit, interrupt, model_on, resume
from sizes import slow
from small_disk import fill, small_disk
from storages import failing_after, failing_storage, list_names
from trainings import on
from unisono._src.keras.checkpoint.background import wait_for_writers
from unisono._src.keras.checkpoint.files import ARRAYS, load_checkpoint
from unisono._src.keras.checkpoint.storage import StorageError, find_place
from unisono._src.keras.checkpoint.store import CheckpointStore
from unisono._src.processes import stop_signals


@pytest.fixture(scope="module")
def whole():
    return fit(model_on(on(1, 4)))


class Signalling(keras.callbacks.Callback):
    """Sends a signal to this process at a step, or in a validation."""

    def __init__(self, name, hook, at):
        super().__init__()
        self.name, self.at = name, at
        setattr(self, hook, self.send)

    def send(self, batch, logs=None):
        self.at -= 1
        if self.at == 0:
            os.kill(os.getpid(), signal.Signals[self.name])


@pytest.mark.parametrize(
    ("name", "hook", "at"),
    [
        ("SIGTERM", "on_train_batch_end", 7),
        *slow(
            ("SIGINT", "on_train_batch_end", 5),  # the last step of an epoch
            ("SIGUSR1", "on_test_batch_end", 2),
            ("SIGTERM", "on_epoch_end", 1),
        ),
    ],
)
def test_a_signal_finishes_the_step_and_saves(tmp_path, whole, name, hook, at, capsys):
    before = signal.getsignal(signal.SIGTERM)
    backup = lambda: Backup(tmp_path / "b", save_freq=False, signals=("SIGTERM", "SIGINT", "SIGUSR1"))
    with pytest.raises(SystemExit) as left:
        fit(model_on(on(1, 4)), callbacks=[Signalling(name, hook, at), backup()])
    assert left.value.code == stop_signals.INTERRUPTED == 75
    assert f"{name}: saving after this step" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert resume(tmp_path / "b", strategy=on(*THEN), backup=backup()) == whole


@pytest.mark.parametrize("freq", [4, *slow("epoch", False)])
def test_a_signal_behind_the_last_step(tmp_path, freq):
    """The program is left as ever, and started again it has nothing left to train."""
    backup, model = (lambda: Backup(tmp_path / "b", save_freq=freq)), model_on(on(1, 4))
    with pytest.raises(SystemExit) as left:
        fit(model, epochs=1, callbacks=[Signalling("SIGTERM", "on_train_end", 1), backup()])
    assert left.value.code == 75
    resumed = resume(tmp_path / "b", strategy=on(*THEN), backup=backup(), epochs=1)
    assert resumed.logs == {}
    assert un.fingerprint(resumed.model) == un.fingerprint(model)
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_a_signal_in_the_middle_of_an_accumulation(tmp_path):
    """A step is accumulated whole before it is saved, and goes on with the replicas divided in another way."""
    backup = lambda: Backup(tmp_path / "b", save_freq=False)
    reference = fit(model_on(un.OneDeviceStrategy(accumulate=6)), epochs=2)
    stop = Signalling("SIGTERM", "on_train_batch_begin", 7)
    with pytest.raises(SystemExit):
        fit(model_on(un.OneDeviceStrategy(accumulate=6)), epochs=2, callbacks=[stop, backup()])
    newest = CheckpointStore(tmp_path / "b").load_newest().record
    assert (newest["states"]["training"]["steps"], newest["replicas"]) == (7, 6)
    other = un.MirroredStrategy(devices=3, accumulate=2)
    assert resume(tmp_path / "b", strategy=other, backup=backup(), epochs=2) == reference


def test_a_signal_when_the_checkpoints_are_being_deleted(tmp_path, monkeypatch):
    """Nothing is left to be saved: it does what it does without the callback."""
    monkeypatch.setattr(CheckpointStore, "delete", lambda store: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(model_on(on(1, 4)), epochs=1, callbacks=[Backup(tmp_path / "b")])


def test_a_second_signal_while_it_is_saved_ends_at_once(tmp_path, monkeypatch):
    """The save that was begun has not ended then."""
    written = threading.Event()

    def write(store, number, make_content):
        os.kill(os.getpid(), signal.SIGINT)
        written.wait(60)

    monkeypatch.setattr(CheckpointStore, "_write", write)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(
                model_on(on(1, 4)),
                callbacks=[Signalling("SIGINT", "on_train_batch_end", 2), Backup(tmp_path / "b", save_freq=False)],
            )
        assert not written.is_set()
    finally:
        written.set()
        wait_for_writers()


class Impatient(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)  # two that os.kill sends may come as one


def test_a_second_signal_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(model_on(on(1, 4)), callbacks=[Impatient(), Backup(tmp_path / "b")])


# --- the disk ---------------------------------------------------------------------------------------------------------


class Troubling(Stateless):
    """Lets checkpoints fail in these epochs, and no others."""

    def __init__(self, begin, end, epochs=(1, 2)):
        super().__init__()
        self.begin, self.end, self.epochs = begin, end, epochs

    def on_epoch_begin(self, epoch, logs=None):
        wait_for_writers()
        if epoch in self.epochs:
            self.begin()
        elif epoch - 1 in self.epochs:
            self.end()


@pytest.fixture(params=["disk", "storage"])
def trouble(request, tmp_path):
    """A directory, what makes the storage fail, what mends it, and what is said of it."""
    if request.param == "disk":
        with small_disk(tmp_path / "disk", 1024) as disk:
            yield find_place(disk / "b"), lambda: fill(disk), lambda: (disk / "ballast").unlink(), "the disk is full"
    else:
        with failing_storage() as directory, contextlib.ExitStack() as stack:
            begin = lambda: stack.enter_context(failing_after(0))
            yield directory, begin, stack.close, r"the storage failed \(ConnectionError: the connection is lost\)"


def test_a_training_goes_on_though_the_storage_fails(trouble, whole):
    """A full disk, or a lost connection. It says so for each checkpoint, keeps the last one, and writes again when it can."""
    directory, begin, end, why = trouble
    callbacks = [Troubling(begin, end), Backup(directory, delete_checkpoint=False, keep=9)]
    with pytest.warns(UserWarning, match=why) as said:
        fit(model_on(on(1, 4)), callbacks=callbacks, epochs=4)
    failed = [str(one.message) for one in said if "not written" in str(one.message)]
    assert len(failed) == 2
    for number, message in zip((2, 3), failed, strict=True):
        assert re.fullmatch(
            rf"The checkpoint {directory}/ckpt_{number} was not written: {why}: \d+ bytes wanted(, \d+ free)?\. Those before it are as they "
            rf"were: {directory}/ckpt_1\. The training goes on, and the next save tries again\.",
            message,
        )
    assert list_names(directory) == ["ckpt_1", "ckpt_4"]
    (directory / "ckpt_4").remove_folder()
    assert resume(directory, strategy=on(*THEN), callbacks=[Troubling(begin, end, ())]) == whole


@pytest.mark.parametrize("saved", slow(True, False))
def test_a_signal_while_the_storage_fails(trouble, saved, capsys):
    """The program goes on from the last checkpoint. Without one there is nothing to go on from, and the error says so."""
    directory, begin, end, why = trouble
    callbacks = [Signalling("SIGTERM", "on_train_batch_end", 7), Backup(directory)]
    if saved:
        with (
            pytest.warns(UserWarning, match=rf"{why}.*/ckpt_1\. The last of these is what a training goes on from"),
            pytest.raises(SystemExit),
        ):
            fit(model_on(on(1, 4)), callbacks=[Troubling(begin, end), *callbacks])
        assert f"saved {directory}/ckpt_1; leaving with exit code 75" in capsys.readouterr().err
    else:
        with (
            pytest.warns(UserWarning, match="there is none. The training goes on"),
            pytest.raises(StorageError, match="there is none"),
        ):
            fit(model_on(on(1, 4)), callbacks=[Troubling(begin, end, (0, 1)), *callbacks])


def test_a_damaged_checkpoint_is_left_and_the_one_before_it_used(tmp_path, whole):
    interrupt(tmp_path / "b", freq=3)
    newest = CheckpointStore(tmp_path / "b").load_newest().path
    (newest / ARRAYS).write_bytes((newest / ARRAYS).read_bytes()[:-20])
    with pytest.warns(UserWarning, match=rf"{newest.name} is damaged.*left in place.*is the newest good one"):
        resumed = resume(tmp_path / "b", backup=Backup(tmp_path / "b", delete_checkpoint=False, keep=10))
    assert resumed == whole
    assert newest.exists()


def test_what_is_kept(tmp_path):
    """Two by default; all of a finished training with delete_checkpoint=False."""
    fit(model_on(on(1, 4)), callbacks=[Backup(tmp_path / "b", save_freq=4, delete_checkpoint=False)])
    store = CheckpointStore(tmp_path / "b")
    assert len(store.numbers) == 2
    assert store.load_newest().record["replicas"] == 4


# --- arguments --------------------------------------------------------------------------------------------------------


def test_a_policy_of_orbax_decides(tmp_path):
    """For certain steps, and for seconds: none here, so that each step is saved that finds the last one written."""
    saved = {}
    for name, policy in {
        "steps": policies.SpecificStepsPolicy({3, 7}),
        "seconds": policies.ContinuousCheckpointingPolicy(minimum_interval_secs=0),
    }.items():
        interrupt(tmp_path / name, after=9, freq=policy)
        store = CheckpointStore(tmp_path / name)
        saved[name] = [load_checkpoint(store.path(number)).record["states"]["training"]["steps"] for number in store.numbers]
    assert saved["steps"] == [3, 7]
    assert saved["seconds"]


@pytest.mark.parametrize("wrong", ["batch", 0, -3, 2.5, True])
def test_frequencies(tmp_path, wrong):
    with pytest.raises(ValueError, match="save_freq is 'epoch', a number of steps, False for signals alone, or a policy"):
        Backup(tmp_path, save_freq=wrong)


def test_what_cannot_be_backed_up(tmp_path):
    with pytest.raises(ValueError, match="empty backup_dir"):
        Backup("")
    model = keras.Sequential([layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(
        ValueError, match=r"was made outside of every scope.*un.OneDeviceStrategy\(\) trains exactly what Keras trains"
    ):
        model.fit(X, Y, verbose=0, callbacks=[Backup(tmp_path / "b")])
