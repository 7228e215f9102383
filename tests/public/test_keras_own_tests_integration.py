"""Keras' own tests run in the scope of a strategy: `make keras-tests` runs all of them."""

import re

import pytest

from processes import HERE, python

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = str(HERE / "keras_own_tests.py")


def test_layers_train_in_a_scope():
    done = python(PROGRAM, "layers/activations", "--", "-n", "0")
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^\d\d passed", done.stdout.splitlines()[-1])


def test_what_fails_in_a_scope_is_named():
    done = python(PROGRAM, "saving/saving_api_test.py", "--", "-n", "0", "-k", "test_basic_load_float64")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "float64 variables are refused" in done.stdout
    assert "1 xfailed" in done.stdout.splitlines()[-1]
