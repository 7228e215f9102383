"""Keras' own tests, each in the scope of a strategy: its layers, losses, metrics, optimizers, callbacks and trainers divide their batches.

python tests/helpers/keras_own_tests.py [--replicas 2] [--devices 1] [FOLDER ... of keras/src] [-- OPTIONS of pytest]

The tests come with Keras' package. A test that is expected to fail in a scope must fail, or the run fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any

import pytest

FOLDERS = (
    "activations", "callbacks", "constraints", "distillation", "dtype_policies", "export", "initializers", "layers", "legacy", "losses",
    "metrics", "models", "optimizers", "quantizers", "regularizers", "saving", "trainers", "utils", "wrappers",
)  # fmt: skip
"""Of keras/src; the others train nothing, or are of backends."""

OTHERWISE = {
    "OrbaxCheckpointTest::test_distributed_checkpoint_functionality": "a distribution of Keras' own is refused in a scope",
    "OrbaxCheckpointTest::test_distributed_checkpoint_resharding": "a distribution of Keras' own is refused in a scope",
    "JAXTrainerCorrectnessTest::test_jit_fit_with_out_shardings_logic_distributed": "a distribution of Keras' own is refused in a scope",
    "test_distributed_datasets_from_function_model_integration": "a dataset that TensorFlow has divided is refused",
    "LoadModelTests::test_basic_load_float64": "float64 variables are refused",
    "test_sparse_gradients_loss_scale_optimizer_sgd": "an optimizer with a loss scale is for replica code",
    "FunctionalTest::test_warning_for_mismatched_inputs_structure": "a model is traced twice, and Keras warns in both traces",
}
"""Tests that fail in a scope, and why."""

ABSENT = {"SavingBattleTest::test_legacy_load_skips_missing_nested_containers": "its file is not in Keras' package"}
"""Tests that fail without a scope too."""

NEEDS_PANDAS = "array_data_adapter_test.py"
REPLICAS, DEVICES = "UNISONO_TESTS_REPLICAS", "UNISONO_TESTS_DEVICES"


def skip_if_backend(name: str, reason: str) -> pytest.MarkDecorator:
    """Return the mark that Keras' tests take from the conftest.py of its repository, which is not in its package."""
    return pytest.mark.skipif(name == "jax", reason=reason)


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{mark}: of Keras")
    conftest = types.ModuleType("conftest")
    conftest.__dict__["skip_if_backend"] = skip_if_backend
    sys.modules["conftest"] = conftest
    import jax

    jax.config.update("jax_num_cpu_devices", max(2, int(os.environ[DEVICES])))


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    is_left_out = collection_path.name == NEEDS_PANDAS and importlib.util.find_spec("pandas") is None
    return True if is_left_out else None  # None leaves it to other plugins


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        for name, why in (OTHERWISE | ABSENT).items():
            if item.nodeid.endswith(name):
                item.add_marker(pytest.mark.xfail(reason=why, strict=True))


@pytest.fixture(autouse=True)
def in_scope():
    import unisono as un

    with un.MirroredStrategy(devices=int(os.environ[DEVICES]), replicas=int(os.environ[REPLICAS])).scope():
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    given, options = parser.parse_args(words[:end]), words[end + 1 :]
    here = pathlib.Path(__file__)
    os.environ |= {REPLICAS: str(given.replicas), DEVICES: str(given.devices), "KERAS_BACKEND": "jax"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(here.parent))
    source = pathlib.Path(str(importlib.util.find_spec("keras").origin)).parent / "src"  # pyright: ignore[reportOptionalMemberAccess]
    with tempfile.TemporaryDirectory() as folder:
        settings = ["-c", "/dev/null", "--rootdir", folder, "-p", here.stem, "-p", "no:cacheprovider", "--import-mode=importlib"]
        return pytest.main(
            [*settings, "-q", "-rfEx", "-W", "ignore", "-n", "2", *options, *(str(source / name) for name in given.folders)]
        )


if __name__ == "__main__":
    sys.exit(main())
