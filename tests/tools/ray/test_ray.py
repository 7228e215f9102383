"""What runs on Ray, with a stand-in for Ray: the variables of a worker, backups that Ray stores, rows by position, refusals."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import pathlib
import re
import shutil
import tempfile
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest

import unisono as un
from broken_off import BATCH, STEPS, BreakOff, BrokenOffError, Stateless, X, Y, fit, model_on
from trainings import on
from unisono._src.processes.environments.precedence import describe_by_agreeing
from unisono._src.tools.ray import backup, dataset, kept_programs, room, trainer


class Storage:
    """A folder in which Ray keeps what it is given."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.experiment_fs_path = str(folder)

    def persist_current_checkpoint(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        return Checkpoint(shutil.copytree(checkpoint.path, pathlib.Path(self.experiment_fs_path, name)))


class Checkpoint:
    def __init__(self, path: object) -> None:
        self.path = path

    @classmethod
    def from_directory(cls, path: object) -> Checkpoint:
        return cls(path)

    @contextlib.contextmanager
    def as_directory(self):
        yield str(self.path)


class Train:
    """`ray.train`, as a function sees it that Ray runs."""

    Checkpoint = Checkpoint
    CheckpointUploadMode = SimpleNamespace(ASYNC="async")

    def __init__(self, folder: pathlib.Path, workers: int = 1, rank: int = 0, on_this_node: int = 1) -> None:
        self.storage, self.reports, self.newest, self.announced = Storage(folder), [], None, None
        self.ranks = {"world_size": workers, "world_rank": rank, "local_world_size": on_this_node}
        self.collective = SimpleNamespace(broadcast_from_rank_zero=lambda mine: mine or "10.0.0.1:1234")

    def get_context(self) -> SimpleNamespace:
        getters = {f"get_{name}": lambda value=value: value for name, value in (self.ranks | {"storage": self.storage}).items()}
        return SimpleNamespace(**getters)

    def get_checkpoint(self) -> Checkpoint | None:
        return self.newest

    def get_preemption_info(self) -> object:
        return self.announced

    def report(
        self, metrics, checkpoint, checkpoint_upload_mode, checkpoint_upload_fn, delete_local_checkpoint_after_upload
    ) -> None:
        self.newest = checkpoint_upload_fn(checkpoint, f"checkpoint_{len(self.reports)}")
        self.reports.append(metrics)


@pytest.fixture
def ray(tmp_path, monkeypatch):
    """Ray, with a worker that has no GPU."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    found = SimpleNamespace(
        train=Train(tmp_path / "storage"), util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"), gpus=[]
    )
    found.get_runtime_context = lambda: SimpleNamespace(get_accelerator_ids=lambda: {"GPU": found.gpus, "TPU": []})
    found.get = lambda values: values
    found.remote = lambda function: SimpleNamespace(remote=function)
    for module in (backup, dataset, trainer):
        monkeypatch.setattr(module, "import_ray", lambda: found)
    monkeypatch.setattr(backup.Backup, "_has_begun", False)
    return found


@pytest.mark.parametrize(
    ("workers", "rank", "on_this_node", "processes", "address"),
    [(1, 0, 1, 1, "None"), (2, 0, 2, 2, r"127\.0\.0\.1:\d+"), (3, 2, 1, 3, r"10\.0\.0\.1:1234")],
)
def test_a_worker_learns_of_the_others(ray, tmp_path, monkeypatch, workers, rank, on_this_node, processes, address):
    """By the variables of `unisono launch`, at an address of the first worker; of one node, on loopback."""
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu"})
    ray.train = Train(tmp_path, workers, rank, on_this_node)

    def train(config):
        return config, describe_by_agreeing(os.environ)

    worker = trainer.connect_before(train)
    assert inspect.signature(worker) == inspect.signature(train)  # by it Ray decides what to pass
    config, cluster = worker({"rate": 1})
    assert config == {"rate": 1}
    assert (cluster.processes, cluster.process) == (processes, rank)
    assert re.fullmatch(address, str(cluster.coordinator))


@pytest.mark.parametrize("named", ["", "by the user"])
def test_a_worker_that_is_started_again_finds_its_programs(ray, monkeypatch, named):
    """Its folder is removed when the function has ended, and not if it has failed."""
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu"})
    found = []

    def train(fails):
        folder = pathlib.Path(jax.config.jax_compilation_cache_dir)
        found.append(folder)
        if not named:
            assert folder.stat().st_mode & 0o777 == 0o700
            (folder / "a program").touch()
        assert not fails

    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", named)
        with pytest.raises(AssertionError):
            trainer.connect_before(train)(True)
        kept = [path.exists() for path in found]
        jax.config.update("jax_compilation_cache_dir", named)  # in another process
        trainer.connect_before(train)(False)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert found[0] == found[1]
    assert (kept, found[1].exists()) == ([not named], False)
    assert not named or found == [pathlib.Path(named)] * 2


def test_programs_of_others_are_not_run(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").mkdir(mode=0o700)
    for name in ("open", "link", "missing/parent"):
        with pytest.warns(
            UserWarning, match=rf"compile their programs again: .*{name} is no folder of this user .* JAX_COMPILATION_CACHE_DIR"
        ):
            assert not kept_programs.make_private(tmp_path / name)
    assert kept_programs.make_private(tmp_path / "mine")


@pytest.mark.parametrize(("gpus", "platforms"), [([], ["cpu"]), (["1"], [])])
def test_a_worker_without_gpus_computes_on_cpu(ray, monkeypatch, gpus, platforms):
    """Ray hides GPUs from a worker that has some of them alone."""
    updates = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(jax.config, "update", lambda name, value: updates.append(value))
    ray.gpus = gpus
    trainer.prepare_worker()
    assert updates == platforms


def train_with(callbacks, strategy=None, seed=1):
    return fit(model_on(strategy or on(1, 4), seed=seed), callbacks=callbacks)


@pytest.fixture(scope="module")
def whole():
    """A training that nobody interrupts."""
    return train_with([])


def test_a_fit_goes_on_from_the_checkpoint_that_ray_has(ray, whole, monkeypatch):
    """In the middle of an epoch, on other devices. The last report is of the end, and nothing is left where checkpoints were written first."""
    with pytest.raises(BrokenOffError):
        train_with([un.ray.Backup(save_freq=3), BreakOff(STEPS + 3)])
    assert [(report["epoch"], report["step"]) for report in ray.train.reports][-1] == divmod((STEPS + 3) // 3 * 3, STEPS)
    monkeypatch.setattr(backup.Backup, "_has_begun", False)  # Ray starts another process
    backup.RayStore(ray.train).path(9).write_folder({})  # left by the killed one
    assert train_with([un.ray.Backup(save_freq=1000)], on(2, 4), seed=99) == whole
    last = ray.train.reports[-1]
    assert (last["epoch"], last["step"]) == (3, 0)
    assert last["val_loss"] == whole.logs["val_loss"][-1]
    assert list(pathlib.Path(tempfile.gettempdir()).iterdir()) == []


def test_a_training_is_saved_once_before_a_node_is_taken_away(ray, whole, monkeypatch):
    monkeypatch.setattr(backup, "SECONDS", 0)

    class Announce(Stateless):
        def on_train_batch_end(self, batch, logs=None):
            ray.train.announced = "node 1" if batch else None

    assert train_with([un.ray.Backup(save_freq=False), Announce()]) == whole
    assert [(report["epoch"], report["step"]) for report in ray.train.reports] == [(0, 2), (1, 2), (2, 2), (3, 0)]


def test_a_checkpoint_that_the_storage_refuses_is_not_lost(ray, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only bucket")

    monkeypatch.setattr(ray.train.storage, "persist_current_checkpoint", refuse)
    with pytest.raises(OSError, match=r"was not written to .*RunConfig\(storage_path=.*read-only bucket") as refused:
        train_with([un.ray.Backup(save_freq=2)])
    local = pathlib.Path(str(refused.value).partition("It lies in ")[2].partition(" on this machine")[0])
    assert (local / "record.json").exists()


class Rows:
    """A `ray.data.Dataset` of three blocks, one of them empty."""

    def __init__(self):
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def copy(self, other):
        return self

    def columns(self):
        return ["x", "y"]

    def select_columns(self, names):
        assert self.context.execution_options.preserve_order
        return self

    def to_numpy_refs(self):
        """The last row of the first batch is the first of a block."""
        ends = [0, BATCH - 1, BATCH - 1, len(X)]
        return [{"x": X[begin:end], "y": Y[begin:end]} for begin, end in itertools.pairwise(ends)]


def test_rows_of_ray_data_are_read_by_position(ray):
    rows = un.ray.Dataset(Rows(), x="x", y="y", batch_size=BATCH)
    assert rows.num_batches == -(-len(X) // BATCH)
    for index in reversed(range(rows.num_batches)):
        here = slice(index * BATCH, (index + 1) * BATCH)
        np.testing.assert_array_equal(rows[index][0], X[here])
        np.testing.assert_array_equal(rows[index][1], Y[here])
    (inputs,) = un.ray.Dataset(Rows(), x=["x", "y"], batch_size=BATCH)[0]
    assert list(inputs) == ["x", "y"]


def fit_twice():
    model = model_on(on(1, 4))
    for _ in range(2):
        model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0, callbacks=[un.ray.Backup()])


def fit_alone(train):
    train.ranks["world_size"] = 2
    train_with([un.ray.Backup()])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda _: un.ray.Trainer(print, datasets={"train": 1}), r"received datasets=\['train'\].*un\.ray\.Dataset\("),
        (lambda _: un.ray.Trainer(print, scaling_config=SimpleNamespace(num_workers=0)), r"num_workers=0.*write num_workers=1"),
        (
            lambda _: un.ray.Backup(save_freq=SimpleNamespace()),
            r"received save_freq=.*write 'epoch', a number of steps, or False",
        ),
        (lambda _: fit_twice(), r"this is the second.*BackupAndRestore\('folder', signals=\(\)\)"),
        (lambda ray: fit_alone(ray.train), r"one of 2 workers.*Start the function by un\.ray\.Trainer"),
        (lambda _: un.ray.Dataset(Rows(), x="image", batch_size=4), r"received the columns \['image'\].*\['x', 'y'\]"),
        (lambda _: un.ray.Dataset(Rows(), x="x", batch_size=0), r"received batch_size=0"),
    ],
)
def test_what_cannot_be_is_refused(ray, call, text):
    with pytest.raises(ValueError, match=text):
        call(ray)


CPUS = {"CPU": 1.0}
PENDING = {"state": "PENDING", "bundles": {0: CPUS, 1: CPUS, 2: CPUS}}


@pytest.mark.parametrize(
    ("state", "group", "cpus", "free", "text"),
    [
        (
            "SchedulingState", PENDING, 1.0, 0.5,
            "no workers run for 10 seconds. ScalingConfig asks for 3 of them, each with {'CPU': 1.0}; the nodes of this cluster have room for 2, "
            "even if nothing else runs there. Ray waits until other nodes come: start them, or write ScalingConfig(num_workers=2).",
        ),
        ("SchedulingState", PENDING, 2.0, 0.5, "of these {'CPU': 0.5} are free: other programs have the rest. Ray waits until they end,"),
        ("SchedulingState", PENDING | {"state": "CREATED"}, 1.0, 0.5, None),  # the workers start
        ("RestartingState", PENDING | {"state": "REMOVED"}, 1.0, 0.5, "have room for 2,"),  # of an elastic run, which asks for room later
        ("RestartingState", PENDING | {"state": "REMOVED"}, 2.0, 4.0, None),  # nodes have come, and Ray will see them
        ("RunningState", PENDING, 1.0, 0.5, None),
    ],
    ids=["no room", "no free room", "starts", "counts nodes", "nodes have come", "runs"],
)  # fmt: skip
def test_what_has_no_room_says_so(monkeypatch, capsys, state, group, cpus, free, text):
    """With Ray's controller, which says its states, and Ray's tables."""
    nodes = [{"Alive": True, "Resources": {"CPU": cpus}}] * 2 + [{"Alive": False, "Resources": {"CPU": 8.0}}]
    ray = SimpleNamespace(
        util=SimpleNamespace(placement_group_table=lambda: {"a": group}),
        nodes=lambda: nodes,
        available_resources=lambda: {"CPU": free},
    )
    monkeypatch.setattr(room, "importlib", SimpleNamespace(import_module=lambda name: ray))
    callback = room.RoomCallback()
    callback.after_controller_start(
        SimpleNamespace(scaling_config=SimpleNamespace(min_workers=3, _resources_per_worker_not_none=CPUS))
    )
    timer = callback._timer
    callback.after_controller_state_update(None, type(state, (), {})())
    if not timer.finished.is_set():
        timer.cancel()
        timer.function()
    if callback._timer not in (None, timer):
        callback._timer.cancel()  # it looks again later
    said = capsys.readouterr().err
    assert (text in said) if text else said == ""


def test_dir_shows_what_is_public():
    assert dir(un.ray) == sorted(un.ray.__all__)
    assert issubclass(un.ray.Dataset, keras.utils.PyDataset)
