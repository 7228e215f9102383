"""`unisono demo` in a fresh process, as a user starts it."""

import os
import re

import keras
import numpy as np
import pytest

import unisono as un
from processes import user_python as python
from sizes import slow, thorough
from unisono._src.tools import cli
from unisono._src.tools.cli import datasets, demo
from unisono._src.tools.cli.demo import EpochTimes

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

OPENED_BY_PLAIN_KERAS = """
import sys
import keras
import numpy as np
model = keras.saving.load_model(sys.argv[1])
held_out = np.load(sys.argv[2])
print(model.evaluate(held_out["x"], held_out["y"], verbose=0)[1])
assert "unisono" not in sys.modules
"""


@pytest.mark.processes
@pytest.mark.parametrize(("options", "accuracy"), [*slow((["--epochs", "3"], 60)), *thorough(([], 97))])
def test_demo_keeps_its_promises(tmp_path, options, accuracy):
    """One test, so that tests run in parallel do not run the demo once for each worker."""
    folder = tmp_path / "a" / "folder"
    finished = python("-m", "unisono", "demo", *options, "--out", str(folder), timeout=500)
    assert finished.returncode == 0, finished.stderr
    text = finished.stdout
    check_placements(text)
    several, one = (float(figure) for figure in re.findall(r"(\d+\.\d+)%  ", text))
    assert several == one
    assert several > accuracy
    for file in (folder / "digits_curves.png", folder / "digits.keras"):
        assert str(file) in text
    assert (folder / "digits_curves.png").read_bytes().startswith(b"\x89PNG")
    check_plain_keras_opens(folder / "digits.keras", accuracy=several)


def check_placements(text):
    """The same bits, and which device ran which replicas, with Keras' own progress bar in between."""
    first, second = re.findall(r"\b[0-9a-f]{32}\b", text)
    assert first == second
    assert "The fingerprints are equal" in text
    devices = demo.count_cpu_devices(len(os.sched_getaffinity(0)), replicas=8)
    assert [f"{device}" for device in range(devices)] == re.findall(
        r"^  cpu:(\d)  replica.*\n", text.split("cpu:0  replicas 0 to 7")[0], re.MULTILINE
    )
    assert "  cpu:0  replicas 0 to 7, one after another\n" in text
    assert len(re.findall(r"%  +\d+\.\d s +\d+\.\d\d ms  [0-9a-f]{32}$", text, re.MULTILINE)) == 2
    assert demo.WHY_CPU_DEVICES_ARE_NO_FASTER in text
    assert "Epoch 1/" in text
    assert "val_accuracy" in text


def check_plain_keras_opens(model_file, accuracy):
    images = datasets.read_digits()
    held_out = model_file.with_name("held_out.npz")
    np.savez(held_out, x=images.x_test, y=images.y_test)
    opened = python("-c", OPENED_BY_PLAIN_KERAS, str(model_file), str(held_out))
    assert opened.returncode == 0, opened.stderr
    assert round(100 * float(opened.stdout), 2) == accuracy


def test_a_download_that_fails_says_what_was_tried_and_what_to_write(tmp_path, monkeypatch, capsys):
    def load_data():
        raise Exception("URL fetch failure on https://storage.googleapis.com/: None")  # as Keras does

    monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", load_data)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--dataset", "fashion_mnist", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    check_names_what_to_write(capsys.readouterr().err, tmp_path)


def check_names_what_to_write(text, folder):
    for part in ("'fashion_mnist'", "https://", "unisono demo --dataset digits", str(folder / "keras" / "datasets")):
        assert part in text


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_demo_without_a_network_says_what_it_tried_and_what_to_write(tmp_path):
    closed = {"KERAS_HOME": str(tmp_path / "keras"), "https_proxy": "http://127.0.0.1:1"}
    finished = python("-m", "unisono", "demo", "--dataset", "fashion_mnist", "--out", str(tmp_path), **closed)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    check_names_what_to_write(finished.stderr, tmp_path)


def test_demo_refuses_what_it_cannot_do(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    for options, message in (
        (["--epochs", "0"], "--epochs must be 1 or more; received 0"),
        (["--batch-size", "-3"], "--batch-size must be 1 or more; received -3"),
        (["--out", str(tmp_path / "taken")], "taken cannot be made: File exists"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["demo", *options])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_demo_fails_where_the_fingerprints_differ(tmp_path, capsys):
    model = keras.Sequential([keras.Input((1,))])
    history = {"val_accuracy": [0.5]}
    strategy = un.OneDeviceStrategy(replicas=2)
    runs = [demo.DemoRun(strategy, model, history, EpochTimes(), fingerprint) for fingerprint in ("a" * 32, "b" * 32)]
    assert demo.print_report(runs, tmp_path / "x.png", tmp_path / "x.keras") == 1
    assert "DIFFER" in capsys.readouterr().out
    assert demo.print_report(runs[:1] * 2, tmp_path / "x.png", tmp_path / "x.keras") == 0


def test_compiling_and_steps_are_told_apart(tmp_path, capsys):
    """The first epoch of ten steps takes 7 s, 5 of them before its validation; later ones take 2 s and 1.5 s."""
    times = EpochTimes(iter([0, 5, 7, 10, 11.5, 12, 20, 21.5, 22]).__next__)
    times.set_params({"steps": 10})
    run = demo.DemoRun(un.OneDeviceStrategy(replicas=2), keras.Sequential(), {"val_accuracy": [0.5]}, times, "a" * 32)
    printed = []
    for epoch in range(3):
        times.on_epoch_begin(epoch)
        times.on_test_begin()
        times.on_epoch_end(epoch)
        demo.print_report([run, run], tmp_path / "x.png", tmp_path / "x.keras")
        printed.append(capsys.readouterr().out)
    assert "ms" not in printed[0]  # of one epoch nobody knows
    assert demo.WHY_THE_SECOND_COMPILES_LESS not in printed[0]
    assert printed[2].count("50.00%      5.0 s  150.00 ms  aaa") == 2
    assert demo.WHY_THE_SECOND_COMPILES_LESS in printed[2]
    assert demo.WHY_CPU_DEVICES_ARE_NO_FASTER not in printed[2]  # both have one device


@pytest.mark.parametrize(
    ("cores", "replicas", "devices"), [(1, 8, 2), (2, 8, 2), (6, 8, 6), (64, 8, 8), (64, 100, 8), (64, 3, 3), (1, 1, 1)]
)
def test_the_demo_makes_a_cpu_device_for_each_core(cores, replicas, devices):
    assert demo.count_cpu_devices(cores, replicas) == devices


def test_the_curves_of_two_equal_placements_are_drawn(tmp_path):
    """With one replica both strategies have one device."""
    history = {name: [0.5, 0.25] for name in ("loss", "accuracy", "val_loss", "val_accuracy")}
    runs = [demo.DemoRun(un.OneDeviceStrategy(replicas=1), keras.Sequential(), history, EpochTimes(), "a" * 32)] * 2
    demo.draw_curves(tmp_path / "x.png", "a title", runs)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
