"""Checkpoints on S3, by a server of moto: what is written in parts, what a kill leaves, and processes that read what one of them has written."""

from __future__ import annotations

import importlib.util
import logging
import signal
import subprocess

import fsspec
import keras
import numpy as np
import pytest

import unisono as un
from processes import LAUNCH, environment, python
from storages import list_names, remove, write
from unisono._src.keras.checkpoint.files import ARRAYS, RECORD, DamagedError, load_checkpoint
from unisono._src.keras.checkpoint.storage import StorageError, find_place
from unisono._src.keras.checkpoint.store import CheckpointStore

MISSING = [name for name in ("s3fs", "moto", "flask_cors") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} cannot be imported: make compat has them"),
]

PART = 5 * 2**20
"""Bytes of the smallest part that S3 takes."""


@pytest.fixture(scope="module")
def address():
    """Where a server listens, which keeps all in its memory."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(address, request, monkeypatch):
    """A bucket of the test, and the variables by which S3's driver finds its server."""
    import s3fs

    variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"default_block_size": PART, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    )
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = find_place(f"s3://{request.node.name.replace('_', '-')[:60].lower()}")
    bucket.filesystem.mkdir(bucket.url)
    yield bucket
    s3fs.S3FileSystem.clear_instance_cache()


def test_checkpoints_on_s3(bucket):
    """Numbers, what is kept, damage, an unfinished write, and arrays of several parts, beside a reader with a listing of its own."""
    arrays = {"large": np.random.default_rng(0).random(PART // 4), "nothing": np.zeros((0, 3)), "one": np.array(True)}
    store = CheckpointStore(bucket / "run", keep=2)
    write(bucket / "run" / "ckpt_1" / ARRAYS, b"half")
    for number in (2, 3, 4):
        assert store.choose_next_number() == number
        store.save(number, lambda: (arrays, {}))
        store.wait()
        assert un.latest_checkpoint(bucket / "run") == un.latest_checkpoint(f"{bucket}/run/ckpt") == f"{bucket}/run/ckpt_{number}"
    assert list_names(bucket / "run") == ["ckpt_3", "ckpt_4"]
    assert bucket.filesystem.info(f"{bucket}/run/ckpt_4/{ARRAYS}")["ETag"].rstrip('"').endswith("-2")  # the number of parts
    loaded = CheckpointStore(bucket / "run").load_newest()
    assert {name: (a.dtype, a.tobytes()) for name, a in loaded.arrays.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in arrays.items()
    }
    with bucket.filesystem.open(f"{bucket}/run/ckpt_4/{ARRAYS}") as file, np.load(file) as others:
        assert np.array_equal(others["large"], arrays["large"])
    write(bucket / "run" / "ckpt_4" / RECORD, b"{}")
    with pytest.warns(UserWarning, match="ckpt_4 is damaged: its record .*left in place; .*ckpt_3 is the newest good one"):
        assert un.latest_checkpoint(bucket / "run") == f"{bucket}/run/ckpt_3"
    remove(bucket / "run" / "ckpt_3" / ARRAYS)
    with pytest.raises(DamagedError, match="ckpt_3 is damaged: FileNotFoundError"):
        load_checkpoint(bucket / "run" / "ckpt_3")
    store.delete()
    assert list_names(bucket) == []


def test_a_loop_on_s3(bucket, tmp_path):
    """A folder with a file of Keras in it, a bucket that is not there, and a server that does not answer."""
    weights = keras.Variable(np.arange(10.0))
    checkpoint = un.Checkpoint(weights=weights)
    saved = checkpoint.save(f"{bucket}/run/")
    checkpoint.wait()
    weights.assign(weights * 0)
    assert checkpoint.restore(un.latest_checkpoint(f"{bucket}/run"))
    assert weights.numpy().tolist() == list(range(10))
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "model.keras")
    write(bucket / "model.keras", (tmp_path / "model.keras").read_bytes())
    assert un.latest_checkpoint(bucket) == f"{bucket}/model.keras"
    with pytest.raises(FileNotFoundError, match="run/ckpt_7 is not there. In .*/run there is ckpt_1. Write"):
        checkpoint.restore(f"{bucket}/run/ckpt_7")
    checkpoint.save("s3://nobody-has-this/run/")
    with pytest.raises(
        StorageError, match=r"was not written: the storage failed \(FileNotFoundError: .*bucket does not exist\): 40 bytes"
    ):
        checkpoint.wait()
    bucket.filesystem.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StorageError, match="The storage of .* failed: EndpointConnectionError: Could not connect"):
            un.latest_checkpoint(saved)


TRAINING = """
import os, signal, sys
import unisono as un
import keras
import numpy as np

class Kill(keras.callbacks.Callback):
    def get_state(self):
        return None

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and [os.environ.get(f"UNISONO_{name}") for name in ("PROCESS", "RESTARTS")] == ["1", "0"]:
            os.kill(os.getpid(), signal.SIGKILL)

keras.utils.set_random_seed(0)
strategy = un.MultiWorkerMirroredStrategy(replicas=2)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.random.default_rng(0).random((16, 4), "float32")
begun = un.latest_checkpoint(sys.argv[1]) is not None
backup = un.callbacks.BackupAndRestore(sys.argv[1], save_freq=1, delete_checkpoint=False)
model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, callbacks=[backup, Kill()])
print(begun, un.fingerprint(model))
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_processes_of_which_one_is_killed_go_on_from_s3(bucket, tmp_path):
    """All of them read what process 0 has written, and end with the bits of one process that nobody killed."""
    (tmp_path / "train.py").write_text(TRAINING)
    alone = python(str(tmp_path / "train.py"), f"{bucket}/alone")
    words = ("--processes", "2", "--restarts", "1", str(tmp_path / "train.py"), f"{bucket}/killed")
    killed = subprocess.run([*LAUNCH, *words], env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert "process 1 was killed by SIGKILL" in killed.stderr
    assert (alone.returncode, killed.returncode) == (0, 0), alone.stderr + killed.stderr
    begun, fingerprint = alone.stdout.split()
    assert begun == "False"
    assert sorted(killed.stdout.splitlines()) == [f"[{number}] True {fingerprint}" for number in (0, 1)]


SAVES = """
import os, signal, sys
import unisono as un
import keras
import numpy as np

if len(sys.argv) == 3:
    import s3fs

    async def kill(*_, **__):  # all but the record is there
        os.kill(os.getpid(), signal.SIGKILL)

    s3fs.S3FileSystem._pipe_file = kill
variable = keras.Variable(np.full(1000, 1.0))
checkpoint = un.Checkpoint(of=variable)
checkpoint.restore(un.latest_checkpoint(sys.argv[1]))
variable.assign_add(np.ones(1000))
print(checkpoint.save(sys.argv[1] + "/", keep=1), variable.numpy().sum())
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_ends_or_is_killed_while_it_writes_to_s3(bucket):
    """One that ends has written all. What a kill leaves does not count, and is cleared."""
    run = f"{bucket}/run"
    for words, code, left in (
        ((), 0, ["ckpt_1"]),
        (("killed",), -signal.SIGKILL, ["ckpt_1", "ckpt_2"]),
        ((), 0, ["ckpt_3"]),
    ):
        done = python("-c", SAVES, run, *words)
        assert done.returncode == code, done.stderr
        assert list_names(run) == left
    assert done.stdout == f"{un.latest_checkpoint(run)} 3000.0\n" == f"{run}/ckpt_3 3000.0\n"
