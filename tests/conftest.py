"""One process of tests: eight CPU devices, and nothing left behind by a test."""

import contextlib
import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

with contextlib.suppress(ImportError):
    import tensorflow  # noqa: F401  # Keras imports it in the middle of a test, and it writes into the environment

import jax

jax.config.update("jax_num_cpu_devices", 8)

import hypothesis
import keras
import numpy as np
import pytest

import unisono as un

hypothesis.settings.register_profile("unisono", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("unisono")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """A test must not leak an environment variable, a scope, a dtype policy, or a patched class."""
    environment, init, compile_ = dict(os.environ), keras.Model.__init__, keras.Model.compile
    policy, floatx = keras.config.dtype_policy().name, keras.config.floatx()
    yield
    leaked = {
        name: value for name, value in os.environ.items() if environment.get(name) != value and name != "PYTEST_CURRENT_TEST"
    }
    assert not leaked, f"environment variables leaked: {leaked}"
    assert (keras.config.dtype_policy().name, keras.config.floatx()) == (policy, floatx)
    assert un.get_strategy().num_replicas_in_sync == 1, "a scope was left open"
    assert (keras.Model.__init__, keras.Model.compile) == (init, compile_), "a Keras class was left patched"


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
