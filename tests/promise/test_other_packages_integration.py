"""Models of other packages have the same bits on one device and on four: the next version of a package is met here before its users meet it."""

import importlib.util

import pytest

from processes import user_python

MODELS = {
    "vit": "keras_hub",
    "bert": "keras_hub",
    "gpt2": "keras_hub",
    "llama": "keras_hub",
    "qwen_moe": "keras_hub",
    "clip": "keras_hub",
    "bayesflow": "bayesflow",
    "keras_rs": "keras_rs",
    "keras_tuner": "keras_tuner",
}
"""The models of `train_others.py`, with their packages. `make packages` installs these."""


@pytest.mark.packages
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_another_package_has_the_same_bits_on_one_device_and_on_four(model):
    if importlib.util.find_spec(MODELS[model]) is None:
        pytest.skip(f"{MODELS[model]} is not installed")
    done = [user_python("train_others.py", model, str(devices), JAX_NUM_CPU_DEVICES="4") for devices in (1, 4)]
    for process in done:
        assert process.returncode == 0, process.stderr
    fingerprints = {process.stdout.split()[-1] for process in done}
    assert len(fingerprints) == 1
