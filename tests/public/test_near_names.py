"""A misspelt argument is an error that says the near name."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import warnings
import zipfile

import keras
import numpy as np
import pytest

import unisono as un
from unisono._src.keras.strategy.known_variables import SET_BY_COMMANDS, SET_BY_USERS, warn_of_misspelt_variables
from unisono._src.near_names import says_near_names

ONE = un.OneDeviceStrategy(replicas=2)


def checkpoint():
    return un.Checkpoint(count=un.OneDeviceStrategy().distribute_dataset([np.zeros(4)]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: un.value_and_grad(lambda: 0.0, [], hasaux=True), "value_and_grad received hasaux=, and takes fn=, variables= and has_aux=. "
         "Write has_aux= for hasaux=."),
        (lambda: un.function(eagerly=True), "function received eagerly=, and takes fn=, eager= and record=. Write eager= for eagerly=."),
        (lambda: un.compute_average_loss(np.ones(3), globalbatch_size=3), "Write global_batch_size= for globalbatch_size=."),
        (lambda: un.scale_regularization_loss(regularisation_loss=3), "Write regularization_loss= for regularisation_loss=."),
        (lambda: un.export(None, "path", input=3, overwrites=True), "export received input= and overwrites=, and takes model=, path=, format=, "
         "overwrite= and inputs=. Write inputs= for input= and overwrite= for overwrites=."),
        (lambda: un.load_exported(paths="there"), "Write path= for paths=."),
        (lambda: un.latest_checkpoint(dir="there"), "latest_checkpoint received dir=, and takes directory=."),
        (lambda: un.replicate(values=3), "Write value= for values=."),
        (lambda: ONE.distribute_dataset([], batchsize=3), "Strategy.distribute_dataset received batchsize=, and takes dataset=, batch_size= and "
         "shuffle=. Write batch_size= for batchsize=."),
        (lambda: ONE.experimental_distribute_dataset([], suffle=True), "Write shuffle= for suffle=."),
        (lambda: ONE.distribute_datasets_from_function(datasetfn=len), "Write dataset_fn= for datasetfn=."),
        (lambda: ONE.gather(3, axes=0), "Write axis= for axes=."),
        (lambda: checkpoint().save("there", keeps=2), "Checkpoint.save received keeps=, and takes path= and keep=. Write keep= for keeps=."),
        (lambda: checkpoint().restore("there", partially=True), "Write partial= for partially=."),
        (lambda: checkpoint().saving_on_signal("there", signal=["SIGTERM"]), "Write signals= for signal=."),
        (lambda: un.callbacks.BackupAndRestore("there", savefreq=3), "BackupAndRestore received savefreq=, and takes backup_dir=, save_freq=, "),
        (lambda: un.callbacks.TensorBoard(logdir="there"), "Write log_dir= for logdir=."),
        (lambda: un.MultiWorkerMirroredStrategy(proceses=2), "Write MultiWorkerMirroredStrategy(processes=2)."),
    ],
)  # fmt: skip
def test_the_near_name_is_said(call, message):
    with pytest.raises(TypeError, match=re.escape(message)) as raised:
        call()
    assert raised.value.__suppress_context__


def test_other_errors_pass_as_they_are():
    @says_near_names
    def call(first: int, *, second: int = 0) -> int:
        return first + second

    assert call(1, second=2) == 3
    assert str(inspect.signature(call)) == "(first: 'int', *, second: 'int' = 0) -> 'int'"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        call()
    with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
        call(1, 2)
    with pytest.raises(TypeError, match="unsupported operand"):
        call(None)
    with pytest.raises(TypeError, match=r"received far=, and takes first= and second=\.$"):
        call(1, far=2)


def test_what_a_loop_calls_at_every_step_is_not_wrapped():
    for call in (un.Strategy.run, un.Strategy.reduce, un.Strategy.local_results):
        assert not hasattr(call, "__wrapped__")


def restored_with_another_optimizer(tmp_path):
    def checkpoint(beta):
        optimizer = keras.optimizers.Adam(beta_1=beta)
        optimizer.build([keras.Variable(0.0)])
        return un.Checkpoint(optimizer=optimizer)

    saved = checkpoint(0.9)
    path = saved.save(tmp_path / "ckpt")
    saved.wait()
    return checkpoint(0.8).restore(path)


def newest_beside_a_damaged_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "good.keras", "w") as file:
        file.writestr("config.json", "{}")
    (tmp_path / "damaged.weights.h5").write_text("not HDF5")
    return un.latest_checkpoint(tmp_path)


def written_without_histograms(tmp_path):
    return un.callbacks.TensorBoard(tmp_path, write_images=True)


def called_with_python_numbers(_):
    @un.function
    def call(value):
        return value

    for value in range(3):
        call(value)


@pytest.mark.parametrize(
    "call",
    [restored_with_another_optimizer, newest_beside_a_damaged_one, written_without_histograms, called_with_python_numbers],
)
def test_warnings_name_the_line_that_calls(tmp_path, call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(tmp_path)
    assert {warning.filename for warning in said if warning.category is UserWarning} == {__file__}


def test_a_misspelt_environment_variable_is_warned_of_once(monkeypatch):
    for name in ("UNISONO_PROCESES", "UNISONO_COORDINATOR_ADDRESS", "UNISONO_HOME", "UNISONO_OTHER_PROGRAM"):
        monkeypatch.setenv(name, "2")
    warn_of_misspelt_variables.cache_clear()
    with pytest.warns(UserWarning, match=r"^Unisono does not read") as said:
        un.OneDeviceStrategy()
    un.OneDeviceStrategy()
    assert [(str(warning.message), warning.filename) for warning in said] == [
        (f"Unisono does not read the environment variable UNISONO_{name}. Write UNISONO_{right}, if that is meant.", __file__)
        for name, right in (("COORDINATOR_ADDRESS", "COORDINATOR"), ("PROCESES", "PROCESSES"))
    ]


def test_all_environment_variables_that_the_source_reads_are_known():
    source = pathlib.Path(un.__file__).parent
    texts = {
        node.value
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {text for text in texts if re.fullmatch("UNISONO_[A-Z_]+", text)} == {*SET_BY_USERS, *SET_BY_COMMANDS}
    described = (source.parents[1] / "docs" / "api.md").read_text()
    assert not [name for name in (*SET_BY_USERS, *SET_BY_COMMANDS) if f"`{name}`" not in described]
