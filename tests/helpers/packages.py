"""Builds the wheel and the sdist twice, compares their bytes, and tries both in a fresh environment: python tests/helpers/packages.py out/dist.

The environment has no extras, and the commands in it find no compiler. `make dist` runs this; the newest packages stay in the folder.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv*", "out", "dist", "libraries", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
WITHOUT_KERNELS = "Unisono is built without native kernels: no C++ compiler was found"

TRIED = """
import sys
import unisono as un
import keras
import numpy as np
from unisono._src.tools.audit.audit_report import AuditedRun, AuditReport
from unisono._src.tools.audit.html_report import render_report

expected, extras = sys.argv[1:]
assert str(un.native).startswith(expected), un.native
x, y = np.random.default_rng(0).normal(size=(64, 8, 8, 1)), np.arange(64) % 3


def train(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    return model


models = [train(un.MirroredStrategy(devices=2, replicas=4)), train(un.OneDeviceStrategy(replicas=4))]
assert un.fingerprint(models[0]) == un.fingerprint(models[1])
un.export(models[0], "exported")
assert un.load_exported("exported").predict(x, verbose=0).shape == (64, 3)
audited = AuditedRun("1 device", 1, 1, 1, 0, (1.0,), None, 1.0)
assert "Same bits" in render_report(AuditReport("train.py", (), {}, 8, (audited,), None, (), ()))


def refuse(extra, call):
    try:
        call()
    except ImportError as error:
        assert f'pip install "unisono[{extra}]"' in str(error), error
    else:
        raise SystemExit(f"without unisono[{extra}] there is no error")


if extras == "without extras":
    refuse("tf", lambda: un.export(models[0], "saved", format="saved_model"))
    refuse("onnx", lambda: un.export(models[0], "model.onnx", format="onnx"))
    refuse("tensorboard", lambda: models[0].fit(x, y, callbacks=[un.callbacks.TensorBoard("logs")], verbose=0))
print(un.__version__, un.native)
"""


def build(folder: pathlib.Path, sources: pathlib.Path = ROOT, keeps_kernels: bool = False) -> list[pathlib.Path]:
    """Copy the sources into a folder, build there, and return the wheel and the sdist.

    `keeps_kernels`: kernels that are compiled from these sources already are not compiled again.
    """
    left_out = [name for name in NOT_COPIED if not (keeps_kernels and name == "libraries")]
    shutil.copytree(sources, folder, ignore=shutil.ignore_patterns(*left_out))
    run(sys.executable, "-m", "hatchling", "build", "--directory", "dist", folder=folder)
    wheel, sdist = (next((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return [wheel, sdist]


def compare_builds(first: list[pathlib.Path], second: list[pathlib.Path]) -> None:
    """Raise an error where two builds differ in a byte."""
    for one, other in zip(first, second, strict=True):
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            raise ValueError(f"two builds of {one.name} differ")


def make_environment(folder: pathlib.Path, sees_ours: bool = False) -> str:
    """Return the Python of a fresh environment. `sees_ours`: it finds the dependencies of this Python, so that none is installed."""
    run(sys.executable, "-m", "venv", str(folder))
    if sees_ours:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return str(folder / "bin" / "python")


def install(python: str, *arguments: str) -> str:
    """Install by pip where no compiler is found, and return its log."""
    return run(python, "-m", "pip", "install", "--verbose", *arguments, folder=pathlib.Path(python).parent, without_compiler=True)


def try_package(python: str, kernels: str, extras: str) -> str:
    """Run the command, and a training on two placements, where no compiler is found; return the version and the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        bin_folder = pathlib.Path(python).parent
        version = run(str(bin_folder / "unisono"), "--version", folder=place, without_compiler=True)
        if extras == "without extras":
            refused = run(python, "-m", "unisono", "demo", folder=place, without_compiler=True, code=2)
            assert 'pip install "unisono[demo]"' in refused, refused
        printed = run(python, "-c", TRIED, kernels, extras, folder=place, without_compiler=True)
    last = printed.splitlines()[-1]
    assert version.split() == ["unisono", last.split()[0]], version
    return last


def run(*words: str, folder: pathlib.Path = ROOT, without_compiler: bool = False, code: int = 0) -> str:
    """Run a command and return what it prints; raise an error with that where its exit code is another."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UNISONO_", "XLA_FLAGS", "JAX_"))
    }
    variables |= {name: str(ROOT / "constraints.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
    if without_compiler:
        variables |= {"PATH": str(pathlib.Path(words[0]).parent), "CXX": ""}
    done = subprocess.run(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(words)[:200]} ended with {done.returncode}:\n{done.stdout[-5000:]}")
    return done.stdout


def main(target: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        first = build(place / "first")
        compare_builds(first, build(place / "a folder" / "of another length", sources=place / "first"))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        wheel, sdist = (shutil.copy(package, target) for package in first)
        print(f"two builds are equal, byte for byte:\n  {wheel}\n  {sdist}")
        python = make_environment(place / "environment")
        install(python, str(pathlib.Path(wheel).resolve()))
        print("wheel: ", try_package(python, "native kernels for", "without extras"))
        log = install(python, "--force-reinstall", "--no-deps", str(pathlib.Path(sdist).resolve()))
        assert WITHOUT_KERNELS in log, log[-5000:]
        print("sdist: ", try_package(python, "no native kernels: no C++ compiler was found", "without extras"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=pathlib.Path, nargs="?", default=ROOT / "out" / "dist")
    main(parser.parse_args().target)
