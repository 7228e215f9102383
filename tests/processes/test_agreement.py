"""What processes tell each other beside their sums; here threads over a store in memory."""

import concurrent.futures
import json
import queue
import signal
import threading

import jax
import keras
import numpy as np
import pytest

import unisono as un
from trainings import on
from unisono._src.engine.observers.process_comparison import check_same_rows, check_same_start, digest_values
from unisono._src.keras.checkpoint.files import DamagedError
from unisono._src.keras.checkpoint.latest import load_chosen_by_first
from unisono._src.keras.checkpoint.storage import find_place
from unisono._src.keras.checkpoint.store import CheckpointStore
from unisono._src.keras.checks import refusals
from unisono._src.keras.data.row_order import draw_seed
from unisono._src.processes import agreement
from unisono._src.processes.agreement import Agreement, AgreementError
from unisono._src.processes.stop_signals import StopRequest, listen_for_signals
from unisono._src.programs.private import distributed


class Client:
    """The key-value store of `jax.distributed`, without a network."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, min(milliseconds / 1000, 20))
            return self._values[key]


@pytest.fixture
def together(monkeypatch):
    """Runs a function of the agreement in each of some processes, and gives what they return or raise."""

    def run(*works):
        client = Client()
        monkeypatch.setattr(distributed, "get_client", lambda: client)

        def guarded(number):
            try:
                return works[number](Agreement(number, len(works)))
            except Exception as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
            return list(pool.map(guarded, range(len(works))))

    return run


def test_each_hears_all(together):
    work = lambda own: (
        own.gather_values("its number", own.number),
        own.of_first("a number", lambda: own.number),
        own.is_true_in_any_process("x", own.number == 1),
    )
    assert together(work, work, work) == [([0, 1, 2], 0, True)] * 3


def test_only_the_first_looks(together):
    looked = queue.SimpleQueue()

    def work(own):
        return own.of_first("the answer", lambda: looked.put(own.number) or 42)

    assert together(work, work) == [42, 42]
    assert (looked.get_nowait(), looked.empty()) == (0, True)


def test_what_must_be_the_same_is_named_with_both_values(together):
    found = together(lambda own: own.check({"R": 8}), lambda own: own.check({"R": 6}))
    for error in found:
        assert isinstance(error, AgreementError)
        assert str(error).startswith(
            "The processes do not agree on R: process 0 has 8, and process 1 has 6. Start the same program"
        )


def test_processes_that_call_different_things_are_told(together):
    """One saves, the other restores: no answer is taken for that to another question."""
    found = together(
        lambda own: own.of_first("the next number of ckpt", lambda: 3),
        lambda own: own.of_first("the newest checkpoint", lambda: None),
    )
    assert found[0] == 3
    assert str(found[1]) == (
        "Process 0 asks all others about the next number of ckpt, and process 1 about the newest checkpoint. Call whatever builds, trains, "
        "saves or restores in every process, in the same order: only process 0 writes."
    )


def test_one_that_is_alone_agrees_with_itself():
    own = Agreement()
    assert own.gather_values("x", 1) == [1]
    assert own.of_first("x", lambda: 2) == 2
    assert [
        own.agree_to_stop(True),
        own.agree_to_stop(False),
        own.is_true_in_any_process("x", True),
        own.is_true_in_any_process("x", False),
    ] == [True, False, True, False]
    own.check({"R": 8})


def test_a_wish_to_stop_is_answered_when_all_have_heard_it():
    own = Agreement(1, 2)
    assert not own.agree_to_stop(True)
    assert own.wishes_to_stop
    own.has_heard_stop_wish = True  # with the sum of the next step
    assert own.agree_to_stop(True)
    own.begin_anew()
    assert not own.agree_to_stop(False)


def test_errors_of_the_first_are_told_to_all(together):
    for error, kind in ((OSError("no disk"), OSError), (DamagedError("is damaged"), AgreementError)):

        def find(error=error):
            raise error

        first, second = together(lambda own: own.of_first("x", find), lambda own: own.of_first("x", find))
        assert first is error
        assert (type(second), str(second)) == (kind, f"Process 0 says: {error}")


def test_who_waits_hears_signals_and_does_not_give_up(monkeypatch):
    """Whether somebody will come is for the watch to say."""

    class Slow(Client):
        asked = 0

        def blocking_key_value_get(self, key, milliseconds):
            self.asked += 1
            if self.asked < 3:
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} timed out after {milliseconds}ms")
            return json.dumps(["R", 8, None])

    slow = Slow()
    monkeypatch.setattr(distributed, "get_client", lambda: slow)
    assert Agreement(1, 2).of_first("R", lambda: 7) == 8
    assert slow.asked == 3


def test_a_seed_of_the_order_is_that_of_the_first(monkeypatch):
    monkeypatch.setattr(agreement.get_agreement(), "of_first", lambda about, find: (about, find()))
    assert draw_seed() == ("the seed of the order of rows", 0)


def test_what_fit_is_called_with_is_compared(monkeypatch):
    compared = {}
    strategy = on(1, 2)
    monkeypatch.setattr(strategy, "check_alike", compared.update)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((12, 2)), np.zeros((12, 1)), batch_size=4, epochs=2, verbose=0)
    assert (compared["epochs= of fit"], compared["batch_size= of fit"], compared["the number of steps of an epoch"]) == (2, 4, 3)


@pytest.fixture
def second(monkeypatch):
    """This process is the second of two."""
    monkeypatch.setattr(agreement, "_current", [Agreement(1, 2)])
    return agreement.get_agreement()


def test_the_second_process_writes_nothing(second, tmp_path):
    store = CheckpointStore(tmp_path / "s")
    assert store.save(3, lambda: ({}, {})) == tmp_path / "s" / "ckpt_3"
    store.wait()
    store.delete()
    assert not (tmp_path / "s").exists()


def test_a_directory_that_is_not_shared(second, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"Process 0 goes on from the checkpoint .*/ckpt_1, which process 1 does not find"
    ):
        load_chosen_by_first(find_place(tmp_path / "ckpt_1"))


def test_the_second_process_leaves_when_all_is_saved_and_without_a_word(second, capsys, monkeypatch):
    met = []
    monkeypatch.setattr(second, "wait_for_processes", met.append)
    with pytest.raises(SystemExit):
        StopRequest().exit_program("somewhere")
    assert met == ["that it was asked to stop, and all is saved"]
    assert capsys.readouterr().err == ""


def test_who_leaves_for_another_ones_signal_may_get_its_own(second, capsys, monkeypatch):
    """As where a cluster sends one to every process, a moment apart."""
    monkeypatch.setattr(second, "wait_for_processes", lambda about: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit), listen_for_signals(["SIGTERM"]) as stop:
            stop.exit_program("somewhere")
        signal.raise_signal(signal.SIGTERM)
        assert capsys.readouterr().err == "SIGTERM: leaving already. Once more ends at once.\n"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_one_trains_alone_is_not_saved_in_silence(second, tmp_path, monkeypatch):
    strategy = on(1, 2)
    with strategy.scope():
        variable = keras.Variable(1.0)
    checkpoint = un.Checkpoint(of=variable)
    monkeypatch.setattr(second, "of_first", lambda about, find: 1)
    with pytest.raises(ValueError, match=r"<OneDeviceStrategy: 2 replicas on 1 cpu device>, which trains in this process alone"):
        checkpoint.save(tmp_path / "ckpt")


def test_keras_own_backup_is_refused(second):
    with pytest.raises(ValueError, match=r"Write un.callbacks.BackupAndRestore, which has the same arguments"):
        refusals.check_backup_callbacks([keras.callbacks.BackupAndRestore("somewhere")])
    refusals.check_backup_callbacks([un.callbacks.BackupAndRestore("somewhere")])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [[0, 3, 7], [0, 3, 9]],
            r"^Batch 3 of pass 0 has other rows in process 1 than in process 0 \(digests 00000009 and 00000007\)",
        ),
        ([[-1, -1, 7], [-1, -1, 7], [-1, -1, 9]], r"^A batch has other rows in process 2 than in process 0"),
        (
            [[1, 0, 7], [0, 5, 7]],
            "^Process 0 is at batch 0 of pass 1, and process 1 at batch 5 of pass 0: their data have other lengths. Every process is given",
        ),
    ],
)
def test_data_that_differ(words, said):
    with pytest.raises(ValueError, match=said):
        check_same_rows(np.array(words))


def test_data_that_are_the_same():
    check_same_rows(np.array([[1, 0, 7]] * 3))
    check_same_start(np.array([[1, 0, 7, 5, 6, 8]] * 3))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [[0, 3, 7, 0, 5, 8], [0, 3, 7, 9, 5, 8]],
            r"^Batch 3 of pass 0 starts from other values of variables in process 1 than in process 0. Since the step before, one of these "
            r"processes has assigned a weight, a learning rate or another variable, .* Let every process assign the same: a callback",
        ),
        (
            [[-1, -1, 7, 0, 5, 8], [-1, -1, 7, 0, 5, 8], [-1, -1, 7, 0, 6, 9]],
            r"^A batch starts from other arguments in process 2 than in process 0. What strategy.run is given beside the batch is the same",
        ),
        (
            [[0, 0, 7, 0, 5, 8], [0, 0, 7, 0, 5, 9]],
            r"^Batch 0 of pass 0 is computed by another program in process 1 than in process 0. A number, an array or a branch in the code of a "
            r"layer, .* `unisono audit` shows the line",
        ),
    ],
)
def test_starts_that_differ(words, said):
    with pytest.raises(ValueError, match=said):
        check_same_start(np.array(words))


def test_the_digest_of_values_has_numbers_dtypes_and_all_bytes():
    one, other = np.arange(4, dtype="int32"), np.array([0, 1, 2, 4], "int32")
    digests = [
        digest_values(values)
        for values in ([], [(0, one)], [(1, one)], [(0, other)], [(0, one.view("float32"))], [(0, one), (1, one)])
    ]
    assert digests[0] == 0
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 2**31 for digest in digests)
