"""What a test leaves behind is found, and told by its name."""

from __future__ import annotations

import subprocess
import sys
import threading

import jax
import keras
import pytest

import left_behind
from left_behind import Found, Namespaces, has_children
from threads import in_thread


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(left_behind, "PATIENCE", 0.05)


def test_a_thread():
    before, end = Found(), threading.Event()
    thread = threading.Thread(target=end.wait, name="of the test")
    thread.start()
    (line,) = left_behind.after_a_while(before)
    end.set()
    thread.join()
    assert line.startswith("a thread runs on: <Thread(of the test")
    assert left_behind.after_a_while(before) == []


@pytest.mark.parametrize(
    "start", [lambda popen: popen(), lambda popen: in_thread("starts", popen)], ids=["itself", "by a thread"]
)
def test_a_process(start):
    before = Found()
    with start(lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])) as process:
        assert has_children()
        (line,) = left_behind.after_a_while(before)
        process.kill()
    assert line.startswith(f"a child process runs on: {process.pid}: ")


def test_an_environment_variable_and_a_setting(monkeypatch):
    before = Found()
    monkeypatch.setenv("UNISONO_TRIED", "1")
    with jax.enable_x64(True):
        lines = left_behind.after_a_while(before)
    assert lines == [
        "environment variable UNISONO_TRIED: None before, '1' after",
        "setting jax.config.jax_enable_x64: False before, True after",
    ]


class EqualToAll:
    """Equality says nothing about what a name stands for."""

    __hash__ = None

    def __eq__(self, other):
        return True

    def __call__(self):
        pass


@pytest.mark.parametrize("new", [lambda self: None, EqualToAll()], ids=["another", "one that says it is equal"])
def test_a_name_that_stands_for_something_else(new, monkeypatch):
    namespaces = Namespaces()
    with monkeypatch.context() as patch:
        patch.setattr(keras.layers.Layer, "get_config", new)
        (line,) = namespaces.changed()
        assert line.endswith("Layer.get_config was changed")
        assert namespaces.changed() == [], "each is told once"
    assert len(namespaces.changed()) == 1, "as it was at first is another change"


def test_a_name_that_is_gone(monkeypatch):
    namespaces = Namespaces()
    with monkeypatch.context() as patch:
        patch.delattr(keras.layers.Dense, "call")
        (line,) = namespaces.changed()
        assert line.endswith("Dense.call was changed")
    namespaces.changed()


@pytest.mark.parametrize("owner", [keras.Model, type(jax.numpy.zeros(())), keras.losses])
def test_a_changed_class_or_module(owner, monkeypatch):
    """Of Keras or JAX; what was changed and changed back is not told."""
    namespaces = Namespaces()
    with monkeypatch.context() as patch:
        patch.setattr(owner, "tried", lambda self: None, raising=False)
        (line,) = namespaces.changed()
        assert line.endswith(".tried was changed")
    namespaces.changed()
    with monkeypatch.context() as patch:
        patch.setattr(owner, "tried", lambda self: None, raising=False)
    assert namespaces.changed() == []
