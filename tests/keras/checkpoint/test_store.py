"""Numbered checkpoints: which is the newest good one, which are kept, and what is said where the disk does not take one."""

from __future__ import annotations

import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint.experimental.v1.training import preservation_policies as policies

from processes import environment, python
from sizes import cases
from small_disk import fill, small_disk
from storages import NAMES, list_names, remove, storage, write
from unisono._src.keras.checkpoint import files, store
from unisono._src.keras.checkpoint.background import BackgroundWriter
from unisono._src.keras.checkpoint.checkpoint import Checkpoint
from unisono._src.keras.checkpoint.encoding import MARK, decode_state, encode_state
from unisono._src.keras.checkpoint.files import ARRAYS, RECORD, DamagedError, load_checkpoint
from unisono._src.keras.checkpoint.latest import latest_checkpoint
from unisono._src.keras.checkpoint.local_storage import UNFINISHED, LocalPlace
from unisono._src.keras.checkpoint.run_checkpoint import copy_on_device
from unisono._src.keras.checkpoint.storage import StorageError
from unisono._src.keras.checkpoint.store import CheckpointStore

NUMBERS = {"of": np.random.default_rng(0).random((300, 40)).astype("float32")}


def save(store, *numbers, arrays=NUMBERS, **record):
    for number in numbers:
        store.save(number, lambda: (arrays, record))
        store.wait()


def flip(path):
    """A bit of the file that holds the values."""
    with (path / ARRAYS).open_file() as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 1
    write(path / ARRAYS, bytes(content))


@pytest.fixture(params=NAMES)
def directory(request, tmp_path):
    """An empty one, of each storage."""
    with storage(request.param, tmp_path) as place:
        yield place


# --- the newest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [(ARRAYS,), (RECORD,), (ARRAYS, RECORD)])
def test_a_checkpoint_of_which_something_is_gone(tmp_path, gone):
    """It is named and left in place, and the next save takes another number."""
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    for name in gone:
        remove(store.path(2) / name)
    (tmp_path / "fold_1").mkdir()  # of somebody else
    store = CheckpointStore(tmp_path)
    with pytest.warns(UserWarning, match=r"ckpt_2 is damaged: .*left in place; .*ckpt_1 is the newest good one"):
        assert store.load_newest().path == store.path(1)
    with pytest.warns(UserWarning, match=r"ckpt_2 is damaged: .*left in place; .*ckpt_1 is the newest good one") as said:
        assert latest_checkpoint(tmp_path) == latest_checkpoint(tmp_path / "ckpt") == str(store.path(1))
    assert "fold_1" not in str(said[0].message)
    save(store, store.choose_next_number())
    assert list_names(tmp_path) == ["ckpt_1", "ckpt_2", "ckpt_3", "fold_1"]
    assert latest_checkpoint(tmp_path) == str(store.path(3))


@pytest.mark.parametrize("gone", [(2,), (2, 1)])
def test_a_checkpoint_that_another_process_removes_meanwhile_is_not_damaged(tmp_path, monkeypatch, gone):
    """The newest of those that stay is found, also where new ones have taken the place of all of them."""
    written = CheckpointStore(tmp_path / "written")
    save(written, 1, 2, 3)
    directory = tmp_path / "polled"
    directory.mkdir()
    for number in (1, 2):
        written.path(number).rename(directory / f"ckpt_{number}")

    def remove_and_load(path):
        if int(path.name[-1]) in gone:
            shutil.rmtree(path)
            if len(gone) == 2 and not any(directory.iterdir()):
                written.path(3).rename(directory / "ckpt_3")
        return load_checkpoint(path)

    monkeypatch.setattr(files, "load_checkpoint", remove_and_load)
    assert latest_checkpoint(directory) == str(directory / ("ckpt_1" if len(gone) == 1 else "ckpt_3"))


def test_a_training_goes_on_where_another_process_removes_the_newest_checkpoint_meanwhile(tmp_path, monkeypatch):
    """It does not begin anew, though all checkpoints that it had found are gone."""
    written = CheckpointStore(tmp_path)
    save(written, 1)

    def replace_and_load(path):
        if path == written.path(1):
            path.rename(written.path(2))
        return load_checkpoint(path)

    monkeypatch.setattr(store, "load_checkpoint", replace_and_load)
    assert CheckpointStore(tmp_path).load_newest().path == written.path(2)


def test_a_link_to_nothing_is_a_damaged_checkpoint(tmp_path):
    (tmp_path / "model.keras").symlink_to(tmp_path / "nothing")
    with pytest.raises(DamagedError, match="No good checkpoint is left in"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["ckpt", "model.v2"])
def test_copies_with_other_times(tmp_path, name):
    """Numbers say which of ours is the newest."""
    store = CheckpointStore(tmp_path, name)
    save(store, 1, 2, 3)
    for number in (1, 2, 3):
        os.utime(store.path(number) / RECORD, (9 - number, 9 - number))
    assert latest_checkpoint(tmp_path) == str(store.path(3))


@pytest.mark.parametrize("name", ["new.weights.h5", "new.keras"])
def test_the_newest_good_file_of_keras(tmp_path, name):
    """With a flipped bit anywhere, of which h5py and zipfile raise errors of many kinds, the file before it is found."""
    model, path = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]), tmp_path / name
    model.save_weights(tmp_path / "old.weights.h5")
    os.utime(tmp_path / "old.weights.h5", (1, 1))
    model.save(path) if name.endswith("keras") else model.save_weights(path)
    assert latest_checkpoint(tmp_path) == str(path)
    whole, skipped = path.read_bytes(), 0
    for position in range(0, len(whole), max(1, len(whole) // 150)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = latest_checkpoint(tmp_path)
        assert found == str(path) or (found == str(tmp_path / "old.weights.h5") and f"{name} is damaged" in str(said[-1].message))
        skipped += found != str(path)
    assert skipped > 5


def test_a_damaged_checkpoint_names_the_newest_good_one(directory):
    checkpoint = Checkpoint(of=keras.Variable(np.arange(1000.0)))
    for _ in range(3):
        newest = checkpoint.save(directory / "ckpt")
    checkpoint.wait()
    for number in (2, 3):
        flip(directory / f"ckpt_{number}")
    with pytest.raises(DamagedError, match=r"ckpt_3 is damaged: of has other bits.*ckpt_1 is the newest good one beside it"):
        checkpoint.restore(newest)
    with pytest.warns(UserWarning, match=r"ckpt_3 is damaged.*ckpt_2 is damaged.*left in place.*ckpt_1"):
        assert latest_checkpoint(directory) == str(directory / "ckpt_1")
    flip(directory / "ckpt_1")
    for look in (lambda: latest_checkpoint(directory), CheckpointStore(directory).load_newest):
        with pytest.raises(DamagedError, match=f"No good checkpoint is left in {directory}. Move it away to begin anew"):
            look()
    assert len(list_names(directory)) == 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            "a/ckpt_4",
            r"The checkpoint {0}/a/ckpt_4 is not there. In {0}/a there are ckpt_5, ckpt_3, .* and 2 more. Write restore\(.*{0}/a'\)\)",
        ),
        ("a/ckpt", r"is not there. In {0}/a there are ckpt_5, "),
        ("b/ckpt_4", r"is not there. There is no folder {0}/b. In {0} there are a, empty, model.keras\."),
        ("empty/ckpt_4", r"is not there. In {0}/empty there is of somebody\."),
        ("a", r"{0}/a is a folder of checkpoints. Write restore\(un.latest_checkpoint\('{0}/a'\)\) for the newest in it"),
        ("model.keras", r"model.keras is a file, and un.Checkpoint writes folders. Write .* keras.saving.load_model"),
    ],
    ids=["number", "prefix", "folder", "another's", "directory", "file"],
)
def test_a_checkpoint_that_is_not_there(directory, asked, said):
    """It is not called damaged; what is there is named."""
    for number in (1, 2, 3, 10, 11, 12, 5):
        write(directory / "a" / f"ckpt_{number}" / RECORD, b"")
    write(directory / "model.keras", b"")
    write(directory / "empty" / "of somebody", b"")
    with pytest.raises((FileNotFoundError, ValueError), match=said.format(directory)):
        Checkpoint(of=keras.Variable(1.0)).restore(directory / asked)


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (None, [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]),
        (2, [[1], [1, 2], [2, 3], [3, 4], [4, 5]]),
        (policies.EveryNSteps(2), [[1], [2], [2, 3], [2, 4], [2, 4, 5]]),
    ],
    ids=["all", "two", "a policy"],
)
def test_what_is_kept(directory, keep, left):
    """The newest is in any case."""
    store, seen = CheckpointStore(directory, keep=keep), []
    for number in range(1, 6):
        save(store, number)
        seen.append(store.numbers)
    assert seen == left


def test_damaged_checkpoints_are_not_among_those_that_are_kept(directory):
    """Two good ones are, also where another process had written them, and the damaged ones are left in place."""
    save(CheckpointStore(directory), 1, 2, 3, 4, 5)
    flip(directory / "ckpt_3")
    write(directory / "ckpt_5" / RECORD, b"{}")
    store = CheckpointStore(directory, keep=2)
    save(store, store.choose_next_number())
    assert list_names(directory) == ["ckpt_3", "ckpt_4", "ckpt_5", "ckpt_6"]
    store.delete()
    assert list_names(directory) == []


def test_an_unfinished_write_is_no_checkpoint(directory):
    """As kill -9 leaves it. The next save clears it away, and leaves that of another name, which may be being written."""
    store = CheckpointStore(directory)
    save(store, 1)
    end = UNFINISHED if isinstance(directory, LocalPlace) else ""
    for name in ("ckpt_2", "other_2"):
        write(directory / f"{name}{end}" / ARRAYS, b"half")
    assert store.numbers == [1]
    assert CheckpointStore(directory).load_newest().path == store.path(1)
    assert latest_checkpoint(directory) == str(store.path(1))
    assert store.choose_next_number() == 3
    save(store, 3)
    assert list_names(directory) == ["ckpt_1", "ckpt_3", f"other_2{end}"]


def test_one_that_cannot_be_removed_does_not_take_the_new_one_with_it(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def rmtree(path):
        raise PermissionError(f"not {path}")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.warns(
        UserWarning, match=r"ckpt_2 was written, and older ones .* could not be removed: PermissionError: not .* tries again"
    ):
        save(store, 2)
    monkeypatch.undo()
    assert store.load_newest().path == store.path(2)
    save(store, 3)
    assert list_names(tmp_path) == ["ckpt_3"]


# --- what cannot be written -------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(OSError, match=r"below/ckpt_1 was not written: .*Those before it are as they were: there is none"):
        save(CheckpointStore(tmp_path / "file" / "below"), 1)


def test_a_failure_is_raised_by_the_next_save(tmp_path):
    store, failing = CheckpointStore(tmp_path), True

    def content():
        if failing:
            raise RuntimeError("the device is gone")
        return NUMBERS, {}

    store.save(1, content)
    store.join()
    failing = False
    with pytest.raises(RuntimeError, match="the device is gone"):
        store.save(2, content)
    store.wait()
    assert store.numbers == [2]


def test_a_disk_that_is_really_full(tmp_path):
    """The error of a save is raised by `wait`. With room again the next save works; nothing unfinished is left."""
    with small_disk(tmp_path / "disk") as disk:
        store = CheckpointStore(disk)
        save(store, 1)
        ballast = fill(disk)
        with pytest.raises(
            StorageError, match=rf"ckpt_2 was not written: the disk is full: 48000 bytes wanted, 0 free. .*: {disk}/ckpt_1\."
        ):
            save(store, 2)
        assert list_names(disk) == ["ballast", "ckpt_1"]
        ballast.unlink()
        ballast.write_bytes(bytes(400_000))  # room for the folder, and not for the arrays
        with pytest.raises(StorageError, match=r"the disk is full: 400000 bytes wanted, [1-9]\d+ free"):
            save(store, 3, arrays={"large": np.random.default_rng(0).random(50_000)})
        assert list_names(disk) == ["ballast", "ckpt_1"]
        ballast.unlink()
        save(store, 4)
        assert store.load_newest().path == store.path(4)


# --- in the background ------------------------------------------------------------------------------------------------


def test_what_is_saved_is_a_copy():
    """The next step may use the memory of the state again."""
    state = [jnp.arange(1000.0), jnp.float32(3)]
    copies = copy_on_device(state)
    for original, copy in zip(state, copies, strict=True):
        assert copy.unsafe_buffer_pointer() != original.unsafe_buffer_pointer()
        assert copy.tolist() == original.tolist()


def test_writing_does_not_keep_anyone_waiting():
    writer, go = BackgroundWriter(), threading.Event()
    writer.start(go.wait)
    go.set()
    writer.wait()


WRITES = """
import sys
import keras, numpy as np
import unisono as un
checkpoint = un.Checkpoint(of=keras.Variable(np.zeros(100_000, "float32")))
for _ in range(int(sys.argv[2])):
    checkpoint.save(sys.argv[1] + "/ckpt", keep=1)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_looks_for_the_newest_checkpoint_while_another_one_trains(tmp_path):
    """And the last is there when the process has ended."""
    found = []
    with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path), "200"], env=environment()) as process:
        while process.poll() is None:
            found.append(latest_checkpoint(tmp_path))
    assert process.returncode == 0
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt_200")
    numbers = [int(path.rpartition("_")[2]) for path in found if path]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 3


@pytest.mark.slow
def test_a_process_that_ends_says_what_was_not_written(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    done = python("-c", WRITES, str(tmp_path / "file"), "1")
    assert "A checkpoint was not written:" in done.stderr
    assert f"The checkpoint {tmp_path}/file/ckpt_1 was not written" in done.stderr


# --- states -----------------------------------------------------------------------------------------------------------

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["a/b", "a", "", MARK])
KEYS = PLAIN.filter(lambda key: key == key)
"""A dict may have several keys that are not a number, which only their identity tells apart."""
STATES = st.recursive(
    PLAIN | st.sampled_from([np.arange(3.0), np.float32(0.1), np.array(7), np.array(True)]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
)


@settings(max_examples=cases(20, 50))
@given(state=STATES)
def test_states_come_back(state):
    """With their types, through JSON: tuples, keys that are numbers, texts with a slash."""
    plain, arrays = encode_state(state)
    back = decode_state(json.loads(json.dumps(plain)), arrays)
    assert repr(back) == repr(state)


def test_states_come_back_from_disk(tmp_path):
    state = {
        "a/b": np.arange(2),
        "a": {"b": np.arange(3), 1: (np.float16(0.1), [True]), "1": -0.0},
        None: {MARK: (2**70, np.zeros(0))},
    }
    plain, arrays = encode_state({"of": state})
    save(CheckpointStore(tmp_path), 1, arrays=arrays, states=plain)
    loaded = CheckpointStore(tmp_path).load_newest()
    assert repr(decode_state(loaded.record["states"], loaded.arrays)) == repr({"of": state})


class Derived(dict):
    pass


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "of type object at own/of"),
        ({1, 2}, "of type set at own/of"),
        (Derived(a=1), "of type Derived at own/of"),
        (Pair(1, 2), "of type Pair at own/of"),
        (signal.SIGTERM, "of type Signals at own/of"),
        (np.ma.masked_array([1, 2], [0, 1]), "of type MaskedArray at own/of"),
        (np.array(["a", "b"]), "an array of dtype <U1 at own/of"),
        (np.array([None]), "an array of dtype object at own/of"),
        (np.arange(2, dtype=">i4"), "an array of dtype >i4 at own/of"),
        (np.datetime64("2026-01-01"), r"an array of dtype datetime64\[D\] at own/of"),
        (np.longdouble(1), "an array of dtype float128 at own/of"),
        (jax.random.key(0), "an array of dtype key<fry> at own/of"),
        ({(1, 2): 3}, r"the key \(1, 2\) of type tuple in the dict at own/of"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_states_that_would_come_back_as_something_else_are_refused(value, said):
    """At once, not where they are written."""
    with pytest.raises(TypeError, match=said):
        encode_state({"own": {"of": value}})
