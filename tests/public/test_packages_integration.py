"""The wheel and the sdist: two builds are equal, and both install and train where there is no compiler."""

import importlib.util
import sys
import tomllib
import zipfile

import keras
import pytest
from fsspec.registry import _registry

import packages
import unisono as un
from processes import python, user_python
from unisono._src.tools import cli

PYPROJECT = tomllib.loads((packages.ROOT / "pyproject.toml").read_text())
EXTRAS = {
    "demo": ("sklearn", "matplotlib"),
    "tf": ("tensorflow",),
    "data": ("grain",),
    "onnx": ("jax2onnx",),
    "tensorboard": ("tensorboardX", "tensorboard"),
    "profile": ("xprof",),
    "orbax": ("orbax.checkpoint",),
    "s3": ("s3fs",),
    "ray": ("ray",),
    "cuda12": ("jax_cuda12_plugin",),
    "cuda13": ("jax_cuda13_plugin",),
    "tpu": ("libtpu",),
    "docs": ("sphinx", "myst_nb", "furo", "sphinx_copybutton"),
    "dev": ("fsspec", "hypothesis", "pytest", "pytest_timeout", "xdist", "nbclient", "ipykernel", "hatchling"),
}
"""The modules that an extra brings."""


@pytest.mark.processes
@pytest.mark.slow
def test_a_wheel_trains_with_kernels_where_there_is_no_compiler(tmp_path):
    """The quick form: dependencies and compiled kernels are those of this environment."""
    pytest.importorskip("hatchling")
    wheel, sdist = packages.build(tmp_path / "sources", keeps_kernels=True)
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith(f"unisono-{un.__version__}-py3-none-linux_")
    assert {name.split("/")[0] for name in names} == {"unisono", f"unisono-{un.__version__}.dist-info"}
    assert any(name.endswith(".so") for name in names)
    assert "unisono/py.typed" in names
    assert sdist.name == f"unisono-{un.__version__}.tar.gz"
    environment = packages.make_environment(tmp_path / "environment", sees_ours=True)
    packages.install(environment, "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    assert packages.try_package(environment, "native kernels for", "whatever extras").startswith(un.__version__)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_two_builds_are_equal_and_both_packages_train_in_a_clean_environment(tmp_path, capsys):
    pytest.importorskip("hatchling")
    packages.main(tmp_path / "dist")
    printed = capsys.readouterr().out
    assert "two builds are equal, byte for byte" in printed
    assert "no native kernels: no C++ compiler was found" in printed


def test_builds_that_differ_are_found(tmp_path):
    for name, content in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.whl").write_text(content)
    files = [[tmp_path / name / "x.whl"] for name in ("a", "b")]
    packages.compare_builds(files[0], files[0])
    with pytest.raises(ValueError, match=r"two builds of x\.whl differ"):
        packages.compare_builds(*files)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_libraries_do_not_depend_on_the_folders_of_headers_and_sources(tmp_path):
    """The environment in which pip builds lies in another folder each time."""
    code = """
import build, pathlib, shutil, sys
folder = pathlib.Path(sys.argv[1])
shutil.copytree(build.find_headers(), folder / "real headers")
(folder / "headers").symlink_to(folder / "real headers")
shutil.copytree(build.HERE, folder / "sources")
first = build.build(folder / "first", ("-O0",))
build.find_headers = lambda: folder / "headers"
build.HERE = folder / "sources"
second = build.build(folder / "second", ("-O0",))
assert [library.read_bytes() for library in first] == [library.read_bytes() for library in second], "the libraries differ"
assert str(folder).encode() not in second[0].read_bytes()
print(len(first))
"""
    done = python("-c", code, str(tmp_path), PYTHONPATH=str(packages.ROOT / "native"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


def test_every_extra_is_known():
    assert set(EXTRAS) == set(PYPROJECT["project"]["optional-dependencies"])


@pytest.mark.compat  # there, tf, data, onnx and s3 are installed
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_modules_of_an_extra_can_be_imported(extra):
    """In a process of their own: some change settings when they are imported."""
    missing = [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"unisono[{extra}] is not installed: {', '.join(missing)}")
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = user_python("-W", "ignore", "-c", code, *EXTRAS[extra])
    assert done.returncode == 0, done.stderr


@pytest.mark.compat
def test_keras_of_tensorflow_is_keras_on_jax():
    """So lines with tf.keras stay as they are."""
    pytest.importorskip("tensorflow")
    code = "import unisono, keras, tensorflow as tf; print(tf.keras.Model is keras.Model, tf.keras.backend.backend())"
    done = user_python("-W", "ignore", "-c", code)
    assert done.stdout == "True jax\n", done.stderr


def new_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def find_on_s3():
    _registry.pop("s3", None)  # an earlier test may have imported the driver
    un.latest_checkpoint("s3://bucket/run")


WITHOUT = {
    "tf": ("tensorflow", lambda folder: un.export(new_model(), folder / "saved", format="saved_model")),
    "onnx": ("jax2onnx", lambda folder: un.export(new_model(), folder / "model.onnx", format="onnx")),
    "tensorboard": ("tensorboardX", lambda folder: un.callbacks.TensorBoard(folder)),
    "s3": ("s3fs", lambda folder: find_on_s3()),
    "ray": ("ray", lambda folder: un.ray.Trainer(print)),
}


@pytest.mark.parametrize("extra", WITHOUT)
def test_without_an_extra_the_error_names_it(extra, tmp_path, monkeypatch):
    module, call = WITHOUT[extra]
    hide(monkeypatch, module)
    with pytest.raises(ImportError, match=rf'pip install "unisono\[{extra}\]"'):
        call(tmp_path)


def test_without_the_extra_the_demo_names_it(tmp_path, monkeypatch, capsys):
    hide(monkeypatch, "sklearn")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert 'the demo needs sklearn. Write: pip install "unisono[demo]"' in capsys.readouterr().err


def hide(monkeypatch, module):
    """Let a module and its parts be not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == module else find_spec(name, *more))
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
