"""One process of tests: eight CPU devices, programs that are kept, and nothing left behind by a test."""

import contextlib
import gc
import os
import re
import signal
import sys

import kept_programs
import quick_compiling

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("UNISONO_TRACEBACK", "full")  # of a test that fails, all frames
kept_programs.keep()
if quick_compiling.is_wanted():
    quick_compiling.ask_for()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):
    import tensorflow  # noqa: F401  # Keras imports it in the middle of a test, and it writes into the environment

import jax

jax.config.update("jax_num_cpu_devices", 8)

import hypothesis
import keras
import numpy as np
import pytest

import breakages
import cpu_time
from left_behind import Found, Namespaces, after_a_while
from unisono._src.engine.xla import determinism, programs
from unisono._src.kernels.native.library import Kernels

hypothesis.settings.register_profile("unisono", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("unisono")


def pytest_addoption(parser):
    parser.addoption(
        "--break", dest="broken", help="break the engine in one of the ways of tests/helpers/breakages.py: some test must fail"
    )


def pytest_configure(config):
    cpu_time.register(config)
    if not hasattr(config, "workerinput"):  # the process that starts the others
        kept_programs.throw_old_away()


def pytest_collection_finish():
    """Collect garbage seldom: Python would look through all of Keras and JAX again and again, a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session")
def namespaces(broken):
    """The classes and modules of Keras and JAX."""
    return Namespaces()


@pytest.fixture(autouse=True)
def nothing_left_behind(namespaces):
    """A test leaves no thread, process, environment variable, setting, or changed class of Keras or JAX behind."""
    before = Found()
    namespaces.note_new()
    yield
    left = [*after_a_while(before), *namespaces.changed()]
    assert not left, "the test has left this behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True, scope="session")
def broken(request):
    """The way in which the engine is broken on purpose, if it is."""
    name = request.config.getoption("broken")
    with pytest.MonkeyPatch.context() as patch:
        if name:
            (breakages.BREAKAGES | breakages.OTHERS)[name](patch)
        yield name


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def compiled_anew():
    """Nothing that was compiled before is found: for tests whose subject is compiling."""
    programs.forget_shared_programs()
    with programs.disable_jax_cache():
        yield
    programs.forget_shared_programs()


@pytest.fixture(scope="module")
def compiled_for_users():
    """Our programs are compiled as they are for users: for tests of which bits XLA's code makes, or whether two programs make the same."""
    with pytest.MonkeyPatch.context() as patch:
        if quick_compiling.is_wanted():
            patch.setitem(determinism.COMPILER_OPTIONS, "cpu", determinism.COMPILER_OPTIONS["cpu"] | quick_compiling.FOR_USERS)
        programs.forget_shared_programs()
        yield
        programs.forget_shared_programs()


@pytest.fixture
def without_native_kernels(monkeypatch):
    """Rewrite programs as where there are no native kernels."""
    rules = re.compile(r"unisono\._src\.kernels\.(?!native)")
    rewrites = [module for name, module in list(sys.modules.items()) if rules.match(name)]
    for module in rewrites:
        if hasattr(module, "load_kernels"):
            monkeypatch.setattr(module, "load_kernels", lambda: Kernels(None, None, "for a test"))
