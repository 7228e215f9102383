"""The same bits on GPU: what is said to XLA, and when. There is no GPU here, so the flags are what is tested."""

from __future__ import annotations

import jax
import keras
import pytest
from keras import layers

import unisono as un
from unisono._src.engine.xla import determinism

FLAG = "--xla_gpu_deterministic_ops=true"


@pytest.fixture
def gpu_to_be_found(monkeypatch):
    monkeypatch.setattr(determinism, "can_find_gpu", lambda: True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", FLAG),
        ("--xla_dump_to=here", f"--xla_dump_to=here {FLAG}"),
        ("--xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
        ("--xla_gpu_autotune_level=4", f"--xla_gpu_autotune_level=4 {FLAG}"),
        (FLAG, FLAG),
    ],
)
def test_flags_are_added_and_what_the_user_said_stays(before, after, gpu_to_be_found, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", before)
    determinism.add_missing_flags()
    assert determinism.os.environ["XLA_FLAGS"] == after


def test_nothing_is_set_where_no_gpu_can_be_found(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(determinism, "can_find_gpu", lambda: False)
    determinism.add_missing_flags()
    assert determinism.os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize(("platforms", "found"), [("", True), ("cuda,cpu", True), ("cpu", False)])
def test_a_gpu_may_be_found_where_its_plugin_is_and_is_allowed(platforms, found, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(determinism.importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    assert determinism.can_find_gpu() == found
    monkeypatch.setattr(determinism.importlib.util, "find_spec", lambda name: None)
    assert not determinism.can_find_gpu()


def test_a_gpu_that_runs_without_them_is_refused_with_the_line_to_write(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_deterministic_ops=false")
    with pytest.raises(RuntimeError, match=r"XLA_FLAGS='--xla_gpu_deterministic_ops=true'(?s:.*)deterministic=False"):
        determinism.check_flags({"gpu"})
    determinism.check_flags({"cpu"})
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    determinism.check_flags({"gpu"})


def test_the_options_for_a_gpu_are_known_to_this_jaxlib(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    options = determinism.get_compiler_options("gpu")
    assert options.keys() == {"xla_allow_excess_precision", determinism.COMMAND_BUFFERS, determinism.TRITON_PRODUCTS}
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile(compiler_options=options)(1.0) == 2
    for name, message in (
        (determinism.COMMAND_BUFFERS, "not a valid enum value"),
        (determinism.TRITON_PRODUCTS, "is not a valid bool"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            lowered.compile(compiler_options=options | {name: "NO_SUCH_VALUE"})


def test_the_options_for_a_gpu_leave_the_users_flags_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG} --{determinism.COMMAND_BUFFERS}=FUSION --{determinism.TRITON_PRODUCTS}=true")
    assert determinism.get_compiler_options("gpu") == {"xla_allow_excess_precision": False}


def test_where_kernels_are_measured_triton_may_write_products(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert determinism.get_compiler_options("gpu").keys() == {"xla_allow_excess_precision", determinism.COMMAND_BUFFERS}


@pytest.mark.parametrize(
    ("value", "deterministic", "message"),
    [("1", False, "gives that up"), ("true", False, "gives that up"), ("0", True, "Write deterministic=False")],
)
def test_the_switch_of_tensorflow_is_answered(value, deterministic, message, monkeypatch):
    monkeypatch.setenv("TF_DETERMINISTIC_OPS", value)
    with pytest.raises(ValueError, match=message):
        un.OneDeviceStrategy(replicas=2, deterministic=deterministic)
    assert un.OneDeviceStrategy(replicas=2, deterministic=not deterministic).deterministic is not deterministic


def test_fingerprints_of_what_promises_nothing_say_so():
    def fingerprint(**options):
        keras.utils.set_random_seed(0)
        with un.OneDeviceStrategy(replicas=2, **options).scope():
            return un.fingerprint(keras.Sequential([layers.Input((3,)), layers.Dense(2)]))

    assert fingerprint(deterministic=False) == "unpromised-" + fingerprint()
