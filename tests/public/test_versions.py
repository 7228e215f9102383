"""The versions of Keras and JAX with which Unisono works are said by the check, by pyproject.toml, by the pages and by the Makefile alike."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import tomllib
import warnings

import jaxlib.version
import pytest

import unisono as un
from unisono._src import versions
from unisono._src.versions import WINDOWS

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KERAS, JAX = WINDOWS


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    """No version is tried on request, as `make latest` does."""
    monkeypatch.delenv("UNISONO_VERSIONS", raising=False)


@pytest.fixture
def unchecked():
    """The installed versions are checked when a name is next used."""
    versions.check_versions.cache_clear()
    yield
    versions.check_versions.cache_clear()


def read_pins(file: str) -> dict[str, str]:
    """Return the exact versions of a file of constraints."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE))


def test_pyproject_says_the_same():
    needed = {re.match(r"[\w-]+", text)[0]: text for text in PROJECT["project"]["dependencies"]}
    assert [needed[window.package] for window in WINDOWS] == [window.requirement for window in WINDOWS]


def test_kernels_are_built_for_the_oldest_jaxlib():
    """XLA loads kernels that were compiled for an older version of its interface, and not those for a newer one."""
    assert f"jaxlib=={JAX.oldest}" in PROJECT["build-system"]["requires"]


def test_both_ends_of_the_window_are_tried():
    assert read_pins("constraints.txt")["jax"] == JAX.oldest == JAX.tried[0]
    assert read_pins("constraints-newest.txt")["jax"] == JAX.tried[-1]
    assert "jaxlib" not in read_pins("constraints-newest.txt")  # that of the kernels is another one
    makefile = (ROOT / "Makefile").read_text()
    assert f"KERAS := keras=={KERAS.tried[-1]}\n" in makefile
    assert f"OLDEST_KERAS := keras=={KERAS.oldest}\n" in makefile
    assert KERAS.oldest == KERAS.tried[0]


def test_pages_say_the_same():
    page = (ROOT / "docs" / "install.md").read_text()
    of_keras = ".".join(KERAS.oldest.split(".")[:2])
    newest_jax = ".".join(JAX.tried[-1].split(".")[:2])
    assert f"Keras {of_keras} on JAX {JAX.oldest} to {newest_jax}" in page


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.1"])
def test_what_was_tried_passes_without_a_word(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        JAX.check(version)


@pytest.mark.parametrize("version", ["0.10.1", "0.9.2", "0.13.0", "0.13.0rc1", "0.13", "1.0"])
def test_what_is_outside_is_refused_by_the_window(version):
    said = re.escape(f"Unisono works with jax>=0.10.2,<0.13, and this is jax {version}. Unisono uses private parts of jax, which")
    advice = f"pip install 'jax>=0.10.2,<0.13'. To try {version} all the same, set UNISONO_VERSIONS=any"
    with pytest.raises(ImportError, match=f"{said}(?s:.*){advice}"):
        JAX.check(version)


@pytest.mark.parametrize("version", ["0.13.0", "0.12.7"])
def test_on_request_any_version_passes_without_a_word(monkeypatch, version):
    monkeypatch.setenv("UNISONO_VERSIONS", "any")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        JAX.check(version)


@pytest.mark.parametrize("version", ["3.15.2", "3.15.7", "3.15.2.dev20261101"])
def test_an_untried_patch_release_is_warned_of(version):
    said = f"Unisono was not tried with keras {version}, but with 3.15.0, 3.15.1. (?s:.*)Install a release that was tried if something"
    with pytest.warns(UserWarning, match=said):
        KERAS.check(version)


def test_the_warning_comes_once_and_names_the_line_of_the_user(monkeypatch, unchecked):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{WINDOWS[package == 'jax'].tried[-1]}9")
    with warnings.catch_warnings(record=True, action="always") as said:
        un.__getattr__("MirroredStrategy")
        un.__getattr__("OneDeviceStrategy")
    assert [str(warning.message).partition(",")[0] for warning in said] == [
        "Unisono was not tried with keras 3.15.19",
        "Unisono was not tried with jax 0.12.0.19",
    ]
    assert {warning.filename for warning in said} == {__file__}


@pytest.mark.parametrize(
    ("installed", "error"),
    [
        ({"keras": "3.16.0"}, "this is keras 3.16.0"),
        ({"keras-nightly": "3.16.0.dev2026102704"}, "this is keras 3.16.0.dev2026102704"),
        ({}, "keras>=3.15.0,<3.16, which is not installed"),
    ],
)
def test_a_name_of_unisono_is_not_imported_for_another_keras(monkeypatch, unchecked, installed, error):
    """Private parts that have gone would fail with less clear words."""

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    for _ in range(2):
        with pytest.raises(ImportError, match=error):
            un.__getattr__("MirroredStrategy")


def test_the_installed_versions_were_tried():
    """With others, read what `jax_private` and `keras_private` use in their sources, run all tests, and add them to `WINDOWS`."""
    installed = {window.package: importlib.metadata.version(window.package) for window in WINDOWS}
    assert [window.package for window in WINDOWS if installed[window.package] not in window.tried] == [], installed
    assert jaxlib.version.__version__ == installed["jax"]
