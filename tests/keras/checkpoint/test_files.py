"""A checkpoint on disk: there as a whole or not at all, found out when its bits have changed, and of older formats too."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono as un
from processes import python
from sizes import cases
from storages import NAMES, list_names, storage, write
from unisono._src.keras.checkpoint import files
from unisono._src.keras.checkpoint.encoding import DTYPES, decode_state
from unisono._src.keras.checkpoint.files import ARRAYS, RECORD, DamagedError, load_checkpoint, write_checkpoint
from unisono._src.keras.checkpoint.local_storage import UNFINISHED, LocalPlace
from unisono._src.keras.checkpoint.storage import find_place

ROWS = np.random.default_rng(0).random((300, 40)).astype("float32")
CONTENT = {
    "model/layers/dense/0": ROWS,
    "of columns": np.asfortranarray(ROWS[:9]),
    "every second": ROWS[::2, 1],
    "step": np.array(2**40, "int64"),
    "empty": np.zeros((0, 3), "float32"),
    "strange numbers": np.array([np.nan, -0.0, np.inf], "float64"),
    "/states/0": np.array(True),
    **{name: np.array([1, 0, 1]).astype(getattr(ml_dtypes, name, name)) for name in DTYPES},
}
MORE = {"note": [1, 2.5, None, "x"], "best": float("-inf")}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "ckpt_1"
    write_checkpoint(find_place(path), CONTENT, MORE)
    return path


def check(path):
    loaded = load_checkpoint(path)
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in loaded.arrays.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in CONTENT.items()
    }
    assert loaded.record.items() >= MORE.items()


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_comes_back(tmp_path, name):
    """Of every dtype that states may have, and without arrays too."""
    with storage(name, tmp_path) as directory:
        write_checkpoint(directory / "ckpt_1", CONTENT, MORE)
        check(directory / "ckpt_1")
        write_checkpoint(directory / "ckpt_2", {}, MORE)
        assert load_checkpoint(directory / "ckpt_2").arrays == {}


def test_others_can_read_the_files(written):
    """NumPy the arrays, whose bits are whole numbers where it does not know the dtype; nothing is pickled, nothing compressed."""
    with np.load(written / ARRAYS, allow_pickle=False) as arrays:
        assert list(arrays) == list(CONTENT)
        assert {name: (a.shape, a.tobytes()) for name, a in arrays.items()} == {
            name: (a.shape, a.tobytes()) for name, a in CONTENT.items()
        }
        assert arrays["bfloat16"].dtype == "uint16"
    of_arrays = sum(array.nbytes for array in CONTENT.values())
    assert (written / ARRAYS).stat().st_size < of_arrays + 300 * len(CONTENT)


def test_no_array_is_copied_and_none_is_too_large(tmp_path, monkeypatch):
    """A member is larger than 4 GiB here: the limit of a zip file without the larger numbers of ZIP64."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    views = []
    monkeypatch.setattr(files, "view_bytes", lambda array: views.append(array) or array.reshape(-1).view(np.uint8).data)
    write_checkpoint(find_place(tmp_path / "ckpt_1"), {"of": ROWS}, {})
    assert all(view.base is ROWS or view is ROWS for view in views)
    assert np.array_equal(load_checkpoint(tmp_path / "ckpt_1").arrays["of"], ROWS)


@settings(max_examples=cases(25, 300))
@given(data=st.data())
def test_damage_is_found(written, tmp_path_factory, data):
    """Wherever a bit is flipped or a file is cut short: what is loaded has the right bits, or nothing is."""
    with storage(data.draw(st.sampled_from(NAMES), label="storage"), tmp_path_factory.mktemp("damaged")) as directory:
        copy = directory / "ckpt_1"
        content = {name: bytearray((written / name).read_bytes()) for name in (ARRAYS, RECORD)}
        file = data.draw(st.sampled_from([ARRAYS, RECORD]), label="file")
        at = data.draw(st.integers(0, len(content[file]) - 1), label="at")
        how = data.draw(st.sampled_from(["flip", "cut", "remove"]), label="how")
        if how == "flip":
            content[file][at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del content[file][at:]
        else:
            del content[file]
        for name, damaged in content.items():
            write(copy / name, bytes(damaged))
        said = f"The checkpoint {copy} is damaged: "
        try:
            check(copy)
        except DamagedError as error:
            said = str(error)
        assert said.startswith(f"The checkpoint {copy} is damaged: ")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (ARRAYS, ROWS[:1].tobytes(), ROWS[1:2].tobytes(), "model/layers/dense/0 has other bits than were written"),
        (ARRAYS, b"float8_e5m2.npy", b"float8_e5m3.npy", "float8_e5m2 cannot be read"),
        (RECORD, b'"note": [1,', b'"note": [7,', "its record is not what was written"),
        (RECORD, b'"format": 3', b'"format": 9', "cannot be read: it has format 9, and this version of Unisono reads 2 and 3"),
    ],
    ids=["an array", "a name", "the record", "another format"],
)
def test_what_is_damaged_is_named(written, tmp_path, monkeypatch, file, old, new, said):
    copy = shutil.copytree(written, tmp_path / "ckpt_1")
    content = (copy / file).read_bytes()
    assert old in content
    (copy / file).write_bytes(content.replace(old, new))
    if new.endswith(b"9"):
        monkeypatch.setattr(files, "digest_record", lambda record: record["seal"])
    with pytest.raises(DamagedError, match=said):
        load_checkpoint(copy)


# --- the storage ------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from unisono._src.keras.checkpoint.local_storage import LocalPlace

folder, calls = LocalPlace(sys.argv[1]), int(sys.argv[2])

files = dict.fromkeys(("a", "b"), lambda file: file.write(b"whole"))

def before_a_call(event, args):
    global calls
    if event.startswith(("open", "os.", "shutil.")):
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)

(folder / "one").write_folder(files)
sys.addaudithook(before_a_call)
(folder / "two").remove_unfinished()
(folder / "two").write_folder(files)
(folder / "one").remove_folder()
print("left at", calls)
"""


def test_a_process_that_is_killed_at_any_call_leaves_whole_folders(tmp_path):
    """By SIGKILL before each of its calls of the system, of which Python tells."""
    seen = set()
    for calls in range(1, 40):
        folder = tmp_path / str(calls)
        folder.mkdir()
        done = python("-c", KILLED, str(folder), str(calls), timeout=60)
        names = {name for name in list_names(folder) if not name.endswith(UNFINISHED)}
        for name in names:
            assert {file.name: file.read_bytes() for file in (folder / name).iterdir()} == {"a": b"whole", "b": b"whole"}
        assert names >= {"two"} or names == {"one"}
        seen.add((frozenset(names), bool(list(folder.glob("*.unfinished")))))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith("left at")
    assert calls > 8
    one, both, two = frozenset({"one"}), frozenset({"one", "two"}), frozenset({"two"})
    assert seen == {(one, False), (one, True), (both, False), (two, True), (two, False)}


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def write(file):
        file.write(b"half")
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        LocalPlace(tmp_path / "new" / "one").write_folder({"a": write})
    assert list_names(tmp_path / "new") == []


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files and folder are, by fsync: the machine may lose its power. And then the name is."""
    seen = []

    def fsync(descriptor):
        seen.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        if Path(tmp_path, seen[-1]).is_dir():
            raise OSError(errno.EINVAL, "a file system that knows it for files alone")

    monkeypatch.setattr(os, "fsync", fsync)
    write_checkpoint(find_place(tmp_path / "ckpt_1"), {"of": ROWS}, {})
    assert seen == [f"ckpt_1.unfinished/{ARRAYS}", f"ckpt_1.unfinished/{RECORD}", "ckpt_1.unfinished", "."]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"the disk is full: 40 bytes wanted, \d+ free$"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up: 40 bytes wanted$"),
        (OSError(errno.EFBIG, "File too large"), "than the file system allows: 40 bytes wanted$"),
        (PermissionError(errno.EACCES, "no"), "None"),
    ],
    ids=["full", "quota", "limit", "another"],
)
def test_lack_of_room(tmp_path, error, said):
    assert re.match(f".*{said}", str(LocalPlace(tmp_path / "not" / "made").describe_failure(error, 40)))


# --- checkpoints that Orbax wrote -------------------------------------------------------------------------------------

OLD = Path(__file__).parent / "written_by_orbax" / "ckpt_1"
"""Of `Checkpoint(weights=keras.Variable(arange(4)), step=keras.Variable(7), own=...)`, by version 0.1.0 before format 3."""


class Own:
    state = None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.filterwarnings("ignore:The checkpoint .* is of another setting")  # it is of another machine
def test_a_checkpoint_of_orbax_is_read_and_goes_on_in_the_new_format(tmp_path):
    shutil.copytree(OLD, tmp_path / "ckpt_1")
    things = {"weights": keras.Variable(np.zeros(4, "float32")), "step": keras.Variable(0, dtype="int32"), "own": Own()}
    checkpoint = un.Checkpoint(**things)
    assert checkpoint.restore(un.latest_checkpoint(tmp_path))
    assert (things["weights"].numpy().tolist(), int(things["step"])) == ([0, 1, 2, 3], 7)
    assert repr(things["own"].state) == repr(
        {
            "seen": [1, 2.5, None],
            "mean": np.arange(3.0),
            "half": np.arange(3).astype(ml_dtypes.bfloat16),
            "empty": np.zeros((0, 3), "float32"),
        }
    )
    checkpoint.save(tmp_path / "ckpt", keep=1)
    checkpoint.wait()
    assert list_names(tmp_path) == ["ckpt_2"]
    old, new = load_checkpoint(OLD), load_checkpoint(tmp_path / "ckpt_2")
    assert (old.record["format"], new.record["format"]) == (2, 3)
    assert files.count_steps(find_place(OLD)) == 0
    states = [repr(decode_state(loaded.record["states"], loaded.arrays)) for loaded in (old, new)]
    assert states[0] == states[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of reads of Orbax that end after the first
def test_damage_of_a_checkpoint_of_orbax_is_found(tmp_path):
    for number, file in enumerate(path for path in OLD.rglob("*") if path.is_file()):
        copy = shutil.copytree(OLD, tmp_path / f"ckpt_{number}")
        content = bytearray(file.read_bytes())
        if content:
            content[len(content) // 2] ^= 1
        (copy / file.relative_to(OLD)).write_bytes(content)
        said = str(copy)
        try:
            assert load_checkpoint(copy).arrays["weights"].tolist() == [0, 1, 2, 3]
        except DamagedError as error:
            said = str(error)
        assert str(copy) in said


def test_what_reads_a_checkpoint_of_orbax_can_be_installed(tmp_path, monkeypatch):
    """Nobody is to move a good checkpoint away because it is not. And it stays, whatever is kept."""
    monkeypatch.setitem(sys.modules, "orbax.checkpoint.experimental.v1", None)
    copy = shutil.copytree(OLD, tmp_path / "ckpt_1")
    with pytest.raises(ImportError, match=rf"{copy} was written by Orbax, .* To read it, write: pip install 'unisono\[orbax\]'"):
        un.Checkpoint(step=keras.Variable(0)).restore(copy)
    checkpoint = un.Checkpoint(step=keras.Variable(0))
    for _ in range(2):
        checkpoint.save(tmp_path / "ckpt", keep=1)
    checkpoint.wait()
    assert list_names(tmp_path) == ["ckpt_1", "ckpt_3"]
