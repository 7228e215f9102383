"""Checkpoints on disk: there as a whole or not at all, and found out when their bits have changed."""

from __future__ import annotations

import collections
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import environment, python
from sizes import cases, slow
from small_disk import fill, small_disk
from unisono._src.checkpoint import latest
from unisono._src.checkpoint.checkpoint import Checkpoint
from unisono._src.checkpoint.disk_space import FullDiskError, describe_lack_of_room
from unisono._src.checkpoint.encoding import DTYPES, MARK, decode_state, encode_state
from unisono._src.checkpoint.latest import latest_checkpoint
from unisono._src.checkpoint.orbax_private import policies
from unisono._src.checkpoint.reading import METADATA, DamagedError, load_checkpoint
from unisono._src.checkpoint.run_checkpoint import copy_on_device
from unisono._src.checkpoint.store import CheckpointStore
from unisono._src.checkpoint.writer import BackgroundWriter

ARRAYS = {
    "model/layers/dense/0": np.random.default_rng(0).random((300, 40)).astype("float32"),
    "half": np.arange(7).astype(ml_dtypes.bfloat16),
    "float8": np.arange(7).astype(ml_dtypes.float8_e4m3fn),
    "seed": np.array([1, 2**32 - 1], "uint32"),
    "step": np.array(2**40, "int64"),
    "flag": np.array(True),
    "empty": np.zeros((0, 3), "float32"),
    "strange numbers": np.array([np.nan, -0.0, np.inf], "float64"),
}


def save(store, number, arrays=ARRAYS, **record):
    store.save(number, lambda: (arrays, record))
    store.wait()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    store = CheckpointStore(tmp_path_factory.mktemp("store") / "written")
    save(store, 1, note=[1, 2.5, None, "x"], best=float("-inf"))
    return store.path(1)


def test_every_bit_comes_back(written):
    loaded = load_checkpoint(written)
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in loaded.arrays.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in ARRAYS.items()
    }
    assert loaded.record["note"] == [1, 2.5, None, "x"]
    assert loaded.record["best"] == float("-inf")


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of reads of Orbax that end after the first has failed
@settings(max_examples=cases(6, 40))
@given(data=st.data())
def test_damage_is_found(written, tmp_path_factory, data):
    """Wherever a bit is flipped or a file is cut short: what is loaded has the right bits, or nothing is."""
    copy = tmp_path_factory.mktemp("damaged") / "ckpt_1"
    shutil.copytree(written, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
    file = data.draw(st.sampled_from(files), label="file")
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1), label="at")
    how = data.draw(st.sampled_from(["flip", "cut", "remove"]), label="how")
    if how == "remove":
        file.unlink()
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content if how == "flip" else content[:at])
    try:
        loaded = load_checkpoint(copy)
    except DamagedError as error:
        said = str(error)
    else:
        said = f"{copy} is as good as it was"
        assert {name: a.tobytes() for name, a in loaded.arrays.items()} == {name: a.tobytes() for name, a in ARRAYS.items()}
        assert loaded.record["note"] == [1, 2.5, None, "x"]
    assert str(copy) in said


def test_a_changed_record_is_found(written, tmp_path):
    """By hand, so that it is JSON still."""
    copy = tmp_path / "ckpt_1"
    shutil.copytree(written, copy)
    file = copy / "_CHECKPOINT_METADATA"
    assert '"note": [1,' in file.read_text()
    file.write_text(file.read_text().replace('"note": [1,', '"note": [7,'))
    with pytest.raises(DamagedError, match="its record is not what was written"):
        load_checkpoint(copy)


def flip(path):
    """A bit of the file that holds the values."""
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("gone", ["arrays", *slow("_CHECKPOINT_METADATA", "all")])
def test_a_checkpoint_of_which_something_is_gone(tmp_path, gone):
    """It is named and left in place, and the next save takes another number."""
    store = CheckpointStore(tmp_path)
    for number in (1, 2):
        save(store, number)
    for path in list(store.path(2).iterdir()):
        if gone in (path.name, "all"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "fold_1").mkdir()  # of somebody else
    store = CheckpointStore(tmp_path)
    with pytest.warns(UserWarning, match=r"ckpt_2 is damaged: .*left in place; .*ckpt_1 is used, the newest good one"):
        assert store.load_newest().path == store.path(1)
    with pytest.warns(UserWarning, match=r"ckpt_2 is damaged: .*left in place; .*ckpt_1 is the newest good one") as said:
        assert latest_checkpoint(tmp_path) == latest_checkpoint(tmp_path / "ckpt") == str(store.path(1))
    assert "fold_1" not in str(said[0].message)
    save(store, store.choose_next_number())
    assert names(tmp_path) == ["ckpt_1", "ckpt_2", "ckpt_3", "fold_1"]
    assert latest_checkpoint(tmp_path) == str(store.path(3))


def test_damaged_checkpoints_are_not_among_those_that_are_kept(tmp_path):
    """Two good ones are, also where another process had written them, and the damaged ones are left in place."""
    for number in (1, 2, 3, 4, 5):
        save(CheckpointStore(tmp_path), number)
    flip(tmp_path / "ckpt_3")
    (tmp_path / "ckpt_5" / "_CHECKPOINT_METADATA").unlink()
    store = CheckpointStore(tmp_path, keep=2)
    save(store, store.choose_next_number())
    assert names(tmp_path) == ["ckpt_3", "ckpt_4", "ckpt_5", "ckpt_6"]
    store.delete()
    assert not tmp_path.exists()


def test_every_type_that_states_may_have(tmp_path):
    """Those that Orbax would refuse, or change, are not among them."""
    arrays = {name: np.array([1, 0, 1]).astype(getattr(ml_dtypes, name, name)) for name in DTYPES}
    save(CheckpointStore(tmp_path), 1, arrays)
    back = CheckpointStore(tmp_path).load_newest().arrays
    assert {name: (str(back[name].dtype), back[name].tobytes()) for name in DTYPES} == {
        name: (name, array.tobytes()) for name, array in arrays.items()
    }


def test_a_checkpoint_without_arrays(tmp_path):
    """Orbax has no empty ones."""
    save(CheckpointStore(tmp_path), 1, {}, note="x")
    loaded = CheckpointStore(tmp_path).load_newest()
    assert (loaded.arrays, loaded.record["note"]) == ({}, "x")


def test_nothing_is_executed_and_nothing_pickled(written):
    """No file of a checkpoint holds a pickle, whose first byte is 0x80 followed by its protocol."""
    assert not [path for path in written.rglob("*") if path.is_file() and path.read_bytes()[:1] == b"\x80"]


def test_an_unfinished_write_is_no_checkpoint(tmp_path):
    """The folder that Orbax writes into, as kill -9 leaves it; the next save clears it away."""
    store = CheckpointStore(tmp_path / "s")
    save(store, 1)
    shutil.copytree(store.path(1), tmp_path / "s" / "ckpt_2.orbax-checkpoint-tmp")
    assert store.numbers == [1]
    assert CheckpointStore(tmp_path / "s").load_newest().path == store.path(1)
    save(store, store.choose_next_number())
    assert len(store.numbers) == 2
    assert not list((tmp_path / "s").glob("*tmp*"))


def test_one_that_cannot_be_removed_does_not_take_the_new_one_with_it(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "s", keep=1)
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
    assert [entry.name for entry in (tmp_path / "s").iterdir()] == ["ckpt_3"]


def test_one_whose_metadata_are_gone_stays_and_keeps_nobody_from_saving(tmp_path):
    store = CheckpointStore(tmp_path / "s", keep=2)
    for number in range(1, 5):
        save(store, number)
        if number == 1:
            (store.path(1) / METADATA).unlink()
    assert store.numbers == [1, 3, 4]


def test_a_policy_keeps_what_it_says_and_the_newest(tmp_path):
    store, seen = CheckpointStore(tmp_path / "s", keep=policies.EveryNSteps(2)), []
    for number in range(1, 6):
        save(store, number)
        seen.append(store.numbers)
    assert seen == [[1], [2], [2, 3], [2, 4], [2, 4, 5]]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    store = CheckpointStore(tmp_path / "file" / "below")
    with pytest.raises(OSError, match=r"below/ckpt_1 was not written: .*Those before it are as they were: there is none"):
        save(store, 1)


FORBIDDEN = """
import os, sys
import keras
import unisono as un
from sizes import cases, slow
checkpoint = un.Checkpoint(of=keras.Variable(1.0))
checkpoint.save(sys.argv[1] + "/ckpt")
checkpoint.wait()
os.chmod(sys.argv[1], 0o555)
if os.geteuid() == 0:  # whom no permission keeps from writing
    os.setuid(65534)
checkpoint.save(sys.argv[1] + "/ckpt")
try:
    checkpoint.wait()
except OSError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_directory_without_permission():
    """The error names it, and the checkpoint before it stays good."""
    with tempfile.TemporaryDirectory() as directory:  # others may not even look into those of pytest
        done = python("-c", FORBIDDEN, directory)
        os.chmod(directory, 0o755)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"The checkpoint {directory}/ckpt_2 was not written: PermissionError: " in done.stdout
        assert f"Those before it are as they were: {directory}/ckpt_1." in done.stdout
        assert str(CheckpointStore(directory).load_newest().path) == f"{directory}/ckpt_1"


def test_a_failure_is_raised_by_the_next_save(tmp_path):
    store, failing = CheckpointStore(tmp_path / "s"), True

    def content():
        if failing:
            raise RuntimeError("the device is gone")
        return ARRAYS, {}

    store.save(1, content)
    store.join()
    failing = False
    with pytest.raises(RuntimeError, match="the device is gone"):
        store.save(2, content)
    store.wait()
    assert store.numbers == [2]


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


FULL_DISK = """
import resource, sys, warnings
import keras, numpy as np
import unisono as un
variable = keras.Variable(np.random.default_rng(0).random(100_000).astype("float32"))
checkpoint = un.Checkpoint(of=variable)
good = checkpoint.save(sys.argv[1] + "/ckpt")
checkpoint.wait()
variable.assign(variable + 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
checkpoint.save(sys.argv[1] + "/ckpt")
try:
    checkpoint.wait()
except OSError as error:
    print(error)
assert un.latest_checkpoint(sys.argv[1]) == good
checkpoint.restore(good)
"""


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """Here a limit on the size of files: the error names the checkpoint, and those that stay good. Orbax says nothing itself."""
    done = python("-c", FULL_DISK, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == (
        f"The checkpoint {tmp_path}/ckpt_2 was not written: a file is larger than the limit of 20000 bytes (ulimit -f) allows: 400000 bytes "
        f"wanted. Those before it are as they were: {tmp_path}/ckpt_1."
    )
    assert names(tmp_path) == ["ckpt_1"]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of writes of Orbax that end after the first has failed
def test_a_disk_that_is_really_full(tmp_path, caplog):
    """The error of a save is raised by `wait`. With room again the next save works; nothing unfinished is left."""
    with small_disk(tmp_path / "disk") as disk:
        store = CheckpointStore(disk)
        save(store, 1)
        ballast = fill(disk)
        with pytest.raises(
            FullDiskError, match=rf"ckpt_2 was not written: the disk is full: \d+ bytes wanted, 0 free. .*: {disk}/ckpt_1\."
        ):
            save(store, 2)
        assert names(disk) == ["ballast", "ckpt_1"]
        ballast.unlink()
        ballast.write_bytes(bytes(400_000))  # room for the folder, and not for the arrays
        with pytest.raises(FullDiskError, match=r"the disk is full: 4\d+ bytes wanted, [1-9]\d+ free"):
            save(store, 3, {"large": np.random.default_rng(0).random(50_000)})
        assert names(disk) == ["ballast", "ckpt_1"]
        ballast.unlink()
        save(store, 4)
        assert store.load_newest().path == store.path(4)
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"the disk is full: 40 bytes wanted, \d+ free$"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up: 40 bytes wanted$"),
        (ValueError("RESOURCE_EXHAUSTED: Failed to write [os_error_code='28']"), "the disk is full: 40 bytes wanted"),
        (ValueError("OUT_OF_RANGE: Failed to write [os_error_code='27']"), "than the file system allows: 40 bytes wanted$"),
    ],
    ids=["ENOSPC", "EDQUOT", "28", "27"],
)
def test_lack_of_room_is_seen_in_causes_too(tmp_path, error, said):
    outer = RuntimeError("of Orbax")
    outer.__cause__ = error
    assert re.match(f".*{said}", describe_lack_of_room(outer, tmp_path / "not" / "made", 40))
    assert describe_lack_of_room(PermissionError(errno.EACCES, "no"), tmp_path, 40) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            "a/ckpt_4",
            r"The checkpoint {0}/a/ckpt_4 is not there. In {0}/a there are ckpt_5, ckpt_3, .* and 2 more. Write restore\(.*{0}/a'\)\)",
        ),
        ("a/ckpt", r"is not there. In {0}/a there are ckpt_5, "),
        ("b/ckpt_4", r"is not there. There is no folder {0}/b. In {0} there are a, model.keras\."),
        ("empty/ckpt_4", r"is not there. In {0}/empty there is nothing\."),
        ("a", r"{0}/a is a folder of checkpoints. Write restore\(un.latest_checkpoint\('{0}/a'\)\) for the newest in it"),
        ("model.keras", r"model.keras is a file, and un.Checkpoint writes folders. Write .* keras.saving.load_model"),
    ],
    ids=["number", "prefix", "folder", "empty", "directory", "file"],
)
def test_a_checkpoint_that_is_not_there(tmp_path, asked, said):
    """It is not called damaged; what is there is named."""
    for number in (1, 2, 3, 10, 11, 12, 5):
        (tmp_path / "a" / f"ckpt_{number}" / "arrays").mkdir(parents=True)
    (tmp_path / "model.keras").touch()
    if asked.startswith("empty"):
        (tmp_path / "empty").mkdir()
    with pytest.raises((FileNotFoundError, ValueError), match=said.format(tmp_path)):
        Checkpoint(of=keras.Variable(1.0)).restore(tmp_path / asked)


@pytest.mark.parametrize("gone", [(2,), (2, 1)])
def test_a_checkpoint_that_another_process_removes_meanwhile_is_not_damaged(tmp_path, monkeypatch, gone):
    """The newest of those that stay is found, also where new ones have taken the place of all of them."""
    store = CheckpointStore(tmp_path / "written")
    for number in (1, 2, 3):
        save(store, number)
    directory = tmp_path / "polled"
    directory.mkdir()
    for number in (1, 2):
        store.path(number).rename(directory / f"ckpt_{number}")

    def remove_and_load(path):
        if int(path.name[-1]) in gone:
            shutil.rmtree(path)
            if len(gone) == 2 and not any(directory.iterdir()):
                store.path(3).rename(directory / "ckpt_3")
        return load_checkpoint(path)

    monkeypatch.setattr(latest, "load_checkpoint", remove_and_load)
    assert latest_checkpoint(directory) == str(directory / ("ckpt_1" if len(gone) == 1 else "ckpt_3"))


def test_a_training_goes_on_where_another_process_removes_the_newest_checkpoint_meanwhile(tmp_path, monkeypatch):
    """It does not begin anew, though all checkpoints that it had found are gone."""
    written = CheckpointStore(tmp_path)
    save(written, 1)

    def replace_and_load(path):
        if path == written.path(1):
            path.rename(written.path(2))
        return load_checkpoint(path)

    monkeypatch.setattr("unisono._src.checkpoint.store.load_checkpoint", replace_and_load)
    assert CheckpointStore(tmp_path).load_newest().path == written.path(2)


def test_a_link_to_nothing_is_a_damaged_checkpoint(tmp_path):
    (tmp_path / "model.keras").symlink_to(tmp_path / "nothing")
    with pytest.raises(DamagedError, match="No good checkpoint is left in"):
        latest_checkpoint(tmp_path)


WRITES = """
import sys
import keras, numpy as np
import unisono as un
checkpoint = un.Checkpoint(of=keras.Variable(np.zeros(100_000, "float32")))
for _ in range(40):
    checkpoint.save(sys.argv[1] + "/ckpt", keep=1)
checkpoint.wait()
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_looks_for_the_newest_checkpoint_while_another_one_trains(tmp_path):
    found = []
    with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], env=environment()) as process:
        while process.poll() is None:
            found.append(latest_checkpoint(tmp_path))
    assert process.returncode == 0
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt_40")
    numbers = [int(path.rpartition("_")[2]) for path in found if path]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 3


ENDS = """
import sys
import keras, numpy as np
import unisono as un
checkpoint = un.Checkpoint(of=keras.Variable(np.zeros(1_000_000, "float32")))
checkpoint.save(sys.argv[1] + "/ckpt")
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_ends_writes_its_last_checkpoint(tmp_path):
    done = python("-c", ENDS, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert CheckpointStore(tmp_path).load_newest().path == tmp_path / "ckpt_1"


@pytest.mark.slow
def test_a_process_that_ends_says_what_was_not_written(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    done = python("-c", ENDS, str(tmp_path / "file"))
    assert "A checkpoint was not written:" in done.stderr
    assert f"The checkpoint {tmp_path}/file/ckpt_1 was not written" in done.stderr


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
    save(CheckpointStore(tmp_path), 1, arrays, states=plain)
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


def test_orbax_that_cannot_be_imported_is_no_damage(tmp_path, monkeypatch):
    """Nobody is to move a good checkpoint away because of it."""
    store = CheckpointStore(tmp_path)
    path = store.save(1, lambda: ({"a": np.ones(3)}, {}))
    store.wait()
    monkeypatch.delattr("unisono._src.checkpoint.orbax_private")
    monkeypatch.setitem(sys.modules, "unisono._src.checkpoint.orbax_private", None)
    with pytest.raises(ImportError, match="orbax_private"):
        load_checkpoint(path)
