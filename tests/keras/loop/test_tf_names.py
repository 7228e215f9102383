"""Names of older programs exist while a scope or replica code runs, wherever it is entered first."""

import jax
import pytest

from unisono._src.keras.loop import tf_names


@pytest.mark.parametrize("is_traced", [False, True])
def test_arrays_have_numpy_in_a_scope(is_traced):
    """Also where a process enters no scope before its first replica code, which is traced."""
    tf_names.find_array_class.cache_clear()
    seen = []

    def look(x):
        with tf_names.NAMES:
            seen.append(hasattr(array, "numpy"))
        return x

    array = jax.numpy.ones(3)
    (jax.make_jaxpr(look) if is_traced else look)(1.0)
    assert seen == [True]
    assert not hasattr(array, "numpy")
