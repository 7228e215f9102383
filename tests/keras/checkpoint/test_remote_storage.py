"""Checkpoints below a protocol: the promises of the disk, whichever call a process does not make any more, and paths that stay what they are."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import warnings
from io import BytesIO

import fsspec
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from storages import (
    Calls,
    FailingFile,
    FailingFileSystem,
    KilledError,
    failing_after,
    failing_storage,
    list_names,
    storage,
    write,
)
from unisono._src.keras.checkpoint import storage as seam
from unisono._src.keras.checkpoint.files import ARRAYS, count_steps, load_checkpoint
from unisono._src.keras.checkpoint.storage import StorageError, find_place
from unisono._src.keras.checkpoint.store import CheckpointStore
from unisono._src.keras.record.run_recorder import RunRecorder


def content(number):
    return {"number": np.full((20, 2), number), "nothing": np.zeros((0, 3))}, {}


def save(store, number):
    store.save(number, lambda: content(number))
    store.wait()


def train(directory, done):
    """Save three checkpoints, keep the newest, and delete it at the end, as a training does."""
    store = CheckpointStore(directory, keep=1)
    for number in (1, 2, 3):
        with contextlib.suppress(StorageError):
            save(store, number)
            done.append(number)
    store.delete()
    done.append("deleted")


@pytest.mark.parametrize(
    ("error", "once"),
    [
        (KilledError(), False),
        (ConnectionError("the connection is lost"), False),
        (ConnectionError("the connection is lost"), True),
    ],
    ids=["killed", "lost", "one call fails"],
)
def test_after_any_number_of_calls_the_newest_checkpoint_is_good(error, once):
    """The process is killed there, or the storage fails from there on, or in that call alone. The next writer clears what is left."""
    seen = set()
    for calls in itertools.count():
        with failing_storage() as directory:
            done = []
            with failing_after(calls, error, once), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that old ones could not be removed
                try:
                    train(directory, done)
                except KilledError:
                    done.append("killed")
                left = Calls.left if Calls.left < float("inf") else 0
            seen.add((*done, *FailingFileSystem.store))
            store = CheckpointStore(directory, keep=1)
            newest = store.load_newest()
            saved = [number for number in done if isinstance(number, int)]
            if newest is None:
                assert "deleted" in done or saved in ([], [1, 2, 3])
            else:
                number = int(newest.path.name[-1])
                assert number >= max(saved, default=0)
                assert newest.arrays["number"].tolist() == [[number] * 2] * 20
            save(store, store.choose_next_number())
            assert len(list_names(directory)) == 1
            if left > 0:
                break
    assert calls > 60
    assert any(keys[-1].endswith(ARRAYS) for keys in seen if keys)  # of an unfinished one


def test_no_call_has_more_than_a_part_of_an_array(monkeypatch):
    """A driver copies what it writes and reads."""
    monkeypatch.setattr(seam, "AT_ONCE", 1000)
    large = np.random.default_rng(0).random(10_000)
    with failing_storage() as directory:
        store = CheckpointStore(directory)
        store.save(1, lambda: ({"of": large}, {}))
        store.wait()
        assert FailingFile.most == 1000
        sizes = []
        monkeypatch.setattr(FailingFile, "read", lambda file, size=-1: sizes.append(size) or BytesIO.read(file, size))
        assert np.array_equal(store.load_newest().arrays["of"], large)
        assert len(sizes) > 80
        assert max(sizes) == 1000


def test_a_checkpoint_is_never_written_over():
    """Of two trainings in one folder the second one is told."""
    with failing_storage() as directory:
        save(CheckpointStore(directory), 1)
        store = CheckpointStore(directory)
        store.save(1, lambda: content(2))
        with pytest.raises(
            OSError, match="ckpt_1 was not written: FileExistsError: .*ckpt_1 is there already.*as they were: .*ckpt_1"
        ):
            store.wait()
        assert load_checkpoint(directory / "ckpt_1").arrays["number"][0, 0] == 1


def test_a_reader_tells_a_storage_that_fails_from_damage(tmp_path):
    """A training does not begin anew, nor from an older checkpoint, because the newest could not be read just now."""
    with failing_storage() as directory:
        save(CheckpointStore(directory), 1)
        looks = (
            lambda: un.latest_checkpoint(directory),
            CheckpointStore(directory).load_newest,
            lambda: load_checkpoint(directory / "ckpt_1"),
            lambda: count_steps(directory / "ckpt_1"),
            lambda: un.latest_checkpoint(directory / "of keras"),
        )
        new_model().save(tmp_path / "model.keras")
        write(directory / "of keras" / "model.keras", (tmp_path / "model.keras").read_bytes())
        for look in looks:
            with failing_after(100):
                assert look()
                calls = 100 - Calls.left
            assert calls >= 2
            for number in range(calls):
                said = r"The storage of failing://bucket/run.* failed: ConnectionError: the connection is lost\."
                with failing_after(number, once=True), pytest.raises(StorageError, match=said):
                    look()


def test_a_signal_while_the_storage_is_lost():
    """A loop saves and leaves: it goes on from the checkpoint before."""
    with failing_storage() as directory:
        checkpoint = un.Checkpoint(of=keras.Variable(1.0))
        first = checkpoint.save(directory / "ckpt")
        checkpoint.wait()
        with failing_after(0):
            checkpoint.save(directory / "ckpt")
            store = checkpoint._find_store(directory / "ckpt")
            with pytest.warns(
                UserWarning, match=r"ckpt_2 was not written: the storage failed .* as they were: .*ckpt_1\. The last of these"
            ):
                assert str(store.finish(store.path(2))) == first
            with pytest.warns(
                UserWarning, match=r"The checkpoints in failing://bucket/run could not be deleted: .* Delete them, or"
            ):
                store.delete()


# --- paths ------------------------------------------------------------------------------------------------------------

NAME = st.text("ab.-_ 1é", min_size=1).filter(lambda name: name.strip("."))


@given(
    root=st.sampled_from(["memory://", "memory:///", "failing://"]),
    names=st.lists(NAME, min_size=1, max_size=3),
    name=NAME,
    slash=st.sampled_from(["", "/"]),
)
def test_a_path_with_a_protocol_stays_what_it_is(root, names, name, slash):
    url = f"{root}{'/'.join(names)}"
    place = find_place(url + slash)
    assert (str(place), str(place / name), place.name) == (url, f"{url}/{name}", names[-1])
    assert find_place(place) == place == (place / name).parent
    assert find_place(f"file:///{names[-1]}") == pathlib.Path("/", names[-1])


class Named:
    """A path of another library."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


def new_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def save_and_restore(path):
    checkpoint = un.Checkpoint(of=keras.Variable(1.0))
    saved = checkpoint.save(path)
    checkpoint.wait()
    assert saved == "memory://bucket/run_1"
    checkpoint.restore(Named(saved))
    assert un.latest_checkpoint(path) == saved


@pytest.mark.parametrize("as_path", [str, Named])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (save_and_restore, None),
        (
            lambda path: un.callbacks.BackupAndRestore(path)._store.path(1).open_file(),
            "memory://bucket/run/ckpt_1|/bucket/run/ckpt_1",
        ),
        (
            lambda path: un.export(new_model(), path),
            "un.export received 'memory://bucket/run', and takes a path of the local disk",
        ),
        (
            lambda path: un.load_exported(path),
            "un.load_exported received 'memory://bucket/run', and takes a path of the local disk",
        ),
        (lambda path: un.callbacks.Record(path), "Record received 'memory://bucket/run', and takes a path of the local disk"),
        (lambda path: un.function(abs, record=path)(1), r"function\(record=\) received 'memory://bucket/run', and takes"),
        (lambda path: RunRecorder(path), "UNISONO_RECORD received 'memory://bucket/run', and takes a path of the local disk"),
        (
            lambda path: un.callbacks.TensorBoard(path, embeddings_freq=1),
            r"TensorBoard\(embeddings_freq=\) received 'memory://bucket/run'",
        ),
    ],
    ids=["Checkpoint", "BackupAndRestore", "export", "load_exported", "Record", "function", "UNISONO_RECORD", "TensorBoard"],
)
def test_every_call_takes_a_protocol_or_refuses_it(tmp_path, monkeypatch, call, said, as_path):
    """None makes a folder "memory:" on the disk."""
    monkeypatch.chdir(tmp_path)
    with storage("memory", pathlib.Path("bucket")):
        if said is None:
            call(as_path("memory://bucket/run"))
        else:
            with pytest.raises((ValueError, FileNotFoundError), match=said):
                call(as_path("memory://bucket/run"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            pathlib.Path("s3://bucket/run"),
            "The path 's3:/bucket/run' was received. A protocol has two slashes, of which pathlib.Path drops one",
        ),
        ("s4://bucket/run", r"The path 's4://bucket/run' was received, which fsspec does not open \(Protocol not known: s4\)"),
        ("simplecache::memory://run", r"which fsspec does not open \(a chain of protocols keeps what others do not see\)"),
    ],
    ids=["pathlib", "unknown", "chain"],
)
def test_paths_that_are_no_storage(path, said):
    with pytest.raises(ValueError, match=said):
        un.latest_checkpoint(path)


def test_a_driver_that_is_not_installed():
    """Its name is in the error; the extra has that of S3."""
    fsspec.register_implementation("gone", "gone_driver.Driver", clobber=True, errtxt="Please install gone_driver")
    with pytest.raises(
        ImportError, match=r'needs fsspec and a driver \(Please install gone_driver\).*pip install "unisono\[s3\]"$'
    ):
        un.latest_checkpoint("gone://bucket/run")


def test_a_checkpoint_of_orbax_is_copied_first():
    with failing_storage() as directory:
        FailingFileSystem().pipe_file(f"{directory}/ckpt_1/_CHECKPOINT_METADATA", OLD.read_bytes())
        with pytest.raises(
            ImportError, match="ckpt_1 was written by Orbax, .* is read from the local disk alone. Copy it to a local folder"
        ):
            load_checkpoint(directory / "ckpt_1")


OLD = pathlib.Path(__file__).parent / "written_by_orbax" / "ckpt_1" / "_CHECKPOINT_METADATA"
