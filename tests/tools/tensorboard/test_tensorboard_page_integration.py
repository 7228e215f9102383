"""What a reader sees who opens TensorBoard: in headless Chromium, from `pip install tensorboard` alone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import time
import urllib.request

import keras
import numpy as np
import pytest
from keras import layers

from browser import CHROMIUM, Browser
from processes import environment
from sizes import mostly_slow
from trainings import on, rows, run
from unisono._src.tools.tensorboard.callback import TensorBoard

SECONDS = 120

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="no TensorBoard: pip install tensorboard"),
]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    """Of a training on three devices, with everything that there is to write."""
    directory = tmp_path_factory.mktemp("logs")
    board = TensorBoard(directory, histogram_freq=1, write_images=True, update_freq=2, profile_batch=3, embeddings_freq=1)

    def make():
        x = keras.Input((4,), dtype="int32")
        h = layers.Flatten()(layers.Embedding(10, 3, name="words")(x))
        model = keras.Model(x, layers.Dense(2, name="scores")(h))
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
        return model

    x, y = np.arange(160).reshape(40, 4) % 10, rows(40, 2)
    fit = lambda model: model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y), callbacks=[board])
    history = run(make, fit, on(3)).logs
    return directory, history


@pytest.fixture(scope="module")
def address(log_dir):
    """Of a TensorBoard that shows it."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir[0]), "--port", "0", "--host", "127.0.0.1"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
                if found:
                    break
            else:
                pytest.fail("TensorBoard did not start: " + "".join(said))
            loaded(found[0])
            yield found[0]
        finally:
            process.terminate()
            process.wait(SECONDS)


def asked(address, path):
    with urllib.request.urlopen(f"{address}/data/{path}", timeout=SECONDS) as answer:
        return json.loads(answer.read())


def loaded(address):
    """Waits until it has read both runs."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if {"train", "validation"} <= set(asked(address, "plugin/scalars/tags")):
                return
        time.sleep(0.2)
    pytest.fail("TensorBoard did not find the runs")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


SHOWN = {
    "timeseries": ["batch_loss", "epoch_loss", "epoch_learning_rate", "epoch_loss_scale", "epoch_images_per_second"],
    "scalars": ["batch_loss", "epoch_loss", "evaluation_loss_vs_iterations"],
    "graphs": ["words", "flatten", "scores"],
    "histograms": ["words/embeddings/histogram", "scores/kernel/histogram"],
    "images": ["scores/kernel/image"],
}


@pytest.mark.parametrize("tab", mostly_slow(SHOWN, "scalars", "histograms"))
def test_the_page_shows(address, browser, tab):
    text = browser.text(f"{address}/#{tab}", SHOWN[tab])
    assert [name for name in SHOWN[tab] if name not in text] == []
    assert "failed" not in text
    assert "No dashboards are active" not in text


def test_the_numbers_are_those_of_the_history(log_dir, address):
    _, history = log_dir
    for of, name in (("train", "loss"), ("validation", "val_loss")):
        points = asked(address, f"plugin/scalars/scalars?run={of}&tag=epoch_loss")
        assert [(step, value) for _, step, value in points] == list(enumerate(history[name]))


def test_the_projector_reads_the_tables(address):
    """It looks for them in a thread of its own."""
    until = time.monotonic() + SECONDS
    while not asked(address, "plugins_listing")["projector"]["enabled"] and time.monotonic() < until:
        time.sleep(0.5)
    (run_name,) = asked(address, "plugin/projector/runs")
    found = asked(address, f"plugin/projector/info?run={run_name}")["embeddings"]
    assert [(table["tensorName"], table["tensorShape"]) for table in found] == [
        ("words/epoch_00000", [10, 3]),
        ("words/epoch_00001", [10, 3]),
    ]
