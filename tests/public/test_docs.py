"""Every Python block of the README and of docs/ is run: as it stands, but for what "..." leaves to the reader.

The first programs of the README and of docs/loop.md run in processes of their own too (`public/test_readme_integration.py`).
"""

from __future__ import annotations

import inspect
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import unisono as un

ROOT = pathlib.Path(un.__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 64)
LOSS = "sparse_categorical_crossentropy"

COLUMNS = 88
"""How many fit the column of the site in a window of 1400 pixels; other blocks than code are wrapped by docs/_static/site.css."""
COLUMNS_OF_THE_REFERENCE = 86

Names = dict[str, Any]


def python_blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def net() -> keras.Model:
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")])


def compiled() -> Names:
    """What a block takes for known: a model of a strategy, and data."""
    strategy = un.OneDeviceStrategy(replicas=2)
    with strategy.scope():
        model = net()
    model.compile("sgd", LOSS)
    dataset = strategy.distribute_dataset((X, Y), batch_size=32)
    return {"un": un, "keras": keras, "strategy": strategy, "model": model, "x": X, "y": Y, "dataset": dataset}


def trained() -> Names:
    names = compiled()
    names["model"].fit(X, Y, verbose=0)
    return names


def looped() -> Names:
    """What stands before a block of a loop."""
    names = compiled()
    strategy, model = names["strategy"], names["model"]
    with strategy.scope():
        optimizer, accuracy = keras.optimizers.Adam(), keras.metrics.SparseCategoricalAccuracy()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def replica_step(batch: Any) -> Any:
        value, gradients = un.value_and_grad(lambda: loss_fn(batch[1], model(batch[0])), model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return names | {"optimizer": optimizer, "accuracy": accuracy, "step": lambda batch: strategy.run(replica_step, args=(batch,))}


FEW_ROWS = "x, y = load_digits(return_X_y=True)", "x, y = (part[:128] for part in load_digits(return_X_y=True))"


def after_the_first_program() -> Names:
    """The block goes on from the program with which the page begins, on two batches."""
    names: Names = {}
    exec(python_blocks(ROOT / "docs" / "loop.md")[0].replace(*FEW_ROWS), names)
    return names


def check_two_fingerprints(names: Names, printed: str) -> None:
    first, second = re.findall(r"^[0-9a-f]{32}$", printed, re.MULTILINE)
    assert first == second


def check_one_fingerprint(names: Names, printed: str) -> None:
    assert re.findall(r"^[0-9a-f]{32}$", printed, re.MULTILINE)


def check_losses_fall(names: Names, printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+), accuracy [\d.]+%$", printed, re.MULTILINE)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


def check_three_epochs(names: Names, printed: str) -> None:
    assert names["model"].history.epoch == [0, 1, 2]


def check_one_update(names: Names, printed: str) -> None:
    """Of all batches: one step on the gradients that were accumulated, whose sums begin anew."""
    assert int(names["optimizer"].iterations) == 3 * len(names["batches"]) + 1
    assert not any(np.any(total) for total in names["sums"])


def check_saved(names: Names, printed: str) -> None:
    names["checkpoint"].wait()
    assert sorted(path.name for path in pathlib.Path("ckpts").iterdir()) == ["ckpt_10", "ckpt_8", "ckpt_9"]
    assert int(names["optimizer"].iterations) == 20


def check_loaded(names: Names, printed: str) -> None:
    assert pathlib.Path("digits").is_dir()
    assert names["model"].optimizer.iterations == 2


def check_backup_is_deleted(names: Names, printed: str) -> None:
    assert names["model"].optimizer.iterations > 0
    assert not pathlib.Path("backup").exists()


def check_events(names: Names, printed: str) -> None:
    assert list(pathlib.Path("logs", "train").glob("events*"))


class Block(NamedTuple):
    """How a block is run."""

    names: Callable[[], Names] = dict
    check: Callable[[Names, str], None] = lambda names, printed: None
    fills: tuple[tuple[str, str], ...] = ()
    """(what stands there, what is run in its place)"""
    marks: tuple[Any, ...] = ()


SLOW = (pytest.mark.slow,)
BLOCKS = {
    # Trains on two placements, which public/test_readme_integration.py does as well, in a process of its own.
    "README.md 0": Block(check=check_two_fingerprints, marks=SLOW),
    "README.md 1": Block(compiled, check_backup_is_deleted),
    "checkpoints.md 0": Block(compiled, check_backup_is_deleted, ((", ...]", "]"),)),
    "checkpoints.md 1": Block(looped, check_saved),
    "faq.md 0": Block(lambda: compiled() | {"np": np}, check_three_epochs),
    "index.md 0": Block(lambda: {"x": X, "y": Y}, check_one_fingerprint),
    "export.md 0": Block(trained, check_loaded, (("loss=...", f"loss={LOSS!r}"),)),
    "loop.md 0": Block(check=check_losses_fall, marks=SLOW),  # the next one runs it too
    "loop.md 1": Block(after_the_first_program, check_one_update),
    "processes.md 0": Block(
        compiled, check_backup_is_deleted, (("model = ...", "model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])"),
                                            ("model.compile(...)", f"model.compile('sgd', {LOSS!r})")),
    ),
    "processes.md 1": Block(check=check_one_fingerprint, fills=(("epochs=20", "epochs=1"), ("save_freq=100", "save_freq=1"), FEW_ROWS)),
    "tensorboard.md 0": Block(compiled, check_events),
    "two_runs_differ.md 0": Block(check=check_one_fingerprint),
}  # fmt: skip


def test_every_block_is_run():
    assert {f"{page.name} {number}" for page in PAGES for number, _ in enumerate(python_blocks(page))} == set(BLOCKS)


def lines_of_code(page: pathlib.Path) -> list[str]:
    """Return the lines of the blocks that have a language; the directives of Sphinx have none."""
    blocks = re.findall(r"^```(?:\w+|\{code-cell\} python)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_the_column_of_the_site(page: pathlib.Path):
    assert [line for line in lines_of_code(page) if len(line) > COLUMNS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_a_sentence_about_its_subject(page: pathlib.Path):
    """And not with a heading, a list, a picture, code, or what its reader has of it."""
    begin = re.search(r"^# [^\n]+\n\n(.+?)(?:\n\n|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert begin is not None
    assert re.match(r"[\w`].*[.:]", begin[1], re.DOTALL)
    assert not begin[1].startswith("After this page")


def test_examples_of_the_reference_fit_its_column():
    named = [un, *(getattr(module, name) for module in (un, un.callbacks, un.ray) for name in module.__all__)]
    documented = [part for thing in named for part in (thing, *(vars(thing).values() if isinstance(thing, type) else ()))]
    lines = [line for part in documented for line in (inspect.getdoc(part) or "").splitlines()]
    examples = [line.strip() for line in lines if re.match(r" *(>>>|\.\.\.) ", line)]
    assert len(examples) > 20
    assert [line for line in examples if len(line) > COLUMNS_OF_THE_REFERENCE] == []


def test_the_files_for_clusters_can_be_read():
    page = (ROOT / "docs" / "processes.md").read_text()
    scripts = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert [list(part)[:2] for part in read_manifests(page)] == [["apiVersion", "kind"]] * 3


def read_manifests(page: str) -> list[dict[str, Any]]:
    """Read the files for Kubernetes. Without a kind, what stands there is a part of one."""
    yaml = pytest.importorskip("yaml")
    files = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [part for text in files for part in yaml.safe_load_all(text) if "kind" in part]


@pytest.mark.slow
@pytest.mark.compat
def test_the_files_for_kubernetes_have_the_fields_of_their_kinds():
    """The models of Kubeflow Trainer leave out what they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = {
        "PersistentVolumeClaim": models.IoK8sApiCoreV1PersistentVolumeClaim,
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    manifests = read_manifests((ROOT / "docs" / "processes.md").read_text())
    assert [manifest["kind"] for manifest in manifests] == list(kinds)
    for manifest in manifests:
        assert kinds[manifest["kind"]].from_dict(manifest).to_dict() == manifest


@pytest.fixture
def in_a_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What blocks write goes there."""
    monkeypatch.chdir(tmp_path)
    return


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("name", [pytest.param(name, marks=block.marks) for name, block in BLOCKS.items()])
def test_the_block_runs(name: str, capsys: pytest.CaptureFixture[str]):
    if name in ("README.md 0", "loop.md 0", "loop.md 1", "processes.md 1"):
        pytest.importorskip("sklearn")
    block, (page, number) = BLOCKS[name], name.split()
    text = python_blocks(next(path for path in PAGES if path.name == page))[int(number)]
    for there, instead in block.fills:
        assert there in text
        text = text.replace(there, instead)
    names = block.names()
    capsys.readouterr()
    exec(compile(text, name, "exec"), names)
    block.check(names, capsys.readouterr().out)
