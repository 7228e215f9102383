"""Equations of traced programs are described with their constants, where something is computed with these, and with the user's lines."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono as un
from unisono._src.keras.private.variable_paths import LiveLayers
from unisono._src.keras.record.traced_program import describe_program, is_of_user


def scanned(factors: np.ndarray) -> Any:
    captured = jnp.asarray(factors)
    return lambda x: jax.lax.scan(lambda total, row: (total + row * captured, None), jnp.zeros(3), x)


def called(factors: np.ndarray) -> Any:
    captured = jnp.asarray(factors)
    return jax.jit(lambda x: x * captured)


@pytest.mark.parametrize("make", [scanned, called])
def test_a_constant_is_described_where_something_is_computed_with_it(make):
    ones, others = (
        describe_program(jax.make_jaxpr(make(np.array(factors, "float32")))(np.ones((5, 3), "float32")), LiveLayers())
        for factors in ([0.5, 1, 2], [0.5, 1, 4])
    )
    differing = [(mine, its) for mine, its in zip(ones, others, strict=True) if mine != its]
    assert {mine["primitive"] for mine, _ in differing} <= {"mul", "broadcast_in_dim"}
    mine, its = differing[0]
    assert any(operand.startswith("[0.5, 1, 2] of digest ") for operand in mine["operands"])
    assert any(operand.startswith("[0.5, 1, 4] of digest ") for operand in its["operands"])
    assert mine["line"][0] == __file__
    assert json.loads(json.dumps(ones))[0]["shapes"] == ones[0]["shapes"]


def test_a_number_is_described_by_itself():
    (described,) = describe_program(jax.make_jaxpr(lambda x: x * 0.25)(1.0), LiveLayers())
    assert described["operands"] == ["", "0.25"]


@pytest.mark.parametrize("file", [un.__file__, keras.__file__, json.__file__, "<stdin>"])
def test_files_of_packages_are_not_the_users(file):
    assert not is_of_user(file)


def test_a_script_in_a_folder_named_unisono_is_the_users(tmp_path):
    """A checkout of the project has examples in such a folder."""
    assert is_of_user(str(tmp_path / "unisono" / "train.py"))
